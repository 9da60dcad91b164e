//! Events that leave the host: a process of its own, without capabilities, reads the history as it
//! grows and sends it on. Its position is kept on disk, so it goes on there after any death of
//! either side.
//!
//! | question | file |
//! |---|---|
//! | reading on, sending, trying again | `send.rs` |
//! | how events are written | `json.rs`, `syslog.rs`, `ipfix/` |
//! | where they go, and what of it has arrived | `target.rs` (files and sockets), `tables.rs` (ClickHouse), `kafka/`, `tls.rs` |
//! | what has not arrived, and how old it is | `backlog.rs` |
//! | how many events are missing, by instance | `losses.rs` |
//! | the position on disk | `position.rs` |

use std::{ffi::OsString, fmt, io, sync::Arc, time::Duration};

use crate::{
    history::{Past, Position},
    identity::Identity,
};

mod backlog;
pub mod ipfix;
pub mod json;
#[cfg(feature = "kafka")]
pub mod kafka;
mod losses;
pub mod position;
pub mod send;
pub mod syslog;
pub mod tables;
pub mod target;
pub mod tls;

/// Where events go.
pub trait Destination: fmt::Display {
    /// Opens it, or connects. What is written first stands at `from` in the history.
    ///
    /// # Errors
    ///
    /// It cannot be opened, or the other end is not there or refuses us.
    fn open(&self, from: Position) -> io::Result<Box<dyn Sink>>;

    /// What tells it from other destinations of the same kind, whatever the working directory is: it
    /// names the default file for the position.
    ///
    /// # Errors
    ///
    /// The working directory is unknown.
    fn lasting_name(&self) -> io::Result<OsString> {
        Ok(self.to_string().into())
    }

    /// Whether this error ends the export: it is no use to try again. `was_open`: it was opened before.
    fn ends_with(&self, _error: &io::Error, _was_open: bool) -> bool {
        false
    }

    /// What went wrong, in a sentence that names the destination.
    fn complaint(&self, error: &io::Error) -> String {
        format!("{self}: {error}")
    }
}

/// A destination that is open.
pub trait Sink {
    /// Writes what a format has completed. `next` is the position behind it. Waits while the other end
    /// takes no more.
    ///
    /// # Errors
    ///
    /// The other end has gone or refuses it, or the disk is full. What has not arrived must be written
    /// again to a sink that is opened anew.
    fn write(&mut self, bytes: &[u8], next: Position, format: &dyn Format) -> io::Result<()>;

    /// Everything before this position has arrived, whatever ends now. This is called once a second at
    /// least.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    fn arrived(&mut self) -> io::Result<Position>;

    /// Whether nothing that was written can be refused any more.
    fn is_settled(&self) -> bool;

    /// Whether the other end has closed the connection.
    fn is_closed(&self) -> bool;

    /// Whether the other end has taken something. A failure after that is a new one.
    fn has_worked(&self) -> bool;
}

/// What an export tells of itself.
pub struct Alive {
    /// Whose events it sends.
    pub identity: Arc<Identity>,
    /// How old the oldest event is that has not arrived yet; 0 if all have.
    pub behind: Duration,
    /// How many of its events could not be sent so far because the history does not have them; an upper
    /// bound.
    pub not_sent: u64,
}

/// How events are written.
///
/// `not_sent` is the number of events that could not be sent so far because the history does not
/// have them; an upper bound.
pub trait Format {
    /// Begins a session: another end reads from here on. What was not completed is dropped.
    fn begin(&mut self, not_sent: u64, to: &mut Vec<u8>);

    /// Appends an event, if this format has it.
    ///
    /// # Errors
    ///
    /// It cannot be written in this format.
    fn event(&mut self, past: &Past, to: &mut Vec<u8>) -> io::Result<()>;

    /// Appends that the export is alive, if this format tells it. This is called at the start, once
    /// a minute, and when events are missing.
    ///
    /// # Errors
    ///
    /// It cannot be written in this format.
    fn alive(&mut self, _alive: &Alive, _to: &mut Vec<u8>) -> io::Result<()> {
        Ok(())
    }

    /// Completes what is in the buffer: it is sent now. This is called once a second at least.
    fn complete(&mut self, not_sent: u64, to: &mut Vec<u8>);

    /// The messages of which these completed bytes consist, each as it is sent in a datagram.
    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a>;
}
