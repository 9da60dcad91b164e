//! Events that leave the host: a process of its own, without capabilities, reads the history as it
//! grows and sends it on. Where it stands is kept on disk, so it goes on there after any death of
//! either side.
//!
//! | question | file |
//! |---|---|
//! | where it goes, and what of it has arrived | `sink.rs` |
//! | where it stands | `position.rs` |

pub mod position;
pub mod sink;
