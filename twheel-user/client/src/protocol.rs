//! The messages between twheel and programs, byte for byte as `docs/offload.md` describes them.
//!
//! Numbers are in the machine's byte order: both ends are on one machine. A packet is a [`Header`]
//! and its entries, without anything between them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Version of these messages.
pub const VERSION: u16 = 1;
/// Most entries of a packet.
pub const BATCH: usize = 1_000;
/// Most sockets of a packet (`SCM_MAX_FD` in `include/net/scm.h`).
pub const SOCKETS: usize = 253;
/// No packet has more bytes.
pub const MAX_PACKET: usize = size_of::<Header>() + BATCH * size_of::<Request>();

/// What every packet begins with: 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// [`VERSION`].
    pub version: u16,
    /// A [`Kind`].
    pub kind: u16,
    /// Number of entries that follow.
    pub entries: u32,
    /// Of requests: the program's choice, and the same in the reply. Of others 0.
    pub number: u64,
}

/// Kinds of packets.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// To twheel: [`Request`]s.
    Requests = 1,
    /// From twheel: a [`Reply`] for each request of a packet, in order.
    Replies = 2,
    /// From twheel: [`Event`]s.
    Events = 3,
    /// From twheel, before all else: a [`Welcome`].
    Welcome = 4,
}

/// What twheel is like: 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Welcome {
    /// Tells this flow table from others. While it stays, [`Op::Reclaim`] works.
    pub table: u64,
    /// How late an event may be, microseconds, if both processes run when they want to.
    pub late: u64,
    /// The longest timeout, milliseconds.
    pub longest: u64,
    /// Most registrations of this program.
    pub most: u64,
}

/// A request: 80 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Request {
    /// An [`Op`].
    pub op: u8,
    /// What counts as life: bits of [`life`].
    pub life: u8,
    /// What is done at expiry: an [`Action`].
    pub action: u8,
    /// [`ENDPOINTS`] or [`TAGGED`], or 0.
    pub flags: u8,
    /// Milliseconds, at least 1; of a restart 0: as before.
    pub timeout: u32,
    /// The registration, as the reply to its start told; of a start 0.
    pub id: u64,
    /// Of a reclaim: the socket's cookie, as that reply told; else 0.
    pub cookie: u64,
    /// Of a reclaim: the token, as that reply told; else 0.
    pub token: u64,
    /// Given back with the event. With [`TAGGED`]: that of the start.
    pub tag: u64,
    /// With [`ENDPOINTS`]: the program's own address, IPv4 ones as IPv6 (RFC 4291, 2.5.5.2).
    pub local: [u8; 16],
    /// Likewise the other one.
    pub remote: [u8; 16],
    /// Port of the first.
    pub local_port: u16,
    /// Port of the second.
    pub remote_port: u16,
    /// Of [`Op::Start`]: for how long the connection has been idle already, milliseconds. Of
    /// [`Op::Restart`]: for how long the request has waited. The timeout counts from then.
    pub idle: u32,
}

/// What is asked for, by the names of Varghese and Lauck's paper where it has them.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// START_TIMER. The socket is among the packet's `SCM_RIGHTS`, in the order of the starts; or
    /// with [`ENDPOINTS`] the connection is named.
    Start = 1,
    /// Stops the timer and starts it again, with the same or another timeout.
    Restart = 2,
    /// STOP_TIMER.
    Stop = 3,
    /// After twheel has been restarted: the program still wants this registration.
    Reclaim = 4,
}

impl Op {
    /// From its number.
    pub fn from_raw(raw: u8) -> Option<Self> {
        [Self::Start, Self::Restart, Self::Stop, Self::Reclaim]
            .into_iter()
            .find(|op| *op as u8 == raw)
    }
}

/// What is done when a connection has been idle for its timeout. In each case the program is told.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// Nothing else.
    #[default]
    Notify = 0,
    /// The program's client shuts the socket down, both ways.
    Shutdown = 1,
    /// twheel has the kernel abort the connection (`SOCK_DESTROY`).
    Destroy = 2,
}

