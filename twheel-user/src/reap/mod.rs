//! Ends what has expired: closes sockets, deletes conntrack entries, tells both ends, keeps out what comes later.
//!
//! On a thread of its own, behind a bounded queue: neither wheels nor output wait for it. What becomes of each action is
//! counted and reported. Before each one the flow is looked up again: if it is back, nothing is done to it.

mod action;
mod conntrack;
mod guard;
mod netlink;
mod reset;
mod scope;
mod sockets;

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::maps::{HashMap, Map, MapData};
use netlink_packet_netfilter::conntrack::Protocol;
use nix::net::if_::if_nametoindex;
use twheel_common::{
    config::Features,
    counter::Counter,
    enforce::Tomb,
    event::{Event, Reason, Record},
    flow::FlowKey,
    named,
    packet::{PROTO_TCP, PROTO_UDP},
    rule::Rule,
    state::{Seen, State, is_elsewhere},
    step::Enter,
};

pub use self::{
    action::{Action, Actions},
    netlink::Namespace,
};
use self::{
    conntrack::Conntrack,
    guard::{Guard, Pace},
    reset::{Reset, Resets},
    scope::Scope,
    sockets::{Found, Sockets},
};
use crate::{
    call::Callable,
    data_plane::{self, LoaderCounters},
    filter::{Filter, Subject},
    inspect::Reader,
    names::Names,
    output::Expired,
    pins::Pins,
    policy::install::{self, InForce},
};

/// Flows that wait for their actions, at most: 18 MiB.
const QUEUE: usize = 1 << 17;
/// How old the number of live flows may be that a share is taken of.
const FRESH: Duration = Duration::from_millis(100);

/// What the reaper may do.
pub struct Wanted {
    /// Flows to which nothing is done.
    pub protect: Vec<Filter>,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Actions a second, at most; `None`: no limit.
    pub rate: Option<u32>,
    /// Which part of the live flows, 0 to 1, may be reaped within a minute.
    pub max_share: f64,
    /// Where sockets and conntrack entries are.
    pub places: Places,
    /// Flows begin with a SYN or are none: it cannot be told whether one is back.
    pub strict: bool,
    /// The XDP program can be told to drop packets of an expired flow.
    pub holds: bool,
}

named! {
    /// What became of an action.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Outcome {
        /// done
        Done = "done",
        /// nothing to do
        Nothing = "nothing",
        /// failed
        Failed = "failed",
        /// not done: the flow came back
        Back = "back",
        /// not done: by the kernel's own clocks the connection was not idle for that long; its flow is tracked again
        Alive = "alive",
        /// not done: not both sides of the connection were seen, or nobody has acknowledged its FIN
        OneSided = "one_sided",
        /// not done: the flow is in a VLAN or zone, and what is here may be of another
        OtherZone = "other_zone",
        /// not done: packets that would have begun flows found no room, and this may be one that came back
        Unknown = "unknown",
        /// not done: the policy asks for it no more
        Revoked = "revoked",
        /// not done: the flow is protected
        Protected = "protected",
        /// not done: too large a share was to be reaped
        Paused = "paused",
        /// not done: the queue was full, or the run ended first
        Overrun = "overrun",
        /// would be done, but for --dry-run
        Would = "would",
    }
}

impl Outcome {
    /// Where this keeps the rest from being done: what was done stays done.
    fn or(self, why: Self) -> Self {
        match self {
            Self::Done => Self::Done,
            _ => why,
        }
    }
}

/// What became of an action, for whoever reports it.
#[derive(Clone, Debug)]
pub struct Reaped {
    /// The end of the flow.
    pub event: Event,
    /// What was to be done.
    pub action: Action,
    /// How that went.
    pub outcome: Outcome,
    /// Why it failed.
    pub error: Option<String>,
}

/// The actions of rules.
struct Asked(InForce);

impl Asked {
    fn of_rule(&self, rule: u32) -> Result<Actions> {
        Ok(Actions::from_bits(self.rule(rule)?.actions))
    }

    fn rule(&self, rule: u32) -> Result<Rule> {
        self.0.of(rule as u16)
    }

