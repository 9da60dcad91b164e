//! What the commands that read an instance have in common.

use std::io::{self, BufWriter, StdoutLock, Write};

use anyhow::Result;
use clap::Args;

use crate::{
    filter::{Filter, Known},
    host,
    inspect::Reader,
};

/// Which instance.
#[derive(Args)]
pub struct Select {
    /// An interface of the instance; may be left out where there is just one instance
    #[arg(long = "iface", value_name = "NAME")]
    interface: Option<String>,
}

impl Select {
    /// Opens it for reading.
    pub fn open(&self) -> Result<Reader> {
        host::check()?;
        Reader::open(self.interface())
    }

    /// The interface, if one was given.
    pub fn interface(&self) -> Option<&str> {
        self.interface.as_deref()
    }
}

/// Which of its flows.
#[derive(Args)]
pub struct Which {
    /// Which flows: an expression such as `state == established and dport == 443 and idle > 30s`; all of docs/filter.md
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,
}

impl Which {
    /// The filter, as the flows of an instance can be asked.
    pub fn of(&self, reader: &Reader) -> Result<Filter> {
        self.filter(known(reader))
    }

    /// The filter.
    pub fn filter(&self, known: Known) -> Result<Filter> {
        Filter::parse(&self.text(), known)
    }

    /// The same, as it was given.
    pub fn text(&self) -> String {
        self.filter.join(" ")
    }
}

/// What is known of the flows of an instance.
pub fn known(reader: &Reader) -> Known {
    Known {
        ended: false,
        accounting: reader.table().has_accounts(),
        rto: reader.table().has_timers(),
    }
}

/// Standard output, buffered.
pub fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(1 << 16, io::stdout().lock())
}

/// Does what writes to standard output.
pub fn while_read(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = stdout();
    let result = write(&mut out).and_then(|()| Ok(out.flush()?));
    // What is left would be written when it is dropped.
    drop(out.into_parts());
    result
}
