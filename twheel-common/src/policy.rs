//! Finds the rule of a policy that a flow meets: timeouts per service.
//!
//! Rules are numbered from 1 in the order of the file; the first that matches a flow counts. It is
//! found by the bit-vector scheme of Lakshman and Stiliadis ("High-speed policy-based packet
//! forwarding using efficient multi-dimensional range matching", SIGCOMM 1998): each dimension by
//! itself looks up the *set* of the rules that admit the flow's value. The rules that match the
//! flow are in all of these sets, and the lowest bit of the intersection is the first of them. So a
//! flow costs one lookup per dimension, however many rules there are.
//!
//! ```text
//! rule 1: dport 22, src 10.0.0.0/8      rule 2: src 10.0.0.0/8      rule 3: (anything)
//!
//! dport 22        {1, 2, 3}
//! src 10.9.9.9    {1, 2, 3}     and     {1, 2, 3}   first: 1
//!
//! dport 80        {   2, 3}
//! src 10.9.9.9    {1, 2, 3}     and     {   2, 3}   first: 2
//! ```
//!
//! | dimension | looked up by | in the kernel | entries |
//! |---|---|---|---|
//! | protocol; hook; interfaces, VLANs and zones that no rule names | — | ARRAY of [`Header`] | 1 |
//! | destination port, as a class | port | ARRAY of [`PortClasses`] | 1 |
//! | destination port, as a set | class | ARRAY of [`Rules`] | [`MAX_CLASSES`] |
//! | source address | [`Prefix`] | LPM_TRIE of [`Ends`] | [`MAX_PREFIXES`] |
//! | destination address | [`Prefix`] | LPM_TRIE of [`Ends`] | [`MAX_PREFIXES`] |
//! | interface | [`Named::Interface`], its index | HASH of [`Rules`] | [`MAX_INTERFACES`] |
//! | VLAN | [`Named::Vlan`], its identifier | the same | [`MAX_VLANS`] |
//! | zone | [`Named::Zone`], its index in the table | the same | [`MAX_ZONES`], and zone 0 |
//!
//! A flow may be in two VLANs, one inside the other. Each gives a set, and a rule in either set
//! passes; rules that name no VLAN are in both. A flow in no VLAN is looked up under identifier 0.
//!
//! A condition on *either* end is not a condition on one dimension. So both address tries give two
//! sets, [`Ends`]: the rules whose condition on this very end is met, and the rules whose condition
//! on either end is met by this end. A rule passes if it is in both of the former sets and in at
//! least one of the latter. A trie returns only the longest prefix, so the value of an entry also
//! has the rules of all shorter prefixes that contain it.

use crate::{
    key::{Direction, FlowKey, VLAN_BITS},
    seen::Seen,
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub use crate::{
    rule::{TIMEOUTS, TimeoutName},
    rule_set::{MAX_RULES, Rules},
};

/// Most sets of rules that the ports of a policy may lead to. 255 rules of one range each make at
/// most 2 × 255 + 1 sets.
pub const MAX_CLASSES: usize = 512;
/// Entries of each address trie, including the two for "any address" of each family.
pub const MAX_PREFIXES: usize = 16_384;
/// Most interfaces that a policy may name.
pub const MAX_INTERFACES: usize = 64;
/// Most VLANs that a policy may name, including 0 for none.
pub const MAX_VLANS: usize = 1024;
/// The highest VLAN identifier; 4095 is reserved.
pub const MAX_VLAN: u16 = 4094;
/// Most zones that a policy may name besides zone 0: as many as a table tells apart.
pub const MAX_ZONES: usize = crate::key::ZONES - 1;
/// Entries of the hash of interfaces, VLANs and zones, per policy.
pub const MAX_NAMED: usize = MAX_INTERFACES + MAX_VLANS + MAX_ZONES + 1;

/// The class of each port, by port number; less than [`MAX_CLASSES`]. 128 KiB, as one value of an
/// array map: elements of an array map would take eight bytes each.
pub type PortClasses = [u16; 1 << 16];

/// The rules that an address admits as one end of a flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Ends {
    /// The rules whose condition on this end the address meets.
    pub admit: Rules,
    /// The rules whose condition on either end the address meets, and those without such a
    /// condition.
    pub either: Rules,
}

impl Ends {
    /// No rule.
    pub const NONE: Self = Self {
        admit: Rules::NONE,
        either: Rules::NONE,
    };
}

/// The first bits of an address, as key of an LPM trie. 20 bytes, laid out as the kernel requires
/// (`struct bpf_lpm_trie_key`): the length in this machine's byte order, then the address in
/// network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Prefix {
    /// How many bits count, 0 to 128; for an IPv4 prefix of n bits 96 + n.
    pub bits: u32,
    /// An IPv6 address; IPv4 mapped into it (`::ffff:0:0/96`).
    pub address: [u8; 16],
}