    /// Of these flows those that have expired, and for which anything is to be done.
    fn of(&self, batch: &[Record]) -> Result<Vec<(Event, Actions)>> {
        let mut known: BTreeMap<u32, Actions> = BTreeMap::new();
        let mut asked = Vec::new();
        for record in batch {
            let Record::Ended(event) = record else {
                continue;
            };
            // Those that were closed or reset have ended by themselves, and the rest was not idle for long enough.
            if event.reason != Reason::Idle as u32 {
                continue;
            }
            let actions = match known.get(&u32::from(event.rule)) {
                Some(actions) => *actions,
                None => {
                    let actions = self.of_rule(event.rule.into())?;
                    known.insert(event.rule.into(), actions);
                    actions
                }
            };
            if !actions.is_empty() {
                asked.push((*event, actions));
            }
        }
        Ok(asked)
    }
}

/// What is known of the reaper from outside.
#[derive(Default)]
pub struct Shared {
    counts: [[AtomicU64; Outcome::ALL.len()]; Action::ALL.len()],
    queued: AtomicUsize,
    paused: AtomicBool,
    resume: AtomicBool,
}

impl Shared {
    /// How often an action had this outcome.
    pub fn count(&self, action: Action, outcome: Outcome) -> u64 {
        self.counts[action.index()][outcome as usize].load(Ordering::Relaxed)
    }

