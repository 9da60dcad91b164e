//! What a policy would do to the live flows of an instance, without loading it.
//!
//! The data plane's sweep asks its maps; this asks the policy's tables on the host, for each flow as
//! it is in the table now.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use twheel_common::{
    config::{Meta, RULES, UNRULED},
    flow::idle,
    point::Point,
    policy::{Dimensions, Hook, Tables, Tuple, first_match},
    rule::Rule,
};

use super::{
    compile::Compiled,
    follow::{Effect, only_interface, retimed},
    install::{self, InForce},
    rule::{Policy, Reap},
};
use crate::{
    clock::Clock,
    flows::{Flow, Flows},
    maps::{Open, array, pinned},
    names::Names,
    pins::Pins,
};

/// What a policy would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forecast {
    /// In sums, and to the timeouts of rules.
    pub effect: Effect,
    /// How many flows would change from one rule to another; `None` is no rule.
    pub moves: BTreeMap<Move, Moved>,
}

/// A rule that flows have, and the one that they would have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Move {
    /// The name of the rule that they have.
    pub from: Option<String>,
    /// The name of the rule that they would have.
    pub to: Option<String>,
}

/// The flows of a [`Move`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// How many.
    pub flows: u64,
    /// Those of them that are not to be reaped and then might be.
    pub exposed: u64,
    /// Those of them that would be due.
    pub due: u64,
}

/// Says what a policy file would do to the live flows of an instance. Nothing is changed.
///
/// # Errors
///
/// What is wrong with the file, as `FILE:LINE:COLUMN: …`.
pub fn forecast(pins: &Pins, file: &Path, clock: Clock) -> Result<Forecast> {
    let open = pinned(pins);
    let meta = array::<Meta>(&open, "META")?.get(&0, 0)?;
    let policy = install::read(file, clock, &meta)?;
    let tables = policy.compile(|name| if_nametoindex(name).ok())?;
    let table = Table {
        open: &open,
        flows: &Flows::pinned(pins)?,
        only: only_interface(pins)?,
        now: pins.callable("twheel_sweep")?.now()?,
    };
    table.forecast(&policy, tables, clock)
}

/// The flows of an instance, and when they are looked at.
pub struct Table<'a> {
    /// Opens the instance's maps.
    pub open: Open<'a>,
    /// Its flows.
    pub flows: &'a Flows,
    /// Index of its only interface; 0: it does not exist. Without meaning if there are several.
    pub only: u32,
    /// Low 32 bits of the data plane's clock, in units.
    pub now: u32,
}

impl Table<'_> {
    /// Says what a policy would do to the flows. `tables` are the policy's.
    pub fn forecast(&self, policy: &Policy, tables: Compiled, clock: Clock) -> Result<Forecast> {
        let base = array::<Rule>(self.open, "TIMEOUTS")?.get(&UNRULED.into(), 0)?;
        let bits = |_, reap: &Reap| Ok(reap.actions.bits());
        let (unruled, of_rules) = install::rules(policy, base, clock, bits)?;
        let new = New {
            names: policy.rules.iter().map(|rule| rule.name.clone()).collect(),
            rules: [unruled].into_iter().chain(of_rules).collect(),
            tables,
        };
        let old = Old::open(self.open, self.only)?;
        let before = |name: Option<&str>| {
            let mut numbers = (0..).zip(&old.rule_names);
            let (number, _) = numbers.find(|(_, it)| it.as_deref() == name)?;
            old.rules.get::<usize>(number).map(|it| it.timeouts)
        };
        let names = new.names.iter().map(|it| Some(it.as_str()));
        let mut forecast = Forecast::default();
        forecast.effect.retimed = retimed(before, [None].into_iter().chain(names).zip(&new.rules));
        for flow in self.flows.iter() {
            forecast.add(&old, &new, &flow, self.now)?;
        }
        Ok(forecast)
    }
}

/// The policy in force, and where flows are seen.
struct Old {
    names: Names,
    /// By the number that flows have.
    rules: Vec<Rule>,
    rule_names: Vec<Option<String>>,
    /// The interfaces by place, if there are several.
    counted: Option<Vec<u32>>,
    /// The only interface otherwise; 0: it does not exist.
    only: u32,
}

impl Old {
    fn open(open: Open<'_>, only: u32) -> Result<Self> {
        let (names, in_force) = (Names::open(open)?, InForce::open(open)?);
        let counted = array::<u32>(open, "COUNTED")?;
        let counted: Vec<u32> = counted.iter().collect::<Result<_, _>>()?;
        let numbers = 0..RULES as u16;
        Ok(Self {
            rules: numbers
                .clone()
                .map(|number| in_force.rule(number))
                .collect::<Result<_>>()?,
            rule_names: numbers
                .map(|number| names.rule(number))
                .collect::<Result<_>>()?,
            names,
            only,
            counted: counted.iter().any(|it| *it != 0).then_some(counted),
        })
    }

    /// The interface on which a flow is seen, and the hook there. The interface is 0 if it is not
    /// known.
    fn place(&self, flow: &Flow) -> (u32, Hook) {
        let hook = Hook::from_raw(flow.is_outgoing.into());
        match (&self.counted, flow.seen_at) {
            (None, _) => (self.only, hook),
            (Some(_), Point::NONE) => (0, hook),
            (Some(counted), point) => {
                let interface = counted.get(point.interface() as usize);
                (interface.copied().unwrap_or(0), point.hook())
            }
        }
    }
}

/// The policy that would be in force.
struct New {
    tables: Compiled,
    /// By position in the file, from 0 on.
    names: Vec<String>,
    /// By position in the file, from 1 on; 0: for flows of no rule.
    rules: Vec<Rule>,
}

impl New {
    /// The position of the rule that a flow would have, from 1 on; 0: none.
    fn rule(&self, old: &Old, flow: &Flow, before: Option<&String>) -> Result<usize> {
        let (interface, hook) = old.place(flow);
        if interface == 0 && self.tables.dimensions().has(Dimensions::INTERFACE) {
            let same = self.names.iter().position(|name| Some(name) == before);
            if let Some(position) = same {
                return Ok(position + 1);
            }
        }
        let Some(tuple) = Tuple::new(&flow.key, flow.word.seen(), interface, hook) else {
            return Ok(0);
        };
        let zone = old.names.zone(flow.key.zone())?.into();
        Ok(first_match(&self.tables, &Tuple { zone, ..tuple }).into())
    }
}

impl Forecast {
    fn add(&mut self, old: &Old, new: &New, flow: &Flow, now: u32) -> Result<()> {
        let number = usize::from(flow.rule);
        let from = old.rule_names.get(number).and_then(Option::as_ref);
        let position = new.rule(old, flow, from)?;
        let to = position.checked_sub(1).map(|at| &new.names[at]);
        let before = old.rules.get(number).context("a flow has no such rule")?;
        let after = &new.rules[position];

        let exposed = u64::from(before.actions == 0 && after.actions != 0);
        let timeout = after.timeouts.timeout(flow.word.seen());
        let due = u64::from(idle(now.into(), flow.word.stamp()) >= timeout);
        let flows = &mut self.effect.flows;
        flows.all += 1;
        flows.exposed += exposed;
        flows.due += due;
        if from == to {
            return Ok(());
        }
        match (from, to) {
            (_, None) => flows.lost += 1,
            (None, _) => flows.gained += 1,
            _ => flows.changed += 1,
        }
        let (from, to) = (from.cloned(), to.cloned());
        let moved = self.moves.entry(Move { from, to }).or_default();
        moved.flows += 1;
        moved.exposed += exposed;
        moved.due += due;
        Ok(())
    }
}
