//! Puts a policy into force in a data plane, while it runs.
//!
//! The maps have space for two policies. The new one is written beside the one in force, and a
//! single store puts it into force; if anything fails before that, the old one stays in force. A
//! flow stores the number of the rule that it matched. A rule keeps its number from one policy to
//! the next by its name. Finally the table is [swept](super::follow): each flow gets the rule that
//! it meets now.
//!
//! Until its flows have been swept, a rule that no longer exists keeps its timeouts. And as long as
//! flows may still have a rule that protected them by the policy before, they stay protected
//! ([`SPARED`](RuleFlags::SPARED)).

use std::{collections::BTreeMap, fs::File, path::Path};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use nix::{fcntl::Flock, net::if_::if_nametoindex};
use twheel_common::{
    config::{Config, Features, Meta, NAME_BYTES, RULES, UNRULED},
    policy::{
        Active, Ends, Header, MAX_CLASSES, MAX_ZONES, Named, PortClasses, Prefix, Rules, Tables,
    },
    rule::{Rule, RuleFlags, Timeouts as Numbers},
    state::State,
    wheel::WheelScheme,
};
use zerocopy::transmute;

use super::{
    cgroups,
    compile::Compiled,
    follow::{self, Effect, retimed},
    rule::{Policy, Reap, Timeouts},
};
use crate::{
    action::Action,
    clock::Clock,
    failure::{Failure, Kind},
    maps::{Open, array, pinned},
    pins::Pins,
    progress::ProgressBar,
    settings::longest_timeout,
    toml_file::refuse,
    zones::Zones,
};

/// Puts a policy file into force in an instance; without a file, ends the policy in force. Returns
/// what that did.
///
/// # Errors
///
/// What is wrong with the file, as `FILE:LINE:COLUMN: …`; the policy in force stays.
pub fn load(
    pins: &Pins,
    file: Option<&Path>,
    clock: Clock,
    progress: &ProgressBar,
) -> Result<Effect> {
    let (_lock, retimed) = put(pins, file, clock)?;
    let flows = follow::sweep_all(pins, progress)?;
    Ok(Effect { flows, retimed })
}

/// The same in an instance that has no flows yet.
///
/// # Errors
///
/// As [`load`].
pub fn begin(pins: &Pins, file: Option<&Path>, clock: Clock) -> Result<()> {
    let _lock = put(pins, file, clock)?;
    follow::settle(&pinned(pins))
}

/// Checks whether a policy file can be put into force in an instance of this configuration.
///
/// # Errors
///
/// As [`load`].
pub fn check(file: &Path, clock: Clock, config: &Config) -> Result<()> {
    let policy = read(file, clock, &meta_of(config))?;
    policy.compile(|name| if_nametoindex(name).ok()).map(drop)
}

/// Those fields of an instance of this configuration that a policy depends on.
fn meta_of(config: &Config) -> Meta {
    Meta {
        tick: config.tick,
        geometry: config.geometry,
        features: Features::needed_by(config),
        ..Meta::default()
    }
}

/// Whether a policy file asks for an action, in a run of this configuration.
///
/// # Errors
///
/// As [`check`].
pub fn asks_for(file: &Path, clock: Clock, config: &Config, action: Action) -> Result<bool> {
    let policy = read(file, clock, &meta_of(config))?;
    let all = policy
        .rules
        .iter()
        .map(|rule| &rule.reap)
        .chain([&policy.reap]);
    Ok(all.flatten().any(|reap| reap.actions.has(action)))
}

/// Reads a policy file for an instance.
pub(super) fn read(file: &Path, clock: Clock, meta: &Meta) -> Result<Policy> {
    let tick = clock.duration(meta.tick.into());
    // A simple wheel must be longer than every timeout by one tick, since a deadline may lie
    // anywhere within its tick.
    let longest = if meta.geometry.scheme == WheelScheme::Simple as u32 {
        let ticks = (meta.geometry.range() - 1) as u32;
        longest_timeout(clock).min(tick.saturating_mul(ticks))
    } else {
        longest_timeout(clock)
    };
    let policy = Policy::load(file, tick..=longest)?;
    check_enforcement(&policy, meta)?;
    check_vlans(&policy, meta)?;
    Ok(policy)
}

