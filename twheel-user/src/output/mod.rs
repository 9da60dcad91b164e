//! How what becomes of flows is written: one file a format.

pub mod json;
pub mod table;
pub mod text;

use std::io;

pub use crate::model::Expired;
use crate::{
    action::Reaped,
    model::{Named, Rto},
};

/// Writes what becomes of flows.
pub trait Output {
    /// Writes the end of one, with what it is known as.
    fn expired(
        &mut self,
        ended: &Expired,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;

    /// Writes the expiry of a retransmission timer, with what the flow is known as.
    fn rto(&mut self, timer: &Rto, named: Named<'_>, to: &mut dyn io::Write) -> io::Result<()>;

    /// Writes what became of something that was to be done to a flow that has ended, likewise.
    fn reaped(
        &mut self,
        ended: &Expired,
        reaped: &Reaped,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()>;
}
