//! What the parser is to look for.

/// Tracked protocols, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols(pub u32);

impl Protocols {
    /// TCP.
    pub const TCP: Self = Self(1);
    /// UDP.
    pub const UDP: Self = Self(2);
    /// ICMP and ICMPv6: queries and their answers.
    pub const ICMP: Self = Self(4);

    #[inline(always)]
    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// These protocols and those.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What the parser is to look for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The protocols to parse.
    pub protocols: Protocols,
    /// Whether to read what round-trip times need: timestamps and the window.
    pub timing: bool,
    /// Whether VLAN tags are part of a flow's key.
    pub vlans: bool,
}
