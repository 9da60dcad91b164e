//! Retransmissions of a protocol over a lossy network: exponential backoff, and a last attempt.
//!
//! Nearly all of these timers are stopped, because the acknowledgement comes. Intervals differ, so
//! scheme 7 fits.

use std::collections::HashMap;

use twheel_timers::{Error, Hierarchical, Key, Scheme, Timers};

/// Ticks of 1 ms: the first timeout, and the most attempts.
const RTO: u64 = 200;
const ATTEMPTS: u32 = 5;

struct Segment {
    attempts: u32,
    timer: Key,
}

struct Sender {
    timers: Timers<u32, Hierarchical>,
    unacknowledged: HashMap<u32, Segment>,
    sent: u32,
    given_up: Vec<u32>,
}

impl Sender {
    fn send(&mut self, now: u64, number: u32) -> Result<(), Error> {
        let timer = self.timers.insert(now, RTO, number)?;
        let attempts = 1;
        self.unacknowledged
            .insert(number, Segment { attempts, timer });
        self.sent += 1;
        Ok(())
    }

    fn acknowledge(&mut self, number: u32) {
        if let Some(segment) = self.unacknowledged.remove(&number) {
            self.timers.remove(segment.timer);
        }
    }

    fn tick(&mut self, now: u64) -> Result<(), Error> {
        while let Some(expired) = self.timers.expire(now) {
            let number = expired.value;
            let Some(segment) = self.unacknowledged.get_mut(&number) else {
                continue;
            };
            if segment.attempts == ATTEMPTS {
                self.unacknowledged.remove(&number);
                self.given_up.push(number);
                continue;
            }
            segment.timer = self.timers.insert(now, RTO << segment.attempts, number)?;
            segment.attempts += 1;
            self.sent += 1;
        }
        Ok(())
    }
}

/// Runs the example.
pub fn main() -> Result<(), Error> {
    let mut sender = Sender {
        timers: Timers::new(Hierarchical::new(3, 1024)?),
        unacknowledged: HashMap::new(),
        sent: 0,
        given_up: Vec::new(),
    };
    for number in 0..1_000 {
        sender.send(0, number)?;
    }
    // All are acknowledged after 50 ms, but every tenth after its second attempt, and number 7 never.
    let mut now = 50;
    sender.tick(now)?;
    for number in (0..1_000).filter(|number| number % 10 > 0 && *number != 7) {
        sender.acknowledge(number);
    }
    assert_eq!(sender.timers.len(), 101);
    // Between two events the program sleeps.
    let mut wakes = 0;
    while let Some(next) = sender.timers.next_tick() {
        now = next;
        wakes += 1;
        sender.tick(now)?;
        if sender.sent == 1_101 {
            for number in (0..1_000).step_by(10) {
                sender.acknowledge(number);
            }
        }
    }
    assert_eq!(sender.given_up, [7]);
    assert_eq!(now, RTO * (1 + 2 + 4 + 8 + 16), "the last timeout");
    assert_eq!(sender.sent, 1_000 + 100 + 4);
    assert!(wakes < 20, "{wakes}");
    println!(
        "{} segments sent, 1 given up after {now} ms, {wakes} wake-ups",
        sender.sent
    );
    Ok(())
}
