//! A rule's timeouts: how long its flows may be idle.

use twheel_common::{
    rule::{Rule, RuleFlags, Timeouts},
    seen::Seen,
};

use crate::{config, maps::TIMEOUTS};

/// How long a flow with this rule and these state bits may be idle, in units.
#[inline(always)]
pub fn timeout(rule: u16, seen: Seen) -> u32 {
    let Some(timeouts) = TIMEOUTS.get_ptr(rule.into()) else {
        return u32::MAX >> 2;
    };
    let number = Timeouts::number(seen) & 15;
    // SAFETY: a place in a map, of aligned numbers. Volatile, because userspace changes them.
    let of = |number| unsafe { timeouts.cast::<u32>().add(number).read_volatile() };
    let timeout = of(number);
    if config::rto_is_on() && seen.is_stalled() {
        let most = of(Timeouts::RETRANS);
        return if most < timeout { most } else { timeout };
    }
    timeout
}

/// Whether the policy no longer has the rule.
#[inline(always)]
pub fn is_gone(rule: u16) -> bool {
    flags(rule).has(RuleFlags::GONE)
}

/// Whether the policy before did nothing to the rule's expired flows.
#[inline(always)]
pub fn was_spared(rule: u16) -> bool {
    flags(rule).has(RuleFlags::SPARED)
}

#[inline(always)]
fn flags(rule: u16) -> RuleFlags {
    let Some(rule) = TIMEOUTS.get_ptr(rule.into()) else {
        return RuleFlags::default();
    };
    let rule: *const Rule = rule;
    // SAFETY: a place in a map. Volatile, because userspace changes it.
    unsafe { (&raw const (*rule).flags).read_volatile() }
}

/// Whether anything is done to the rule's expired flows.
#[inline(always)]
pub fn reaps(rule: u16) -> bool {
    let Some(rule) = TIMEOUTS.get_ptr(rule.into()) else {
        return false;
    };
    let rule: *const Rule = rule;
    // SAFETY: as above.
    unsafe { (&raw const (*rule).actions).read_volatile() != 0 }
}
