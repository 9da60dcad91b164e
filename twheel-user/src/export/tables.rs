//! The tables of a ClickHouse server, as a destination. Lines are inserted in large batches, of which
//! each makes a part that the server has to merge; while one is inserted, the next one is filled.

use std::{
    fmt, io, mem,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use hyper::body::Bytes;

use super::{Destination, Format, Sink, json};
use crate::{
    clickhouse::{Fault, Server},
    history::Position,
};

/// A batch is inserted when it has so many bytes,
const BATCH: usize = 8 << 20;
/// or is so old.
const AGE: Duration = Duration::from_secs(1);

/// The tables of a database.
pub struct Tables {
    /// The server.
    pub server: Arc<Server>,
    /// The version of the schema that is needed.
    pub version: u32,
}

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.server.address();
        write!(f, "clickhouse:{}/{}", address.url, address.database)
    }
}

impl Destination for Tables {
    fn open(&self, from: Position) -> io::Result<Box<dyn Sink>> {
        self.server
            .check_version(self.version)
            .map_err(io::Error::other)?;
        // Without a buffer: whoever fills the next batch waits until this one was inserted.
        let (batches, taken) = sync_channel(0);
        let (done, results) = channel();
        let server = self.server.clone();
        thread::Builder::new()
            .name("insert".to_owned())
            .spawn(move || insert(&server, &taken, &done))?;
        Ok(Box::new(Inserting {
            batches,
            results,
            batch: Batch::default(),
            begun: None,
            next: from,
            arrived: from,
            unsettled: 0,
            has_worked: false,
        }))
    }

    fn complaint(&self, error: &io::Error) -> String {
        // It names the server.
        error.to_string()
    }
}

/// Lines for each table.
#[derive(Default)]
struct Batch {
    events: Vec<u8>,
    exports: Vec<u8>,
    /// The position behind them.
    next: Position,
}

/// Inserts batches, until one fails or there will be no more.
fn insert(
    server: &Server,
    batches: &Receiver<Batch>,
    done: &std::sync::mpsc::Sender<Result<Position, Fault>>,
) {
    for batch in batches {
        let next = batch.next;
        let tables = [("events", batch.events), ("exports", batch.exports)];
        let result = tables
            .into_iter()
            .filter(|(_, lines)| !lines.is_empty())
            .try_for_each(|(table, lines)| server.insert(table, Bytes::from(lines)));
        let has_failed = result.is_err();
        if done.send(result.map(|()| next)).is_err() || has_failed {
            return;
        }
    }
}

/// What is being inserted.
struct Inserting {
    batches: SyncSender<Batch>,
    results: Receiver<Result<Position, Fault>>,
    /// The batch that is being filled.
    batch: Batch,
    /// When it was begun.
    begun: Option<Instant>,
    /// The position behind what was written.
    next: Position,
    /// The position before which the server has everything.
    arrived: Position,
    /// Batches of which the server has not said that it has them.
    unsettled: u32,
    has_worked: bool,
}

impl Inserting {
    /// Hands the batch over, and waits for the one before.
    fn flush(&mut self) -> io::Result<()> {
        self.begun = None;
        let mut batch = mem::take(&mut self.batch);
        batch.next = self.next;
        self.unsettled += 1;
        match self.batches.send(batch) {
            Ok(()) => self.heed(),
            // An insert has failed.
            Err(_) => {
                self.heed()?;
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
    }

    /// Takes what the server has said by now.
    fn heed(&mut self) -> io::Result<()> {
        loop {
            match self.results.try_recv() {
                Ok(Ok(position)) => {
                    self.arrived = position;
                    self.unsettled -= 1;
                    self.has_worked = true;
                }
                Ok(Err(fault)) => return Err(io::Error::other(fault)),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }
}

impl Sink for Inserting {
    fn write(&mut self, bytes: &[u8], next: Position, format: &dyn Format) -> io::Result<()> {
        for line in format.messages(bytes) {
            match line.starts_with(json::ALIVE) {
                true => self.batch.exports.extend_from_slice(line),
                false => self.batch.events.extend_from_slice(line),
            }
        }
        self.next = next;
        self.begun.get_or_insert_with(Instant::now);
        match self.batch.events.len() >= BATCH {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn arrived(&mut self) -> io::Result<Position> {
        self.heed()?;
        if self.begun.is_some_and(|begun| begun.elapsed() >= AGE) {
            self.flush()?;
        }
        Ok(self.arrived)
    }

    fn is_settled(&self) -> bool {
        self.begun.is_none() && self.unsettled == 0
    }

    fn is_closed(&self) -> bool {
        false
    }

    fn has_worked(&self) -> bool {
        self.has_worked
    }
}
