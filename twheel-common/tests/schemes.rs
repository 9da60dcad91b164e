//! All schemes against a sorted map of deadlines, and one test for each bug that earlier wheels had.
#![allow(missing_docs)]

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use twheel_common::schemes::{
    ById, End, Error, Expiring, Growing, Hashed, HashedOrdered, Heap, Hierarchical, LAST_TICK,
    Netty, NettyWheel, Ordered, Scheme, Simple, TRANSFERS_PER_TICK, Timeout, Timers, Unordered,
    ticks,
};

type Boxed<T> = Box<dyn Scheme<T> + Send>;

/// A scheme, and what a test should know of it.
struct Case<T> {
    name: &'static str,
    /// The longest interval it takes.
    range: u64,
    /// Ticks that it takes at a time without going round very often.
    reach: u64,
    /// log2 of the slots of a level.
    bits: u32,
    scheme: Boxed<T>,
}

fn cases<T: Send + 'static>() -> Vec<Case<T>> {
    let case = |name, range, reach, bits, scheme| Case {
        name,
        range,
        reach,
        bits,
        scheme,
    };
    let hashed = |slots| Box::new(Timers::new(Hashed::new(slots).unwrap()));
    let hashed_ordered = |slots| Box::new(Timers::new(HashedOrdered::new(slots).unwrap()));
    let simple = |slots| Box::new(Timers::new(Simple::new(slots).unwrap()));
    let levels = |m, slots| Box::new(Timers::new(Hierarchical::new(m, slots).unwrap()));
    let ticked = |slots| Box::new(Timers::new(Growing::ticked(slots).unwrap()));
    let skipping = |slots| Box::new(Timers::new(Growing::skipping(slots).unwrap()));
    let ordered = |end| Box::new(Timers::new(Ordered::new(end)));
    let (any, far) = (u64::MAX, 1 << 41);
    vec![
        case(
            "1 unordered",
            any,
            far,
            8,
            Box::new(Timers::new(Unordered::new())),
        ),
        case(
            "2 ordered, from the front",
            any,
            far,
            8,
            ordered(End::Front),
        ),
        case("2 ordered, from the rear", any, far, 8, ordered(End::Rear)),
        case("3 heap", any, far, 8, Box::new(Timers::new(Heap::new()))),
        case("4 simple, 2 slots", 1, 1 << 7, 1, simple(2)),
        case("4 simple, 64 slots", 63, 1 << 12, 6, simple(64)),
        case(
            "4 simple, 2^17 slots",
            (1 << 17) - 1,
            1 << 23,
            17,
            simple(1 << 17),
        ),
        case(
            "5 hashed ordered, 1 slot",
            any,
            1 << 7,
            1,
            hashed_ordered(1),
        ),
        case(
            "5 hashed ordered, 64 slots",
            any,
            1 << 12,
            6,
            hashed_ordered(64),
        ),
        case("6 hashed, 1 slot", any, 1 << 7, 1, hashed(1)),
        case("6 hashed, 2 slots", any, 1 << 7, 1, hashed(2)),
        case("6 hashed, 256 slots", any, 1 << 14, 8, hashed(256)),
        case("6 hashed, 2^17 slots", any, 1 << 23, 17, hashed(1 << 17)),
        case("7 hierarchical, 1 level of 2", any, 1 << 7, 1, levels(1, 2)),
        case(
            "7 hierarchical, 4 levels of 2",
            any,
            1 << 10,
            1,
            levels(4, 2),
        ),
        case(
            "7 hierarchical, 3 levels of 8",
            any,
            1 << 15,
            3,
            levels(3, 8),
        ),
        case(
            "7 hierarchical, 3 levels of 1024",
            any,
            1 << 36,
            10,
            levels(3, 1024),
        ),
        case(
            "7 hierarchical, 4 levels of 4096",
            any,
            far,
            12,
            levels(4, 4096),
        ),
        case("7 growing, ticked, 2 slots", any, far, 1, ticked(2)),
        case("7 growing, ticked, 64 slots", any, far, 6, ticked(64)),
        case("7 growing, skipping, 2 slots", any, far, 1, skipping(2)),
        case("7 growing, skipping, 16 slots", any, far, 4, skipping(16)),
        case(
            "7 growing, skipping, 2^20 slots",
            any,
            far,
            20,
            skipping(1 << 20),
        ),
    ]
}

