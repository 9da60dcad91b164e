//! What was done with a packet.

/// What was done with a segment. A number, because a global function can return nothing else.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// It belongs to a flow in the table.
    Known = 0,
    /// It began a flow.
    Created = 1,
    /// It belongs to no flow, and does not begin one.
    NoFlow = 2,
    /// It would have begun a flow, but the table is full.
    TableFull = 3,
    /// As [`TableFull`](Self::TableFull), but only the window of the flow's home is full.
    WindowFull = 6,
    /// It belongs to an expired flow, and is to be dropped.
    Refused = 4,
    /// As [`Refused`](Self::Refused), and it is to be answered.
    Answered = 5,
}

impl Touched {
    /// From its number.
    #[inline(always)]
    pub fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::Known,
            1 => Self::Created,
            3 => Self::TableFull,
            6 => Self::WindowFull,
            4 => Self::Refused,
            5 => Self::Answered,
            _ => Self::NoFlow,
        }
    }
}
