//! What is done when a registration is over.

use twheel_client::protocol::{Event, Outcome};
use twheel_common::key::FlowKey;

use super::{
    asking::is_to_be_asked,
    ends::{Ended, take_all},
    registry::Over,
    server::Thread,
    table::Table as _,
};
use crate::flows::Flow;

/// Most registrations that end before programs have their turn.
const ENDS: usize = 8_192;
/// Most registrations that are looked at before that.
const LOOKS: u32 = 16_384;

impl Thread {
    pub(super) fn take_ended(&mut self) {
        // Fails if it was read before.
        let _ = self.shared.wake.read();
        self.ended.extend(take_all(&self.shared.ended));
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
        let mut looks = LOOKS;
        for _ in 0..ENDS {
            let Some(over) = self.registry.expire(&mut looks) else {
                return;
            };
            let is_it = |flow: &Flow| flow.word.generation() == over.id.generation();
            let flow = self.registry.table().flow(over.id.record()).filter(is_it);
            self.over(over, &flow.map_or(FlowKey::NONE, |flow| flow.key));
        }
    }

    /// Tells a program that a registration is over, or has the kernel asked before.
    fn over(&mut self, over: Over, key: &FlowKey) {
        let program = self.programs.get_mut(usize::from(over.owner));
        let Some(Some(program)) = program else {
            return;
        };
        let now = self.registry.table().now();
        match is_to_be_asked(&over) {
            true => self.asking.add(program, over, key, now),
            false => self.tell(&over),
        }
    }

    /// Tells programs of registrations of which the kernel was asked.
    pub(super) fn take_answered(&mut self) {
        for question in take_all(&self.shared.answered) {
            let over = &question.over;
            let held = self.programs.get_mut(usize::from(over.owner));
            if let Some(Some(held)) = held
                && held.number == question.program
            {
                held.asked -= 1;
                self.tell(over);
            } else {
                // Its program has ended.
                self.give_back_of(question.uid, 1);
            }
        }
    }

    fn tell(&mut self, over: &Over) {
        let idle = self.clock.duration(over.idle.into()).as_millis();
        let event = Event {
            what: over.outcome as u32,
            idle: match over.outcome {
                Outcome::Expired => u32::try_from(idle).unwrap_or(u32::MAX),
                Outcome::Closed | Outcome::Unseen => 0,
            },
            id: over.id.0,
            tag: over.tag,
            cookie: over.cookie,
        };
        if let Some(Some(program)) = self.programs.get_mut(usize::from(over.owner)) {
            program.tell(event);
            self.shared.counts.tell(over.outcome);
        }
    }
}
