//! Flows as users see them: those in the table, and those that have ended.

use std::{
    net::SocketAddr,
    ops::Deref,
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer};
use twheel_common::{
    event::{self, Event, Pace, Reason, Record, RtoExpired},
    flow::{Direction, FlowKey, Traffic},
    named,
    packet::{PROTO_ICMP, PROTO_ICMP6, PROTO_TCP, PROTO_UDP},
    point::Point,
    policy::Hook,
    rto::Side,
    state::{Seen, State},
};

use crate::{clock::Clock, owner::Owner};

/// How to read the numbers in the data plane's records.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// The data plane's clock.
    pub clock: Clock,
    /// Only one side of each flow is ever seen.
    pub one_way: bool,
}

/// A flow, as users see it.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The protocol's name.
    pub proto: &'static str,
    /// The initiator, as far as it is known.
    pub src: SocketAddr,
    /// The responder.
    pub dst: SocketAddr,
    /// The state's name; `unreplied` if the flow is established and one side was never seen.
    pub state: &'static str,
    /// Number of the rule that the flow matches; 0: none.
    pub rule: u16,
    /// The outer and the inner VLAN in which the flow was seen; 0: none.
    pub vlans: [u16; 2],
    /// The zone, as an index into the table of zones; 0: none.
    pub zone: u8,
    /// The interface where the initiator's packets are counted, as an index; 0: the only interface.
    pub place: u32,
    /// Whether the initiator's packets are outgoing at that interface.
    pub is_outgoing: bool,
    /// One side retransmits and gets no answer.
    pub stalled: bool,
    /// Packets of both sides were seen.
    pub replied: bool,
    /// Tells the flow from all others.
    pub birth: Birth,
}

/// What tells one life of a flow from all others of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Birth {
    /// The flow's key.
    pub key: FlowKey,
    /// Low 32 bits of the clock at its first packet, in units.
    pub created: u32,
    /// Its generation.
    pub generation: u16,
}

impl Flow {
    /// `None` if twheel does not track the protocol. `one_way`: only one side of each flow is ever
    /// seen.
    pub fn new(birth: Birth, seen: Seen, rule: u16, from: Origin, one_way: bool) -> Option<Self> {
        let key = birth.key;
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
            place: from.point.interface(),
            is_outgoing: match from.point {
                Point::NONE => from.is_outgoing,
                point => point.hook() == Hook::Egress,
            },
            stalled: seen.is_stalled(),
            replied: seen.is_replied(),
            birth,
        })
    }

    /// `in` or `out`: the direction of the initiator's packets at the interface where they are
    /// counted.
    pub fn direction(&self) -> &'static str {
        match self.is_outgoing {
            true => "out",
            false => "in",
        }
    }
}

/// Where the initiator's packets are seen, from the data plane's record.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// Where the initiator's packets are counted.
    pub point: Point,
    /// Whether the flow's first packet was outgoing.
    pub is_outgoing: bool,
}

/// The names that belong to a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Named<'a> {
    /// The rule that the flow matches.
    pub rule: Option<&'a str>,
    /// The interface where the initiator's packets are counted.
    pub iface: Option<&'a str>,
    /// The zone, as conntrack's number; 0: none.
    pub zone: u16,
    /// The endpoints on the other side of a network address translation.
    pub nat: Option<Translation>,
    /// Whose its local socket is, if that was asked for and is known.
    pub owner: Option<&'a Owner>,
}

/// The initiator and the responder of a flow, as the packets on the other side of a network address
/// translation have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The initiator.
    pub src: SocketAddr,
    /// The responder.
    pub dst: SocketAddr,
}

/// An owned [`Named`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownAs {
    /// The rule that the flow matches.
    pub rule: Option<String>,
    /// The interface where the initiator's packets are counted.
    pub iface: Option<String>,
    /// The zone, as conntrack's number; 0: none.
    pub zone: u16,
    /// As in [`Named`].
    pub nat: Option<Translation>,
    /// As in [`Named`].
    pub owner: Option<Arc<Owner>>,
}

impl KnownAs {
    /// The same, borrowed.
    pub fn named(&self) -> Named<'_> {
        Named {
            rule: self.rule.as_deref(),
            iface: self.iface.as_deref(),
            zone: self.zone,
            nat: self.nat,
            owner: self.owner.as_deref(),
        }
    }
}

