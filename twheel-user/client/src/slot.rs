//! What is known of a timer, and what is asked of twheel about it.

use std::{
    task::Waker,
    time::{Duration, Instant},
};

use crate::{
    offload::{Ended, LONGEST, Options},
    protocol::{Op, Request, TAGGED},
    socket::{JIFFY, LAG, Socket},
};

/// A timer as requests and events name it: its place, and from bit 32 on how often the place was
/// used before.
pub type Tag = u64;

/// What a request asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// What.
    pub op: Op,
    /// Of which timer.
    pub tag: Tag,
    /// How often it had been restarted then.
    pub restarts: u32,
    /// Its registration, if that is to be stopped.
    pub id: u64,
    /// The socket's.
    pub cookie: u64,
}

/// A request that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The request.
    pub request: Request,
    /// What it asks for.
    pub asked: Asked,
    /// The socket of a start.
    pub socket: Option<Socket>,
}

/// Where a timer is kept.
#[derive(Debug)]
pub enum Phase {
    /// Nowhere: the place is free.
    Free,
    /// twheel was asked to keep it, or will be once it runs.
    Starting,
    /// By twheel.
    Offloaded {
        /// Its registration.
        id: u64,
        /// Proves that it is this program's.
        token: u64,
    },
    /// By this process.
    Here,
    /// It has ended, or was refused with an error number.
    Over(Result<Ended, i32>),
}

/// A timer, or a place for one.
pub struct Slot {
    /// How often the place was used before.
    pub turn: u32,
    /// The connection's.
    pub socket: Option<Socket>,
    /// What it is to do.
    pub options: Options,
    /// When it was started, or restarted.
    pub since: Instant,
    /// How often it was restarted.
    pub restarts: u32,
    /// The latest restart that twheel has confirmed.
    pub confirmed: u32,
    /// twheel was asked to keep it, and has not answered.
    pub asked: bool,
    /// A request to restart it waits to be sent.
    pub restarting: bool,
    /// The latest life that it was told of then, if it was not to begin at that moment.
    pub claimed: Option<Instant>,
    /// Where it is kept.
    pub phase: Phase,
    /// Wait for its next phase.
    pub wakers: Vec<Waker>,
    /// What its end is queued with; `None`: it is waited for.
    pub queued: Option<u64>,
}

impl Slot {
    /// A free place.
    pub fn free(options: Options, now: Instant) -> Self {
        Self {
            turn: 0,
            socket: None,
            options,
            since: now,
            restarts: 0,
            confirmed: 0,
            asked: false,
            restarting: false,
            claimed: None,
            phase: Phase::Free,
            wakers: Vec::new(),
            queued: None,
        }
    }

    /// What is to be asked of twheel.
    pub fn asks(&self, op: Op, tag: Tag) -> Waiting {
        let mut request = Request::new(op);
        request.tag = tag;
        // A timer that twheel does not know to be restarted is not to expire before it does.
        request.timeout = match op {
            Op::Reclaim if self.restarts != self.confirmed => millis(LONGEST),
            _ => millis(self.options.timeout),
        };
        request.life = self.options.life;
        request.action = self.options.action as u8;
        if matches!(op, Op::Restart | Op::Stop) {
            request.flags = TAGGED;
        }
        let cookie = self.socket.map_or(0, |socket| socket.cookie());
        if op != Op::Start
            && let Phase::Offloaded { id, token } = self.phase
        {
            (request.id, request.token, request.cookie) = (id, token, cookie);
        }
        Waiting {
            request,
            asked: Asked {
                op,
                tag,
                restarts: self.restarts,
                id: request.id,
                cookie,
            },
            socket: self.socket.filter(|_| op == Op::Start),
        }
    }

    /// A request is sent now. It asks for what is wanted now, and says since when the timeout counts.
    pub fn go_on(&mut self, waiting: &mut Waiting, now: Instant) {
        /// A start that is sent later than this after it was asked for has waited.
        const WAITED: Duration = Duration::from_millis(5);
        let Asked { op, tag, .. } = waiting.asked;
        if op == Op::Restart {
            self.restarting = false;
        }
        // A restart of a registration that is over finds none.
        let is_kept = matches!(self.phase, Phase::Offloaded { .. });
        if op == Op::Stop || op == Op::Restart && !is_kept {
            return;
        }
        *waiting = self.asks(op, tag);
        let since = now.saturating_duration_since(self.since);
        self.claimed = None;
        let idle = match op {
            // What comes before twheel has the timer, only the kernel notes.
            Op::Start if since > WAITED => {
                let told = self
                    .socket
                    .and_then(|socket| socket.idle(self.options.life))
                    .unwrap_or_default();
                self.claimed = now.checked_sub(told.min(since));
                told.saturating_sub(*LAG).min(since)
            }
            Op::Restart => since,
            Op::Start | Op::Reclaim | Op::Stop => Duration::ZERO,
        };
        waiting.request.idle = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
    }

    /// twheel has confirmed a restart, the latest or an earlier one.
    pub fn confirm(&mut self, restart: u32) {
        // Answers come in order.
        self.confirmed = restart;
    }

    /// Whether the connection has lived since twheel was asked to keep its timer. What came before
    /// twheel kept it, twheel has not noted.
    pub fn has_lived(&mut self, now: Instant) -> bool {
        let (Some(claimed), Some(socket)) = (self.claimed.take(), self.socket) else {
            return false;
        };
        // Two readings of one time differ by a jiffy at most.
        let told = socket.idle(self.options.life).unwrap_or_default();
        now.checked_sub(told)
            .is_some_and(|latest| latest > claimed + *JIFFY * 2)
    }

    /// Has somebody wait for its next phase, too.
    pub fn await_phase(&mut self, waker: &Waker) {
        if !self.wakers.iter().any(|it| it.will_wake(waker)) {
            self.wakers.push(waker.clone());
        }
    }

    /// Wakes those who wait for its next phase.
    pub fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

/// The end of a timer that was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The timer.
    pub timer: Tag,
    /// What it was started with.
    pub tag: u64,
    /// How it ended, or the error number with which it was refused.
    pub ended: Result<Ended, i32>,
}

/// Milliseconds, rounded up.
fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}
