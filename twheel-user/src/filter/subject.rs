//! The flow that a filter is asked about: one in the table, or one that has ended.

use std::time::Duration;

use twheel_common::{event::Reason, flow::Traffic};

use crate::model::{Expired, Flow, Named, Timing, Tracked};

/// What can be asked about.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Endpoints, protocol, state.
    pub flow: Flow,
    /// What it is known as.
    pub named: Named<'a>,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Since its latest packet.
    pub idle: Duration,
    /// Since its first packet.
    pub age: Duration,
    /// Of both sides, if that is counted.
    pub account: Option<[Traffic; 2]>,
    /// Of both sides, if there are retransmission timers.
    pub timing: Option<[Timing; 2]>,
    /// Of a flow that is in the table: until it expires.
    pub expires: Option<Duration>,
    /// Likewise: the CPU on whose wheel it stands.
    pub cpu: Option<u32>,
    /// Of one that has ended: why.
    pub reason: Option<Reason>,
    /// Likewise: how long ago.
    pub ended: Option<Duration>,
}

impl<'a> Subject<'a> {
    /// A flow that is in the table.
    pub fn tracked(flow: &Tracked, named: Named<'a>) -> Self {
        Self {
            flow: flow.flow,
            named,
            picked_up: flow.picked_up,
            idle: flow.idle,
            age: flow.age,
            account: flow.account,
            timing: flow.timing,
            expires: Some(flow.expires),
            cpu: Some(flow.cpu),
            reason: None,
            ended: None,
        }
    }

    /// A flow that has ended so long ago.
    pub fn ended(flow: &Expired, named: Named<'a>, ago: Duration) -> Self {
        Self {
            flow: flow.flow,
            named,
            picked_up: flow.picked_up,
            idle: flow.idle,
            age: flow.age,
            account: flow.account,
            timing: flow.pace.map(|sides| sides.map(Timing::from)),
            expires: None,
            cpu: None,
            reason: Some(flow.reason),
            ended: Some(ago),
        }
    }
}
