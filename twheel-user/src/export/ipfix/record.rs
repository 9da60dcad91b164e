//! What a flow record says of a flow.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use twheel_common::{
    event::Reason,
    flow::Traffic,
    packet::{PROTO_ICMP, PROTO_ICMP6},
};
use uuid::Uuid;

use super::template::Shape;
use crate::{
    identity::Identity,
    model::{Ended, Mark, Named, Translation, Updated},
};

/// Why a record is sent: `flowEndReason` (RFC 5102, section 5.11.3; IANA element 136).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// No packet for the whole timeout.
    Idle = 1,
    /// The flow goes on; the counts are those since its last record.
    Active = 2,
    /// The end was seen in the packets.
    EndOfFlow = 3,
    /// A user ended it.
    Forced = 4,
    /// The flow made room for another.
    LackOfResources = 5,
}

impl From<Reason> for EndReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Idle => Self::Idle,
            Reason::Closed | Reason::Reset | Reason::Superseded => Self::EndOfFlow,
            Reason::Deleted | Reason::Flushed => Self::Forced,
            Reason::Evicted => Self::LackOfResources,
        }
    }
}

/// A flow, or what was seen of it since its last record.
#[derive(Clone, Copy, Debug)]
pub struct FlowRecord<'a> {
    /// When the first packet of this record was seen, in milliseconds since 1970.
    pub start: u64,
    /// When the latest packet was seen, in milliseconds since 1970.
    pub end: u64,
    /// The initiator and the responder.
    pub ends: [SocketAddr; 2],
    /// The IANA number of the protocol.
    pub proto: u8,
    /// Why the record is sent.
    pub end_reason: EndReason,
    /// What the initiator and the responder have sent since the last record, if it is counted.
    pub sent: Option<[Traffic; 2]>,
    /// Which sides the record speaks of: those that have sent packets since the last record; at the
    /// flow's end those that have sent any.
    pub has_sent: [bool; 2],
    /// The outer and the inner VLAN; 0: none.
    pub vlans: [u16; 2],
    /// The interface where the initiator's packets are counted.
    pub iface: Option<&'a str>,
    /// It is the only one that is watched: the responder's packets are counted there, too.
    pub is_only_iface: bool,
    /// The initiator's packets go out on that interface.
    pub is_outgoing: bool,
    /// What tells the flow from all others.
    pub flow_id: Uuid,
    /// The number of the event.
    pub seq: u64,
    /// The policy rule that the flow met.
    pub rule: Option<&'a str>,
    /// The name of the flow's state.
    pub state: &'static str,
    /// The name of the reason why the record is sent. (No text may be empty: some readers cannot
    /// read a field of no bytes.)
    pub reason: &'static str,
    /// The zone; 0: none.
    pub zone: u16,
    /// The endpoints on the other side of a network address translation.
    pub nat: Option<Translation>,
}

impl<'a> FlowRecord<'a> {
    /// Of a flow that has ended.
    pub fn ended(identity: &Identity, mark: Mark, ended: &Ended, named: Named<'a>) -> Self {
        let sides = [true, ended.flow.replied];
        Self {
            end_reason: ended.reason.into(),
            has_sent: ended.account.map_or(sides, is_any),
            reason: ended.reason.name(),
            ..Self::updated(identity, mark, ended, named)
        }
    }

    /// Of a flow that lives on.
    pub fn updated(identity: &Identity, mark: Mark, updated: &Updated, named: Named<'a>) -> Self {
        let (flow, interval) = (updated.flow, updated.interval);
        let sent = match interval {
            Some(interval) => interval.account,
            None => updated.account,
        };
        let since = interval.map_or(updated.age, |interval| interval.length);
        Self {
            start: millis(mark.time, since),
            end: millis(mark.time, updated.idle.min(since)),
            ends: [flow.src, flow.dst],
            proto: flow.birth.key.proto(),
            end_reason: EndReason::Active,
            sent,
            has_sent: sent.map_or([true, flow.replied], is_any),
            vlans: flow.vlans,
            iface: named.iface,
            is_only_iface: flow.place == 0,
            is_outgoing: flow.is_outgoing,
            flow_id: identity.flow_id(&flow.birth),
            seq: mark.number,
            rule: named.rule,
            state: flow.state,
            reason: "update",
            zone: named.zone,
            nat: named
                .nat
                .filter(|nat| nat.src.is_ipv6() == flow.src.is_ipv6()),
        }
    }
}

/// Which sides have sent packets.
fn is_any(sent: [Traffic; 2]) -> [bool; 2] {
    sent.map(|it| it.packets > 0)
}

/// Milliseconds since 1970 of a time that was so long before another.
fn millis(time: SystemTime, before: Duration) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.saturating_sub(before).as_millis()).unwrap_or(u64::MAX)
}

/// One direction of a flow.
pub(super) struct Half<'a> {
    /// The flow.
    pub flow: &'a FlowRecord<'a>,
    /// Who sends in this direction: 0 is the initiator, 1 the responder.
    pub sender: usize,
}

impl Half<'_> {
    /// What is known of it, for the choice of a template.
    pub fn shape(&self) -> Shape {
        let flow = self.flow;
        let is_icmp = [PROTO_ICMP, PROTO_ICMP6].contains(&flow.proto);
        Shape::NONE
            .with_if(flow.ends.iter().any(SocketAddr::is_ipv6), Shape::V6)
            .with_if(flow.sent.is_some(), Shape::COUNTS)
            .with_if(!is_icmp, Shape::PORTS)
            .with_if(flow.vlans[0] != 0, Shape::VLAN)
            .with_if(flow.vlans[1] != 0, Shape::INNER_VLAN)
            .with_if(
                flow.iface.is_some() && (self.sender == 0 || flow.is_only_iface),
                Shape::IFACE,
            )
            .with_if(flow.rule.is_some(), Shape::RULE)
            .with_if(flow.nat.is_some(), Shape::NAT)
    }

    /// The endpoint that sends (`reverse` 0) or receives (1).
    fn end(&self, reverse: usize) -> SocketAddr {
        self.flow.ends[self.sender ^ reverse]
    }

    /// The same on the other side of a translation.
    pub fn nat(&self, reverse: usize) -> SocketAddr {
        match (self.flow.nat, self.sender ^ reverse) {
            (Some(nat), 0) => nat.src,
            (Some(nat), _) => nat.dst,
            (None, side) => self.flow.ends[side],
        }
    }

    /// Its port.
    pub fn port(&self, reverse: usize) -> u16 {
        self.end(reverse).port()
    }

    /// Its address, if it is IPv4.
    pub fn v4(&self, reverse: usize) -> Ipv4Addr {
        v4(self.end(reverse))
    }

    /// Its address, as IPv6.
    pub fn v6(&self, reverse: usize) -> Ipv6Addr {
        v6(self.end(reverse))
    }

    /// What was sent in this direction (`reverse` 0) or in the other (1).
    pub fn sent(&self, reverse: usize) -> Traffic {
        self.flow
            .sent
            .map_or(Traffic::default(), |sent| sent[self.sender ^ reverse])
    }

    /// `flowDirection` (IANA element 61): 0 in, 1 out.
    pub fn direction(&self) -> u8 {
        u8::from(self.flow.is_outgoing != (self.sender == 1))
    }
}

/// The address of an endpoint, if it is IPv4.
pub(super) fn v4(end: SocketAddr) -> Ipv4Addr {
    match end.ip() {
        IpAddr::V4(address) => address,
        IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}

/// The address of an endpoint, as IPv6.
pub(super) fn v6(end: SocketAddr) -> Ipv6Addr {
    match end.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}
