//! Timers that are parts of the caller's objects, beside a sorted set of deadlines.

use std::collections::BTreeSet;

use twheel_timers::{Intrusive, LAST_TICK, Node};

/// Random numbers (xorshift64*), the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % limit.max(1)
    }
}

#[test]
fn random_operations_do_what_a_sorted_set_does() {
    for (levels, slots, longest) in [(1, 2, 9), (2, 4, 40), (3, 16, 9_000), (3, 1024, 70_000)] {
        for seed in 1..=20 {
            check(levels, slots, longest, &mut Random(seed * 0x9e37_79b9));
        }
    }
}

fn check(levels: u32, slots: u32, longest: u64, random: &mut Random) {
    const TIMERS: u32 = 50;
    let mut wheel = Intrusive::new(levels, slots).unwrap();
    let mut nodes = vec![Node::new(); TIMERS as usize];
    let mut armed = BTreeSet::new();
    let mut now = 0;
    for _ in 0..2_000 {
        let id = random.below(TIMERS.into()) as u32;
        let before = nodes[id as usize].deadline();
        match random.below(8) {
            0 => {
                assert_eq!(wheel.stop(&mut nodes, id), before.is_some());
                armed.retain(|(_, armed)| *armed != id);
            }
            1 | 2 => {
                now += random.below(longest / 4 + 2);
                let mut last = 0;
                while let Some(id) = wheel.expire(&mut nodes, now) {
                    assert!(!nodes[id as usize].is_armed());
                    let found = armed.iter().find(|(_, armed)| *armed == id).copied();
                    let (deadline, _) = found.expect("a timer that is armed");
                    assert!(
                        last <= deadline && deadline <= now,
                        "{last} {deadline} {now}"
                    );
                    last = deadline;
                    armed.remove(&(deadline, id));
                    // What the caller does with a timer may stop others, and start it again.
                    let other = random.below(TIMERS.into()) as u32;
                    if random.below(2) == 0 && wheel.stop(&mut nodes, other) {
                        armed.retain(|(_, armed)| *armed != other);
                    }
                    if random.below(4) == 0 {
                        let interval = random.below(longest) + 1;
                        assert!(wheel.start(&mut nodes, id, now, interval));
                        armed.insert((now + interval, id));
                    }
                }
                assert!(armed.first().is_none_or(|(deadline, _)| *deadline > now));
            }
            _ => {
                let interval = random.below(longest) + 1;
                assert!(wheel.start(&mut nodes, id, now, interval));
                armed.retain(|(_, armed)| *armed != id);
                armed.insert((now + interval, id));
            }
        }
        assert_eq!(wheel.len(), armed.len());
        let next = wheel.next_tick();
        assert_eq!(next.is_none(), armed.is_empty());
        if let (Some(next), Some((deadline, _))) = (next, armed.first()) {
            assert!(now < next && next <= *deadline, "{now} {next} {deadline}");
        }
        for (deadline, id) in &armed {
            assert_eq!(nodes[*id as usize].deadline(), Some(*deadline));
        }
    }
}

#[test]
fn deadlines_at_the_ends_of_time() {
    let mut wheel = Intrusive::new(2, 4).unwrap();
    let mut nodes = vec![Node::new(); 3];
    assert!(wheel.start(&mut nodes, 0, 0, 0));
    assert!(wheel.start(&mut nodes, 1, 5, u64::MAX));
    assert_eq!(nodes[1].deadline(), Some(LAST_TICK));
    assert_eq!(wheel.expire(&mut nodes, 0), None);
    assert_eq!(wheel.expire(&mut nodes, 1), Some(0));
    assert_eq!(wheel.expire(&mut nodes, 1_000), None);
    // In the past: the next tick.
    assert!(wheel.start(&mut nodes, 2, 10, 10));
    assert_eq!(nodes[2].deadline(), Some(1_001));
    assert_eq!(wheel.expire(&mut nodes, 1_001), Some(2));
}

#[test]
fn what_does_not_exist_is_refused() {
    let (mut wheel, mut nodes) = (Intrusive::new(2, 4).unwrap(), vec![Node::new()]);
    for id in [1, 1 << 31, u32::MAX] {
        assert!(!wheel.start(&mut nodes, id, 0, 5));
        assert!(!wheel.stop(&mut nodes, id));
    }
    assert!(wheel.is_empty());
}

/// Nodes in two wheels, objects that go while they are armed: nothing panics, and each call ends.
#[test]
fn misuse_ends_and_does_not_panic() {
    for seed in 1..=200 {
        let mut random = Random(seed * 0x9e37_79b9);
        let mut wheels =
            [(1, 4), (3, 16)].map(|(levels, slots)| Intrusive::new(levels, slots).unwrap());
        let mut nodes = vec![Node::new(); 20];
        let mut now = 0;
        for _ in 0..500 {
            let wheel = &mut wheels[random.below(2) as usize];
            let id = random.below(25) as u32;
            match random.below(8) {
                0 => drop(wheel.stop(&mut nodes, id)),
                1 => nodes.truncate(10 + random.below(10) as usize),
                2 => nodes.resize(20, Node::new()),
                3 => {
                    now += random.below(50);
                    for _ in 0..100 {
                        wheel.expire(&mut nodes, now);
                    }
                }
                _ => drop(wheel.start(&mut nodes, id, now, random.below(100))),
            }
        }
    }
}
