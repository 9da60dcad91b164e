//! Local sockets, through sock_diag (`net/ipv4/inet_diag.c`): finds one by its endpoints, lists
//! all, and closes one (`SOCK_DESTROY`).

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, Nla as _,
};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{
        AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, SOCK_DESTROY, TCP_CLOSE_WAIT, TCP_CLOSING,
        TCP_ESTABLISHED, TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_LAST_ACK, TCP_LISTEN, TCP_SYN_SENT,
        TCP_TIME_WAIT,
    },
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags, nlas::Nla},
};
use twheel_common::{
    flow::Direction,
    packet::{PROTO_TCP, PROTO_UDP},
    state::{Seen, State},
};

use crate::netlink::Netlink;

/// `INET_DIAG_CGROUP_ID` of `include/uapi/linux/inet_diag.h`, since Linux 5.8.
const CGROUP_ID: u16 = 21;

/// A netlink socket to sock_diag of a network namespace.
pub struct Sockets(Netlink);

/// A protocol whose sockets sock_diag knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// The protocol of a flow; `None` if it has no such sockets.
    pub fn of_flow(number: u8) -> Option<Self> {
        match number {
            PROTO_TCP => Some(Self::Tcp),
            PROTO_UDP => Some(Self::Udp),
            _ => None,
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::Tcp => IPPROTO_TCP,
            Self::Udp => IPPROTO_UDP,
        }
    }
}

/// What tells whose a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The socket's inode, which the descriptors of its processes show; `None`: no process has it.
    pub inode: Option<u32>,
    /// The user who made it; `None`: no process has it.
    pub uid: Option<u32>,
    /// The number of the cgroup (version 2) in which it was made. An accepted socket has that of
    /// the listening one. `None`: the kernel does not say (before 5.8, or the socket is closing).
    pub cgroup: Option<u64>,
}

impl Holder {
    fn new(found: &InetResponse) -> Self {
        let inode = Some(found.header.inode).filter(|inode| *inode != 0);
        let cgroup = found.nlas.iter().find_map(|nla| match nla {
            Nla::Other(other) if other.kind() == CGROUP_ID => {
                let mut value = [0; 8];
                (other.value_len() == value.len()).then(|| other.emit_value(&mut value))?;
                Some(u64::from_ne_bytes(value))
            }
            _ => None,
        });
        Self {
            inode,
            uid: inode.map(|_| found.header.uid),
            cgroup,
        }
    }
}

/// A socket in a list of all.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// Its own endpoint; the address is unspecified if the socket has all.
    pub local: SocketAddr,
    /// Its peer; `None` for a UDP socket that is not connected.
    pub peer: Option<SocketAddr>,
    /// The interface that it is bound to; 0: none.
    pub bound: u32,
    /// It has all IPv4 addresses, too, although its own address is one of IPv6.
    pub is_dual: bool,
    /// Whose it is.
    pub holder: Holder,
}

/// A local socket that was found.
#[derive(Debug)]
pub struct FoundSocket {
    id: SocketId,
    state: u8,
    /// Time since data or an ACK was last received or data last sent, by the kernel's clocks;
    /// `None` for a half-open socket, which has no such times.
    pub idle: Option<Duration>,
    /// Whose it is.
    pub holder: Holder,
}

impl FoundSocket {
    /// Its cookie, as `SO_COOKIE` tells it.
    pub fn cookie(&self) -> u64 {
        u64::from_ne_bytes(self.id.cookie)
    }

    /// Whether the socket has sent a SYN and waits for the answer.
    pub fn is_opening(&self) -> bool {
        self.state == TCP_SYN_SENT
    }

    /// The flow's state bits as the socket shows them: its state in conntrack's words, and which
    /// sides have sent a FIN. `None` for a half-open socket.
    pub fn seen(&self, local: Direction, initiator: Direction) -> Option<Seen> {
        let peer = local.reverse();
        let (state, finished): (_, &[_]) = match self.state {
            TCP_ESTABLISHED => (State::Established, &[]),
            TCP_FIN_WAIT1 => (State::FinWait, &[local]),
            // The socket's FIN was acknowledged.
            TCP_FIN_WAIT2 => (State::CloseWait, &[local]),
            TCP_CLOSE_WAIT => (State::CloseWait, &[peer]),
            TCP_CLOSING | TCP_LAST_ACK => (State::LastAck, &[local, peer]),
            _ => return None,
        };
        Some(Seen::of_socket(state, initiator, finished))
    }
}

