//! The flow that a filter is applied to: one in the table, or one that has ended.

use std::time::Duration;

use twheel_common::{event::Reason, flow::Traffic};

use crate::model::{Ended, Flow, Named, Timing, Tracked};

/// The values of a flow's fields.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Endpoints, protocol, state.
    pub flow: Flow,
    /// The names that belong to the flow.
    pub named: Named<'a>,
    /// The flow's beginning was not seen.
    pub picked_up: bool,
    /// Time since its latest packet.
    pub idle: Duration,
    /// Time since its first packet.
    pub age: Duration,
    /// What both sides have sent, if that is counted.
    pub account: Option<[Traffic; 2]>,
    /// The timing of both sides, if retransmission timers are tracked.
    pub timing: Option<[Timing; 2]>,
    /// Time until the flow expires, if it is in the table.
    pub expires: Option<Duration>,
    /// The CPU whose wheel holds the flow, if it is in the table.
    pub cpu: Option<u32>,
    /// Why the flow ended, if it has ended.
    pub reason: Option<Reason>,
    /// How long ago the flow ended, if it has ended.
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

    /// A flow that ended this long ago.
    pub fn ended(flow: &Ended, named: Named<'a>, ago: Duration) -> Self {
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
