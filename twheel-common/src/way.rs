//! The way by which a packet came here, and the ways by which the packets of a flow's sides may
//! come.

use crate::key::Direction;

/// The bit of an interface in another network namespace than that of the running twheel. Below it
/// are ten bits for the namespace, and then the interface's index there.
const ELSEWHERE: u32 = 1 << 30;
/// Bits of an interface's index in another network namespace.
pub const INDEX_BITS: u32 = 20;
/// Most other network namespaces that can be watched at once.
pub const MAX_NAMESPACES: u32 = 1 << 10;

/// What is added to the indexes of interfaces in another network namespace, given the namespace's
/// number below [`MAX_NAMESPACES`], so that each interface has a number of its own. For the running
/// twheel's own namespace, 0 is added.
pub const fn elsewhere(namespace: u32) -> u32 {
    ELSEWHERE | namespace << INDEX_BITS
}

/// Whether this is the number of an interface in another network namespace.
pub const fn is_elsewhere(interface: u32) -> bool {
    interface & ELSEWHERE != 0
}

/// The way by which a packet came here: the index of the interface through which it came in, or 0
/// if this host made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way(pub u32);

impl Way {
    /// This host made the packet; nobody outside can have.
    pub const LOCAL: Self = Self(0);
    /// Both ends are on this host: the index of the loopback interface, the same in every network
    /// namespace (`LOOPBACK_IFINDEX`, `include/net/flow.h`).
    pub const LOOPBACK: Self = Self(1);

    /// The way of a packet that was seen on `interface` and had come in through the interface
    /// `origin`; 0 if it had not come in.
    #[inline(always)]
    pub fn new(interface: u32, origin: u32) -> Self {
        match Self(interface) {
            Self::LOOPBACK => Self::LOOPBACK,
            _ => Self(origin),
        }
    }

    /// Whether nobody outside can have made the packet. This does not hold for packets made in
    /// [another network namespace](elsewhere), which may belong to somebody else: they come by a
    /// way like any other.
    #[inline(always)]
    pub fn is_local(self) -> bool {
        self.0 <= Self::LOOPBACK.0
    }
}

/// The [`Way`] by which one side's packets come; the highest bit says that this side is the key's
/// high endpoint. Or [`SideWay::ANY`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideWay(pub u32);

impl SideWay {
    /// No way is known.
    pub const ANY: Self = Self(u32::MAX);
    /// The highest bit, which is free: an index is a positive `int` (`struct net_device`,
    /// `include/linux/netdevice.h`).
    const HIGH: u32 = 1 << 31;

    /// The way of the side that sent a packet, which came by this way.
    #[inline(always)]
    pub fn new(way: Way, direction: Direction) -> Self {
        match direction {
            Direction::FromLow => Self(way.0),
            Direction::FromHigh => Self(way.0 | Self::HIGH),
        }
    }

    #[inline(always)]
    fn way(self) -> Way {
        Way(self.0 & !Self::HIGH)
    }

    /// Whether the stored way is that of this side.
    #[inline(always)]
    pub fn is_of(self, direction: Direction) -> bool {
        self != Self::ANY && Self::new(self.way(), direction) == self
    }

    /// Whether a packet that claims this direction may come by this way. The side whose way is
    /// known must come by it, or be this host, whose packets only seem to come by another way. If
    /// sides may have several ways (`is_lenient`), that side may come by any way, unless its known
    /// way is this host. The other side must come by another way.
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

    /// Whether a packet of this direction that came by this way shows that the earlier packets of
    /// its side were forged: this host sends it, and this host's packets do not come in from
    /// outside.
    #[inline(always)]
    pub fn is_disproved_by(self, way: Way, direction: Direction) -> bool {
        let is_claimed = self.is_of(direction) || way == Way::LOOPBACK;
        self != Self::ANY && !self.way().is_local() && way.is_local() && is_claimed
    }
}
