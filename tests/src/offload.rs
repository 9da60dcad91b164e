//! What tests of handed-over timeouts share: how programs act at random, and when a timer may end.

use std::{
    collections::VecDeque,
    fs,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CloneFlags, unshare},
    sys::resource::{Resource, getrlimit, setrlimit},
};

use crate::pair::{Connection, Family, Pair};

/// Lets this process have as many descriptors as it may.
///
/// # Errors
///
/// The kernel refuses.
pub fn most_descriptors() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("cannot raise the limit of descriptors")
}

/// Gives this thread descriptors of its own, and opens connections with them. A process may have
/// fewer descriptors than the tests' connections have ends. `turn`: threads open theirs one after
/// the other, because a listener accepts what was opened last.
///
/// # Errors
///
/// A connection cannot be opened.
pub fn connect_apart(pair: &Pair, count: usize, turn: &Mutex<()>) -> Result<Vec<Connection>> {
    unshare(CloneFlags::CLONE_FILES).context("cannot have descriptors of its own")?;
    // Of so few ports as there are by default most would be taken, and the kernel would search for
    // long for one that is not.
    pair.client.enter(|| {
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535")
            .context("cannot have more local ports")
    })?;
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let connections = (0..count).map(|number| pair.connect(Family::alternate(number)));
    connections.collect()
}

/// A seed for [`Random`]: `TWHEEL_SEED`, or else one that differs each time. It is printed, so that
/// it can be given again.
///
/// # Errors
///
/// `TWHEEL_SEED` is no number.
pub fn seed() -> Result<u64> {
    let seed = match std::env::var("TWHEEL_SEED") {
        Ok(seed) => seed.parse().context("TWHEEL_SEED is no number")?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64,
    };
    eprintln!("TWHEEL_SEED={seed}");
    Ok(seed)
}

/// Numbers that look random (Knuth's MMIX).
pub struct Random(pub u64);

impl Random {
    /// The next one, less than `most`.
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    /// From 1 s to 5 min, short ones as often as long ones.
    pub fn timeout(&mut self) -> Duration {
        let seconds = (1 << self.below(10)).min(300);
        Duration::from_millis(1_000 * seconds + self.below(700))
    }
}

/// When something happened: not before the first, not after the second.
pub type When = (Instant, Instant);

/// Lives of a connection that are remembered.
const LIVES: usize = 8;

/// A timer as its program knows it.
#[derive(Debug)]
pub struct Held {
    /// Its timeout.
    pub timeout: Duration,
    /// The connection's latest lives, the latest first.
    lives: VecDeque<When>,
}

impl Held {
    /// A timer that began at this time.
    pub fn new(timeout: Duration, when: When) -> Self {
        let lives = VecDeque::from([when]);
        Self { timeout, lives }
    }

    /// The connection had data.
    pub fn lives(&mut self, when: When) {
        self.lives.truncate(LIVES - 1);
        self.lives.push_front(when);
    }

    /// The timer began anew. What came before no longer counts.
    pub fn restart(&mut self, timeout: Option<Duration>, when: When) {
        *self = Self::new(timeout.unwrap_or(self.timeout), when);
    }

    /// It has expired, as is known now. Returns by how much it is late. `most`: for how long the
    /// event may have been on its way. The connection may have had data again in that time.
    ///
    /// # Errors
    ///
    /// It is early.
    pub fn expired(&self, now: Instant, most: Duration) -> Result<Duration> {
        let (first, last) = self.lives[0];
        if now - first >= self.timeout {
            return Ok(now
                .saturating_duration_since(last)
                .saturating_sub(self.timeout));
        }
        let mut gaps = self.lives.iter().zip(self.lives.iter().skip(1));
        let crossed = gaps.any(|((after, until), (before, _))| {
            now.saturating_duration_since(*after) < most && *until - *before >= self.timeout
        });
        ensure!(
            crossed,
            "early: {:?} of {:?}, {:?}",
            now - first,
            self.timeout,
            self.lives
        );
        Ok(Duration::ZERO)
    }
}

/// What programs have seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Timers that were started.
    pub started: u64,
    /// Times that one began anew.
    pub restarted: u64,
    /// Timers that were stopped.
    pub stopped: u64,
    /// Times that a connection had data.
    pub talked: u64,
    /// Timers that expired.
    pub expired: u64,
    /// By how much one was late, at most.
    pub latest: Duration,
}

impl Seen {
    /// Adds what another has seen.
    pub fn add(&mut self, other: &Self) {
        self.started += other.started;
        self.restarted += other.restarted;
        self.stopped += other.stopped;
        self.talked += other.talked;
        self.expired += other.expired;
        self.latest = self.latest.max(other.latest);
    }

    /// Whether more timers than this will have expired once all have ended, and more than this were
    /// stopped: each of so many programs has done its share.
    pub fn has_done(&self, expired: u64, stopped: u64, programs: u64) -> bool {
        self.started - self.stopped > expired / programs && self.stopped > stopped / programs
    }
}
