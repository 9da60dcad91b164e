//! Kills `twheel run` again and again, and checks what it leaves behind.

mod accounts;
mod killed;
mod refused;
mod traffic;
mod unwritten;

use std::{
    sync::Arc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use twheel::{
    data_plane::{STEP_BUDGET, UserCounters},
    history::{self, DEFAULT_BYTES},
    inspect::Reader,
    pins::{Instance, Pins},
    ring::{Events, Read},
    stepper::pin_to,
};
use twheel_tests::{directory::Directory, netns::Namespace, pair::SERVER};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// xorshift64*: the same seed gives the same moments.
struct Random(u64);

impl Random {
    /// Seeds it from `TWHEEL_SEED`, or from the clock.
    fn new() -> Self {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH);
        let clock = clock.map_or(1, |since| since.as_nanos() as u64);
        let seed = std::env::var("TWHEEL_SEED")
            .ok()
            .and_then(|it| it.parse().ok());
        let seed = seed.unwrap_or(clock | 1);
        eprintln!("TWHEEL_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % end
    }
}

/// Begins and ends flows on this CPU; must be called in their namespace. Returns their pins, the
/// ring, and the events that are in it.
fn end(host: &Namespace, flows: u32) -> Result<(Pins, Events, Vec<Read>)> {
    pin_to(0)?;
    host.begin_flows(SERVER, flows)?;
    thread::sleep(millis(1500));
    let pins = Instance::with(SERVER)?;
    pins.callable("twheel_step")?.step(STEP_BUDGET)?;
    let mut events = Events::open(pins.map("EVENTS")?)?;
    let mut batch = Vec::new();
    events.read(&mut batch, usize::MAX);
    assert_eq!(batch.len(), flows as usize);
    Ok((pins, events, batch))
}

/// A writer of an instance's history, as a run has it.
fn keep(history: &Directory, reader: &Reader) -> Result<history::Writer> {
    let directory = history::Directory::make(&history.0, reader.pins())?;
    let tally = Arc::new(UserCounters::open(reader.pins())?);
    let (bytes, measure) = (Some(DEFAULT_BYTES), reader.measure());
    history::Writer::start(&directory, reader.pins(), tally, bytes, measure)
}
