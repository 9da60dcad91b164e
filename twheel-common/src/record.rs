//! The layout of a flow's record: what all CPUs share of it, and how its tag and its owner are packed.

use crate::{flow::Word, key::FlowKey, numbers::Positions, point::Point, wheel::Link};

/// Records in which a flow may stand.
pub const WINDOW: u32 = 64;
/// Records of a line.
pub const LINE: u32 = 2;

/// The part of a `tag` that is the key's fingerprint; never 0.
pub(crate) const FINGERPRINT: u64 = (1 << DISTANCE) - 1;
pub(crate) const DISTANCE: u32 = 56;
/// A record is claimed and has no flow yet. (Bit of `tag`.)
pub const BUSY: u64 = 1 << 62;
/// Another flow of the same home has the same fingerprint, or had. (Bit of `tag`.)
pub const TWIN: u64 = 1 << 63;

/// Two records and their home: one cache line.
///
/// `positions` belongs to whoever brings a segment: one that is lost is made good by the next. The rest is as
/// [`table`](crate::table) says.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    /// Of each record 0; or the key's fingerprint, the distance from home, [`BUSY`] and [`TWIN`].
    pub tags: [u64; LINE as usize],
    /// Time, generation, and what was seen.
    pub words: [Word; LINE as usize],
    /// How far each side has sent.
    pub positions: [Positions; LINE as usize],
    /// Where the rest is: the index of its [`Details`].
    pub details: [u32; LINE as usize],
    /// Where the flows stand whose home this is.
    pub hops: u64,
}

/// What no packet of a known flow needs of it: one cache line. Belongs to the CPU on whose wheel the flow stands, once it
/// is in the table.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Details {
    /// The key's addresses.
    pub addresses: [u64; 4],
    /// And its ports.
    pub ports: u32,
    /// The protocol, the zone, the CPU, the rule, [`TAGGED`] and [`OUTGOING`].
    pub owner: u32,
    /// To the next flow of the slot; to the next free details, if these are free.
    pub next: Link,
    /// To the flow before this one in its slot, or to the slot itself.
    pub prev: Link,
    /// Index of the flow's record.
    pub record: u32,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// See [`Known::doubt`](crate::state::Known::doubt).
    pub doubt: u32,
    /// The [`SideWay`](crate::way::SideWay) of one of its sides.
    pub way: u32,
}

/// What few flows need. By the same index as [`Details`].
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// To the next flow of the inbox that this one is in. Belongs to whoever has posted the flow.
    pub inbox: Link,
    /// [`FlowKey::packed_vlans`]. Belongs to the key; means nothing where [`Details::owner`] is not [`TAGGED`].
    pub vlans: u32,
    /// Where packets of the low and of the high side are counted; means nothing where there is one interface.
    pub points: [Point; 2],
    /// Low bits of the clock when packets were last counted there, units.
    pub counted: [u16; 2],
}

const _: () = assert!(size_of::<Extras>() == 16);

/// How far behind its home a flow stands.
#[inline(always)]
pub fn distance(tag: u64) -> u32 {
    (tag >> DISTANCE) as u32 & (WINDOW - 1)
}

/// Whether a record holds a live flow.
#[inline(always)]
pub fn holds_flow(tag: u64) -> bool {
    tag & FINGERPRINT != 0 && tag & BUSY == 0
}

/// The part of [`Details::owner`] that is the key's: protocol and zone.
const PROTO_ZONE: u32 = 0xff;
const CPU: u32 = 8;
const CPUS: u32 = 0xfff;
const RULE: u32 = 20;
const RULES: u32 = 0x1ff;
/// Of [`Details::owner`]: the flow is in a VLAN, which [`Extras::vlans`] has.
pub const TAGGED: u32 = 1 << 29;
/// Of [`Details::owner`]: the first packet of the flow went out.
pub const OUTGOING: u32 = 1 << 30;

impl Details {
    /// [`owner`](Self::owner) of a flow.
    #[inline(always)]
    pub fn owner_of(key: &FlowKey, cpu: u32, rule: u16) -> u32 {
        let tagged = match key.packed_vlans() {
            0 => 0,
            _ => TAGGED,
        };
        proto_zone(key) | (cpu & CPUS) << CPU | (u32::from(rule) & RULES) << RULE | tagged
    }

    /// The CPU on whose wheel a flow stands.
    #[inline(always)]
    pub fn cpu(&self) -> u32 {
        cpu(self.owner)
    }

    /// The rule that a flow has met; 0 for none.
    #[inline(always)]
    pub fn rule(&self) -> u16 {
        rule(self.owner)
    }

    /// Whose they are; in these VLANs, if it is in any.
    #[inline(always)]
    pub fn key(&self, vlans: u32) -> FlowKey {
        key(self.addresses, self.ports, self.owner, vlans)
    }
}

/// The CPU in [`Details::owner`].
#[inline(always)]
pub fn cpu(owner: u32) -> u32 {
    owner >> CPU & CPUS
}

/// The rule in it.
#[inline(always)]
pub fn rule(owner: u32) -> u16 {
    (owner >> RULE & RULES) as u16
}

/// The same flow's, as one of no rule.
#[inline(always)]
pub fn without_rule(owner: u32) -> u32 {
    owner & !(RULES << RULE)
}

/// The same flow's, as one of this rule.
#[inline(always)]
pub fn with_rule(owner: u32, rule: u16) -> u32 {
    without_rule(owner) | (u32::from(rule) & RULES) << RULE
}

/// Whether it is of the key's protocol and zone, and in a VLAN if the key is.
#[inline(always)]
pub fn is_of(owner: u32, key: &FlowKey) -> bool {
    owner & (PROTO_ZONE | TAGGED) == Details::owner_of(key, 0, 0)
}

#[inline(always)]
fn proto_zone(key: &FlowKey) -> u32 {
    (key.ports() >> 32) as u32 & PROTO_ZONE
}

/// The key of a flow, from its details, and from what [`Extras::vlans`] has.
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
