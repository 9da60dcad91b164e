//! Finds and deletes entries of the kernel's connection tracking, over ctnetlink
//! (`net/netfilter/nf_conntrack_netlink.c`).

use std::{io, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::{
        ConntrackAttribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP, ProtoTuple,
        Protocol, Tuple,
    },
};
use twheel_common::{
    packet::{PROTO_TCP, PROTO_UDP},
    rule::Timeouts,
    state::State,
};

use crate::{model::Translation, netlink::Netlink, timeouts::Sysctls};

/// A netlink socket to the conntrack of a network namespace, and conntrack's timeouts, if they
/// could be read when it was opened.
pub struct Conntrack(Netlink, Option<Sysctls>);

/// An entry that was found.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Time until the kernel deletes the entry, in whole seconds.
    left: Duration,
    proto: Protocol,
    /// The state of a TCP entry.
    pub state: Option<State>,
}

impl Entry {
    /// From the kernel's answer; `None` if an attribute that is needed is missing.
    fn from_answer(proto: Protocol, attributes: &[ConntrackAttribute]) -> Option<Self> {
        let mut left = None;
        let mut state = None;
        for attribute in attributes {
            match attribute {
                ConntrackAttribute::CtaTimeout(seconds) => {
                    left = Some(Duration::from_secs((*seconds).into()));
                }
                ConntrackAttribute::CtaProtoInfo(infos) => {
                    let tcp = infos.iter().find_map(|info| match info {
                        ProtoInfo::TCP(tcp) => Some(tcp),
                        _ => None,
                    });
                    // `enum tcp_conntrack`, in which 0 means no state.
                    state = tcp.into_iter().flatten().find_map(|info| match info {
                        ProtoInfoTCP::State(number @ 1..=9) => {
                            Some(State::ALL[usize::from(*number) - 1])
                        }
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        let is_told = proto != Protocol::Tcp || state.is_some();
        is_told.then_some(Self {
            left: left?,
            proto,
            state,
        })
    }

    /// The numbers of the timeouts that the entry's latest packet may have set.
    fn timeouts(&self) -> Vec<usize> {
        match (self.proto, self.state) {
            (Protocol::Tcp, Some(state)) => {
                // An entry with unacknowledged data, or without a reply, may have a shorter timeout
                // (`nf_conntrack_tcp_packet`).
                let number = match state {
                    State::SynSent2 => State::SynSent,
                    state => state,
                };
                vec![number as usize, Timeouts::UNREPLIED, Timeouts::RETRANS]
            }
            _ => vec![Timeouts::UDP, Timeouts::UDP_STREAM],
        }
    }

    /// The least time for which the entry has been idle. `timeouts` are those that its latest
    /// packet may have set.
    fn idle(&self, timeouts: impl Iterator<Item = Duration>) -> Duration {
        let idle = timeouts.filter_map(|timeout| timeout.checked_sub(self.left));
        // If more is left than any timeout sets, the entry has a timeout of its own, from
        // elsewhere.
        idle.min().unwrap_or(Duration::ZERO)
    }
}

/// conntrack's name of a protocol whose entries are found by ports.
pub fn protocol(proto: u8) -> Option<Protocol> {
    match proto {
        PROTO_TCP => Some(Protocol::Tcp),
        PROTO_UDP => Some(Protocol::Udp),
        _ => None,
    }
}

impl Conntrack {
    /// Opens a socket in this thread's network namespace.
    pub fn open() -> Result<Self> {
        let netlink = Netlink::open(netlink_sys::constants::NETLINK_NETFILTER);
        let netlink = netlink.context("cannot open a netlink socket")?;
        Ok(Self(netlink, Sysctls::open().ok()))
    }

    /// The entry whose original or reply tuple is that of packets from `src` to `dst`.
    pub fn find(
        &mut self,
        proto: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        zone: u16,
    ) -> io::Result<Option<Entry>> {
        let Some(attributes) = self.get(proto, src, dst, zone)? else {
            return Ok(None);
        };
        let entry = Entry::from_answer(proto, &attributes);
        let invalid = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "conntrack's answer has no timeout or no state",
            )
        };
        entry.ok_or_else(invalid).map(Some)
    }

    /// How the endpoints of packets from `src` to `dst` are translated: what they are on the other
    /// side of the translation. `None`: they are not, or there is no entry.
    pub fn translation(
        &mut self,
        proto: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        zone: u16,
    ) -> io::Result<Option<Translation>> {
        // Behind the translation of the source, an entry has only the answers' tuple.
        let found = match self.get(proto, src, dst, zone)? {
            Some(found) => Some(found),
            None => self.get(proto, dst, src, zone)?,
        };
        let Some(attributes) = found else {
            return Ok(None);
        };
        let (mut orig, mut reply) = (None, None);
        for attribute in &attributes {
            match attribute {
                ConntrackAttribute::CtaTupleOrig(tuple) => orig = endpoints(tuple),
                ConntrackAttribute::CtaTupleReply(tuple) => reply = endpoints(tuple),
                _ => {}
            }
        }
        Ok(orig
            .zip(reply)
            .and_then(|tuples| other_side(tuples, (src, dst))))
    }

    /// The attributes of the entry whose original or reply tuple this is.
    fn get(
        &mut self,
        proto: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        zone: u16,
    ) -> io::Result<Option<Vec<ConntrackAttribute>>> {
        let get = ConntrackMessage::Get(named(proto, src, dst, zone));
        let answer = match self.ask(src, get, NLM_F_REQUEST) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            answer => answer?,
        };
        match answer.map(|answer| answer.inner) {
            Some(NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes))) => {
                Ok(Some(attributes))
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "conntrack answers with something else",
            )),
        }
    }

    /// The least time for which an entry has been idle, from what is left of its timeout. The
    /// result may be a second too long, since the kernel reports whole seconds.
    pub fn idle(&mut self, entry: &Entry) -> Result<Duration> {
        if self.1.is_none() {
            // An entry was found, so conntrack is loaded by now.
            self.1 = Some(Sysctls::open()?);
        }
        let sysctls = self
            .1
            .as_ref()
            .context("conntrack's timeouts were not read")?;
        let numbers = entry.timeouts();
        let timeouts = numbers.into_iter().map(|number| sysctls.timeout(number));
        let timeouts = timeouts.collect::<Result<Vec<_>>>()?;
        Ok(entry.idle(timeouts.into_iter()))
    }

    /// Deletes the entry whose original or reply tuple is that of packets from `src` to `dst`.
    /// Returns whether there was one.
    pub fn delete(
        &mut self,
        proto: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        zone: u16,
    ) -> io::Result<bool> {
        let delete = ConntrackMessage::Delete(named(proto, src, dst, zone));
        match self.ask(src, delete, NLM_F_REQUEST | NLM_F_ACK) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn ask(
        &mut self,
        src: SocketAddr,
        message: ConntrackMessage,
        flags: u16,
    ) -> io::Result<Option<NetfilterMessage>> {
        let family = match src {
            SocketAddr::V4(_) => NetfilterProtoFamily::IPv4,
            SocketAddr::V6(_) => NetfilterProtoFamily::IPv6,
        };
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message);
        let request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        self.0.ask(request, None)
    }
}

