//! Retransmission timers: RFC 6298, and what is none.
#![allow(missing_docs)]

use twheel_common::{
    flow::{Direction, FlowKey},
    packet::{Segment, tcp::ACK},
    rto::{Limits, Rare, Side, Timer},
};

const LIMITS: Limits = Limits {
    min: 200_000,
    max: 120_000_000,
};
/// Before the clock and the sequence numbers wrap.
const START: u32 = u32::MAX - 5_000;
const FIRST: u32 = u32::MAX - 1_500;

fn data(seq: u32, length: u32) -> Segment {
    Segment {
        key: FlowKey::default(),
        direction: Direction::FromLow,
        flags: ACK,
        seq,
        ack: 1,
        end: seq.wrapping_add(length),
        bytes: 40 + length,
        stamp: [0; 2],
        window: 1_000,
        reserved: 0,
    }
}

fn ack(ack: u32) -> Segment {
    Segment { ack, ..data(1, 0) }
}

fn stamped(segment: Segment, stamp: [u32; 2]) -> Segment {
    Segment { stamp, ..segment }
}

/// A side, how far it has come, and the time.
struct Sender {
    side: Side,
    rare: Rare,
    highest: u32,
    now: u32,
}

impl Sender {
    /// Of which everything up to here is acknowledged.
    fn idle() -> Self {
        let mut sender = Self {
            side: Side::default(),
            rare: Rare::default(),
            highest: FIRST,
            now: START,
        };
        // Says nothing.
        assert!(!sender.send(data(FIRST, 0)));
        sender
    }

    /// With a smoothed round trip of so many microseconds.
    fn with_rtt(rtt: u32) -> Self {
        let mut sender = Self::idle();
        for _ in 0..40 {
            sender.send_next(10);
            sender.pass(rtt);
            assert!(sender.answer(ack(sender.highest)));
        }
        sender
    }

    fn pass(&mut self, micros: u32) {
        self.now = self.now.wrapping_add(micros);
    }

    fn send(&mut self, segment: Segment) -> bool {
        let now = || self.now;
        let (side, rare) = (&mut self.side, &mut self.rare);
        let starts = side.sent(rare, self.highest, &segment, LIMITS, now);
        if segment.end.wrapping_sub(self.highest) as i32 > 0 {
            self.highest = segment.end;
        }
        starts
    }

    /// The next bytes; where they begin.
    fn send_next(&mut self, length: u32) -> u32 {
        let seq = self.highest;
        self.send(data(seq, length));
        seq
    }

    fn answer(&mut self, segment: Segment) -> bool {
        self.side
            .acknowledged(&self.rare, self.highest, &segment, || self.now)
    }

    fn timer(&self) -> Timer {
        self.side.timer(self.highest, LIMITS, self.now)
    }
}

/// As late as the sender's own timer may be.
fn late(rto: u32) -> u32 {
    rto + rto / 8
}

#[test]
fn the_first_sample_and_the_next_are_as_the_rfc_has_them() {
    let mut sender = Sender::idle();
    assert_eq!(sender.side.base(LIMITS), 1_000_000, "2.1");
    for (rtt, srtt, rttvar) in [
        (100_000, 100_000, 50_000),
        // 3/4 of the variation and 1/4 of what it is off; 7/8 and 1/8.
        (180_000, 110_000, 57_500),
        (30_000, 100_000, 63_125),
    ] {
        sender.send_next(100);
        sender.pass(rtt);
        assert!(sender.answer(ack(sender.highest)));
        assert_eq!((sender.side.srtt, sender.side.rttvar), (srtt, rttvar));
    }
    assert_eq!(sender.side.base(LIMITS), 100_000 + 4 * 63_125);
    // A steady round trip: the least margin.
    let sender = Sender::with_rtt(500);
    assert_eq!(sender.side.base(LIMITS), sender.side.srtt + 200_000);
    assert!(sender.side.srtt.abs_diff(500) < 10);
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
    // It runs on for what is oldest.
    assert!(!sender.send(data(first.wrapping_add(100), 100)));
    assert_eq!(sender.timer(), Timer::Runs(late(rto) - 50_000));
    assert!(sender.answer(ack(first.wrapping_add(100))));
    assert!(matches!(sender.timer(), Timer::Runs(left) if left > late(rto) - 10_000));
    assert_eq!(sender.side.outstanding(sender.highest), 100);
    // What acknowledges nothing new, or what nobody can have sent, does nothing.
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
        // Sent again only now: the timer is that of the sender, which is a little late.
        sender.pass(4_000);
        assert!(!sender.send(data(seq, 100)));
        assert_eq!(sender.timer(), Timer::Runs(waited));
    }
    assert_eq!(sender.side.retransmissions(), 3);
    let srtt = sender.side.srtt;
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.side.expiries(), 0);
    assert_eq!(
        sender.side.srtt, srtt,
        "Karn: no sample of what was sent again"
    );
    sender.send_next(100);
    assert_eq!(sender.timer(), Timer::Runs(late(rto)));
    // As often as it likes, and never longer than it may.
    for _ in 0..300 {
        sender.side.back_off(&sender.rare, sender.now);
    }
    assert_eq!(sender.side.rto(LIMITS), LIMITS.max);
}

#[test]
fn a_retransmission_that_is_due_is_the_expiry() {
    let mut sender = Sender::with_rtt(1_000);
    let rto = sender.side.base(LIMITS);
    let seq = sender.send_next(100);
    sender.send_next(100);
    sender.pass(rto + 4_000);
    assert_eq!(sender.timer(), Timer::Runs(rto / 8 - 4_000));
    assert!(sender.send(data(seq, 100)));
    assert_eq!(sender.timer(), Timer::Expired);
    sender.pass(9_000);
    sender.side.back_off(&sender.rare, sender.now);
    // From when it was sent again.
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
    // Once more after one timeout, without backoff: the first was a probe.
    let (rto, timer) = sent_again(205_000);
    assert_eq!(timer, Timer::Runs(late(2 * rto)));
    // Not until two have passed: it was the expiry.
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
    // A probe for the loss of the tail is none of the oldest segment.
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
    // To the second: no sample of the first.
    assert!(sender.answer(stamped(ack(sender.highest), [1, 307])));
    assert_eq!(sender.side.srtt, 0);
    // To the first, which was slow.
    let mut sender = Sender::idle();
    sender.send(stamped(data(FIRST, 100), [7, 1]));
    sender.pass(300_000);
    sender.send(stamped(data(FIRST, 100), [307, 1]));
    sender.pass(10_000);
    assert!(sender.answer(stamped(ack(sender.highest), [1, 7])));
    assert_eq!(sender.side.srtt, 310_000);
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
    // A closed window: probes, and no retransmission timer, until it opens.
    let seq = sender.send_next(10);
    sender.answer(Segment {
        window: 0,
        ..ack(seq)
    });
    sender.pass(10_000_000);
    assert_eq!(sender.timer(), Timer::Stopped);
    // Probes of stacks that send what does not fit.
    assert!(!sender.send(data(seq, 1)));
    assert_eq!(sender.side.retransmissions(), 0);
    // An old answer says nothing of the window.
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
        "later than a quarter of the round trip"
    );
    assert_eq!(overtaken(5_000, true), 1, "that was there");
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
    assert_eq!(sender.side.srtt, 7_000);
}
