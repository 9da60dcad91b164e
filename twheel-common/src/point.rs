//! Where a flow's packets are counted.
//!
//! On a host that forwards, the same packet is seen by several interfaces: it comes in by one and goes out by another, or comes
//! in by a port and again by its bridge. So each side of a flow has an *observation point* (RFC 7011, section 2): where the first
//! of its packets was first seen. There its packets change the flow and are counted. Elsewhere they were [seen
//! before](Sighting::Again), and keep the flow alive.

use crate::{
    key::Direction,
    numbers::{self, Positions},
    policy::Hook,
    seen::Seen,
    segment::{Segment, datagram, tcp},
};

/// An interface, by its place among the counters, and a direction there. 0: none.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Point(pub u16);

impl Point {
    /// None: nothing was counted yet, or nobody asks, since there is one interface.
    pub const NONE: Self = Self(0);

    /// Of an interface that has this place, or none where that is 0.
    #[inline(always)]
    pub const fn new(place: u32, hook: Hook) -> Self {
        match place {
            0 => Self::NONE,
            _ => Self((place << 1) as u16 | hook as u16),
        }
    }

    /// The place of its interface.
    pub const fn place(self) -> u32 {
        self.0 as u32 >> 1
    }

    /// Whether packets come in there or go out.
    pub const fn hook(self) -> Hook {
        match self.0 & 1 {
            0 => Hook::Ingress,
            _ => Hook::Egress,
        }
    }

    /// That of the initiator's packets, of those of the low and of the high side.
    #[inline(always)]
    pub fn of_initiator([low, high]: [Self; 2], seen: Seen) -> Self {
        match seen.initiator() {
            Direction::FromLow => low,
            Direction::FromHigh => high,
        }
    }
}

/// What a packet is to its flow, by where it is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sighting {
    /// Its sender's packets are counted here; or nowhere yet.
    Here,
    /// It was counted elsewhere on its way.
    Again,
    /// Its sender's packets do not come by the point any more where they were counted. They are counted here from now on.
    Moved,
}

/// How long a packet may take from its point to another interface, at most, as a part of two seconds: 62 ms.
pub const PATIENCE: u32 = 32;

/// A packet that comes by an observation point.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    /// Where it is seen.
    pub here: Point,
    /// When, units.
    pub now: u64,
    /// Whether another interface can have seen it before: so it is where packets come by several members of a bond, or by
    /// several routes.
    pub may_be_known: bool,
    /// Whether it [`continues`] what its sender has sent.
    pub continues: bool,
}

/// What a packet is that comes by here, if its sender's packets are counted at `point`, where one was last counted at `counted`
/// (low bits of the clock).
///
/// A packet comes by its point before it is seen elsewhere, in the same softirq mostly. So its sender's have moved if none came by
/// there for as long as `patience` (units). Or if it continues what its sender has sent: it has the next data, and would not if it
/// had been counted.
#[inline(always)]
pub fn sighting(point: Point, counted: u16, patience: u32, passage: Passage) -> Sighting {
    let Passage {
        here,
        now,
        may_be_known,
        continues,
    } = passage;
    if point == here || point == Point::NONE {
        return Sighting::Here;
    }
    let since = u32::from((now as u16).wrapping_sub(counted));
    // Another CPU may have counted there after `now` was read.
    if !may_be_known || continues || since > patience && since < 0xff00 {
        return Sighting::Moved;
    }
    Sighting::Again
}

/// Whether a segment has the next data of its sender, exactly: nobody has counted it yet, and who does not see the connection
/// does not guess it (1 in 2^32). Of a SYN or a FIN that is not so: a position may stay before it until it is acknowledged.
#[inline(always)]
pub fn continues(seen: Seen, positions: Positions, segment: &Segment) -> bool {
    segment.flags & (datagram::ANY | tcp::SYN | tcp::FIN) == 0
        && segment.seq != segment.end
        && seen.is_placed(segment.direction)
        && numbers::of(positions, segment.direction) == segment.seq
}
