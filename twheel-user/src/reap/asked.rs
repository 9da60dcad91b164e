//! The actions that the policy in force asks for.

use std::collections::BTreeMap;

use anyhow::Result;
use twheel_common::{
    counter::Counter,
    event::{Event, Reason, Record},
    rule::Rule,
};

use crate::{
    action::Actions,
    data_plane::UserCounters,
    maps,
    pins::Pins,
    policy::{cgroups::CgroupSet, install::InForce},
};

/// The actions that the rules of the policy in force ask for.
pub(super) struct ActionsInForce {
    rules: InForce,
    pins: Pins,
}

impl ActionsInForce {
    pub(super) fn open(pins: &Pins) -> Result<Self> {
        Ok(Self {
            rules: InForce::open(&maps::pinned(pins))?,
            pins: pins.clone(),
        })
    }

    pub(super) fn of_rule(&self, rule: u32) -> Result<Actions> {
        Ok(Actions::from_bits(self.rule(rule)?.actions))
    }

    pub(super) fn rule(&self, rule: u32) -> Result<Rule> {
        self.rules.rule(rule as u16)
    }

    /// The number that a flow of this rule gets if it is tracked again.
    pub(super) fn number(&self, rule: u16) -> Result<u16> {
        self.rules.number(rule)
    }

    /// The cgroups that the actions on a rule's flows are limited to; `None`: to none.
    pub(super) fn cgroups(&self, rule: u32) -> Result<Option<CgroupSet>> {
        Ok(CgroupSet::of_rule(&self.rule(rule)?))
    }

    /// Their paths.
    pub(super) fn paths(&self, set: CgroupSet) -> Result<Vec<String>> {
        set.paths(&self.pins)
    }

    /// The expired flows of a batch for which there are actions.
    pub(super) fn in_batch(&self, batch: &[Record]) -> Result<Vec<(Event, Actions)>> {
        let mut known: BTreeMap<u32, Actions> = BTreeMap::new();
        let mut asked = Vec::new();
        for record in batch {
            let Record::Ended(event) = record else {
                continue;
            };
            // Flows that were closed or reset have ended by themselves; flows that ended for other
            // reasons were not idle for their timeout.
            if event.reason != Reason::Idle as u32 {
                continue;
            }
            let actions = match known.get(&u32::from(event.rule)) {
                Some(actions) => *actions,
                None => {
                    let actions = self.of_rule(event.rule.into())?;
                    known.insert(event.rule.into(), actions);
                    actions
                }
            };
            if !actions.is_empty() {
                asked.push((*event, actions));
            }
        }
        Ok(asked)
    }
}

/// Actions that were asked for and whose outcome is not known.
pub(super) fn unsettled(tally: &UserCounters) -> Result<u64> {
    let known = tally.get(Counter::ReapSettled)? + tally.get(Counter::ReapLost)?;
    Ok(tally.get(Counter::ReapAsked)?.saturating_sub(known))
}

/// The number of actions that the policy in force asks for on the flows of a batch.
pub fn asked(pins: &Pins, batch: &[Record]) -> Result<u64> {
    let asked = ActionsInForce::open(pins)?;
    Ok(number(&asked.in_batch(batch)?))
}

/// The number of actions on these flows.
pub(super) fn number(flows: &[(Event, Actions)]) -> u64 {
    let actions = flows.iter().map(|(_, actions)| actions.iter().count());
    actions.sum::<usize>() as u64
}
