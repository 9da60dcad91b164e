//! How an ended flow is written: one file a format.

mod json;
mod text;

use std::{io, net::SocketAddr, time::Duration};

use twheel_common::{
    event::{Event, Pace, Reason, RtoExpired},
    flow::{Direction, FlowKey, Traffic},
    packet::{PROTO_ICMP, PROTO_ICMP6, PROTO_TCP, PROTO_UDP},
    state::{Seen, State},
};

pub use self::{json::Json, text::Text};
use crate::clock::Clock;

/// A flow that has ended, in the words of its readers.
#[derive(Clone, Copy, Debug)]
pub struct Expired {
    /// The protocol's name.
    pub proto: &'static str,
    /// The initiator, as far as that is known.
    pub src: SocketAddr,
    /// The responder.
    pub dst: SocketAddr,
    /// State at the end, by name; `unreplied` where it is established and one side was never seen.
    pub state: &'static str,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Why it ended.
    pub reason: Reason,
    /// Number of the rule that it had met; 0 for none.
    pub rule: u16,
    /// From the first packet to the end.
    pub age: Duration,
    /// From the latest packet to the end.
    pub idle: Duration,
    /// What the initiator has sent and what the responder has; `None` without `--accounting`.
    pub account: Option<[Traffic; 2]>,
    /// How the two have sent, likewise; `None` without `--rto on`.
    pub pace: Option<[Pace; 2]>,
    /// Nobody answered the retransmissions of one of the two.
    pub stalled: bool,
}

/// The retransmission timer of one side of a flow has expired.
#[derive(Clone, Copy, Debug)]
pub struct Rto {
    /// The protocol's name.
    pub proto: &'static str,
    /// The initiator, as far as that is known.
    pub src: SocketAddr,
    /// The responder.
    pub dst: SocketAddr,
    /// State of the flow, as in [`Expired`].
    pub state: &'static str,
    /// Number of the rule that it has met; 0 for none.
    pub rule: u16,
    /// Whether it is the initiator that waits.
    pub orig: bool,
    /// Bytes sent and not acknowledged.
    pub outstanding: u32,
    /// Expiries since there was progress before this one.
    pub backoff: u32,
    /// How that side sends.
    pub pace: Pace,
    /// The flow is stalled.
    pub stalled: bool,
}

impl Rto {
    /// From the data plane's record; `None` for a record that no data plane writes.
    pub fn new(event: &RtoExpired, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        let initiator = seen.initiator();
        Some(Self {
            proto: proto(event.key)?,
            src: event.key.sender(initiator),
            dst: event.key.sender(initiator.reverse()),
            state: state(seen, one_way),
            rule: event.rule as u16,
            orig: event.direction == initiator as u32,
            outstanding: event.outstanding,
            backoff: event.expiries.checked_sub(1)?,
            pace: event.pace,
            stalled: seen.is_stalled(),
        })
    }
}

fn proto(key: FlowKey) -> Option<&'static str> {
    Some(match key.proto() {
        PROTO_TCP => "tcp",
        PROTO_UDP => "udp",
        PROTO_ICMP => "icmp",
        PROTO_ICMP6 => "icmpv6",
        _ => return None,
    })
}

impl Expired {
    /// From the data plane's record; `None` for a record that no data plane writes. `one_way`: one side is all that is
    /// ever seen.
    pub fn new(event: &Event, clock: Clock, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        let initiator = seen.initiator();
        Some(Self {
            proto: proto(event.key)?,
            src: event.key.sender(initiator),
            dst: event.key.sender(initiator.reverse()),
            state: state(seen, one_way),
            picked_up: seen.is_pickup(),
            reason: Reason::from_raw(event.reason)?,
            rule: event.rule as u16,
            age: clock.duration(event.age.into()),
            idle: clock.duration(u64::from(event.idle)),
            // No flow is without a packet, and no timer without a timeout, unless nobody looks.
            account: in_order(event.account, initiator, |sent| sent.packets > 0),
            pace: in_order(event.pace, initiator, |pace| pace.rto > 0),
            stalled: seen.is_stalled(),
        })
    }
}

/// A state's name.
fn state(seen: Seen, one_way: bool) -> &'static str {
    match seen.state() {
        State::Established if !seen.is_replied() && !one_way => "unreplied",
        state => state.name(),
    }
}

/// The initiator's first; `None` if both are nothing.
fn in_order<T>(
    [low, high]: [T; 2],
    initiator: Direction,
    is_any: impl Fn(&T) -> bool,
) -> Option<[T; 2]> {
    (is_any(&low) || is_any(&high)).then_some(match initiator {
        Direction::FromLow => [low, high],
        Direction::FromHigh => [high, low],
    })
}

/// Writes ended flows.
pub trait Output {
    /// Writes one, with the name of its rule.
    fn expired(
        &mut self,
        flow: &Expired,
        rule: Option<&str>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the expiry of a retransmission timer, with the name of the flow's rule.
    fn rto(&mut self, timer: &Rto, rule: Option<&str>, to: &mut dyn io::Write) -> io::Result<()>;
}
