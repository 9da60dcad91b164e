//! A value that has come out of the queue.

use tokio::time::Instant;

use crate::slab::Key;

/// A value whose time has come.
///
/// ```
/// use std::time::Duration;
/// use twheel_timers::{DelayQueue, delay_queue::Expired};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let mut queue = DelayQueue::new();
/// let key = queue.insert("a", Duration::from_secs(5));
/// let expired: Expired<&str> = queue.next_expired().await.unwrap();
/// assert_eq!((expired.key(), expired.get_ref()), (key, &"a"));
/// # }
/// ```
#[derive(Debug)]
pub struct Expired<T> {
    pub(super) key: Key,
    pub(super) value: T,
    pub(super) deadline: Instant,
}

impl<T> Expired<T> {
    /// The value.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.next_expired().await.unwrap().get_ref(), &"a");
    /// # }
    /// ```
    pub fn get_ref(&self) -> &T {
        &self.value
    }

    /// The value, to change it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// queue.insert(vec!["a"], Duration::from_secs(5));
    /// let mut expired = queue.next_expired().await.unwrap();
    /// expired.get_mut().push("b");
    /// assert_eq!(expired.into_inner(), ["a", "b"]);
    /// # }
    /// ```
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.value
    }

    /// The value, by value.
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
    pub fn into_inner(self) -> T {
        self.value
    }

    /// When it was due.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let due = Instant::now() + Duration::from_secs(5);
    /// queue.insert_at("a", due);
    /// assert_eq!(queue.next_expired().await.unwrap().deadline(), due);
    /// # }
    /// ```
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The key that it had. Stale from now on.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tokio::time::Instant;
    /// # use twheel_timers::DelayQueue;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// # let mut queue = DelayQueue::new();
    /// let key = queue.insert("a", Duration::from_secs(5));
    /// assert_eq!(queue.next_expired().await.unwrap().key(), key);
    /// assert!(queue.try_remove(&key).is_none());
    /// # }
    /// ```
    pub fn key(&self) -> Key {
        self.key
    }
}
