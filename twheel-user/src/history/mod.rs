//! What has ended, on disk: a bounded history that outlives the loader.
//!
//! An instance has a directory with segments, of which each is `SEGMENTS`th of the room there is; the oldest goes
//! when a new one is begun. A segment is a header and then records of one size, each with a checksum, so that one that was
//! torn when the power went costs nothing but itself:
//!
//! ```text
//! header   magic 8, version 4, bytes of a record 4, nanoseconds in a clock unit 4, one way 4, zeros 4, checksum 4
//! record   checksum 4, kind 4, when 8 (milliseconds since 1970), ring 4, end 8, body 128
//! ```
//!
//! `ring` tells the ring of events from others that the instance has had, and `end` is where the event ended in it. So a
//! writer that goes on knows which of the events that it finds in the ring the history has: each is in it once, whatever
//! killed whom.
//!
//! The body is an [`Event`](twheel_common::event::Event); or, before the first event of a rule in each segment, the rule's
//! number and name; or how many events up to there the history has lost since it said so last, and how many the instance has counted by then, with which
//! each writer and each segment but the first begins, and each writer ends. In machine byte order: a history is read where
//! it was written.
//!
//! | question | file |
//! |---|---|
//! | how it lies on disk | `format.rs` |
//! | where, and which one is an interface's | `directory.rs` |
//! | how segments are begun, gone on with and removed | `log.rs` |
//! | who writes | `writer.rs` |
//! | who reads | `reader.rs` |

mod directory;
mod format;
mod log;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use self::{
    directory::{DIRECTORY, Directory, name_of},
    format::LEAST_BYTES,
    log::DEFAULT_BYTES,
    reader::{Follow, HistoryReader, Past},
    writer::Writer,
};
