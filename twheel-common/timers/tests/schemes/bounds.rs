//! Budgets, floods, stops and invalid input.

use std::time::Duration;

use twheel_timers::{
    Error, Expiring, Growing, Hashed, HashedOrdered, Hierarchical, Netty, Scheme, Simple, Timers,
    ticks,
};

use crate::{Case, cases, drive};

#[test]
fn a_stop_during_expiry_has_its_way() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        let timers: Vec<_> = (0..3).map(|id| scheme.insert(0, 1, id).unwrap()).collect();
        while !scheme.advance(1, 1) {}
        let first = scheme.pop_expired().unwrap();
        let second = timers[(first.value + 1) % 3];
        let third = (first.value + 2) % 3;
        // Due, but not handed out yet: such a timer can still be stopped or restarted.
        assert_eq!(scheme.remove(second), Some((first.value + 1) % 3), "{name}");
        assert_eq!(scheme.reset(timers[third], 1, 1), Ok(true), "{name}");
        assert_eq!(scheme.pop_expired(), None, "{name}");
        // A timer that was handed out or stopped is gone.
        assert_eq!(scheme.remove(first.key), None, "{name}");
        assert_eq!(scheme.reset(second, 1, 1), Ok(false), "{name}");
        assert_eq!(drive(&mut scheme, 2), [(third, 2)], "{name}");
    }
}

#[test]
fn a_budget_bounds_a_tick() {
    for Case {
        name, mut scheme, ..
    } in cases()
    {
        // All at one tick, on whatever level that is.
        for id in 0..1_000 {
            scheme.insert(0, 1, id).unwrap();
        }
        let (mut calls, mut fired) = (0, 0);
        loop {
            let done = scheme.advance(1, 10);
            let found = std::iter::from_fn(|| scheme.pop_expired()).count();
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
            scheme.insert(0, 5 + id, id).unwrap();
        }
        let mut fired = Vec::new();
        // As many starts as visits: the wheel cannot keep up, but must not stall.
        for now in 1..=100 {
            for _ in 0..BUDGET {
                scheme.insert(now, 40, 1_000).unwrap();
            }
            scheme.advance(now, BUDGET as usize);
            let due = std::iter::from_fn(|| scheme.pop_expired());
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
            scheme.insert(0, 60, id).unwrap();
        }
        // As many starts as visits, all into one slot: it grows as fast as the hand works it off.
        let turn = 1 << bits.min(20);
        let mut fired = 0;
        for now in 1..=3_000 {
            for _ in 0..BUDGET {
                let interval = (turn - now % turn).clamp(1, 63);
                scheme.insert(now, interval, 1_000).unwrap();
            }
            scheme.advance(now, BUDGET as usize);
            let due = std::iter::from_fn(|| scheme.pop_expired());
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
        let timers = [0; 5].map(|_| scheme.insert(0, 1, 1).unwrap());
        // The bookkeeping stops in the middle of a slot.
        scheme.advance(1, 2);
        for timer in timers {
            scheme.remove(timer);
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
                scheme.insert(round * 100, 1, id).unwrap();
            }
            // Some are handed out, some have been visited, some have not.
            scheme.advance(round * 100 + 1, 5);
            let fired = scheme.pop_expired().into_iter().count();
            assert_eq!(scheme.drain().len() + fired, 10, "{name}");
            assert_eq!((scheme.len(), scheme.next_tick()), (0, None), "{name}");
            assert_eq!(drive(&mut scheme, round * 100 + 50), [], "{name}");
        }
    }
}

#[test]
fn bad_input_is_refused_with_the_value_and_the_range() {
    let error = |what, value, least, most| (what, value, least, most);
    fn of(error: Error) -> (&'static str, u64, u64, u64) {
        (error.what, error.value, error.least, error.most)
    }
    let slots = "the number of slots";
    let level = "the number of slots of a level";
    let levels = "the number of levels";
    let most = 1 << 24;
    assert_eq!(of(Simple::new(0).unwrap_err()), error(slots, 0, 1, most));
    assert_eq!(of(Hashed::new(0).unwrap_err()), error(slots, 0, 1, most));
    let huge = u32::MAX;
    let refused = error(slots, huge.into(), 1, most);
    assert_eq!(of(HashedOrdered::new(huge).unwrap_err()), refused);
    assert_eq!(
        of(Netty::<()>::pair(0, 1).unwrap_err()),
        error(slots, 0, 1, most)
    );
    assert_eq!(
        of(Growing::ticked(1).unwrap_err()),
        error(level, 1, 2, most)
    );
    let refused = error(level, huge.into(), 2, most);
    assert_eq!(of(Growing::skipping(huge).unwrap_err()), refused);
    let refused = error(levels, 0, 1, 8);
    assert_eq!(of(Hierarchical::new(0, 16).unwrap_err()), refused);
    let refused = error(levels, 9, 1, 8);
    assert_eq!(of(Hierarchical::new(9, 2).unwrap_err()), refused);
    let refused = error("the range of the levels, as log2 of ticks,", 64, 1, 62);
    assert_eq!(of(Hierarchical::new(8, 256).unwrap_err()), refused);
    let refused = error(level, 1, 2, 4096);
    assert_eq!(of(Hierarchical::new(3, 1).unwrap_err()), refused);
    let refused = error(level, 4097, 2, 4096);
    assert_eq!(of(Hierarchical::new(3, 4097).unwrap_err()), refused);

    let second = Duration::from_secs(1);
    let tick = "the tick in nanoseconds";
    let refused = error(tick, 0, 1, 1_000_000_000);
    assert_eq!(ticks(second, Duration::ZERO).map_err(of), Err(refused));
    let refused = error(tick, 2_000_000_000, 1, 1_000_000_000);
    assert_eq!(ticks(second, 2 * second).map_err(of), Err(refused));
    assert_eq!(
        of(Expiring::<u32>::new(second, 2 * second).unwrap_err()),
        refused
    );
    assert_eq!(ticks(second, second), Ok(1));
    assert_eq!(ticks(second, Duration::from_millis(300)), Ok(4), "up");

    let mut simple = Timers::new(Simple::new(64).unwrap());
    let refused = error("the interval in ticks", 64, 0, 63);
    assert_eq!(simple.insert(0, 64, ()).map_err(of), Err(refused));
    assert_eq!(simple.len(), 0);
    let timer = simple.insert(0, 63, ()).unwrap();
    let error = simple.reset(timer, 0, 64).unwrap_err();
    assert_eq!(of(error), refused);
    assert_eq!(simple.deadline(timer), Some(63), "the deadline has changed");
    assert_eq!(
        error.to_string(),
        "the interval in ticks cannot be 64: it must lie between 0 and 63"
    );
}