impl Action {
    /// From its number.
    pub fn from_raw(raw: u8) -> Option<Self> {
        [Self::Notify, Self::Shutdown, Self::Destroy]
            .into_iter()
            .find(|action| *action as u8 == raw)
    }
}

/// Of a restart or stop: the registration has this tag, too. A later one of the same connection can have
/// the same id.
pub const TAGGED: u8 = 2;

/// Of a [`Request`]: the connection is named by its endpoints, for which the program must have
/// CAP_NET_ADMIN.
pub const ENDPOINTS: u8 = 1;

/// Bits of what counts as life.
pub mod life {
    /// Data from the other end.
    pub const DATA_IN: u8 = 1;
    /// Data from the program's end.
    pub const DATA_OUT: u8 = 2;
    /// Any packet, also without data: acknowledgements, keepalive probes.
    pub const ANY: u8 = 4;
    /// All bits.
    pub const ALL: u8 = 7;
}

/// The answer to a request: 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Reply {
    /// 0, or an error number of Linux: `docs/offload.md` says when which.
    pub error: u32,
    /// 0.
    pub reserved: u32,
    /// The registration.
    pub id: u64,
    /// The socket's cookie (`SO_COOKIE`); 0: unknown.
    pub cookie: u64,
    /// With it the program reclaims the registration.
    pub token: u64,
}

/// The end of a registration: 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Event {
    /// An [`Outcome`].
    pub what: u32,
    /// Of what expired: for how long it had been idle, milliseconds.
    pub idle: u32,
    /// The registration. It is over.
    pub id: u64,
    /// Its tag.
    pub tag: u64,
    /// Its socket's cookie.
    pub cookie: u64,
}

/// How a registration ended.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The connection was idle for its timeout.
    Expired = 1,
    /// The connection has ended, or was taken out of the table.
    Closed = 2,
    /// twheel cannot tell: its packets do not pass an interface that it watches; or the connection lives
    /// although it seemed to end, or its flow was deleted; or the kernel could not be asked.
    Unseen = 3,
}

impl Outcome {
    /// From its number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Expired, Self::Closed, Self::Unseen]
            .into_iter()
            .find(|outcome| *outcome as u32 == raw)
    }
}

const _: () = assert!(
    size_of::<Header>() == 16
        && size_of::<Welcome>() == 32
        && size_of::<Request>() == 80
        && size_of::<Reply>() == 32
        && size_of::<Event>() == 32
);

impl Request {
    /// A request of which all else is 0.
    pub fn new(op: Op) -> Self {
        Self {
            op: op as u8,
            ..Self::new_zeroed()
        }
    }

    /// The endpoints that it names: the program's own, and the other one.
    pub fn endpoints(&self) -> (SocketAddr, SocketAddr) {
        let of = |address: [u8; 16], port| {
            let address = IpAddr::V6(Ipv6Addr::from(address)).to_canonical();
            SocketAddr::new(address, port)
        };
        (
            of(self.local, self.local_port),
            of(self.remote, self.remote_port),
        )
    }

    /// Names the endpoints.
    pub fn name(&mut self, local: SocketAddr, remote: SocketAddr) {
        let octets = |address: IpAddr| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        self.flags |= ENDPOINTS;
        (self.local, self.local_port) = (octets(local.ip()), local.port());
        (self.remote, self.remote_port) = (octets(remote.ip()), remote.port());
    }
}

