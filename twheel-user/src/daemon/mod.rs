//! The running twheel: what it loads and attaches, and what it does until it is stopped.
//!
//! | question | file |
//! |---|---|
//! | its options | `setup.rs` |
//! | which programs are loaded | `load.rs` |
//! | network namespaces that appear and disappear | `namespaces.rs` |
//! | interfaces that appear, change and disappear | `interfaces.rs` |
//! | the states of an interface | `targets.rs` |
//! | the path of an event from the ring to the output | `report.rs`, `stations.rs` |
//! | sources over their quota | `quota_watch.rs` |
//! | live flows at the end | `final_records.rs` |
//! | who steps the wheels of an earlier run while it loads | `meanwhile.rs` |
//! | what stays when it ends | `life.rs` |
//! | the order in which it ends | `Daemon::end`; `docs/design.md`, *How a run ends* |

mod final_records;
mod interfaces;
mod life;
mod load;
mod meanwhile;
mod namespaces;
mod quota_watch;
mod report;
mod setup;
mod stations;
mod targets;

use std::{
    cell::RefCell,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::maps::{MapData, ring_buf::RingBuf};
use aya_log::EbpfLogger;
use nix::{fcntl::Flock, net::if_::if_nametoindex, unistd::Gid};
use tokio::{io::unix::AsyncFd, sync::mpsc};
use twheel_common::quota::CALL;

pub use self::setup::Setup;
use self::{
    interfaces::Common,
    life::{End, Ending, Life, Stop},
    load::load,
    meanwhile::Meanwhile,
    namespaces::Namespaces,
    quota_watch::QuotaWatch,
    report::{Notes, Printer, Report, lost_of},
    stations::Outside,
};
use crate::{
    action::News,
    attach,
    clock::Clock,
    data_plane::{self, DataPlane, UserCounters},
    history, host,
    identity::Identity,
    maps,
    metrics::{Listener, Metrics, Server},
    model::{EventKind, Happened, RunEvent},
    names::Names,
    nat::Nat,
    notices,
    offload::{self, Offloads},
    order,
    output::{Output, json::Json, several, text::Text},
    owner::Lookups,
    pins::{self, Instance, Pins},
    policy::install,
    privilege, progress,
    reap::{self, Reaper},
    ring::{Batches, Numbers, Signals},
    stepper::{Observer, Steppers},
    stub::TailCalls,
    watched::Watch,
    zones::Zones,
};

/// Capacity of the queue of results of actions that wait to be printed.
const RESULTS: usize = 1024;

/// How often lost events are looked for, while there are events.
const LOSSES: Duration = Duration::from_secs(1);

/// What was opened while the process still had all its capabilities.
struct Opened {
    listener: Option<Listener>,
    reap: reap::Mandate,
    history: Option<history::Directory>,
    programs: Option<offload::Listener>,
    group: Option<Gid>,
    start: Flock<File>,
}

/// Runs until a signal ends it.
///
/// # Errors
///
/// It cannot start, or cannot continue.
pub fn run(mut setup: Setup, reap: reap::Mandate) -> Result<()> {
    host::check()?;
    // Before it waits for anything: what is wrong with the file is known at once.
    if let Some(file) = &setup.policy {
        install::check(file, setup.clock, &setup.config.0)?;
    }
    for interface in setup.selection.names() {
        if !setup.wait || if_nametoindex(interface).is_ok() {
            attach::check_interface(interface)?;
        }
    }
    // Before anything is loaded: if the port is taken, nothing is left behind.
    let listener = setup.metrics.map(Listener::bind).transpose()?;
    let group = setup.group.as_deref().map(privilege::join).transpose()?;
    let waiting = "waiting for another twheel to finish starting";
    let start = progress::told(waiting, pins::lock_start)?;
    let instance = Instance::open_for(&setup.selection)?;
    if !setup.namespaces.is_elsewhere() {
        // Pins of an earlier run, for namespaces that this one does not watch.
        instance.remove_elsewhere_but(|_| false)?;
        TailCalls::remove(&instance)?;
    }
    let opened = Opened {
        listener,
        reap,
        history: setup.history_directory(&instance.pins(), group),
        programs: setup.listen_for_programs(group)?,
        group,
        start,
    };
    setup.hooks.names = order::ProgramNames::read();
    // What follows needs no more capabilities. No thread is started before this, so none keeps
    // more.
    privilege::give_up(privilege::Kept {
        enters: setup.namespaces.is_elsewhere(),
        traces: setup.owner,
    })?;
    let room = setup.room()?;
    // If another `twheel run` has left programs attached that cannot be adopted, they are not ours
    // to remove.
    let attached = instance.is_attached()?;
    // Nor are its maps, even if no BPF link is left.
    let left = attached || instance.object("META").exists();
    let mut life = Life::opened(setup.keep, left);
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start tokio")?
        .block_on(async {
            // Before anything is pinned or attached: from here on a signal ends the run in good
            // order.
            let mut stop = Stop::new()?;
            let meanwhile = Meanwhile::start(&instance, &setup);
            let plane = load(&setup, &instance, room)?;
            life.loaded(attached || plane.adopted());
            let daemon = Daemon::start(&setup, opened, plane, &instance, &mut life)?;
            drop(meanwhile);
            daemon.watch(&mut stop).await
        });
    let end = match result {
        Ok(()) => End::Good,
        Err(_) => End::Failed,
    };
    if life.stays(end) {
        return result;
    }
    result.and(instance.remove())
}

/// A run in progress. Fields are dropped in this order.
struct Daemon<'a> {
    report: Report<Outside>,
    _server: Option<Server>,
    _offloads: Option<Offloads>,
    /// Readable when interfaces or network namespaces have changed.
    changes: AsyncFd<OwnedFd>,
    namespaces: Namespaces<'a>,
    /// Readable when a CPU came online or went offline.
    cpus: Option<AsyncFd<notices::CpuNotices>>,
    /// The outcomes of actions.
    reaped: mpsc::Receiver<News>,
    results: Vec<News>,
    /// The events that were lost, as of when that was looked at.
    lost: (u64, Instant),
    steppers: Steppers,
    quota: QuotaWatch,
    /// Calls from the packet path to sleeping steppers.
    wakes: AsyncFd<RingBuf<MapData>>,
    signals: Arc<Signals>,
    /// When dropped, tells the steppers that wait for the reader that it has ended, however it
    /// ended.
    _closes: Closes,
    ring: AsyncFd<OwnedFd>,
    pins: Pins,
    logger: Option<AsyncFd<EbpfLogger<&'static dyn log::Log>>>,
    plane: DataPlane,
    setup: &'a Setup,
}

