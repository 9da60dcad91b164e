//! The options of `twheel run`, which `twheel doctor` takes as well.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Result;
use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use twheel_common::{config::Config, flow::ZONES, packet::Protocols, rule::Rule};

use super::{Scheme, namespaces, reap::Reap};
use crate::{
    attach::{Egress, Mode},
    clock::Clock,
    failure::{Failure, Kind},
    filter::Known,
    history,
    hooks::{Hooks, Ingress},
    metrics,
    order::{Names, Order},
    patterns::{Asked, Selection},
    policy::install,
    reap::{self, Action},
    settings::Wanted,
    share::Share,
    stepping::Stepping,
    timeouts::Timeouts,
    watched,
};

/// What a run may be told.
#[derive(Args)]
pub struct Options {
    /// Wait for interfaces that are not there yet, and for those that go to come back
    #[arg(long)]
    pub wait_iface: bool,
    /// By what incoming packets are seen
    #[arg(long, value_enum, default_value = "auto")]
    pub hook: Ingress,
    /// Where XDP runs; `native` and `generic` say `--hook xdp`, too [default: auto]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Where twheel's programs stand among those of others at TCX, and its filters at clsact: first, last, before:NAME or
    /// after:NAME; NAME is a program's (of clsact, a filter's), or id:N [default: first; what an earlier run has left stays
    /// where it stands]
    #[arg(long, value_name = "PLACE")]
    pub order: Option<Order>,
    /// Whether outgoing packets are seen too
    #[arg(long, value_enum, default_value = "auto")]
    pub egress: Egress,
    /// Precision of expiry [default: 100ms; 10ms with `--rto on`]
    #[arg(long, value_parser = humantime::parse_duration)]
    pub tick: Option<Duration>,
    /// How long a flow may be idle: NAME=DURATION by conntrack's names of states; a duration alone is that of
    /// established flows, and the most for all others; `inherit` takes this host's conntrack's [default: conntrack's]
    #[arg(long, value_name = "LIST")]
    pub timeout: Option<String>,
    /// Whether flows are tracked whose beginning was not seen
    #[arg(long, value_enum, default_value = "loose")]
    pub pickup: Pickup,
    /// Take answers also where they come in by the interface by which a flow's first packet came in: on a router with one
    /// interface, at a mirror port. Anybody can then fake both sides of a flow
    #[arg(long)]
    pub one_armed: bool,
    /// Whether VLAN tags tell flows apart; `ignore` where the same connection has tags in one place and none in another
    #[arg(long, value_enum, default_value = "key")]
    pub vlan: Vlan,
    /// Tell the flows of an interface apart from those of other zones with the same addresses (VRFs, tenants): a number from
    /// 1 to 65535, conntrack's zone where the interface has one; may be repeated, and takes lists with commas and patterns: of
    /// several that match the first counts, and a name before all patterns
    #[arg(long = "zone", value_name = "IFACE=N", value_delimiter = ',', value_parser = Zone::parse)]
    pub zones: Vec<Zone>,
    /// What is tracked
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "tcp"
    )]
    pub proto: Vec<Proto>,
    /// Count each flow's packets and bytes, each way
    #[arg(long)]
    pub accounting: bool,
    /// Whether retransmission timers run, which needs both directions: round trips, timeouts, and flows that are stalled
    #[arg(long, value_enum, default_value = "off")]
    pub rto: Switch,
    /// What a retransmission timeout is above the round trip, at least
    #[arg(long, value_parser = humantime::parse_duration, default_value = "200ms")]
    pub rto_min: Duration,
    /// The longest retransmission timeout
    #[arg(long, value_parser = humantime::parse_duration, default_value = "120s")]
    pub rto_max: Duration,
    /// Expiries in a row after which a flow is stalled: its timeout is then that of `retrans`
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub max_retrans: u32,
    /// Timeouts per service: a policy file; SIGHUP makes it be read again
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Flows tracked at once, at most
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    pub max_flows: u32,
    /// Percent of a full table that one source (an IPv4 address, an IPv6 network of 64 bits) may hold when others want
    /// room: what it holds above makes room for them; or `off`
    #[arg(long, value_name = "PERCENT", default_value = "25")]
    pub source_share: Share,
    /// How the wheels turn
    #[arg(long, value_enum, default_value = "hierarchical")]
    pub scheme: Scheme,
    /// Slots of a wheel's level, rounded up to a power of two [default: 1024; for a simple wheel as many
    /// as the timeouts need]
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,
    /// Levels of a hierarchical wheel [default: 3]
    #[arg(long, value_name = "N")]
    pub levels: Option<u32>,
    /// Where the history of what has ended is kept, for `twheel expired`; or `off`
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    pub history: PathBuf,
    /// Room for it on disk: the oldest goes first
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    pub history_size: ByteSize,
    /// Print a JSON object a line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub reap: Reap,
    /// Numbers for Prometheus at /metrics, health at /healthz, and a page that shows the wheels: a port of the
    /// loopback address, or an IP address and a port
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_address)]
    pub metrics: Option<SocketAddr>,
    /// Leave everything attached and pinned at the end; the next run adopts it
    #[arg(long)]
    pub keep: bool,
    /// Let the members of a group look at the flows and the history, delete flows and change the policy: by default what a
    /// run makes is its user's alone
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// Diagnostics of the data plane on standard error: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "off")]
    pub log_level: log::LevelFilter,
    /// How wheels are stepped [default: by test runs, where this kernel's hold softirqs off, else by live frames]
    #[arg(long, value_enum, value_name = "WAY")]
    pub stepping: Option<Stepping>,
}

