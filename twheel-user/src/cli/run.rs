//! `twheel run`

use std::{
    collections::BTreeMap,
    io::{self, BufWriter, Write},
    net::SocketAddr,
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use aya_log::EbpfLogger;
use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use nix::net::if_::if_nametoindex;
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};
use twheel_common::{
    counter::Counter,
    event::{Reason, Record},
    packet::Protocols,
    state,
};

use super::{Scheme, reap::Reap};
use crate::{
    attach::{self, Egress, Mode},
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    failure::{Failure, Kind},
    filter::Known,
    history, host,
    metrics::{self, Listener, Metrics, Server},
    output::{Expired, Json, Output, Rto, Text},
    pins::{Instance, PROGRAMS, Pins},
    policy::install::{self, Names},
    progress,
    reap::{self, Action, Reaped, Reaper},
    settings::Wanted,
    stepper::{SharedEvents, Steppers},
    timeouts::Timeouts,
};

/// Watch interfaces and print each flow that has expired
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel run --iface eth0
  twheel run --iface eth0 --iface eth1 --timeout 5m --json
  twheel run --iface eth0 --timeout established=1h,syn_sent=20s
  twheel run --iface eth0 --metrics 9435    # and look at http://127.0.0.1:9435/
  twheel run --iface eth0 --keep     # Ctrl-C leaves the flows tracked; the next run goes on")]
pub struct Run {
    /// The interface; may be given several times, for a gateway
    #[arg(long = "iface", value_name = "NAME", required = true)]
    interfaces: Vec<String>,
    /// Where XDP runs
    #[arg(long, value_enum, default_value = "auto")]
    mode: Mode,
    /// Whether outgoing packets are seen too
    #[arg(long, value_enum, default_value = "auto")]
    egress: Egress,
    /// Precision of expiry [default: 100ms; 10ms with `--rto on`]
    #[arg(long, value_parser = humantime::parse_duration)]
    tick: Option<Duration>,
    /// How long a flow may be idle: NAME=DURATION by conntrack's names of states; a duration alone is that of
    /// established flows, and the most for all others; `inherit` takes this host's conntrack's [default: conntrack's]
    #[arg(long, value_name = "LIST")]
    timeout: Option<String>,
    /// Whether flows are tracked whose beginning was not seen
    #[arg(long, value_enum, default_value = "loose")]
    pickup: Pickup,
    /// What is tracked
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "tcp"
    )]
    proto: Vec<Proto>,
    /// Count each flow's packets and bytes, each way
    #[arg(long)]
    accounting: bool,
    /// Whether retransmission timers run, which needs both directions: round trips, timeouts, and flows that are stalled
    #[arg(long, value_enum, default_value = "off")]
    rto: Switch,
    /// What a retransmission timeout is above the round trip, at least
    #[arg(long, value_parser = humantime::parse_duration, default_value = "200ms")]
    rto_min: Duration,
    /// The longest retransmission timeout
    #[arg(long, value_parser = humantime::parse_duration, default_value = "120s")]
    rto_max: Duration,
    /// Expiries in a row after which a flow is stalled: its timeout is then that of `retrans`
    #[arg(long, value_name = "N", default_value_t = 3)]
    max_retrans: u32,
    /// Timeouts per service: a policy file; SIGHUP makes it be read again
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Flows tracked at once, at most
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    max_flows: u32,
    /// How the wheels turn
    #[arg(long, value_enum, default_value = "hierarchical")]
    scheme: Scheme,
    /// Slots of a wheel's level, rounded up to a power of two [default: 1024; for a simple wheel as many
    /// as the timeouts need]
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Levels of a hierarchical wheel [default: 3]
    #[arg(long, value_name = "N")]
    levels: Option<u32>,
    /// Where the history of what has ended is kept, for `twheel expired`; or `off`
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// Room for it on disk: the oldest goes first
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    history_size: ByteSize,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reap: Reap,
    /// Numbers for Prometheus at /metrics, health at /healthz, and a page that shows the wheels: a port of the
    /// loopback address, or an IP address and a port
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_address)]
    metrics: Option<SocketAddr>,
    /// Leave everything attached and pinned at the end; the next run adopts it
    #[arg(long)]
    keep: bool,
    /// Diagnostics of the data plane on standard error: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "off")]
    log_level: log::LevelFilter,
}