    /// Whether nothing is reaped, because too large a share was to be.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    fn add(&self, action: Action, outcome: Outcome) {
        self.counts[action.index()][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// The thread that reaps.
pub struct Reaper {
    queue: Option<Sender<Vec<Job>>>,
    /// Never sent to: its end is what ends the thread.
    _stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    tally: Arc<LoaderCounters>,
    asked: Arc<Asked>,
    refusals: Mutex<Refusals>,
}

/// A flow that waits for its actions.
struct Job {
    event: Event,
    actions: Actions,
    /// [`refused`] before it expired.
    refused: u64,
}

fn counters(pins: &Pins) -> Result<Map> {
    pins.map("COUNTERS").map(Map::PerCpuArray)
}

/// Actions that were asked for, and of which nobody knows what became of them.
fn unsettled(tally: &LoaderCounters) -> Result<u64> {
    let known = tally.get(Counter::ReapSettled)? + tally.get(Counter::ReapLost)?;
    Ok(tally.get(Counter::ReapAsked)?.saturating_sub(known))
}

/// Actions that the policy in force asks for on these flows.
pub fn asked(pins: &Pins, batch: &[Record]) -> Result<u64> {
    let asked = Asked(InForce::open(&install::pinned(pins))?);
    Ok(number(&asked.of(batch)?))
}

/// How many actions that are.
fn number(flows: &[(Event, Actions)]) -> u64 {
    let actions = flows.iter().map(|(_, actions)| actions.iter().count());
    actions.sum::<usize>() as u64
}

/// Packets that may have been of flows that are back, and are not in the table for want of room.
fn refused(counters: &Map) -> Result<u64> {
    let counters = data_plane::counters(counters)?;
    let refusals = [Counter::TableFull, Counter::WindowFull, Counter::Raced];
    Ok(refusals
        .into_iter()
        .map(|counter| counters.get(counter))
        .sum())
}

/// How many there were by when.
struct Refusals {
    /// The program that tells the time.
    sweep: Callable,
    counters: Map,
    /// Low 32 bits of the clock and the number, oldest first.
    samples: VecDeque<(u32, u64)>,
}

impl Refusals {
    /// More than anything waits for.
    const SAMPLES: usize = 256;

    fn new(pins: &Pins) -> Result<Self> {
        let mut refusals = Self {
            sweep: pins.callable("twheel_sweep")?,
            counters: counters(pins)?,
            samples: VecDeque::new(),
        };
        refusals.sample()?;
        Ok(refusals)
    }

    fn sample(&mut self) -> Result<()> {
        let refused = refused(&self.counters)?;
        // The time after that: what has come in between counts as later.
        let now = self.sweep.now()?;
        if self
            .samples
            .back()
            .is_some_and(|(latest, _)| *latest == now)
        {
            return Ok(());
        }
        self.samples.push_back((now, refused));
        if self.samples.len() > Self::SAMPLES {
            self.samples.pop_front();
        }
        Ok(())
    }

    /// As of some moment before this one. Of what is older than all that is known nobody can tell: everything counts.
    fn before(&self, at: u64) -> u64 {
        let is_before = |(now, _): &&(u32, u64)| (at as u32).wrapping_sub(*now) as i32 > 0;
        let latest = self.samples.iter().rev().find(is_before);
        latest.map_or(0, |(_, refused)| *refused)
    }
}

impl Reaper {
    /// Starts it. `results` takes what becomes of each action; a reader that is slow holds up the reaper alone.
    pub fn start(
        pins: &Pins,
        tally: Arc<LoaderCounters>,
        wanted: Wanted,
        results: tokio::sync::mpsc::Sender<Reaped>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let lost = unsettled(&tally)?;
        if lost > 0 {
            say!(
                "twheel: up to {lost} actions on expired flows were not done: an earlier run was killed before"
            );
            tally.add(Counter::ReapLost, lost);
        }
        let open = install::pinned(pins);
        let asked = Arc::new(Asked(InForce::open(&open)?));
        let refusals = Refusals::new(pins)?;
        let (queue, jobs) = channel();
        let (stop, stopped) = channel();
        let mut worker = Worker {
            asked: asked.clone(),
            counters: counters(pins)?,
            reader: Reader::of(pins.clone())?,
            names: Names::open(&open)?,
            pins: pins.clone(),
            guard: Guard::new(wanted.max_share),
            pace: Pace::new(wanted.rate),
            expired: None,
            enter: pins.callable("twheel_enter")?,
            wanted,
            shared: shared.clone(),
            tally: tally.clone(),
            results,
            stopped,
            began: Instant::now(),
            left: (Duration::ZERO, None),
            scope: Scope::default(),
        };
        let thread = thread::Builder::new()
            .name("twheel-reaper".to_owned())
            .spawn(move || worker.run(&jobs))
            .context("cannot start the reaper's thread")?;
        Ok(Self {
            queue: Some(queue),
            _stop: Some(stop),
            thread: Some(thread),
            shared,
            tally,
            asked,
            refusals: Mutex::new(refusals),
        })
    }

    /// What is known of it.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Has it reap those of these flows for which anything is to be done, as far as its queue has room.
    pub fn reap(&self, batch: &[Record]) -> Result<()> {
        let mut flows = self.asked.of(batch)?;
        if flows.is_empty() {
            return Ok(());
        }
        // Before these flows leave the ring: what is asked and not settled when this process is killed is lost.
        self.tally.add(Counter::ReapAsked, number(&flows));
        let queued = self.shared.queued.load(Ordering::Relaxed);
        let room = QUEUE.saturating_sub(queued).min(flows.len());
        let over: Vec<_> = flows.drain(room..).collect();
        for action in over.iter().flat_map(|(_, actions)| actions.iter()) {
            self.shared.add(action, Outcome::Overrun);
        }
        if !over.is_empty() {
            self.tally.add(Counter::ReapSettled, number(&over));
        }
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let job = |(event, actions): (Event, Actions)| Job {
            refused: refusals.before(event.at),
            event,
            actions,
        };
        let jobs: Vec<_> = flows.into_iter().map(job).collect();
        refusals.sample()?;
        self.shared.queued.fetch_add(jobs.len(), Ordering::Relaxed);
        if let Some(queue) = &self.queue {
            // It is there until it is told to stop.
            let _ = queue.send(jobs);
        }
        Ok(())
    }

    /// Goes on after a pause.
    pub fn resume(&self) {
        self.shared.resume.store(true, Ordering::Relaxed);
        // The thread may have nothing to do for long: whoever asks is told now.
        self.shared.paused.store(false, Ordering::Relaxed);
    }

    /// Ends it: what waits is not done, and counted.
    pub fn stop(mut self) {
        (self._stop, self.queue) = (None, None);
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it came.
            let _ = thread.join();
        }
    }
}

/// Where sockets and entries are, and what was opened there.
#[derive(Default)]
struct Place {
    /// `None`: where this process is.
    namespace: Option<Namespace>,
    sockets: Option<Sockets>,
    conntrack: Option<Conntrack>,
    resets: Option<Resets>,
}

/// What conntrack calls the flow's protocol, if it has entries of that.
fn protocol(job: &Job) -> Option<Protocol> {
    match job.event.key.proto() {
        PROTO_TCP => Some(Protocol::Tcp),
        PROTO_UDP => Some(Protocol::Udp),
        _ => None,
    }
}

/// Opens something in a namespace, the first time.
fn opened<'a, T: Send>(
    namespace: Option<&Namespace>,
    place: &'a mut Option<T>,
    open: impl FnOnce() -> Result<T> + Send,
) -> Result<&'a mut T> {
    match place {
        Some(opened) => Ok(opened),
        None => {
            let tool = match namespace {
                Some(namespace) => namespace.inside(open)?,
                None => open()?,
            };
            Ok(place.insert(tool))
        }
    }
}

