//! Flows as IPFIX (RFC 7011): each flow gives a record for each of its directions, or one with
//! reverse elements (RFC 5103).
//!
//! A template says which elements a record has. Which ones a flow gets depends on what is known of
//! it, so that no record says what was not seen; a template is sent when its first record is.
//!
//! | question | file |
//! |---|---|
//! | what is said of a flow, and of the exporter | `record.rs`, `statistics.rs` |
//! | which elements, of which length, from where | `template.rs` |
//! | messages, sets, sequence numbers | `encoder.rs` |

mod encoder;
mod record;
mod statistics;
mod template;
#[cfg(test)]
mod tests;

use std::{
    io,
    time::{Duration, Instant},
};

pub use self::{
    encoder::{Config, Encoder, LEAST_MESSAGE, messages},
    record::{EndReason, FlowRecord},
};
use super::Format;
use crate::{
    history::{Past, PastEvent},
    model::FlowEvent,
};

/// Templates are sent again after so many messages, if their time has not come before.
const MESSAGES: u64 = 1000;

/// Ends and updates of flows, as IPFIX.
pub struct Ipfix {
    encoder: Encoder,
    /// Each connection is a session, whose templates last as long as it does.
    is_connection: bool,
    /// How often the statistics are sent, and without a connection the templates.
    refresh: Duration,
    refreshed: Instant,
    /// Messages until then.
    messages: u64,
}

impl Ipfix {
    /// `is_connection`: not over UDP. `refresh`: how often templates (over UDP) and the exporter's
    /// statistics are sent again.
    pub fn new(config: Config, is_connection: bool, refresh: Duration) -> Self {
        Self {
            encoder: Encoder::new(config),
            is_connection,
            refresh,
            refreshed: Instant::now(),
            messages: 0,
        }
    }

    fn refresh(&mut self, not_sent: u64, to: &mut Vec<u8>) {
        if !self.is_connection {
            self.encoder.templates(to);
        }
        self.encoder.statistics(not_sent, to);
        self.refreshed = Instant::now();
        self.messages = self.encoder.messages();
    }
}

impl Format for Ipfix {
    fn begin(&mut self, not_sent: u64, to: &mut Vec<u8>) {
        self.encoder.begin(self.is_connection);
        self.refresh(not_sent, to);
    }

    fn event(&mut self, past: &Past, to: &mut Vec<u8>) -> io::Result<()> {
        let (identity, mark, named) = (&past.identity, past.mark, past.known_as.named());
        let flow = match &past.event {
            PastEvent::Flow(FlowEvent::Ended(ended)) => {
                FlowRecord::ended(identity, mark, ended, named)
            }
            PastEvent::Flow(FlowEvent::Updated(updated)) => {
                FlowRecord::updated(identity, mark, updated, named)
            }
            _ => return Ok(()),
        };
        self.encoder.flow(&flow, to);
        Ok(())
    }

    fn complete(&mut self, not_sent: u64, to: &mut Vec<u8>) {
        let is_due = self.refreshed.elapsed() >= self.refresh;
        if is_due || self.encoder.messages() - self.messages >= MESSAGES {
            self.refresh(not_sent, to);
        }
        self.encoder.complete(to);
    }

    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a> {
        Box::new(messages(bytes))
    }
}