/// Reads a policy file and puts it into force, as [`load`] does. Returns the lock that every change
/// of the policy takes, and what [`install`] returns.
fn put(
    pins: &Pins,
    file: Option<&Path>,
    clock: Clock,
) -> Result<(Flock<File>, Vec<Option<String>>)> {
    let open = pinned(pins);
    let meta = array::<Meta>(&open, "META")?.get(&0, 0)?;
    let policy = file
        .map(|file| {
            let policy = read(file, clock, &meta)?;
            let compiled = policy.compile(|name| if_nametoindex(name).ok())?;
            anyhow::Ok((policy, compiled))
        })
        .transpose()?;
    let lock = pins.lock_policy()?;
    if let Some((policy, _)) = &policy {
        cgroups::make_map(pins, policy)?;
    }
    let policy = policy.as_ref().map(|(policy, compiled)| (policy, compiled));
    let retimed = install(&open, policy, clock)?;
    Ok((lock, retimed))
}

/// # Errors
///
/// [`Kind::Usage`]: the policy drops packets, but the instance was started without enforcement.
fn check_enforcement(policy: &Policy, meta: &Meta) -> Result<()> {
    let mut asked = policy
        .rules
        .iter()
        .map(|rule| &rule.reap)
        .chain([&policy.reap])
        .flatten();
    let enforces = asked.any(|reap| reap.actions.iter().any(Action::enforces));
    if enforces && !meta.features.has(Features::ENFORCE) {
        return Err(Failure::new(
            Kind::Usage,
            format!(
                "{}: a reap list has `enforce`, which drops packets: to confirm, start \
                 `twheel run` with --i-know-this-drops-traffic",
                policy.file
            ),
        )
        .into());
    }
    Ok(())
}

/// # Errors
///
/// [`Kind::Usage`]: rules name VLANs, but the instance ignores VLANs, as `FILE:LINE:COLUMN: …`.
pub(super) fn check_vlans(policy: &Policy, meta: &Meta) -> Result<()> {
    if meta.features.has(Features::VLANS) {
        return Ok(());
    }
    match policy.rules.iter().find(|rule| rule.vlans.is_some()) {
        Some(rule) => Err(refuse(
            &policy.file,
            rule.place,
            format!(
                "rule `{}` has vlan, but this run ignores VLANs: leave vlan out, or run without \
                 --vlan ignore",
                rule.name
            ),
        )),
        None => Ok(()),
    }
}

/// Puts a policy into force, or ends the policy in force. Live flows follow when the table is
/// [swept](follow::sweep). Returns the names of the rules that get other timeouts than they had;
/// `None`: flows of no rule do.
pub fn install(
    open: Open<'_>,
    policy: Option<(&Policy, &Compiled)>,
    clock: Clock,
) -> Result<Vec<Option<String>>> {
    let mut active = array::<Active>(open, "ACTIVE")?;
    let set = 1 - active.get(&0, 0)?.set();
    let mut names = array::<[u8; NAME_BYTES]>(open, "NAMES")?;
    let mut timeouts = array::<Rule>(open, "TIMEOUTS")?;
    let base = timeouts.get(&UNRULED.into(), 0)?;
    let (unruled, of_rules) = match policy {
        Some((policy, _)) => {
            let mut sets = cgroups::Sets::open(open, policy, set)?;
            rules(policy, base, clock, |position, reap| {
                sets.write(position, reap)
            })?
        }
        None => (base, Vec::new()),
    };
    // How the policy that is still in force treats the flows that have each number.
    let before: Vec<Rule> = (0..u32::from(UNRULED))
        .map(|number| timeouts.get(&number, 0))
        .collect::<Result<_, _>>()?;
    let spared = |number: u16, mut rule: Rule| {
        let before = before[usize::from(number)];
        if before.actions == 0 || before.was_spared() {
            rule.flags = rule.flags.with(RuleFlags::SPARED);
        }
        rule
    };

    let zones = match policy {
        Some((policy, _)) => zone_places(open, policy)?,
        None => BTreeMap::new(),
    };

    // Empties the set that is not in force.
    clear(open, set)?;
    let known: Vec<[u8; NAME_BYTES]> = (0..RULES as u32)
        .map(|number| names.get(&number, 0))
        .collect::<Result<_, _>>()?;
    let retimed = {
        let before = |name: Option<&str>| {
            let number = match name.map(padded) {
                None => 0,
                Some(name) => {
                    (1..usize::from(UNRULED)).find(|at| name.as_ref().ok() == Some(&known[*at]))?
                }
            };
            Some(before[number].timeouts)
        };
        let rules = policy.map_or(&[][..], |(policy, _)| &policy.rules);
        let names = rules.iter().map(|rule| Some(rule.name.as_str()));
        retimed(
            before,
            [None]
                .into_iter()
                .chain(names)
                .zip([&unruled].into_iter().chain(&of_rules)),
        )
    };
    let mut numbers = [0u16; 256];
    let mut taken = [false; RULES];
    let mut kept = Vec::new();
    if let Some((policy, compiled)) = policy {
        for (rule, number) in policy.rules.iter().zip(&mut numbers[1..]) {
            let name = padded(&rule.name)?;
            if let Some(old) = (1..UNRULED).find(|at| known[usize::from(*at)] == name) {
                *number = old;
                taken[usize::from(old)] = true;
            }
        }
        let all = policy.rules.iter().zip(of_rules);
        for ((rule, of), number) in all.zip(&mut numbers[1..]) {
            if *number == 0 {
                let free = (1..UNRULED).find(|at| {
                    !taken[usize::from(*at)] && known[usize::from(*at)] == [0; NAME_BYTES]
                });
                *number = free.context(
                    "no number is free for a rule, because an earlier sweep of the table failed: \
                     run `twheel detach` and start again",
                )?;
                taken[usize::from(*number)] = true;
                // No flow has this number yet.
                timeouts.set(u32::from(*number), of, 0)?;
                names.set(u32::from(*number), padded(&rule.name)?, 0)?;
            } else {
                kept.push((*number, of));
            }
        }
        write(open, set, compiled, &zones)?;
    }
    array::<[u16; 256]>(open, "NUMBERS")?.set(set, numbers, 0)?;

    let dimensions = policy.map_or_else(Default::default, |(_, compiled)| compiled.dimensions());
    active
        .set(0, Active::new(set, dimensions), 0)
        .context("cannot put the policy into force")?;

    timeouts.set(0, spared(0, unruled), 0)?;
    for (number, of) in kept {
        timeouts.set(u32::from(number), spared(number, of), 0)?;
    }
    for number in 1..UNRULED {
        let at = usize::from(number);
        if !taken[at] && known[at] != [0; NAME_BYTES] {
            let mut gone = spared(number, before[at]);
            gone.flags = gone.flags.with(RuleFlags::GONE);
            timeouts.set(u32::from(number), gone, 0)?;
        }
    }
    Ok(retimed)
}