/// xorshift64*: the tests are the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        // The upper half is the better one.
        (self.next() >> 16) % bound
    }

    /// Of any magnitude, and often at a power of two, give or take one.
    fn interval(&mut self, range: u64) -> u64 {
        let magnitude = 1 << self.below(41);
        let interval = match self.below(4) {
            0 => magnitude + self.below(3) - 1,
            1 => self.below(200),
            2 => self.below(5_000),
            _ => self.below(magnitude),
        };
        if interval <= range {
            interval
        } else {
            range - self.below(range.min(2) + 1)
        }
    }
}

/// Anything that has timers with ids.
trait Subject {
    fn start(&mut self, now: u64, interval: u64, id: u32) -> bool;
    fn stop(&mut self, id: u32) -> bool;
    fn tick(&mut self, now: u64, budget: usize) -> bool;
    fn expired(&mut self) -> Option<(u32, u64)>;
    /// The tick it has come to, while a turn is not at its end.
    fn elapsed(&self) -> u64;
    /// The tick to come back at, if it says so.
    fn next_tick(&self) -> Option<Option<u64>>;
    fn time_left(&self, now: u64, id: u32) -> Option<Option<u64>>;
    /// Whether starts may come while a turn is not at its end, and `elapsed` tells what they mean.
    const PAUSES: bool = true;
}

impl Subject for ById<u32, Boxed<u32>> {
    fn start(&mut self, now: u64, interval: u64, id: u32) -> bool {
        ById::start(self, now, interval, id).unwrap()
    }
    fn stop(&mut self, id: u32) -> bool {
        ById::stop(self, &id)
    }
    fn tick(&mut self, now: u64, budget: usize) -> bool {
        ById::tick(self, now, budget)
    }
    fn expired(&mut self) -> Option<(u32, u64)> {
        ById::expired(self)
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
        let timeout = self.front.start(now, interval, id).unwrap();
        let before = self.timeouts.insert(id, timeout);
        before.is_some_and(|timeout| timeout.cancel())
    }
    fn stop(&mut self, id: u32) -> bool {
        self.timeouts.remove(&id).is_some_and(|it| it.cancel())
    }
    fn tick(&mut self, now: u64, budget: usize) -> bool {
        self.wheel.tick(now, budget)
    }
    fn expired(&mut self) -> Option<(u32, u64)> {
        let expired = self.wheel.expired()?;
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

/// What is armed, by deadline and by id.
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
    let exhaustive = std::env::var_os("TWHEEL_EXHAUSTIVE").is_some();
    if exhaustive { 3_000_000 } else { 120_000 }
}

/// Random starts, re-starts, stops, ticks and jumps, from tick `begin` on. Each timer is to fire at
/// the very tick that the oracle says, and all in order.
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
    // A turn of the driver that has not come to its end.
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
                // The client's clock may be ahead of the driver, or behind it.
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
                    // Now and then, some of what is due stays where clients can still stop it.
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
                        // Of the tick that is under way some may be left, of those before none.
                        let reached = subject.elapsed() + u64::from(done);
                        let late = oracle.first().filter(|first| *first < reached);
                        assert_eq!(late, None, "late, {}", at());
                    }
                    if done || S::PAUSES && random.below(3) == 0 {
                        break;
                    }
                }
            }
        }
        if let Some(next) = subject.next_tick() {
            assert_eq!(next.is_none(), oracle.armed.is_empty(), "{}", at());
            // What was found due and not handed out is due now, whatever its deadline.
            let first = oracle.first().map(|first| first.max(subject.elapsed()));
            assert!(next <= first, "hint {next:?} after {first:?}, {}", at());
        }
    }
    assert!(fired > operations / 50, "{name}: only {fired} have fired");
}