impl Place {
    /// Opens what an action needs here.
    fn prepare(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Socket => self.sockets().map(drop),
            Action::Conntrack => self.conntrack().map(drop),
            Action::Reset if self.namespace.is_none() => self.resets().map(drop),
            _ => Ok(()),
        }
    }

    fn sockets(&mut self) -> Result<&mut Sockets> {
        opened(self.namespace.as_ref(), &mut self.sockets, Sockets::open)
    }

    fn conntrack(&mut self) -> Result<&mut Conntrack> {
        opened(
            self.namespace.as_ref(),
            &mut self.conntrack,
            Conntrack::open,
        )
    }

    fn resets(&mut self) -> Result<&mut Resets> {
        opened(self.namespace.as_ref(), &mut self.resets, Resets::open)
    }
}

/// Where sockets and conntrack entries are: this network namespace first.
pub struct Places(Vec<Place>);

impl Places {
    /// This network namespace and these.
    ///
    /// What needs more than a run [keeps](crate::privilege) is opened now, as a policy may come to ask for it.
    ///
    /// # Errors
    ///
    /// What `first` needs cannot be opened: the actions that are known of now.
    pub fn open(namespaces: Vec<Namespace>, first: Actions) -> Result<Self> {
        let named = namespaces.into_iter().map(|namespace| Place {
            namespace: Some(namespace),
            ..Place::default()
        });
        let mut places: Vec<_> = std::iter::once(Place::default()).chain(named).collect();
        for place in &mut places {
            for action in [Action::Socket, Action::Conntrack, Action::Reset] {
                let opened = place.prepare(action);
                // If it is asked for later it is tried again, and the action fails with that error.
                if first.has(action) {
                    opened?;
                }
            }
        }
        Ok(Self(places))
    }
}

struct Worker {
    asked: Arc<Asked>,
    counters: Map,
    reader: Reader,
    names: Names,
    pins: Pins,
    guard: Guard,
    pace: Pace,
    expired: Option<HashMap<MapData, FlowKey, Tomb>>,
    /// The program that enters a flow again.
    enter: Callable,
    wanted: Wanted,
    shared: Arc<Shared>,
    tally: Arc<LoaderCounters>,
    results: tokio::sync::mpsc::Sender<Reaped>,
    stopped: Receiver<()>,
    began: Instant,
    /// When the live flows were counted, and how many are left of those.
    left: (Duration, Option<u64>),
    /// Of the flow at hand.
    scope: Scope,
}

/// What becomes of an action, before it is counted.
type Done = Result<Outcome>;

impl Worker {
    fn run(&mut self, batches: &Receiver<Vec<Job>>) {
        for jobs in batches {
            for job in jobs {
                self.shared.queued.fetch_sub(1, Ordering::Relaxed);
                self.reap(&job);
                let settled = job.actions.iter().count();
                self.tally.add(Counter::ReapSettled, settled as u64);
            }
        }
    }

