//! Retransmission timers: RFC 6298, and what is none.
#![allow(missing_docs)]

use twheel_common::{
    event::Pace,
    flow::{Direction, FlowKey},
    packet::{
        Segment,
        tcp::{ACK, RST},
    },
    rto::{Limits, Rare, Side, Timer, Timing},
};

const LIMITS: Limits = Limits {
    min: 200_000,
    max: 120_000_000,
};

fn timing<N>(now: N) -> Timing<N> {
    Timing {
        limits: LIMITS,
        now,
    }
}
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
        packets: 1,
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
        let starts = side.sent(rare, self.highest, &segment, timing(now));
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
    // What was lost before it came by here is sent again.
    let late = now.wrapping_add(10_000);
    let highest = side.highest(rare, position);
    side.sent(rare, highest, &data(position, 100), timing(|| late));
    assert_eq!(side.retransmissions(), 1);
    assert_eq!(side.highest(rare, position + 100), highest);
    // And once the position is there, that counts.
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
    assert_eq!(sender.side.srtt, 7_000);
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
        // What comes then has a whole timeout.
        sender.pass(1_000);
        sender.send_next(100);
        let begun = if advances == 100 { 1_000 } else { 0 };
        let rto = sender.side.base(LIMITS);
        assert_eq!(sender.timer(), Timer::Runs(late(rto) - begun));
    }
}

#[test]
fn a_new_start_ends_an_expiry_that_nobody_has_looked_at() {
    // All is acknowledged by what did not come by here: beyond what was sent.
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
        assert_eq!((sender.side.srtt, sender.side.rttvar), (300_000, 150_000));
    }
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
    // What is sent late: from, up to, after how long; and whether that is a retransmission.
    for (from, to, after, again) in [
        (100, 200, 1, 0),
        (100, 150, 9_999, 0),
        (150, 200, 9_999, 0),
        (100, 200, 10_000, 1),
        // More than what was missing.
        (99, 200, 1, 1),
        (100, 201, 1, 1),
    ] {
        let mut sender = Sender::with_rtt(40_000);
        assert_eq!(sender.side.srtt, 40_000);
        let seq = sender.send_next(100);
        sender.send(data(seq.wrapping_add(200), 100));
        sender.pass(after);
        sender.send(data(seq.wrapping_add(from), to - from));
        assert_eq!(sender.side.retransmissions(), again, "{from} {to} {after}");
    }
    // There is none at first.
    let mut sender = Sender::with_rtt(40_000);
    let seq = sender.send_next(100);
    sender.send(data(seq, 100));
    assert_eq!(sender.side.retransmissions(), 1);
}

#[test]
fn bounds_of_the_timeout_hold() {
    let limits = |min, max| Limits { min, max };
    let new = Side::default();
    assert_eq!(new.base(limits(1, 500_000)), 500_000);
    assert_eq!(new.base(limits(1, 1_000_001)), 1_000_000);
    let mut sender = Sender::with_rtt(100_000);
    let margin = 4 * sender.side.rttvar;
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
    // Backed off without end: neither wraps nor forgets.
    for expected in 1..=300 {
        sender.side.back_off(&sender.rare, sender.now);
        assert_eq!(sender.side.expiries(), expected.min(255));
        let rto = sender.side.rto(LIMITS);
        assert!(rto <= LIMITS.max && rto >= sender.side.base(LIMITS));
    }
    assert_eq!(sender.side.retransmissions(), 0);
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
        assert_eq!(sender.side.una == end.wrapping_add(beyond), counts);
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

#[test]
fn a_round_trip_is_of_the_segment_that_is_timed() {
    let mut sender = Sender::with_rtt(1_000);
    let srtt = sender.side.srtt;
    let seq = sender.send_next(100);
    sender.pass(5_000);
    // A part of it: it is still under way.
    assert!(sender.answer(ack(seq.wrapping_add(99))));
    assert_eq!(sender.side.srtt, srtt);
    sender.pass(3_000);
    assert!(sender.answer(ack(seq.wrapping_add(100))));
    assert_eq!(sender.side.srtt, srtt - srtt / 8 + 1_000);
    // No round trip takes no time: 0 says that there was no sample.
    let mut sender = Sender::idle();
    sender.send_next(100);
    assert!(sender.answer(ack(sender.highest)));
    assert_eq!(sender.side.srtt, 1);
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
