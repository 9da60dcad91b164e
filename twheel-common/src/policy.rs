//! Which rule of a policy a flow meets: timeouts per service.
//!
//! Rules are numbered from 1 in the order of the file, and the first that admits a flow is the one
//! that counts. How it is found is the bit-vector scheme of Lakshman and Stiliadis ("High-speed
//! policy-based packet forwarding using efficient multi-dimensional range matching", SIGCOMM 1998):
//! each dimension on its own looks up the *set* of the rules that admit the flow's value; the rules
//! that admit the flow are in all of these sets, and the lowest bit of their intersection is the
//! first of them. So a flow costs one lookup a dimension, however many rules there are.
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
//! | zone | [`Named::Zone`], its place | the same | [`MAX_ZONES`], and zone 0 |
//!
//! A flow may be in two VLANs, one inside the other: each gives a set, and a rule in either of them passes. Both sets
//! have the rules that name no VLAN. A flow in none is looked up under identifier 0.
//!
//! A condition on *either* end is not a condition on one dimension. Both address tries therefore
//! give two sets, [`Ends`]: the rules whose condition on this very end is met, and those whose
//! condition on either end this end meets. A rule passes if it is in both of the former and in one
//! of the latter at least. A trie gives only the longest prefix, so that the value of an entry has
//! the rules of all the shorter prefixes around it as well.

use crate::key::VLAN_BITS;

pub use crate::{
    rule::{TIMEOUTS, TimeoutName},
    rule_set::{MAX_RULES, Rules},
};

/// Sets of rules that the ports of a policy may lead to. 255 rules of one range each make
/// 2 × 255 + 1 of them at most.
pub const MAX_CLASSES: usize = 512;
/// Entries of either address trie, with the two for "any address" of each family.
pub const MAX_PREFIXES: usize = 16_384;
/// Interfaces that a policy may name.
pub const MAX_INTERFACES: usize = 64;
/// VLANs that a policy may name, with 0 for none.
pub const MAX_VLANS: usize = 1024;
/// The highest VLAN identifier; 4095 is reserved.
pub const MAX_VLAN: u16 = 4094;
/// Zones that a policy may name beside zone 0: as many as a table tells apart.
pub const MAX_ZONES: usize = crate::key::ZONES - 1;
/// Entries of the hash of interfaces, VLANs and zones, of one policy.
pub const MAX_NAMED: usize = MAX_INTERFACES + MAX_VLANS + MAX_ZONES + 1;

/// For each port, by its number: its class, less than [`MAX_CLASSES`]. 128 KiB; one value of an
/// array map, whose elements would otherwise take eight bytes each.
pub type PortClasses = [u16; 1 << 16];

/// What an address says as one end of a flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ends {
    /// The rules that admit this address at this end.
    pub admit: Rules,
    /// The rules that want something of either end and are content with this address, and those
    /// that want nothing of either.
    pub either: Rules,
}

impl Ends {
    /// No rule.
    pub const NONE: Self = Self {
        admit: Rules::NONE,
        either: Rules::NONE,
    };
}

/// The first bits of an address: key of an LPM trie. 20 bytes, as the kernel has it (`struct
/// bpf_lpm_trie_key`): its length as this machine writes numbers, then the address in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    /// How many bits count, 0 to 128. An IPv4 prefix of n bits has 96 + n.
    pub bits: u32,
    /// An IPv6 address; IPv4 mapped into it (`::ffff:0:0/96`).
    pub address: [u8; 16],
}

impl Prefix {
    /// All of an address as [`FlowKey`](crate::key::FlowKey) has it: what to look up.
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

/// Through which hook the first packet of a flow was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// It came in.
    Ingress = 0,
    /// It went out.
    Egress = 1,
}

impl Hook {
    /// From its number.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Ingress,
            _ => Self::Egress,
        }
    }
}

/// The protocol of a flow, as far as policies tell them apart.
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
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Icmp];

    /// By its IANA number; `None`: no protocol that a rule could name.
    #[inline(always)]
    pub fn from_iana(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            1 | 58 => Some(Self::Icmp),
            _ => None,
        }
    }

    /// As in a policy file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        }
    }
}

/// What the entries of the hash are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// An interface, by its index.
    Interface = 0,
    /// A VLAN, by its identifier; 0: none.
    Vlan = 1,
    /// A zone, by its place in keys; 0: none.
    Zone = 2,
}

impl Named {
    /// The key of an entry of policy 0 or 1.
    #[inline(always)]
    pub const fn key(self, set: u32, number: u32) -> [u32; 2] {
        [set & 1 | (self as u32) << 1, number]
    }

    /// The policy, 0 or 1, that an entry is of.
    pub const fn set(key: [u32; 2]) -> u32 {
        key[0] & 1
    }
}

