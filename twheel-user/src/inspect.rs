//! An instance as a reader sees it, be its loader running or not: flows with what they are by name, and how long they
//! have left.

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
    flows::{self, Flows},
    maps,
    model::{Flow, Measure, Named, Origin, Timing, Tracked, in_order},
    names::Names,
    output::table::Columns,
    pins::{Instance, Pins},
    policy::install::InForce,
    watched, zones,
};

/// What is read of an instance.
pub struct Reader {
    pins: Pins,
    clock: Clock,
    meta: Meta,
    /// Of each rule; 0 is no rule.
    rules: Vec<Rule>,
    /// Likewise.
    names: Vec<Option<String>>,
    /// Of each place of an interface; of one that has none, an empty one.
    labels: Vec<String>,
    /// Of each place of a zone.
    zones: Vec<u16>,
    flows: Flows,
    /// The program that tells the time.
    sweep: Callable,
}

/// Counters, read at one moment.
#[derive(Clone, Debug)]
pub struct CounterReadings {
    /// Of each CPU that this host may have.
    pub cpus: Vec<Counters>,
    /// Of each interface, by name. What the wheels count is of none, where there are several.
    pub interfaces: Vec<(String, Counters)>,
}

impl Reader {
    /// Reads the instance on an interface; without one, the only instance in this network namespace.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): there is none, or more than one.
    pub fn open(interface: Option<&str>) -> Result<Self> {
        Self::of(Instance::the(interface)?)
    }

    /// Reads an instance by its pins.
    pub fn of(pins: Pins) -> Result<Self> {
        let open = maps::pinned(&pins);
        let meta = data_plane::meta(&pins)?;
        let names = Names::open(&open)?;
        let timeouts = InForce::open(&open)?;
        let rules = 0..RULES as u16;
        Ok(Self {
            clock: Clock::jiffies()?,
            meta,
            rules: rules
                .clone()
                .map(|rule| timeouts.rule(rule))
                .collect::<Result<_>>()?,
            names: rules.map(|rule| names.of(rule)).collect::<Result<_>>()?,
            labels: watched::labels(&pins)?,
            zones: zones::numbers(&pins)?,
            flows: Flows::pinned(&pins)?,
            sweep: pins.callable("twheel_sweep")?,
            pins,
        })
    }

    /// Where its maps are.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// What its maps were made for.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Its clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// By what its records are read.
    pub fn measure(&self) -> Measure {
        Measure {
            clock: self.clock,
            one_way: self.is_one_way(),
        }
    }

    /// The table.
    pub fn table(&self) -> &Flows {
        &self.flows
    }

    /// What there is to show of its flows.
    pub fn columns(&self) -> Columns {
        Columns {
            accounting: self.flows.has_accounts(),
            rto: self.flows.has_timers(),
            rules: self.names.iter().any(Option::is_some),
        }
    }

    /// Low 32 bits of its clock, units.
    pub fn now(&self) -> Result<u32> {
        self.sweep.now()
    }

    /// Its counters, of each CPU and of each interface.
    pub fn counted(&self) -> Result<CounterReadings> {
        let map = Map::PerCpuArray(self.pins.map("COUNTERS")?);
        let places = data_plane::counters_of_places(&map)?;
        let cpus = places.iter().map(Vec::len).max().unwrap_or(0);
        let of_cpu = |cpu| Counters::sum(places.iter().filter_map(|place| place.get(cpu)));
        let cpus: Vec<_> = (0..cpus).map(of_cpu).collect();
        let interfaces = watched::by_interface(&self.pins, &places)?;
        Ok(CounterReadings { cpus, interfaces })
    }

    /// The name of a rule by the number that flows bear; none for 0.
    pub fn rule(&self, number: u16) -> Option<&str> {
        self.names.get(usize::from(number))?.as_deref()
    }

    /// What a flow is known as.
    pub fn known_as(&self, flow: &Flow) -> Named<'_> {
        let label = self.labels.get(flow.place as usize);
        Named {
            rule: self.rule(flow.rule),
            iface: label.map(String::as_str).filter(|it| !it.is_empty()),
            zone: self.zones.get(usize::from(flow.zone)).copied().unwrap_or(0),
        }
    }

    /// All flows of the table, with their places there: what has become of them since, if anything, is for
    /// [`Flows`] to tell.
    pub fn flows(&self, now: u32) -> impl Iterator<Item = (flows::Flow, Tracked)> {
        let flows = self.flows.iter();
        flows.filter_map(move |flow| Some((flow, self.tracked(&flow, now)?)))
    }

    /// A flow by name; `None` for one of which no data plane knows.
    pub fn tracked(&self, flow: &flows::Flow, now: u32) -> Option<Tracked> {
        let seen = flow.word.seen();
        let idle = idle(now.into(), flow.word.stamp());
        let left = self.timeout(flow.rule, seen).saturating_sub(idle);
        let initiator = seen.initiator();
        let duration = |units: u32| self.clock.duration(units.into());
        Some(Tracked {
            flow: Flow::new(
                flow.key,
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
                .sides
                .map(|sides| {
                    sides.map(|side| Timing {
                        srtt: side.srtt,
                        retransmissions: side.retransmissions(),
                    })
                })
                .and_then(|timing| in_order(timing, initiator, |_| true)),
        })
    }

    /// Whether one direction is all that is ever seen.
    pub fn is_one_way(&self) -> bool {
        self.rules.first().is_some_and(Rule::is_one_way)
    }

    /// The timeout of a flow, units.
    fn timeout(&self, rule: u16, seen: state::Seen) -> u32 {
        let rule = self.rules.get(usize::from(rule));
        rule.map_or(0, |rule| rule.timeouts.of(seen))
    }
}
