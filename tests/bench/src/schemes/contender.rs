//! The contenders: the schemes, two widely used crates, and the design of Linux's timers.

use std::{rc::Rc, task::Context, task::Poll, task::Waker, time::Duration};

use hierarchical_hash_wheel_timer::{
    IdOnlyTimerEntry,
    wheels::{Skip, cancellable::QuadWheelWithOverflow},
};
use tokio::{runtime::Runtime, time::Instant};
use tokio_util::time::{DelayQueue, delay_queue};
use twheel_timers::{
    End, Growing, Hashed, HashedOrdered, Heap, Hierarchical, Key, Ordered, Scheme, Simple, Timers,
    Unordered,
};

use super::{linux::Linux, objects::Embedded, stopwatch};

/// Slots of the wheels with one level: more than the longest interval, which scheme 4 requires.
pub const SLOTS: u32 = 1 << 16;
/// Timers to look at per call, so that what is found is handed out while it is in the cache.
const BUDGET: usize = 256;

/// A tick is 1 ms for contenders to which the length matters. Each call is a batch, so that the
/// cost of the call itself does not count. Contenders keep the handles of their timers in a vector,
/// indexed by the timer's number, except those that only have ids.
pub trait Contender {
    /// Starts a timer for each interval.
    fn start(&mut self, intervals: &[u32]);
    /// Starts the timers with these numbers again after they were stopped.
    fn start_again(&mut self, order: &[u32], intervals: &[u32]);
    /// Re-arms the timers in this order, with new intervals from now.
    fn rearm(&mut self, order: &[u32], intervals: &[u32]);
    /// Stops the timers in this order.
    fn stop(&mut self, order: &[u32]);
    /// Lets time pass, unmeasured.
    fn pass(&mut self, ticks: u32);
    /// Hands out all timers that are due. Returns how many.
    fn expire(&mut self) -> usize;

    /// Ticks after which a timer may expire beyond its deadline.
    fn slack(&self) -> u32 {
        0
    }

    /// Size of the vector of handles, in bytes.
    fn handles(&self) -> usize {
        0
    }

    /// Lets time pass and hands out timers, tick by tick. Returns how many were due, and how long
    /// handing out took.
    fn tick(&mut self, ticks: u32) -> (usize, Duration) {
        let begin = stopwatch::start();
        let mut count = 0;
        for _ in 0..ticks {
            self.pass(1);
            count += self.expire();
        }
        (count, begin.read())
    }
}

/// A contender: its name, a function that makes it for a number of timers, and the most timers that
/// it is measured with.
pub struct Entry {
    /// Its name in the tables.
    pub name: &'static str,
    /// Allocates space for the handles of this many timers, but none for the timers.
    pub make: fn(usize) -> Box<dyn Contender>,
    /// More timers would take minutes.
    pub most: usize,
}

/// All of them.
pub const ALL: [Entry; 14] = {
    const fn entry(
        name: &'static str,
        make: fn(usize) -> Box<dyn Contender>,
        most: usize,
    ) -> Entry {
        Entry { name, make, most }
    }
    const ANY: usize = usize::MAX;
    [
        entry(
            "1 unordered",
            |n| ours(n, Timers::new(Unordered::new())),
            10_000,
        ),
        entry(
            "2 ordered",
            |n| ours(n, Timers::new(Ordered::new(End::Rear))),
            10_000,
        ),
        entry("3 heap", |n| ours(n, Timers::new(Heap::new())), ANY),
        entry(
            "4 simple",
            |n| ours(n, Timers::new(must(Simple::new(SLOTS)))),
            ANY,
        ),
        entry(
            "5 hashed ordered",
            |n| ours(n, Timers::new(must(HashedOrdered::new(SLOTS)))),
            ANY,
        ),
        entry(
            "6 hashed",
            |n| ours(n, Timers::new(must(Hashed::new(SLOTS)))),
            ANY,
        ),
        entry(
            "7 hierarchical",
            |n| ours(n, Timers::new(must(Hierarchical::new(3, 1024)))),
            ANY,
        ),
        entry(INTRUSIVE, |n| Box::new(Embedded::new(n)), ANY),
        entry(
            "7 growing, ticked",
            |n| ours(n, Timers::new(must(Growing::ticked(256)))),
            ANY,
        ),
        entry(
            "7 growing, skipping",
            |n| ours(n, Timers::new(must(Growing::skipping(256)))),
            ANY,
        ),
        entry(
            OUR_QUEUE,
            |n| Box::new(Queue::<twheel_timers::DelayQueue<u64>>::new(n)),
            ANY,
        ),
        entry(
            DELAY_QUEUE,
            |n| Box::new(Queue::<DelayQueue<u64>>::new(n)),
            ANY,
        ),
        entry(QUAD, |_| Box::new(Quad::default()), ANY),
        entry(LINUX, |n| Box::new(Linux::new(n)), ANY),
    ]
};