/// From `struct tcp_info` (`include/uapi/linux/tcp.h`), which grows from kernel to kernel: the
/// least of `tcpi_last_data_sent`, `tcpi_last_data_recv` and `tcpi_last_ack_recv`, in milliseconds.
fn idle(tcp_info: &[u8]) -> Option<Duration> {
    [44, 52, 56]
        .into_iter()
        .map(|at| {
            let bytes = tcp_info.get(at..at + 4)?;
            bytes.try_into().ok().map(u32::from_ne_bytes)
        })
        .try_fold(u32::MAX, |least, ago| Some(least.min(ago?)))
        .map(|least| Duration::from_millis(least.into()))
}

impl Sockets {
    /// Opens a socket in this thread's network namespace.
    pub fn open() -> Result<Self> {
        let netlink = Netlink::open(netlink_sys::constants::NETLINK_SOCK_DIAG);
        netlink.map(Self).context("cannot open a netlink socket")
    }

    /// The socket with these endpoints, unless it is a listening socket or one in TIME_WAIT. Of
    /// UDP, the socket that a datagram from this peer reaches.
    ///
    /// The kernel's lookup may fall back to a listening socket with the local endpoint. So the
    /// socket is inspected before it is closed, and then closed by its cookie.
    ///
    /// `bound`: the interface that the socket is bound to; 0: none.
    pub fn find(
        &mut self,
        protocol: Protocol,
        (local, peer): (SocketAddr, SocketAddr),
        bound: u32,
    ) -> io::Result<Option<FoundSocket>> {
        // `udp_dump_one` of `net/ipv4/udp_diag.c` takes the endpoints the other way round, "for
        // historical reasons".
        let (source, destination) = match protocol {
            Protocol::Tcp => (local, peer),
            Protocol::Udp => (peer, local),
        };
        let asked = SocketId {
            source_port: source.port(),
            destination_port: destination.port(),
            source_address: source.ip(),
            destination_address: destination.ip(),
            interface_id: bound,
            cookie: [0xff; 8],
        };
        let request = request(protocol, asked, ExtensionFlags::INFO);
        let answer = match self.ask(request, NLM_F_REQUEST, None) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            answer => answer?,
        };
        let Some(SockDiagMessage::InetResponse(found)) = answer else {
            return Ok(None);
        };
        let id = &found.header.socket_id;
        let has_ends = match protocol {
            Protocol::Tcp => {
                id.source_port == local.port()
                    && id.destination_port == peer.port()
                    && is_same(id.source_address, local.ip())
                    && is_same(id.destination_address, peer.ip())
            }
            // The socket may have any address, and any peer.
            Protocol::Udp => id.source_port == local.port(),
        };
        let ends =
            protocol == Protocol::Tcp && [TCP_LISTEN, TCP_TIME_WAIT].contains(&found.header.state);
        let is_it = has_ends && id.interface_id == bound && !ends;
        Ok(is_it.then_some(FoundSocket {
            state: found.header.state,
            idle: found.nlas.iter().find_map(|nla| match nla {
                Nla::TcpInfo(info) => idle(info),
                _ => None,
            }),
            holder: Holder::new(&found),
            id: SocketId {
                // The addresses as asked for, since an IPv6 socket may have IPv4 endpoints.
                source_address: local.ip(),
                destination_address: peer.ip(),
                ..found.header.socket_id
            },
        }))
    }

    /// Passes all sockets of a protocol to `each`, except listening ones and those that no process
    /// has.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::NotFound`]: the kernel cannot list the sockets of this protocol.
    pub fn each(&mut self, protocol: Protocol, mut each: impl FnMut(Listed)) -> io::Result<()> {
        for any in [SocketId::new_v4(), SocketId::new_v6()] {
            let mut request = request(protocol, any, ExtensionFlags::empty());
            if protocol == Protocol::Tcp {
                request.states -= StateFlags::LISTEN | StateFlags::TIME_WAIT;
            }
            let mut header = NetlinkHeader::default();
            header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let request = SockDiagMessage::InetRequest(request).into();
            self.0
                .dump(NetlinkMessage::new(header, request), |answer| {
                    if let SockDiagMessage::InetResponse(found) = answer {
                        listed(&found).map(&mut each);
                    }
                })?;
        }
        Ok(())
    }

    /// Closes a socket: its owner gets ECONNABORTED, and its peer gets a RST. `false`: the socket
    /// no longer exists.
    pub fn close(&mut self, socket: FoundSocket) -> io::Result<bool> {
        let flags = NLM_F_REQUEST | NLM_F_ACK;
        let request = request(Protocol::Tcp, socket.id, ExtensionFlags::empty());
        match self.ask(request, flags, Some(SOCK_DESTROY)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Err(io::Error::new(
                error.kind(),
                "this kernel cannot close sockets: it has no CONFIG_INET_DIAG_DESTROY",
            )),
            Err(error) => Err(error),
        }
    }

    fn ask(
        &mut self,
        request: InetRequest,
        flags: u16,
        kind: Option<u16>,
    ) -> io::Result<Option<SockDiagMessage>> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let request = SockDiagMessage::InetRequest(request).into();
        self.0.ask(NetlinkMessage::new(header, request), kind)
    }
}

