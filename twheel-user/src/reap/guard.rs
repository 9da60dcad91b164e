//! Limits on how many flows are reaped, and how fast. No I/O: the time is an argument.

use std::{collections::VecDeque, time::Duration};

/// The time within which the reaped share is counted.
const WINDOW: Duration = Duration::from_secs(60);
/// How much unused time a burst of actions may use up.
const BURST: Duration = Duration::from_millis(100);
/// So few flows within [`WINDOW`] never trip the guard: they are no sign of a wrong policy.
const FEW: u64 = 10;

/// Stops a policy that would reap too large a share of the live flows.
#[derive(Debug)]
pub struct Guard {
    /// The largest share, 0 to 1.
    share: f64,
    /// Each second in which flows were reaped, and how many, oldest first; at most the seconds of
    /// [`WINDOW`].
    seconds: VecDeque<(u64, u64)>,
    reaped: u64,
    tripped: bool,
}

impl Guard {
    /// A guard that lets this share of the live flows, 0 to 1, be reaped within a minute.
    pub fn new(share: f64) -> Self {
        Self {
            share,
            seconds: VecDeque::new(),
            reaped: 0,
            tripped: false,
        }
    }

    /// Asks to reap one more flow, after which `live` flows are left. Once that would be too many,
    /// the answer is no until [`reset`](Self::reset).
    pub fn admit(&mut self, now: Duration, live: u64) -> bool {
        if self.tripped {
            return false;
        }
        let second = now.as_secs();
        while let Some((oldest, count)) = self.seconds.front()
            && oldest + WINDOW.as_secs() <= second
        {
            self.reaped -= count;
            self.seconds.pop_front();
        }
        let reaped = self.reaped + 1;
        // The share is of the flows that were live a minute ago. That number is estimated as those
        // reaped since then, and those that are left.
        if reaped > FEW && reaped as f64 > self.share * (self.reaped + 1 + live) as f64 {
            self.tripped = true;
            return false;
        }
        self.reaped = reaped;
        match self.seconds.back_mut() {
            Some((latest, count)) if *latest == second => *count += 1,
            _ => self.seconds.push_back((second, 1)),
        }
        true
    }

    /// Whether the guard has stopped the reaping.
    pub fn is_tripped(&self) -> bool {
        self.tripped
    }

    /// Starts anew: nothing was reaped.
    pub fn reset(&mut self) {
        *self = Self::new(self.share);
    }
}

/// Spreads actions over time.
#[derive(Debug)]
pub struct Pace {
    /// Time between two actions; `None`: no limit.
    gap: Option<Duration>,
    /// When the next action is due, before unused time is taken into account.
    next: Duration,
}

impl Pace {
    /// At most this many actions per second; `None`: no limit.
    pub fn new(a_second: Option<u32>) -> Self {
        Self {
            gap: a_second.map(|rate| Duration::from_secs(1) / rate.max(1)),
            next: Duration::ZERO,
        }
    }

    /// Takes the next turn. Returns how long to wait for it.
    pub fn turn(&mut self, now: Duration) -> Duration {
        let Some(gap) = self.gap else {
            return Duration::ZERO;
        };
        // Turns that a sleeping thread has missed may be taken at once.
        let burst = BURST.saturating_sub(gap);
        let turn = self.next.max(now.saturating_sub(burst));
        self.next = turn + gap;
        turn.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn a_share_of_the_living_is_reaped_and_no_more() {
        // There are 1000 flows at first, and fewer as they are reaped.
        let mut guard = Guard::new(0.2);
        let reaped = (0..1000)
            .take_while(|reaped| guard.admit(seconds(0), 999 - reaped))
            .count();
        assert_eq!(reaped, 200);
        assert!(guard.is_tripped());
        // The guard stays tripped until it is reset.
        assert!(!guard.admit(seconds(10_000), 1_000_000));
        guard.reset();
        assert!(guard.admit(seconds(10_000), 1_000_000));
    }

    #[test]
    fn the_share_is_that_of_a_minute() {
        let mut guard = Guard::new(0.2);
        for minute in 0..10 {
            for flow in 0..200 {
                let now = seconds(60 * minute + flow / 4);
                assert!(guard.admit(now, 999 - flow), "{minute} {flow}");
            }
        }
        assert!(!guard.admit(seconds(9 * 60 + 59), 799));
    }

    #[test]
    fn a_few_are_always_reaped() {
        let mut guard = Guard::new(0.2);
        for _ in 0..FEW {
            assert!(guard.admit(seconds(0), 0));
        }
        assert!(!guard.admit(seconds(0), 0));
        let mut all = Guard::new(1.0);
        assert!((0..100_000).all(|left| all.admit(seconds(0), 99_999 - left)));
    }

    #[test]
    fn actions_are_spread() {
        let mut pace = Pace::new(Some(10));
        let now = seconds(100);
        let waits: Vec<_> = (0..13).map(|_| pace.turn(now).as_millis()).collect();
        assert_eq!(waits[..4], [0, 100, 200, 300]);
        // In ten seconds, ten seconds' worth of actions and at most a burst more.
        let mut pace = Pace::new(Some(1000));
        let mut now = seconds(1);
        let mut done = 0;
        while now < seconds(11) {
            now += pace.turn(now);
            done += 1;
        }
        assert!((10_000..=10_101).contains(&done), "{done}");
        assert!((0..1000).all(|_| Pace::new(None).turn(now).is_zero()));
    }
}