impl<'a> Daemon<'a> {
    /// Puts a policy into force, starts the steppers and attaches to all interfaces that exist.
    fn start(
        setup: &'a Setup,
        opened: Opened,
        mut plane: DataPlane,
        instance: &Instance,
        life: &mut Life,
    ) -> Result<Self> {
        let logger = match setup.log_level {
            log::LevelFilter::Off => None,
            _ => Some(watched(
                EbpfLogger::init(plane.bpf_mut()).context("cannot read the data plane's log")?,
            )?),
        };
        plane.pin_programs(instance)?;
        let pins = instance.pins();
        if plane.adopted() {
            // Replaces or removes the policy that an earlier run left in force.
            let (file, none) = (setup.policy.as_deref(), progress::none());
            let effect = install::load(&pins, file, plane.clock(), &none)?;
            if effect.is_some() {
                say!("policy of this run: {effect}");
            }
        } else {
            install::begin(&pins, setup.policy.as_deref(), plane.clock())?;
        }
        let events = plane.take_events()?;
        let ring = watched(events.as_fd().try_clone_to_owned()?)?;
        let signals = Arc::new(Signals::default());
        let closes = Closes(signals.clone());
        let wakes = watched(plane.take_wakes()?)?;
        let quota = QuotaWatch::new(&plane, setup.quota)?;
        let adopted = plane.counters()?.live();
        let tally = Arc::new(UserCounters::open(&pins)?);
        let identity = Arc::new(Identity::new(&pins, &data_plane::meta(&pins)?));
        let metrics = match &opened.listener {
            Some(_) => {
                let names = setup.selection.texts();
                let metrics = Metrics::new(&plane, &pins, identity.clone(), &names)?;
                Some(Arc::new(metrics))
            }
            None => None,
        };
        let steppers = Steppers::start(
            pins.clone(),
            plane.clock(),
            plane.config().tick,
            signals.clone(),
            metrics.clone().map(|it| it as Arc<dyn Observer>),
        )?;

        // Before anything is attached: this fails if something that the reaper needs is missing.
        let (to_results, reaped) = mpsc::channel(RESULTS);
        let reaper = Reaper::start(&pins, tally.clone(), opened.reap, to_results)?;
        // If the kernel gives no notices, a CPU that comes online is used by the next run.
        let cpus = notices::CpuNotices::listen()
            .and_then(|cpus| Ok(watched(cpus)?))
            .ok();
        // Includes the zones of interfaces that do not exist yet. Under the lock, since a policy
        // that is loaded later enters zones, too.
        let zones: Vec<u16> = setup.zones.iter().map(|zone| zone.number).collect();
        if !zones.is_empty() {
            let _lock = pins.lock_policy()?;
            Zones::open(plane.open("ZONES")?)?.enter_all(&zones)?;
        }
        let notes = Notes::default();
        let common = Common {
            setup,
            group: opened.group,
            watch: Rc::new(RefCell::new(Watch::open(&plane)?)),
            said: Rc::default(),
            notes: notes.clone(),
        };
        let mut namespaces = Namespaces::new(common, instance, &mut plane)?;
        namespaces.attach_all(&mut plane)?;
        let changes = watched(namespaces.ready()?)?;
        plane.unpin_others(instance)?;
        life.running();
        instance.permit(opened.group)?;
        drop(opened.start);
        if plane.adopted() {
            say!("adopted {}", several(adopted, "flow"));
            notes.borrow_mut().push(RunEvent {
                flows: Some(adopted),
                ..RunEvent::new(Happened::Adopted)
            });
        }

        let history = opened.history.and_then(|directory| {
            let bytes = Some(setup.history_bytes);
            history::Writer::start(&directory, &pins, tally, bytes, plane.measure())
                .inspect_err(|error| say!("twheel: keeping no history: {error:#}"))
                .ok()
        });
        if let Some(metrics) = &metrics {
            metrics.watch(reaper.shared());
        }
        let offloads = setup.offload(opened.programs, &plane, &pins)?;
        if let Some((metrics, offloads)) = metrics.as_ref().zip(offloads.as_ref()) {
            metrics.watch_programs(offloads.tally());
        }
        // Started last, when all that it serves exists.
        let server = match opened.listener.zip(metrics.clone()) {
            Some((listener, metrics)) => {
                say!("metrics and page: http://{}/", listener.address());
                Some(Server::start(listener, metrics)?)
            }
            None => None,
        };
        let stations = Outside {
            offload: offloads.as_ref().map(Offloads::ends),
            ring: Batches::new(events, &pins, plane.clock())?,
            history,
            reaper: Some(reaper),
            metrics,
            names: Names::open(&maps::pinned(&pins))?,
            numbers: Numbers::open(&pins.map("NUMBER")?)?,
            nat: setup.nat.then(Nat::open).transpose()?,
            owners: setup.owner.then(Lookups::start).transpose()?,
            measure: plane.measure(),
        };
        let output: Box<dyn Output> = match setup.json {
            true => Box::new(Json::new(identity)),
            false => Box::<Text>::default(),
        };
        let printer = Printer {
            output,
            // As text, standard error says what the run tells of itself.
            kinds: setup
                .events
                .iter()
                .copied()
                .filter(|kind| setup.json || *kind != EventKind::Run)
                .collect(),
            notes,
        };
        let measure = plane.measure();
        Ok(Self {
            lost: (lost_of(&plane.counters()?), Instant::now()),
            report: Report::new(stations, printer, measure, *life, signals.clone()),
            _server: server,
            _offloads: offloads,
            changes,
            namespaces,
            cpus,
            reaped,
            results: Vec::new(),
            steppers,
            quota,
            wakes,
            signals,
            _closes: closes,
            ring,
            pins,
            logger,
            plane,
            setup,
        })
    }

