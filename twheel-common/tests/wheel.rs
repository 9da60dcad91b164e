//! The wheel compared with a sorted list of deadlines.
#![allow(missing_docs)]

use std::collections::{BTreeMap, HashMap};

use twheel_common::wheel::{
    Geometry, LISTS, Link, MAX_BITS, MAX_LEVELS, NEVER, Slot, Wheel, WheelScheme,
};

/// A wheel with lists like those of the data plane.
struct Lists {
    geometry: Geometry,
    wheel: Wheel,
    slots: HashMap<u32, Vec<(u32, u64)>>,
}

impl Lists {
    fn new(geometry: Geometry, start: u64) -> Self {
        let mut wheel = Wheel::default();
        wheel.advance(start);
        Self {
            geometry,
            wheel,
            slots: HashMap::new(),
        }
    }

    fn start(&mut self, id: u32, when: u64) {
        self.put(id, when, self.wheel.slot(self.geometry, when));
    }

    fn put(&mut self, id: u32, when: u64, slot: Slot) {
        assert!(slot.starts > self.wheel.elapsed || slot.starts <= when);
        self.wheel.occupy(self.geometry, slot.index);
        self.slots.entry(slot.index).or_default().push((id, when));
    }

    /// Fires all that is due by `tick`. Returns the number of visits.
    fn step(&mut self, tick: u64, fired: &mut Vec<(u32, u64)>) -> usize {
        let mut visits = 0;
        while let Some(slot) = self.wheel.first(self.geometry) {
            if slot.starts > tick {
                break;
            }
            self.wheel.take(self.geometry, slot);
            for (id, when) in self.slots.remove(&slot.index).unwrap() {
                visits += 1;
                if when <= self.wheel.elapsed {
                    fired.push((id, self.wheel.elapsed.max(when)));
                } else {
                    self.put(id, when, self.wheel.again(self.geometry, when));
                }
            }
        }
        self.wheel.advance(tick);
        visits
    }
}

/// xorshift64*: the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

const GEOMETRIES: [Geometry; 12] = [
    Geometry::hierarchical(1, 1),
    Geometry::hierarchical(1, 4),
    Geometry::hierarchical(1, 12),
    Geometry::hierarchical(2, 2),
    Geometry::hierarchical(3, 2),
    Geometry::hierarchical(4, 3),
    Geometry::hierarchical(3, 10),
    Geometry::hierarchical(4, 12),
    Geometry::hashed(3),
    Geometry::hashed(4),
    Geometry::hashed(12),
    // The tests reach 2^14 ticks: timers beyond a simple wheel's range are kept as well.
    Geometry::simple(12),
];

#[test]
fn fires_what_a_sorted_map_fires_at_the_same_ticks() {
    for geometry in GEOMETRIES {
        let Geometry { levels, bits, .. } = geometry;
        // The last start is shortly before the tick at which 32 bits wrap around.
        for start in [0, 7, (1 << 32) - 500] {
            let mut random = Random(0x9e37_79b9 + u64::from(levels * 100 + bits));
            let mut lists = Lists::new(geometry, start);
            let mut oracle: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            let (mut now, mut id) = (start, 0);
            for _ in 0..4_000 {
                for _ in 0..random.below(4) {
                    let reach = 1 << random.below(14);
                    let when = now + 1 + random.below(reach);
                    lists.start(id, when);
                    oracle.entry(when).or_default().push(id);
                    id += 1;
                }
                now += match random.below(10) {
                    0 => 1 + random.below(3_000),
                    _ => random.below(3),
                };
                let mut fired = Vec::new();
                lists.step(now, &mut fired);
                let later = oracle.split_off(&(now + 1));
                let mut expected: Vec<(u32, u64)> = std::mem::replace(&mut oracle, later)
                    .into_iter()
                    .flat_map(|(when, ids)| ids.into_iter().map(move |id| (id, when)))
                    .collect();
                assert!(
                    fired.is_sorted_by_key(|(_, when)| *when),
                    "fired out of order"
                );
                fired.sort_unstable();
                expected.sort_unstable();
                assert_eq!(fired, expected, "{geometry:?}, tick {now}");
            }
        }
    }
}

