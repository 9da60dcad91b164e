//! The layout of a flow's record: what all CPUs share of it, and how its tag and its owner are
//! packed.

use crate::{flow::Word, key::FlowKey, numbers::Positions, point::Point, wheel::Link};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Number of records, from the home on, in which a flow may be stored.
pub const WINDOW: u32 = 64;
/// Records of a line.
pub const LINE: u32 = 2;

/// The part of a `tag` that is the key's fingerprint; never 0.
pub(crate) const FINGERPRINT: u64 = (1 << DISTANCE) - 1;
pub(crate) const DISTANCE: u32 = 56;
/// The record is claimed and does not hold a flow yet. (Bit of `tag`.)
pub const BUSY: u64 = 1 << 62;
/// Another flow of the same home has, or had, the same fingerprint. (Bit of `tag`.)
pub const TWIN: u64 = 1 << 63;

/// Two records, and the line as a home: one cache line.
///
/// Any CPU that processes a segment may write `positions`: if an update is lost, the next segment
/// makes up for it. The other fields follow the protocol of [`table`](crate::table).
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Line {
    /// For each record: 0 if it is free, else the key's fingerprint, the distance from home,
    /// [`BUSY`] and [`TWIN`].
    pub tags: [u64; LINE as usize],
    /// Stamp, generation and state bits.
    pub words: [Word; LINE as usize],
    /// The next sequence number of each side.
    pub positions: [Positions; LINE as usize],
    /// Index of the record's [`Details`].
    pub details: [u32; LINE as usize],
    /// Bitmap of the records that hold flows whose home this line is.
    pub hops: u64,
}

/// What packets of a known flow do not need: one cache line. Once the flow is in the table, it
/// belongs to the CPU on whose wheel the flow is.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Details {
    /// The key's addresses.
    pub addresses: [u64; 4],
    /// The key's ports.
    pub ports: u32,
    /// The protocol, the zone, the CPU, the rule, [`TAGGED`] and [`OUTGOING`].
    pub owner: u32,
    /// The next flow of the slot; if these details are free, the next free details.
    pub next: Link,
    /// The flow before this one in its slot, or the slot itself.
    pub prev: Link,
    /// Index of the flow's record.
    pub record: u32,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// As in [`Known::doubt`](crate::state::Known::doubt).
    pub doubt: u32,
    /// The [`SideWay`](crate::way::SideWay) of one of its sides.
    pub way: u32,
}

/// What only few flows need. Has the same index as [`Details`].
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Extras {
    /// The next flow in the same inbox. Belongs to the CPU that has queued the flow.
    pub inbox: Link,
    /// [`FlowKey::packed_vlans`]. Part of the key; meaningless unless [`Details::owner`] has
    /// [`TAGGED`].
    pub vlans: u32,
    /// The observation points of the low and of the high side; meaningless with only one interface.
    pub points: [Point; 2],
    /// Low bits of the clock when packets were last counted there, in units.
    pub counted: [u16; 2],
}

const _: () = assert!(size_of::<Extras>() == 16);

/// The distance of a flow from its home.
#[inline(always)]
pub fn distance(tag: u64) -> u32 {
    (tag >> DISTANCE) as u32 & (WINDOW - 1)
}

/// Whether a record holds a live flow.
#[inline(always)]
pub fn holds_flow(tag: u64) -> bool {
    tag & FINGERPRINT != 0 && tag & BUSY == 0
}

/// The part of [`Details::owner`] that belongs to the key: protocol and zone.
const PROTO_ZONE: u32 = 0xff;
const CPU: u32 = 8;
const CPUS: u32 = 0xfff;
const RULE: u32 = 20;
/// The bits of a rule's number.
pub const RULES: u32 = 0x1ff;
/// Bit of [`Details::owner`]: the flow is in a VLAN, which [`Extras::vlans`] names.
pub const TAGGED: u32 = 1 << 29;
/// Bit of [`Details::owner`]: the first packet of the flow was outgoing.
pub const OUTGOING: u32 = 1 << 30;

impl Details {
    /// Value of [`owner`](Self::owner) for a flow.
    #[inline(always)]
    pub fn owner_of(key: &FlowKey, cpu: u32, rule: u16) -> u32 {
        let tagged = match key.packed_vlans() {
            0 => 0,
            _ => TAGGED,
        };
        proto_zone(key) | (cpu & CPUS) << CPU | (u32::from(rule) & RULES) << RULE | tagged
    }

    /// The CPU on whose wheel the flow is.
    #[inline(always)]
    pub fn cpu(&self) -> u32 {
        cpu(self.owner)
    }

    /// The rule that the flow has met; 0 for none.
    #[inline(always)]
    pub fn rule(&self) -> u16 {
        rule(self.owner)
    }

    /// The key of the flow. `vlans` is used only if the flow is in a VLAN.
    #[inline(always)]
    pub fn key(&self, vlans: u32) -> FlowKey {
        key(self.addresses, self.ports, self.owner, vlans)
    }
}

/// The CPU in a value of [`Details::owner`].
#[inline(always)]
pub fn cpu(owner: u32) -> u32 {
    owner >> CPU & CPUS
}

/// The rule in a value of [`Details::owner`].
#[inline(always)]
pub fn rule(owner: u32) -> u16 {
    (owner >> RULE & RULES) as u16
}

/// The same value without a rule.
#[inline(always)]
pub fn without_rule(owner: u32) -> u32 {
    owner & !(RULES << RULE)
}

/// The same value with this rule.
#[inline(always)]
pub fn with_rule(owner: u32, rule: u16) -> u32 {
    without_rule(owner) | (u32::from(rule) & RULES) << RULE
}

/// Whether the value has the key's protocol and zone, and is in a VLAN exactly if the key is.
#[inline(always)]
pub fn is_of(owner: u32, key: &FlowKey) -> bool {
    owner & (PROTO_ZONE | TAGGED) == Details::owner_of(key, 0, 0)
}

#[inline(always)]
fn proto_zone(key: &FlowKey) -> u32 {
    (key.ports() >> 32) as u32 & PROTO_ZONE
}

/// The key of a flow, from its details and from [`Extras::vlans`].
#[inline(always)]
pub fn key(addresses: [u64; 4], ports: u32, owner: u32, vlans: u32) -> FlowKey {
    let key = FlowKey::from_parts(
        addresses,
        u64::from(ports) | u64::from(owner & PROTO_ZONE) << 32,
    );
    match owner & TAGGED {
        0 => key,
        _ => key.in_vlans(vlans),
    }
}
