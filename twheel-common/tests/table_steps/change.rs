//! A change and a reader, with another CPU's operation in between.

use std::cell::Cell;

use twheel_common::{
    flow::Word,
    state::Seen,
    table::{self, BUSY, Changed, Records},
};

use crate::{
    AT, Table, assert_settled, at_each_step, begins, end, enter, find, insert, key, memory::Read,
    new, word_at,
};

#[test]
fn a_change_is_of_the_flow_that_was_found() {
    let change = |table: &Table, at: usize, old: Word| {
        let new = old.with(3_000, Seen(old.seen().0 | 0x40));
        (table::change(table, at, &key(0), old, new), new)
    };
    // No other CPU interferes.
    let table = &new();
    insert(table, &[0]);
    let word = word_at(table, AT);
    assert_eq!(
        change(table, AT, word),
        (Some(Ok(word_at(table, AT))), word_at(table, AT))
    );
    assert!(word_at(table, AT) != word);
    assert_eq!(change(table, AT, word).0, Some(Err(word_at(table, AT))));
    // The flow ends, and another one gets its record.
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            end(table, 0);
            insert(table, &[1]);
        },
        |table| change(table, AT, word_at(table, AT)).0,
        |table, changed| {
            assert!(!matches!(changed, Some(Ok(_))) || find(table, 0).is_none());
            assert_settled(table, &[1]);
            let begun = begins(1, 0);
            let word = word_at(table, AT);
            assert_eq!((word.stamp(), word.seen()), (begun.now as u32, begun.seen));
        },
    );
    // By now another flow has the record, and its word is known: still, it does not have this key.
    let table = &new();
    insert(table, &[1]);
    assert_eq!(change(table, AT, word_at(table, AT)).0, None);
}

#[test]
fn a_flow_that_may_be_withdrawn_is_not_posted() {
    let posts = |table: &Table| {
        let word = word_at(table, AT);
        let new = word.with(3_000, word.seen().posted());
        match table::change(table, AT, &key(0), word, new) {
            Some(Ok(word)) => word.seen().is_posted(),
            _ => false,
        }
    };
    let table = &new();
    insert(table, &[0]);
    assert!(posts(table));
    // Once more.
    assert!(posts(table));
    at_each_step(
        |_| {},
        |table| {
            let is_busy = table.held_at(AT).tag & BUSY != 0;
            let is_alive = !word_at(table, AT).is_dead() && word_at(table, AT) != Word::default();
            let is_posted = is_alive && posts(table);
            assert!(!(is_busy && is_posted));
        },
        |table| enter(table, 0),
        |table, _| assert_settled(table, &[0]),
    );
}

#[test]
fn what_is_starting_or_posted_does_not_end() {
    let table = &new();
    insert(table, &[0]);
    let word = word_at(table, AT);
    for seen in [word.seen().starting(), word.seen().posted()] {
        table.set_word(AT, word.with_seen(seen));
        assert!(!end(table, 0));
        assert_eq!(word_at(table, AT), word.with_seen(seen));
    }
    table.set_word(AT, word);
    assert!(!table::kill(table, AT, word.with(9_000, word.seen())));
    assert!(end(table, 0));
}

#[test]
fn a_reader_sees_one_life_or_that_it_changes() {
    let read = |table: &Table| {
        let snapshot = table::read(&Read(table, AT));
        if let Ok(Some(flow)) = snapshot {
            let number = if flow.key == key(0) { 0 } else { 1 };
            let begun = begins(number, 0);
            assert_eq!(flow.key, key(number));
            assert_eq!((flow.cpu, flow.rule), (begun.cpu, begun.rule));
            assert_eq!(flow.created, begun.now as u32);
            assert_eq!(flow.word.seen(), begun.seen);
        }
        snapshot
    };
    let seen = Cell::new([0; 3]);
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            assert!(end(table, 0));
            insert(table, &[1]);
        },
        read,
        |_, snapshot| {
            let mut counts = seen.get();
            counts[match snapshot {
                Ok(Some(flow)) if flow.key == key(0) => 0,
                Ok(Some(_)) => 1,
                Err(Changed) => 2,
                Ok(None) => panic!("the record has a flow"),
            }] += 1;
            seen.set(counts);
        },
    );
    assert!(seen.get()[1] > 0 && seen.get()[2] > 0, "{:?}", seen.get());
    // There is no flow, or it is being entered, or it has ended.
    let table = &new();
    assert_eq!(read(table), Ok(None));
    at_each_step(
        |_| {},
        |table| {
            let snapshot = read(table);
            let is_busy = table.held_at(AT).tag & BUSY != 0;
            assert!(!is_busy || snapshot == Ok(None));
        },
        |table| enter(table, 0),
        |_, _| {},
    );
    insert(table, &[0]);
    assert!(read(table).unwrap().is_some());
    let word = word_at(table, AT);
    table.set_word(AT, word.with_seen(word.seen().starting()));
    assert_eq!(read(table), Err(Changed));
    table.set_word(AT, word.dead());
    assert_eq!(read(table), Ok(None));
    // The flow ends while it is being read.
    at_each_step(
        |table| insert(table, &[0]),
        |table| assert!(end(table, 0)),
        |table| table::read(&Read(table, AT)),
        |_, snapshot| assert!(!matches!(snapshot, Ok(Some(flow)) if flow.word.is_dead())),
    );
}
