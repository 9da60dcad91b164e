//! The thread that reaps: it checks whether an action is still right for a flow, and takes it.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::maps::{HashMap, Map, MapData};
use netlink_packet_netfilter::conntrack;
use twheel_common::{
    config::Features,
    counter::Counter,
    enforce::Tombstone,
    event::Event,
    flow::FlowKey,
    packet::PROTO_TCP,
    state::{Seen, State},
    step::Enter,
};

use super::{
    asked::ActionsInForce,
    guard::{Guard, Pace},
    mandate::{Mandate, ReaperState},
    namesakes::Namesakes,
    refusals::refused,
    reset::Reset,
    scope::Scope,
    search::Limit,
};
use crate::{
    action::{Action, Actions, News, Outcome, Reaped},
    call::Callable,
    data_plane::{self, UserCounters},
    filter::Subject,
    inspect::Reader,
    model::Ended,
    names::Names,
    owner::Cgroups,
    pins::Pins,
    sockets::{FoundSocket, Protocol},
};

/// How old the count of live flows may be from which the share is computed.
const FRESH: Duration = Duration::from_millis(100);

/// A flow in the queue, with its actions.
pub(super) struct Job {
    pub(super) event: Event,
    pub(super) actions: Actions,
    /// The value of [`refused`] before the flow expired.
    pub(super) refused: u64,
}

/// conntrack's name of the flow's protocol, if conntrack has entries of that protocol.
fn protocol(job: &Job) -> Option<conntrack::Protocol> {
    crate::conntrack::protocol(job.event.key.proto())
}

/// The thread that reaps.
pub(super) struct Worker {
    pub(super) asked: Arc<ActionsInForce>,
    pub(super) counters: Map,
    pub(super) reader: Reader,
    pub(super) names: Names,
    pub(super) pins: Pins,
    pub(super) guard: Guard,
    pub(super) pace: Pace,
    pub(super) expired: Option<HashMap<MapData, FlowKey, Tombstone>>,
    /// The program that enters a flow into the table again.
    pub(super) enter: Callable,
    pub(super) mandate: Mandate,
    pub(super) shared: Arc<ReaperState>,
    pub(super) tally: Arc<UserCounters>,
    pub(super) results: tokio::sync::mpsc::Sender<News>,
    pub(super) stopped: Receiver<()>,
    pub(super) began: Instant,
    /// When the live flows were counted, and how many of them are left.
    pub(super) left: (Duration, Option<u64>),
    /// The scope of the present flow.
    pub(super) scope: Scope,
    pub(super) namesakes: Namesakes,
    /// The cgroups that the actions on the present flow are limited to; `None`: none, or not known
    /// yet.
    pub(super) limit: Option<Limit>,
    /// The cgroups of this host, once they were asked for.
    pub(super) cgroups: Option<Cgroups>,
}

/// The outcome of an action, before it is counted.
type Done = Result<Outcome>;