/// The last two: the tick at which 32 bits wrap lies in the way; ticks that need more bits.
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

/// Drives up to `now` without a budget worth mentioning; what fires, with its deadlines.
fn drive<T>(scheme: &mut Boxed<T>, now: u64) -> Vec<(T, u64)> {
    let mut fired = Vec::new();
    loop {
        let done = scheme.per_tick_bookkeeping(now, 1_000);
        while let Some(timer) = scheme.expiry_processing() {
            fired.push((timer.value, timer.deadline));
        }
        if done {
            return fired;
        }
    }
}

#[test]
fn every_slot_edge_of_every_level() {
    let bits: BTreeSet<u32> = cases::<u32>().iter().map(|case| case.bits).collect();
    for bits in bits {
        let spans: Vec<u64> = (0..=5)
            .map(|level| level * bits)
            .filter(|shift| *shift < 50)
            .map(|shift| 1 << shift)
            .collect();
        let begins = spans.iter().flat_map(|span| {
            let slots = 1 << bits;
            [span - 1, *span, span + 1, (slots - 1) * span, 5 * span - 1]
        });
        for begin in begins.chain([(1 << 32) - 1, 1 << 32]) {
            for case in cases().iter_mut().filter(|case| case.bits == bits) {
                let Case { name, scheme, .. } = case;
                let farthest = case.range.min(case.reach);
                assert_eq!(drive(scheme, begin), []);
                // All of them armed at once, then one by one: early, due, and gone.
                let mut expected = BTreeSet::new();
                for span in &spans {
                    for edge in [1, 2, (1 << bits) - 1, 1 << bits, (1 << bits) + 1] {
                        for when in [edge * span - 1, edge * span, edge * span + 1] {
                            for when in [when, begin + when] {
                                let interval = when.saturating_sub(begin).min(farthest);
                                let due = begin + interval.max(1);
                                if expected.insert(due) {
                                    scheme.start_timer(begin, interval, due).unwrap();
                                }
                            }
                        }
                    }
                }
                for due in expected {
                    assert_eq!(drive(scheme, due - 1), [], "{name}: {due} from {begin}");
                    let fired = drive(scheme, due);
                    assert_eq!(fired, [(due, due)], "{name}: {due} from {begin}");
                }
                assert!(scheme.is_empty());
            }
        }
    }
}

#[test]
fn a_deadline_already_past_has_the_next_tick() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        drive(&mut scheme, 1_000);
        for now in [0, 999, 1_000] {
            scheme.start_timer(now, 0, now).unwrap();
        }
        assert_eq!(drive(&mut scheme, 1_000), [], "{name}");
        assert_eq!(drive(&mut scheme, 1_001).len(), 3, "{name}");
    }
}

#[test]
fn a_huge_delay_does_not_overflow() {
    for Case {
        name,
        range,
        mut scheme,
        ..
    } in cases()
    {
        if range < u64::MAX {
            continue;
        }
        drive(&mut scheme, 12_345);
        scheme.start_timer(12_345, u64::MAX, 'a').unwrap();
        scheme.start_timer(u64::MAX, u64::MAX, 'b').unwrap();
        scheme.start_timer(12_345, LAST_TICK, 'c').unwrap();
        let near = scheme.start_timer(12_345, 5, 'd').unwrap();
        assert!(scheme.restart_timer(near, 12_345, u64::MAX).unwrap());
        scheme.start_timer(12_345, 5, 'e').unwrap();
        assert_eq!(drive(&mut scheme, 20_000), [('e', 12_350)], "{name}");
        // A hashed wheel of one slot visits them every tick, so it cannot go the whole way.
        if !name.starts_with(['5', '6']) && !name.contains("hierarchical") {
            assert_eq!(drive(&mut scheme, LAST_TICK - 1), [], "{name}");
            assert_eq!(drive(&mut scheme, u64::MAX).len(), 4, "{name}");
            // There is no tick after the last: nothing fires, and nothing breaks.
            scheme.start_timer(u64::MAX, 1, 'f').unwrap();
            assert_eq!(drive(&mut scheme, u64::MAX), [], "{name}");
        }
    }
}

