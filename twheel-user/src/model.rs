//! Flows in the words of their readers: those in the table, and those that have ended.

use std::{net::SocketAddr, time::Duration};

use twheel_common::{
    event::{Event, Pace, Reason, RtoExpired},
    flow::{Direction, FlowKey, Traffic},
    packet::{PROTO_ICMP, PROTO_ICMP6, PROTO_TCP, PROTO_UDP},
    point::Point,
    policy::Hook,
    state::{Seen, State},
};

use crate::clock::Clock;

/// By what the numbers of the data plane's records are read.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// Its clock.
    pub clock: Clock,
    /// One side of each flow is all that is ever seen.
    pub one_way: bool,
}

/// A flow, in the words of its readers.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The protocol's name.
    pub proto: &'static str,
    /// The initiator, as far as that is known.
    pub src: SocketAddr,
    /// The responder.
    pub dst: SocketAddr,
    /// Its state, by name; `unreplied` where it is established and one side was never seen.
    pub state: &'static str,
    /// Number of the rule that it has met; 0 for none.
    pub rule: u16,
    /// The outer and the inner VLAN in which it was seen; 0: none.
    pub vlans: [u16; 2],
    /// Its zone, by its place in the table; 0: none.
    pub zone: u8,
    /// The interface where its initiator's packets are counted, by its place; 0: the only one.
    pub place: u32,
    /// Whether those go out there.
    pub is_outgoing: bool,
    /// Nobody answers the retransmissions of one of the two.
    pub stalled: bool,
}

impl Flow {
    /// `None` for a flow of which no data plane knows. `one_way`: one side is all that is ever seen.
    pub fn new(key: FlowKey, seen: Seen, rule: u16, from: Origin, one_way: bool) -> Option<Self> {
        let initiator = seen.initiator();
        Some(Self {
            proto: match key.proto() {
                PROTO_TCP => "tcp",
                PROTO_UDP => "udp",
                PROTO_ICMP => "icmp",
                PROTO_ICMP6 => "icmpv6",
                _ => return None,
            },
            src: key.sender(initiator),
            dst: key.sender(initiator.reverse()),
            state: state(seen, one_way),
            rule,
            vlans: key.vlans(),
            zone: key.zone(),
            place: from.point.place(),
            is_outgoing: match from.point {
                Point::NONE => from.is_outgoing,
                point => point.hook() == Hook::Egress,
            },
            stalled: seen.is_stalled(),
        })
    }

    /// Whether its initiator's packets come in or go out where they are counted.
    pub fn direction(&self) -> &'static str {
        match self.is_outgoing {
            true => "out",
            false => "in",
        }
    }
}

/// Where a flow's initiator sends, as the data plane says.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// Where its packets are counted.
    pub point: Point,
    /// Whether its first packet went out.
    pub is_outgoing: bool,
}

/// What is known of a flow by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Named<'a> {
    /// The rule that it has met.
    pub rule: Option<&'a str>,
    /// The interface where its initiator's packets are counted.
    pub iface: Option<&'a str>,
    /// Its zone, conntrack's number; 0: none.
    pub zone: u16,
}

/// The same, to keep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownAs {
    /// The rule that it has met.
    pub rule: Option<String>,
    /// The interface where its initiator's packets are counted.
    pub iface: Option<String>,
    /// Its zone, conntrack's number; 0: none.
    pub zone: u16,
}

impl KnownAs {
    /// What is known.
    pub fn named(&self) -> Named<'_> {
        Named {
            rule: self.rule.as_deref(),
            iface: self.iface.as_deref(),
            zone: self.zone,
        }
    }
}

/// A flow that is in the table.
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// As it is now.
    pub flow: Flow,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Since its first packet.
    pub age: Duration,
    /// Since its latest packet.
    pub idle: Duration,
    /// Until it expires, if no packet comes; 0 if it is due.
    pub expires: Duration,
    /// The CPU on whose wheel it stands.
    pub cpu: u32,
    /// What the initiator has sent and what the responder has; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
    /// How the two have sent, likewise; `None` without `--rto on`.
    pub timing: Option<[Timing; 2]>,
}

/// What a retransmission timer knows of one side's sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Smoothed round-trip time, microseconds; 0 if there was no sample.
    pub srtt: u32,
    /// Segments that were seen to be sent again.
    pub retransmissions: u32,
}

impl From<Pace> for Timing {
    fn from(pace: Pace) -> Self {
        Self {
            srtt: pace.srtt,
            retransmissions: pace.retransmissions,
        }
    }
}

/// A flow that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Expired {
    /// As it was at the end.
    pub flow: Flow,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Why it ended.
    pub reason: Reason,
    /// From the first packet to the end.
    pub age: Duration,
    /// From the latest packet to the end.
    pub idle: Duration,
    /// What the initiator has sent and what the responder has; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
    /// How the two have sent, likewise; `None` without `--rto on`.
    pub pace: Option<[Pace; 2]>,
}

impl Expired {
    /// From the data plane's record; `None` for a record that no data plane writes. `one_way`: one side is all that is
    /// ever seen.
    pub fn new(event: &Event, clock: Clock, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        let initiator = seen.initiator();
        Some(Self {
            flow: Flow::new(
                event.key,
                seen,
                event.rule,
                from(event.point, event.is_outgoing),
                one_way,
            )?,
            picked_up: seen.is_pickup(),
            reason: Reason::from_raw(event.reason)?,
            age: clock.duration(event.age.into()),
            idle: clock.duration(u64::from(event.idle)),
            // No flow is without a packet, and no timer without a timeout, unless nobody looks.
            account: in_order(event.account, initiator, |sent| sent.packets > 0),
            pace: in_order(event.pace, initiator, |pace| pace.rto > 0),
        })
    }
}

/// The retransmission timer of one side of a flow has expired.
#[derive(Clone, Copy, Debug)]
pub struct Rto {
    /// The flow, which goes on.
    pub flow: Flow,
    /// Whether it is the initiator that waits.
    pub orig: bool,
    /// Bytes sent and not acknowledged.
    pub outstanding: u32,
    /// Expiries since there was progress before this one.
    pub backoff: u32,
    /// How that side sends.
    pub pace: Pace,
}

impl Rto {
    /// From the data plane's record; `None` for a record that no data plane writes. `one_way` as in [`Expired::new`].
    pub fn new(event: &RtoExpired, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        Some(Self {
            flow: Flow::new(
                event.key,
                seen,
                event.rule,
                from(event.point, event.is_outgoing),
                one_way,
            )?,
            orig: event.direction == seen.initiator() as u16,
            outstanding: event.outstanding,
            backoff: event.expiries.checked_sub(1)?,
            pace: event.pace,
        })
    }
}

fn from(point: Point, is_outgoing: u16) -> Origin {
    Origin {
        point,
        is_outgoing: is_outgoing != 0,
    }
}

/// A state's name.
pub fn state(seen: Seen, one_way: bool) -> &'static str {
    match seen.state() {
        State::Established if !seen.is_replied() && !one_way => "unreplied",
        state => state.name(),
    }
}

/// The initiator's first; `None` if both are nothing.
pub fn in_order<T>(
    [low, high]: [T; 2],
    initiator: Direction,
    is_any: impl Fn(&T) -> bool,
) -> Option<[T; 2]> {
    (is_any(&low) || is_any(&high)).then_some(match initiator {
        Direction::FromLow => [low, high],
        Direction::FromHigh => [high, low],
    })
}