/// What is tracked.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Proto {
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
enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// What may begin a flow.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pickup {
    /// Any segment but a FIN or a RST
    Loose,
    /// A SYN
    Strict,
}

/// Batches of events on their way to the output.
const BATCHES: usize = 4;
/// What became of actions, likewise.
const RESULTS: usize = 1024;
/// Reasons for failures that are told apart in the summary.
const REASONS: usize = 16;

impl Run {
    pub(super) fn execute(mut self) -> Result<()> {
        let mut seen = Vec::new();
        self.interfaces.retain(|name| {
            let new = !seen.contains(name);
            seen.push(name.clone());
            new
        });
        env_logger::Builder::new()
            .filter_level(log::LevelFilter::Warn)
            .filter_module("twheel", self.log_level.max(log::LevelFilter::Warn))
            .format_timestamp(None)
            .init();

        if self.rto == Switch::On && self.egress == Egress::Off && self.interfaces.len() == 1 {
            return Err(Failure::new(
                Kind::Usage,
                "--rto on --egress off: retransmission timers need both directions: leave one of the two out, or give \
                 a second interface by which the other direction comes in",
            )
            .into());
        }
        if self.rto == Switch::On && self.egress != Egress::Off && self.interfaces.len() > 1 {
            return Err(Failure::new(
                Kind::Usage,
                "--rto on with several interfaces: give --egress off, or what is forwarded between them is seen twice",
            )
            .into());
        }
        let clock = Clock::jiffies()?;
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
        config.1.0[state::Timeouts::REAP] = self.reap.actions.bits();
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
        host::check()?;
        for interface in &self.interfaces {
            attach::check_interface(interface)?;
        }
        // Before anything is loaded: a port that is taken leaves nothing behind.
        let listener = self.metrics.map(Listener::bind).transpose()?;
        let instance = Instance::open(&self.interfaces)?;
        let load = Load {
            log_level: self.log_level as u8,
            interfaces: self
                .interfaces
                .iter()
                .map(|name| if_nametoindex(name.as_str()))
                .collect::<Result<_, _>>()
                .context("cannot tell the interfaces' numbers")?,
            ..Load::new(OBJECT, config, clock)
        };
        // What another loader has left attached is not ours to remove if it cannot be adopted.
        let attached = instance.is_attached()?;
        let result = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start tokio")?
            .block_on(async {
                // Before anything is pinned or attached: from here on a signal ends the run in good
                // order.
                let mut stop = Stop::new()?;
                let making = format!("making a table for {} flows", self.max_flows);
                let plane = progress::spin(&making, || DataPlane::load(&load, &instance))?;
                self.watch(plane, &instance, listener, reap, &mut stop)
                    .await
            });
        let leave = match &result {
            Ok(()) => self.keep,
            Err(_) => attached,
        };
        if leave {
            return result;
        }
        result.and(instance.remove())
    }