#[test]
fn a_timer_added_again_inside_its_own_expiry_waits_for_the_next_tick() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        scheme.start_timer(0, 1, 0).unwrap();
        for tick in 1..=100 {
            while !scheme.per_tick_bookkeeping(tick, 1) {}
            let mut fired = 0;
            while let Some(timer) = scheme.expiry_processing() {
                assert_eq!(timer.deadline, tick, "{name}");
                fired += 1;
                // At once, and with a bookkeeping of the same tick.
                scheme.start_timer(tick, tick % 2, timer.value + 1).unwrap();
                assert!(scheme.per_tick_bookkeeping(tick, 1_000), "{name}");
            }
            assert_eq!(fired, 1, "{name}");
        }
    }
}

#[test]
fn a_late_tick_catches_up_in_order() {
    for Case {
        name,
        range,
        reach,
        mut scheme,
        ..
    } in cases()
    {
        let mut random = Random(5);
        for id in 0..1_000 {
            scheme
                .start_timer(0, random.interval(range.min(reach)), id)
                .unwrap();
        }
        let fired = drive(&mut scheme, 2 * reach);
        assert_eq!(fired.len(), 1_000, "{name}");
        assert!(fired.is_sorted_by_key(|(_, deadline)| *deadline), "{name}");
    }
}

#[test]
fn a_hint_sees_all_levels() {
    for Case {
        name,
        range,
        mut scheme,
        ..
    } in cases()
    {
        // Whoever sleeps until the hint each time misses nothing.
        let mut random = Random(6);
        let mut expected = BTreeSet::new();
        // A wheel of one slot hints at every tick.
        let range = range.min(100_000);
        for _ in 0..200 {
            let interval = random.below(range) + 1;
            if expected.insert(interval) {
                scheme.start_timer(0, interval, interval).unwrap();
            }
        }
        let (mut fired, mut wakes) = (Vec::new(), 0);
        while let Some(next) = scheme.next_tick() {
            assert!(next > scheme.elapsed(), "{name}");
            assert_eq!(drive(&mut scheme, next - 1), [], "{name}: the hint is late");
            fired.extend(drive(&mut scheme, next).into_iter().map(|(id, _)| id));
            wakes += 1;
        }
        assert!(fired.iter().eq(expected.iter()), "{name}");
        if name.contains("skipping") || name.contains("hierarchical, 3 levels of 1024") {
            assert!(wakes <= 17 * expected.len(), "{name}: {wakes} wake-ups");
        }
    }
}

#[test]
fn a_hint_within_the_first_level_is_the_deadline() {
    for case in cases() {
        let mut scheme = case.scheme;
        if case.name.contains("unordered") || case.name.contains("ticked") {
            // They are to come every tick.
            continue;
        }
        for interval in 1..1 << case.bits.min(10) {
            let now = scheme.elapsed();
            // Of two slots, another level may begin in between.
            let timer = scheme.start_timer(now, interval, ()).unwrap();
            let level = case.name.starts_with('7') && (now ^ (now + interval)) >> case.bits > 0;
            if !level && case.range >= interval && !case.name.ends_with(", 1 slot") {
                assert_eq!(scheme.next_tick(), Some(now + interval), "{}", case.name);
            }
            scheme.stop_timer(timer);
            drive(&mut scheme, now + 1);
        }
    }
}

#[test]
fn an_idle_skipping_wheel_is_not_woken() {
    let mut scheme = Timers::new(Growing::skipping(16).unwrap());
    assert_eq!(scheme.next_tick(), None);
    let far = scheme.start_timer(0, 1 << 30, ()).unwrap();
    assert_eq!(scheme.structure().levels(), 8);
    // The first slot that is not empty is that of the timer itself.
    assert_eq!(scheme.next_tick(), Some(1 << 30));
    scheme.stop_timer(far);
    assert_eq!(
        scheme.next_tick(),
        None,
        "a slot that was emptied does not count"
    );
}