    fn reap(&mut self, job: &Job) {
        let (event, actions) = (&job.event, job.actions);
        if self.shared.resume.swap(false, Ordering::Relaxed) {
            self.guard.reset();
            self.shared.paused.store(false, Ordering::Relaxed);
        }
        let all = |worker: &Self, outcome| {
            actions
                .iter()
                .for_each(|action| worker.report(event, action, outcome, None));
        };
        if self.is_over(Duration::ZERO) {
            return all(self, Outcome::Overrun);
        }
        match self.is_protected(event) {
            Ok(false) => {}
            Ok(true) => return all(self, Outcome::Protected),
            // What cannot be read may be protected.
            Err(_) => return all(self, Outcome::Protected),
        }
        // A connection that nobody answers is nobody's loss, and anybody can begin as many as he likes.
        let counts = event.seen().is_replied() || self.reader.is_one_way();
        if self.guard.is_tripped() || counts && !self.admit() {
            return all(self, Outcome::Paused);
        }
        let mut reset = false;
        for action in actions.iter() {
            let wait = self.pace.turn(self.began.elapsed());
            if self.is_over(wait) {
                self.report(event, action, Outcome::Overrun, None);
                continue;
            }
            let (outcome, error) = match self.act(job, action, reset) {
                Ok(outcome) => (outcome, None),
                Err(error) => (Outcome::Failed, Some(format!("{error:#}"))),
            };
            reset |= action == Action::Reset && outcome == Outcome::Done;
            self.report(event, action, outcome, error);
        }
    }

    /// Whether the run ends within this time; waits for it.
    fn is_over(&self, wait: Duration) -> bool {
        let waited = self.stopped.recv_timeout(wait);
        waited != Err(RecvTimeoutError::Timeout)
    }

    fn report(&self, event: &Event, action: Action, outcome: Outcome, error: Option<String>) {
        self.shared.add(action, outcome);
        // Without a reader the run is over.
        let _ = self.results.blocking_send(Reaped {
            event: *event,
            action,
            outcome,
            error,
        });
    }

    fn is_protected(&self, event: &Event) -> Result<bool> {
        if self.wanted.protect.is_empty() {
            return Ok(false);
        }
        let one_way = self.reader.is_one_way();
        let Some(ended) = Expired::new(event, self.reader.clock(), one_way) else {
            bail!("an event that cannot be read");
        };
        let known_as = self.names.known_as(&ended.flow)?;
        let subject = Subject::ended(&ended, known_as.named(), Duration::ZERO);
        Ok(self
            .wanted
            .protect
            .iter()
            .any(|filter| filter.matches(&subject)))
    }

    /// Whether the share that is reaped is still small enough.
    fn admit(&mut self) -> bool {
        let now = self.began.elapsed();
        let (counted, left) = self.left;
        let left = match left {
            // Less the one that was taken since.
            Some(left) if now < counted + FRESH => left.saturating_sub(1),
            _ => {
                // Without a count nothing is known to be left.
                let counters = data_plane::counters(&self.counters);
                let live = counters.map_or(0, |counters| counters.live());
                // Those that wait here were live a moment ago.
                let left = live + self.shared.queued.load(Ordering::Relaxed) as u64;
                self.left.0 = now;
                left
            }
        };
        self.left.1 = Some(left);
        let admitted = self.guard.admit(now, left);
        if self.guard.is_tripped() && !self.shared.paused.swap(true, Ordering::Relaxed) {
            say!(
                "twheel: nothing is reaped any more: more than {:.0} % of the live flows were to be within a minute. \
                 If that is meant, give a larger --reap-max-share; SIGHUP goes on",
                100.0 * self.wanted.max_share
            );
        }
        admitted
    }

    /// Why nothing may be done any more, if so.
    fn look(&self, job: &Job) -> Result<Option<Outcome>> {
        // The counters first: the look at the table is the last.
        let refused = refused(&self.counters)?;
        let hash = &self.reader.meta().hash;
        let found = self.reader.table().find(hash, &job.event.key);
        if found
            .context("cannot tell whether the flow is back")?
            .is_some()
        {
            return Ok(Some(Outcome::Back));
        }
        Ok((refused != job.refused).then_some(Outcome::Unknown))
    }

