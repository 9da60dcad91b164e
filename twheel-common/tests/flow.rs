//! Deadlines.
#![allow(missing_docs)]

use twheel_common::{
    flow::{MAX_AGE, Visit, Word, age, idle, visit},
    state::Seen,
};

#[test]
fn a_visit_is_never_early_and_comes_back_at_the_deadline() {
    for now in [5_000, u64::from(u32::MAX), u64::from(u32::MAX) + 3, 1 << 40] {
        for timeout in [1_000, 100, 1] {
            let word = |idle| Word::new((now as u32).wrapping_sub(idle).into(), 7, Seen(2));
            for idle in 0..timeout {
                assert_eq!(
                    visit(now, word(idle), timeout, |_| 0),
                    Visit::Rearm(now + u64::from(timeout - idle))
                );
            }
            assert_eq!(visit(now, word(timeout), timeout, |_| 0), Visit::Expire);
        }
    }
    assert_eq!(visit(9, Word::new(9, 0, Seen(7)), 0, |_| 0), Visit::Expire);
}

#[test]
fn a_stamp_in_doubt_is_waited_for_longer() {
    let word = Word::new(1_000, 7, Seen(2));
    let doubt = |stamp| {
        assert_eq!(stamp, 1_000);
        6
    };
    assert_eq!(visit(1_099, word, 100, doubt), Visit::Rearm(1_100));
    for now in 1_100..1_106 {
        assert_eq!(visit(now, word, 100, doubt), Visit::Rearm(1_106));
    }
    assert_eq!(visit(1_106, word, 100, doubt), Visit::Expire);
}

#[test]
fn a_stamp_from_the_future_is_young() {
    assert_eq!(idle(1000, 1001), 0);
    assert_eq!(
        idle(u64::from(u32::MAX), 5),
        0,
        "written after the stamp has wrapped"
    );
    assert_eq!(idle(1 << 32, u32::MAX), 1);
    assert_eq!(
        visit(1000, Word::new(1500, 7, Seen(2)), 10, |_| 0),
        Visit::Rearm(1010)
    );
}

#[test]
fn a_flow_from_the_future_is_young_and_an_old_one_old() {
    assert_eq!(age(1_000, 1_001), 0);
    assert_eq!(age(1 << 32, 5), 0);
    assert_eq!(age((1 << 32) + 7, 5), 2);
    assert_eq!(age(0, 0x8000_0000 - 100_000), MAX_AGE + 100_000);
}
