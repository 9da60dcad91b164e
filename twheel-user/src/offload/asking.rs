//! Asks the kernel about sockets of registrations that are over, and ends connections. Either may
//! take for as long as the program likes that has locked the socket, so threads of its user do
//! that.

use std::{
    collections::HashMap,
    mem,
    time::{Duration, Instant},
};

use anyhow::Result;
use twheel_client::protocol::{Action, Outcome};
use twheel_common::{key::FlowKey, state::State};

use super::{closing::Closers, program::Program, registry::Over, watched::Watched};
use crate::{
    clock::Clock,
    sockets::{FoundSocket, Protocol, Sockets},
};

/// A registration that is over. How it has ended is to be asked, or its connection to be ended.
pub(super) struct Question {
    pub(super) over: Over,
    pub(super) key: FlowKey,
    /// The number of its program: another may have its place.
    pub(super) program: u64,
    /// The program's user, of whose registrations it still is one.
    pub(super) uid: u32,
    /// The clock when it was over, units.
    decided: u64,
    since: Instant,
}

/// If a question has waited for longer, a connection is not ended that had a packet since.
const LONG: Duration = Duration::from_millis(100);
/// By how much the time of a packet may be ahead, units.
const AHEAD: u32 = 1;

/// Questions, by user.
#[derive(Default)]
pub(super) struct Asking(HashMap<u32, Vec<Question>>);

impl Asking {
    /// Has it asked how a registration of a program has ended. `now`: the clock, units.
    pub(super) fn add(&mut self, program: &mut Program, over: Over, key: &FlowKey, now: u64) {
        program.asked += 1;
        let uid = program.peer.uid;
        let question = Question {
            over,
            key: *key,
            program: program.number,
            uid,
            decided: now,
            since: Instant::now(),
        };
        self.0.entry(uid).or_default().push(question);
    }

    /// Has all asked that was added.
    pub(super) fn ask(&mut self, closers: &mut Closers, clock: Clock) {
        for (uid, questions) in mem::take(&mut self.0) {
            closers.ask(uid, questions, clock);
        }
    }
}

/// Whether a registration is over as it seems, or something is to be done, so that the kernel is
/// asked.
pub(super) fn is_to_be_asked(over: &Over) -> bool {
    match over.outcome {
        Outcome::Expired => over.entered || over.action == Action::Destroy,
        // Its end may have been guessed.
        Outcome::Closed => true,
        Outcome::Unseen => false,
    }
}

/// Asks, and does what is to be done. The kernel is asked in this thread's network namespace.
pub(super) fn answer(questions: &mut [Question], clock: Clock, watched: &Watched) {
    let mut sockets = match Sockets::open() {
        Ok(sockets) => sockets,
        Err(error) => {
            log::debug!("programs keep timers that are over: {error:#}");
            for question in questions {
                question.over.outcome = Outcome::Unseen;
            }
            return;
        }
    };
    for question in questions {
        let has_waited = question.since.elapsed() > LONG;
        let Question {
            over, key, decided, ..
        } = question;
        let Ok(found) = found(&mut sockets, over, key) else {
            over.outcome = Outcome::Unseen;
            continue;
        };
        let is_alive = || has_waited && watched.has_packet_after(key, *decided as u32 + AHEAD);
        let is_unseen = match over.outcome {
            Outcome::Expired if over.entered => !is_idle(found.as_ref(), over, clock),
            Outcome::Expired => over.action == Action::Destroy && is_alive(),
            Outcome::Closed => lives(found.as_ref(), over),
            Outcome::Unseen => true,
        };
        if is_unseen {
            over.outcome = Outcome::Unseen;
        } else if over.outcome == Outcome::Expired
            && over.action == Action::Destroy
            && let Some(socket) = found
            && let Err(error) = sockets.close(socket)
        {
            log::debug!("cannot close a socket: {error}");
        }
    }
}

/// Whether the socket was idle, too. This is asked of connections of which no packet had been seen
/// before they were registered: perhaps none of their packets passes here.
fn is_idle(found: Option<&FoundSocket>, over: &Over, clock: Clock) -> bool {
    let idle = clock.duration(over.idle.into());
    let tolerance = 3 * clock.unit();
    match found {
        Some(socket) => socket.idle.is_none_or(|its| its + tolerance >= idle),
        // It was closed, or is bound to an interface, where it was not looked for: its program
        // knows. Named endpoints need not be those of a socket.
        None => over.cookie == 0,
    }
}

/// Whether the socket is that of an established connection.
fn lives(found: Option<&FoundSocket>, over: &Over) -> bool {
    let local = over.id.local();
    let seen = found.and_then(|socket| socket.seen(local, local));
    seen.is_some_and(|seen| seen.state() == State::Established)
}

/// The socket of a registration; `None`: there is none any more.
fn found(sockets: &mut Sockets, over: &Over, key: &FlowKey) -> Result<Option<FoundSocket>> {
    let local = over.id.local();
    let ends = (key.sender(local), key.sender(local.reverse()));
    let found = sockets.find(Protocol::Tcp, ends, 0)?;
    Ok(found.filter(|found| over.cookie == 0 || found.cookie() == over.cookie))
}