/// The attributes that name an entry of a zone.
fn named(proto: Protocol, src: SocketAddr, dst: SocketAddr, zone: u16) -> Vec<ConntrackAttribute> {
    let mut named = vec![tuple(proto, src, dst)];
    if zone != 0 {
        let number = zone.to_be_bytes().to_vec();
        named.push(ConntrackAttribute::Other(DefaultNla::new(ZONE, number)));
    }
    named
}

/// `CTA_ZONE` (`include/uapi/linux/netfilter/nfnetlink_conntrack.h`).
const ZONE: u16 = 18;

/// The attribute is the original tuple's, but the kernel compares it with both tuples of each
/// entry: it hashes either.
fn tuple(proto: Protocol, src: SocketAddr, dst: SocketAddr) -> ConntrackAttribute {
    ConntrackAttribute::CtaTupleOrig(vec![
        Tuple::Ip(vec![
            IPTuple::SourceAddress(src.ip()),
            IPTuple::DestinationAddress(dst.ip()),
        ]),
        Tuple::Proto(vec![
            ProtoTuple::Protocol(proto),
            ProtoTuple::SourcePort(src.port()),
            ProtoTuple::DestinationPort(dst.port()),
        ]),
    ])
}

/// The endpoints of a tuple: where its packets come from, and where they go.
fn endpoints(tuple: &[Tuple]) -> Option<(SocketAddr, SocketAddr)> {
    let (mut src, mut dst, mut sport, mut dport) = (None, None, None, None);
    for part in tuple {
        match part {
            Tuple::Ip(parts) => {
                for part in parts {
                    match part {
                        IPTuple::SourceAddress(address) => src = Some(*address),
                        IPTuple::DestinationAddress(address) => dst = Some(*address),
                        _ => {}
                    }
                }
            }
            Tuple::Proto(parts) => {
                for part in parts {
                    match part {
                        ProtoTuple::SourcePort(port) => sport = Some(*port),
                        ProtoTuple::DestinationPort(port) => dport = Some(*port),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some((SocketAddr::new(src?, sport?), SocketAddr::new(dst?, dport?)))
}

/// The endpoints on the other side of a translation, of packets that are `(src, dst)` on this side.
/// `orig` and `reply`: the tuples of an entry. `None` if they are the same.
fn other_side(
    (orig, reply): ((SocketAddr, SocketAddr), (SocketAddr, SocketAddr)),
    here: (SocketAddr, SocketAddr),
) -> Option<Translation> {
    let swapped = |(src, dst): (SocketAddr, SocketAddr)| (dst, src);
    // Packets of the initiator before the translation, and after it; then those of the responder.
    let sides = [
        (orig, swapped(reply)),
        (swapped(reply), orig),
        (reply, swapped(orig)),
        (swapped(orig), reply),
    ];
    let (_, (src, dst)) = sides.into_iter().find(|(one, _)| *one == here)?;
    ((src, dst) != here).then_some(Translation { src, dst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direction_on_each_side_has_another_side() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let [client, server] = ["10.0.0.2:4000", "192.0.2.1:80"].map(address);
        let [gateway, inside] = ["198.51.100.1:6000", "10.1.0.9:8080"].map(address);
        // The client's source is translated, and the server's address.
        let tuples = ((client, server), (inside, gateway));
        let other = |src, dst| other_side(tuples, (src, dst)).map(|it| (it.src, it.dst));
        assert_eq!(other(client, server), Some((gateway, inside)));
        assert_eq!(other(gateway, inside), Some((client, server)));
        assert_eq!(other(inside, gateway), Some((server, client)));
        assert_eq!(other(server, client), Some((inside, gateway)));
        assert_eq!(other(client, inside), None);
        let plain = ((client, server), (server, client));
        assert_eq!(other_side(plain, (client, server)), None);
    }

    #[test]
    fn an_entry_is_taken_for_as_young_as_it_may_be() {
        let seconds = Duration::from_secs;
        let entry = |left| Entry {
            left: seconds(left),
            proto: Protocol::Tcp,
            state: Some(State::Established),
        };
        let idle = |left| entry(left).idle([432_000, 300, 300].map(seconds).into_iter());
        assert_eq!(idle(431_990), seconds(10));
        assert_eq!(idle(301), seconds(431_699));
        // The latest packet may have come just now, unacknowledged.
        assert_eq!(idle(299), seconds(1));
        assert_eq!(idle(432_001), seconds(0));
    }

    #[test]
    fn an_answer_is_read() {
        let state = |number| {
            ConntrackAttribute::CtaProtoInfo(vec![ProtoInfo::TCP(vec![ProtoInfoTCP::State(
                number,
            )])])
        };
        let left = ConntrackAttribute::CtaTimeout(7);
        let entry = Entry::from_answer(Protocol::Tcp, &[left.clone(), state(3)]).unwrap();
        assert_eq!(entry.state, Some(State::Established));
        assert_eq!(entry.left, Duration::from_secs(7));
        assert_eq!(
            Entry::from_answer(Protocol::Tcp, &[left.clone(), state(0)]),
            None
        );
        assert_eq!(Entry::from_answer(Protocol::Tcp, &[state(3)]), None);
        assert_eq!(
            Entry::from_answer(Protocol::Udp, &[left]).unwrap().state,
            None
        );
    }
}
