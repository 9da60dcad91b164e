//! How events of flows are written: one file per format.

pub mod json;
pub mod table;
pub mod text;

use std::io;

pub use crate::model::Expired;
use crate::{
    action::Reaped,
    model::{Named, Rto},
};

/// Writes events of flows.
pub trait Output {
    /// Writes the end of a flow, with its names.
    fn expired(
        &mut self,
        ended: &Expired,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the expiry of a retransmission timer, with the names of its flow.
    fn rto(&mut self, timer: &Rto, named: Named<'_>, to: &mut dyn io::Write) -> io::Result<()>;

    /// Writes the outcome of an action on an expired flow, with the names of the flow.
    fn reaped(
        &mut self,
        ended: &Expired,
        reaped: &Reaped,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;
}
