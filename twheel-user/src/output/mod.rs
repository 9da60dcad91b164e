//! How events of flows are written: one file per format.

pub mod flow_table;
pub mod json;
pub mod markdown;
pub mod table;
pub mod text;
pub mod units;

use std::io;

pub use crate::model::Ended;
use crate::{
    action::Reaped,
    model::{FlowEvent, Mark, Named, Rto, RunEvent, Updated},
};

/// So many of a thing, as `1 flow` or `2 flows`.
pub fn several(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// Writes events. `mark`: which event it is, and when it was.
pub trait Output {
    /// Writes an event of a flow, with its names.
    fn flow(
        &mut self,
        mark: Mark,
        event: &FlowEvent,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        match event {
            FlowEvent::Begun(begun) => self.begun(mark, begun, named, to),
            FlowEvent::Updated(updated) => self.updated(mark, updated, named, to),
            FlowEvent::Ended(ended) => self.ended(mark, ended, named, to),
            FlowEvent::Rto(timer) => self.rto(mark, timer, named, to),
        }
    }

    /// Writes the beginning of a flow, with its names.
    fn begun(
        &mut self,
        mark: Mark,
        begun: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes that a flow lives on, with its names.
    fn updated(
        &mut self,
        mark: Mark,
        updated: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the end of a flow, with its names.
    fn ended(
        &mut self,
        mark: Mark,
        ended: &Ended,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the expiry of a retransmission timer, with the names of its flow.
    fn rto(
        &mut self,
        mark: Mark,
        timer: &Rto,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the outcome of an action on an expired flow: which event reported the flow's end, that
    /// end, and what was done; with the names of the flow.
    fn reaped(
        &mut self,
        mark: Mark,
        reaped: (Mark, &Ended, &Reaped),
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes what a run tells of itself.
    fn run(&mut self, mark: Mark, event: &RunEvent, to: &mut dyn io::Write) -> io::Result<()>;
}
