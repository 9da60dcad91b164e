//! What is done with a value by its key, while it is in the queue.

use std::time::Duration;

use tokio::time::Instant;

use super::{DelayQueue, Expired, Key};
use crate::scheme::Scheme;

/// What a panic says of a stale key.
const GONE: &str = "the key's value has left the queue";

impl<T> DelayQueue<T> {
    /// Moves a value's deadline to `timeout` from now.
    ///
    /// # Panics
    ///
    /// If the value is not in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// queue.reset(&key, Duration::from_secs(60));
    /// let begin = Instant::now();
    /// queue.next_expired().await;
    /// assert_eq!(begin.elapsed(), Duration::from_secs(60));
    /// # }
    /// ```
    #[track_caller]
    pub fn reset(&mut self, key: &Key, timeout: Duration) {
        assert!(self.try_reset(key, timeout), "{GONE}");
    }

    /// Moves a value's deadline to `when`.
    ///
    /// # Panics
    ///
    /// If the value is not in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// let when = Instant::now() + Duration::from_secs(60);
    /// queue.reset_at(&key, when);
    /// assert_eq!(queue.deadline(&key), when);
    /// # }
    /// ```
    #[track_caller]
    pub fn reset_at(&mut self, key: &Key, when: Instant) {
        let tick = self.clock.tick_of(when);
        assert!(self.reset_tick(key, tick), "{GONE}");
    }

    /// Moves a value's deadline to `timeout` from now. Returns whether the value is in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert!(queue.try_reset(&key, Duration::from_secs(60)));
    /// queue.remove(&key);
    /// assert!(!queue.try_reset(&key, Duration::from_secs(60)));
    /// # }
    /// ```
    pub fn try_reset(&mut self, key: &Key, timeout: Duration) -> bool {
        let (now, ticks) = self.clock.interval(timeout);
        self.reset_tick(key, now.saturating_add(ticks))
    }

    fn reset_tick(&mut self, key: &Key, tick: u64) -> bool {
        let is_there = self.timers.reset_due(*key, tick);
        if is_there {
            self.comes(tick);
        }
        is_there
    }

    /// Takes a value out before its time has come.
    ///
    /// # Panics
    ///
    /// If the value is not in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.remove(&key).into_inner(), "a");
    /// # }
    /// ```
    #[track_caller]
    pub fn remove(&mut self, key: &Key) -> Expired<T> {
        self.try_remove(key).expect(GONE)
    }

    /// Takes a value out before its time has come; `None` if it is not in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert!(queue.try_remove(&key).is_some());
    /// assert!(queue.try_remove(&key).is_none());
    /// # }
    /// ```
    pub fn try_remove(&mut self, key: &Key) -> Option<Expired<T>> {
        let deadline = self.timers.deadline(*key)?;
        let value = self.timers.remove(*key)?;
        if self.timers.is_empty() {
            // The stream is at its end, which the task learns when it polls it.
            self.comes(0);
        }
        Some(Expired {
            key: *key,
            value,
            deadline: self.instant(deadline),
        })
    }

    /// When a value is due. It may be up to a tick later than was asked for.
    ///
    /// # Panics
    ///
    /// If the value is not in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.deadline(&key), Instant::now() + Duration::from_secs(5));
    /// # }
    /// ```
    #[track_caller]
    pub fn deadline(&self, key: &Key) -> Instant {
        let tick = self.timers.deadline(*key).expect(GONE);
        self.instant(tick)
    }

    /// A value, if it is in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.get(&key), Some(&"a"));
    /// # }
    /// ```
    pub fn get(&self, key: &Key) -> Option<&T> {
        self.timers.get(*key)
    }

    /// A value, to change it, if it is in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert(1, Duration::from_secs(5));
    /// *queue.get_mut(&key).unwrap() += 1;
    /// assert_eq!(queue.remove(&key).into_inner(), 2);
    /// # }
    /// ```
    pub fn get_mut(&mut self, key: &Key) -> Option<&mut T> {
        self.timers.get_mut(*key)
    }

    /// Whether a value is in the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert!(queue.contains(&key));
    /// queue.remove(&key);
    /// assert!(!queue.contains(&key));
    /// # }
    /// ```
    pub fn contains(&self, key: &Key) -> bool {
        self.timers.contains(*key)
    }
}