#[test]
fn levels_come_when_they_are_needed() {
    let mut scheme = Timers::new(Growing::ticked(16).unwrap());
    for (interval, levels) in [(15, 1), (16, 2), (255, 2), (256, 3), (4_096, 4), (20, 4)] {
        scheme.start_timer(0, interval, ()).unwrap();
        assert_eq!(scheme.structure().levels(), levels);
    }
    scheme.start_timer(0, u64::MAX, ()).unwrap();
    assert_eq!(scheme.structure().levels(), 16);
}

#[test]
fn a_stop_during_expiry_has_its_way() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        let timers: Vec<_> = (0..3)
            .map(|id| scheme.start_timer(0, 1, id).unwrap())
            .collect();
        while !scheme.per_tick_bookkeeping(1, 1) {}
        let first = scheme.expiry_processing().unwrap();
        let second = timers[(first.value + 1) % 3];
        let third = (first.value + 2) % 3;
        // Found due, but not handed out: it can still be stopped or moved, one of its fellows too.
        assert_eq!(
            scheme.stop_timer(second),
            Some((first.value + 1) % 3),
            "{name}"
        );
        assert_eq!(
            scheme.restart_timer(timers[third], 1, 1),
            Ok(true),
            "{name}"
        );
        assert_eq!(scheme.expiry_processing(), None, "{name}");
        // What was handed out or stopped is gone.
        assert_eq!(scheme.stop_timer(first.timer), None, "{name}");
        assert_eq!(scheme.restart_timer(second, 1, 1), Ok(false), "{name}");
        assert_eq!(drive(&mut scheme, 2), [(third, 2)], "{name}");
    }
}

#[test]
fn a_budget_bounds_a_tick() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        // All at one tick, in whatever level that is.
        for id in 0..1_000 {
            scheme.start_timer(0, 1, id).unwrap();
        }
        let (mut calls, mut fired) = (0, 0);
        loop {
            let done = scheme.per_tick_bookkeeping(1, 10);
            let found = std::iter::from_fn(|| scheme.expiry_processing()).count();
            assert!(found <= 10, "{name}: {found}");
            (calls, fired) = (calls + 1, fired + found);
            if done {
                break;
            }
        }
        assert_eq!(fired, 1_000, "{name}");
        assert!((100..=102).contains(&calls), "{name}: {calls} calls");
    }
}

#[test]
fn a_flood_of_starts_does_not_keep_what_is_due_from_firing() {
    const BUDGET: u64 = 100;
    for Case {
        name, mut scheme, ..
    } in cases()
        .into_iter()
        .filter(|case| case.bits >= 6 && !case.name.starts_with(['1', '2']))
    {
        for id in 0..10 {
            scheme.start_timer(0, 5 + id, id).unwrap();
        }
        let mut fired = Vec::new();
        // As many starts as there are looks: it cannot keep up, and must not stop.
        for now in 1..=100 {
            for _ in 0..BUDGET {
                scheme.start_timer(now, 40, 1_000).unwrap();
            }
            scheme.per_tick_bookkeeping(now, BUDGET as usize);
            let due = std::iter::from_fn(|| scheme.expiry_processing());
            fired.extend(due.map(|timer| timer.value).filter(|id| *id < 1_000));
        }
        assert_eq!(fired, Vec::from_iter(0..10), "{name}");
        assert!(scheme.elapsed() >= 20, "{name}: {}", scheme.elapsed());
    }
}

