//! When the timer starts, expires and stops.

use twheel_common::{
    event::Pace,
    rto::{Limits, Rare, Side, Timer},
};

use crate::{LIMITS, START, Sender, ack, data, late};

#[test]
fn the_first_sample_and_the_next_are_as_the_rfc_has_them() {
    let mut sender = Sender::idle();
    assert_eq!(sender.side.base(LIMITS), 1_000_000, "2.1");
    for (rtt, srtt, rttvar) in [
        (100_000, 100_000, 50_000),
        // 3/4 of the old variation plus 1/4 of the difference; 7/8 of the old RTT plus 1/8 of the
        // new.
        (180_000, 110_000, 57_500),
        (30_000, 100_000, 63_125),
    ] {
        sender.send_next(100);
        sender.pass(rtt);
        assert!(sender.answer(ack(sender.highest)));
        assert_eq!(
            (sender.side.srtt.get(), sender.side.rttvar.get()),
            (srtt, rttvar)
        );
    }
    assert_eq!(sender.side.base(LIMITS), 100_000 + 4 * 63_125);
    // With a steady RTT, the least margin applies.
    let sender = Sender::with_rtt(500);
    assert_eq!(sender.side.base(LIMITS), sender.side.srtt.get() + 200_000);
    assert!(sender.side.srtt.get().abs_diff(500) < 10);
}

#[test]
fn the_timer_starts_with_data_and_anew_with_each_advance() {
    let mut sender = Sender::with_rtt(10_000);
    assert_eq!(sender.timer(), Timer::Stopped);
    let rto = sender.side.base(LIMITS);
    let first = sender.highest;
    assert!(sender.send(data(first, 100)));
    assert_eq!(sender.timer(), Timer::Runs(late(rto)));
    sender.pass(50_000);
    // The timer continues for the oldest segment.
    assert!(!sender.send(data(first.wrapping_add(100), 100)));
    assert_eq!(sender.timer(), Timer::Runs(late(rto) - 50_000));
    assert!(sender.answer(ack(first.wrapping_add(100))));
    assert!(matches!(sender.timer(), Timer::Runs(left) if left > late(rto) - 10_000));
    assert_eq!(sender.side.outstanding(sender.highest), 100);
    // Acknowledgments without progress, and of data that cannot have been sent, have no effect.
    assert!(!sender.answer(ack(first)));
    assert!(!sender.answer(ack(first.wrapping_add(1 << 25))));
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.timer(), Timer::Stopped);
}

#[test]
fn what_did_not_come_by_is_acknowledged_with_the_rest() {
    let mut sender = Sender::with_rtt(10_000);
    sender.send_next(100);
    let unseen = sender.highest.wrapping_add(500);
    assert!(sender.answer(ack(unseen)));
    assert_eq!(sender.timer(), Timer::Stopped);
    assert!(sender.send(data(unseen, 100)));
    assert_eq!(sender.side.outstanding(sender.highest), 100);
}

#[test]
fn expiries_back_off_and_progress_ends_that() {
    let mut sender = Sender::with_rtt(1_000);
    let rto = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    let mut waited = late(rto);
    for expiries in 1..=3 {
        sender.pass(waited - 1);
        assert_eq!(sender.timer(), Timer::Runs(1));
        sender.pass(1);
        assert_eq!(sender.timer(), Timer::Expired);
        sender.side.back_off(&sender.rare, sender.now);
        assert_eq!(sender.side.expiries(), expiries);
        waited = late(rto << expiries);
        assert_eq!(sender.timer(), Timer::Runs(waited));
        // Sent again only now: this is the sender's own timer, which is a little late.
        sender.pass(4_000);
        assert!(!sender.send(data(seq, 100)));
        assert_eq!(sender.timer(), Timer::Runs(waited));
    }
    assert_eq!(sender.side.retransmissions(), 3);
    let srtt = sender.side.srtt.get();
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.side.expiries(), 0);
    assert_eq!(
        sender.side.srtt.get(),
        srtt,
        "Karn's rule: a retransmitted segment gives no sample"
    );
    sender.send_next(100);
    assert_eq!(sender.timer(), Timer::Runs(late(rto)));
    // It may back off any number of times, but never beyond the maximum.
    for _ in 0..300 {
        sender.side.back_off(&sender.rare, sender.now);
    }
    assert_eq!(sender.side.rto(LIMITS), LIMITS.max);
}

#[test]
fn what_is_reported_is_what_is_known() {
    let mut sender = Sender::with_rtt(10_000);
    let base = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    sender.pass(late(base));
    sender.side.back_off(&sender.rare, sender.now);
    sender.pass(1_000);
    sender.send(data(seq, 100));
    let expected = Pace {
        srtt: 10_000,
        rto: 2 * base,
        retransmissions: 1,
    };
    assert_eq!(sender.side.pace(LIMITS), expected);
}

