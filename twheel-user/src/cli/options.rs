//! The options of `twheel run`, which `twheel doctor` takes, too.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Result;
use bytesize::ByteSize;
use clap::{
    Args, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use twheel_common::{
    config::Config, flow::ZONES, packet::Protocols, rule::Rule, wheel::MAX_LEVELS,
};

use super::{SchemeName, complete, config::ConfigFile, reap::Reap, select::event_kind};
use crate::{
    action::Action,
    clock::Clock,
    failure::{Failure, Kind},
    filter::Knowable,
    given, history,
    hooks::{Egress, Hooks, Ingress, Mode},
    metrics,
    model::EventKind,
    netns::NamespaceSelection,
    order::{Order, ProgramNames},
    patterns::{Asked, Selection},
    policy::install,
    quota::Quota,
    reap,
    settings::{MAX_FLOWS, SLOTS, Settings, longest_timeout},
    stepping::Stepping,
    timeouts::Timeouts,
    zones::{Zone, too_many_zones},
};

/// What a run may be told.
#[derive(Args)]
pub struct Options {
    /// Configuration file: these options, as TOML (`twheel config example`). May be repeated; a later file wins over an
    /// earlier one, and this command line over all. `-` before the path: the file may be missing
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, allow_hyphen_values = true)]
    pub config: Vec<ConfigFile>,
    /// Wait for interfaces that do not exist yet, and for those that disappear to come back
    #[arg(long)]
    pub wait_iface: bool,
    /// Hook for incoming packets
    #[arg(long, value_enum, default_value = "auto")]
    pub hook: Ingress,
    /// XDP mode; `native` and `generic` imply `--hook xdp` [default: auto]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Position of twheel's programs among other programs at TCX, and of its filters at clsact: first, last, before:NAME
    /// or after:NAME. NAME is a program (at clsact a filter), or id:N [default: first; programs that an earlier run left
    /// stay where they are]
    #[arg(long, value_name = "PLACE", add = complete::places())]
    pub order: Option<Order>,
    /// Hook for outgoing packets
    #[arg(long, value_enum, default_value = "auto")]
    pub egress: Egress,
    /// Tick of the wheels: the precision of expiry [default: 100ms; 10ms with `--rto on`]
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true)]
    pub tick: Option<Duration>,
    /// Idle timeouts: a list of STATE=DURATION, with conntrack's names of states. A DURATION alone sets that of established
    /// flows and limits all others; `inherit` takes this host's conntrack settings [default: conntrack's defaults]
    #[arg(long, value_name = "LIST", add = complete::timeouts())]
    pub timeout: Option<String>,
    /// Whether to track connections that were already open
    #[arg(long, value_enum, default_value = "loose")]
    pub pickup: Pickup,
    /// Also accept answers on the interface where the flow's first packet came in: for a router with one interface, or a
    /// mirror port. Anybody can then forge both sides of a flow
    #[arg(long)]
    pub one_armed: bool,
    /// Whether VLAN tags distinguish flows; use `ignore` if a connection is tagged in one place and untagged in another
    #[arg(long, value_enum, default_value = "key")]
    pub vlan: Vlan,
    /// Put an interface into a zone: flows of different zones may have the same addresses (VRFs, tenants). N is 1 to 65535;
    /// use conntrack's zone if the interface has one. May be repeated; takes lists with commas, and patterns: a name wins
    /// over patterns, the first matching pattern over later ones
    #[arg(long = "zone", value_name = "IFACE=N", value_delimiter = ',', value_parser = Zone::parse, add = complete::zones())]
    pub zones: Vec<Zone>,
    /// Protocols to track
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "tcp"
    )]
    pub proto: Vec<Proto>,
    /// Count the packets and bytes of each flow in each direction
    #[arg(long)]
    pub accounting: bool,
    /// Report each live flow this often, if it has had packets: `update` events
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true)]
    pub active_timeout: Option<Duration>,
    /// Report each flow that is still in the table when the run ends: `update` events
    #[arg(long)]
    pub final_records: bool,
    /// Look up the translated endpoints of a flow in conntrack when it ends or is first reported
    #[arg(long)]
    pub nat: bool,
    /// Add the owner of a flow's local socket to its events: process, command, cgroup, user. Looked up when the flow
    /// begins. The run keeps CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, without which processes are not shown
    #[arg(long)]
    pub owner: bool,
    /// Track retransmission timers: round trips, timeouts and stalled flows. Needs both directions
    #[arg(long, value_enum, default_value = "off")]
    pub rto: Switch,
    /// Minimum added to the round trip time to form the retransmission timeout [default: 200ms]
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true)]
    pub rto_min: Option<Duration>,
    /// Longest retransmission timeout [default: 2m]
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true)]
    pub rto_max: Option<Duration>,
    /// Retransmission timeouts in a row after which a flow is stalled; its idle timeout is then at most `retrans`
    /// [default: 3]
    #[arg(long, value_name = "N", value_parser = given::number(1..=255_u32), allow_hyphen_values = true)]
    pub max_retrans: Option<u32>,
    /// Policy file, with timeouts per service; SIGHUP reads it again
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Capacity of the flow table
    #[arg(long, value_name = "N", default_value_t = 131_072, value_parser = given::number(1..=MAX_FLOWS), allow_hyphen_values = true)]
    pub max_flows: u32,
    /// Quota of one source (an IPv4 address or an IPv6 /64) in a full table, in percent: its flows above the quota make way
    /// for those of others; `off` for no quota
    #[arg(long, value_name = "PERCENT", default_value = "25")]
    pub source_share: Quota,
    /// Timing wheel scheme
    #[arg(long, value_enum, default_value = "hierarchical")]
    pub scheme: SchemeName,
    /// Slots of each wheel level, rounded up to a power of two [default: 1024; for a simple wheel as many as the timeouts
    /// need]
    #[arg(long, value_name = "N", value_parser = given::number(SLOTS), allow_hyphen_values = true)]
    pub slots: Option<u32>,
    /// Levels of a hierarchical wheel [default: 3]
    #[arg(long, value_name = "N", value_parser = given::number(1..=MAX_LEVELS as u32), allow_hyphen_values = true)]
    pub levels: Option<u32>,
    /// Directory for the history of ended flows, which `twheel expired` reads; `off` keeps none
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    pub history: PathBuf,
    /// Most disk space for the history; the oldest flows are removed first
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = given::size, allow_hyphen_values = true)]
    pub history_size: ByteSize,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Kinds of events to print, a list of `begin`, `update`, `end`, `rto`, `reap` and `run`. Beginnings are also in the
    /// history only if they are printed. `run` (attached, lost, summary and so on) is printed with --json only; without it,
    /// it is on standard error
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = event_kind, default_value = "update,end,rto,reap,run", add = complete::kinds())]
    pub events: Vec<EventKind>,
    /// Serve Prometheus metrics at /metrics, health at /healthz and a page for operators at /. ADDR is a port on the
    /// loopback address, or an IP address and a port
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_address)]
    pub metrics: Option<SocketAddr>,
    /// Let programs hand over the idle timeouts of their connections, by a Unix socket at PATH, usually
    /// /run/twheel/offload. The user of the run may connect, and members of --group
    #[arg(long, value_name = "PATH")]
    pub offload: Option<PathBuf>,
    /// Most connections that the programs of one user hand over [default: half of --max-flows]
    #[arg(long, value_name = "N", value_parser = given::number(1..=MAX_FLOWS), allow_hyphen_values = true)]
    pub offload_limit: Option<u32>,
    /// Most connections that one program hands over [default: as many as its user]
    #[arg(long, value_name = "N", value_parser = given::number(1..=MAX_FLOWS), allow_hyphen_values = true)]
    pub offload_program_limit: Option<u32>,
    /// Leave everything attached and pinned at exit; the next run adopts it
    #[arg(long)]
    pub keep: bool,
    /// Let members of this group list and delete flows, read the history and load policies; by default only the user of the
    /// run may
    #[arg(long, value_name = "NAME", add = complete::group())]
    pub group: Option<String>,
    /// Log messages of the data plane to standard error
    #[arg(long, value_name = "LEVEL", default_value = "off", ignore_case = true, value_parser = log_level())]
    pub log_level: log::LevelFilter,
    /// How the kernel is made to step the wheels [default: test runs if they hold softirqs off on this kernel, else
    /// live-frames]
    #[arg(long, value_enum, value_name = "WAY")]
    pub stepping: Option<Stepping>,
    // Last: its heading is that of every option after it, too.
    #[command(flatten)]
    pub reap: Reap,
}

