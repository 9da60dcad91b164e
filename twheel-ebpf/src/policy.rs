//! Which rule matches a new flow: `twheel_common::policy` on the maps.

use aya_ebpf::maps::lpm_trie::Key;
use twheel_common::{
    bits,
    key::FlowKey,
    point::Point,
    policy::{
        Dimensions, Ends, Hook, MAX_CLASSES, Named, Prefix, Protocol, Rules, Tables, Tuple,
        first_match,
    },
    seen::Seen,
    segment::Segment,
    way::Way,
};

use crate::maps::{ACTIVE, CLASSES, DESTINATIONS, INTERFACES, NUMBERS, POLICIES, PORTS, SOURCES};
use crate::verifier::given;

/// Where a packet was seen.
#[derive(Clone, Copy)]
pub struct Arrival {
    /// Index of the interface.
    pub interface: u32,
    /// At which hook.
    pub hook: Hook,
    /// The way by which it came.
    pub way: Way,
    /// The observation point.
    pub sight: Sight,
    /// Whether another interface saw it before, when it came in.
    pub is_forwarded: bool,
}

/// An observation point, none if there is one interface; and whether another interface may have
/// seen the packet before. One number: `twheel_xdp` has no space on the stack for two. With more,
/// Linux 6.1 counts 544 bytes of stack for it and what it calls, and refuses it.
#[derive(Clone, Copy)]
pub struct Sight(u32);

impl Sight {
    const MAY_BE_KNOWN: u32 = 1 << 16;

    /// At this point.
    #[inline(always)]
    pub fn new(point: Point, may_be_known: bool) -> Self {
        Self(u32::from(point.0) | u32::from(may_be_known) << 16)
    }

    /// The point, as flows store it.
    #[inline(always)]
    pub fn point(self) -> Point {
        Point(self.0 as u16)
    }

    /// Whether another interface may have seen the packet before.
    #[inline(always)]
    pub fn may_be_known(self) -> bool {
        self.0 & Self::MAY_BE_KNOWN != 0
    }
}

/// The number of the rule that matches a new flow, by its first packet; 0 if none does.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn policy_rule(
    segment: *const Segment,
    seen: u32,
    interface: u32,
    hook: u32,
) -> u32 {
    match given(segment) {
        Some(segment) => rule(&segment.key, Seen(seen), interface, Hook::from_raw(hook)),
        None => 0,
    }
}

#[inline(always)]
fn rule(key: &FlowKey, seen: Seen, interface: u32, hook: Hook) -> u32 {
    let active = ACTIVE.get(0).copied().unwrap_or_default();
    let policy = Policy {
        set: active.set(),
        dimensions: active.dimensions(),
    };
    if !policy.dimensions.has(Dimensions::RULES) {
        return 0;
    }
    let Some(tuple) = Tuple::new(key, seen, interface, hook) else {
        return 0;
    };
    let first = usize::from(first_match(&policy, &tuple));
    if first == 0 {
        return 0;
    }
    match NUMBERS.get(policy.set) {
        Some(numbers) => u32::from(numbers[first & 255]),
        None => 0,
    }
}

/// Whether rules of the policy in force name interfaces.
#[inline(always)]
pub fn names_interfaces() -> bool {
    let active = ACTIVE.get(0).copied().unwrap_or_default();
    active.dimensions().has(Dimensions::INTERFACE)
}

struct Policy {
    set: u32,
    dimensions: Dimensions,
}

impl Policy {
    #[inline(always)]
    fn key(&self, address: [u64; 2]) -> Key<[u32; 5]> {
        let [a, b, c, d] = words(address);
        Key::new(32 + Prefix::host(address).bits, [self.set, a, b, c, d])
    }
}

/// The words in the order in which they lie in memory.
#[inline(always)]
fn words([high, low]: [u64; 2]) -> [u32; 4] {
    let halves = |word: u64| {
        let [a, b] = [word as u32, (word >> 32) as u32];
        if cfg!(target_endian = "big") {
            [b, a]
        } else {
            [a, b]
        }
    };
    let ([a, b], [c, d]) = (halves(high), halves(low));
    [a, b, c, d]
}

impl Tables for Policy {
    #[inline(always)]
    fn dimensions(&self) -> Dimensions {
        self.dimensions
    }

    #[inline(always)]
    fn protocol(&self, protocol: Protocol) -> Rules {
        match POLICIES.get(self.set) {
            Some(header) => header.protocol(protocol),
            None => Rules::NONE,
        }
    }

    #[inline(always)]
    fn hook(&self, hook: Hook) -> Rules {
        match POLICIES.get(self.set) {
            Some(header) => header.hook(hook),
            None => Rules::NONE,
        }
    }

    #[inline(always)]
    fn port(&self, port: u16) -> Rules {
        let Some(classes) = PORTS.get(self.set) else {
            return Rules::NONE;
        };
        // Every port has a class.
        let class = classes.get(bits::index(port)).copied().unwrap_or(0);
        match CLASSES.get(self.set * MAX_CLASSES as u32 + u32::from(class)) {
            Some(rules) => *rules,
            None => Rules::NONE,
        }
    }

    #[inline(always)]
    fn named(&self, named: Named, number: u32) -> Rules {
        // SAFETY: entries of the active policy are not written.
        match unsafe { INTERFACES.get(named.key(self.set, number)) } {
            Some(rules) => *rules,
            None => match POLICIES.get(self.set) {
                Some(header) => header.other(named),
                None => Rules::NONE,
            },
        }
    }

    #[inline(always)]
    fn source(&self, address: [u64; 2]) -> Ends {
        match SOURCES.get(self.key(address)) {
            Some(ends) => *ends,
            None => Ends::NONE,
        }
    }

    #[inline(always)]
    fn destination(&self, address: [u64; 2]) -> Ends {
        match DESTINATIONS.get(self.key(address)) {
            Some(ends) => *ends,
            None => Ends::NONE,
        }
    }
}
