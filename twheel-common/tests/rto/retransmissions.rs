//! What counts as a retransmission, and what does not.

use twheel_common::{
    packet::{Segment, tcp::RST},
    rto::{Rare, Side, Timer},
};

use crate::{FIRST, LIMITS, START, Sender, ack, data, late, stamped, timing};

#[test]
fn a_retransmission_that_is_due_is_the_expiry() {
    let mut sender = Sender::with_rtt(1_000);
    let rto = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    sender.send_next(100);
    sender.pass(rto + 4_000);
    assert_eq!(sender.timer(), Timer::Runs(rto / 8 - 4_000));
    // However often it is sent again before the wheel comes.
    for _ in 0..2 {
        assert!(sender.send(data(seq, 100)));
        assert_eq!(sender.timer(), Timer::Expired);
    }
    sender.pass(9_000);
    sender.side.back_off(&sender.rare, sender.now);
    // Counted from the retransmission.
    assert_eq!(sender.timer(), Timer::Runs(late(2 * rto) - 9_000));
}

#[test]
fn what_follows_tells_a_probe_of_a_lone_segment_from_an_expiry() {
    let sent_again = |after: u32| {
        let mut sender = Sender::with_rtt(1_000);
        let rto = sender.side.base(LIMITS);
        let seq = sender.send_next(100);
        sender.pass(rto + 4_000);
        assert!(!sender.send(data(seq, 100)));
        assert_eq!(sender.timer(), Timer::Runs(late(rto)));
        sender.pass(after.min(late(rto)));
        if after < late(rto) {
            assert!(sender.send(data(seq, 100)));
        }
        assert_eq!(sender.timer(), Timer::Expired);
        sender.side.back_off(&sender.rare, sender.now);
        assert_eq!(sender.side.expiries(), 1);
        (rto, sender.timer())
    };
    // Sent again after one more timeout, without backoff: so the first was a probe.
    let (rto, timer) = sent_again(205_000);
    assert_eq!(timer, Timer::Runs(late(2 * rto)));
    // Not sent again until two timeouts have passed: so the first was the expiry.
    let (rto, timer) = sent_again(1_000_000);
    assert_eq!(timer, Timer::Runs(late(2 * rto) - late(rto)));
}

#[test]
fn an_early_retransmission_starts_the_timer_anew() {
    let mut sender = Sender::with_rtt(1_000);
    let rto = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    sender.send_next(100);
    sender.pass(20_000);
    // A tail loss probe is no retransmission of the oldest segment.
    sender.send(data(seq.wrapping_add(100), 100));
    assert_eq!(sender.timer(), Timer::Runs(late(rto) - 20_000));
    // A fast retransmission is.
    sender.send(data(seq, 100));
    assert_eq!(sender.timer(), Timer::Runs(late(rto)));
    assert_eq!(sender.side.retransmissions(), 2);
}

#[test]
fn timestamps_tell_which_sending_an_answer_is_to() {
    let mut sender = Sender::idle();
    sender.send(stamped(data(FIRST, 100), [7, 1]));
    sender.pass(300_000);
    sender.send(stamped(data(FIRST, 100), [307, 1]));
    sender.pass(10_000);
    // An answer to the second sending: the first gives no sample.
    assert!(sender.answer(stamped(ack(sender.highest), [1, 307])));
    assert_eq!(sender.side.srtt.get(), 0);
    // An answer to the first sending, which was slow.
    let mut sender = Sender::idle();
    sender.send(stamped(data(FIRST, 100), [7, 1]));
    sender.pass(300_000);
    sender.send(stamped(data(FIRST, 100), [307, 1]));
    sender.pass(10_000);
    assert!(sender.answer(stamped(ack(sender.highest), [1, 7])));
    assert_eq!(sender.side.srtt.get(), 310_000);
}

#[test]
fn keep_alives_and_probes_of_a_closed_window_are_no_retransmissions() {
    let mut sender = Sender::with_rtt(1_000);
    let last = sender.highest.wrapping_sub(1);
    for length in [0, 1] {
        assert!(!sender.send(data(last, length)));
    }
    assert_eq!(sender.side.retransmissions(), 0);
    assert_eq!(sender.timer(), Timer::Stopped);
    // The window is closed: there are probes but no retransmission timer, until it opens.
    let seq = sender.send_next(10);
    sender.answer(Segment {
        window: 0,
        ..ack(seq)
    });
    sender.pass(10_000_000);
    assert_eq!(sender.timer(), Timer::Stopped);
    // Probes of stacks that send data that does not fit.
    assert!(!sender.send(data(seq, 1)));
    assert_eq!(sender.side.retransmissions(), 0);
    // An old acknowledgment tells nothing about the window.
    sender.answer(ack(seq.wrapping_sub(5)));
    assert_eq!(sender.timer(), Timer::Stopped);
    sender.answer(ack(seq));
    assert_eq!(sender.timer(), Timer::Runs(late(sender.side.base(LIMITS))));
}

