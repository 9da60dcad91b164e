//! Observation points: where a flow's packets are counted.
//!
//! On a host that forwards, several interfaces see the same packet: it comes in through one and
//! goes out through another, or comes in through a port and again through the port's bridge. So
//! each side of a flow has an *observation point* (RFC 7011, section 2): where the first of its
//! packets was first seen. There its packets change the flow and are counted. At other points they
//! were [seen before](Sighting::Again): they only keep the flow alive.

use crate::{
    key::Direction,
    numbers::{self, Positions},
    policy::Hook,
    seen::Seen,
    segment::{Segment, datagram, tcp},
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An interface, by its index among the counters, and a direction there. 0: none.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Point(pub u16);

impl Point {
    /// None: nothing was counted yet, or points are not used because there is only one interface.
    pub const NONE: Self = Self(0);

    /// The point of the interface with this index; none if the index is 0.
    #[inline(always)]
    pub const fn new(interface: u32, hook: Hook) -> Self {
        match interface {
            0 => Self::NONE,
            _ => Self((interface << 1) as u16 | hook as u16),
        }
    }

    /// The index of its interface among the counters.
    #[inline(always)]
    pub const fn interface(self) -> u32 {
        self.0 as u32 >> 1
    }

    /// Whether packets come in there or go out.
    #[inline(always)]
    pub const fn hook(self) -> Hook {
        match self.0 & 1 {
            0 => Hook::Ingress,
            _ => Hook::Egress,
        }
    }

    /// The point at which a flow is seen, as far as it is known: its initiator's, or else the other
    /// side's; given those of the low and of the high side.
    #[inline(always)]
    pub fn of_flow(points: [Self; 2], seen: Seen) -> Self {
        match Self::of_initiator(points, seen) {
            Self::NONE => Self(points[0].0 | points[1].0),
            point => point,
        }
    }

    /// The initiator's observation point, given those of the low and of the high side.
    #[inline(always)]
    pub fn of_initiator([low, high]: [Self; 2], seen: Seen) -> Self {
        match seen.initiator() {
            Direction::FromLow => low,
            Direction::FromHigh => high,
        }
    }
}

/// What a packet is to its flow, depending on where it is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sighting {
    /// Packets of its sender are counted here, or nowhere yet.
    Here,
    /// It was counted at another point on its way.
    Again,
    /// Packets of its sender no longer pass the point where they were counted. They are counted
    /// here from now on.
    Moved,
}

/// How long a packet may take from its observation point to another interface, at most, as a
/// fraction of two seconds: 1/32, 62 ms.
pub const PATIENCE: u32 = 32;

/// A packet that passes an observation point.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    /// The point.
    pub here: Point,
    /// The time, in units.
    pub now: u64,
    /// Whether another interface can have seen the packet before. It can if packets come through
    /// several members of a bond, or by several routes.
    pub may_be_known: bool,
    /// Whether it [`continues`] what its sender has sent.
    pub continues: bool,
}

/// What a packet is that passes here, if packets of its sender are counted at `point` and one was
/// last counted there at `counted` (low bits of the clock).
///
/// A packet passes its observation point before it is seen elsewhere, mostly in the same softirq.
/// So its sender's packets have moved if none passed the point for longer than `patience` (units).
/// They have also moved if this packet continues what its sender has sent: it has the next data,
/// and would not if it had been counted already.
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

/// Whether a segment has exactly the next data of its sender. Then nobody has counted it yet;
/// somebody who does not see the connection guesses the number with a chance of 1 in 2^32. This
/// cannot be said of a SYN or FIN: the next sequence number may stay before it until it is
/// acknowledged.
#[inline(always)]
pub fn continues(seen: Seen, positions: Positions, segment: &Segment) -> bool {
    segment.flags & (datagram::ANY | tcp::SYN | tcp::FIN) == 0
        && segment.seq != segment.end
        && seen.is_placed(segment.direction)
        && numbers::next_of(positions, segment.direction) == segment.seq
}
