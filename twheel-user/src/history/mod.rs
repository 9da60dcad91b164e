//! The history: a bounded log of ended flows on disk, which outlives the running twheel.
//!
//! Each instance has a directory of segments. A segment has at most an eighth (`SEGMENTS`) of the
//! history's maximum size; when a new one is begun, the oldest is removed. A segment is a header
//! and then records of one size, each with a checksum. So a record that was torn by a power failure
//! costs no other:
//!
//! ```text
//! header   magic 8, version 4, bytes of a record 4, nanoseconds in a clock unit 4, one way 4,
//!          zeros 4, checksum 4
//! record   checksum 4, kind 4, when 8 (microseconds since 1970), ring 4, end 8, body 184
//! ```
//!
//! `ring` tells the instance's present ring of events from its earlier ones, and `end` is where the
//! event ended in the ring. So a new writer knows which of the events in the ring are in the
//! history already: each event is there once, whichever process was killed.
//!
//! The body depends on the record's kind:
//!
//! - an event: the end of a flow, an expired retransmission timer, an action, something of the run
//!   (`record.rs`);
//! - a number and a name of a rule, an interface or a zone, before the first event in each segment
//!   that needs the name; likewise the names of the host and the instance;
//! - how many events the history has lost since the last record of this kind, and how many lost
//!   events the instance has counted in all. Each segment but the first begins with such a record,
//!   and each writer begins and ends with one.
//!
//! All numbers are in machine byte order: a history is read on the machine that wrote it.
//!
//! | question | file |
//! |---|---|
//! | the format on disk | `format.rs`, `record.rs` |
//! | the directory of an instance, or of an interface | `directory.rs` |
//! | beginning, continuing and removing segments | `log.rs` |
//! | the writer | `writer.rs` |
//! | the reader | `reader.rs` |

mod directory;
mod format;
mod log;
mod reader;
mod record;
#[cfg(test)]
mod tests;
mod writer;

pub(crate) use self::record::HOOKS;
pub use self::{
    directory::{DIRECTORY, Directory, interfaces_of, name_of},
    format::LEAST_BYTES,
    log::DEFAULT_BYTES,
    reader::{Follow, HistoryReader, Past, PastEvent, Position},
    record::Own,
    writer::Writer,
};
