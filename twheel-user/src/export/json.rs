//! Events as lines of JSON.

use std::io;

use super::Format;
use crate::{history::Past, model::EventKind, output::json::Json};

/// Events of some kinds, as `twheel run --json` prints them.
pub struct Lines {
    /// The kinds.
    pub kinds: Vec<EventKind>,
}

impl Format for Lines {
    fn begin(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn event(&mut self, past: &Past, to: &mut Vec<u8>) -> io::Result<()> {
        if !self.kinds.contains(&past.kind()) {
            return Ok(());
        }
        let identity = past.identity.clone();
        past.write(&mut Json::new(identity), to)
    }

    fn complete(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a> {
        Box::new(bytes.split_inclusive(|byte| *byte == b'\n'))
    }
}
