//! Flows are entered, found and ended.

use std::cell::Cell;

use twheel_common::table::{self, BUSY, WINDOW};

use crate::{
    AT, assert_settled, at_each_step, end, enter, find, insert, key, new, number, place, word_at,
};

#[test]
fn of_two_that_enter_a_key_at_least_one_finds_it_there() {
    for before in [&[][..], &[1], &[1, 2]] {
        let steps = at_each_step(
            |table| insert(table, before),
            |table| {
                enter(table, 0);
            },
            |table| enter(table, 0),
            |table, entered| {
                let (at, _) = entered.unwrap();
                assert_eq!(find(table, 0), Some(at));
                let mut all = vec![0];
                all.extend(before);
                assert_settled(table, &all);
            },
        );
        assert!(steps > 5, "{steps}");
    }
}

#[test]
fn of_two_that_enter_other_keys_both_do() {
    at_each_step(
        |table| insert(table, &[2]),
        |table| insert(table, &[1]),
        |table| enter(table, 0),
        |table, entered| {
            assert!(entered.unwrap().1);
            assert_settled(table, &[0, 1, 2]);
        },
    );
}

#[test]
fn a_flow_is_found_once_it_is_entered_and_not_before() {
    at_each_step(
        |_| {},
        |table| {
            let found = find(table, 0).map(|at| table.held_at(at));
            assert!(found.is_none_or(|record| record.tag & BUSY == 0));
            // It must not be ended unless it was found: it may yet be withdrawn.
            assert!(end(table, 0) == found.is_some());
        },
        |table| enter(table, 0).unwrap(),
        |table, _| table.assert_whole(false, |key| place(number(key))),
    );
}

#[test]
fn a_key_whose_flow_ends_meanwhile_stands_once_or_not_at_all() {
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(end(table, 0)),
        |table| enter(table, 0).unwrap(),
        |table, (_, is_new)| match is_new {
            true => assert_settled(table, &[0, 1]),
            false => assert_settled(table, &[1]),
        },
    );
    // A flow in front ends, and its record becomes free.
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(end(table, 1)),
        |table| enter(table, 0).unwrap(),
        |table, (_, is_new)| {
            assert!(!is_new);
            assert_settled(table, &[0]);
        },
    );
}

#[test]
fn a_flow_that_ends_leaves_room_for_the_next() {
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            enter(table, 2);
        },
        |table| end(table, 0),
        |table, has_ended| {
            assert!(has_ended);
            assert_settled(table, &[1, 2]);
        },
    );
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            let has_ended = table.held_at(AT).word.is_dead();
            assert_eq!(enter(table, 0).unwrap().1, has_ended);
        },
        |table| end(table, 0),
        |table, has_ended| {
            assert!(has_ended);
            let is_back = find(table, 0).is_some();
            assert_settled(table, if is_back { &[0, 1] } else { &[1] });
        },
    );
}

#[test]
fn a_packet_that_comes_meanwhile_keeps_the_flow() {
    let outcomes = Cell::new([0, 0]);
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            if let Some(at) = find(table, 0) {
                let word = word_at(table, at);
                let new = word.with(2_000, word.seen());
                table::change(table, at, &key(0), word, new);
            }
        },
        |table| end(table, 0),
        |table, has_ended| {
            let mut counts = outcomes.get();
            counts[usize::from(has_ended)] += 1;
            outcomes.set(counts);
            assert_settled(table, if has_ended { &[] } else { &[0] });
        },
    );
    assert!(outcomes.get().iter().all(|often| *often > 0));
}

#[test]
fn a_full_window_refuses() {
    let table = &new();
    let numbers: Vec<u32> = (0..WINDOW).collect();
    insert(table, &numbers);
    assert_eq!(enter(table, WINDOW), None);
    assert_settled(table, &numbers);
    let mut distances: Vec<_> = table
        .held()
        .skip(AT)
        .map(|held| table::distance(held.tag))
        .collect();
    distances.sort();
    assert_eq!(distances, numbers);
}