/// The one that takes the place of [`DELAY_QUEUE`].
pub const OUR_QUEUE: &str = "7 as a DelayQueue";
/// The one whose timers have no handles.
pub const INTRUSIVE: &str = "7 intrusive";
/// The contenders to beat.
pub const DELAY_QUEUE: &str = "tokio-util DelayQueue";
/// Never to be behind.
pub const QUAD: &str = "hierarchical_hash_wheel_timer";
/// To be near.
pub const LINUX: &str = "imitation of Linux's timer.c";

/// Unwraps what must succeed, because the benchmark asks only for what is possible.
pub fn must<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("the bench asks for the impossible: {error}"))
}

fn ours<S: Scheme<u64> + 'static>(n: usize, scheme: S) -> Box<dyn Contender> {
    Box::new(Ours {
        scheme,
        timers: Vec::with_capacity(n),
        now: 0,
    })
}

struct Ours<S> {
    scheme: S,
    timers: Vec<Key>,
    now: u64,
}

impl<S: Scheme<u64>> Contender for Ours<S> {
    fn start(&mut self, intervals: &[u32]) {
        self.timers.clear();
        for (id, interval) in (0..).zip(intervals) {
            let timer = self.scheme.insert(self.now, (*interval).into(), id);
            self.timers.push(must(timer));
        }
    }

    fn start_again(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            let timer = self
                .scheme
                .insert(self.now, (*interval).into(), (*id).into());
            self.timers[*id as usize] = must(timer);
        }
    }

    fn rearm(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            let timer = self.timers[*id as usize];
            must(self.scheme.reset(timer, self.now, (*interval).into()));
        }
    }

    fn stop(&mut self, order: &[u32]) {
        for id in order {
            self.scheme.remove(self.timers[*id as usize]);
        }
    }

    fn pass(&mut self, ticks: u32) {
        self.now += u64::from(ticks);
    }

    fn handles(&self) -> usize {
        self.timers.capacity() * size_of::<Key>()
    }

    fn expire(&mut self) -> usize {
        let mut count = 0;
        loop {
            let done = self.scheme.advance(self.now, BUDGET);
            while self.scheme.pop_expired().is_some() {
                count += 1;
            }
            if done {
                return count;
            }
        }
    }
}

/// A queue on tokio's clock.
trait Delays {
    type Key: Copy;
    fn new() -> Self;
    fn insert_at(&mut self, id: u64, when: Instant) -> Self::Key;
    fn reset_at(&mut self, key: &Self::Key, when: Instant);
    fn remove(&mut self, key: &Self::Key);
    /// Whether one was due.
    fn poll(&mut self, context: &mut Context<'_>) -> bool;
}

/// Both have the same methods.
macro_rules! delays {
    ($queue:ty, $key:ty) => {
        impl Delays for $queue {
            type Key = $key;
            fn new() -> Self {
                Self::new()
            }
            fn insert_at(&mut self, id: u64, when: Instant) -> $key {
                self.insert_at(id, when)
            }
            fn reset_at(&mut self, key: &$key, when: Instant) {
                self.reset_at(key, when);
            }
            fn remove(&mut self, key: &$key) {
                self.remove(key);
            }
            fn poll(&mut self, context: &mut Context<'_>) -> bool {
                matches!(self.poll_expired(context), Poll::Ready(Some(_)))
            }
        }
    };
}

delays!(DelayQueue<u64>, delay_queue::Key);
delays!(twheel_timers::DelayQueue<u64>, Key);

/// Runs on tokio's paused clock, so that time passes only when told to.
struct Queue<Q: Delays> {
    queue: Q,
    keys: Vec<Q::Key>,
    runtime: Runtime,
    now: Instant,
}

impl<Q: Delays> Queue<Q> {
    fn new(n: usize) -> Self {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = must(builder.enable_time().start_paused(true).build());
        let guard = runtime.enter();
        let now = Instant::now();
        let queue = Q::new();
        drop(guard);
        Self {
            queue,
            keys: Vec::with_capacity(n),
            runtime,
            now,
        }
    }
}

fn ms(ticks: u32) -> Duration {
    Duration::from_millis(ticks.into())
}

impl<Q: Delays> Contender for Queue<Q> {
    fn start(&mut self, intervals: &[u32]) {
        let _guard = self.runtime.enter();
        self.keys.clear();
        for (id, interval) in (0..).zip(intervals) {
            // Not `insert`, which would read the clock each time.
            let key = self.queue.insert_at(id, self.now + ms(*interval));
            self.keys.push(key);
        }
    }

