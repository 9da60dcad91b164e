//! Each scheme compared with a sorted map of deadlines.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use twheel_timers::{ById, Expiring, LAST_TICK, Netty, NettyWheel, Timeout};

use crate::{Boxed, Random, cases};

/// Anything that manages timers with ids.
trait Subject {
    fn start(&mut self, now: u64, interval: u64, id: u32) -> bool;
    fn stop(&mut self, id: u32) -> bool;
    fn tick(&mut self, now: u64, budget: usize) -> bool;
    fn expired(&mut self) -> Option<(u32, u64)>;
    /// The tick that it has reached; it may be in the middle of a turn.
    fn elapsed(&self) -> u64;
    /// The tick to come back at, if the scheme gives one.
    fn next_tick(&self) -> Option<Option<u64>>;
    fn time_left(&self, now: u64, id: u32) -> Option<Option<u64>>;
    /// Whether timers may be started in the middle of a turn; `elapsed` then tells what their
    /// intervals count from.
    const PAUSES: bool = true;
}

impl Subject for ById<u32, Boxed<u32>> {
    fn start(&mut self, now: u64, interval: u64, id: u32) -> bool {
        ById::insert(self, now, interval, id).unwrap()
    }
    fn stop(&mut self, id: u32) -> bool {
        ById::remove(self, &id)
    }
    fn tick(&mut self, now: u64, budget: usize) -> bool {
        ById::advance(self, now, budget)
    }
    fn expired(&mut self) -> Option<(u32, u64)> {
        ById::pop_expired(self)
    }
    fn elapsed(&self) -> u64 {
        self.scheme().elapsed()
    }
    fn next_tick(&self) -> Option<Option<u64>> {
        Some(self.scheme().next_tick())
    }
    fn time_left(&self, now: u64, id: u32) -> Option<Option<u64>> {
        Some(ById::time_left(self, now, &id))
    }
}

struct NettySubject {
    front: Netty<u32>,
    wheel: NettyWheel<u32>,
    timeouts: HashMap<u32, Timeout>,
}

impl Subject for NettySubject {
    fn start(&mut self, now: u64, interval: u64, id: u32) -> bool {
        let timeout = self.front.insert(now, interval, id).unwrap();
        let before = self.timeouts.insert(id, timeout);
        before.is_some_and(|timeout| timeout.cancel())
    }
    fn stop(&mut self, id: u32) -> bool {
        self.timeouts.remove(&id).is_some_and(|it| it.cancel())
    }
    fn tick(&mut self, now: u64, budget: usize) -> bool {
        self.wheel.advance(now, budget)
    }
    fn expired(&mut self) -> Option<(u32, u64)> {
        let expired = self.wheel.pop_expired()?;
        Some((expired.value, expired.deadline))
    }
    fn elapsed(&self) -> u64 {
        self.wheel.elapsed()
    }
    fn next_tick(&self) -> Option<Option<u64>> {
        None
    }
    fn time_left(&self, _now: u64, _id: u32) -> Option<Option<u64>> {
        None
    }
    const PAUSES: bool = false;
}

/// The armed timers, by deadline and by id.
#[derive(Default)]
struct Oracle {
    deadlines: BTreeMap<u64, BTreeSet<u32>>,
    armed: HashMap<u32, u64>,
}

impl Oracle {
    fn start(&mut self, when: u64, id: u32) -> bool {
        let armed = self.stop(id);
        self.deadlines.entry(when).or_default().insert(id);
        self.armed.insert(id, when);
        armed
    }

    fn stop(&mut self, id: u32) -> bool {
        let Some(when) = self.armed.remove(&id) else {
            return false;
        };
        let ids = self.deadlines.get_mut(&when).unwrap();
        ids.remove(&id);
        if ids.is_empty() {
            self.deadlines.remove(&when);
        }
        true
    }

    fn first(&self) -> Option<u64> {
        self.deadlines.first_key_value().map(|(when, _)| *when)
    }
}

/// Operations on each scheme in a test.
fn operations() -> u64 {
    let is_long = std::env::var_os("TWHEEL_LONG").is_some();
    if is_long { 3_000_000 } else { 120_000 }
}