    /// Runs until a signal or an error ends it.
    async fn watch(mut self, stop: &mut Stop) -> Result<()> {
        // Events that an earlier, killed process has left in the ring.
        self.signals.fill();
        let ending = self.until_told(stop).await?;
        self.end(ending).await
    }

    /// Handles all events until the run is to end.
    ///
    /// # Errors
    ///
    /// One that ends the run at once, without [`end`](Self::end).
    async fn until_told(&mut self, stop: &mut Stop) -> Result<Ending> {
        loop {
            self.look_for_losses()?;
            if let Err(error) = self.report.tell() {
                return Ok(Ending::Report(error));
            }
            if self.report.is_closed() {
                return Ok(Ending::Unread);
            }
            tokio::select! {
                () = self.signals.filled() => {
                    if let Err(error) = self.report.go_on() { return Ok(Ending::Report(error)) }
                }
                () = self.report.wait() => {
                    if let Err(error) = self.report.go_on() { return Ok(Ending::Report(error)) }
                }
                1.. = self.reaped.recv_many(&mut self.results, RESULTS) => {
                    let printed = self.report.reaped(&mut self.results);
                    if let Err(error) = printed { return Ok(Ending::Report(error)) }
                }
                // Events that the packet path wrote; no stepper signals them.
                ready = self.ring.readable() => {
                    ready?.clear_ready();
                    if let Err(error) = self.report.go_on() { return Ok(Ending::Report(error)) }
                }
                ready = self.wakes.readable_mut() => {
                    let mut ready = ready?;
                    while let Some(record) = ready.get_inner_mut().next() {
                        match <[u8; 8]>::try_from(&*record).map(u64::from_ne_bytes) {
                            Ok(CALL) => self.quota.look(),
                            Ok(cpu) => self.steppers.call(cpu as u32),
                            Err(_) => {}
                        }
                    }
                    ready.clear_ready();
                }
                ready = self.changes.readable() => {
                    ready?.clear_ready();
                    let attached = self.namespaces.follow(&mut self.plane)?;
                    if attached && self.setup.policy.is_some() {
                        // A policy's rules name interfaces, but are stored by interface number.
                        self.reload();
                    }
                }
                ready = async { match &self.cpus {
                    Some(cpus) => cpus.readable().await,
                    None => std::future::pending().await,
                } } => {
                    ready?.clear_ready();
                    let cpus = self.cpus.iter();
                    for (cpu, is_there) in cpus.flat_map(|cpus| cpus.get_ref().changes()) {
                        if is_there {
                            say!("CPU {cpu} came online");
                            self.steppers.come(cpu)?;
                        } else {
                            say!("CPU {cpu} went offline: its flows wait until it is back");
                        }
                    }
                }
                ready = async { match &mut self.logger {
                    Some(logger) => logger.readable_mut().await,
                    None => std::future::pending().await,
                } } => {
                    let mut ready = ready?;
                    ready.get_inner_mut().flush();
                    ready.clear_ready();
                }
                () = self.steppers.failed() => return Ok(Ending::StepperFailed),
                _ = stop.interrupt.recv() => return Ok(Ending::Signal),
                _ = stop.terminate.recv() => return Ok(Ending::Signal),
                _ = stop.hangup.recv() => {
                    let resumed = self.report.stations.resume();
                    if resumed {
                        self.report.note(RunEvent::new(Happened::Resumed));
                    }
                    if self.setup.policy.is_some() {
                        self.reload();
                    } else if stop.has_lost_terminal() {
                        return Ok(Ending::Signal);
                    } else if !resumed {
                        say!("SIGHUP: there is no --policy to read again; SIGINT or SIGTERM ends the run");
                    }
                }
            }
        }
    }