    fn start_again(&mut self, order: &[u32], intervals: &[u32]) {
        let _guard = self.runtime.enter();
        for (id, interval) in order.iter().zip(intervals) {
            let key = self.queue.insert_at((*id).into(), self.now + ms(*interval));
            self.keys[*id as usize] = key;
        }
    }

    fn rearm(&mut self, order: &[u32], intervals: &[u32]) {
        let _guard = self.runtime.enter();
        for (id, interval) in order.iter().zip(intervals) {
            let key = &self.keys[*id as usize];
            self.queue.reset_at(key, self.now + ms(*interval));
        }
    }

    fn stop(&mut self, order: &[u32]) {
        let _guard = self.runtime.enter();
        for id in order {
            self.queue.remove(&self.keys[*id as usize]);
        }
    }

    fn pass(&mut self, ticks: u32) {
        self.now += ms(ticks);
        self.runtime.block_on(async {
            tokio::time::advance(ms(ticks)).await;
            // Lets the runtime turn its own wheel.
            tokio::task::yield_now().await;
        });
    }

    fn handles(&self) -> usize {
        self.keys.capacity() * size_of::<Q::Key>()
    }

    fn expire(&mut self) -> usize {
        let _guard = self.runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        let mut count = 0;
        while self.queue.poll(&mut context) {
            count += 1;
        }
        count
    }

    fn tick(&mut self, ticks: u32) -> (usize, Duration) {
        let (mut count, mut total) = (0, Duration::ZERO);
        // The queue is not charged for moving tokio's clock, nor for reading the stopwatch.
        let mut reading = Duration::ZERO;
        for _ in 0..ticks {
            let begin = std::time::Instant::now();
            reading += begin.elapsed();
            self.pass(1);
            let begin = std::time::Instant::now();
            count += self.expire();
            total += begin.elapsed();
        }
        (count, total.saturating_sub(reading))
    }
}

/// Its timers are known by ids, which it looks up in a hash map of its own. It cannot move a timer:
/// the timer is cancelled and inserted again.
#[derive(Default)]
struct Quad {
    wheel: QuadWheelWithOverflow<IdOnlyTimerEntry<u64>>,
    behind: u32,
}

impl Quad {
    fn insert(&mut self, id: u64, interval: u32) {
        let delay = ms(interval);
        let entry = Rc::new(IdOnlyTimerEntry { id, delay });
        assert!(self.wheel.insert_ref_with_delay(entry, delay).is_ok());
    }
}

impl Contender for Quad {
    fn start(&mut self, intervals: &[u32]) {
        for (id, interval) in (0..).zip(intervals) {
            self.insert(id, *interval);
        }
    }

    fn start_again(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            self.insert((*id).into(), *interval);
        }
    }

    fn rearm(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            let id = u64::from(*id);
            // Fails if the timer has already fired.
            let _ = self.wheel.cancel(&id);
            self.insert(id, *interval);
        }
    }

    fn stop(&mut self, order: &[u32]) {
        for id in order {
            let _ = self.wheel.cancel(&u64::from(*id));
        }
    }

    fn pass(&mut self, ticks: u32) {
        self.behind += ticks;
    }

    fn expire(&mut self) -> usize {
        let mut count = 0;
        while self.behind > 0 {
            let skip = match self.wheel.can_skip() {
                Skip::None => 0,
                Skip::Millis(ms) => ms.min(self.behind - 1),
                Skip::Empty => self.behind - 1,
            };
            self.wheel.skip(skip);
            count += self.wheel.tick().len();
            self.behind -= skip + 1;
        }
        count
    }
}