#[test]
fn a_flood_of_starts_into_the_slot_under_the_hand_comes_to_an_end() {
    const BUDGET: u64 = 100;
    for Case {
        name,
        mut scheme,
        bits,
        ..
    } in cases().into_iter().filter(|case| {
        case.bits >= 6 && case.range >= 63 && !case.name.starts_with(['1', '2', '3'])
    }) {
        for id in 0..10 {
            scheme.start_timer(0, 60, id).unwrap();
        }
        // As many as there are looks, and all to one slot: it grows as fast as the hand gets on with it.
        let turn = 1 << bits.min(20);
        let mut fired = 0;
        for now in 1..=3_000 {
            for _ in 0..BUDGET {
                let interval = (turn - now % turn).clamp(1, 63);
                scheme.start_timer(now, interval, 1_000).unwrap();
            }
            scheme.per_tick_bookkeeping(now, BUDGET as usize);
            let due = std::iter::from_fn(|| scheme.expiry_processing());
            fired += due.filter(|timer| timer.value < 1_000).count();
        }
        assert_eq!(fired, 10, "{name}");
        assert!(scheme.elapsed() >= 500, "{name}: {}", scheme.elapsed());
    }
}

#[test]
fn nothing_armed_is_nothing_to_wait_for() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        let timers = [0; 5].map(|_| scheme.start_timer(0, 1, 1).unwrap());
        // In the middle of a slot.
        scheme.per_tick_bookkeeping(1, 2);
        for timer in timers {
            scheme.stop_timer(timer);
        }
        assert!(scheme.is_empty(), "{name}");
        assert_eq!(scheme.next_tick(), None, "{name}");
    }
}

#[test]
fn stop_returns_what_never_fired_and_the_wheel_goes_on() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        for round in 1..=2 {
            for id in 0..10 {
                scheme.start_timer(round * 100, 1, id).unwrap();
            }
            // Some are due, some have been seen, some have not.
            scheme.per_tick_bookkeeping(round * 100 + 1, 5);
            let fired = scheme.expiry_processing().into_iter().count();
            assert_eq!(scheme.stop_all().len() + fired, 10, "{name}");
            assert_eq!((scheme.len(), scheme.next_tick()), (0, None), "{name}");
            assert_eq!(drive(&mut scheme, round * 100 + 50), [], "{name}");
        }
    }
}

#[test]
fn bad_input_is_refused_with_the_value_and_the_range() {
    let error = |what, value, least, most| Error {
        what,
        value,
        least,
        most,
    };
    let slots = "the number of slots";
    let level = "the number of slots of a level";
    let levels = "the number of levels";
    let most = 1 << 24;
    assert_eq!(Simple::new(0).unwrap_err(), error(slots, 0, 1, most));
    assert_eq!(Hashed::new(0).unwrap_err(), error(slots, 0, 1, most));
    let huge = u32::MAX;
    let refused = error(slots, huge.into(), 1, most);
    assert_eq!(HashedOrdered::new(huge).unwrap_err(), refused);
    assert_eq!(
        Netty::<()>::pair(0, 1).unwrap_err(),
        error(slots, 0, 1, most)
    );
    assert_eq!(Growing::ticked(1).unwrap_err(), error(level, 1, 2, most));
    let refused = error(level, huge.into(), 2, most);
    assert_eq!(Growing::skipping(huge).unwrap_err(), refused);
    let refused = error(levels, 0, 1, 4);
    assert_eq!(Hierarchical::new(0, 16).unwrap_err(), refused);
    let refused = error(levels, 5, 1, 4);
    assert_eq!(Hierarchical::new(5, 16).unwrap_err(), refused);
    let refused = error(level, 1, 2, 4096);
    assert_eq!(Hierarchical::new(3, 1).unwrap_err(), refused);
    let refused = error(level, 4097, 2, 4096);
    assert_eq!(Hierarchical::new(3, 4097).unwrap_err(), refused);

    let second = Duration::from_secs(1);
    let tick = "the tick in nanoseconds";
    let refused = error(tick, 0, 1, 1_000_000_000);
    assert_eq!(ticks(second, Duration::ZERO), Err(refused));
    let refused = error(tick, 2_000_000_000, 1, 1_000_000_000);
    assert_eq!(ticks(second, 2 * second), Err(refused));
    assert_eq!(
        Expiring::<u32>::new(second, 2 * second).unwrap_err(),
        refused
    );
    assert_eq!(ticks(second, second), Ok(1));
    assert_eq!(ticks(second, Duration::from_millis(300)), Ok(4), "up");

    let mut simple = Timers::new(Simple::new(64).unwrap());
    let refused = error("the interval in ticks", 64, 0, 63);
    assert_eq!(simple.start_timer(0, 64, ()), Err(refused));
    assert_eq!(simple.len(), 0);
    let timer = simple.start_timer(0, 63, ()).unwrap();
    assert_eq!(simple.restart_timer(timer, 0, 64), Err(refused));
    assert_eq!(simple.deadline(timer), Some(63), "as before");
    assert_eq!(
        refused.to_string(),
        "the interval in ticks cannot be 64: it must lie between 0 and 63"
    );
}