/// Which dimensions the rules of a policy restrict: those that none does need not be looked up.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dimensions(pub u32);

impl Dimensions {
    /// There are rules at all.
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

    /// Whether all of `other` are among these.
    #[inline(always)]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These, and `other`.
    #[inline(always)]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which of the two policies in the maps counts, and what to look up of it: one word, so that one store switches.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Active(pub u32);

impl Active {
    /// Policy 0 or 1, with its dimensions.
    pub fn new(set: u32, dimensions: Dimensions) -> Self {
        Self(set & 1 | dimensions.0 << 1)
    }

    /// 0 or 1.
    #[inline(always)]
    pub fn set(self) -> u32 {
        self.0 & 1
    }

    /// The policy's.
    #[inline(always)]
    pub fn dimensions(self) -> Dimensions {
        Dimensions(self.0 >> 1)
    }
}

/// The dimensions that have few values, in one lookup. 256 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// By [`Protocol`].
    pub protocols: [Rules; 3],
    /// By [`Hook`].
    pub hooks: [Rules; 2],
    /// For the interfaces that no rule names.
    pub other_interfaces: Rules,
    /// For the VLANs that no rule names, and for no VLAN unless a rule names 0.
    pub other_vlans: Rules,
    /// For the zones that no rule names, and for no zone unless a rule names 0.
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

    /// The rules that admit what no rule names.
    #[inline(always)]
    pub fn other(&self, named: Named) -> Rules {
        match named {
            Named::Interface => self.other_interfaces,
            Named::Vlan => self.other_vlans,
            Named::Zone => self.other_zones,
        }
    }
}

/// Where the sets of a policy lie: in maps, or on the host.
///
/// Of a lookup that finds nothing (which no table that was filled as it should be gives) the answer
/// is the empty set: the flow then meets no rule.
pub trait Tables {
    /// Which dimensions are restricted.
    fn dimensions(&self) -> Dimensions;
    /// The rules that admit a protocol.
    fn protocol(&self, protocol: Protocol) -> Rules;
    /// The rules that admit a hook.
    fn hook(&self, hook: Hook) -> Rules;
    /// The rules that admit a destination port, in host byte order.
    fn port(&self, port: u16) -> Rules;
    /// The rules that admit this interface, VLAN or zone.
    fn named(&self, named: Named, number: u32) -> Rules;
    /// What the initiator's address says; as in [`Tuple::source`].
    fn source(&self, address: [u64; 2]) -> Ends;
    /// What the responder's address says; as in [`Tuple::source`].
    fn destination(&self, address: [u64; 2]) -> Ends;
}

/// What a policy knows a flow by: its first packet, seen as one of the initiator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The initiator's address, the words of which lie in memory in network byte order, IPv4 mapped
    /// into IPv6: as in [`FlowKey`](crate::key::FlowKey).
    pub source: [u64; 2],
    /// The responder's address.
    pub destination: [u64; 2],
    /// The responder's port, in network byte order. Of no meaning with ICMP.
    pub port: u16,
    /// Index of the interface on which the packet was seen.
    pub interface: u32,
    /// Whether it came in or went out there.
    pub hook: Hook,
    /// The protocol.
    pub protocol: Protocol,
    /// The VLANs, as [`FlowKey::packed_vlans`](crate::key::FlowKey::packed_vlans) has them.
    pub vlans: u32,
    /// The zone: in the kernel its place, as in [`FlowKey`](crate::key::FlowKey); on the host its number.
    pub zone: u32,
}

/// The rules that admit one of the VLANs of a flow; of a flow in none, VLAN 0.
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

/// The number of the first rule that admits the flow; 0 if none does.
#[inline(always)]
pub fn first_match(tables: &impl Tables, tuple: &Tuple) -> u16 {
    let dimensions = tables.dimensions();
    if !dimensions.has(Dimensions::RULES) {
        return 0;
    }
    // Where nothing is restricted, the first rule is the first of all. Else the sets of the dimensions have no rule
    // that does not exist.
    let mut rules = Rules::ALL;
    if dimensions.has(Dimensions::PROTOCOL) {
        rules = tables.protocol(tuple.protocol);
    }
    if dimensions.has(Dimensions::HOOK) {
        rules = rules.and(tables.hook(tuple.hook));
    }
    if dimensions.has(Dimensions::PORT) {
        // ICMP has an identifier where others have ports. No rule admits port 0 by its number.
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
    // The tries last, and not if nothing is left to be found: they are what costs.
    if rules.is_empty() {
        return 0;
    }
    // A rule that restricts either end makes both tries be looked up. Where one of them is not,
    // every rule is in the other's `either`.
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

    /// Two rules; each dimension says what it is told, and panics if it is asked without need.
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
