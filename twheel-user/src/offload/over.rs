//! What is done when a registration is over.

use std::sync::PoisonError;

use twheel_client::protocol::{Action, Event, Outcome};
use twheel_common::{key::FlowKey, state::State};

use super::{ends::Ended, registry::Over, server::Thread};
use crate::{
    flows::Flow,
    sockets::{FoundSocket, Protocol},
};

/// Most registrations that end before programs have their turn.
const ENDS: usize = 1_024;

impl Thread {
    pub(super) fn take_ended(&mut self) {
        // Fails if it was read before.
        let _ = self.shared.wake.read();
        let waiting = self.shared.ended.lock();
        let ended = std::mem::take(&mut *waiting.unwrap_or_else(PoisonError::into_inner));
        self.ended.extend(ended);
    }

    pub(super) fn end_some(&mut self) {
        for _ in 0..ENDS {
            let Some(Ended {
                key,
                generation,
                idle,
            }) = self.ended.pop_front()
            else {
                return;
            };
            if let Some(over) = self.registry.ended(&key, generation, Some(idle)) {
                self.over(over, &key);
            }
        }
    }

    pub(super) fn expire(&mut self) {
        for _ in 0..ENDS {
            let Some(over) = self.registry.expire() else {
                return;
            };
            let is_it = |flow: &Flow| flow.word.generation() == over.id.generation();
            let flow = self.registry.table().flow(over.id.record()).filter(is_it);
            self.over(over, &flow.map_or(FlowKey::NONE, |flow| flow.key));
        }
    }

    /// Tells a program that a registration is over, and does what it has asked for.
    fn over(&mut self, over: Over, key: &FlowKey) {
        let mut outcome = over.outcome;
        let is_unseen = match outcome {
            Outcome::Expired => over.entered && !self.is_idle(&over, key),
            // Its end may have been guessed.
            Outcome::Closed => self.lives(&over, key),
            Outcome::Unseen => true,
        };
        if is_unseen {
            outcome = Outcome::Unseen;
        }
        if outcome == Outcome::Expired && over.action == Action::Destroy {
            self.destroy(&over, key);
        }
        let idle = self.clock.duration(over.idle.into()).as_millis();
        let event = Event {
            what: outcome as u32,
            idle: match outcome {
                Outcome::Expired => u32::try_from(idle).unwrap_or(u32::MAX),
                Outcome::Closed | Outcome::Unseen => 0,
            },
            id: over.id.0,
            tag: over.tag,
            cookie: over.cookie,
        };
        if let Some(Some(program)) = self.programs.get_mut(usize::from(over.owner)) {
            program.tell(event);
            self.shared.counts.tell(outcome);
        }
    }

    /// Whether the socket was idle, too. This is asked of connections of which no packet had been
    /// seen before they were registered: perhaps none of their packets passes here.
    fn is_idle(&mut self, over: &Over, key: &FlowKey) -> bool {
        let idle = self.clock.duration(over.idle.into());
        let tolerance = 3 * self.clock.unit();
        match self.found(over, key) {
            Some(socket) => socket.idle.is_none_or(|its| its + tolerance >= idle),
            // It was closed, or is bound to an interface, where it was not looked for: its program
            // knows. Named endpoints need not be those of a socket.
            None => over.cookie == 0,
        }
    }

    /// Whether the socket is that of an established connection.
    fn lives(&mut self, over: &Over, key: &FlowKey) -> bool {
        let seen = self.found(over, key).and_then(|socket| {
            let local = over.id.local();
            socket.seen(local, local)
        });
        seen.is_some_and(|seen| seen.state() == State::Established)
    }

    fn destroy(&mut self, over: &Over, key: &FlowKey) {
        if let Some(socket) = self.found(over, key)
            && let Err(error) = self.sockets.close(socket)
        {
            log::debug!("cannot close a socket: {error}");
        }
    }

    /// The socket of a registration.
    fn found(&mut self, over: &Over, key: &FlowKey) -> Option<FoundSocket> {
        let local = over.id.local();
        let ends = (key.sender(local), key.sender(local.reverse()));
        let found = self.sockets.find(Protocol::Tcp, ends, 0).ok()??;
        (over.cookie == 0 || found.cookie() == over.cookie).then_some(found)
    }
}