#[test]
fn every_slot_edge_of_every_level() {
    for geometry in GEOMETRIES {
        let Geometry { levels, bits, .. } = geometry;
        for level in 0..levels {
            let span = 1u64 << (level * bits);
            for start in [0, span - 1, span, span + 1, 5 * span - 1] {
                for when in [
                    span - 1,
                    span,
                    span + 1,
                    2 * span,
                    (span << bits) - 1,
                    span << bits,
                ] {
                    let mut lists = Lists::new(geometry, start);
                    let due = when.max(start + 1);
                    lists.start(1, due);
                    let mut fired = Vec::new();
                    lists.step(due - 1, &mut fired);
                    assert_eq!(fired, [], "too early: {geometry:?} {start} {when}");
                    lists.step(due, &mut fired);
                    assert_eq!(fired, [(1, due)], "{geometry:?} {start} {when}");
                }
            }
        }
    }
}

#[test]
fn a_slot_has_its_turn_when_it_is_said_to() {
    for geometry in GEOMETRIES {
        let mut random = Random(7);
        for _ in 0..2_000 {
            let mut lists = Lists::new(geometry, random.below(1 << 20));
            let reach = 1 << random.below(20);
            let when = lists.wheel.elapsed + random.below(reach);
            for slot in [
                lists.wheel.slot(geometry, when),
                lists.wheel.again(geometry, when),
            ] {
                lists.wheel.occupy(geometry, slot.index);
                assert_eq!(lists.wheel.first(geometry), Some(slot), "{geometry:?}");
                lists.wheel.vacate(geometry, slot.index);
            }
        }
    }
}

#[test]
fn a_deadline_already_past_has_the_next_tick() {
    let mut lists = Lists::new(Geometry::hierarchical(3, 10), 1_000);
    for when in [0, 999, 1_000] {
        assert_eq!(lists.wheel.slot(lists.geometry, when).starts, 1_001);
    }
    lists.start(1, 5);
    let mut fired = Vec::new();
    lists.step(1_001, &mut fired);
    assert_eq!(fired, [(1, 1_001)]);
}

#[test]
fn a_deadline_beyond_the_range_goes_round_and_is_kept() {
    for geometry in [Geometry::hierarchical(2, 2), Geometry::hashed(2)] {
        let mut lists = Lists::new(geometry, 3);
        lists.start(1, 1_000);
        let mut fired = Vec::new();
        for tick in 4..1_000 {
            lists.step(tick, &mut fired);
        }
        assert_eq!(fired, []);
        lists.step(1_000, &mut fired);
        assert_eq!(fired, [(1, 1_000)]);
    }
}

#[test]
fn a_hashed_wheel_visits_a_timer_once_a_round_in_the_slot_of_its_deadline() {
    for when in [16, 17, 31, 32, 33, 1_000] {
        let mut lists = Lists::new(Geometry::hashed(4), 0);
        lists.start(1, when);
        let mut fired = Vec::new();
        let mut visits = 0;
        for tick in 1..=when {
            let visited = lists.step(tick, &mut fired);
            assert!(
                visited == 0 || tick % 16 == when % 16,
                "{when}: visited at {tick}"
            );
            visits += visited;
        }
        assert_eq!(fired, [(1, when)]);
        assert_eq!(visits as u64, when.div_ceil(16), "{when}");
    }
}

#[test]
fn a_stall_is_caught_up_in_one_turn() {
    let mut lists = Lists::new(Geometry::hierarchical(3, 10), 0);
    lists.start(1, 10);
    lists.start(2, 1 << 29);
    let mut fired = Vec::new();
    // Days of ticks later: one visit for the timer that is due, and at most one per level for the
    // other.
    let visits = lists.step(1 << 28, &mut fired);
    assert_eq!(fired, [(1, 10)]);
    assert!(visits <= 1 + 3, "{visits} visits");
}

#[test]
fn first_sees_all_levels() {
    let mut lists = Lists::new(Geometry::hierarchical(3, 10), 0);
    let when = (5 << 20) + 1;
    lists.start(1, when);
    let slot = lists.wheel.first(lists.geometry).unwrap();
    assert_eq!(slot.starts, 5 << 20, "the slot of the top level");
    lists.start(2, 2_000);
    assert_eq!(lists.wheel.first(lists.geometry).unwrap().starts, 1 << 10);
}

#[test]
fn the_largest_geometry_fits() {
    let geometry = Geometry::hierarchical(MAX_LEVELS as u32, MAX_BITS);
    let wheel = Wheel::default();
    let slot = wheel.slot(geometry, u64::MAX);
    assert!(slot.index < geometry.slots());
    assert_eq!(slot.starts, geometry.range());
}

