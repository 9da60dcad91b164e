//! Events that leave the host: a process of its own, without capabilities, reads the history as it
//! grows and sends it on. Its position is kept on disk, so it goes on there after any death of
//! either side.
//!
//! | question | file |
//! |---|---|
//! | reading on, sending, trying again | `send.rs` |
//! | how events are written | `json.rs`, `syslog.rs`, `ipfix/` |
//! | where it goes, and what of it has arrived | `sink.rs`, `tls.rs` |
//! | the position on disk | `position.rs` |

use std::io;

use crate::history::Past;

pub mod ipfix;
pub mod json;
pub mod position;
pub mod send;
pub mod sink;
pub mod syslog;
pub mod tls;

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

    /// Completes what is in the buffer: it is sent now. This is called once a second at least.
    fn complete(&mut self, not_sent: u64, to: &mut Vec<u8>);

    /// The messages of which these completed bytes consist, each as it is sent in a datagram.
    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a>;
}
