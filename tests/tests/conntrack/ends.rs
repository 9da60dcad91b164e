//! Each flow ends when conntrack's entry does.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_getres};
use twheel_common::state::State::{self, *};
use twheel_tests::{ctnetlink::Entry, running::Expiry};

use crate::lab::{HELD_UP, Lab, Life, Name, PATIENCE, SCHEDULING, TICK, name};

impl Lab {
    /// Waits until both trackers have ended all connections. Returns when each ended, by
    /// connection.
    pub fn ends(&self) -> Result<Ended> {
        let mut ends = Ended::new();
        let patience = Instant::now() + PATIENCE;
        let mut empty = false;
        loop {
            let expiries = self.twheel.expiries_until(Instant::now() + TICK)?;
            let (now, time) = (Instant::now(), SystemTime::now());
            for expiry in expiries {
                let stop = time - (now - expiry.at);
                let of = ends.entry(name(expiry.src, expiry.dst)).or_default();
                of.0.push(End { stop, expiry });
            }
            for entry in self.conntrack.destroyed()? {
                let of = ends.entry(name(entry.src, entry.dst)).or_default();
                of.1.push(entry);
            }
            // Reads once more after the last one.
            if empty {
                return Ok(ends);
            }
            let states = self.states()?;
            // conntrack gives this state two minutes, and there is no setting.
            let is_left = |state: &State| *state != SynSent2;
            empty = !states.iter().flat_map(BTreeMap::values).any(is_left);
            ensure!(
                Instant::now() < patience,
                "some connections do not end: {states:?}"
            );
        }
    }

    /// Compares the ends of all connections with the expected ones. Fails with a list of all
    /// differences.
    pub fn compare_ends(self) -> Result<()> {
        let mut ends = self.ends()?;
        let held_up = self.watch.stop();
        let mut wrong = Vec::new();
        for (name, (what, lives)) in self.expected {
            let (ours, theirs) = ends.remove(&name).unwrap_or_default();
            let (mut ours, mut theirs) = (ours.into_iter(), theirs.into_iter());
            for life in lives {
                let ours = life.ours.and_then(|_| ours.next());
                let theirs = life.theirs.and_then(|_| theirs.next());
                let marked = ours.as_ref().is_some_and(|it| it.expiry.picked_up);
                if marked != what.starts_with("picked up") {
                    wrong.push(format!("{what}: marked as picked up: {marked}"));
                }
                if let Err(error) = life.compare(ours.as_ref(), theirs.as_ref(), held_up) {
                    wrong.push(format!("{what}: {error:#}: {ours:?}, {theirs:?}"));
                }
            }
            for more in ours {
                wrong.push(format!("{what}: twheel also reports {more:?}"));
            }
            for more in theirs {
                wrong.push(format!("{what}: conntrack also reports {more:?}"));
            }
        }
        wrong.extend(ends.into_iter().map(|more| format!("unknown: {more:?}")));
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }
}

/// The ends of each connection: twheel's and conntrack's.
type Ended = BTreeMap<Name, (Vec<End>, Vec<Entry>)>;

/// How twheel reports an end.
#[derive(Debug)]
pub struct End {
    stop: SystemTime,
    expiry: Expiry,
}

impl End {
    /// By how many seconds twheel's flow ends later, and begins later, than conntrack's entry.
    pub fn later_than(&self, theirs: &Entry) -> Result<[f64; 2]> {
        let stop = theirs
            .stop
            .context("conntrack reports no time for the end")?;
        let start = self.stop - self.expiry.age;
        Ok([seconds(self.stop, stop), seconds(start, theirs.start)])
    }
}

/// Whether an end that is `later` counts as on time if the CPUs were held up for `held_up`: either
/// tracker, and this test, may have been held up.
pub fn is_on_time(later: f64, held_up: Duration) -> bool {
    let held_up = 2 * held_up.min(HELD_UP);
    // Both clocks have a resolution of one jiffy.
    let jiffy = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map(Duration::from);
    let early = 2 * jiffy.unwrap_or_default() + held_up;
    let late = TICK + SCHEDULING + held_up;
    (-early.as_secs_f64()..=late.as_secs_f64()).contains(&later)
}

impl Life {
    fn compare(&self, ours: Option<&End>, theirs: Option<&Entry>, held_up: Duration) -> Result<()> {
        let found = ours.map(|it| (&*it.expiry.reason, &*it.expiry.state));
        let name = |state: State| {
            if self.unreplied {
                "unreplied"
            } else {
                state.name()
            }
        };
        let wanted = self.ours.map(|(reason, state)| (reason, name(state)));
        ensure!(found == wanted, "twheel reports {found:?}, not {wanted:?}");
        let found = theirs.and_then(|it| it.state);
        ensure!(
            found == self.theirs,
            "conntrack reports {found:?}, not {:?}",
            self.theirs
        );
        let (Some(ours), Some(theirs)) = (ours, theirs) else {
            return Ok(());
        };
        let [ends, begins] = ours.later_than(theirs)?;
        ensure!(
            is_on_time(ends - self.later, held_up),
            "twheel's flow ends {ends:.3} s later, not {}",
            self.later
        );
        ensure!(
            is_on_time(begins, held_up) || self.started_apart,
            "twheel's flow begins {begins:.3} s later"
        );
        Ok(())
    }
}

/// Seconds from one time to the other; negative if the first is the later one.
pub fn seconds(a: SystemTime, b: SystemTime) -> f64 {
    match a.duration_since(b) {
        Ok(later) => later.as_secs_f64(),
        Err(error) => -error.duration().as_secs_f64(),
    }
}