/// What a policy sets for flows of no rule, and for those of each of its rules. `base` is what is
/// set without a policy. `actions` returns a rule's actions as bits, given its position in the
/// file, from 1 on; 0 for flows of no rule.
pub(super) fn rules(
    policy: &Policy,
    base: Rule,
    clock: Clock,
    mut actions: impl FnMut(usize, &Reap) -> Result<u32>,
) -> Result<(Rule, Vec<Rule>)> {
    let mut actions = |position, reap: &Option<Reap>| {
        let reap = reap.as_ref().map(|reap| actions(position, reap));
        reap.transpose()
    };
    let unruled = with(base, &policy.timeouts, actions(0, &policy.reap)?, clock);
    let mut of_rules = Vec::new();
    for (position, rule) in (1..).zip(&policy.rules) {
        let actions = actions(position, &rule.reap)?;
        of_rules.push(with(unruled, &rule.timeouts, actions, clock));
    }
    Ok((unruled, of_rules))
}

/// The timeouts of the rules in force.
pub struct InForce(Array<MapData, Rule>);

impl InForce {
    /// Opens the timeouts of an instance.
    pub fn open(open: Open<'_>) -> Result<Self> {
        array(open, "TIMEOUTS").map(Self)
    }

    /// The timeouts and actions of a rule, by the number that flows store. Flows whose rule no
    /// longer exists are treated as flows of no rule. But if it protected them, they stay
    /// protected: they had it when they ended, or will have another one soon.
    pub fn rule(&self, number: u16) -> Result<Rule> {
        let stored = self.stored(number)?;
        let mut rule = match stored.is_gone() {
            true => self.stored(0)?,
            false => stored,
        };
        if stored.was_spared() {
            rule.actions = 0;
        }
        Ok(rule)
    }

    /// The number that a flow with this number is to have: 0 if its rule no longer exists.
    pub fn number(&self, number: u16) -> Result<u16> {
        Ok(match self.stored(number)?.is_gone() {
            true => 0,
            false => number,
        })
    }

    fn stored(&self, number: u16) -> Result<Rule> {
        let rule = self.0.get(&number.into(), 0);
        rule.context("cannot read TIMEOUTS")
    }
}

/// A rule with the given timeouts, in units, and actions as bits; those of `base` where none are
/// given.
fn with(mut base: Rule, given: &Timeouts, actions: Option<u32>, clock: Clock) -> Rule {
    if let Some(actions) = actions {
        base.actions = actions;
    }
    for (units, given) in base.timeouts.0.iter_mut().zip(given) {
        if let Some(given) = given {
            *units = clock.timeout(*given) as u32;
        }
    }
    if !base.is_one_way() {
        return base;
    }
    // The given timeout of established flows applies to unreplied ones, too, unless these have
    // their own.
    let established = given[State::Established as usize].is_some();
    base.one_way(given[Numbers::UNREPLIED].is_some() || !established)
}