#[test]
fn the_slots_that_are_occupied_are_those_that_hold_timers() {
    let mut random = Random(11);
    for geometry in GEOMETRIES {
        let mut lists = Lists::new(geometry, random.below(1 << 40));
        let reach = if geometry.scheme == Geometry::hashed(1).scheme {
            4 * geometry.range()
        } else {
            geometry.range()
        };
        for id in 0..200 {
            lists.start(id, lists.wheel.elapsed + 1 + random.below(reach));
            if id % 50 == 0 {
                lists.step(lists.wheel.elapsed + random.below(8), &mut Vec::new());
            }
        }
        let mut expected: Vec<_> = lists.slots.keys().copied().collect();
        expected.sort();
        let occupied: Vec<_> = (0..geometry.levels)
            .flat_map(|level| {
                let slots = lists.wheel.occupied(geometry, level);
                slots.map(move |slot| level << geometry.bits | slot)
            })
            .collect();
        assert_eq!(occupied, expected, "{geometry:?}");
        assert_eq!(lists.wheel.occupied(geometry, geometry.levels).count(), 0);
        assert_eq!(lists.wheel.occupied(geometry, u32::MAX).count(), 0);
    }
}

#[test]
fn every_slot_is_told_with_its_turn() {
    let mut random = Random(7);
    for geometry in GEOMETRIES {
        for _ in 0..10 {
            let start = random.below(1 << 40);
            let mut lists = Lists::new(geometry, start);
            let mut slots = BTreeMap::new();
            for id in 0..100 {
                // A hashed wheel would take very many rounds.
                let most = (1 << random.below(24)).min(4 * geometry.range());
                let when = start + 1 + random.below(most);
                let slot = lists.wheel.slot(geometry, when);
                slots.insert(slot.index, slot.starts);
                lists.start(id, when);
            }
            let occupied = |wheel: &Wheel| -> Vec<u32> {
                let levels = 0..geometry.levels;
                levels
                    .flat_map(|level| {
                        let slots = wheel.occupied(geometry, level);
                        slots.map(move |slot| level << geometry.bits | slot)
                    })
                    .collect()
            };
            assert!(occupied(&lists.wheel).iter().eq(slots.keys()));
            for (&index, &starts) in &slots {
                assert_eq!(lists.wheel.turn(geometry, index), starts);
            }
            let (mut fired, mut tick) = (Vec::new(), start);
            while let Some(first) = lists.wheel.first(geometry) {
                let turns = occupied(&lists.wheel)
                    .into_iter()
                    .map(|index| lists.wheel.turn(geometry, index));
                assert_eq!(turns.min(), Some(first.starts));
                assert_eq!(lists.wheel.turn(geometry, first.index), first.starts);
                tick = tick.max(first.starts);
                lists.step(tick, &mut fired);
            }
            assert_eq!(fired.len(), 100);
            assert!(occupied(&lists.wheel).is_empty());
        }
    }
}

#[test]
fn schemes_have_the_papers_numbers() {
    for (number, geometry, name) in [
        (4, Geometry::simple(8), "simple"),
        (6, Geometry::hashed(8), "hashed"),
        (7, Geometry::hierarchical(1, 8), "hierarchical"),
    ] {
        assert_eq!(geometry.scheme, number);
        assert_eq!(geometry.scheme_name(), name);
        assert_eq!(
            WheelScheme::from_raw(number).map(WheelScheme::name),
            Some(name)
        );
        assert_eq!((geometry.levels, geometry.bits), (1, 8));
        assert_eq!((geometry.slots(), geometry.range()), (256, 255));
    }
    for number in [0, 1, 5, 8] {
        assert_eq!(WheelScheme::from_raw(number), None);
        let geometry = Geometry {
            scheme: number,
            ..Geometry::default()
        };
        assert_eq!(geometry.scheme_name(), "unknown");
    }
    // The default: 2^30 ticks, less the slot of the top level in which the hand may be.
    let default = Geometry::default();
    assert_eq!(default, Geometry::hierarchical(3, 10));
    assert_eq!(default.slots(), 3 * 1024);
    assert_eq!(default.range(), (1 << 30) - (1 << 20));
}

