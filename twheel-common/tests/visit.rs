//! What a timer visit decides.
#![allow(missing_docs)]

use twheel_common::{
    event::Reason,
    flow::Word,
    state::Seen,
    visit::{Visit, visit},
};

fn rearm(due: u64) -> Visit {
    Visit { end: None, due }
}

fn end(reason: Reason) -> Visit {
    Visit {
        end: Some(reason),
        due: 7,
    }
}

#[test]
fn a_visit_is_never_early_and_comes_back_at_the_deadline() {
    for now in [5_000, u64::from(u32::MAX), u64::from(u32::MAX) + 3, 1 << 40] {
        for timeout in [1_000, 100, 1] {
            let word = |idle| Word::new((now as u32).wrapping_sub(idle).into(), 7, Seen(2));
            for idle in 0..timeout {
                assert_eq!(
                    visit(now, word(idle), timeout, |_| 0),
                    rearm(now + u64::from(timeout - idle))
                );
            }
            let ends = visit(now, word(timeout), timeout, |_| 0);
            assert_eq!(ends.end, Some(Reason::Idle));
        }
    }
    let reset = visit(9, Word::new(9, 0, Seen(7)), 0, |_| 0);
    assert_eq!(reset.end, Some(Reason::Reset));
}

#[test]
fn a_stamp_in_doubt_is_waited_for_longer() {
    let word = Word::new(1_000, 7, Seen(2));
    let doubt = |stamp| {
        assert_eq!(stamp, 1_000);
        6
    };
    assert_eq!(visit(1_099, word, 100, doubt), rearm(1_100));
    for now in 1_100..1_106 {
        assert_eq!(visit(now, word, 100, doubt), rearm(1_106));
    }
    assert_eq!(visit(1_106, word, 100, doubt).end, Some(Reason::Idle));
}

#[test]
fn a_visit_to_a_flow_with_a_stamp_from_the_future_comes_back() {
    assert_eq!(
        visit(1000, Word::new(1500, 7, Seen(2)), 10, |_| 0),
        rearm(1010)
    );
}

#[test]
fn a_flow_that_stays_is_looked_at_in_time_for_its_timer() {
    assert_eq!(rearm(100).no_later(99), rearm(99));
    assert_eq!(rearm(100).no_later(100), rearm(100));
    assert_eq!(rearm(100).no_later(u64::MAX), rearm(100));
    for reason in [Reason::Idle, Reason::Evicted] {
        assert_eq!(end(reason).no_later(1).end, Some(reason));
    }
}

#[test]
fn a_flow_makes_room_unless_it_is_established_or_may_not_go() {
    let stays = rearm(100);
    let at_its_deadline = |due| {
        assert_eq!(due, 100);
        true
    };
    let gone = stays.for_room(false, at_its_deadline);
    assert_eq!(gone.end, Some(Reason::Evicted));
    assert_eq!(stays.for_room(false, |_| false), stays);
    let unasked = |_| panic!("nobody asks of a flow that stays or ends anyway");
    assert_eq!(stays.for_room(true, unasked), stays);
    let idle = end(Reason::Idle);
    assert_eq!(idle.for_room(false, unasked), idle);
}

#[test]
fn a_flow_makes_room_the_sooner_the_nearer_its_deadline() {
    assert_eq!(rearm(100).wait(40, false), Some(60));
    assert_eq!(rearm(100).wait(40, true), None);
    for is_established in [false, true] {
        assert_eq!(end(Reason::Idle).wait(40, is_established), Some(0));
    }
    // A flow that is in doubt cannot end yet, so it does not hide another.
    let word = Word::new(0, 0, Seen(2));
    let doubted = visit(10, word, 10, |_| 6);
    assert_eq!(doubted.wait(10, true), None);
}

#[test]
fn an_end_has_its_reason() {
    let [established, closed, reset] = [2, 6, 7].map(Seen);
    for (seen, reason) in [
        (established, Reason::Idle),
        (closed, Reason::Closed),
        (reset, Reason::Reset),
    ] {
        let ends = |now| visit(now, Word::new(0, 0, seen), 10, |_| 0);
        assert_eq!(ends(10).end, Some(reason));
        let evicted = ends(9).for_room(false, |_| true);
        assert_eq!(evicted.end, Some(Reason::Evicted));
    }
}
