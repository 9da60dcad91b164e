//! What a server's calls of timers take, timed where they are made.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    task::Poll,
    time::{Duration, Instant},
};

/// One connection in so many is timed, since the clock takes longer to read than some calls take.
pub const EVERY: usize = 128;

/// All that were timed.
#[derive(Default)]
pub struct Calls {
    reads: AtomicU64,
    nanoseconds: AtomicI64,
}

impl Calls {
    /// The calls of one more read.
    pub fn add(&self, read: Read) {
        /// Nanoseconds. What took longer was interrupted.
        const LONGEST: i64 = 20_000;
        if read.0 < LONGEST {
            self.reads.fetch_add(1, Relaxed);
            self.nanoseconds.fetch_add(read.0, Relaxed);
        }
    }

    /// Reads that were timed, and the nanoseconds that their calls took.
    pub fn taken(&self) -> [f64; 2] {
        let nanoseconds = self.nanoseconds.load(Relaxed) as f64;
        [self.reads.load(Relaxed) as f64, nanoseconds]
    }
}

/// Nanoseconds that the calls of one read took.
#[derive(Default)]
pub struct Read(i64);

impl Read {
    /// Times a call, without what it takes to read the clock.
    pub fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let empty = Instant::now();
        let begun = Instant::now();
        let result = call();
        let ended = Instant::now();
        self.0 += (ended - begun).as_nanos() as i64 - (begun - empty).as_nanos() as i64;
        result
    }

    /// [`tokio::time::timeout`], whose calls of its timer are timed.
    pub async fn within<T>(&mut self, limit: Duration, read: impl Future<Output = T>) -> Option<T> {
        let mut delay = pin!(Some(self.time(|| tokio::time::sleep(limit))));
        let mut read = pin!(read);
        let result = poll_fn(|context| {
            if let Poll::Ready(read) = read.as_mut().poll(context) {
                return Poll::Ready(Some(read));
            }
            match delay.as_mut().as_pin_mut() {
                Some(delay) => self.time(|| delay.poll(context)).map(|()| None),
                None => Poll::Pending,
            }
        });
        let result = result.await;
        self.time(|| delay.set(None));
        result
    }
}
