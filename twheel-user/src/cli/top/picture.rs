//! An instance at one moment, and its recent rates.

use std::collections::VecDeque;

use anyhow::Result;
use twheel_common::counter::Counter;

use super::{
    group::{Group, Sum},
    scan::{Row, Sums},
    speed::Speeds,
};
use crate::{cli::stats, inspect::Reader, wheels::Wheels};

/// An instance at one moment, and its recent rates.
pub struct Picture {
    pub reader: Reader,
    pub interfaces: String,
    pub is_running: bool,
    pub look: stats::Look,
    pub rates: Option<Rates>,
    /// The rates of the last readings, latest first.
    pub history: VecDeque<Rates>,
    pub wheels: Wheels,
    /// The speeds of all flows.
    pub speeds: Speeds,
    /// Sums over the flows.
    pub sums: Sums,
    /// The flows to be shown, in order, and those before them that are scrolled past.
    pub flows: Vec<Row>,
    /// The groups to be shown, in order.
    pub groups: Vec<(Group, Sum)>,
    /// How many groups there are.
    pub group_count: u64,
}

/// Rates per second.
#[derive(Clone, Copy)]
pub struct Rates {
    pub created: f64,
    pub expired: f64,
    pub evicted: f64,
    pub over_quota: f64,
    pub deleted: f64,
    pub superseded: f64,
    pub packets: f64,
}

impl Picture {
    /// Reads an instance for the first time.
    pub fn new(reader: Reader) -> Result<Self> {
        let now = reader.now()?;
        Ok(Self {
            interfaces: reader.pins().present_interfaces()?.join(", "),
            is_running: reader.pins().is_running()?,
            look: stats::Look::at(&reader)?,
            rates: None,
            history: VecDeque::new(),
            wheels: Wheels::read(&reader, now)?,
            speeds: Speeds::default(),
            sums: Sums::default(),
            flows: Vec::new(),
            groups: Vec::new(),
            group_count: 0,
            reader,
        })
    }

    /// Reads the next picture. The flows and groups of the one before stay until others are chosen.
    pub fn next(&mut self, reader: Reader) -> Result<()> {
        /// Wider than any terminal.
        const HISTORY: usize = 1024;
        let mut next = Self::new(reader)?;
        let rate = |counter| next.look.rate(&self.look, counter);
        let rates = Rates {
            created: rate(Counter::Created),
            expired: rate(Counter::Expired),
            evicted: rate(Counter::Evicted),
            over_quota: rate(Counter::OverQuota),
            deleted: rate(Counter::Deleted),
            superseded: rate(Counter::Superseded),
            packets: rate(Counter::Touched) + rate(Counter::Created),
        };
        next.history = std::mem::take(&mut self.history);
        next.history.push_front(rates);
        next.history.truncate(HISTORY);
        next.rates = Some(rates);
        // Another instance has another table.
        if next.reader.meta().made == self.reader.meta().made {
            next.speeds = std::mem::take(&mut self.speeds);
        }
        *self = next;
        Ok(())
    }

    /// The rate of a counter of ended flows.
    pub fn rate(&self, counter: Counter) -> Option<f64> {
        let rates = self.rates?;
        match counter {
            Counter::Expired => Some(rates.expired),
            Counter::Evicted => Some(rates.evicted),
            Counter::OverQuota => Some(rates.over_quota),
            Counter::Deleted => Some(rates.deleted),
            Counter::Superseded => Some(rates.superseded),
            _ => None,
        }
    }
}
