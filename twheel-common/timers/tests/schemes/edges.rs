//! Slot edges, past deadlines, late ticks, and hints.

use std::collections::BTreeSet;

use twheel_timers::{Growing, LAST_TICK, Scheme, Timers};

use crate::{Case, Random, cases, drive};

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
                // All are armed at once; then each is checked before its tick, at its tick, and
                // afterwards.
                let mut expected = BTreeSet::new();
                for span in &spans {
                    for edge in [1, 2, (1 << bits) - 1, 1 << bits, (1 << bits) + 1] {
                        for when in [edge * span - 1, edge * span, edge * span + 1] {
                            for when in [when, begin + when] {
                                let interval = when.saturating_sub(begin).min(farthest);
                                let due = begin + interval.max(1);
                                if expected.insert(due) {
                                    scheme.insert(begin, interval, due).unwrap();
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
            scheme.insert(now, 0, now).unwrap();
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
        scheme.insert(12_345, u64::MAX, 'a').unwrap();
        scheme.insert(u64::MAX, u64::MAX, 'b').unwrap();
        scheme.insert(12_345, LAST_TICK, 'c').unwrap();
        let near = scheme.insert(12_345, 5, 'd').unwrap();
        assert!(scheme.reset(near, 12_345, u64::MAX).unwrap());
        scheme.insert(12_345, 5, 'e').unwrap();
        assert_eq!(drive(&mut scheme, 20_000), [('e', 12_350)], "{name}");
        // A hashed wheel with one slot visits them at every tick, so it cannot go all the way.
        if !name.starts_with(['5', '6']) && !name.contains("hierarchical") {
            assert_eq!(drive(&mut scheme, LAST_TICK - 1), [], "{name}");
            assert_eq!(drive(&mut scheme, u64::MAX).len(), 4, "{name}");
            // There is no tick after the last: no timer fires, and no operation fails.
            scheme.insert(u64::MAX, 1, 'f').unwrap();
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
        scheme.insert(0, 1, 0).unwrap();
        for tick in 1..=100 {
            while !scheme.advance(tick, 1) {}
            let mut fired = 0;
            while let Some(timer) = scheme.pop_expired() {
                assert_eq!(timer.deadline, tick, "{name}");
                fired += 1;
                // At once, followed by bookkeeping for the same tick.
                scheme.insert(tick, tick % 2, timer.value + 1).unwrap();
                assert!(scheme.advance(tick, 1_000), "{name}");
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
                .insert(0, random.interval(range.min(reach)), id)
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
        // A driver that sleeps until each hint misses no timer.
        let mut random = Random(6);
        let mut expected = BTreeSet::new();
        // A wheel with one slot hints at every tick.
        let range = range.min(100_000);
        for _ in 0..200 {
            let interval = random.below(range) + 1;
            if expected.insert(interval) {
                scheme.insert(0, interval, interval).unwrap();
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
            // These want to be driven at every tick.
            continue;
        }
        for interval in 1..1 << case.bits.min(10) {
            let now = scheme.elapsed();
            // Between two slots, another level may begin.
            let timer = scheme.insert(now, interval, ()).unwrap();
            let level = case.name.starts_with('7') && (now ^ (now + interval)) >> case.bits > 0;
            if !level && case.range >= interval && !case.name.ends_with(", 1 slot") {
                assert_eq!(scheme.next_tick(), Some(now + interval), "{}", case.name);
            }
            scheme.remove(timer);
            drive(&mut scheme, now + 1);
        }
    }
}

#[test]
fn an_idle_skipping_wheel_is_not_woken() {
    let mut scheme = Timers::new(Growing::skipping(16).unwrap());
    assert_eq!(scheme.next_tick(), None);
    let far = scheme.insert(0, 1 << 30, ()).unwrap();
    assert_eq!(scheme.structure().levels(), 8);
    // The first slot that is not empty is the timer's own.
    assert_eq!(scheme.next_tick(), Some(1 << 30));
    scheme.remove(far);
    assert_eq!(scheme.next_tick(), None, "an emptied slot must not count");
}

#[test]
fn levels_come_when_they_are_needed() {
    let mut scheme = Timers::new(Growing::ticked(16).unwrap());
    for (interval, levels) in [(15, 1), (16, 2), (255, 2), (256, 3), (4_096, 4), (20, 4)] {
        scheme.insert(0, interval, ()).unwrap();
        assert_eq!(scheme.structure().levels(), levels);
    }
    scheme.insert(0, u64::MAX, ()).unwrap();
    assert_eq!(scheme.structure().levels(), 16);
}
