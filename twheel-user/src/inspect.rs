//! An instance as a reader sees it, whether its twheel runs or not: flows with the names of their
//! rules, interfaces and zones, and the time until they expire.

use anyhow::Result;
use aya::maps::Map;
use twheel_common::{
    config::{Meta, RULES},
    counter::Counters,
    flow::{age, idle},
    rule::Rule,
    state,
};

use crate::{
    call::Callable,
    clock::Clock,
    data_plane,
    filter::{Filter, Subject},
    flows::{self, Flows},
    identity::Identity,
    maps,
    model::{Birth, Flow, Measure, Named, Origin, Tracked, in_order},
    names::Names,
    output::flow_table::Columns,
    pins::{Instance, Pins},
    policy::install::InForce,
    watched, zones,
};

/// An instance that is read.
pub struct Reader {
    pins: Pins,
    clock: Clock,
    meta: Meta,
    /// The rules by number; 0 stands for flows without a rule.
    rules: Vec<Rule>,
    in_force: InForce,
    /// The names of the rules, likewise.
    names: Vec<Option<String>>,
    /// The labels of interfaces by place; empty for a place that no interface has.
    labels: Vec<String>,
    /// The zones by place.
    zones: Vec<u16>,
    flows: Flows,
    /// The sweeping program, which tells the time.
    sweep: Callable,
    identity: Identity,
}

/// Counters, read at one moment.
#[derive(Clone, Debug)]
pub struct CounterReadings {
    /// By CPU, for each CPU that this host may have.
    pub cpus: Vec<Counters>,
    /// By interface name. If there are several interfaces, what the wheels count belongs to none of
    /// them.
    pub interfaces: Vec<(String, Counters)>,
}

impl Reader {
    /// Opens the instance on an interface; without a name, the only instance in this network
    /// namespace.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): there is no such instance, or more than one.
    pub fn open(interface: Option<&str>) -> Result<Self> {
        Self::open_pins(Instance::the(interface)?)
    }

    /// Opens an instance by its pins.
    pub fn open_pins(pins: Pins) -> Result<Self> {
        let open = maps::pinned(&pins);
        let meta = data_plane::meta(&pins)?;
        let names = Names::open(&open)?;
        let in_force = InForce::open(&open)?;
        Ok(Self {
            clock: Clock::jiffies()?,
            rules: rules(&in_force)?,
            in_force,
            names: (0..RULES as u16)
                .map(|rule| names.rule(rule))
                .collect::<Result<_>>()?,
            labels: watched::labels(&pins)?,
            zones: zones::numbers(&pins)?,
            flows: Flows::pinned(&pins)?,
            sweep: pins.callable("twheel_sweep")?,
            identity: Identity::new(&pins, &meta),
            meta,
            pins,
        })
    }

    /// Reads again the timeouts, which a policy may have changed. (The names of rules are those of
    /// the time when the instance was opened.)
    pub fn read_timeouts(&mut self) -> Result<()> {
        self.rules = rules(&self.in_force)?;
        Ok(())
    }