#[test]
fn expiring_elements_are_heard_of() {
    let second = Duration::from_secs(1);
    let mut wheel = Expiring::new(10 * second, second).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener = |name| {
        let heard = heard.clone();
        move |id: &char| heard.lock().unwrap().push((name, *id))
    };
    let one = wheel.add_listener(listener(1));
    wheel.add_listener(listener(2));
    assert_eq!(wheel.add(0, 'a'), Ok(10));
    assert_eq!(wheel.add(3, 'b'), Ok(10));
    assert_eq!(wheel.time_left(9, &'a'), Some(1));
    // A heartbeat.
    assert_eq!(wheel.add(9, 'a'), Ok(10));
    assert_eq!(wheel.time_left(9, &'a'), Some(10));
    assert_eq!(wheel.add_with(9, 'c', 2), Ok(2));
    assert!(wheel.add_with(9, 'c', 11).is_err() && wheel.add_with(9, 'c', 0).is_err());
    let hear = |wheel: &mut Expiring<char>, tick| {
        while !wheel.tick(tick, 3) {}
        std::mem::take(&mut *heard.lock().unwrap())
    };
    assert_eq!(hear(&mut wheel, 10), []);
    assert_eq!(hear(&mut wheel, 11), [(1, 'c'), (2, 'c')]);
    assert_eq!(hear(&mut wheel, 12), []);
    assert!(wheel.remove_listener(one) && !wheel.remove_listener(one));
    assert_eq!(hear(&mut wheel, 13), [(2, 'b')]);
    assert!(!wheel.remove(&'b') && wheel.remove(&'a'));
    assert_eq!(hear(&mut wheel, 30), []);
    wheel.add(30, 'd').unwrap();
    assert_eq!(wheel.stop(), ['d']);
    assert_eq!(hear(&mut wheel, 50), []);
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
                wheel.add(now, id).unwrap();
                oracle.start(now + 64, id);
            }
            3 | 4 => {
                let timeout = random.below(64) + 1;
                wheel.add_with(now, id, timeout).unwrap();
                oracle.start(now + timeout, id);
            }
            5 => assert_eq!(wheel.remove(&id), oracle.stop(id)),
            _ => {
                now += 1 + random.below(5) / 4 * random.below(100);
                while !wheel.tick(now, 3) {}
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

#[test]
fn starts_that_flood_netty_do_not_starve_a_tick() {
    let (front, mut wheel) = Netty::pair(512, u32::MAX.into()).unwrap();
    let flood = 2 * TRANSFERS_PER_TICK as u64 + 10;
    for id in 0..flood {
        front.start(0, 1, id).unwrap();
    }
    let mut fired = 0;
    let mut per_tick = Vec::new();
    for now in 1..=4 {
        while !wheel.tick(now, 1_000_000) {}
        let found = std::iter::from_fn(|| wheel.expired()).count();
        fired += found;
        per_tick.push(found);
    }
    let limit = TRANSFERS_PER_TICK;
    assert_eq!(per_tick, [limit, limit, 10, 0]);
    assert_eq!(fired as u64, flood);
    // A driver that is late makes up for it tick by tick.
    for id in 0..flood {
        front.start(4, 1, id).unwrap();
    }
    let mut calls = 1;
    while !wheel.tick(100, 1_000_000) {
        calls += 1;
    }
    assert_eq!(calls, 3);
    assert_eq!(std::iter::from_fn(|| wheel.expired()).count() as u64, flood);
    assert_eq!(front.pending(), 0);
}

#[test]
fn netty_has_a_cap_and_stop_returns_what_never_fired() {
    let (front, mut wheel) = Netty::pair(8, 3).unwrap();
    let fires = front.start(0, 1, 'a').unwrap();
    let cancelled = front.start(0, 1, 'b').unwrap();
    front.start(0, u64::MAX, 'c').unwrap();
    let error = front.start(0, 1, 'd').unwrap_err();
    assert_eq!((error.value, error.least, error.most), (4, 0, 3));
    assert!(cancelled.cancel() && !cancelled.cancel() && cancelled.is_cancelled());
    assert!(wheel.tick(1, 1_000));
    assert_eq!(wheel.expired().unwrap().value, 'a');
    assert_eq!(wheel.expired(), None);
    assert!(fires.is_expired() && !fires.cancel());
    assert_eq!(front.pending(), 1);
    front.start(1, 5, 'e').unwrap();
    // In the wheel, and then cancelled: leaves at the next tick.
    let late = front.start(1, 5, 'f').unwrap();
    assert!(wheel.tick(2, 1_000));
    assert!(late.cancel());
    assert_eq!(front.pending(), 3);
    assert!(wheel.tick(3, 1_000));
    assert_eq!(front.pending(), 2);
    // Still in the queue.
    front.start(1, 5, 'g').unwrap();
    let mut left = wheel.stop();
    left.sort_unstable();
    assert_eq!(left, ['c', 'e', 'g']);
    assert_eq!(front.start(3, 1, 'h').unwrap_err().most, 0);
}

#[test]
fn of_a_cancel_and_an_expiry_at_once_one_has_its_way() {
    const ROUNDS: u64 = 2_000;
    const EACH: usize = 20;
    let (front, mut wheel) = Netty::pair(64, u32::MAX.into()).unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel::<Vec<Timeout>>(0);
    let canceller = std::thread::spawn(move || {
        let mut cancelled = 0;
        for timeouts in receive {
            cancelled += timeouts.iter().filter(|it| it.cancel()).count();
        }
        cancelled
    });
    let mut fired = 0;
    for now in 0..ROUNDS {
        let timeouts = (0..EACH)
            .map(|id| front.start(now, 1, id).unwrap())
            .collect();
        send.send(timeouts).unwrap();
        while !wheel.tick(now + 1, 3) {}
        fired += std::iter::from_fn(|| wheel.expired()).count();
    }
    drop(send);
    let cancelled = canceller.join().unwrap();
    assert_eq!(fired + cancelled, ROUNDS as usize * EACH);
    while !wheel.tick(ROUNDS + 100, 1_000) {}
    assert_eq!(wheel.expired(), None);
    assert_eq!(front.pending(), 0, "each was counted once");
}

#[test]
fn starts_from_many_threads_are_all_returned_by_stop() {
    // Without a cap the starters would outrun the wheel, as long as the machine has memory.
    let (front, mut wheel) = Netty::pair(64, 100_000).unwrap();
    let start = |front: Netty<u64>| {
        let mut started = 0;
        loop {
            match front.start(0, started % 50, started) {
                Ok(_) => started += 1,
                Err(stopped) if stopped.most == 0 => return started as usize,
                Err(_) => std::thread::yield_now(),
            }
        }
    };
    let starters: Vec<_> = (0..4)
        .map(|_| {
            let front = front.clone();
            std::thread::spawn(move || start(front))
        })
        .collect();
    let mut fired = 0;
    for now in 1..200 {
        while !wheel.tick(now, 1_000) {}
        fired += std::iter::from_fn(|| wheel.expired()).count();
    }
    let left = wheel.stop().len();
    let started: usize = starters.into_iter().map(|it| it.join().unwrap()).sum();
    assert_eq!(fired + left, started);
}
