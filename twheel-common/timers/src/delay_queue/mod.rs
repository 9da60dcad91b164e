//! A queue of values that come out when their time has come: the API of `tokio_util`'s
//! `time::delay_queue`.

mod expired;
mod keys;

use std::{
    boxed::Box,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_core::Stream;
use tokio::time::{Instant, Sleep, sleep_until};

pub use self::expired::Expired;
pub use crate::slab::Key;
use crate::{
    clock::Clock,
    error::Error,
    hierarchical::Hierarchical,
    scheme::{LAST_TICK, Scheme},
    timers::Timers,
};

/// 4 levels of 256 slots: 2^32 ticks, which are 49 days of milliseconds, and 8 KB.
const LEVELS: u32 = 4;
const SLOTS: u32 = 256;

/// The tick of [`DelayQueue::new`].
const TICK: Duration = Duration::from_millis(1);

/// Timers or slots that are looked at until what was found is handed out.
const BUDGET: usize = 256;

/// Values that come out when their time has come, on tokio's clock; a [`Stream`] of them.
///
/// It has the methods of `tokio_util::time::DelayQueue`, so that it can take its place, as the
/// [migration table](crate#migration) says, and is [two to five times as
/// fast](crate#plots). It differs in this:
///
/// - No deadline is too far: one beyond the range of the clock never comes.
/// - Keys of values that are gone are not taken for others: [`try_remove`](Self::try_remove) and
///   [`try_reset`](Self::try_reset) find nothing.
/// - Memory grows without moving values; [`shrink_to_fit`](Self::shrink_to_fit) frees it when the
///   queue is empty. [`peek`](Self::peek) looks at all values.
///
/// ```
/// use std::{collections::HashMap, time::Duration};
/// use twheel_timers::{DelayQueue, delay_queue::Key};
///
/// /// A cache whose entries live for a while.
/// struct Cache {
///     entries: HashMap<String, (u32, Key)>,
///     expirations: DelayQueue<String>,
/// }
///
/// impl Cache {
///     fn insert(&mut self, name: &str, value: u32) {
///         let key = self.expirations.insert(name.to_owned(), Duration::from_secs(30));
///         if let Some((_, old)) = self.entries.insert(name.to_owned(), (value, key)) {
///             self.expirations.remove(&old);
///         }
///     }
///
///     async fn purge(&mut self) {
///         if let Some(expired) = self.expirations.next_expired().await {
///             self.entries.remove(expired.get_ref());
///         }
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let mut cache = Cache { entries: HashMap::new(), expirations: DelayQueue::new() };
/// cache.insert("a", 1);
/// cache.insert("a", 2);
/// cache.purge().await;
/// assert!(cache.entries.is_empty());
/// # }
/// ```
pub struct DelayQueue<T> {
    timers: Timers<T, Hierarchical>,
    clock: Clock,
    sleep: Option<Pin<Box<Sleep>>>,
    /// The tick that the queue's task waits for; [`LAST_TICK`] if for nothing.
    wake: u64,
    waker: Option<Waker>,
    /// Whether the task must look at the timers before `wake`.
    is_stale: bool,
}

impl<T> DelayQueue<T> {
    /// An empty queue with ticks of 1 ms, as tokio's own timers have.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let queue = DelayQueue::<u32>::new();
    /// assert!(queue.is_empty());
    /// # }
    /// ```
    pub fn new() -> Self {
        Self::with_tick(TICK).expect("a millisecond is a tick")
    }

    /// An empty queue with memory for this many values.
    ///
    /// # Panics
    ///
    /// For more than 2^28 values.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let queue = DelayQueue::<u32>::with_capacity(1_000);
    /// assert!(queue.capacity() >= 1_000);
    /// # }
    /// ```
    #[track_caller]
    pub fn with_capacity(capacity: usize) -> Self {
        let mut queue = Self::new();
        queue.reserve(capacity);
        queue
    }

    /// An empty queue with ticks of this length: values come out at the first tick that begins at
    /// or after their deadline. With longer ticks there are fewer wake-ups.
    ///
    /// # Errors
    ///
    /// A tick of zero, or of more than 2^64 nanoseconds.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let mut queue = DelayQueue::with_tick(Duration::from_secs(1)).unwrap();
    /// let begin = Instant::now();
    /// queue.insert("a", Duration::from_millis(1_500));
    /// queue.next_expired().await;
    /// assert_eq!(begin.elapsed(), Duration::from_secs(2));
    /// # }
    /// ```
    pub fn with_tick(tick: Duration) -> Result<Self, Error> {
        Ok(Self {
            timers: Timers::new(Hierarchical::new(LEVELS, SLOTS)?),
            clock: Clock::new(tick)?,
            sleep: None,
            wake: LAST_TICK,
            waker: None,
            is_stale: false,
        })
    }

    /// Adds a value that comes out after `timeout`; at once if that is zero.
    ///
    /// # Panics
    ///
    /// If there are 2^28 values.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.next_expired().await.unwrap().into_inner(), "a");
    /// # }
    /// ```
    #[track_caller]
    pub fn insert(&mut self, value: T, timeout: Duration) -> Key {
        let (now, ticks) = self.clock.interval(timeout);
        self.insert_tick(value, now.saturating_add(ticks))
    }

    /// Adds a value that comes out at `when`; at once if that is past.
    ///
    /// # Panics
    ///
    /// If there are 2^28 values.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert_at("a", Instant::now() + Duration::from_secs(5));
    /// assert_eq!(queue.next_expired().await.unwrap().into_inner(), "a");
    /// # }
    /// ```
    #[track_caller]
    pub fn insert_at(&mut self, value: T, when: Instant) -> Key {
        let tick = self.clock.tick_of(when);
        self.insert_tick(value, tick)
    }

    #[track_caller]
    fn insert_tick(&mut self, value: T, tick: u64) -> Key {
        match self.timers.insert_due(tick, value) {
            Ok(key) => {
                self.comes(tick);
                key
            }
            Err(error) => panic!("cannot add a value to the queue: {error}"),
        }
    }

    /// Wakes the task that waits for the queue if it would sleep beyond a tick.
    fn comes(&mut self, tick: u64) {
        if tick < self.wake {
            self.is_stale = true;
            if let Some(waker) = self.waker.take() {
                waker.wake();
            }
        }
    }

    /// Takes out a value whose time has come; `Ready(None)` if the queue is empty. If it is
    /// `Pending`, the task is woken when the next value is due, also if that is inserted later.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// use std::task::{Poll, Context, Waker};
    ///
    /// let mut queue = DelayQueue::new();
    /// let mut context = Context::from_waker(Waker::noop());
    /// assert!(matches!(queue.poll_expired(&mut context), Poll::Ready(None)));
    /// queue.insert("a", Duration::from_secs(5));
    /// assert!(queue.poll_expired(&mut context).is_pending());
    /// # }
    /// ```
    pub fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<Option<Expired<T>>> {
        loop {
            if let Some(expired) = self.timers.pop_expired() {
                return Poll::Ready(Some(Expired {
                    key: expired.key,
                    value: expired.value,
                    deadline: self.instant(expired.deadline),
                }));
            }
            let sleeps = self.sleeps(cx);
            if !sleeps && (!self.timers.advance(self.clock.now(), BUDGET) || self.timers.has_due())
            {
                continue;
            }
            let waker = self.waker.as_ref();
            if !waker.is_some_and(|it| it.will_wake(cx.waker())) {
                self.waker = Some(cx.waker().clone());
            }
            if sleeps {
                return Poll::Pending;
            }
            self.is_stale = false;
            let next = self.timers.next_tick();
            let Some(next) = next else {
                self.wake = LAST_TICK;
                return Poll::Ready(None);
            };
            let Some(instant) = self.clock.instant(next) else {
                // It never comes.
                self.wake = LAST_TICK;
                return Poll::Pending;
            };
            if self.sleep.is_none() || next != self.wake {
                self.wake = next;
                match &mut self.sleep {
                    Some(sleep) => sleep.as_mut().reset(instant),
                    None => self.sleep = Some(Box::pin(sleep_until(instant))),
                }
            }
            let sleep = self.sleep.as_mut().map(Pin::as_mut);
            if sleep.is_some_and(|sleep| sleep.poll(cx).is_pending()) {
                return Poll::Pending;
            }
        }
    }

    /// Whether nothing can be due, because the sleep that was set has not ended: it says so without
    /// a look at the clock.
    fn sleeps(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.sleep {
            Some(sleep) if !self.is_stale && self.wake < LAST_TICK => {
                sleep.as_mut().poll(cx).is_pending()
            }
            _ => false,
        }
    }

    /// Waits for the next value whose time has come; `None` if the queue is empty. Cancel safe: a
    /// value comes out only if this returns it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("b", Duration::from_secs(9));
    /// queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.next_expired().await.unwrap().into_inner(), "a");
    /// assert_eq!(queue.next_expired().await.unwrap().into_inner(), "b");
    /// assert!(queue.next_expired().await.is_none());
    /// # }
    /// ```
    pub fn next_expired(&mut self) -> impl Future<Output = Option<Expired<T>>> + '_ {
        poll_fn(|cx| self.poll_expired(cx))
    }

    /// Takes all values out, and drops them.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// queue.clear();
    /// assert!(queue.is_empty());
    /// # }
    /// ```
    pub fn clear(&mut self) {
        drop(self.timers.drain());
        self.comes(0);
    }

    /// Number of values, also of those whose time has come.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.len(), 1);
    /// # }
    /// ```
    pub fn len(&self) -> usize {
        self.timers.len()
    }

    /// Whether there are no values.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// assert!(DelayQueue::<u32>::new().is_empty());
    /// # }
    /// ```
    pub fn is_empty(&self) -> bool {
        self.timers.is_empty()
    }

    /// Number of values for which there is memory.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// assert!(queue.capacity() >= 1);
    /// # }
    /// ```
    pub fn capacity(&self) -> usize {
        self.timers.capacity()
    }

    /// Allocates memory for this many values more.
    ///
    /// # Panics
    ///
    /// For more than 2^28 values in all.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let mut queue = DelayQueue::<u32>::new();
    /// queue.reserve(1_000);
    /// assert!(queue.capacity() >= 1_000);
    /// # }
    /// ```
    #[track_caller]
    pub fn reserve(&mut self, additional: usize) {
        if let Err(error) = self.timers.reserve(additional) {
            panic!("cannot reserve memory: {error}");
        }
    }

    /// Frees memory, if the queue is empty. (With values it cannot, as no value is ever moved.)
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// queue.clear();
    /// queue.shrink_to_fit();
    /// assert_eq!(queue.capacity(), 0);
    /// # }
    /// ```
    pub fn shrink_to_fit(&mut self) {
        self.timers.shrink_to_fit();
    }

    /// The key of the value that comes out next. It looks at all values.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("b", Duration::from_secs(9));
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.peek(), Some(key));
    /// # }
    /// ```
    pub fn peek(&self) -> Option<Key> {
        self.timers.earliest()
    }

    /// When a tick begins, or the far future.
    fn instant(&self, tick: u64) -> Instant {
        /// 30 years.
        const FAR: Duration = Duration::from_secs(86_400 * 365 * 30);
        let instant = self.clock.instant(tick);
        instant.unwrap_or_else(|| Instant::now() + FAR)
    }
}

impl<T> Default for DelayQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Stream for DelayQueue<T> {
    type Item = Expired<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Expired<T>>> {
        self.get_mut().poll_expired(cx)
    }
}

impl<T> fmt::Debug for DelayQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayQueue")
            .field("len", &self.len())
            .field("tick", &self.clock.tick())
            .finish_non_exhaustive()
    }
}
