//! How live flows follow a new policy: the table is swept, and each flow gets the rule that it meets.

use std::fmt;

use anyhow::Result;
use indicatif::HumanCount;
use nix::net::if_::if_nametoindex;
use twheel_common::{
    config::{NAME_BYTES, RULES, UNRULED},
    rule::{Rule, RuleFlags, Timeouts},
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
    /// several. `none`: what is said if no flow did.
    fn write(&self, f: &mut fmt::Formatter<'_>, words: [[&str; 2]; 5], none: &str) -> fmt::Result {
        let flows = if self.all == 1 { "flow" } else { "flows" };
        write!(f, "{} live {flows}: ", HumanCount(self.all))?;
        if !self.are_affected() {
            return f.write_str(none);
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

/// What is said of one flow that a policy concerns, and of several: one that changed, lost, got,
/// may be reaped, is due.
const DID: [[&str; 2]; 5] = [
    ["changed its rule", "changed their rule"],
    ["lost its rule", "lost their rule"],
    ["got a rule"; 2],
    ["may now be reaped"; 2],
    ["is due now", "are due now"],
];

/// What a policy did, as in `1,203 live flows: 3 changed their rule, 1 lost its rule, 2 are due
/// now`.
impl fmt::Display for LiveFlows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, DID, "no change")
    }
}

/// What a policy does to an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// To its live flows.
    pub flows: LiveFlows,
    /// The rules that it keeps and that get other timeouts; `None`: flows of no rule do.
    pub retimed: Vec<Option<String>>,
}

impl Effect {
    /// Whether it changes anything about live flows or their timeouts.
    pub fn is_some(&self) -> bool {
        self.flows.are_affected() || !self.retimed.is_empty()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, words: [[&str; 2]; 5]) -> fmt::Result {
        const NAMED: usize = 5;
        if self.retimed.is_empty() {
            return self.flows.write(f, words, "no change");
        }
        self.flows.write(f, words, "no change of their rules")?;
        let name = |it: &Option<String>| it.clone().unwrap_or("flows of no rule".to_owned());
        let names: Vec<_> = self.retimed.iter().take(NAMED).map(name).collect();
        write!(f, "; other timeouts for {}", names.join(", "))?;
        match self.retimed.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// What a policy did, as in `1,203 live flows: 2 are due now; other timeouts for ssh`.
impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, DID)
    }
}

/// The same of what a policy would do.
pub struct Would<'a>(pub &'a Effect);

impl fmt::Display for Would<'_> {
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

/// Which of the rules of a new policy have other timeouts than those of the same name before.
pub(super) fn retimed<'a>(
    before: impl Fn(Option<&str>) -> Option<Timeouts>,
    new: impl IntoIterator<Item = (Option<&'a str>, &'a Rule)>,
) -> Vec<Option<String>> {
    let differs = |name, rule: &Rule| before(name).is_some_and(|it| it != rule.timeouts);
    let new = new.into_iter().filter(|(name, rule)| differs(*name, rule));
    new.map(|(name, _)| name.map(str::to_owned)).collect()
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
        let effect = |flows: LiveFlows, retimed: &[&str]| Effect {
            flows,
            retimed: retimed.iter().map(|it| Some((*it).to_owned())).collect(),
        };
        assert_eq!(effect(none, &[]).to_string(), "0 live flows: no change");
        let some = LiveFlows {
            all: 1203,
            changed: 3,
            lost: 1,
            gained: 0,
            exposed: 1,
            due: 2,
        };
        assert_eq!(
            effect(some, &["ssh"]).to_string(),
            "1,203 live flows: 3 changed their rule, 1 lost its rule, 1 may now be reaped, 2 are \
             due now; other timeouts for ssh"
        );
        let one = LiveFlows {
            all: 1,
            gained: 1,
            ..none
        };
        assert_eq!(effect(one, &[]).to_string(), "1 live flow: 1 got a rule");
        assert_eq!(
            Would(&effect(some, &[])).to_string(),
            "1,203 live flows: 3 would change their rule, 1 would lose its rule, 1 might be reaped \
             then, 2 would be due at once"
        );
        let same = LiveFlows { all: 7, ..none };
        let mut of_none = effect(same, &["a", "b", "c", "d", "e", "f", "g"]);
        of_none.retimed[0] = None;
        assert_eq!(
            of_none.to_string(),
            "7 live flows: no change of their rules; other timeouts for flows of no rule, b, c, d, e \
             and 2 more"
        );
        assert!(of_none.is_some() && !effect(same, &[]).is_some());
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
