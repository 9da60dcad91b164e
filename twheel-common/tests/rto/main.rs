//! Retransmission timers: RFC 6298, and what does not count as a retransmission.
#![allow(missing_docs)]

mod retransmissions;
mod timer;

use twheel_common::{
    flow::{Direction, FlowKey},
    packet::{Segment, tcp::ACK},
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
/// Shortly before the clock and the sequence numbers wrap around.
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

/// A side, its next sequence number, and the time.
struct Sender {
    side: Side,
    rare: Rare,
    highest: u32,
    now: u32,
}

impl Sender {
    /// A sender whose data is all acknowledged.
    fn idle() -> Self {
        let mut sender = Self {
            side: Side::default(),
            rare: Rare::default(),
            highest: FIRST,
            now: START,
        };
        // A segment without data starts no timer.
        assert!(!sender.send(data(FIRST, 0)));
        sender
    }

    /// A sender with a smoothed RTT of this many microseconds.
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
        let (side, rare) = (&self.side, &self.rare);
        let starts = side.sent(rare, self.highest, &segment, timing(now));
        if segment.end.wrapping_sub(self.highest) as i32 > 0 {
            self.highest = segment.end;
        }
        starts
    }

    /// Sends the next bytes. Returns their sequence number.
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

/// The timeout plus the time by which the sender's own timer may be late.
fn late(rto: u32) -> u32 {
    rto + rto / 8
}