impl Prefix {
    /// A whole address as [`FlowKey`] has it: what to look up.
    #[inline(always)]
    pub fn host(address: [u64; 2]) -> Self {
        let [a, b, c, d, e, f, g, h] = address[0].to_ne_bytes();
        let [i, j, k, l, m, n, o, p] = address[1].to_ne_bytes();
        Self {
            bits: 128,
            address: [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p],
        }
    }
}

/// The hook through which the first packet of a flow was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// The packet came in.
    Ingress = 0,
    /// The packet went out.
    Egress = 1,
}

impl Hook {
    /// The hook of a number.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Ingress,
            _ => Self::Egress,
        }
    }
}

/// The protocol of a flow, as far as policies distinguish protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp = 0,
    /// UDP.
    Udp = 1,
    /// ICMP and ICMPv6.
    Icmp = 2,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Icmp];

    /// The protocol with an IANA number; `None` if a rule cannot name it.
    #[inline(always)]
    pub fn from_iana(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            1 | 58 => Some(Self::Icmp),
            _ => None,
        }
    }

    /// The name in a policy file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        }
    }
}

/// The kinds of entries of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// An interface, by its index.
    Interface = 0,
    /// A VLAN, by its identifier; 0 for none.
    Vlan = 1,
    /// A zone, by its index in keys; 0 for none.
    Zone = 2,
}

impl Named {
    /// The hash's key for an entry of policy 0 or 1.
    #[inline(always)]
    pub const fn key(self, set: u32, number: u32) -> [u32; 2] {
        [set & 1 | (self as u32) << 1, number]
    }

    /// The policy, 0 or 1, that an entry belongs to.
    pub const fn set(key: [u32; 2]) -> u32 {
        key[0] & 1
    }
}

/// The dimensions that the rules of a policy restrict. The others need not be looked up.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dimensions(pub u32);

impl Dimensions {
    /// There are rules.
    pub const RULES: Self = Self(1 << 0);
    /// Destination ports.
    pub const PORT: Self = Self(1 << 1);
    /// Addresses of the initiator, or of either end.
    pub const SOURCE: Self = Self(1 << 2);
    /// Addresses of the responder, or of either end.
    pub const DESTINATION: Self = Self(1 << 3);
    /// Interfaces.
    pub const INTERFACE: Self = Self(1 << 4);
    /// Hooks.
    pub const HOOK: Self = Self(1 << 5);
    /// Protocols.
    pub const PROTOCOL: Self = Self(1 << 6);
    /// VLANs.
    pub const VLAN: Self = Self(1 << 7);
    /// Zones.
    pub const ZONE: Self = Self(1 << 8);

    /// Whether all dimensions of `other` are among these.
    #[inline(always)]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These dimensions and those of `other`.
    #[inline(always)]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which of the two policies in the maps is active, and which of its dimensions to look up: one
/// word, so that one store switches policies.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Active(pub u32);

impl Active {
    /// Policy 0 or 1, with its dimensions.
    pub fn new(set: u32, dimensions: Dimensions) -> Self {
        Self(set & 1 | dimensions.0 << 1)
    }

    /// The policy's number, 0 or 1.
    #[inline(always)]
    pub fn set(self) -> u32 {
        self.0 & 1
    }

    /// The policy's dimensions.
    #[inline(always)]
    pub fn dimensions(self) -> Dimensions {
        Dimensions(self.0 >> 1)
    }
}

/// The dimensions with few values, in one lookup. 256 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Header {
    /// By [`Protocol`].
    pub protocols: [Rules; 3],
    /// By [`Hook`].
    pub hooks: [Rules; 2],
    /// Rules for the interfaces that no rule names.
    pub other_interfaces: Rules,
    /// Rules for the VLANs that no rule names; also for no VLAN, unless a rule names 0.
    pub other_vlans: Rules,
    /// Rules for the zones that no rule names; also for no zone, unless a rule names 0.
    pub other_zones: Rules,
}

impl Header {
    /// The rules that admit the protocol.
    #[inline(always)]
    pub fn protocol(&self, protocol: Protocol) -> Rules {
        match protocol {
            Protocol::Tcp => self.protocols[0],
            Protocol::Udp => self.protocols[1],
            Protocol::Icmp => self.protocols[2],
        }
    }

    /// The rules that admit the hook.
    #[inline(always)]
    pub fn hook(&self, hook: Hook) -> Rules {
        match hook {
            Hook::Ingress => self.hooks[0],
            Hook::Egress => self.hooks[1],
        }
    }

