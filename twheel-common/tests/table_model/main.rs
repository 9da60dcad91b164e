//! The flow table's protocol under a model checker: every interleaving of a few CPUs, and every
//! value that a load may give on a machine with weak ordering.
//!
//! The code is that of `twheel_common::table`; the memory is loom's. Loads and stores are relaxed,
//! so that they may give anything that coherence allows. What [`Records`] calls atomic is acquire
//! and release at once, which is less than the data plane has: on x86-64 these are locked
//! instructions, on arm64 `casal`, `swpal`, `ldsetal` (or exclusive pairs and a `dmb ish`), all of
//! which are full barriers if they write. A swap that fails orders nothing on the data plane, and
//! is relaxed here. The reader that only maps the table depends on the barrier, so here a release
//! fence follows every access that writes.
//!
//! A packet's stamp is a store of 32 bits into one half of a word. Loom has no such store; a
//! relaxed read-modify-write of the whole word looks the same to all other CPUs.
//!
//! Most scenarios limit the preemptions to the number that they name: loom switches threads where
//! they end, and at that many further points.
#![allow(missing_docs)]

mod cell;
mod scenarios;
mod table;

use self::{
    scenarios::{
        a_twin_in_front_of_a_packet, a_twin_that_leaves, an_end_in_doubt_against_both_sides,
        candidates, different_keys, eviction_against_a_new_life, eviction_against_a_packet, finds,
        insert_against_an_eviction_of_the_key, reading, reuse_under_a_packet, three_insert,
        two_insert, two_insert_behind_an_eviction, two_insert_one_in_front,
    },
    table::Broken,
};

#[test]
fn a_new_life_and_its_end_do_not_mix() {
    eviction_against_a_new_life(Broken::Nothing);
}

#[test]
fn a_connection_that_goes_on_is_established_again() {
    an_end_in_doubt_against_both_sides(Broken::Nothing);
}

#[test]
fn a_syn_begins_a_life_once_it_is_answered() {
    candidates(Broken::Nothing);
}

#[test]
fn a_note_without_a_swap_is_found() {
    assert!(finds(|| an_end_in_doubt_against_both_sides(Broken::Note)));
    assert!(finds(|| candidates(Broken::Note)));
}

#[test]
fn a_reader_sees_a_flow_whole() {
    reading(Broken::Nothing);
}

#[test]
fn of_two_that_enter_a_key_one_does() {
    two_insert(Broken::Nothing);
}

#[test]
fn a_key_that_ends_and_is_entered_at_once_stands_once_at_most() {
    insert_against_an_eviction_of_the_key(Broken::Nothing);
}

#[test]
fn of_three_that_enter_a_key_one_does() {
    three_insert(Broken::Nothing);
}

#[test]
fn a_record_freed_in_front_brings_no_duplicate() {
    two_insert_behind_an_eviction(Broken::Nothing);
}

#[test]
fn no_two_give_way_to_one_another() {
    two_insert_one_in_front(Broken::Nothing);
}

#[test]
fn a_flow_lives_with_its_packet_or_ends_without() {
    eviction_against_a_packet(Broken::Nothing);
}

#[test]
fn a_late_packet_changes_no_stranger() {
    reuse_under_a_packet(Broken::Nothing);
}

#[test]
fn a_record_has_one_flow() {
    different_keys(Broken::Nothing);
}

#[test]
fn a_packet_finds_its_flow_and_not_its_twin() {
    a_twin_in_front_of_a_packet(Broken::Nothing);
}

#[test]
fn a_twin_that_leaves_takes_its_mark_along() {
    a_twin_that_leaves(Broken::Nothing);
}

#[test]
fn a_claim_without_a_swap_is_found() {
    assert!(finds(|| two_insert(Broken::Claim)));
    assert!(finds(|| different_keys(Broken::Claim)));
}

#[test]
fn a_look_before_the_announcement_alone_is_found() {
    assert!(finds(|| two_insert(Broken::Announce)));
    assert!(finds(|| two_insert_behind_an_eviction(Broken::Announce)));
}

#[test]
fn other_defects_are_found() {
    type Scenario = fn(Broken);
    let defects: [(Broken, Scenario); 14] = [
        (Broken::NoSecondLook, two_insert_one_in_front),
        (Broken::Alone, two_insert),
        (Broken::FreeFirst, reuse_under_a_packet),
        (Broken::Kill, eviction_against_a_packet),
        (Broken::Generation, reuse_under_a_packet),
        (Broken::Generation, reading),
        (Broken::WordFirst, reuse_under_a_packet),
        (Broken::Starting, eviction_against_a_new_life),
        (Broken::Unfenced, reading),
        (Broken::Claim, two_insert_behind_an_eviction),
        (Broken::Twin, different_keys),
        (Broken::Twin, a_twin_in_front_of_a_packet),
        (Broken::LetGo, different_keys),
        (Broken::Mark, a_twin_that_leaves),
    ];
    for (broken, scenario) in defects {
        assert!(finds(|| scenario(broken)), "{broken:?}");
    }
}