#[test]
fn an_answer_between_a_retransmission_and_the_visit_ends_the_expiry() {
    for advances in [100, 200] {
        let mut sender = Sender::with_rtt(1_000);
        let seq = sender.send_next(100);
        sender.send_next(100);
        sender.pass(sender.side.base(LIMITS));
        assert!(sender.send(data(seq, 100)));
        assert_eq!(sender.timer(), Timer::Expired);
        sender.pass(1_000);
        assert!(sender.answer(ack(seq.wrapping_add(advances))));
        assert!(!matches!(sender.timer(), Timer::Expired));
        // Data that comes then has a whole timeout.
        sender.pass(1_000);
        sender.send_next(100);
        let begun = if advances == 100 { 1_000 } else { 0 };
        let rto = sender.side.base(LIMITS);
        assert_eq!(sender.timer(), Timer::Runs(late(rto) - begun));
    }
}

#[test]
fn a_new_start_ends_an_expiry_that_nobody_has_looked_at() {
    // An acknowledgment beyond what was seen acknowledges all.
    let mut sender = Sender::with_rtt(1_000);
    let seq = sender.send_next(100);
    sender.pass(late(sender.side.base(LIMITS)));
    sender.side.back_off(&sender.rare, sender.now);
    assert_eq!(sender.side.expiries(), 1);
    sender.highest = seq;
    sender.send(data(seq, 100));
    assert_eq!(sender.side.expiries(), 0);
}

#[test]
fn a_flow_that_is_picked_up_has_its_timer_from_its_first_data() {
    for now in [5_000_000, 0x9000_0000, START] {
        let mut sender = Sender {
            side: Side::default(),
            rare: Rare::default(),
            highest: 0,
            now,
        };
        let from = 1_000_000;
        assert!(sender.send(data(from, 100)));
        sender.highest = from + 100;
        assert_eq!(sender.side.outstanding(sender.highest), 100);
        assert_eq!(sender.timer(), Timer::Runs(late(1_000_000)));
        sender.pass(300_000);
        assert_eq!(sender.timer(), Timer::Runs(late(1_000_000) - 300_000));
        assert!(sender.answer(ack(sender.highest)));
        assert_eq!(
            (sender.side.srtt.get(), sender.side.rttvar.get()),
            (300_000, 150_000)
        );
    }
}

#[test]
fn bounds_of_the_timeout_hold() {
    let limits = |min, max| Limits { min, max };
    let new = Side::default();
    assert_eq!(new.base(limits(1, 500_000)), 500_000);
    assert_eq!(new.base(limits(1, 1_000_001)), 1_000_000);
    let mut sender = Sender::with_rtt(100_000);
    let margin = 4 * sender.side.rttvar.get();
    assert!(margin > 2);
    assert_eq!(
        sender.side.base(limits(margin - 1, u32::MAX)),
        100_000 + margin
    );
    assert_eq!(
        sender.side.base(limits(margin + 1, u32::MAX)),
        100_001 + margin
    );
    assert_eq!(sender.side.base(limits(1, 100_000)), 100_000);
    sender.send_next(10);
    // Endless backoff neither wraps around nor resets.
    for expected in 1..=300 {
        sender.side.back_off(&sender.rare, sender.now);
        assert_eq!(sender.side.expiries(), expected.min(255));
        let rto = sender.side.rto(LIMITS);
        assert!(rto <= LIMITS.max && rto >= sender.side.base(LIMITS));
    }
    assert_eq!(sender.side.retransmissions(), 0);
}

#[test]
fn a_round_trip_is_of_the_segment_that_is_timed() {
    let mut sender = Sender::with_rtt(1_000);
    let srtt = sender.side.srtt.get();
    let seq = sender.send_next(100);
    sender.pass(5_000);
    // Only a part of it is acknowledged, so it is still in flight.
    assert!(sender.answer(ack(seq.wrapping_add(99))));
    assert_eq!(sender.side.srtt.get(), srtt);
    sender.pass(3_000);
    assert!(sender.answer(ack(seq.wrapping_add(100))));
    assert_eq!(sender.side.srtt.get(), srtt - srtt / 8 + 1_000);
    // An RTT is at least 1: 0 means that there was no sample.
    let mut sender = Sender::idle();
    sender.send_next(100);
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.side.srtt.get(), 1);
}

#[test]
fn a_timer_that_started_after_the_clock_was_read_is_new() {
    let mut sender = Sender::with_rtt(1_000);
    sender.send_next(100);
    let rto = sender.side.base(LIMITS);
    for early in [0, 1, 1_000_000] {
        let now = sender.now.wrapping_sub(early);
        let timer = sender.side.timer(sender.highest, LIMITS, now);
        assert_eq!(timer, Timer::Runs(late(rto)));
    }
}

#[test]
fn a_lone_segment_is_probed_for_before_the_first_expiry_alone() {
    let mut sender = Sender::with_rtt(1_000);
    let rto = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    sender.pass(late(rto));
    sender.side.back_off(&sender.rare, sender.now);
    sender.pass(2 * rto);
    assert!(sender.send(data(seq, 100)));
    assert_eq!(sender.timer(), Timer::Expired);
}