/// What is tracked.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Proto {
    /// TCP
    Tcp,
    /// UDP
    Udp,
    /// ICMP and ICMPv6: queries and their answers
    Icmp,
}

impl Proto {
    fn bits(self) -> Protocols {
        match self {
            Self::Tcp => Protocols::TCP,
            Self::Udp => Protocols::UDP,
            Self::Icmp => Protocols::ICMP,
        }
    }
}

/// Whether something is done.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// Whether VLAN tags are part of what names a flow.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Vlan {
    /// Flows with the same endpoints in two VLANs are two
    Key,
    /// They are one
    Ignore,
}

/// The zone of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The interface's name.
    pub interface: String,
    /// conntrack's number.
    pub number: u16,
}

impl Zone {
    fn parse(text: &str) -> Result<Self, String> {
        let wanted = "give an interface and its zone, from 1 to 65535: eth0=7";
        let (interface, number) = text.rsplit_once('=').ok_or(wanted)?;
        match number.parse() {
            Ok(number @ 1..) if !interface.is_empty() && !interface.contains('=') => Ok(Self {
                interface: interface.to_owned(),
                number,
            }),
            _ => Err(wanted.to_owned()),
        }
    }
}

/// What may begin a flow.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pickup {
    /// Any segment but a FIN or a RST
    Loose,
    /// A SYN
    Strict,
}

/// Names in the order in which they were given first.
pub fn each_once(names: Vec<String>) -> Vec<String> {
    let mut once: Vec<String> = Vec::new();
    for name in names {
        if !once.contains(&name) {
            once.push(name);
        }
    }
    once
}

impl Options {
    /// The data plane's configuration, with the timeouts of flows of no rule, and what is reaped; for a run on so many
    /// interfaces.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with what does not go together.
    pub fn config(
        &self,
        clock: Clock,
        interfaces: usize,
    ) -> Result<((Config, Rule), reap::Wanted)> {
        if self.mode.is_some() && matches!(self.hook, Ingress::Tcx | Ingress::Clsact) {
            return Err(Failure::new(
                Kind::Usage,
                "--mode says where XDP runs, and --hook tcx and --hook clsact take no XDP: leave one of the two out",
            )
            .into());
        }
        if self.rto == Switch::On && self.egress == Egress::Off && interfaces == 1 {
            return Err(Failure::new(
                Kind::Usage,
                "--rto on --egress off: retransmission timers need both directions: leave one of the two out, or give \
                 a second interface by which the other direction comes in",
            )
            .into());
        }
        let wanted = Wanted {
            tick: self.tick.unwrap_or(Duration::from_millis(match self.rto {
                Switch::On => 10,
                Switch::Off => 100,
            })),
            timeouts: match &self.timeout {
                Some(list) => Timeouts::parse(list)?,
                None => Timeouts::default(),
            },
            one_way: self.egress == Egress::Off,
            strict: self.pickup == Pickup::Strict,
            one_armed: self.one_armed,
            protocols: self
                .proto
                .iter()
                .fold(Protocols(0), |all, it| all.with(it.bits())),
            accounting: self.accounting,
            rto: self.rto == Switch::On,
            rto_min: self.rto_min,
            rto_max: self.rto_max,
            max_retrans: self.max_retrans,
            enforce: self.reap.i_know_this_drops_traffic,
            hold: self.reap.holds(),
            enforce_rate: self.reap.enforce_rate,
            share: self.source_share.0.is_some(),
            vlans: self.vlan == Vlan::Key,
            max_flows: self.max_flows,
            scheme: self.scheme.into(),
            slots: self.slots,
            levels: self.levels,
        };
        let reap = self.reap.wanted(
            Known {
                ended: true,
                accounting: self.accounting,
                rto: self.rto == Switch::On,
            },
            wanted.strict,
        )?;
        let mut config = wanted.config(clock)?;
        config.1.actions = self.reap.actions.bits();
        if self.history_size.as_u64() < history::LEAST_BYTES {
            return Err(Failure::new(
                Kind::Usage,
                format!(
                    "--history-size {}: a history has at least {}; --history off keeps none",
                    self.history_size,
                    ByteSize(history::LEAST_BYTES)
                ),
            )
            .into());
        }
        Ok((config, reap))
    }