    async fn watch(
        &self,
        mut plane: DataPlane,
        instance: &Instance,
        listener: Option<Listener>,
        reap: reap::Wanted,
        stop: &mut Stop,
    ) -> Result<()> {
        let mut logger = match self.log_level {
            log::LevelFilter::Off => None,
            _ => Some(watched(
                EbpfLogger::init(plane.bpf_mut()).context("cannot read the data plane's log")?,
            )?),
        };
        pin_programs(&mut plane, instance)?;
        let pins = instance.pins();
        if plane.adopted() {
            // A policy that earlier runs have left does not outlive them.
            install::load(
                &pins,
                self.policy.as_deref(),
                plane.clock(),
                &progress::none(),
            )?;
        } else {
            install::put(&pins, self.policy.as_deref(), plane.clock())?;
        }
        let events: SharedEvents = Arc::new(Mutex::new(plane.take_events()?));
        let ring = watched(
            std::os::fd::AsFd::as_fd(&*events.lock().expect("no holder panics"))
                .try_clone_to_owned()?,
        )?;
        let mut wakes = watched(plane.take_wakes()?)?;
        let adopted = plane.counters()?.live();
        let (batches, mut inbox) = mpsc::channel(BATCHES);
        let metrics = match &listener {
            Some(_) => Some(Arc::new(Metrics::new(&plane, &pins, &self.interfaces)?)),
            None => None,
        };
        let steppers = Steppers::start(
            instance.object("twheel_step"),
            plane.clock(),
            plane.config().tick,
            events.clone(),
            batches.clone(),
            metrics.clone(),
        )?;

        // Before anything is attached: what it needs may not be there.
        let (to_results, mut reaped) = mpsc::channel(RESULTS);
        let reaper = Reaper::start(&pins, reap, self.reap.actions, to_results)?;
        let mut results = Vec::new();
        for interface in &self.interfaces {
            let attached = attach::attach(&mut plane, instance, interface, self.mode, self.egress)?;
            if let Some(why) = &attached.refused {
                say!("{interface}: the driver refuses native XDP ({why})");
            }
            if !attached.egress && self.rto == Switch::On && self.interfaces.len() == 1 {
                return Err(Failure::new(
                    Kind::Unsupported,
                    format!(
                        "{interface}: --rto on needs both directions, and packets that go out cannot be seen here"
                    ),
                )
                .into());
            }
            let egress = if attached.egress {
                "both directions"
            } else {
                "incoming only"
            };
            say!("{interface}: attached, {} XDP, {egress}", attached.ingress);
            if !attached.egress && !self.reap.actions.is_empty() && self.interfaces.len() == 1 {
                say!(
                    "{interface}: --reap: packets that go out are not seen, and keep no flow alive"
                );
            }
        }
        if plane.adopted() {
            say!("adopted {adopted} flows");
        }

        let _server = match listener.zip(metrics.clone()) {
            Some((listener, metrics)) => {
                say!("metrics and page: http://{}/", listener.address());
                Some(Server::start(listener, metrics)?)
            }
            None => None,
        };
        let history = self.history(&plane, &pins);
        if let Some(metrics) = &metrics {
            let lost = history.as_ref().map(history::Writer::lost);
            metrics.watch(reaper.shared(), lost.unwrap_or_default());
        }
        let mut report = Report::new(self.json, &plane, &pins, history, metrics)?;
        report.reaper = Some(reaper);
        let result = loop {
            if report.closed {
                // `| head` has what it wanted: no failure, and nobody left to run for.
                break Ok(());
            }
            tokio::select! {
                batch = inbox.recv() => match batch {
                    Some(batch) => if let Err(error) = report.print(batch) { break Err(error) },
                    None => break Ok(()),
                },
                // After the events: for those the steppers wait.
                1.. = reaped.recv_many(&mut results, RESULTS), if inbox.is_empty() => {
                    if let Err(error) = report.reaped(&mut results) { break Err(error) }
                }
                // Events that the packet path raised: nobody is stepping.
                ready = ring.readable() => {
                    ready?.clear_ready();
                    let mut batch = Vec::new();
                    events.lock().expect("no holder panics").drain(&mut batch);
                    if let Err(error) = report.print(batch) { break Err(error) }
                }
                ready = wakes.readable_mut() => {
                    let mut ready = ready?;
                    while let Some(record) = ready.get_inner_mut().next() {
                        if let Ok(cpu) = <[u8; 8]>::try_from(&*record) {
                            steppers.call(u64::from_ne_bytes(cpu) as u32);
                        }
                    }
                    ready.clear_ready();
                }
                ready = async { match &mut logger {
                    Some(logger) => logger.readable_mut().await,
                    None => std::future::pending().await,
                } } => {
                    let mut ready = ready?;
                    ready.get_inner_mut().flush();
                    ready.clear_ready();
                }
                // Its error comes with the end of the steppers.
                () = steppers.failed() => break Ok(()),
                _ = stop.interrupt.recv() => break Ok(()),
                _ = stop.terminate.recv() => break Ok(()),
                _ = stop.hangup.recv() => {
                    let resumed = report.resume();
                    if self.policy.is_none() {
                        if resumed {
                            continue;
                        }
                        break Ok(());
                    }
                    let (pins, file, clock) = (pins.clone(), self.policy.clone(), plane.clock());
                    // Not here: it takes a while, and the steppers' calls must not wait.
                    tokio::task::spawn_blocking(move || {
                        match install::load(&pins, file.as_deref(), clock, &progress::none()) {
                            Ok(armed) => say!("the policy was read again, {armed} flows follow"),
                            Err(error) => say!("twheel: {error:#}: the policy stays as it was"),
                        }
                    });
                }
            }
        };
        // A stepper may be waiting for room in the inbox, with flows that have ended: it is heard out.
        let mut stopping = tokio::task::spawn_blocking(|| steppers.stop());
        let stopped = loop {
            tokio::select! {
                Some(batch) = inbox.recv() => report.print(batch)?,
                stopped = &mut stopping => break stopped?,
            }
        };
        while let Ok(batch) = inbox.try_recv() {
            report.print(batch)?;
        }
        let mut batch = Vec::new();
        events.lock().expect("no holder panics").drain(&mut batch);
        report.print(batch)?;
        // The reaper is heard out, too.
        let mut stopping = tokio::task::spawn_blocking(report.take_reaper());
        let shared = loop {
            tokio::select! {
                1.. = reaped.recv_many(&mut results, RESULTS) => report.reaped(&mut results)?,
                shared = &mut stopping => break shared?,
            }
        };
        while let Ok(reaped) = reaped.try_recv() {
            results.push(reaped);
        }
        report.reaped(&mut results)?;
        report.summary(&plane, shared.as_deref())?;
        result.and(stopped)
    }
}

