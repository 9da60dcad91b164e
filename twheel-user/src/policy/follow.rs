//! How live flows follow a new policy: the table is swept, and each flow gets the rule that it meets.

use std::fmt;

use anyhow::Result;
use indicatif::HumanCount;
use nix::net::if_::if_nametoindex;
use twheel_common::{
    config::{NAME_BYTES, RULES, UNRULED},
    rule::{Rule, RuleFlags},
    step::{MAX_SWEEP, Sweep},
};

use crate::{
    call::on_each_cpu,
    flows::Flows,
    maps::{Open, array, pinned},
    pins::Pins,
    progress::ProgressBar,
    watched,
};

/// What a new policy does to the live flows of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveFlows {
    /// All live flows.
    pub all: u64,
    /// Those that had a rule and have another one.
    pub changed: u64,
    /// Those that had a rule and have none.
    pub lost: u64,
    /// Those that had no rule and have one.
    pub gained: u64,
    /// Those that were not to be reaped and may be now.
    pub exposed: u64,
    /// Those that are due: their timeout has passed.
    pub due: u64,
}

impl LiveFlows {
    /// Whether the policy changes anything about live flows.
    pub fn are_affected(&self) -> bool {
        let Self {
            all: _,
            changed,
            lost,
            gained,
            exposed,
            due,
        } = *self;
        changed | lost | gained | exposed | due != 0
    }

    /// `words`: what is said of one flow that changed, lost, gained, is exposed, is due; and of
    /// several.
    fn write(&self, f: &mut fmt::Formatter<'_>, words: [[&str; 2]; 5]) -> fmt::Result {
        let flows = if self.all == 1 { "flow" } else { "flows" };
        write!(f, "{} live {flows}: ", HumanCount(self.all))?;
        if !self.are_affected() {
            return f.write_str("no change");
        }
        let numbers = [self.changed, self.lost, self.gained, self.exposed, self.due];
        let parts = numbers.into_iter().zip(words).filter(|part| part.0 != 0);
        for (at, (number, [one, many])) in parts.enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            let what = if number == 1 { one } else { many };
            write!(f, "{comma}{} {what}", HumanCount(number))?;
        }
        Ok(())
    }

    fn add(&mut self, swept: &Sweep) {
        let followed = &swept.followed;
        for (sum, of) in [
            (&mut self.all, swept.flows),
            (&mut self.changed, followed.changed),
            (&mut self.lost, followed.lost),
            (&mut self.gained, followed.gained),
            (&mut self.exposed, followed.exposed),
            (&mut self.due, followed.due),
        ] {
            *sum += u64::from(of);
        }
    }
}

/// What a policy did, as in `1,203 live flows: 3 changed their rule, 1 lost its rule, 2 are due
/// now`.
impl fmt::Display for LiveFlows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(
            f,
            [
                ["changed its rule", "changed their rule"],
                ["lost its rule", "lost their rule"],
                ["got a rule"; 2],
                ["may now be reaped"; 2],
                ["is due now", "are due now"],
            ],
        )
    }
}

/// The same of what a policy would do.
pub struct Would(pub LiveFlows);

impl fmt::Display for Would {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(
            f,
            [
                ["would change its rule", "would change their rule"],
                ["would lose its rule", "would lose their rule"],
                ["would get a rule"; 2],
                ["might be reaped then"; 2],
                ["would be due at once"; 2],
            ],
        )
    }
}

/// Gives all flows of an instance the rules that they meet, and arms them by the present timeouts,
/// each on its own CPU.
pub fn sweep_all(pins: &Pins, progress: &ProgressBar) -> Result<LiveFlows> {
    let open = pinned(pins);
    let records = Flows::pinned(pins)?.records();
    let interface = only_interface(pins)?;
    let mut flows = LiveFlows::default();
    on_each_cpu(pins, |program, cpus| {
        progress.set_length(u64::from(records) * cpus as u64);
        let call = |call| program.sweep(Sweep { interface, ..call });
        sweep(call, records, progress, &mut flows)
    })?;
    settle(&open)?;
    Ok(flows)
}

/// The index of the interface of an instance that was made for a single one; 0 if there is none of
/// its name now.
pub(super) fn only_interface(pins: &Pins) -> Result<u32> {
    let index = |name: String| if_nametoindex(name.as_str()).ok();
    Ok(watched::only(pins)?.and_then(index).unwrap_or(0))
}

/// Sweeps the flows of one CPU's wheel, in a table of `records` records, and adds them up. This
/// thread must be pinned to that CPU. The progress counts records.
pub fn sweep(
    sweep: impl Fn(Sweep) -> Result<Sweep>,
    records: u32,
    progress: &ProgressBar,
    flows: &mut LiveFlows,
) -> Result<()> {
    for from in (0..records).step_by(MAX_SWEEP as usize) {
        let call = Sweep {
            from,
            count: MAX_SWEEP.min(records - from),
            ..Sweep::default()
        };
        flows.add(&sweep(call)?);
        progress.inc(call.count.into());
    }
    Ok(())
}

/// Ends the transition to a policy. To be called once the table has been swept: no flow has the
/// number of a rule that no longer exists, so its name is removed, and each rule's actions apply.
pub fn settle(open: Open<'_>) -> Result<()> {
    let mut names = array::<[u8; NAME_BYTES]>(open, "NAMES")?;
    let mut rules = array::<Rule>(open, "TIMEOUTS")?;
    const { assert!(UNRULED as usize == RULES - 1) };
    for number in 0..u32::from(UNRULED) {
        let mut rule = rules.get(&number, 0)?;
        if rule.is_gone() {
            names.set(number, [0; NAME_BYTES], 0)?;
        } else if rule.was_spared() {
            rule.flags = rule.flags.without(RuleFlags::SPARED);
            rules.set(number, rule, 0)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_policy_does_is_one_line() {
        let none = LiveFlows::default();
        assert_eq!(none.to_string(), "0 live flows: no change");
        let some = LiveFlows {
            all: 1203,
            changed: 3,
            lost: 1,
            gained: 0,
            exposed: 1,
            due: 2,
        };
        assert_eq!(
            some.to_string(),
            "1,203 live flows: 3 changed their rule, 1 lost its rule, 1 may now be reaped, 2 are \
             due now"
        );
        let one = LiveFlows {
            all: 1,
            gained: 1,
            ..none
        };
        assert_eq!(one.to_string(), "1 live flow: 1 got a rule");
        assert_eq!(
            Would(some).to_string(),
            "1,203 live flows: 3 would change their rule, 1 would lose its rule, 1 might be reaped \
             then, 2 would be due at once"
        );
        let each: [fn(&mut LiveFlows); 5] = [
            |it| it.changed = 1,
            |it| it.lost = 1,
            |it| it.gained = 1,
            |it| it.exposed = 1,
            |it| it.due = 1,
        ];
        assert!(!LiveFlows { all: 1, ..none }.are_affected());
        for set in each {
            let mut flows = none;
            set(&mut flows);
            assert!(flows.are_affected());
        }
    }
}