#[test]
fn a_link_leads_to_what_it_was_made_for() {
    assert_eq!(Link::default(), Link::NONE);
    assert_eq!(Link::NONE.raw(), 0);
    assert_eq!((Link::NONE.as_flow(), Link::NONE.as_list()), (None, None));
    for index in [0, 1, 1000, (1 << 31) - 2] {
        let link = Link::flow(index);
        assert_eq!((link.as_flow(), link.as_list()), (Some(index), None));
        assert_eq!(Link::from_raw(link.raw()), link);
    }
    let lists = LISTS as u32;
    let most = Geometry::hierarchical(MAX_LEVELS as u32, MAX_BITS).slots();
    for slot in [0, 1, 2, 4095, most - 1] {
        for list in [0, 1, 5, lists - 1] {
            let link = Link::list(slot, list);
            assert_eq!((link.as_flow(), link.as_list()), (None, Some((slot, list))));
            assert_ne!(link, Link::PENDING);
        }
    }
    // A slot beyond all wheels; the link has bits that both of its numbers could set.
    assert_eq!(Link::list(3, lists - 1).raw(), (1 << 31) + 4 * lists - 1);
    assert_eq!(Link::PENDING.as_flow(), None);
}

#[test]
fn an_empty_wheel_whose_driver_sleeps_catches_up() {
    let geometry = Geometry::default();
    let caught_up = |wake: u64, occupied: Option<u32>| {
        let mut wheel = Wheel::default();
        wheel.advance(100);
        wheel.wake = wake;
        if let Some(index) = occupied {
            wheel.occupy(geometry, index);
        }
        wheel.catch_up(5_000);
        wheel.elapsed == 5_000
    };
    assert!(caught_up(NEVER, None));
    assert!(
        caught_up(0, None),
        "a driver that has not come yet does not prevent it"
    );
    assert!(
        !caught_up(4_000, None),
        "a driver that is about to come prevents it"
    );
    for level in 0..geometry.levels {
        assert!(!caught_up(NEVER, Some(level << geometry.bits | 7)));
    }
    // The hand does not go back.
    let mut wheel = Wheel::default();
    wheel.advance(100);
    wheel.catch_up(50);
    wheel.advance(100);
    wheel.advance(99);
    assert_eq!(wheel.elapsed, 100);
}

#[test]
fn a_hashed_wheel_reaches_a_round() {
    let mut wheel = Wheel::default();
    wheel.advance(1_000);
    let hashed = Geometry::hashed(4);
    for (when, reached) in [(5, true), (1_001, true), (1_016, true), (1_017, false)] {
        assert_eq!(wheel.reaches(hashed, when), reached, "{when}");
    }
    for geometry in [Geometry::default(), Geometry::simple(4)] {
        assert!(wheel.reaches(geometry, 1 << 40));
    }
}

#[test]
fn a_slot_that_is_vacated_takes_no_other_with_it() {
    // Slots in the same word of the bitmap, and in several.
    let geometry = Geometry::hierarchical(2, 12);
    let slots = [1, 2, 63, 64, 65, 1000, 4095];
    for level in 0..2 {
        for vacated in slots {
            let mut wheel = Wheel::default();
            for slot in slots {
                wheel.occupy(geometry, level << 12 | slot);
            }
            wheel.vacate(geometry, level << 12 | vacated);
            let left: Vec<_> = slots.into_iter().filter(|slot| *slot != vacated).collect();
            assert_eq!(wheel.occupied(geometry, level).collect::<Vec<_>>(), left);
            let first = wheel.first(geometry).unwrap();
            assert_eq!(first.index, level << 12 | left[0]);
            for slot in left {
                wheel.vacate(geometry, level << 12 | slot);
            }
            assert_eq!(wheel.first(geometry), None);
        }
    }
}

/// The paper's scheme 6: a timer with rounds left is visited again a round later, wherever its
/// packets have moved its deadline.
#[test]
fn in_a_hashed_wheel_a_timer_with_whole_rounds_left_stays_in_its_slot() {
    for bits in [3, 4] {
        let (geometry, round) = (Geometry::hashed(bits), 1 << bits);
        for elapsed in [1, round, 1_000_003] {
            let mut wheel = Wheel::default();
            wheel.advance(elapsed);
            let stays = Slot {
                index: (elapsed % round) as u32,
                starts: elapsed + round,
            };
            for when in [round, round + 1, 2 * round, 100 * round + 3] {
                assert_eq!(wheel.again(geometry, elapsed + when), stays);
            }
            for when in 1..round {
                let slot = Slot {
                    index: ((elapsed + when) % round) as u32,
                    starts: elapsed + when,
                };
                assert_eq!(wheel.again(geometry, elapsed + when), slot);
            }
        }
    }
}
