//! `twheel run`

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{self, BufWriter, Write},
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
    rc::Rc,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya_log::EbpfLogger;
use clap::Args;
use nix::{fcntl::Flock, net::if_::if_nametoindex, unistd::Gid};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
};
use twheel_common::{
    counter::Counter,
    event::{Reason, Record},
    quota::CALL,
    state::Way,
};

use super::{
    follow::Common,
    namespaces::{Namespaces, Wanted},
    options::Options,
};
use crate::{
    attach,
    clock::Clock,
    data_plane::{DataPlane, INCOMING, Load, LoaderCounters, OBJECT},
    failure::{Failure, Kind},
    history,
    hooks::Hooks,
    host,
    links::{self, Known, LinkLayer},
    metrics::{Listener, Metrics, Server},
    names::Names,
    notices, order,
    output::{Expired, Json, Output, Rto, Text},
    patterns::{self, Selection},
    pins::{self, Instance, Pins},
    policy::install,
    privilege, progress,
    reap::{self, Action, Reaped, Reaper},
    ring::{Events, Read, Signals},
    share,
    stepper::Steppers,
    stepping,
    stub::TailCalls,
    watched::{Watch, Zones},
};

/// Watch interfaces and print each flow that has expired
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel run --iface eth0
  twheel run --iface eth0,eth1 --timeout 5m --json
  twheel run --iface 'veth*' --exclude veth0    # those that exist, and those that appear
  twheel run --iface all                        # but lo
  twheel run --iface all --netns all            # and those of all network namespaces
  twheel run --iface eth0 --timeout established=1h,syn_sent=20s
  twheel run --iface eth0 --metrics 9435    # and look at http://127.0.0.1:9435/
  twheel run --iface tun0 --wait-iface      # that is not there yet, and goes and comes back
  twheel run --iface eth0 --keep     # Ctrl-C leaves the flows tracked; the next run goes on")]
pub struct Run {
    /// The interface; or a pattern ('veth*'), or all (but lo), for interfaces that exist and those that appear later; may be
    /// repeated, and takes lists with commas
    #[arg(long = "iface", value_name = "NAME", required = true)]
    interfaces: Vec<String>,
    /// Interfaces to leave out of those that a pattern of --iface matches: a name, a pattern or a list
    #[arg(long, value_name = "NAME")]
    exclude: Vec<String>,
    /// Where interfaces are looked for: a network namespace of /run/netns, a pattern or a list; or all: this one and each of
    /// those. Those that appear later are watched, too. An interface of another namespace is called NETNS/IFACE [default: this
    /// network namespace]
    #[arg(long, value_name = "NAME")]
    netns: Vec<String>,
    #[command(flatten)]
    options: Options,
}

/// Events that are read from the ring at a time.
const BATCH: usize = 512;
/// Batches that the history may have before it, until no more are read.
const BATCHES: usize = 8;
/// What a pipe takes as a whole or not at all (`PIPE_BUF`): lines that were written to one are never cut.
const PIPE: usize = 4096;
/// How long events wait for a disk that does not keep up.
const SLOW: Duration = Duration::from_secs(1);
/// What became of actions, likewise.
const RESULTS: usize = 1024;
/// Reasons for failures that are told apart in the summary.
const REASONS: usize = 16;

