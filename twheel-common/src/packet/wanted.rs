//! What is asked of a frame.

/// Protocols that are tracked; bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols(pub u32);

impl Protocols {
    /// TCP alone.
    pub const TCP: Self = Self(1);
    /// UDP.
    pub const UDP: Self = Self(2);
    /// ICMP and ICMPv6: queries and their answers.
    pub const ICMP: Self = Self(4);

    #[inline(always)]
    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// These, and those.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What is asked of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Segments and datagrams of these.
    pub protocols: Protocols,
    /// And what tells round trips.
    pub timing: bool,
    /// Whether VLAN tags are part of a flow's key.
    pub vlans: bool,
}