    /// The rules that admit a value that no rule names.
    #[inline(always)]
    pub fn other(&self, named: Named) -> Rules {
        match named {
            Named::Interface => self.other_interfaces,
            Named::Vlan => self.other_vlans,
            Named::Zone => self.other_zones,
        }
    }
}

/// Looks up the sets of a policy, in maps or on the host.
///
/// A lookup that finds nothing returns the empty set, so that the flow meets no rule. (This does
/// not happen with tables that are filled correctly.)
pub trait Tables {
    /// The dimensions that are restricted.
    fn dimensions(&self) -> Dimensions;
    /// The rules that admit a protocol.
    fn protocol(&self, protocol: Protocol) -> Rules;
    /// The rules that admit a hook.
    fn hook(&self, hook: Hook) -> Rules;
    /// The rules that admit a destination port, in host byte order.
    fn port(&self, port: u16) -> Rules;
    /// The rules that admit an interface, VLAN or zone.
    fn named(&self, named: Named, number: u32) -> Rules;
    /// The rules that the initiator's address admits; the address as in [`Tuple::source`].
    fn source(&self, address: [u64; 2]) -> Ends;
    /// The rules that the responder's address admits; the address as in [`Tuple::source`].
    fn destination(&self, address: [u64; 2]) -> Ends;
}

/// What a policy knows of a flow: its first packet, seen as one from the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The initiator's address: its words are in network byte order in memory, IPv4 mapped into
    /// IPv6, as in [`FlowKey`].
    pub source: [u64; 2],
    /// The responder's address.
    pub destination: [u64; 2],
    /// The responder's port, in network byte order. Meaningless for ICMP.
    pub port: u16,
    /// Index of the interface on which the packet was seen.
    pub interface: u32,
    /// Whether the packet came in or went out there.
    pub hook: Hook,
    /// The protocol.
    pub protocol: Protocol,
    /// The VLANs, as in [`FlowKey::packed_vlans`](crate::key::FlowKey::packed_vlans).
    pub vlans: u32,
    /// The zone: in the kernel its index, as in [`FlowKey`]; on the host its number.
    pub zone: u32,
}

impl Tuple {
    /// Of a flow with this key and these state bits, seen at this hook of an interface; the zone is
    /// its index. `None` if rules cannot name the protocol.
    #[inline(always)]
    pub fn new(key: &FlowKey, seen: Seen, interface: u32, hook: Hook) -> Option<Self> {
        let protocol = Protocol::from_iana(key.proto())?;
        let [a, b, c, d] = key.addresses();
        let ports = key.ports();
        let (source, destination, port) = match seen.initiator() {
            Direction::FromLow => ([a, b], [c, d], ports >> 16),
            Direction::FromHigh => ([c, d], [a, b], ports),
        };
        Some(Self {
            source,
            destination,
            // The bytes of a key's ports are in the packet's order, whatever this machine's byte
            // order is.
            port: u16::from_ne_bytes((port as u16).to_le_bytes()),
            interface,
            hook,
            protocol,
            vlans: key.packed_vlans(),
            zone: u32::from(key.zone()),
        })
    }
}

/// The rules that admit one of the VLANs of a flow. For a flow in no VLAN these are the rules that
/// admit VLAN 0.
#[inline(always)]
fn vlan_rules(tables: &impl Tables, vlans: u32) -> Rules {
    let (outer, inner) = (vlans & ((1 << VLAN_BITS) - 1), vlans >> VLAN_BITS);
    if outer == 0 || inner == 0 {
        return tables.named(Named::Vlan, outer | inner);
    }
    tables
        .named(Named::Vlan, outer)
        .or(tables.named(Named::Vlan, inner))
}