    /// Does an action. `reset`: both ends were told before, so nothing is younger than that.
    fn act(&mut self, job: &Job, action: Action, reset: bool) -> Done {
        let event = &job.event;
        if self.wanted.strict {
            bail!("with --pickup strict it cannot be told whether the flow is back");
        }
        if !self.asked.of_rule(event.rule.into())?.has(action) {
            return Ok(Outcome::Revoked);
        }
        if let Some(why) = self.look(job)? {
            return Ok(why);
        }
        // What is here is another network namespace's.
        if self.is_elsewhere(event)? {
            return Ok(Outcome::OtherZone);
        }
        self.scope = self.scope_of(event)?;
        let seen = event.seen();
        let initiator = seen.initiator();
        let src = event.key.sender(initiator);
        let dst = event.key.sender(initiator.reverse());
        let is_tcp = event.key.proto() == PROTO_TCP;
        match action {
            Action::Socket | Action::Reset if !is_tcp => return Ok(Outcome::Nothing),
            // This host sends by its routes, which may be another zone's.
            Action::Reset if self.scope.is_apart() => return Ok(Outcome::OtherZone),
            // Forged packets of one side are no conversation.
            Action::Reset | Action::EnforceDrop | Action::EnforceReset
                if !seen.is_conversation() || seen.state() == State::FinWait =>
            {
                return Ok(Outcome::OneSided);
            }
            // Nor is what packets say of a connection that an end of it is here, or conntrack knows.
            Action::Reset | Action::EnforceDrop | Action::EnforceReset
                if self.lives(job, src, dst)? =>
            {
                return Ok(Outcome::Alive);
            }
            _ if self.wanted.dry_run => return Ok(Outcome::Would),
            _ => {}
        }
        match action {
            Action::Socket => self.close(job, src, dst, reset),
            Action::Conntrack => self.forget(job, src, dst, reset),
            Action::Reset => self.reset(event, src, dst),
            Action::EnforceDrop | Action::EnforceReset => self.enforce(job, action),
        }
    }