/// A flow that is in the table.
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// The flow's present state.
    pub flow: Flow,
    /// The flow's beginning was not seen.
    pub picked_up: bool,
    /// Time since the first packet.
    pub age: Duration,
    /// Time since the latest packet.
    pub idle: Duration,
    /// Time until the flow expires if no packet comes; 0 if it is due.
    pub expires: Duration,
    /// The CPU whose wheel holds the flow.
    pub cpu: u32,
    /// What the initiator and the responder have sent; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
    /// The timing of the initiator and the responder; `None` without `--rto on`.
    pub timing: Option<[Timing; 2]>,
}

/// What the retransmission timer knows of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Smoothed round-trip time, microseconds; 0 if there was no sample.
    pub srtt: u32,
    /// Segments that were seen to be retransmitted.
    pub retransmissions: u32,
}

impl From<Side> for Timing {
    fn from(side: Side) -> Self {
        Self {
            srtt: side.srtt.get(),
            retransmissions: side.retransmissions(),
        }
    }
}

impl From<Pace> for Timing {
    fn from(pace: Pace) -> Self {
        Self {
            srtt: pace.srtt,
            retransmissions: pace.retransmissions,
        }
    }
}

/// Which event it is, and when it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Its number among the instance's events.
    pub number: u64,
    /// The time of the decision.
    pub time: SystemTime,
}

named! {
    /// The kinds of events.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum EventKind {
        /// a flow has begun
        Begin = "begin",
        /// a flow lives on
        Update = "update",
        /// a flow has ended
        End = "end",
        /// a retransmission timer has expired
        Rto = "rto",
        /// an action on an expired flow was taken, or not
        Reap = "reap",
        /// the run itself: attached, lost, summary and so on
        Run = "run",
    }
}

named! {
    /// What a run tells of itself.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Happened {
        /// packets of an interface are seen from now on
        Attached = "attached",
        /// packets of an interface are no longer seen
        Detached = "detached",
        /// the flows of an earlier run are tracked on
        Adopted = "adopted",
        /// nothing is reaped any more: too many flows would have been
        Paused = "paused",
        /// flows are reaped again
        Resumed = "resumed",
        /// events are missing: from the ring, or from the history
        Lost = "lost",
        /// the run ends
        Summary = "summary",
    }
}

impl Serialize for Happened {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

/// What a run tells of itself, with what applies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunEvent {
    /// What happened.
    pub what: Happened,
    /// The interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iface: Option<String>,
    /// The hook for the packets that come in on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hook: Option<&'static str>,
    /// The flows that are adopted, or in the table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flows: Option<u64>,
    /// The flows whose ends this run has reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// The events that the instance has lost so far, in the ring and in the history.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

impl RunEvent {
    /// Something that happened, without more to tell of it.
    pub fn new(what: Happened) -> Self {
        Self {
            what,
            iface: None,
            hook: None,
            flows: None,
            ended: None,
            lost: None,
        }
    }

    /// Something about an interface.
    pub fn at(what: Happened, iface: &str) -> Self {
        Self {
            iface: Some(iface.to_owned()),
            ..Self::new(what)
        }
    }
}

/// What a record of the ring tells of a flow.
#[derive(Clone, Copy, Debug)]
pub enum FlowEvent {
    /// The flow has begun.
    Begun(Updated),
    /// The flow lives on.
    Updated(Updated),
    /// The flow has ended.
    Ended(Ended),
    /// The retransmission timer of one side has expired.
    Rto(Rto),
}

impl FlowEvent {
    /// From the data plane's record; `None` if no data plane writes such a record.
    pub fn new(record: &Record, measure: Measure) -> Option<Self> {
        let Measure { clock, one_way } = measure;
        match record {
            Record::Begun(event) => Updated::new(event, clock, one_way).map(Self::Begun),
            Record::Updated(event) => Updated::new(event, clock, one_way).map(Self::Updated),
            Record::Ended(event) => Ended::new(event, clock, one_way).map(Self::Ended),
            Record::Rto(event) => Rto::new(event, clock, one_way).map(Self::Rto),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> EventKind {
        match self {
            Self::Begun(_) => EventKind::Begin,
            Self::Updated(_) => EventKind::Update,
            Self::Ended(_) => EventKind::End,
            Self::Rto(_) => EventKind::Rto,
        }
    }

    /// The flow.
    pub fn flow(&self) -> &Flow {
        match self {
            Self::Begun(updated) | Self::Updated(updated) => &updated.flow,
            Self::Ended(ended) => &ended.flow,
            Self::Rto(timer) => &timer.flow,
        }
    }
}

/// A flow that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// How the flow was at its end.
    pub last: Updated,
    /// Why it ended.
    pub reason: Reason,
}

impl Deref for Ended {
    type Target = Updated;

