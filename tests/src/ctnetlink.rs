//! What `nf_conntrack` knows of a namespace's connections, and when it deleted them.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail};
use netlink_packet_core::{
    NLA_TYPE_MASK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, Nla,
    NlasIterator,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::{
        ConntrackAttribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP, ProtoTuple,
        Protocol, Tuple,
    },
};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
        setsockopt, socket, sockopt,
    },
};
use twheel_common::state::State;

use crate::netns::Namespace;

/// The multicast group for deleted entries, as a bit.
const DESTROYED: u32 = 1 << 2;
/// `CTA_TIMESTAMP`, and the attributes nested in it.
const TIMESTAMP: u16 = 20;
const START: u16 = 1;
/// `CTA_ZONE`.
const ZONE: u16 = 18;
/// `CTA_COUNTERS_ORIG` and `CTA_COUNTERS_REPLY`, and the attributes nested in them: packets and
/// bytes.
const COUNTERS: [u16; 2] = [9, 10];
const STOP: u16 = 2;
/// `CTA_PROTO_ICMP_ID` and `CTA_PROTO_ICMPV6_ID`.
const ICMP_IDS: [u16; 2] = [4, 7];
/// Larger than any netlink datagram.
const BUFFER: usize = 1 << 16;

/// Conntrack's entry of a connection.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its protocol, named as twheel does.
    pub proto: &'static str,
    /// The initiator's endpoint. The port of an ICMP query is its identifier.
    pub src: SocketAddr,
    /// The responder's endpoint.
    pub dst: SocketAddr,
    /// Its state, if it is a TCP connection.
    pub state: Option<State>,
    /// When it began.
    pub start: SystemTime,
    /// Packets and bytes of the initiator and of the responder; `None` without `nf_conntrack_acct`.
    pub counts: Option<[[u64; 2]; 2]>,
    /// Its zone; 0: none.
    pub zone: u16,
    /// When it was deleted, or should have been: conntrack only scans its table from time to time,
    /// and dates the deletion back.
    pub stop: Option<SystemTime>,
}

/// Netlink sockets to the conntrack of a namespace.
pub struct Conntrack {
    requests: OwnedFd,
    destroyed: OwnedFd,
}

impl Conntrack {
    /// Opens the sockets. Entries that were made before this, or without `nf_conntrack_timestamp`,
    /// have no time.
    pub fn open(namespace: &Namespace) -> Result<Self> {
        let open = |flags, groups| -> Result<OwnedFd> {
            let fd = socket(
                AddressFamily::Netlink,
                SockType::Raw,
                flags,
                SockProtocol::NetlinkNetFilter,
            )?;
            bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
            Ok(fd)
        };
        namespace.enter(|| {
            let requests = open(SockFlag::SOCK_CLOEXEC, 0)?;
            let destroyed = open(SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, DESTROYED)?;
            setsockopt(&destroyed, sockopt::RcvBuf, &(1 << 20))?;
            Ok(Self {
                requests,
                destroyed,
            })
        })
    }

    /// All entries. The dump deletes entries that are due, which is sooner than conntrack would do
    /// it by itself.
    pub fn dump(&self) -> Result<Vec<Entry>> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let mut request = NetlinkMessage::new(
            header,
            NetlinkPayload::from(NetfilterMessage::new(
                NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 0),
                ConntrackMessage::Get(vec![]),
            )),
        );
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        send(self.requests.as_raw_fd(), &bytes, MsgFlags::empty())
            .context("cannot ask conntrack")?;
        let mut found = Vec::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = recv(self.requests.as_raw_fd(), &mut buffer, MsgFlags::empty())
                .context("conntrack does not answer")?;
            if entries(&buffer[..length], &mut found)? {
                return Ok(found);
            }
        }
    }

    /// The entries that were deleted since the last call.
    pub fn destroyed(&self) -> Result<Vec<Entry>> {
        let mut found = Vec::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            match recv(self.destroyed.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) => entries(&buffer[..length], &mut found)?,
                Err(Errno::EAGAIN) => return Ok(found),
                // For example ENOBUFS: events were lost.
                Err(error) => return Err(error).context("cannot read conntrack's events"),
            };
        }
    }
}

/// Parses a datagram. Returns whether it contains the last message of a dump.
fn entries(mut datagram: &[u8], into: &mut Vec<Entry>) -> Result<bool> {
    while !datagram.is_empty() {
        let message = NetlinkMessage::<NetfilterMessage>::deserialize(datagram)?;
        let length = (message.header.length as usize).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or_default();
        match message.payload {
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) => bail!("conntrack refuses: {error}"),
            NetlinkPayload::InnerMessage(NetfilterMessage {
                inner:
                    NetfilterMessageInner::Conntrack(
                        ConntrackMessage::New(attributes) | ConntrackMessage::Delete(attributes),
                    ),
                ..
            }) => into.extend(entry(&attributes)?),
            other => bail!("conntrack says {other:?}"),
        }
    }
    Ok(false)
}