    /// The zone of an interface; 0: none.
    pub fn zone(&self, interface: &str) -> u16 {
        let named = self.zones.iter().find(|zone| zone.interface == interface);
        let matches =
            |zone: &&Zone| Asked::parse(&zone.interface).is_ok_and(|it| it.matches(interface));
        let zone = named.or_else(|| self.zones.iter().find(matches));
        zone.map_or(0, |zone| zone.number)
    }

    /// Fails if a zone is given twice, or for an interface that is not among these, or if there are too many.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the zone.
    pub fn check_zones(
        &self,
        interfaces: &Selection,
        namespaces: &namespaces::Wanted,
    ) -> Result<()> {
        for (number, zone) in self.zones.iter().enumerate() {
            let Zone { interface, .. } = zone;
            let asked = Asked::parse(interface)
                .map_err(|why| Failure::new(Kind::Usage, format!("--zone {why}")))?;
            let elsewhere = interface.rsplit_once('/').map(|(namespace, _)| namespace);
            let why = if let Some(namespace) = elsewhere.filter(|it| !namespaces.matches(it)) {
                format!(
                    "the network namespace {namespace} is not watched: give --netns {namespace}, too"
                )
            } else if !interfaces.may_have(&asked) {
                format!("{interface} is not watched: give --iface {interface}, too")
            } else if self.zones[..number]
                .iter()
                .any(|it| it.interface == *interface)
            {
                format!("{interface} has a zone already: give one")
            } else {
                continue;
            };
            let what = format!("--zone {interface}={}: {why}", zone.number);
            return Err(Failure::new(Kind::Usage, what).into());
        }
        let numbers: BTreeSet<_> = self.zones.iter().map(|zone| zone.number).collect();
        match numbers.last() {
            Some(last) if numbers.len() >= ZONES => Err(watched::too_many_zones(*last)),
            _ => Ok(()),
        }
    }

    /// By what packets are seen, by a run on so many interfaces, with this configuration. `names`: of the programs that are
    /// loaded.
    pub fn hooks(&self, interfaces: usize, config: &Config, clock: Clock, names: Names) -> Hooks {
        let in_policy = match &self.policy {
            Some(file) if self.reap.i_know_this_drops_traffic => {
                // What is wrong with it is said when it is put into force, before anything is attached.
                install::asks_for(file, clock, config, Action::EnforceReset).unwrap_or_default()
            }
            // One that asks for it is refused.
            _ => false,
        };
        Hooks {
            ingress: self.hook,
            mode: self.mode,
            egress: self.egress(interfaces),
            order: self.order.clone(),
            resets: in_policy || self.reap.actions.has(Action::EnforceReset),
            names,
        }
    }

    /// How outgoing packets are seen, by a run on so many interfaces.
    fn egress(&self, interfaces: usize) -> Egress {
        match self.egress {
            // With one interface, the other direction comes by no other.
            Egress::Auto if self.rto == Switch::On && interfaces == 1 => Egress::On,
            egress => egress,
        }
    }
}