impl Worker {
    pub(super) fn run(&mut self, batches: &Receiver<Vec<Job>>) {
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
            // If the flow cannot be read, it may be protected.
            Err(_) => return all(self, Outcome::Protected),
        }
        // A connection without a reply does not count towards the share. Reaping it harms nobody,
        // and anybody can begin any number of such connections.
        let counts = event.seen().is_replied() || self.reader.is_one_way();
        if self.guard.is_tripped() || counts && !self.admit() {
            return all(self, Outcome::Paused);
        }
        let mut done = Actions::default();
        self.limit = None;
        for action in actions.iter() {
            let wait = self.pace.turn(self.began.elapsed());
            if self.is_over(wait) {
                self.report(event, action, Outcome::Overrun, None);
                continue;
            }
            let (outcome, error) = match self.act(job, action, done) {
                Ok(outcome) => (outcome, None),
                Err(error) => (Outcome::Failed, Some(format!("{error:#}"))),
            };
            if outcome == Outcome::Done {
                done = done.with(action);
            }
            self.report(event, action, outcome, error);
        }
    }

    /// Waits for this time. Returns whether the run ended meanwhile.
    fn is_over(&self, wait: Duration) -> bool {
        let waited = self.stopped.recv_timeout(wait);
        waited != Err(RecvTimeoutError::Timeout)
    }

    fn report(&self, event: &Event, action: Action, outcome: Outcome, error: Option<String>) {
        self.shared.add(action, outcome);
        // This fails only if the reader has ended, and then the run is over.
        let _ = self.results.blocking_send(News::Reaped(Box::new(Reaped {
            event: *event,
            action,
            outcome,
            error,
        })));
    }

    fn is_protected(&self, event: &Event) -> Result<bool> {
        if self.mandate.protect.is_empty() {
            return Ok(false);
        }
        let one_way = self.reader.is_one_way();
        let Some(ended) = Ended::new(event, self.reader.clock(), one_way) else {
            bail!("invalid event");
        };
        let known_as = self.names.known_as(&ended.flow)?;
        let subject = Subject::ended(&ended, known_as.named(), Duration::ZERO);
        Ok(self
            .mandate
            .protect
            .iter()
            .any(|filter| filter.matches(&subject)))
    }

    /// Whether one more flow may be reaped without exceeding the share.
    fn admit(&mut self) -> bool {
        let now = self.began.elapsed();
        let (counted, left) = self.left;
        let left = match left {
            // One flow less, the one that was reaped since.
            Some(left) if now < counted + FRESH => left.saturating_sub(1),
            _ => {
                // If the counters cannot be read, no flow is assumed to be left.
                let counters = data_plane::counters(&self.counters);
                let live = counters.map_or(0, |counters| counters.live());
                // Flows in the queue were live a moment ago.
                let left = live + self.shared.queued.load(Ordering::Relaxed) as u64;
                self.left.0 = now;
                left
            }
        };
        self.left.1 = Some(left);
        let admitted = self.guard.admit(now, left);
        if self.guard.is_tripped() && !self.shared.paused.swap(true, Ordering::Relaxed) {
            say!(
                "twheel: reaping paused: more than {:.0} % of the live flows would have been \
                 reaped within a minute. Send SIGHUP to resume; to allow more, raise \
                 --reap-max-share",
                100.0 * self.mandate.max_share
            );
            let _ = self.results.blocking_send(News::Paused);
        }
        admitted
    }

    /// The reason why nothing may be done to the flow any more; `None`: something may.
    fn look(&self, job: &Job) -> Result<Option<Outcome>> {
        // The counters are read first, so that the lookup in the table is the last check.
        let refused = refused(&self.counters)?;
        let hash = &self.reader.meta().hash;
        let found = self.reader.table().find(hash, &job.event.key);
        if found
            .context("cannot find out whether the flow is active again")?
            .is_some()
        {
            return Ok(Some(Outcome::Back));
        }
        Ok((refused != job.refused).then_some(Outcome::Unknown))
    }

    /// Takes an action. `done`: the actions on this flow that were done before. If both ends were
    /// reset, the kernel's clocks are not checked again.
    fn act(&mut self, job: &Job, action: Action, done: Actions) -> Done {
        let event = &job.event;
        if self.mandate.strict {
            bail!("with --pickup strict, twheel cannot see whether the flow is active again");
        }
        if !self.asked.of_rule(event.rule.into())?.has(action) {
            return Ok(Outcome::Revoked);
        }
        if let Some(why) = self.look(job)? {
            return Ok(why);
        }
        // The flow's sockets and entries are in another network namespace.
        if self.is_elsewhere(event)? {
            return Ok(Outcome::OtherZone);
        }
        self.scope = self.scope_of(event)?;
        if !self.is_in_cgroup(job)? {
            return Ok(Outcome::OtherCgroup);
        }
        let seen = event.seen();
        let initiator = seen.initiator();
        let src = event.key.sender(initiator);
        let dst = event.key.sender(initiator.reverse());
        let is_tcp = event.key.proto() == PROTO_TCP;
        match action {
            Action::Socket | Action::Reset if !is_tcp => return Ok(Outcome::Nothing),
            // This host sends by its own routes, which may lead into another zone.
            Action::Reset if self.scope.is_apart() || self.has_namesake(event)? => {
                return Ok(Outcome::OtherZone);
            }
            // Forged packets of one side make no conversation.
            Action::Reset | Action::EnforceDrop | Action::EnforceReset
                if !seen.is_conversation() || seen.state() == State::FinWait =>
            {
                return Ok(Outcome::OneSided);
            }
            // Nor do packets alone prove that the connection has ended, if one end of it is a local
            // socket or conntrack knows it.
            Action::Reset | Action::EnforceDrop | Action::EnforceReset
                if self.lives(job, src, dst)? =>
            {
                return Ok(Outcome::Alive);
            }
            _ if self.mandate.dry_run => return Ok(Outcome::Would),
            _ => {}
        }
        match action {
            Action::Socket => self.close(job, src, dst, done),
            Action::Conntrack => self.delete_entries(job, src, dst, done),
            Action::Reset => self.reset(event, src, dst),
            Action::EnforceDrop | Action::EnforceReset => self.enforce(job, action),
        }
    }

    /// Whether a local socket of either end is not idle by the kernel's own clocks; likewise a
    /// conntrack entry, if one is to be deleted.
    fn lives(&mut self, job: &Job, src: SocketAddr, dst: SocketAddr) -> Result<bool> {
        let initiator = job.event.seen().initiator();
        let has_entry = self
            .asked
            .of_rule(job.event.rule.into())?
            .has(Action::Conntrack);
        for at in 0..self.mandate.sites.0.len() {
            for (local, peer, direction) in [(dst, src, initiator.reverse()), (src, dst, initiator)]
            {
                let found = self.find(at, Protocol::Tcp, (local, peer))?;
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

    /// Whether conntrack's entry for these endpoints is not idle; `None` if there is no entry.
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
        let conntrack = self.mandate.sites.0[at].conntrack()?;
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

    /// Closes the local sockets of either end if they were idle, by the kernel's own clocks, for
    /// the timeout of their state. The flow's packets alone do not decide: they can be forged, and
    /// packets that only this host sends may not be seen.
    fn close(&mut self, job: &Job, src: SocketAddr, dst: SocketAddr, done: Actions) -> Done {
        let mut outcome = Outcome::Nothing;
        let initiator = job.event.seen().initiator();
        for at in 0..self.mandate.sites.0.len() {
            for (local, peer, direction) in [(dst, src, initiator.reverse()), (src, dst, initiator)]
            {
                let Some(socket) = self.find(at, Protocol::Tcp, (local, peer))? else {
                    continue;
                };
                if !self.may_close(&socket)? {
                    continue;
                }
                if self.is_of_others(&job.event, at, local.ip())? {
                    return Ok(outcome.or(Outcome::OtherZone));
                }
                if !done.has(Action::Reset)
                    && let Some(seen) = socket.seen(direction, initiator)
                    && let Some(idle) = self.idle(job, &socket)
                    && self.is_alive(job, seen, idle)?
                {
                    return Ok(outcome.or(Outcome::Alive));
                }
                // The socket has just begun to connect, and the flow consists of earlier packets.
                let opens = [State::SynSent, State::SynSent2, State::SynRecv];
                if socket.is_opening() && !opens.contains(&job.event.seen().state()) {
                    return Ok(outcome.or(Outcome::OneSided));
                }
                // Packets between the check and the end of the socket are dropped, as if they came
                // later.
                let held = self.hold(job, done)?;
                let closed = match self.look(job) {
                    Ok(None) => self.mandate.sites.0[at].sockets().and_then(|sockets| {
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

    /// For how long both the socket and its flow were idle. Both count, since a keepalive probe
    /// changes none of the socket's clocks.
    fn idle(&self, job: &Job, socket: &FoundSocket) -> Option<Duration> {
        let flow = self.reader.clock().duration(job.event.idle.into());
        socket.idle.map(|idle| idle.min(flow))
    }

    /// Whether a connection in this state that was idle for this time is still within its timeout.
    /// If so, enters its flow into the table again.
    fn is_alive(&mut self, job: &Job, seen: Seen, idle: Duration) -> Result<bool> {
        let rule = job.event.rule;
        let clock = self.reader.clock();
        let timeout = clock.duration(self.asked.rule(rule.into())?.timeouts.timeout(seen).into());
        // Two units of tolerance: units of the two clocks begin at different times, and a stored
        // timeout is one unit longer than configured.
        if idle + 2 * clock.unit() >= timeout {
            return Ok(false);
        }
        let key = job.event.key;
        self.enter.enter(Enter {
            addresses: key.addresses(),
            ports: key.ports(),
            seen: seen.0,
            rule: self.asked.number(rule)?.into(),
            idle: clock.units_floor(idle),
            origin: Enter::packed_origin(job.event.point, job.event.birth.is_outgoing()),
        })?;
        Ok(true)
    }

    /// Deletes the conntrack entries that have the flow as either tuple, if they were idle for the
    /// flow's timeout by what is left of their own timeout.
    fn delete_entries(
        &mut self,
        job: &Job,
        src: SocketAddr,
        dst: SocketAddr,
        done: Actions,
    ) -> Done {
        let mut outcome = Outcome::Nothing;
        for at in 0..self.mandate.sites.0.len() {
            for (src, dst) in [(src, dst), (dst, src)] {
                let Some(proto) = protocol(job) else {
                    return Ok(Outcome::Nothing);
                };
                if let Some(why) = self.look(job)? {
                    return Ok(outcome.or(why));
                }
                if !done.has(Action::Reset) && self.entry_lives(job, at, src, dst)? == Some(true) {
                    return Ok(outcome.or(Outcome::Alive));
                }
                let conntrack = self.mandate.sites.0[at].conntrack()?;
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

    /// The map of tombstones.
    fn expired(&mut self) -> Result<&mut HashMap<MapData, FlowKey, Tombstone>> {
        if self.expired.is_none() {
            let map = Map::LruHashMap(self.pins.map("TOMBSTONES")?);
            self.expired = Some(HashMap::try_from(map)?);
        }
        self.expired.as_mut().context("there is no map TOMBSTONES")
    }

    /// Has the flow's packets dropped for a moment, if the XDP program can do that and does not do
    /// so already. Returns whether [`release`](Self::release) must undo it.
    fn hold(&mut self, job: &Job, done: Actions) -> Result<bool> {
        if !self.mandate.holds || done.iter().any(Action::enforces) {
            return Ok(false);
        }
        let tomb = Tombstone::new(Tombstone::DROP);
        self.expired()?
            .insert(job.event.key, tomb, 0)
            .context("cannot write TOMBSTONES")?;
        Ok(true)
    }

    fn release(&mut self, job: &Job) {
        if let Ok(expired) = self.expired() {
            // A SYN may have removed it already.
            let _ = expired.remove(&job.event.key);
        }
    }

    /// Has the XDP program refuse the flow's later packets.
    fn enforce(&mut self, job: &Job, action: Action) -> Done {
        if !self.reader.meta().features.has(Features::ENFORCE) {
            bail!(
                "this run cannot drop packets: start twheel with --reap enforce \
                 --i-know-this-drops-traffic"
            );
        }
        let verdict = match action {
            Action::EnforceReset => Tombstone::RESET,
            _ => Tombstone::DROP,
        };
        self.expired()?
            .insert(job.event.key, Tombstone::new(verdict), 0)
            .context("cannot write TOMBSTONES")?;
        // A packet in between may have begun the flow again. The program finds the flow before its
        // tombstone, so the flow lives: remove the tombstone.
        let why = self.look(job);
        if !matches!(why, Ok(None)) {
            self.release(job);
        }
        Ok(why?.unwrap_or(Outcome::Done))
    }

    /// Sends a RST to each end whose expected sequence number is known.
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
        let sockets = self.mandate.sites.0[0].resets()?;
        // Both are sent, even if the first fails.
        let sent: Vec<io::Result<()>> = resets.iter().map(|reset| sockets.send(reset)).collect();
        for (reset, sent) in resets.iter().zip(sent) {
            sent.with_context(|| format!("cannot send a RST to {}", reset.to))?;
        }
        Ok(Outcome::Done)
    }
}