impl Run {
    /// What writes the history, unless that is off. A disk that has no room for one is no reason to leave flows
    /// unwatched.
    fn history(&self, plane: &DataPlane, pins: &Pins) -> Option<history::Writer> {
        if self.history.as_os_str() == "off" {
            return None;
        }
        let one_way = plane.config().one_way != 0;
        let bytes = self.history_size.as_u64();
        history::Writer::start(&self.history, pins, bytes, plane.clock(), one_way)
            .inspect_err(|error| say!("twheel: no history is kept: {error:#}"))
            .ok()
    }
}

/// The signals that end a run.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Stop {
    fn new() -> Result<Self> {
        let on = |kind| signal(kind).context("cannot wait for signals");
        Ok(Self {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
            hangup: on(SignalKind::hangup())?,
        })
    }
}

/// Registers a descriptor with the runtime.
fn watched<T: AsRawFd>(descriptor: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: what is passed here (a ring, the logger's ring, an owned descriptor) gives the same
    // open descriptor for as long as it lives.
    unsafe { AsyncFd::register(descriptor) }.map_err(io::Error::from)
}

/// Pins the programs, in place of those that an earlier loader pinned.
fn pin_programs(plane: &mut DataPlane, instance: &Instance) -> Result<()> {
    for name in PROGRAMS {
        let path = instance.object(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", path.display()));
            }
            _ => {}
        }
        let program = plane.bpf_mut().program_mut(name);
        program
            .with_context(|| format!("the object has no program {name}"))?
            .pin(&path)
            .with_context(|| format!("cannot pin {}", path.display()))?;
    }
    Ok(())
}

/// Prints ended flows and counts them.
struct Report {
    output: Box<dyn Output>,
    clock: Clock,
    one_way: bool,
    ended: BTreeMap<(Reason, &'static str), u64>,
    /// Retransmission timers that have expired.
    rtos: u64,
    names: Names,
    history: Option<history::Writer>,
    metrics: Option<Arc<Metrics>>,
    reaper: Option<Reaper>,
    /// Why actions have failed.
    failures: BTreeMap<String, u64>,
    /// The reader of our output is gone.
    closed: bool,
}

impl Report {
    fn new(
        json: bool,
        plane: &DataPlane,
        pins: &Pins,
        history: Option<history::Writer>,
        metrics: Option<Arc<Metrics>>,
    ) -> Result<Self> {
        let output: Box<dyn Output> = if json { Box::new(Json) } else { Box::new(Text) };
        Ok(Self {
            output,
            clock: plane.clock(),
            one_way: plane.config().one_way != 0,
            ended: BTreeMap::new(),
            rtos: 0,
            names: Names::open(&install::pinned(pins))?,
            history,
            metrics,
            reaper: None,
            failures: BTreeMap::new(),
            closed: false,
        })
    }

    /// Ends the reaper; gives what it has done.
    fn take_reaper(&mut self) -> impl FnOnce() -> Option<Arc<reap::Shared>> + Send + use<> {
        let reaper = self.reaper.take();
        move || {
            let reaper = reaper?;
            let shared = reaper.shared();
            reaper.stop();
            Some(shared)
        }
    }

    /// Lets the reaper go on, if it has paused. Returns whether it had.
    fn resume(&self) -> bool {
        self.reaper.as_ref().is_some_and(|reaper| {
            let paused = reaper.shared().is_paused();
            if paused {
                reaper.resume();
                say!("reaping goes on");
            }
            paused
        })
    }