impl Run {
    pub(super) fn execute(mut self) -> Result<()> {
        let mut selection = Selection::new(&self.interfaces, &self.exclude)?;
        if let Some((namespace, interface)) = selection.names().find_map(|it| it.rsplit_once('/')) {
            let message = format!(
                "--iface {namespace}/{interface}: no interface has such a name: give --iface {interface} --netns {namespace}"
            );
            return Err(Failure::new(Kind::Usage, message).into());
        }
        let namespaces = Wanted::parse(&self.netns)?;
        if namespaces.is_elsewhere() {
            selection = selection.everywhere();
        }
        self.interfaces = selection.texts();
        env_logger::Builder::new()
            .filter_level(log::LevelFilter::Warn)
            .filter_module("twheel", self.options.log_level.max(log::LevelFilter::Warn))
            .format_timestamp(None)
            .init();

        let clock = Clock::jiffies()?;
        let (config, reap) = self.options.config(clock, selection.count())?;
        self.options.check_zones(&selection, &namespaces)?;
        host::check()?;
        for interface in selection.names() {
            if !self.options.wait_iface || if_nametoindex(interface).is_ok() {
                attach::check_interface(interface)?;
            }
        }
        // Before anything is loaded: a port that is taken leaves nothing behind.
        let listener = self.options.metrics.map(Listener::bind).transpose()?;
        let group = self
            .options
            .group
            .as_deref()
            .map(privilege::join)
            .transpose()?;
        let waiting = "waiting for another twheel to finish its start";
        let start = progress::told(waiting, pins::lock_start)?;
        let instance = Instance::open_for(&selection)?;
        if !namespaces.is_elsewhere() {
            // An earlier run's, which this one would not follow.
            instance.remove_elsewhere_but(|_| false)?;
            TailCalls::remove(&instance)?;
        }
        let history = self.history(&instance.pins(), group);
        let names = order::Names::read();
        // What follows takes no more, and so are all threads.
        privilege::give_up(namespaces.is_elsewhere())?;
        let making = format!(
            "loading the programs and a table for {} flows",
            self.options.max_flows
        );
        let load = Load {
            log_level: self.options.log_level as u8,
            room: self.room(&selection)?,
            ..Load::new(OBJECT, config, clock)
        };
        // What another loader has left attached is not ours to remove if it cannot be adopted.
        let attached = instance.is_attached()?;
        // Nor are its maps, also where no link is left; nor the table of one that is to be kept, whatever becomes of the
        // run.
        let stays = Cell::new(attached || instance.object("META").exists());
        let result = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start tokio")?
            .block_on(async {
                // Before anything is pinned or attached: from here on a signal ends the run in good
                // order.
                let mut stop = Stop::new()?;
                let hooks = self
                    .options
                    .hooks(selection.count(), &config.0, clock, names);
                let (known, mut needed) = (Known::read()?, Vec::new());
                for interface in selection.names() {
                    if if_nametoindex(interface).is_ok() {
                        let choice = hooks.choose(Some(instance.path()), interface, &known)?;
                        needed.push(choice.program());
                    }
                }
                let mut later = INCOMING.to_vec();
                // What comes is to be attached at once.
                later.retain(|program| !selection.has_pattern() && !needed.contains(program));
                let plane = progress::told(&making, || {
                    let load = Load {
                        stepping: stepping::find(self.options.stepping)?.way,
                        later: &later,
                        ..load
                    };
                    DataPlane::load(&load, &instance)
                })?;
                for (program, instructions) in plane.verified()? {
                    log::debug!("{program}: {instructions} instructions verified");
                }
                let opened = Opened {
                    hooks,
                    listener,
                    reap,
                    history,
                    group,
                    start,
                    namespaces,
                };
                stays.set(attached || plane.adopted());
                self.watch(plane, &instance, &selection, opened, &mut stop, &stays)
                    .await
            });
        let leave = match &result {
            Ok(()) => self.options.keep,
            Err(_) => stays.get(),
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
        selection: &Selection,
        opened: Opened,
        stop: &mut Stop,
        stays: &Cell<bool>,
    ) -> Result<()> {
        let Opened { listener, .. } = opened;
        let mut logger = match self.options.log_level {
            log::LevelFilter::Off => None,
            _ => Some(watched(
                EbpfLogger::init(plane.bpf_mut()).context("cannot read the data plane's log")?,
            )?),
        };
        plane.pin_programs(instance)?;
        let pins = instance.pins();
        if plane.adopted() {
            // A policy that earlier runs have left does not outlive them.
            install::load(
                &pins,
                self.options.policy.as_deref(),
                plane.clock(),
                &progress::none(),
            )?;
        } else {
            install::put(&pins, self.options.policy.as_deref(), plane.clock())?;
        }
        let events = plane.take_events()?;
        let ring = watched(events.as_fd().try_clone_to_owned()?)?;
        let signals = Arc::new(Signals::default());
        // Whoever waits for room hears of our end, however that comes.
        let _closes = Closes(signals.clone());
        let mut wakes = watched(plane.take_wakes()?)?;
        let shares = match self.options.source_share.0 {
            Some(percent) => Some(share::Reader::new(&plane, percent)?),
            None => None,
        };
        let shares = Arc::new(Mutex::new(shares));
        let adopted = plane.counters()?.live();
        let tally = Arc::new(LoaderCounters::open(&pins)?);
        let metrics = match &listener {
            Some(_) => Some(Arc::new(Metrics::new(&plane, &pins, &self.interfaces)?)),
            None => None,
        };
        let mut steppers = Steppers::start(
            instance.object("twheel_step"),
            plane.clock(),
            plane.config().tick,
            signals.clone(),
            metrics.clone(),
        )?;

        // Before anything is attached: what it needs may not be there.
        let (to_results, mut reaped) = mpsc::channel(RESULTS);
        let reaper = Reaper::start(&pins, tally.clone(), opened.reap, to_results)?;
        let mut results = Vec::new();
        // Where the kernel does not tell, a CPU that comes waits for the next run.
        let cpus = notices::Cpus::listen()
            .and_then(|cpus| Ok(watched(cpus)?))
            .ok();
        // Those of interfaces that are waited for, too: a policy that is loaded later enters zones as well.
        let zones: Vec<u16> = self.options.zones.iter().map(|zone| zone.number).collect();
        if !zones.is_empty() {
            let _lock = pins.lock_policy()?;
            Zones::open(plane.open("ZONES")?)?.enter_all(&zones)?;
        }
        let common = Common {
            options: &self.options,
            selection,
            hooks: &opened.hooks,
            group: opened.group,
            watch: Rc::new(RefCell::new(Watch::open(&plane)?)),
            said: Rc::default(),
        };
        let mut namespaces = Namespaces::new(opened.namespaces, common, instance, &mut plane)?;
        namespaces.attach_all(&mut plane)?;
        let changes = watched(namespaces.ready()?)?;
        plane.unpin_others(instance)?;
        stays.set(stays.get() || self.options.keep);
        instance.share(opened.group)?;
        drop(opened.start);
        if plane.adopted() {
            say!("adopted {adopted} flows");
        }

        let history = opened.history.and_then(|directory| {
            let one_way = plane.config().one_way != 0;
            let bytes = self.options.history_size.as_u64();
            history::Writer::start(
                &directory,
                &pins,
                tally,
                Some(bytes),
                plane.clock(),
                one_way,
            )
            .inspect_err(|error| say!("twheel: no history is kept: {error:#}"))
            .ok()
        });
        if let Some(metrics) = &metrics {
            metrics.watch(reaper.shared());
        }
        // When all is there that it serves.
        let _server = match listener.zip(metrics.clone()) {
            Some((listener, metrics)) => {
                say!("metrics and page: http://{}/", listener.address());
                Some(Server::start(listener, metrics)?)
            }
            None => None,
        };
        let unwritten = Unwritten::new(events, signals.clone(), history.as_ref());
        let mut report = Report::new(
            self.options.json,
            &plane,
            &pins,
            history,
            metrics,
            unwritten,
        )?;
        report.reaper = Some(reaper);
        (report.keeps, report.stays) = (self.options.keep, stays.get());
        // What a loader that was killed has left.
        signals.fill();
        let result = loop {
            if report.closed {
                // `| head` has what it wanted: no failure, and nobody left to run for.
                break Ok(());
            }
            tokio::select! {
                () = signals.filled() => {
                    if let Err(error) = report.go_on() { break Err(error) }
                }
                () = report.unwritten.wait() => {
                    if let Err(error) = report.go_on() { break Err(error) }
                }
                1.. = reaped.recv_many(&mut results, RESULTS) => {
                    if let Err(error) = report.reaped(&mut results) { break Err(error) }
                }
                // Events that the packet path raised: nobody is stepping.
                ready = ring.readable() => {
                    ready?.clear_ready();
                    if let Err(error) = report.go_on() { break Err(error) }
                }
                ready = wakes.readable_mut() => {
                    let mut ready = ready?;
                    while let Some(record) = ready.get_inner_mut().next() {
                        match <[u8; 8]>::try_from(&*record).map(u64::from_ne_bytes) {
                            Ok(CALL) => {
                                let shares = shares.clone();
                                // Not here: the steppers' calls must not wait.
                                tokio::task::spawn_blocking(move || look_at(&shares));
                            }
                            Ok(cpu) => steppers.call(cpu as u32),
                            Err(_) => {}
                        }
                    }
                    ready.clear_ready();
                }
                ready = changes.readable() => {
                    ready?.clear_ready();
                    let attached = namespaces.follow(&mut plane)?;
                    if attached && let Some(file) = self.options.policy.clone() {
                        // The rules of an interface are those of its number.
                        reload(&pins, Some(file), plane.clock());
                    }
                }
                ready = async { match &cpus {
                    Some(cpus) => cpus.readable().await,
                    None => std::future::pending().await,
                } } => {
                    ready?.clear_ready();
                    for (cpu, is_there) in cpus.iter().flat_map(|cpus| cpus.get_ref().changes()) {
                        if is_there {
                            say!("CPU {cpu} has come");
                            steppers.come(cpu)?;
                        } else {
                            say!("CPU {cpu} has gone: its flows wait until it is back");
                        }
                    }
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
                    if self.options.policy.is_none() {
                        if resumed {
                            continue;
                        }
                        break Ok(());
                    }
                    reload(&pins, self.options.policy.clone(), plane.clock());
                }
            }
        };
        // A stepper may be waiting for room in the ring, with flows that have ended: it is heard out.
        let mut stopping = tokio::task::spawn_blocking(|| steppers.stop());
        let stopped = loop {
            tokio::select! {
                () = signals.filled() => { report.go_on()?; }
                () = report.unwritten.wait() => { report.go_on()?; }
                stopped = &mut stopping => break stopped?,
            }
        };
        while report.go_on()? {
            tokio::select! {
                // Something was done, and all of it perhaps: then there is nothing to wait for.
                () = signals.filled() => {}
                () = report.unwritten.wait() => {}
            }
        }
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

/// Puts a policy file into force, beside what else there is to do: it takes a while, and the steppers' calls must not
/// wait.
fn reload(pins: &Pins, file: Option<PathBuf>, clock: Clock) {
    let pins = pins.clone();
    tokio::task::spawn_blocking(move || {
        match install::load(&pins, file.as_deref(), clock, &progress::none()) {
            Ok(armed) => say!("the policy was read again, {armed} flows follow"),
            Err(error) => say!("twheel: {error:#}: the policy stays as it was"),
        }
    });
}

impl Run {
    /// Interfaces for which there is to be room; 0: there is one, of which programs need not be told anything.
    fn room(&self, selection: &Selection) -> Result<u32> {
        if selection.has_pattern() {
            return Ok((selection.names().count() + patterns::ROOM) as u32);
        }
        let is_plain = match &self.interfaces[..] {
            // One that is waited for may be of any kind.
            [_] if self.options.wait_iface || !self.options.zones.is_empty() => false,
            // What goes out comes in by the same one.
            [_] if self.options.one_armed => false,
            [only] if if_nametoindex(only.as_str()).ok() == Some(Way::LOOPBACK.0) => false,
            [only] => links::link_layer(only)? == LinkLayer::Ethernet,
            _ => false,
        };
        match is_plain {
            true => Ok(0),
            false => Ok(self.interfaces.len() as u32),
        }
    }

    /// Where the history is written, unless that is off. A disk that has no room for one is no reason to leave flows
    /// unwatched.
    fn history(&self, pins: &Pins, group: Option<Gid>) -> Option<history::Directory> {
        if self.options.history.as_os_str() == "off" {
            return None;
        }
        history::Directory::make(&self.options.history, pins)
            .and_then(|directory| directory.share(group).map(|()| directory))
            .inspect_err(|error| say!("twheel: no history is kept: {error:#}"))
            .ok()
    }
}

/// What was opened while all capabilities were there.
struct Opened {
    hooks: Hooks,
    listener: Option<Listener>,
    reap: reap::Wanted,
    history: Option<history::Directory>,
    group: Option<Gid>,
    start: Flock<File>,
    namespaces: Wanted,
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

/// Looks who holds too much of a full table, unless somebody does already.
fn look_at(shares: &Mutex<Option<share::Reader>>) {
    let Ok(mut shares) = shares.try_lock() else {
        return;
    };
    let Some(reader) = &mut *shares else {
        return;
    };
    match reader.read() {
        Ok(holders) => {
            for holder in holders.iter().filter(|holder| holder.is_new) {
                say!(
                    "the table is full: {} has {} flows, and its share is {}: others take its place (--source-share)",
                    holder.source,
                    holder.flows,
                    reader.most()
                );
            }
        }
        Err(error) => say!("twheel: cannot tell who fills the table: {error:#}"),
    }
}

/// Registers a descriptor with the runtime.
fn watched<T: AsRawFd>(descriptor: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: what is passed here (a ring, the logger's ring, an owned descriptor) gives the same
    // open descriptor for as long as it lives.
    unsafe { AsyncFd::register(descriptor) }.map_err(io::Error::from)
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
    unwritten: Unwritten,
    /// The reader of our output is gone, or it cannot be written.
    closed: bool,
    /// Whether the table stays after a good end, and after a failure.
    keeps: bool,
    stays: bool,
    /// Closed, and the ring stays, for the next run to print what is left.
    leaves: bool,
}

/// What lies between the ring and standard output. An event goes to the history, then to standard output, and only then
/// out of the ring: so whoever is killed on the way takes none with him.
struct Unwritten {
    events: Events,
    signals: Arc<Signals>,
    /// What the history has or is about to have, and standard output has not.
    batches: VecDeque<(Arc<Vec<Read>>, Instant)>,
    /// Where the history is.
    written: Option<watch::Receiver<u64>>,
    /// Where the last event ended that was read.
    read: u64,
    /// The history does not keep up, and nobody waits for it until it does.
    behind: bool,
}

impl Unwritten {
    fn new(events: Events, signals: Arc<Signals>, history: Option<&history::Writer>) -> Self {
        Self {
            events,
            signals,
            batches: VecDeque::new(),
            read: 0,
            written: history.map(history::Writer::written),
            behind: false,
        }
    }

    /// Reads the next batch.
    fn read(&mut self) -> Option<Arc<Vec<Read>>> {
        if self.batches.len() == BATCHES {
            return None;
        }
        self.behind &= !self.has_written(self.read);
        let mut batch = Vec::new();
        self.events.read(&mut batch, BATCH);
        if batch.is_empty() {
            return None;
        }
        self.read = batch.last()?.end;
        let batch = Arc::new(batch);
        self.batches.push_back((batch.clone(), Instant::now()));
        Some(batch)
    }

    /// Whether the history has come so far, or there is none.
    fn has_written(&self, end: u64) -> bool {
        let written = self.written.as_ref();
        written.is_none_or(|written| *written.borrow() >= end)
    }

    /// The first batch that is in the history, or for which that has had its time.
    fn ready(&mut self) -> Option<Arc<Vec<Read>>> {
        let (batch, since) = self.batches.front()?;
        let (end, since) = (batch.last()?.end, *since);
        let is_written = self.has_written(end);
        self.behind |= !is_written && since.elapsed() >= SLOW;
        if !is_written && !self.behind {
            return None;
        }
        self.batches.pop_front().map(|(batch, _)| batch)
    }

    /// What ends there, or before, is written.
    fn release(&mut self, end: u64) {
        self.events.release(end);
        self.signals.make_room();
    }

    /// Returns when the history has got further, or has had its time. Nobody waits who waits for nothing.
    async fn wait(&mut self) {
        let (Some((_, since)), Some(written)) = (self.batches.front(), &mut self.written) else {
            return std::future::pending().await;
        };
        // Its thread outlives this.
        let _ = tokio::time::timeout_at((*since + SLOW).into(), written.changed()).await;
    }
}

/// Tells steppers that nobody reads any more, when dropped.
struct Closes(Arc<Signals>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Report {
    fn new(
        json: bool,
        plane: &DataPlane,
        pins: &Pins,
        history: Option<history::Writer>,
        metrics: Option<Arc<Metrics>>,
        unwritten: Unwritten,
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
            unwritten,
            closed: false,
            keeps: false,
            stays: false,
            leaves: false,
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
            let known_as = self.names.known_as(&ended.flow)?;
            self.written(|output| output.reaped(&ended, &reaped, known_as.named(), &mut out))?;
        }
        self.flush(out)
    }

    /// Brings events a step nearer to standard output. Returns whether some are on their way.
    fn go_on(&mut self) -> Result<bool> {
        if self.leaves {
            return Ok(false);
        }
        let mut more = false;
        if let Some(batch) = self.unwritten.read() {
            if let Some(history) = &self.history {
                history.add(&batch);
            }
            more = true;
        }
        while let Some(batch) = self.unwritten.ready() {
            self.print(&batch)?;
            more = true;
        }
        if more {
            // After a look at what else there is to do.
            self.unwritten.signals.fill();
        } else if self.unwritten.batches.is_empty() {
            // What was passed over, too. Nobody wakes who has not yet released all: so look again.
            if self.unwritten.events.release_all() {
                self.unwritten.signals.make_room();
                self.unwritten.signals.fill();
            }
        }
        Ok(more || !self.unwritten.batches.is_empty())
    }

    /// Prints events, and lets go of them as they are written.
    fn print(&mut self, batch: &[Read]) -> Result<()> {
        // First: for who is killed behind this, the next one does it again. (What the reaper still has before it is lost.)
        if let Some(reaper) = &self.reaper {
            let records: Vec<_> = batch.iter().map(|read| read.record).collect();
            reaper.reap(&records)?;
        }
        let metrics = self.metrics.clone();
        let mut noted = metrics.as_deref().map(Metrics::batch);
        let (mut out, mut line) = (Vec::with_capacity(PIPE), Vec::new());
        // What is of whole records: so many bytes, and where the last of them ends.
        let mut whole = None;
        for read in batch {
            line.clear();
            match &read.record {
                Record::Ended(event) => {
                    let Some(ended) = Expired::new(event, self.clock, self.one_way) else {
                        log::error!("an event that cannot be read: {event:?}");
                        continue;
                    };
                    let count = self.ended.entry((ended.reason, ended.flow.state));
                    *count.or_default() += 1;
                    let known_as = self.names.known_as(&ended.flow)?;
                    if let Some(noted) = &mut noted {
                        noted.ended(event, &ended, &known_as);
                    }
                    self.output.expired(&ended, known_as.named(), &mut line)?;
                }
                Record::Rto(event) => {
                    let Some(timer) = Rto::new(event, self.one_way) else {
                        log::error!("an event that cannot be read: {event:?}");
                        continue;
                    };
                    self.rtos += 1;
                    let known_as = self.names.known_as(&timer.flow)?;
                    self.output.rto(&timer, known_as.named(), &mut line)?;
                }
            }
            while out.len() + line.len() > PIPE && !out.is_empty() {
                self.write(&mut out, whole.take())?;
            }
            out.extend_from_slice(&line);
            if read.free == read.end {
                whole = Some((out.len(), read.end));
            }
        }
        self.write(&mut out, whole)
    }

    /// Writes the lines of whole records, and lets go of these; of one that is too long what there is.
    fn write(&mut self, out: &mut Vec<u8>, whole: Option<(usize, u64)>) -> Result<()> {
        let length = whole.map_or(out.len(), |(length, _)| length);
        self.written(|_| {
            let mut stdout = io::stdout().lock();
            stdout.write_all(&out[..length])?;
            stdout.flush()
        })?;
        out.drain(..length);
        // What its reader does not want any more stays, for the next run.
        if let Some((_, end)) = whole
            && !self.leaves
        {
            self.unwritten.release(end);
        }
        Ok(())
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
            Ok(()) => Ok(()),
            Err(error) => {
                let is_gone = error.kind() == io::ErrorKind::BrokenPipe;
                self.closed = true;
                self.leaves = if is_gone { self.keeps } else { self.stays };
                if self.leaves {
                    // Whoever waits for room waits in vain.
                    self.unwritten.signals.close();
                }
                match is_gone {
                    true => Ok(()),
                    false => Err(error).context("cannot write to standard output"),
                }
            }
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
            Counter::OverShare,
            Counter::TableFull,
            Counter::WindowFull,
            Counter::SameWay,
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
        let lost = self.history.take().map_or(0, history::Writer::end);
        if lost > 0 {
            say!("  {lost:>8}  events that are not in the history: the disk was too slow or full");
        }
        Ok(())
    }
}