fn trie(open: Open<'_>, name: &str) -> Result<LpmTrie<MapData, [u32; 5], Ends>> {
    LpmTrie::try_from(Map::LpmTrie(open(name)?))
        .with_context(|| format!("the map {name} is not a trie as expected"))
}

fn interfaces(open: Open<'_>) -> Result<HashMap<MapData, [u32; 2], Rules>> {
    HashMap::try_from(Map::HashMap(open("INTERFACES")?))
        .context("the map INTERFACES is not a hash as expected")
}

/// Empties one of the two policies.
fn clear(open: Open<'_>, set: u32) -> Result<()> {
    let mut interfaces = interfaces(open)?;
    let old: Vec<_> = interfaces.keys().collect::<Result<_, _>>()?;
    for key in old.into_iter().filter(|key| Named::set(*key) == set) {
        interfaces.remove(&key)?;
    }
    for name in ["SOURCES", "DESTINATIONS"] {
        let mut trie = trie(open, name)?;
        let old: Vec<Key<[u32; 5]>> = trie.keys().collect::<Result<_, _>>()?;
        for key in old.into_iter().filter(|key| key.data()[0] == set) {
            trie.remove(&key)?;
        }
    }
    Ok(())
}

/// The indexes of the zones that rules name, as flow keys have them. A zone that no interface has
/// yet gets an index, too, since such an interface may appear.
///
/// # Errors
///
/// [`Kind::Usage`]: no index is free, as `FILE:LINE:COLUMN: …`.
fn zone_places(open: Open<'_>, policy: &Policy) -> Result<BTreeMap<u16, u8>> {
    let named: Vec<_> = policy
        .rules
        .iter()
        .filter_map(|rule| rule.zones.as_ref())
        .flatten()
        .collect();
    if named.is_empty() {
        return Ok(BTreeMap::new());
    }
    let numbers: Vec<u16> = named.iter().map(|(number, _)| *number).collect();
    let places = Zones::open(open("ZONES")?)?.enter(&numbers)?;
    let mut found = BTreeMap::new();
    for ((number, at), place) in named.into_iter().zip(places) {
        let Some(place) = place else {
            let what = format!(
                "zone {number} is too many: a run has a capacity of {MAX_ZONES} zones, which \
                 includes those of --zone and of earlier policies: name fewer, or run \
                 `twheel detach` and start again"
            );
            return Err(refuse(&policy.file, *at, what));
        };
        found.insert(*number, place);
    }
    Ok(found)
}

/// Writes a policy into one of the two sets.
fn write(open: Open<'_>, set: u32, compiled: &Compiled, zones: &BTreeMap<u16, u8>) -> Result<()> {
    let mut classes = array::<Rules>(open, "CLASSES")?;
    for (class, rules) in (0..).zip(compiled.classes()) {
        classes.set(set * MAX_CLASSES as u32 + class, rules, 0)?;
    }
    array::<PortClasses>(open, "PORTS")?.set(set, compiled.port_classes(), 0)?;
    let mut interfaces = interfaces(open)?;
    for (index, rules) in compiled.interfaces() {
        interfaces.insert(Named::Interface.key(set, index), rules, 0)?;
    }
    for (vlan, rules) in compiled.vlans() {
        interfaces.insert(Named::Vlan.key(set, vlan.into()), rules, 0)?;
    }
    for (zone, rules) in compiled.zones() {
        let place = zones.get(&zone);
        let place = *place.with_context(|| format!("zone {zone} has no place"))?;
        interfaces.insert(Named::Zone.key(set, place.into()), rules, 0)?;
    }
    let key = |prefix: Prefix| {
        let [a, b, c, d]: [u32; 4] = transmute!(prefix.address);
        Key::new(32 + prefix.bits, [set, a, b, c, d])
    };
    for (name, prefixes) in [
        ("SOURCES", compiled.source_prefixes().collect::<Vec<_>>()),
        ("DESTINATIONS", compiled.destination_prefixes().collect()),
    ] {
        let mut trie = trie(open, name)?;
        for (prefix, ends) in prefixes {
            trie.insert(&key(prefix), ends, 0)?;
        }
    }
    array::<Header>(open, "POLICIES")?.set(set, compiled.header(), 0)?;
    Ok(())
}

fn padded(name: &str) -> Result<[u8; NAME_BYTES]> {
    let mut padded = [0; NAME_BYTES];
    ensure!(
        name.len() <= NAME_BYTES,
        "the name {name} is longer than {NAME_BYTES} bytes"
    );
    padded[..name.len()].copy_from_slice(name.as_bytes());
    Ok(padded)
}