    /// Prints what became of what was to be done.
    fn reaped(&mut self, results: &mut Vec<Reaped>) -> Result<()> {
        let mut out = BufWriter::new(io::stdout().lock());
        for reaped in results.drain(..) {
            let Some(ended) = Expired::new(&reaped.event, self.clock, self.one_way) else {
                continue;
            };
            if let Some(error) = &reaped.error {
                let more = "for other reasons";
                let is_known = self.failures.contains_key(error) || self.failures.len() < REASONS;
                let why = if is_known { error } else { more };
                *self.failures.entry(why.to_owned()).or_default() += 1;
            }
            let rule = self.names.of(ended.flow.rule)?;
            self.written(|output| output.reaped(&ended, &reaped, rule.as_deref(), &mut out))?;
        }
        self.flush(out)
    }

    fn print(&mut self, batch: Vec<Record>) -> Result<()> {
        let mut out = BufWriter::new(io::stdout().lock());
        let metrics = self.metrics.clone();
        let mut noted = metrics.as_deref().map(Metrics::batch);
        for record in &batch {
            match record {
                Record::Ended(event) => {
                    let Some(ended) = Expired::new(event, self.clock, self.one_way) else {
                        log::error!("an event that cannot be read: {event:?}");
                        continue;
                    };
                    let count = self.ended.entry((ended.reason, ended.flow.state));
                    *count.or_default() += 1;
                    let rule = self.names.of(ended.flow.rule)?;
                    if let Some(noted) = &mut noted {
                        noted.ended(event, &ended, rule.as_deref());
                    }
                    self.written(|output| output.expired(&ended, rule.as_deref(), &mut out))?;
                }
                Record::Rto(event) => {
                    let Some(timer) = Rto::new(event, self.one_way) else {
                        log::error!("an event that cannot be read: {event:?}");
                        continue;
                    };
                    self.rtos += 1;
                    let rule = self.names.of(timer.flow.rule)?;
                    self.written(|output| output.rto(&timer, rule.as_deref(), &mut out))?;
                }
            }
        }
        if let Some(reaper) = &self.reaper {
            reaper.reap(&batch)?;
        }
        if let Some(history) = &self.history {
            history.add(batch);
        }
        self.flush(out)
    }

    fn flush(&mut self, mut out: BufWriter<io::StdoutLock<'_>>) -> Result<()> {
        if self.closed {
            // Keeps the buffer from being written when it is dropped.
            drop(out.into_parts());
            return Ok(());
        }
        self.written(|_| out.flush())
    }

    /// Notes a reader that has gone away.
    fn written(&mut self, write: impl FnOnce(&mut dyn Output) -> io::Result<()>) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        match write(&mut *self.output) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            result => result.context("cannot write to standard output"),
        }
    }

    fn summary(&mut self, plane: &DataPlane, reaped: Option<&reap::Shared>) -> Result<()> {
        let counters = plane.counters()?;
        let total: u64 = self.ended.values().sum();
        say!("{total} flows ended, {} live", counters.live());
        let touched = counters.get(Counter::Touched);
        say!("  {touched:>8}  {}", Counter::Touched.meaning());
        if self.rtos > 0 {
            say!(
                "  {:>8}  {}, {} flows stalled by that",
                self.rtos,
                Counter::RtoExpired.meaning(),
                counters.get(Counter::Stalled)
            );
        }
        for ((reason, state), count) in &self.ended {
            say!("  {count:>8}  {} in {state}", reason.name());
        }
        for counter in [
            Counter::TableFull,
            Counter::WindowFull,
            Counter::Raced,
            Counter::EventsLost,
            Counter::Orphans,
        ] {
            if counters.get(counter) > 0 {
                say!("  {:>8}  {}", counters.get(counter), counter.meaning());
            }
        }
        for action in Action::ALL {
            for outcome in reap::Outcome::ALL {
                let count = reaped.map_or(0, |reaped| reaped.count(action, *outcome));
                if count > 0 {
                    say!("  {count:>8}  {}: {}", action.name(), outcome.meaning());
                }
            }
        }
        for (why, count) in &self.failures {
            say!("  {count:>8}  failed: {why}");
        }
        let lost = self.history.take().map_or(0, |history| {
            let lost = history.lost();
            drop(history);
            lost.load(Ordering::Relaxed)
        });
        if lost > 0 {
            say!("  {lost:>8}  events that are not in the history: the disk was too slow or full");
        }
        Ok(())
    }
}