    /// Whether a socket of either end is here, or an entry is to be deleted, that is not idle by the kernel's own clocks.
    fn lives(&mut self, job: &Job, src: SocketAddr, dst: SocketAddr) -> Result<bool> {
        let initiator = job.event.seen().initiator();
        let has_entry = self
            .asked
            .of_rule(job.event.rule.into())?
            .has(Action::Conntrack);
        for at in 0..self.wanted.places.0.len() {
            for (local, peer, direction) in [(dst, src, initiator.reverse()), (src, dst, initiator)]
            {
                let found = self.find(at, local, peer)?;
                if let Some(socket) = found
                    && let Some(seen) = socket.seen(direction, initiator)
                    && let Some(idle) = self.idle(job, &socket)
                    && self.is_alive(job, seen, idle)?
                {
                    return Ok(true);
                }
                if has_entry
                    && self
                        .entry_lives(job, at, local, peer)?
                        .is_some_and(|lives| lives)
                {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether a flow's packets are counted in another network namespace.
    fn is_elsewhere(&self, event: &Event) -> Result<bool> {
        let interface = self.names.interface(event.point.place())?;
        Ok(is_elsewhere(interface))
    }

    /// Where what is a flow's is looked for.
    fn scope_of(&self, event: &Event) -> Result<Scope> {
        if event.key.zone() == 0 && event.key.packed_vlans() == 0 {
            return Ok(Scope::default());
        }
        let zone = self.names.zone(event.key.zone())?;
        let interface = match event.point.place() {
            0 => {
                let only = self.pins.interfaces()?.into_iter().next();
                only.and_then(|name| if_nametoindex(name.as_str()).ok())
            }
            place => {
                let interface = self.names.interface(place)?;
                (interface != 0).then_some(interface)
            }
        };
        Scope::of(event, zone, interface)
    }

    /// The socket of a flow with these ends, in a network namespace.
    fn find(&mut self, at: usize, local: SocketAddr, peer: SocketAddr) -> Result<Option<Found>> {
        // Interfaces are those of this namespace.
        if at > 0 && self.scope.is_apart() {
            return Ok(None);
        }
        for bound in self.scope.bound(local.ip())? {
            let found = self.wanted.places.0[at].sockets()?.find(local, peer, bound);
            let found = found.context("cannot look for the socket")?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Whether conntrack's entry of these ends is not idle; `None` if there is none.
    fn entry_lives(
        &mut self,
        job: &Job,
        at: usize,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Result<Option<bool>> {
        let Some(proto) = protocol(job) else {
            return Ok(None);
        };
        let conntrack = self.wanted.places.0[at].conntrack()?;
        let found = conntrack.find(proto, src, dst, self.scope.zone);
        let Some(entry) = found.context("cannot look for the conntrack entry")? else {
            return Ok(None);
        };
        let idle = conntrack.idle(&entry)?;
        let seen = match entry.state {
            Some(state) => Seen::of_socket(state, job.event.seen().initiator(), &[]),
            None => job.event.seen(),
        };
        self.is_alive(job, seen, idle).map(Some)
    }

    /// Closes the sockets of either end that are local, and by the kernel's own clocks idle for the timeout of the state
    /// that they are in: packets can be forged, and what only this host sends may not be seen.
    fn close(&mut self, job: &Job, src: SocketAddr, dst: SocketAddr, reset: bool) -> Done {
        let mut outcome = Outcome::Nothing;
        let initiator = job.event.seen().initiator();
        for at in 0..self.wanted.places.0.len() {
            for (local, peer, direction) in [(dst, src, initiator.reverse()), (src, dst, initiator)]
            {
                let Some(socket) = self.find(at, local, peer)? else {
                    continue;
                };
                if !reset
                    && let Some(seen) = socket.seen(direction, initiator)
                    && let Some(idle) = self.idle(job, &socket)
                    && self.is_alive(job, seen, idle)?
                {
                    return Ok(outcome.or(Outcome::Alive));
                }
                // It has just begun to open, and the flow is of packets before that.
                let opens = [State::SynSent, State::SynSent2, State::SynRecv];
                if socket.is_opening() && !opens.contains(&job.event.seen().state()) {
                    return Ok(outcome.or(Outcome::OneSided));
                }
                // What would come between the look and the end of the socket is dropped meanwhile, as if it came later.
                let held = self.hold(job)?;
                let closed = match self.look(job) {
                    Ok(None) => self.wanted.places.0[at].sockets().and_then(|sockets| {
                        let closed = sockets.close(socket).context("cannot close the socket")?;
                        Ok(if closed {
                            Outcome::Done
                        } else {
                            Outcome::Nothing
                        })
                    }),
                    Ok(Some(why)) => Ok(why),
                    Err(error) => Err(error),
                };
                if held {
                    self.release(job);
                }
                match closed? {
                    Outcome::Done => outcome = Outcome::Done,
                    Outcome::Nothing => {}
                    why => return Ok(outcome.or(why)),
                }
            }
        }
        Ok(outcome)
    }

    /// For how long neither the socket nor its flow has had a packet: a keepalive probe moves none of the socket's clocks.
    fn idle(&self, job: &Job, socket: &Found) -> Option<Duration> {
        let flow = self.reader.clock().duration(job.event.idle.into());
        socket.idle.map(|idle| idle.min(flow))
    }

    /// Whether a connection that is in this state and has been idle for so long is still within its timeout. Then its flow
    /// is entered again.
    fn is_alive(&mut self, job: &Job, seen: Seen, idle: Duration) -> Result<bool> {
        let rule = job.event.rule;
        let clock = self.reader.clock();
        let timeout = clock.duration(self.asked.rule(rule.into())?.timeouts.of(seen).into());
        // Each clock has its own beginning of a unit, and a timeout is a unit longer than asked for.
        if idle + 2 * clock.unit() >= timeout {
            return Ok(false);
        }
        let key = job.event.key;
        self.enter.enter(Enter {
            addresses: key.addresses(),
            ports: key.ports(),
            seen: seen.0,
            rule: rule.into(),
            idle: clock.units_floor(idle),
            zero: 0,
        })?;
        Ok(true)
    }

    /// Deletes the conntrack entries that know the flow by either tuple, and were idle for the flow's timeout by what is
    /// left of their own.
    fn forget(&mut self, job: &Job, src: SocketAddr, dst: SocketAddr, reset: bool) -> Done {
        let mut outcome = Outcome::Nothing;
        for at in 0..self.wanted.places.0.len() {
            for (src, dst) in [(src, dst), (dst, src)] {
                let Some(proto) = protocol(job) else {
                    return Ok(Outcome::Nothing);
                };
                if let Some(why) = self.look(job)? {
                    return Ok(outcome.or(why));
                }
                if !reset && self.entry_lives(job, at, src, dst)? == Some(true) {
                    return Ok(outcome.or(Outcome::Alive));
                }
                let conntrack = self.wanted.places.0[at].conntrack()?;
                if conntrack
                    .delete(proto, src, dst, self.scope.zone)
                    .context("cannot delete the conntrack entry")?
                {
                    outcome = Outcome::Done;
                }
            }
        }
        Ok(outcome)
    }

    /// The map of flows whose packets are refused.
    fn expired(&mut self) -> Result<&mut HashMap<MapData, FlowKey, Tomb>> {
        if self.expired.is_none() {
            let map = Map::LruHashMap(self.pins.map("EXPIRED")?);
            self.expired = Some(HashMap::try_from(map)?);
        }
        self.expired.as_mut().context("no map EXPIRED")
    }

    /// Has packets of the flow dropped for a moment, if the program can and they are not anyway. Returns whether that
    /// must be taken back.
    fn hold(&mut self, job: &Job) -> Result<bool> {
        if !self.wanted.holds || job.actions.iter().any(Action::enforces) {
            return Ok(false);
        }
        let tomb = Tomb::new(Tomb::DROP);
        self.expired()?
            .insert(job.event.key, tomb, 0)
            .context("cannot write EXPIRED")?;
        Ok(true)
    }

    fn release(&mut self, job: &Job) {
        if let Ok(expired) = self.expired() {
            // A SYN may have taken it away.
            let _ = expired.remove(&job.event.key);
        }
    }

    /// Has the XDP program refuse what comes later.
    fn enforce(&mut self, job: &Job, action: Action) -> Done {
        if !self.reader.meta().features.has(Features::ENFORCE) {
            bail!(
                "this run drops no packets: start with --reap enforce --i-know-this-drops-traffic"
            );
        }
        let verdict = match action {
            Action::EnforceReset => Tomb::RESET,
            _ => Tomb::DROP,
        };
        self.expired()?
            .insert(job.event.key, Tomb::new(verdict), 0)
            .context("cannot write EXPIRED")?;
        // A packet that came in between has begun the flow again, which is found before its tomb is: it lives.
        let why = self.look(job);
        if !matches!(why, Ok(None)) {
            self.release(job);
        }
        Ok(why?.unwrap_or(Outcome::Done))
    }

    /// Sends a RST to each end of which it is known what it expects.
    fn reset(&mut self, event: &Event, src: SocketAddr, dst: SocketAddr) -> Done {
        let seen = event.seen();
        let initiator = seen.initiator();
        let [of_src, of_dst] =
            [initiator, initiator.reverse()].map(|direction| event.positions[direction as usize]);
        let reset = |from, to, seq, ack| Reset { from, to, seq, ack };
        let resets = [
            reset(dst, src, of_dst, of_src),
            reset(src, dst, of_src, of_dst),
        ];
        let sockets = self.wanted.places.0[0].resets()?;
        // Both are tried, whatever becomes of the first.
        let sent: Vec<io::Result<()>> = resets.iter().map(|reset| sockets.send(reset)).collect();
        for (reset, sent) in resets.iter().zip(sent) {
            sent.with_context(|| format!("cannot send a RST to {}", reset.to))?;
        }
        Ok(Outcome::Done)
    }
}