    /// Its pins.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// The interfaces that it is attached to, by their present names, in the order in which the run
    /// was given them, or found them.
    ///
    /// # Errors
    ///
    /// The pins cannot be listed.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        let mut names = self.pins.present_interfaces()?;
        names.sort_by_cached_key(|name| {
            let place = self.labels.iter().position(|it| it == name);
            (place.unwrap_or(usize::MAX), name.clone())
        });
        Ok(names)
    }

    /// Its name and its host's.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What its maps were made for.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Its clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// How to read its records.
    pub fn measure(&self) -> Measure {
        Measure {
            clock: self.clock,
            one_way: self.is_one_way(),
        }
    }

    /// Its flow table.
    pub fn table(&self) -> &Flows {
        &self.flows
    }

    /// Which columns its flows have.
    pub fn columns(&self) -> Columns {
        Columns {
            accounting: self.flows.has_accounts(),
            rto: self.flows.has_timers(),
            rules: self.names.iter().any(Option::is_some),
        }
    }

    /// Low 32 bits of its clock, in units.
    pub fn now(&self) -> Result<u32> {
        self.sweep.now()
    }

    /// Its counters, by CPU and by interface.
    pub fn counted(&self) -> Result<CounterReadings> {
        let map = Map::PerCpuArray(self.pins.map("COUNTERS")?);
        let places = data_plane::counters_of_places(&map)?;
        let cpus = places.iter().map(Vec::len).max().unwrap_or(0);
        let of_cpu = |cpu| Counters::sum(places.iter().filter_map(|place| place.get(cpu)));
        let cpus: Vec<_> = (0..cpus).map(of_cpu).collect();
        let interfaces = watched::by_interface(&self.pins, &places)?;
        Ok(CounterReadings { cpus, interfaces })
    }

    /// The name of the rule with this number in flow records; `None` for 0.
    pub fn rule(&self, number: u16) -> Option<&str> {
        self.names.get(usize::from(number))?.as_deref()
    }

    /// The names of a flow's rule, interface and zone.
    pub fn known_as(&self, flow: &Flow) -> Named<'_> {
        let label = self.labels.get(flow.place as usize);
        Named {
            rule: self.rule(flow.rule),
            iface: label.map(String::as_str).filter(|it| !it.is_empty()),
            zone: self.zones.get(usize::from(flow.zone)).copied().unwrap_or(0),
            nat: None,
            owner: None,
        }
    }

    /// Whether a flow of the table matches a filter.
    pub fn matches(&self, filter: &Filter, tracked: &Tracked) -> bool {
        filter.is_empty()
            || filter.matches(&Subject::tracked(tracked, self.known_as(&tracked.flow)))
    }

    /// All flows, each with its record's index. A flow may have changed since: [`Flows`] can tell.
    pub fn flows(&self, now: u32) -> impl Iterator<Item = (flows::Flow, Tracked)> {
        let flows = self.flows.iter();
        flows.filter_map(move |flow| Some((flow, self.tracked(&flow, now)?)))
    }

    /// A flow with its names; `None` for one that the data plane would not make.
    pub fn tracked(&self, flow: &flows::Flow, now: u32) -> Option<Tracked> {
        let seen = flow.word.seen();
        let idle = idle(now.into(), flow.word.stamp());
        let left = self.timeout(flow.rule, seen).saturating_sub(idle);
        let initiator = seen.initiator();
        let duration = |units: u32| self.clock.duration(units.into());
        Some(Tracked {
            flow: Flow::new(
                Birth {
                    key: flow.key,
                    created: flow.created,
                    generation: flow.word.generation(),
                },
                seen,
                flow.rule,
                Origin {
                    point: flow.point,
                    is_outgoing: flow.is_outgoing,
                },
                self.is_one_way(),
            )?,
            picked_up: seen.is_pickup(),
            age: duration(age(now.into(), flow.created)),
            idle: duration(idle),
            expires: duration(left),
            cpu: flow.cpu,
            account: flow
                .account
                .and_then(|account| in_order(account, initiator, |sent| sent.packets > 0)),
            timing: flow
                .timing
                .and_then(|timing| in_order(timing, initiator, |_| true)),
        })
    }

    /// Whether only one direction is ever seen.
    pub fn is_one_way(&self) -> bool {
        self.rules.first().is_some_and(Rule::is_one_way)
    }

    /// The timeout of a flow, in units.
    fn timeout(&self, rule: u16, seen: state::Seen) -> u32 {
        let rule = self.rules.get(usize::from(rule));
        rule.map_or(0, |rule| rule.timeouts.timeout(seen))
    }
}

/// All rules by number.
fn rules(in_force: &InForce) -> Result<Vec<Rule>> {
    (0..RULES as u16).map(|rule| in_force.rule(rule)).collect()
}
