//! Deletes one flow, after the user was asked.

use std::{path::Path, sync::mpsc::Sender, thread};

use anyhow::Result;
use twheel_common::event::Reason;

use super::{Happens, scan::Row};
use crate::{
    delete::{Unread, delete_flow},
    inspect::Reader,
    model::Birth,
    pins::Pins,
};

/// Deletes a flow in a thread of its own, because a full ring of events may take seconds. The
/// result arrives as [`Happens::Deleted`].
pub fn start(pins: Pins, row: &Row, history: &Path, answer: &Sender<Happens>) {
    let (index, birth) = (row.index, row.tracked.flow.birth);
    let (history, answer) = (history.to_owned(), answer.clone());
    thread::spawn(move || {
        let said = match delete(pins, index, birth, &history) {
            Ok(true) => "deleted".to_owned(),
            Ok(false) => "not deleted: it had a packet or ended meanwhile".to_owned(),
            Err(error) => format!("not deleted: {error:#}"),
        };
        let _ = answer.send(Happens::Deleted(said));
    });
}

/// Whether the flow was deleted.
fn delete(pins: Pins, index: u32, birth: Birth, history: &Path) -> Result<bool> {
    let reader = Reader::open_pins(pins)?;
    let mut unread = Unread::open(&reader, history)?;
    let is_it = |flow: &crate::flows::Flow, _| {
        let found = Birth {
            key: flow.key,
            created: flow.created,
            generation: flow.word.generation(),
        };
        found == birth
    };
    let tally = delete_flow(&reader, index, is_it, Reason::Deleted, unread.as_mut())?;
    Ok(tally.done > 0)
}
