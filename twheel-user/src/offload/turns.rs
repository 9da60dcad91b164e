//! Keeps one user's slow files from holding up the threads of another.
//!
//! Whoever lets go of a file last closes it, which may take long. A thread that goes through all files
//! of this process holds each for a moment. If it were closed just then, that thread would close it
//! instead, at the end of a system call. So nothing is closed while a thread goes through all files,
//! and none does while something is being closed.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// For how long a thread waits to go through all files while its own user's are being closed. Unless
/// one is slow, it takes less.
const PATIENCE: Duration = Duration::from_millis(10);

/// For how long a thread waits without sleeping: longer than most turns take.
const SOON: Duration = Duration::from_micros(500);

/// Which threads do what.
#[derive(Default)]
pub struct Turns {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    /// How many threads go through all files.
    looking: usize,
    /// The users whose files will be closed once no thread goes through all, …
    waiting: Vec<u32>,
    /// … and those whose files are being closed.
    closing: Vec<u32>,
}

/// A thread may go through all files until this is dropped.
pub struct Look<'a>(&'a Turns);

/// A thread may close files of a user until this is dropped.
pub struct Close<'a>(&'a Turns, u32);

impl Turns {
    /// To go through all files, for a user. `None`: another user's are being closed, or will be; or
    /// its own are for longer than [`PATIENCE`].
    pub fn look(&self, uid: u32) -> Option<Look<'_>> {
        let others = |now: &Now| now.waiting.iter().chain(&now.closing).any(|it| *it != uid);
        let own = |now: &mut Now| !now.closing.is_empty() && !others(now);
        let waited = self
            .changed
            .wait_timeout_while(self.soon(own), PATIENCE, own);
        let (mut now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !now.closing.is_empty() || others(&now) {
            return None;
        }
        now.looking += 1;
        Some(Look(self))
    }

    /// To close files of a user. Waits for the threads that go through all files, which takes
    /// milliseconds.
    pub fn close(&self, uid: u32) -> Close<'_> {
        self.lock().waiting.push(uid);
        let looks = |now: &mut Now| now.looking > 0;
        let waited = self.changed.wait_while(self.soon(looks), looks);
        let mut now = waited.unwrap_or_else(PoisonError::into_inner);
        take(&mut now.waiting, uid);
        now.closing.push(uid);
        drop(now);
        Close(self, uid)
    }

    /// Waits while something goes on, but not for long, and without sleeping: to be woken takes as long
    /// as most turns do.
    fn soon(&self, goes_on: impl Fn(&mut Now) -> bool) -> MutexGuard<'_, Now> {
        let begun = Instant::now();
        loop {
            let mut now = self.lock();
            if !goes_on(&mut now) || begun.elapsed() > SOON {
                return now;
            }
            drop(now);
            thread::yield_now();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.0.lock().looking -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Close<'_> {
    fn drop(&mut self) {
        take(&mut self.0.lock().closing, self.1);
        self.0.changed.notify_all();
    }
}

fn take(users: &mut Vec<u32>, uid: u32) {
    if let Some(at) = users.iter().position(|it| *it == uid) {
        users.swap_remove(at);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Instant,
    };

    use super::*;

    #[test]
    fn nobody_looks_while_something_is_being_closed() {
        let turns = Turns::default();
        let closing = turns.close(1);
        let begun = Instant::now();
        assert!(turns.look(2).is_none());
        assert!(begun.elapsed() < PATIENCE);
        // Its own user waits, but not for long.
        assert!(turns.look(1).is_none());
        assert!(begun.elapsed() >= PATIENCE);
        drop(closing);
        let both = [turns.look(1), turns.look(2)];
        assert!(both.iter().all(Option::is_some));
    }

    #[test]
    fn its_own_user_looks_once_files_are_closed() {
        let turns = Turns::default();
        thread::scope(|scope| {
            let closing = turns.close(1);
            let looks = scope.spawn(|| turns.look(1).is_some());
            thread::sleep(PATIENCE / 10);
            drop(closing);
            assert!(looks.join().unwrap());
        });
    }

    #[test]
    fn nothing_is_closed_while_anybody_looks() {
        let turns = Turns::default();
        for uid in [1, 2] {
            let mut looking = turns.look(1);
            assert!(looking.is_some());
            let looks = AtomicBool::new(true);
            thread::scope(|scope| {
                let closes = scope.spawn(|| {
                    let _closing = turns.close(uid);
                    assert!(!looks.load(Ordering::SeqCst));
                });
                // It waits, and others look no more; its own user may.
                while turns.lock().waiting.is_empty() {
                    thread::sleep(Duration::from_millis(1));
                }
                assert!(turns.look(3).is_none() && !closes.is_finished());
                assert!(turns.look(uid).is_some());
                looks.store(false, Ordering::SeqCst);
                looking.take();
                closes.join().unwrap();
            });
        }
        let now = turns.lock();
        assert!(now.looking == 0 && now.waiting.is_empty() && now.closing.is_empty());
    }
}
