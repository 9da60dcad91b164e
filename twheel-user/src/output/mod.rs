//! How an ended flow is written: one file a format.

mod json;
mod text;

use std::{io, net::SocketAddr, time::Duration};

use twheel_common::{
    event::{Event, Reason},
    flow::{Direction, Traffic},
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
}

impl Expired {
    /// From the data plane's record; `None` for a record that no data plane writes. `one_way`: one side is all that is
    /// ever seen.
    pub fn new(event: &Event, clock: Clock, one_way: bool) -> Option<Self> {
        let seen = event.seen();
        let initiator = seen.initiator();
        Some(Self {
            proto: match event.key.proto() {
                PROTO_TCP => "tcp",
                PROTO_UDP => "udp",
                PROTO_ICMP => "icmp",
                PROTO_ICMP6 => "icmpv6",
                _ => return None,
            },
            src: event.key.sender(initiator),
            dst: event.key.sender(initiator.reverse()),
            state: state(seen, one_way),
            picked_up: seen.is_pickup(),
            reason: Reason::from_raw(event.reason)?,
            rule: event.rule as u16,
            age: clock.duration(event.age.into()),
            idle: clock.duration(u64::from(event.idle)),
            account: account(event),
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

/// Initiator first. No flow is without a packet, unless nobody counts them.
fn account(event: &Event) -> Option<[Traffic; 2]> {
    let [low, high] = event.account;
    (low.packets + high.packets > 0).then_some(match event.seen().initiator() {
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
}
