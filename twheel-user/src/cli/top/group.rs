//! Flows in groups: by source, service, state or rule.

use std::{collections::HashMap, net::IpAddr};

use super::{order::GroupSort, scan::Row, speed::both, views::View};
use crate::inspect::Reader;

/// Most groups that are shown; the others are counted.
const MOST: usize = 10_000;

/// What flows of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// The initiator's address.
    Source(IpAddr),
    /// The protocol and the responder's port.
    Service(&'static str, u16),
    /// The state.
    State(&'static str),
    /// The number of the rule; 0: none.
    Rule(u16),
}

/// The flows of a group, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Flows.
    pub flows: u64,
    /// Packets of both sides.
    pub packets: u64,
    /// Bytes of both sides.
    pub bytes: u64,
    /// Bits a second of the initiators and of the responders.
    pub bits_a_second: [f64; 2],
    /// Packets a second of both.
    pub packets_a_second: f64,
}

impl Sum {
    /// Bits a second of both sides.
    pub fn bits(&self) -> f64 {
        self.bits_a_second[0] + self.bits_a_second[1]
    }
}

impl Group {
    /// The group of a flow; `None` in views that have no groups.
    fn of(view: View, row: &Row) -> Option<Self> {
        let flow = &row.tracked.flow;
        match view {
            View::Sources => Some(Self::Source(flow.src.ip())),
            View::Services => Some(Self::Service(flow.proto, flow.dst.port())),
            View::States => Some(Self::State(flow.state)),
            View::Rules => Some(Self::Rule(flow.rule)),
            View::Flows | View::Reasons | View::Cost => None,
        }
    }

    /// A filter that only flows of this group match; `None` if the language has none.
    pub fn filter(&self, reader: &Reader) -> Option<String> {
        match self {
            Self::Source(address) => Some(format!("src == {address}")),
            Self::Service(proto @ ("tcp" | "udp"), port) => {
                Some(format!("proto == {proto} and dport == {port}"))
            }
            Self::Service(proto, _) => Some(format!("proto == {proto}")),
            Self::State(state) => Some(format!("state == {state}")),
            Self::Rule(number) => Some(format!("rule == \"{}\"", reader.rule(*number)?)),
        }
    }

    /// As it is shown.
    pub fn text(&self, reader: &Reader) -> String {
        match self {
            Self::Source(address) => address.to_string(),
            Self::Service(proto @ ("tcp" | "udp"), port) => format!("{proto}/{port}"),
            Self::Service(proto, _) => (*proto).to_owned(),
            Self::State(state) => (*state).to_owned(),
            Self::Rule(0) => "-".to_owned(),
            Self::Rule(number) => {
                let name = reader.rule(*number);
                name.map_or_else(
                    || number.to_string(),
                    |name| name.escape_debug().to_string(),
                )
            }
        }
    }
}

/// Counts flows by group.
pub struct Groups {
    view: View,
    sums: HashMap<Group, Sum>,
}

impl Groups {
    /// For a view.
    pub fn new(view: View) -> Self {
        Self {
            view,
            sums: HashMap::new(),
        }
    }

    /// Counts a flow.
    pub fn take(&mut self, row: &Row) {
        let Some(group) = Group::of(self.view, row) else {
            return;
        };
        let sum = self.sums.entry(group).or_default();
        let sent = both(row.tracked.account);
        let speed = row.speed.unwrap_or_default();
        sum.flows += 1;
        sum.packets += sent.packets;
        sum.bytes += sent.bytes;
        sum.packets_a_second += f64::from(speed.packets);
        for (to, bits) in sum.bits_a_second.iter_mut().zip(speed.bits) {
            *to += f64::from(bits);
        }
    }

    /// The groups in order, and how many there are in all.
    pub fn sorted(self, sort: GroupSort, reverse: bool) -> (Vec<(Group, Sum)>, u64) {
        let count = self.sums.len() as u64;
        let mut groups: Vec<_> = self.sums.into_iter().collect();
        groups.sort_unstable_by(|(one, sum), (two, other)| {
            let order = sort.compare(sum, other);
            let order = if reverse { order.reverse() } else { order };
            order.then_with(|| one.cmp(two))
        });
        groups.truncate(MOST);
        (groups, count)
    }
}
