//! The timers of a program: where each is kept, and what becomes of it. Without any input or output
//! but for the questions to sockets; `worker` does the rest.

use std::{
    collections::{HashMap, VecDeque},
    task::Waker,
    time::{Duration, Instant},
};

use twheel_timers::{Intrusive, Node};

use crate::{
    leaving::Leaving,
    offload::{Ended, Options},
    protocol::{Event, Op, Outcome, Reply, Request, SOCKETS, TAGGED},
    slot::{Asked, Done, Phase, Slot, Tag, Waiting},
    socket::{JIFFY, LAG, Socket},
};

/// Most packets that wait for their answers, …
const UNANSWERED: usize = 2;
/// … and most requests in one. A request says how long it waited here. It cannot say how long it
/// will wait at twheel's.
const MOST: usize = 256;

/// All timers of a program.
pub struct State {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests that wait to be sent; `None`: no twheel is there.
    waiting: Option<VecDeque<Waiting>>,
    /// What was asked for, by the number of its packet.
    asked: HashMap<u64, Vec<Asked>>,
    leaving: Leaving,
    /// Number of the next packet.
    next: u64,
    /// The table of the twheel that was there last.
    table: Option<u64>,
    /// Timers that are kept here, in milliseconds since `epoch`.
    wheel: Intrusive,
    nodes: Vec<Node>,
    epoch: Instant,
    /// Ends that were queued, oldest first.
    pub done: VecDeque<Done>,
    /// The last handle was dropped.
    pub ends: bool,
}