/// The number of the first rule that matches the flow; 0 if none does.
#[inline(always)]
pub fn first_match(tables: &impl Tables, tuple: &Tuple) -> u16 {
    let dimensions = tables.dimensions();
    if !dimensions.has(Dimensions::RULES) {
        return 0;
    }
    // If nothing is restricted, the first rule of all matches. Else the sets of the dimensions have
    // only rules that exist.
    let mut rules = Rules::ALL;
    if dimensions.has(Dimensions::PROTOCOL) {
        rules = tables.protocol(tuple.protocol);
    }
    if dimensions.has(Dimensions::HOOK) {
        rules = rules.and(tables.hook(tuple.hook));
    }
    if dimensions.has(Dimensions::PORT) {
        // ICMP has an identifier in place of ports. No rule admits port 0 by its number.
        let port = match tuple.protocol {
            Protocol::Icmp => 0,
            _ => u16::from_be(tuple.port),
        };
        rules = rules.and(tables.port(port));
    }
    if dimensions.has(Dimensions::INTERFACE) {
        rules = rules.and(tables.named(Named::Interface, tuple.interface));
    }
    if dimensions.has(Dimensions::VLAN) {
        rules = rules.and(vlan_rules(tables, tuple.vlans));
    }
    if dimensions.has(Dimensions::ZONE) {
        rules = rules.and(tables.named(Named::Zone, tuple.zone));
    }
    // The tries come last, and only if a rule may still match: they cost most.
    if rules.is_empty() {
        return 0;
    }
    // If a rule restricts either end, both tries are looked up. If only one is looked up, every
    // rule is in its `either`.
    let mut either = Rules::NONE;
    if dimensions.has(Dimensions::SOURCE) {
        let source = tables.source(tuple.source);
        rules = rules.and(source.admit);
        either = source.either;
    } else if !dimensions.has(Dimensions::DESTINATION) {
        either = Rules::ALL;
    }
    if dimensions.has(Dimensions::DESTINATION) {
        let destination = tables.destination(tuple.destination);
        rules = rules.and(destination.admit);
        either = either.or(destination.either);
    }
    rules.and(either).first()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(rules: &[u16]) -> Rules {
        let mut set = Rules::NONE;
        rules.iter().for_each(|&rule| set.insert(rule));
        set
    }

    #[test]
    fn what_the_kernel_sees_has_the_layout_that_is_documented() {
        assert_eq!(size_of::<Rules>(), 32);
        assert_eq!(size_of::<Ends>(), 64);
        assert_eq!(size_of::<Header>(), 256);
        assert_eq!(size_of::<Prefix>(), 20);
        assert_eq!(core::mem::offset_of!(Prefix, address), 4);
    }

    #[test]
    fn an_address_is_looked_up_as_it_lies_in_memory() {
        let bytes = *b"0123456789abcdef";
        let words = [0, 8].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()));
        let prefix = Prefix::host(words);
        assert_eq!((prefix.bits, prefix.address), (128, bytes));
    }

    #[test]
    fn protocols_have_their_numbers() {
        let numbers =
            |protocol| (0..=255).filter(move |&n| Protocol::from_iana(n) == Some(protocol));
        assert!(numbers(Protocol::Tcp).eq([6]));
        assert!(numbers(Protocol::Udp).eq([17]));
        assert!(numbers(Protocol::Icmp).eq([1, 58]));
    }

    /// Two rules. Each dimension answers what it is told to, and panics if it is asked needlessly.
    struct Told {
        dimensions: Dimensions,
        ends: [Option<Ends>; 2],
    }

    impl Tables for Told {
        fn dimensions(&self) -> Dimensions {
            self.dimensions
        }
        fn protocol(&self, _: Protocol) -> Rules {
            set(&[1, 2])
        }
        fn hook(&self, _: Hook) -> Rules {
            panic!("no rule restricts it")
        }
        fn port(&self, _: u16) -> Rules {
            panic!("no rule restricts it")
        }
        fn named(&self, _: Named, _: u32) -> Rules {
            panic!("no rule restricts it")
        }
        fn source(&self, _: [u64; 2]) -> Ends {
            self.ends[0].expect("no rule restricts it")
        }
        fn destination(&self, _: [u64; 2]) -> Ends {
            self.ends[1].expect("no rule restricts it")
        }
    }

    #[test]
    fn only_what_is_restricted_is_looked_up() {
        let tuple = Tuple {
            source: [0; 2],
            destination: [0; 2],
            port: 0,
            interface: 1,
            hook: Hook::Ingress,
            protocol: Protocol::Tcp,
            vlans: 10,
            zone: 3,
        };
        let told = |dimensions: &[Dimensions], ends| {
            let dimensions = dimensions
                .iter()
                .fold(Dimensions(0), |all, &one| all.with(one));
            first_match(&Told { dimensions, ends }, &tuple)
        };
        let ends = |admit: &[u16], either: &[u16]| {
            Some(Ends {
                admit: set(admit),
                either: set(either),
            })
        };
        use Dimensions as D;
        assert_eq!(told(&[], [None; 2]), 0);
        assert_eq!(told(&[D::RULES], [None; 2]), 1);
        let second = ends(&[2], &[1, 2]);
        assert_eq!(told(&[D::RULES, D::SOURCE], [second, None]), 2);
        assert_eq!(told(&[D::RULES, D::DESTINATION], [None, second]), 2);
        let both = [D::RULES, D::SOURCE, D::DESTINATION];
        assert_eq!(told(&both, [ends(&[1, 2], &[2]), ends(&[1, 2], &[])]), 2);
        assert_eq!(told(&both, [ends(&[1, 2], &[2]), ends(&[1, 2], &[1])]), 1);
        assert_eq!(told(&both, [ends(&[1], &[1]), ends(&[2], &[2])]), 0);
    }
}