fn request(protocol: Protocol, socket_id: SocketId, extensions: ExtensionFlags) -> InetRequest {
    InetRequest {
        family: match socket_id.source_address {
            IpAddr::V4(_) => AF_INET,
            IpAddr::V6(_) => AF_INET6,
        },
        protocol: protocol.number(),
        extensions,
        states: StateFlags::all(),
        socket_id,
    }
}

/// `None`: no process has the socket.
fn listed(found: &InetResponse) -> Option<Listed> {
    let (id, holder) = (&found.header.socket_id, Holder::new(found));
    holder.inode?;
    // `INET_DIAG_SKV6ONLY` says whether an IPv6 socket without a peer refuses IPv4.
    let is_open = |nla: &Nla| matches!(nla, Nla::SkV6Only(false));
    Some(Listed {
        local: SocketAddr::new(id.source_address.to_canonical(), id.source_port),
        peer: (id.destination_port != 0)
            .then(|| SocketAddr::new(id.destination_address.to_canonical(), id.destination_port)),
        bound: id.interface_id,
        is_dual: id.source_address == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
            && found.nlas.iter().any(is_open),
        holder,
    })
}

/// Whether two addresses are the same, where either may be an IPv4-mapped one.
fn is_same(one: IpAddr, two: IpAddr) -> bool {
    let mapped = |address| match address {
        IpAddr::V4(address) => Ipv6Addr::to_canonical(&address.to_ipv6_mapped()),
        IpAddr::V6(address) => address.to_canonical(),
    };
    mapped(one) == mapped(two)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(sent: u32, received: u32, acknowledged: u32) -> Vec<u8> {
        let mut info = vec![0; 104];
        // The kernel does not keep `tcpi_last_ack_sent`: it is 0.
        for (at, ago) in [(44, sent), (48, 0), (52, received), (56, acknowledged)] {
            info[at..at + 4].copy_from_slice(&ago.to_ne_bytes());
        }
        info
    }

    #[test]
    fn a_socket_is_idle_since_whatever_came_or_went_last() {
        for (sent, received, acknowledged) in [(7, 30, 20), (30, 7, 20), (20, 30, 7)] {
            let idle = idle(&info(sent, received, acknowledged));
            assert_eq!(idle, Some(Duration::from_millis(7)));
        }
        assert_eq!(idle(&info(7, 7, 7)[..59]), None);
    }

    #[test]
    fn the_state_of_a_socket_is_told_in_conntracks_words() {
        let (local, peer) = (Direction::FromHigh, Direction::FromLow);
        let seen = |state| {
            let found = FoundSocket {
                id: SocketId::new_v4(),
                state,
                idle: None,
                holder: Holder {
                    inode: None,
                    uid: None,
                    cgroup: None,
                },
            };
            found.seen(local, peer)
        };
        for (state, wanted) in [
            (TCP_ESTABLISHED, State::Established),
            (TCP_FIN_WAIT1, State::FinWait),
            (TCP_FIN_WAIT2, State::CloseWait),
            (TCP_CLOSE_WAIT, State::CloseWait),
            (TCP_CLOSING, State::LastAck),
            (TCP_LAST_ACK, State::LastAck),
        ] {
            let seen = seen(state).unwrap();
            assert_eq!((seen.state(), seen.initiator()), (wanted, peer));
            assert!(seen.is_replied() && seen.is_pickup());
        }
        // SYN_SENT and SYN_RECV are half open.
        assert_eq!((seen(2), seen(3)), (None, None));
    }
}