/// The entries of a packet, and its number, if it is of this kind.
///
/// # Errors
///
/// An error number of Linux: EPROTO if it is no such packet, EPROTONOSUPPORT if it is of another
/// version, E2BIG if it has more than [`BATCH`] entries.
pub fn read<T: FromBytes + Immutable>(packet: &[u8], kind: Kind) -> Result<(u64, Vec<T>), i32> {
    let (header, rest) = Header::read_from_prefix(packet).map_err(|_| libc::EPROTO)?;
    if header.version != VERSION {
        return Err(libc::EPROTONOSUPPORT);
    }
    let entries = header.entries as usize;
    if header.kind != kind as u16 || entries == 0 {
        return Err(libc::EPROTO);
    }
    if entries > BATCH {
        return Err(libc::E2BIG);
    }
    if rest.len() != entries * size_of::<T>() {
        return Err(libc::EPROTO);
    }
    let all = rest.chunks_exact(size_of::<T>());
    let all = all.map_while(|entry| T::read_from_bytes(entry).ok());
    Ok((header.number, all.collect()))
}

/// The kind of a packet, by its number; `None` if it is too short.
pub fn kind(packet: &[u8]) -> Option<u16> {
    let (header, _) = Header::read_from_prefix(packet).ok()?;
    Some(header.kind)
}

/// Writes a packet of these entries.
pub fn write<T: IntoBytes + Immutable>(kind: Kind, number: u64, entries: &[T]) -> Vec<u8> {
    let header = Header {
        version: VERSION,
        kind: kind as u16,
        entries: entries.len() as u32,
        number,
    };
    [header.as_bytes(), entries.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tag: u64) -> Request {
        let mut request = Request::new(Op::Start);
        request.tag = tag;
        request.name(
            "10.0.0.1:80".parse().unwrap(),
            "[2001:db8::1]:4000".parse().unwrap(),
        );
        request
    }

    fn refused(packet: &[u8]) -> Option<i32> {
        read::<Request>(packet, Kind::Requests).err()
    }

    #[test]
    fn a_packet_is_read_as_it_was_written() {
        let all = [request(7), request(8)];
        let (number, all) =
            read::<Request>(&write(Kind::Requests, 5, &all), Kind::Requests).unwrap();
        assert_eq!((number, all.len(), all[1].tag), (5, 2, 8));
        let (local, remote) = all[0].endpoints();
        assert_eq!(local, "10.0.0.1:80".parse().unwrap());
        assert_eq!(remote, "[2001:db8::1]:4000".parse().unwrap());
    }

    #[test]
    fn what_is_no_packet_is_refused() {
        let good = write(Kind::Requests, 5, &[request(7)]);
        for cut in 0..good.len() {
            assert_eq!(refused(&good[..cut]), Some(libc::EPROTO));
        }
        assert_eq!(refused(&[&good[..], &[0]].concat()), Some(libc::EPROTO));
        let with = |at: usize, byte| {
            let mut packet = good.clone();
            packet[at] = byte;
            refused(&packet)
        };
        assert_eq!(with(0, 2), Some(libc::EPROTONOSUPPORT));
        assert_eq!(with(2, Kind::Replies as u8), Some(libc::EPROTO));
        assert_eq!(with(4, 0), Some(libc::EPROTO));
        assert_eq!(with(7, 1), Some(libc::E2BIG));
        assert_eq!(with(4, 1), None);
    }

    #[test]
    fn numbers_are_those_of_the_document() {
        for (op, number) in [
            (Op::Start, 1),
            (Op::Restart, 2),
            (Op::Stop, 3),
            (Op::Reclaim, 4),
        ] {
            assert_eq!(Op::from_raw(number), Some(op));
        }
        for (action, number) in [
            (Action::Notify, 0),
            (Action::Shutdown, 1),
            (Action::Destroy, 2),
        ] {
            assert_eq!(Action::from_raw(number), Some(action));
        }
        for (outcome, number) in [
            (Outcome::Expired, 1),
            (Outcome::Closed, 2),
            (Outcome::Unseen, 3),
        ] {
            assert_eq!(Outcome::from_raw(number), Some(outcome));
        }
        assert_eq!((Op::from_raw(0), Op::from_raw(5)), (None, None));
        assert_eq!((Action::from_raw(3), Outcome::from_raw(0)), (None, None));
    }
}