/// Parses the name of a level of messages.
fn log_level() -> impl TypedValueParser<Value = log::LevelFilter> {
    let names = ["off", "error", "warn", "info", "debug", "trace"];
    PossibleValuesParser::new(names).try_map(|name| name.parse())
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
    /// Enabled
    On,
    /// Disabled
    Off,
}

/// Whether VLAN tags are part of what names a flow.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Vlan {
    /// The same endpoints in two VLANs are two flows
    Key,
    /// They are one flow
    Ignore,
}

/// What may begin a flow.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pickup {
    /// Yes: an ACK in mid-stream begins a flow
    Loose,
    /// No: only a SYN begins a flow
    Strict,
}

/// The names without duplicates, in the order of their first occurrence.
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
    /// The data plane's configuration with the timeouts of flows of no rule, and what the reaper
    /// may do; for a run on this many interfaces.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: two options contradict each other.
    pub fn config(
        &self,
        clock: Clock,
        interfaces: usize,
    ) -> Result<((Config, Rule), reap::Mandate)> {
        if self.mode.is_some() && matches!(self.hook, Ingress::Tcx | Ingress::Clsact) {
            return Err(Failure::new(
                Kind::Usage,
                "--mode sets where XDP runs, but --hook tcx and --hook clsact do not use XDP: remove one of the two options",
            )
            .into());
        }
        if self.rto == Switch::On && self.egress == Egress::Off && interfaces == 1 {
            return Err(Failure::new(
                Kind::Usage,
                "--rto on --egress off: retransmission timers need both directions: remove one of the two options, or \
                 add a second interface on which the other direction comes in",
            )
            .into());
        }
        for (option, is_given) in [
            ("--rto-min", self.rto_min.is_some()),
            ("--rto-max", self.rto_max.is_some()),
            ("--max-retrans", self.max_retrans.is_some()),
        ] {
            if is_given && self.rto == Switch::Off {
                say!("twheel: {option} without --rto on: there are no retransmission timers");
            }
        }
        for (option, is_given) in [
            ("--offload-limit", self.offload_limit.is_some()),
            (
                "--offload-program-limit",
                self.offload_program_limit.is_some(),
            ),
        ] {
            if is_given && self.offload.is_none() {
                say!("twheel: {option} without --offload: programs hand over no timeouts");
            }
        }
        let default = Settings::default();
        let wanted = Settings {
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
            // Owners are looked up when flows begin.
            begins: self.events.contains(&EventKind::Begin) || self.owner,
            // What is reported at the end must be known to the run that adopts the flows.
            active_timeout: match self.final_records {
                true => self.active_timeout.or(Some(longest_timeout(clock))),
                false => self.active_timeout,
            },
            rto: self.rto == Switch::On,
            rto_min: self.rto_min.unwrap_or(default.rto_min),
            rto_max: self.rto_max.unwrap_or(default.rto_max),
            max_retrans: self.max_retrans.unwrap_or(default.max_retrans),
            enforce: self.reap.i_know_this_drops_traffic,
            hold: self.reap.holds(),
            enforce_rate: self.reap.enforce_rate.unwrap_or(default.enforce_rate),
            share: self.source_share.0.is_some(),
            vlans: self.vlan == Vlan::Key,
            offload: self.offload.is_some(),
            max_flows: self.max_flows,
            scheme: self.scheme.into(),
            slots: self.slots,
            levels: self.levels,
        };
        let reap = self.reap.wanted(
            Knowable {
                ended: true,
                accounting: self.accounting,
                rto: self.rto == Switch::On,
            },
            wanted.strict,
            self.policy.is_some(),
        )?;
        let mut config = wanted.config(clock)?;
        config.1.actions = self.reap.actions.bits();
        if self.history_size.as_u64() < history::LEAST_BYTES {
            return Err(Failure::new(
                Kind::Usage,
                format!(
                    "--history-size {}: the minimum is {}; to keep no history, use --history off",
                    self.history_size,
                    ByteSize(history::LEAST_BYTES)
                ),
            )
            .into());
        }
        Ok((config, reap))
    }

    /// Checks the zones.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the zone: it is given twice, its interface is not selected, or there
    /// are too many zones.
    pub fn check_zones(
        &self,
        interfaces: &Selection,
        namespaces: &NamespaceSelection,
    ) -> Result<()> {
        for (number, zone) in self.zones.iter().enumerate() {
            let Zone { interface, .. } = zone;
            let asked = Asked::parse(interface)
                .map_err(|why| Failure::new(Kind::Usage, format!("--zone {why}")))?;
            let elsewhere = interface.rsplit_once('/').map(|(namespace, _)| namespace);
            let why = if let Some(namespace) = elsewhere.filter(|it| !namespaces.matches(it)) {
                format!("the network namespace {namespace} is not watched: add --netns {namespace}")
            } else if !interfaces.may_have(&asked) {
                format!("{interface} is not watched: add --iface {interface}")
            } else if self.zones[..number]
                .iter()
                .any(|it| it.interface == *interface)
            {
                format!("{interface} already has a zone: give only one")
            } else {
                continue;
            };
            let what = format!("--zone {interface}={}: {why}", zone.number);
            return Err(Failure::new(Kind::Usage, what).into());
        }
        let numbers: BTreeSet<_> = self.zones.iter().map(|zone| zone.number).collect();
        match numbers.last() {
            Some(last) if numbers.len() >= ZONES => Err(too_many_zones(*last)),
            _ => Ok(()),
        }
    }

    /// The hooks of a run on this many interfaces, with this configuration. `names`: those of the
    /// programs that are loaded.
    pub fn hooks(
        &self,
        interfaces: usize,
        config: &Config,
        clock: Clock,
        names: ProgramNames,
    ) -> Hooks {
        let in_policy = match &self.policy {
            Some(file) if self.reap.i_know_this_drops_traffic => {
                // Errors in the file are reported when it is put into force, before anything is
                // attached.
                install::asks_for(file, clock, config, Action::EnforceReset).unwrap_or_default()
            }
            // Without that confirmation, a policy that asks for it is refused.
            _ => false,
        };
        Hooks {
            ingress: self.hook,
            mode: self.mode,
            egress: self.egress(interfaces),
            order: self.order.clone(),
            vlans: self.vlan == Vlan::Key,
            resets: in_policy || self.reap.actions.has(Action::EnforceReset),
            names,
        }
    }

    /// How outgoing packets are seen, in a run on this many interfaces.
    fn egress(&self, interfaces: usize) -> Egress {
        match self.egress {
            // With a single interface, the other direction is seen at no other interface.
            Egress::Auto if self.rto == Switch::On && interfaces == 1 => Egress::On,
            egress => egress,
        }
    }
}
