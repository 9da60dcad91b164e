//! What programs ask of the registry, and what becomes of it.

use twheel_client::protocol::{Action, Outcome};
use twheel_common::{
    key::{Direction, FlowKey},
    offload::Life,
};

/// What a program asks for.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The connection.
    pub key: FlowKey,
    /// Its socket's cookie; 0: unknown.
    pub cookie: u64,
    /// Given back with each event.
    pub tag: u64,
    /// Units, at least 1.
    pub timeout: u32,
    /// For how long it has been idle already, units.
    pub idle: u32,
    /// What its own end sends comes in this direction.
    pub local: Direction,
    /// What counts as life.
    pub life: Life,
    /// What is done at the end.
    pub action: Action,
    /// The program's number.
    pub owner: u16,
}

/// A registration as its program knows it: the flow's record, from bit 32 on its generation, and at
/// bit 48 whether the program's end is the key's high one. While the table stays it means the same,
/// also after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id(pub u64);

impl Id {
    pub(super) fn new(record: u32, generation: u16, is_high: bool) -> Self {
        Self(u64::from(record) | u64::from(generation) << 32 | u64::from(is_high) << 48)
    }

    /// In which direction the program's end sends.
    pub fn local(self) -> Direction {
        match self.0 >> 48 & 1 {
            0 => Direction::FromLow,
            _ => Direction::FromHigh,
        }
    }

    /// The record.
    pub fn record(self) -> u32 {
        self.0 as u32
    }

    /// The generation of the flow.
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16
    }
}

/// Why a connection is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The flow is not in the table.
    Unknown,
    /// The flow is not established, or is ending.
    Ending,
    /// The connection is registered already.
    Taken,
    /// Its other end is, which is on this host, too.
    OtherEnd,
    /// There is no room.
    Full,
}

/// A registration that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// The registration.
    pub id: Id,
    /// Its program.
    pub owner: u16,
    /// Its tag.
    pub tag: u64,
    /// Its socket's cookie.
    pub cookie: u64,
    /// What is to be done, if it expired.
    pub action: Action,
    /// How it ended.
    pub outcome: Outcome,
    /// For how long it had been idle, if it expired; units.
    pub idle: u32,
    /// Its packets were not seen before it was registered.
    pub entered: bool,
}