/// `None` if it is of a protocol that `twheel` does not track.
fn entry(attributes: &[ConntrackAttribute]) -> Result<Option<Entry>> {
    let (mut ends, mut found, mut start, mut stop) = (None, None, None, None);
    let (mut counts, mut zone) = ([None; 2], 0);
    for attribute in attributes {
        match attribute {
            ConntrackAttribute::CtaTupleOrig(tuple) => ends = endpoints(tuple),
            ConntrackAttribute::CtaProtoInfo(infos) => {
                found = infos.iter().find_map(|info| match info {
                    ProtoInfo::TCP(infos) => infos.iter().find_map(|info| match info {
                        ProtoInfoTCP::State(number) => Some(*number),
                        _ => None,
                    }),
                    _ => None,
                });
            }
            ConntrackAttribute::Other(other) if other.kind() & NLA_TYPE_MASK == TIMESTAMP => {
                let mut value = vec![0; other.value_len()];
                other.emit_value(&mut value);
                for stamp in NlasIterator::new(&value) {
                    let stamp = stamp.context("no timestamp")?;
                    let since = u64::from_be_bytes(stamp.value().try_into()?);
                    let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(since);
                    match stamp.kind() {
                        START => start = Some(time),
                        STOP => stop = Some(time),
                        _ => {}
                    }
                }
            }
            ConntrackAttribute::Other(other) if other.kind() & NLA_TYPE_MASK == ZONE => {
                let mut value = [0; 2];
                other.emit_value(&mut value);
                zone = u16::from_be_bytes(value);
            }
            ConntrackAttribute::Other(other)
                if COUNTERS.contains(&(other.kind() & NLA_TYPE_MASK)) =>
            {
                let side = usize::from(other.kind() & NLA_TYPE_MASK == COUNTERS[1]);
                let mut value = vec![0; other.value_len()];
                other.emit_value(&mut value);
                let mut numbers = [0; 2];
                for number in NlasIterator::new(&value) {
                    let number = number.context("no counter")?;
                    if let Some(place) = numbers.get_mut(usize::from(number.kind()) - 1) {
                        *place = u64::from_be_bytes(number.value().try_into()?);
                    }
                }
                counts[side] = Some(numbers);
            }
            _ => {}
        }
    }
    let Some((proto, src, dst)) = ends else {
        return Ok(None);
    };
    let state = |number: u8| {
        // Conntrack's numbers start at 1: 0 is `none`.
        let state = State::ALL.get(usize::from(number).wrapping_sub(1));
        let state = state.with_context(|| format!("conntrack has a state {number}"))?;
        anyhow::Ok(*state)
    };
    Ok(Some(Entry {
        proto,
        src,
        dst,
        state: found.map(state).transpose()?,
        start: start.context("no time: nf_conntrack_timestamp is off")?,
        zone,
        counts: counts[0].zip(counts[1]).map(|(orig, reply)| [orig, reply]),
        stop,
    }))
}

fn endpoints(tuple: &[Tuple]) -> Option<(&'static str, SocketAddr, SocketAddr)> {
    let mut addresses: [Option<IpAddr>; 2] = [None; 2];
    let mut ports: [Option<u16>; 2] = [None; 2];
    let mut proto = None;
    for part in tuple {
        match part {
            Tuple::Ip(parts) => {
                for part in parts {
                    match part {
                        IPTuple::SourceAddress(address) => addresses[0] = Some(*address),
                        IPTuple::DestinationAddress(address) => addresses[1] = Some(*address),
                        _ => {}
                    }
                }
            }
            Tuple::Proto(parts) => {
                for part in parts {
                    match part {
                        ProtoTuple::Protocol(protocol) => {
                            proto = match protocol {
                                Protocol::Tcp => Some("tcp"),
                                Protocol::Udp => Some("udp"),
                                Protocol::Icmp => Some("icmp"),
                                Protocol::Ipv6Icmp => Some("icmpv6"),
                                _ => None,
                            }
                        }
                        ProtoTuple::SourcePort(port) => ports[0] = Some(*port),
                        ProtoTuple::DestinationPort(port) => ports[1] = Some(*port),
                        ProtoTuple::Other(other) if ICMP_IDS.contains(&other.kind()) => {
                            let mut value = [0; 2];
                            other.emit_value(&mut value);
                            ports = [Some(u16::from_be_bytes(value)); 2];
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let end = |i: usize| Some(SocketAddr::new(addresses[i]?, ports[i]?));
    Some((proto?, end(0)?, end(1)?))
}
