//! How the thread learns of flows that ended.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use nix::sys::eventfd::EventFd;
use twheel_common::{event::Record, key::FlowKey};

use super::{
    asking::Question,
    closing::{Inspected, Taken},
    tally::Counts,
};

/// If as many ends wait for the thread, it is told of no more.
const MOST: usize = 1 << 18;

/// A flow's end, as it is passed to the thread.
pub(super) struct Ended {
    pub(super) key: FlowKey,
    pub(super) generation: u16,
    pub(super) idle: u32,
}

/// What the thread shares with those who tell it of flows that ended.
pub(super) struct Shared {
    pub(super) stops: AtomicBool,
    /// Number of registrations.
    pub(super) held: AtomicUsize,
    pub(super) counts: Counts,
    pub(super) ended: Mutex<Vec<Ended>>,
    /// Packets whose sockets were looked at.
    pub(super) inspected: Mutex<Vec<Inspected>>,
    /// Packets that were received after they were answered.
    pub(super) received: Mutex<Vec<Taken>>,
    /// Registrations that are over, of which the kernel was asked.
    pub(super) answered: Mutex<Vec<Question>>,
    pub(super) wake: EventFd,
}

/// Locks what threads share. A panic cannot leave it half changed.
pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes all that waits for the thread.
pub(super) fn take_all<T>(waiting: &Mutex<Vec<T>>) -> Vec<T> {
    mem::take(&mut lock(waiting))
}

/// Tells the thread of flows that ended.
#[derive(Clone)]
pub struct Ends(pub(super) Arc<Shared>);

impl Ends {
    /// Passes on the ends of flows among these.
    pub fn pass(&self, records: &[Record]) {
        if self.0.held.load(Ordering::SeqCst) == 0 {
            return;
        }
        let ends = records.iter().filter_map(|record| match record {
            Record::Ended(event) => Some(Ended {
                key: event.key,
                generation: event.birth.generation(),
                idle: event.idle,
            }),
            Record::Begun(_) | Record::Updated(_) | Record::Rto(_) => None,
        });
        let mut ended = lock(&self.0.ended);
        // An end that the thread does not learn of, it finds out when the timeout has passed.
        if ended.len() < MOST {
            ended.extend(ends);
        }
        drop(ended);
        // If the counter is full, the thread is awake anyway.
        let _ = self.0.wake.write(1);
    }
}