impl State {
    /// Without timers.
    pub fn new(now: Instant) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            waiting: None,
            asked: HashMap::new(),
            leaving: Leaving::default(),
            next: 1,
            table: None,
            wheel: Intrusive::new(3, 1024).expect("a shape that is allowed"),
            nodes: Vec::new(),
            epoch: now,
            done: VecDeque::new(),
            ends: false,
        }
    }

    /// Starts a timer. `queued`: what its end is queued with; `None`: it is waited for.
    pub fn start(
        &mut self,
        socket: Socket,
        options: Options,
        queued: Option<u64>,
        now: Instant,
    ) -> Tag {
        let place = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::new());
            self.slots.push(Slot::free(options, now));
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[place as usize];
        slot.socket = Some(socket);
        slot.options = options;
        slot.since = now;
        (slot.restarts, slot.confirmed) = (0, 0);
        slot.queued = queued;
        slot.restarting = false;
        slot.phase = Phase::Starting;
        let tag = u64::from(place) | u64::from(slot.turn) << 32;
        if self.waiting.is_none() {
            self.keep_here(place, now);
            return tag;
        }
        if !self.leaving.waits(socket.cookie(), tag) {
            self.ask(Op::Start, tag);
        }
        // Until twheel has answered.
        self.arm(place, now, Duration::ZERO);
        tag
    }

    /// Starts a timer again. Whether it has not ended.
    pub fn restart(&mut self, tag: Tag, timeout: Option<Duration>, now: Instant) -> bool {
        let Some(place) = self.place(tag) else {
            return false;
        };
        let slot = &mut self.slots[place as usize];
        slot.since = now;
        slot.restarts = slot.restarts.wrapping_add(1);
        slot.options.timeout = timeout.unwrap_or(slot.options.timeout);
        match slot.phase {
            Phase::Free | Phase::Over(_) => return false,
            // A start that still waits asks for this; one that was sent is followed by a restart.
            Phase::Here | Phase::Starting => self.arm(place, now, Duration::ZERO),
            Phase::Offloaded { .. } if slot.asked || self.waiting.is_none() => {
                self.arm(place, now, Duration::ZERO);
            }
            Phase::Offloaded { .. } => self.ask(Op::Restart, tag),
        }
        true
    }

    /// Ends a timer; its tag is not used any more. Whether it was one.
    pub fn stop(&mut self, tag: Tag) -> bool {
        let Some(place) = self.place(tag) else {
            return false;
        };
        let slot = &self.slots[place as usize];
        if matches!(slot.phase, Phase::Offloaded { .. }) && !slot.asked {
            self.ask(Op::Stop, tag);
        }
        self.leave(place);
        self.wheel.stop(&mut self.nodes, place);
        self.free(place);
        true
    }

    /// If twheel is being asked to keep a timer that ends here, it is stopped when the answer comes.
    fn leave(&mut self, place: u32) {
        let slot = &mut self.slots[place as usize];
        if std::mem::take(&mut slot.asked)
            && let Some(socket) = slot.socket
        {
            self.leaving.begin(socket.cookie());
        }
    }

    fn free(&mut self, place: u32) {
        let slot = &mut self.slots[place as usize];
        slot.phase = Phase::Free;
        slot.turn = slot.turn.wrapping_add(1);
        slot.wakers.clear();
        self.free.push(place);
    }

    /// Whether the start of a timer is settled, and with which error number. Else wakes this later.
    pub fn started(&mut self, tag: Tag, waker: &Waker) -> Option<Result<(), i32>> {
        let place = self.place(tag)?;
        let slot = &mut self.slots[place as usize];
        match slot.phase {
            Phase::Starting => {
                slot.await_phase(waker);
                None
            }
            Phase::Over(Err(error)) => Some(Err(error)),
            _ => Some(Ok(())),
        }
    }

    /// How a timer ended. If it has not, wakes this later.
    pub fn ended(&mut self, tag: Tag, waker: &Waker) -> Option<Result<Ended, i32>> {
        let place = self.place(tag)?;
        let slot = &mut self.slots[place as usize];
        if let Phase::Over(ended) = slot.phase {
            return Some(ended);
        }
        slot.await_phase(waker);
        None
    }

    /// Whether twheel keeps a timer; `None`: it is over.
    pub fn is_offloaded(&self, tag: Tag) -> Option<bool> {
        let slot = &self.slots[self.place(tag)? as usize];
        match slot.phase {
            Phase::Free | Phase::Over(_) => None,
            Phase::Offloaded { .. } => Some(true),
            Phase::Starting | Phase::Here => Some(false),
        }
    }

    /// A twheel is there: it is to keep all timers, those that an earlier run of it kept without
    /// beginning anew.
    pub fn connected(&mut self, table: u64) {
        let same = self.table.replace(table) == Some(table);
        self.waiting = Some(VecDeque::new());
        self.forget_asked();
        for place in 0..self.slots.len() as u32 {
            let slot = &self.slots[place as usize];
            let tag = u64::from(place) | u64::from(slot.turn) << 32;
            match slot.phase {
                Phase::Free | Phase::Over(_) => {}
                Phase::Offloaded { .. } if same => self.ask(Op::Reclaim, tag),
                // Until it has answered, the timer is kept here.
                Phase::Starting | Phase::Offloaded { .. } | Phase::Here => self.ask(Op::Start, tag),
            }
        }
    }

    /// Nothing that was asked for will be answered.
    fn forget_asked(&mut self) {
        self.asked.clear();
        self.leaving.clear();
        for slot in &mut self.slots {
            (slot.asked, slot.restarting) = (false, false);
        }
    }

    /// No twheel is there any more: all timers are kept here.
    pub fn disconnected(&mut self, now: Instant) {
        self.waiting = None;
        self.forget_asked();
        for place in 0..self.slots.len() as u32 {
            match self.slots[place as usize].phase {
                Phase::Free | Phase::Over(_) | Phase::Here => {}
                Phase::Starting => self.keep_here(place, now),
                // It is reclaimed by what is known of it.
                Phase::Offloaded { .. } => self.arm_on(place, now),
            }
        }
    }

    /// The number of a packet and its requests, as many as wait and may be sent at a time. `None`:
    /// none for now.
    pub fn packet(&mut self, now: Instant) -> Option<(u64, Vec<Waiting>)> {
        if self.asked.len() >= UNANSWERED {
            return None;
        }
        let mut packet = Vec::new();
        let mut starts = 0;
        while packet.len() < MOST
            && starts < SOCKETS
            && let Some(mut next) = self.waiting.as_mut().and_then(VecDeque::pop_front)
        {
            let Asked {
                op, tag, cookie, ..
            } = next.asked;
            let place = self.place(tag).map(|place| place as usize);
            let is_over = place.is_none_or(|place| !self.slots[place].asked);
            if matches!(op, Op::Start | Op::Reclaim) && is_over {
                // It need not be asked for.
                self.left(cookie);
                continue;
            }
            if let Some(place) = place {
                self.slots[place].go_on(&mut next, now);
            }
            starts += usize::from(next.socket.is_some());
            packet.push(next);
        }
        if packet.is_empty() {
            return None;
        }
        let number = self.next;
        self.next += 1;
        Some((number, packet))
    }

    /// A packet was sent.
    pub fn sent(&mut self, number: u64, packet: &[Waiting]) {
        let asked = packet.iter().map(|waiting| waiting.asked).collect();
        self.asked.insert(number, asked);
    }

    /// A packet could not be sent: it comes first again.
    pub fn put_back(&mut self, number: u64, packet: Vec<Waiting>) {
        self.asked.remove(&number);
        if let Some(waiting) = &mut self.waiting {
            packet
                .into_iter()
                .rev()
                .for_each(|it| waiting.push_front(it));
        }
    }

    /// The socket of a start no longer exists.
    pub fn has_no_socket(&mut self, waiting: &Waiting) {
        let Asked { tag, cookie, .. } = waiting.asked;
        let place = self.take_asked(tag);
        match place.map(|place| &self.slots[place as usize].phase) {
            Some(Phase::Starting) => self.finish(tag, Err(libc::ENOTCONN)),
            Some(_) => self.finish(tag, Ok(Ended::CLOSED)),
            None => self.left(cookie),
        }
    }

    /// Answers have come.
    pub fn replied(&mut self, number: u64, replies: &[Reply], now: Instant) {
        let asked = self.asked.remove(&number).unwrap_or_default();
        // A packet that is refused as a whole has one answer.
        let rest = replies.last().into_iter().cycle();
        for (asked, reply) in asked.into_iter().zip(replies.iter().chain(rest)) {
            let Asked { op, tag, id, .. } = asked;
            // twheel had no room for the descriptors that came with others.
            let is_unread = reply.error == libc::EMFILE as u32;
            match op {
                Op::Stop if is_unread => self.ask_stop(id, tag),
                Op::Restart if is_unread => self.ask(Op::Restart, tag),
                Op::Start | Op::Reclaim => self.keep_replied(asked, reply, now),
                // If it had ended just before, the event came first.
                Op::Restart => {
                    if reply.error == 0
                        && let Some(place) = self.place(asked.tag)
                    {
                        self.slots[place as usize].confirm(asked.restarts);
                    }
                }
                Op::Stop => {}
            }
        }
    }

    /// twheel has answered whether it keeps a timer.
    fn keep_replied(&mut self, asked: Asked, reply: &Reply, now: Instant) {
        let Asked {
            op, tag, cookie, ..
        } = asked;
        match (self.take_asked(tag), op) {
            (Some(place), Op::Reclaim) => self.reclaim_replied(place, tag, reply),
            (Some(place), _) => self.start_replied(place, asked, reply, now),
            (None, _) => {
                if reply.error == 0 {
                    self.ask_stop(reply.id, tag);
                }
                self.left(cookie);
            }
        }
    }

    /// The place of a timer that twheel was asked to keep; `None`: it has ended meanwhile.
    fn take_asked(&mut self, tag: Tag) -> Option<u32> {
        let place = self.place(tag)?;
        std::mem::take(&mut self.slots[place as usize].asked).then_some(place)
    }

    /// twheel does not keep a timer that has ended: the next ones of its socket have their turn.
    fn left(&mut self, cookie: u64) {
        for next in self.leaving.end(cookie) {
            let place = self.place(next).map(|place| place as usize);
            if place.is_some_and(|place| matches!(self.slots[place].phase, Phase::Starting)) {
                self.ask(Op::Start, next);
            }
        }
    }

    fn start_replied(&mut self, place: u32, asked: Asked, reply: &Reply, now: Instant) {
        let tag = asked.tag;
        let slot = &mut self.slots[place as usize];
        let is_same = slot
            .socket
            .is_some_and(|socket| socket.cookie() == reply.cookie);
        match (reply.error as i32, &slot.phase) {
            (0, Phase::Starting | Phase::Here | Phase::Offloaded { .. }) if is_same => {
                let (id, token) = (reply.id, reply.token);
                slot.phase = Phase::Offloaded { id, token };
                slot.wake();
                slot.confirm(asked.restarts);
                if slot.has_lived(now) {
                    slot.restarts = slot.restarts.wrapping_add(1);
                }
                self.wheel.stop(&mut self.nodes, place);
                self.ask_again(place, tag);
            }
            // It ended here meanwhile, or its descriptor was another socket by then.
            (0, _) => {
                self.ask_stop(reply.id, tag);
                if !is_same {
                    self.finish(tag, Err(libc::ENOTCONN));
                }
            }
            // Nobody could keep a timer of these. (Of a connection that another client has registered, or
            // whose other end is, this process can.)
            (
                error @ (libc::ENOTSOCK
                | libc::EPROTOTYPE
                | libc::ENOTCONN
                | libc::EINVAL
                | libc::EBADF),
                Phase::Starting,
            ) => self.finish(tag, Err(error)),
            (_, Phase::Starting) => {
                self.keep_here(place, now);
            }
            (libc::ENOTCONN | libc::EBADF, Phase::Here | Phase::Offloaded { .. }) => {
                self.finish(tag, Ok(Ended::CLOSED));
            }
            // It stays here.
            (_, Phase::Offloaded { .. }) => self.keep_here(place, now),
            _ => {}
        }
    }

    /// If a timer was restarted and twheel does not know that, it is told now.
    fn ask_again(&mut self, place: u32, tag: Tag) {
        let slot = &self.slots[place as usize];
        if slot.restarts != slot.confirmed {
            self.ask(Op::Restart, tag);
        }
    }

    fn reclaim_replied(&mut self, place: u32, tag: Tag, reply: &Reply) {
        match (reply.error, &self.slots[place as usize].phase) {
            (0, Phase::Offloaded { .. }) => {
                self.wheel.stop(&mut self.nodes, place);
                self.ask_again(place, tag);
            }
            (0, _) => self.ask_stop(reply.id, tag),
            // twheel no longer has the flow, but the socket may be open.
            (_, Phase::Offloaded { .. }) => self.ask(Op::Start, tag),
            _ => {}
        }
    }

    /// Events have come. Calls `act` for each connection that is to be ended.
    pub fn told(&mut self, events: &[Event], now: Instant, mut act: impl FnMut(Socket, Options)) {
        for event in events {
            let Some(place) = self.place(event.tag) else {
                continue;
            };
            let slot = &self.slots[place as usize];
            if !matches!(slot.phase, Phase::Offloaded { id, .. } if id == event.id) {
                continue;
            }
            match Outcome::from_raw(event.what) {
                // Its program has closed it, and the other end has not.
                Some(Outcome::Expired) if slot.socket.is_none_or(|it| it.get().is_none()) => {
                    self.finish(event.tag, Ok(Ended::CLOSED));
                }
                // Before twheel knew that it was restarted.
                Some(Outcome::Expired) if slot.restarts != slot.confirmed => {
                    self.keep_here(place, now);
                    self.ask(Op::Start, event.tag);
                }
                Some(Outcome::Expired) => {
                    if let Some(socket) = slot.socket {
                        act(socket, slot.options);
                    }
                    let ended = Ended {
                        outcome: Outcome::Expired,
                        idle: Duration::from_millis(event.idle.into()),
                    };
                    self.finish(event.tag, Ok(ended));
                }
                Some(Outcome::Closed) => self.finish(event.tag, Ok(Ended::CLOSED)),
                Some(Outcome::Unseen) | None => self.keep_here(place, now),
            }
        }
    }

    /// When a timer that is kept here is to be looked at next.
    pub fn due(&self) -> Option<Instant> {
        let tick = self.wheel.next_tick()?;
        Some(self.epoch + Duration::from_millis(tick))
    }

    /// Looks at the timers that are kept here. Calls `act` for each connection that is to be ended.
    pub fn expire(&mut self, now: Instant, mut act: impl FnMut(Socket, Options)) {
        let tick = self.tick(now);
        while let Some(place) = self.wheel.expire(&mut self.nodes, tick) {
            let slot = &self.slots[place as usize];
            let (Some(socket), options) = (slot.socket, slot.options) else {
                continue;
            };
            let tag = u64::from(place) | u64::from(slot.turn) << 32;
            let Some(told) = socket.idle(options.life) else {
                self.finish(tag, Ok(Ended::CLOSED));
                continue;
            };
            let since = now.saturating_duration_since(slot.since);
            let idle = told.saturating_sub(*LAG).min(since);
            if idle >= options.timeout {
                act(socket, options);
                let outcome = Outcome::Expired;
                self.finish(tag, Ok(Ended { outcome, idle }));
            } else {
                self.arm(place, now, told.min(since));
            }
        }
    }

    /// Keeps a timer here.
    fn keep_here(&mut self, place: u32, now: Instant) {
        let slot = &mut self.slots[place as usize];
        slot.phase = Phase::Here;
        slot.wake();
        self.arm_on(place, now);
    }

    /// Looks at a timer when its timeout may have passed, if there was no life since it was started.
    fn arm_on(&mut self, place: u32, now: Instant) {
        let since = self.slots[place as usize].since;
        self.arm(place, now, now.saturating_duration_since(since));
    }

    /// Looks at a timer when its timeout may have passed, if the connection was idle for so long
    /// already.
    fn arm(&mut self, place: u32, now: Instant, idle: Duration) {
        let left = self.slots[place as usize]
            .options
            .timeout
            .saturating_sub(idle);
        // Later by what the kernel's times may be too old, by a jiffy that has begun, and by a tick.
        let after = (left + *LAG + *JIFFY).as_millis().saturating_add(2);
        let after = u64::try_from(after).unwrap_or(u64::MAX);
        let tick = self.tick(now);
        self.wheel.start(&mut self.nodes, place, tick, after);
    }

    fn tick(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.epoch);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn finish(&mut self, tag: Tag, ended: Result<Ended, i32>) {
        if let Some(place) = self.place(tag) {
            self.leave(place);
            self.wheel.stop(&mut self.nodes, place);
            let slot = &mut self.slots[place as usize];
            slot.phase = Phase::Over(ended);
            slot.wake();
            if let Some(queued) = slot.queued {
                let (timer, tag) = (tag, queued);
                self.done.push_back(Done { timer, tag, ended });
                self.free(place);
            }
        }
    }

    /// The place of a timer that was not stopped.
    fn place(&self, tag: Tag) -> Option<u32> {
        let (place, turn) = (tag as u32, (tag >> 32) as u32);
        let slot = self.slots.get(place as usize)?;
        let is_used = slot.turn == turn && !matches!(slot.phase, Phase::Free);
        is_used.then_some(place)
    }

    /// Queues a request about a timer.
    fn ask(&mut self, op: Op, tag: Tag) {
        let Some(place) = self.place(tag) else {
            return;
        };
        let slot = &mut self.slots[place as usize];
        match op {
            Op::Start | Op::Reclaim => slot.asked = true,
            Op::Restart => {
                // Else a start or reclaim, once it is answered, is followed by one.
                let is_kept = matches!(slot.phase, Phase::Offloaded { .. }) && !slot.asked;
                // One that waits already asks for what is wanted when it is sent.
                if !is_kept || std::mem::replace(&mut slot.restarting, true) {
                    return;
                }
            }
            Op::Stop => {}
        }
        let waiting = slot.asks(op, tag);
        self.push(waiting);
    }

    fn ask_stop(&mut self, id: u64, tag: Tag) {
        let mut request = Request::new(Op::Stop);
        (request.id, request.tag, request.flags) = (id, tag, TAGGED);
        self.push(Waiting {
            request,
            asked: Asked {
                op: Op::Stop,
                tag,
                restarts: 0,
                id,
                cookie: 0,
            },
            socket: None,
        });
    }

    fn push(&mut self, waiting: Waiting) {
        if let Some(queue) = &mut self.waiting {
            queue.push_back(waiting);
        }
    }
}

#[cfg(test)]
mod tests;