/// Random starts, restarts, stops, ticks and jumps, from tick `begin` on. Each timer must fire at
/// exactly the oracle's tick, and all in order.
fn compare<S: Subject>(
    name: &str,
    [range, reach]: [u64; 2],
    begin: u64,
    operations: u64,
    subject: &mut S,
) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ begin);
    let mut oracle = Oracle::default();
    let mut now = begin;
    while !subject.tick(begin, 1_000) {}
    // Whether a turn of the driver is unfinished.
    let mut paused = false;
    let mut fired = 0;
    for operation in 0..operations {
        let at = || format!("{name}, from {begin}, operation {operation}");
        match random.below(10) {
            0..5 => {
                let id = random.below(300) as u32;
                let interval = match random.below(8) {
                    0 => random.interval(range),
                    _ => random.interval(range.min(reach)),
                };
                // The client's clock may be ahead of the driver's, or behind it.
                let client = match random.below(8) {
                    0 => now + random.below(20),
                    1 => now.saturating_sub(random.below(20)),
                    _ => now,
                };
                let soonest = subject.elapsed() + 1;
                let when = client.saturating_add(interval).min(LAST_TICK).max(soonest);
                let armed = subject.start(client, interval, id);
                assert_eq!(armed, oracle.start(when, id), "start {id}, {}", at());
                let left = subject.time_left(now, id);
                assert!(left.is_none_or(|left| left == Some(when.saturating_sub(now))));
            }
            5 | 6 => {
                let id = random.below(300) as u32;
                assert_eq!(subject.stop(id), oracle.stop(id), "stop {id}, {}", at());
                assert!(subject.time_left(now, id).is_none_or(|left| left.is_none()));
            }
            _ => {
                if !paused {
                    now += match random.below(40) {
                        0 => random.below(1 << 14).min(reach),
                        1 => random.interval(reach),
                        2 => oracle
                            .first()
                            .map_or(0, |first| first.saturating_sub(now).min(reach)),
                        3..10 => random.below(100),
                        10..15 => 0,
                        _ => 1,
                    };
                }
                let budget = [1, 2, 7, 1_000][random.below(4) as usize];
                loop {
                    let done = subject.tick(now, budget);
                    // Sometimes, some of the due timers stay where clients can still stop them.
                    let leave = S::PAUSES && random.below(4) == 0;
                    while !(leave && random.below(3) == 0) {
                        let Some((id, deadline)) = subject.expired() else {
                            break;
                        };
                        fired += 1;
                        assert!(deadline <= subject.elapsed(), "{id} is early, {}", at());
                        assert_eq!(oracle.armed.get(&id), Some(&deadline), "{id}, {}", at());
                        assert_eq!(oracle.first(), Some(deadline), "order, {}", at());
                        oracle.stop(id);
                    }
                    paused = !done;
                    if !leave {
                        // Timers of the present tick may be left, but none of earlier ticks.
                        let reached = subject.elapsed() + u64::from(done);
                        let late = oracle.first().filter(|first| *first < reached);
                        assert_eq!(late, None, "too late, {}", at());
                    }
                    if done || S::PAUSES && random.below(3) == 0 {
                        break;
                    }
                }
            }
        }
        if let Some(next) = subject.next_tick() {
            assert_eq!(next.is_none(), oracle.armed.is_empty(), "{}", at());
            // Due timers that were not handed out are due now, whatever their deadline.
            let first = oracle.first().map(|first| first.max(subject.elapsed()));
            assert!(next <= first, "hint {next:?} after {first:?}, {}", at());
        }
    }
    assert!(
        fired > operations / 50,
        "{name}: only {fired} timers have fired"
    );
}

/// With the last two, the ticks pass the point where 32 bits wrap around, and need more than 32
/// bits.
const BEGINS: [u64; 4] = [0, 7, (1 << 32) - 500, (1 << 61) + 12_345];

#[test]
fn fire_what_a_sorted_map_fires_at_the_same_ticks() {
    for begin in BEGINS {
        for case in cases() {
            let mut subject = ById::new(case.scheme);
            let operations = operations() / BEGINS.len() as u64;
            let limits = [case.range, case.reach];
            compare(case.name, limits, begin, operations, &mut subject);
        }
    }
}

#[test]
fn netty_fires_what_a_sorted_map_fires_at_the_same_ticks() {
    for begin in BEGINS {
        for slots in [1, 8, 1_000] {
            let (front, wheel) = Netty::pair(slots, 10_000).unwrap();
            let mut subject = NettySubject {
                front,
                wheel,
                timeouts: HashMap::new(),
            };
            let operations = operations() / BEGINS.len() as u64;
            let limits = [u64::MAX, u64::from(slots) << 6];
            compare("netty", limits, begin, operations, &mut subject);
        }
    }
}

#[test]
fn expiring_fires_what_a_sorted_map_fires() {
    let mut random = Random(8);
    let tick = Duration::from_millis(1);
    let mut wheel = Expiring::new(64 * tick, tick).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let sink = heard.clone();
    wheel.add_listener(move |id: &u32| sink.lock().unwrap().push(*id));
    let mut oracle = Oracle::default();
    let mut now = 0;
    for _ in 0..operations() {
        let id = random.below(200) as u32;
        match random.below(8) {
            0..3 => {
                wheel.insert(now, id).unwrap();
                oracle.start(now + 64, id);
            }
            3 | 4 => {
                let timeout = random.below(64) + 1;
                wheel.insert_with(now, id, timeout).unwrap();
                oracle.start(now + timeout, id);
            }
            5 => assert_eq!(wheel.remove(&id), oracle.stop(id)),
            _ => {
                now += 1 + random.below(5) / 4 * random.below(100);
                while !wheel.advance(now, 3) {}
                for id in std::mem::take(&mut *heard.lock().unwrap()) {
                    let first = oracle.first().unwrap();
                    assert!(first <= now && oracle.armed[&id] == first);
                    oracle.stop(id);
                }
                assert!(oracle.first().is_none_or(|first| first > now));
            }
        }
    }
}