    /// Notes if events were lost since this looked last, a second ago at least.
    fn look_for_losses(&mut self) -> Result<()> {
        let (before, at) = self.lost;
        if at.elapsed() < LOSSES {
            return Ok(());
        }
        let lost = lost_of(&self.plane.counters()?);
        self.lost = (lost, Instant::now());
        if lost > before {
            self.report.note(RunEvent {
                lost: Some(lost),
                ..RunEvent::new(Happened::Lost)
            });
        }
        Ok(())
    }

    /// Puts the policy file into force, on another thread: it takes a while, and the steppers'
    /// calls must not wait.
    fn reload(&self) {
        let (pins, file, clock): (_, Option<PathBuf>, Clock) = (
            self.pins.clone(),
            self.setup.policy.clone(),
            self.plane.clock(),
        );
        tokio::task::spawn_blocking(move || {
            match install::load(&pins, file.as_deref(), clock, &progress::none()) {
                Ok(effect) => {
                    let file = file.unwrap_or_default();
                    say!("{}: in force; {effect}", file.display());
                }
                Err(error) => say!("twheel: {error:#}: the old policy stays in force"),
            }
        });
    }

    /// Stops the steppers and the reaper, handles what they still report, and prints the summary.
    async fn end(self, ending: Ending) -> Result<()> {
        let Self {
            mut report,
            steppers,
            signals,
            mut reaped,
            mut results,
            plane,
            pins,
            setup,
            ..
        } = self;
        // A stepper may be waiting for space in the ring, with flows that have ended. So the ring
        // is read until all steppers have stopped.
        let reports = setup.final_records.then(|| (pins, signals.clone()));
        let mut stopping = tokio::task::spawn_blocking(move || {
            let stopped = steppers.stop();
            stopped.and(reports.map_or(Ok(()), |(pins, signals)| {
                final_records::report_all(&pins, &signals)
            }))
        });
        let stopped = loop {
            tokio::select! {
                () = signals.filled() => { report.go_on()?; }
                () = report.wait() => { report.go_on()?; }
                stopped = &mut stopping => break stopped?,
            }
        };
        while report.go_on()? {
            tokio::select! {
                // After `go_on` has done something it signals itself. So this returns at once, even
                // if nothing is left to wait for.
                () = signals.filled() => {}
                () = report.wait() => {}
            }
        }
        // Likewise, outcomes are read until the reaper has stopped.
        let mut stopping = tokio::task::spawn_blocking(report.stations.take_reaper());
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
        let counters = plane.counters()?;
        report.tell_summary(&counters)?;
        let lost = report.stations.end_history();
        report.summary(&counters, shared.as_deref(), lost);
        ending.result().and(stopped)
    }
}

/// Registers a file descriptor with the runtime.
fn watched<T: AsRawFd>(descriptor: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: each type that is passed here (a ring, the logger's ring, an owned descriptor)
    // returns the same open descriptor for as long as it lives.
    unsafe { AsyncFd::register(descriptor) }.map_err(io::Error::from)
}

/// When dropped, tells the steppers that the reader has ended.
struct Closes(Arc<Signals>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}