    fn deref(&self) -> &Updated {
        &self.last
    }
}

impl Ended {
    /// From the data plane's record; `None` if no data plane writes such a record. `one_way`: only
    /// one side of each flow is ever seen.
    pub fn new(event: &Event, clock: Clock, one_way: bool) -> Option<Self> {
        Some(Self {
            last: Updated::new(event, clock, one_way)?,
            reason: Reason::from_raw(event.reason)?,
        })
    }
}

/// How a flow was at an event.
#[derive(Clone, Copy, Debug)]
pub struct Updated {
    /// The flow's state at the event.
    pub flow: Flow,
    /// The flow's beginning was not seen.
    pub picked_up: bool,
    /// Time from the first packet to the event.
    pub age: Duration,
    /// Time from the latest packet to the event.
    pub idle: Duration,
    /// What the initiator and the responder have sent; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
    /// The timing of the initiator and the responder; `None` without `--rto on`.
    pub pace: Option<[Pace; 2]>,
    /// What no earlier update has reported; `None` if live flows are not reported.
    pub interval: Option<Interval>,
}

impl Updated {
    /// As [`Ended::new`].
    pub fn new(event: &Event, clock: Clock, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        let initiator = seen.initiator();
        // A flow has at least one packet, and a retransmission timer has a timeout. So all are zero
        // only if accounting, or `--rto`, is off.
        let is_any = |sent: &Traffic| sent.packets > 0;
        let account = in_order(event.account, initiator, is_any);
        Some(Self {
            flow: Flow::new(
                birth(&event.key, (event.at, event.age), event.birth),
                seen,
                event.rule,
                from(event.point, event.birth),
                one_way,
            )?,
            picked_up: seen.is_pickup(),
            age: clock.duration(event.age.into()),
            idle: clock.duration(u64::from(event.idle)),
            account,
            pace: in_order(event.pace, initiator, |pace| pace.rto > 0),
            interval: (event.updates != 0).then(|| Interval {
                length: clock.duration(event.since.into()),
                account: account.map(|now| {
                    let before = in_order(event.before, initiator, is_any).unwrap_or_default();
                    [less(now[0], before[0]), less(now[1], before[1])]
                }),
            }),
        })
    }
}

/// The part of a flow's life since its last update, or since its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Its length.
    pub length: Duration,
    /// What the initiator and the responder have sent in it; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
}

fn less(now: Traffic, before: Traffic) -> Traffic {
    Traffic {
        packets: now.packets.saturating_sub(before.packets),
        bytes: now.bytes.saturating_sub(before.bytes),
    }
}

/// The retransmission timer of one side of a flow expired.
#[derive(Clone, Copy, Debug)]
pub struct Rto {
    /// The flow, which stays in the table.
    pub flow: Flow,
    /// Time from the flow's first packet to the expiry of the timer.
    pub age: Duration,
    /// Whether the timer is the initiator's.
    pub orig: bool,
    /// Bytes that this side has sent and that are not acknowledged.
    pub outstanding: u32,
    /// Earlier expiries of this timer since the latest progress.
    pub backoff: u32,
    /// The timing of this side.
    pub pace: Pace,
}

impl Rto {
    /// From the data plane's record; `None` if no data plane writes such a record. `one_way` as in
    /// [`Ended::new`].
    pub fn new(event: &RtoExpired, clock: Clock, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        Some(Self {
            flow: Flow::new(
                birth(&event.key, (event.at, event.age), event.birth),
                seen,
                event.rule,
                from(event.point, event.birth),
                one_way,
            )?,
            age: clock.duration(event.age.into()),
            orig: event.direction == seen.initiator() as u16,
            outstanding: event.outstanding,
            backoff: event.expiries.checked_sub(1)?,
            pace: event.pace,
        })
    }
}

fn from(point: Point, birth: event::Birth) -> Origin {
    Origin {
        point,
        is_outgoing: birth.is_outgoing(),
    }
}

/// `at`: the time of the event and the flow's age, in units.
fn birth(key: &FlowKey, (at, age): (u64, u32), birth: event::Birth) -> Birth {
    Birth {
        key: *key,
        created: (at as u32).wrapping_sub(age),
        generation: birth.generation(),
    }
}

/// A state's name.
pub fn state(seen: Seen, one_way: bool) -> &'static str {
    match seen.state() {
        State::Established if !seen.is_replied() && !one_way => "unreplied",
        state => state.name(),
    }
}

/// The initiator's value first; `None` if `is_any` is false for both.
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
