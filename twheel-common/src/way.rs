//! By which way a packet came here, and by which ways the packets of a flow's sides may come.

use crate::key::Direction;

/// The bit that says that an interface is in another network namespace than the run. Below it stand ten bits for which one, and
/// then the interface's index there.
const ELSEWHERE: u32 = 1 << 30;
/// Bits of an index in another network namespace.
pub const INDEX_BITS: u32 = 20;
/// Other network namespaces that are watched at once, at most.
pub const MAX_NAMESPACES: u32 = 1 << 10;

/// What is added to the indexes of interfaces of another network namespace, by its number below [`MAX_NAMESPACES`]: so each
/// interface has a number of its own. 0 is added to those of the run's own.
pub const fn elsewhere(namespace: u32) -> u32 {
    ELSEWHERE | namespace << INDEX_BITS
}

/// Whether the number of an interface is that of one in another network namespace.
pub const fn is_elsewhere(interface: u32) -> bool {
    interface & ELSEWHERE != 0
}

/// By which way a packet came here: the index of the interface by which it came in, or 0 if this host made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way(pub u32);

impl Way {
    /// This host made the packet. Nobody outside can have.
    pub const LOCAL: Self = Self(0);
    /// Both ends are here: the index of the loopback interface in every network namespace (`LOOPBACK_IFINDEX`,
    /// `include/net/flow.h`).
    pub const LOOPBACK: Self = Self(1);

    /// Of a packet that was seen on an interface, and had come in by `origin`, or by none if that is 0.
    #[inline(always)]
    pub fn of(interface: u32, origin: u32) -> Self {
        match Self(interface) {
            Self::LOOPBACK => Self::LOOPBACK,
            _ => Self(origin),
        }
    }

    /// Whether nobody outside can have made the packet. Of [another network namespace](elsewhere) whoever is inside may be
    /// somebody else's tenant: what is made there comes by a way like any other.
    #[inline(always)]
    pub fn is_local(self) -> bool {
        self.0 <= Self::LOOPBACK.0
    }
}

/// The [`Way`] by which one side's packets come; the highest bit says that it is the key's high endpoint. Or
/// [`SideWay::ANY`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideWay(pub u32);

impl SideWay {
    /// Nothing is known.
    pub const ANY: Self = Self(u32::MAX);
    /// The highest bit: an index is a positive `int` (`struct net_device`, `include/linux/netdevice.h`).
    const HIGH: u32 = 1 << 31;

    /// Of the side that sent a packet, which came by this way.
    #[inline(always)]
    pub fn of(way: Way, direction: Direction) -> Self {
        match direction {
            Direction::FromLow => Self(way.0),
            Direction::FromHigh => Self(way.0 | Self::HIGH),
        }
    }

    #[inline(always)]
    fn way(self) -> Way {
        Way(self.0 & !Self::HIGH)
    }

    /// Whether it is known of this side.
    #[inline(always)]
    pub fn is_of(self, direction: Direction) -> bool {
        self != Self::ANY && Self::of(self.way(), direction) == self
    }

    /// Whether a packet that claims this direction may come by this way: the side whose way is known sends by that one
    /// (or is this host, and only seems to send by another; where it may have several, `is_lenient`: or by another), and
    /// the other side by others.
    #[inline(always)]
    pub fn allows(self, way: Way, direction: Direction, is_lenient: bool) -> bool {
        let known = self.way();
        if self == Self::ANY || way == Way::LOOPBACK {
            return true;
        }
        if known == Way::LOOPBACK {
            return way.is_local();
        }
        match self.is_of(direction) {
            true => way == known || way.is_local() || is_lenient && !known.is_local(),
            false => way != known,
        }
    }

    /// Whether a packet of this direction, which came by this way, shows that who was taken for its sender was somebody
    /// else: this host sends it, and its packets do not come in.
    #[inline(always)]
    pub fn is_disproved_by(self, way: Way, direction: Direction) -> bool {
        let is_claimed = self.is_of(direction) || way == Way::LOOPBACK;
        self != Self::ANY && !self.way().is_local() && way.is_local() && is_claimed
    }
}
