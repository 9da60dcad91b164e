//! Carries lines from a broker's topic to the table `kafka` in ClickHouse.
//!
//! In ClickHouse itself the table's engine does that. The engine to be had for tests cannot: there
//! the table stores nothing, and passes what is inserted on to the same views.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Result;
use rdkafka::{
    ClientConfig, Message,
    consumer::{BaseConsumer, CommitMode, Consumer},
};

use super::{
    hosts::Network,
    servers::{Broker, Database},
};

/// Most lines of an insert.
const LINES: usize = 5_000;
/// The longest time from an insert's first line to the insert.
const WAIT: Duration = Duration::from_millis(500);
/// From an insert that has failed to the next attempt.
const AGAIN: Duration = Duration::from_millis(500);

/// A running consumer. It ends when this is dropped.
pub struct Carrier {
    stop: Arc<AtomicBool>,
    /// Lines that were inserted.
    pub carried: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Carrier {
    /// Starts a consumer on the hub.
    ///
    /// # Errors
    ///
    /// The hub cannot be entered.
    pub fn start(network: &Network, topic: &str) -> Result<Self> {
        let (stop, carried) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (told, count, topic) = (stop.clone(), carried.clone(), topic.to_owned());
        let thread = network.hub.spawn(move || carry(&topic, &told, &count))?;
        Ok(Self {
            stop,
            carried,
            thread: Some(thread),
        })
    }

    /// Ends it.
    ///
    /// # Errors
    ///
    /// It had ended with an error.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

fn carry(topic: &str, stop: &AtomicBool, carried: &AtomicU64) -> Result<()> {
    // Its threads are in the namespace of the thread that makes it.
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", Broker::address())
        .set("group.id", "clickhouse-twheel")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        // The broker assigns partitions after half of it.
        .set("session.timeout.ms", "6000")
        .create()?;
    consumer.subscribe(&[topic])?;
    let server = Database::server("twheel")?;
    while !stop.load(Relaxed) {
        let (mut lines, mut count) = (Vec::new(), 0);
        let mut end = Instant::now() + WAIT;
        while count < LINES && Instant::now() < end && !stop.load(Relaxed) {
            // An error: the broker is away. It comes back, or the caller stops this.
            let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) else {
                continue;
            };
            if count == 0 {
                end = Instant::now() + WAIT;
            }
            lines.extend_from_slice(message.payload().unwrap_or_default());
            lines.push(b'\n');
            count += 1;
        }
        if count == 0 {
            continue;
        }
        // What is inserted twice is counted once, so the same lines are tried until they are there.
        while server.insert("kafka", lines.clone().into()).is_err() {
            if stop.load(Relaxed) {
                return Ok(());
            }
            thread::sleep(AGAIN);
        }
        carried.fetch_add(count as u64, Relaxed);
        // If it fails, the lines come again.
        let _ = consumer.commit_consumer_state(CommitMode::Sync);
    }
    Ok(())
}