#[test]
fn what_was_overtaken_is_not_sent_again() {
    let overtaken = |late_by: u32, again: bool| {
        let mut sender = Sender::with_rtt(40_000);
        let seq = sender.highest;
        sender.send(data(seq.wrapping_add(100), 100));
        sender.pass(late_by);
        sender.send(data(seq, 100));
        if again {
            sender.send(data(seq.wrapping_add(100), 100));
        }
        sender.side.retransmissions()
    };
    assert_eq!(overtaken(5_000, false), 0);
    assert_eq!(
        overtaken(15_000, false),
        1,
        "later than a quarter of the RTT"
    );
    assert_eq!(overtaken(5_000, true), 1, "this segment had been seen");
}

#[test]
fn what_lies_behind_a_gap_was_sent_though_the_position_waits() {
    let mut sender = Sender::with_rtt(10_000);
    let position = sender.highest;
    let now = sender.now;
    let (side, rare) = (&mut sender.side, &mut sender.rare);
    assert_eq!(side.highest(rare, position), position);
    for number in [1, 2, 3] {
        let highest = side.highest(rare, position);
        side.sent(
            rare,
            highest,
            &data(position + number * 100, 100),
            timing(|| now),
        );
        assert_eq!(side.highest(rare, position), position + number * 100 + 100);
    }
    assert_eq!(side.outstanding(side.highest(rare, position)), 400);
    // Data that was lost before it was seen here is sent again.
    let late = now.wrapping_add(10_000);
    let highest = side.highest(rare, position);
    side.sent(rare, highest, &data(position, 100), timing(|| late));
    assert_eq!(side.retransmissions(), 1);
    assert_eq!(side.highest(rare, position + 100), highest);
    // Once the position has caught up, it counts.
    assert_eq!(side.highest(rare, highest), highest);
    assert_eq!(side.highest(rare, highest + 100), highest + 100);
}

#[test]
fn a_side_that_was_not_seen_has_no_timer() {
    let mut sender = Sender {
        side: Side::default(),
        rare: Rare::default(),
        highest: FIRST,
        now: START,
    };
    assert!(!sender.answer(ack(FIRST)));
    assert_eq!(sender.timer(), Timer::Stopped);
    // A handshake is timed, too.
    let syn = Segment {
        end: FIRST.wrapping_add(1),
        ..data(FIRST, 0)
    };
    assert!(sender.send(syn));
    assert_eq!(sender.timer(), Timer::Runs(late(1_000_000)));
    sender.pass(7_000);
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.side.srtt.get(), 7_000);
}

#[test]
fn a_retransmission_is_due_an_eighth_before_the_timeout() {
    for (early, expires) in [(1, false), (0, true)] {
        let mut sender = Sender::with_rtt(1_000);
        let rto = sender.side.base(LIMITS);
        let seq = sender.send_next(100);
        sender.send_next(100);
        sender.pass(rto - rto / 8 - early);
        assert_eq!(sender.send(data(seq, 100)), expires);
        let expected = match expires {
            true => Timer::Expired,
            false => Timer::Runs(late(rto)),
        };
        assert_eq!(sender.timer(), expected);
    }
}

#[test]
fn a_gap_that_opens_in_flight_is_one() {
    // A segment that comes late: where it begins and ends, after how long it comes, and whether it
    // is a retransmission.
    for (from, to, after, again) in [
        (100, 200, 1, 0),
        (100, 150, 9_999, 0),
        (150, 200, 9_999, 0),
        (100, 200, 10_000, 1),
        // More than the missing data.
        (99, 200, 1, 1),
        (100, 201, 1, 1),
    ] {
        let mut sender = Sender::with_rtt(40_000);
        assert_eq!(sender.side.srtt.get(), 40_000);
        let seq = sender.send_next(100);
        sender.send(data(seq.wrapping_add(200), 100));
        sender.pass(after);
        sender.send(data(seq.wrapping_add(from), to - from));
        assert_eq!(sender.side.retransmissions(), again, "{from} {to} {after}");
    }
    // At first there is no gap.
    let mut sender = Sender::with_rtt(40_000);
    let seq = sender.send_next(100);
    sender.send(data(seq, 100));
    assert_eq!(sender.side.retransmissions(), 1);
}

#[test]
fn retransmissions_are_counted_to_65535() {
    let mut sender = Sender::with_rtt(1_000);
    let seq = sender.send_next(100);
    for count in 1..=70_000_u32 {
        sender.send(data(seq, 100));
        assert_eq!(sender.side.retransmissions(), count.min(65_535));
        assert_eq!(sender.side.expiries(), 0);
    }
}

#[test]
fn so_much_and_no_more_may_be_acknowledged_unseen() {
    for (beyond, counts) in [(0, true), (1 << 24, true), ((1 << 24) + 1, false)] {
        let mut sender = Sender::with_rtt(1_000);
        sender.send_next(100);
        let end = sender.highest;
        assert_eq!(sender.answer(ack(end.wrapping_add(beyond))), counts);
        assert_eq!(sender.side.una.get() == end.wrapping_add(beyond), counts);
    }
}

#[test]
fn segments_without_an_acknowledgment_acknowledge_nothing() {
    let mut sender = Sender::with_rtt(1_000);
    sender.send_next(100);
    let reset = Segment {
        flags: RST,
        ..ack(sender.highest)
    };
    assert!(!sender.answer(reset));
    assert_eq!(sender.side.outstanding(sender.highest), 100);
}
