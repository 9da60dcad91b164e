//! Bits and packets a second of each flow: what was counted between two readings of the table.
//!
//! A reading is kept by the index of a flow's record, in 40 bytes for each record that the table
//! has; so it takes no search, and memory does not grow with the flows that come and go.

use std::time::{Duration, Instant};

use twheel_common::flow::Traffic;

use crate::{flows::Flow, model::Tracked};

/// How much older a flow may seem, because its first packet's time is in clock units.
const SLACK: Duration = Duration::from_millis(100);

/// How fast a flow sends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Bits a second of the initiator and the responder.
    pub bits: [f32; 2],
    /// Packets a second of both together.
    pub packets: f32,
}

#[derive(Clone, Copy, Default)]
struct Reading {
    bytes: [u64; 2],
    packets: u32,
    /// Tells the flow from others that the record has held.
    life: u32,
    /// Since the reading before; `None` if there was none.
    speed: Option<Speed>,
}

/// The speeds of all flows of a table.
#[derive(Default)]
pub struct Speeds {
    records: Vec<Reading>,
    /// When the table was read last.
    at: Option<Instant>,
    /// Time between the last two readings.
    elapsed: Option<Duration>,
}

impl Speeds {
    /// Whether speeds are known: bytes are counted, and the table was read twice.
    pub fn are_known(&self) -> bool {
        self.elapsed.is_some() && !self.records.is_empty()
    }

    /// A new reading of the table begins; it has this many records, or 0 if nothing is counted.
    pub fn begin(&mut self, records: u32) {
        let records = records as usize;
        if self.records.len() != records {
            *self = Self {
                records: vec![Reading::default(); records],
                ..Self::default()
            };
        }
        let now = Instant::now();
        self.elapsed = self.at.map(|before| now - before);
        self.at = Some(now);
    }

    /// Reads a flow, after [`begin`](Self::begin).
    pub fn read(&mut self, flow: &Flow, tracked: &Tracked) -> Option<Speed> {
        let sides = tracked.account?;
        let reading = self.records.get_mut(flow.index as usize)?;
        let now = Reading {
            bytes: sides.map(|side| side.bytes),
            packets: sides
                .iter()
                .map(|side| side.packets as u32)
                .fold(0, u32::wrapping_add),
            life: life(flow),
            speed: None,
        };
        let is_same = reading.life == now.life;
        // A younger flow has sent all that it has sent since the last reading. (A record that kept
        // changing while it was read may have been passed over then.)
        let is_younger = |elapsed| tracked.age <= elapsed + SLACK;
        let before = if is_same {
            *reading
        } else {
            Reading::default()
        };
        let elapsed = self.elapsed.filter(|it| is_same || is_younger(*it));
        let speed = elapsed.map(|elapsed| {
            let seconds = elapsed.as_secs_f32().max(f32::EPSILON);
            let bits = |side: usize| {
                let bytes = now.bytes[side].saturating_sub(before.bytes[side]);
                bytes as f32 * 8.0 / seconds
            };
            Speed {
                bits: [bits(0), bits(1)],
                packets: now.packets.wrapping_sub(before.packets) as f32 / seconds,
            }
        });
        *reading = Reading { speed, ..now };
        speed
    }

    /// The speed of a flow, as it was last read.
    pub fn get(&self, flow: &Flow) -> Option<Speed> {
        let reading = self.records.get(flow.index as usize)?;
        reading.speed.filter(|_| reading.life == life(flow))
    }
}

/// 12 bits of the generation and 20 of the time of the first packet: never 0.
fn life(flow: &Flow) -> u32 {
    (u32::from(flow.word.generation()) << 20 | flow.created & 0xf_ffff).max(1)
}

/// Packets and bytes of both sides.
pub fn both(account: Option<[Traffic; 2]>) -> Traffic {
    let [one, two] = account.unwrap_or_default();
    Traffic {
        packets: one.packets + two.packets,
        bytes: one.bytes + two.bytes,
    }
}
