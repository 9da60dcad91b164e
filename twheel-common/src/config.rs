//! The settings that the running twheel gives the data plane, and what it stores beside the maps.

use crate::{counter::NO_INTERFACE, table::Hash, wheel::Geometry};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Version of everything that maps hold: keys, flows, wheels, events. It is part of the path of the
/// pins, so that no version reads what another has written.
pub const LAYOUT: u32 = 23;

/// Number of rule numbers that flows can have. 0 means no rule; the last one stands for the
/// timeouts that flows without a rule have without a policy. There are more numbers than a policy
/// has rules, so that a new policy can use numbers that no flow of the old one has.
pub const RULES: usize = 512;
/// The last rule number; see [`RULES`].
pub const UNRULED: u16 = RULES as u16 - 1;
/// Bytes of a rule's name, padded with zeros.
pub const NAME_BYTES: usize = 64;

/// Clock of production: `bpf_jiffies64`, units of 1/HZ s.
pub const CLOCK_JIFFIES: u32 = 0;
/// Clock of the tests: a map that userspace writes.
pub const CLOCK_VIRTUAL: u32 = 1;

/// Read-only global of the eBPF object, set when it is loaded: the verifier knows these values and
/// removes the code that they exclude.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Config {
    /// Clock units in a tick of the wheel, at least 1.
    pub tick: u32,
    /// Shape of the wheel of each CPU.
    pub geometry: Geometry,
    /// [`CLOCK_JIFFIES`] or [`CLOCK_VIRTUAL`].
    pub clock: u32,
    /// Units for which the clock may stand still while packets come:
    /// [`MAX_STALL`](crate::jiffies::MAX_STALL), or 0.
    pub max_stall: u32,
    /// Capacity of the flow table.
    pub max_flows: u32,
    /// Number of [`Details`](crate::table::Details).
    pub details: u32,
    /// 1: only one direction of each flow is seen here.
    pub one_way: u32,
    /// 1: a connection must begin with a SYN; those that were already open are not tracked.
    pub strict: u32,
    /// 1: an answer may come by the same [way](crate::state::Way) as what it answers.
    pub one_armed: u32,
    /// [`Protocols`](crate::packet::Protocols) that are tracked.
    pub protocols: u32,
    /// Two seconds, in clock units.
    pub two_seconds: u32,
    /// 1: packets and bytes are counted.
    pub accounting: u32,
    /// 1: the beginnings of flows are reported.
    pub begins: u32,
    /// Units after which a live flow is [reported](crate::update); 0: never.
    pub active_timeout: u32,
    /// Whether retransmission timers run, and their bounds.
    pub rto: Rto,
    /// Whether, and for how long, later packets of expired flows can be refused.
    pub enforce: Enforce,
    /// Most answers to a source per second, up to [`MAX_RATE`](crate::enforce::MAX_RATE).
    pub enforce_rate: u32,
    /// 1: sources that hold more than their [quota](crate::quota) of a full table are evicted
    /// first.
    pub quota: u32,
    /// 1: programs that userspace runs get [live frames](crate::step::Call).
    pub live: u32,
    /// 1: VLAN tags are part of a flow's key.
    pub vlans: u32,
    /// 1: programs look up [`Watched`] for their interface. 0: there is only one interface, and no
    /// such data.
    pub watched: u32,
    /// 1: programs can hand over [timeouts](crate::offload) for their connections.
    pub offload: u32,
}

/// For how long later packets of expired flows can be [refused](crate::enforce); bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Enforce(u32);

impl Enforce {
    /// Never.
    pub const NEVER: Self = Self(0);
    /// For a moment, while a flow is being reaped.
    pub const FOR_A_MOMENT: Self = Self(1);
    /// For a moment and for good.
    pub const FOR_GOOD: Self = Self(Self::FOR_A_MOMENT.0 | Self::GOOD);
    const GOOD: u32 = 2;

    /// Whether packets are ever refused.
    #[inline(always)]
    pub fn is_on(self) -> bool {
        self.0 != 0
    }

    /// Whether packets can be refused for good.
    pub fn is_for_good(self) -> bool {
        self.0 & Self::GOOD != 0
    }
}

/// What the programs know of an interface.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Watched {
    /// Index of its counters; see [`counter`](crate::counter).
    pub place: u16,
    /// The zone of its flows, by the zone's index in the table; 0 for none.
    pub zone: u8,
    /// Bits: [`IS_IP`](Self::IS_IP), [`IS_ABOVE`](Self::IS_ABOVE), [`IS_BELOW`](Self::IS_BELOW),
    /// [`IS_DECRYPTED`](Self::IS_DECRYPTED).
    pub flags: u8,
}

/// Entries of the array in which programs look up an interface before they look it up in the hash.
pub const SEATS: u32 = 1 << SEAT_BITS;
const SEAT_BITS: u32 = 12;

/// The *seat* of an interface: its entry in that array. Two interfaces may have the same seat; but
/// a thousand with consecutive indexes have different ones, and so have those with the same index
/// in a thousand network namespaces.
#[inline(always)]
pub const fn seat(interface: u32) -> u32 {
    interface.wrapping_mul(0x9e37_79b1) >> (32 - SEAT_BITS)
}

impl Watched {
    /// As a number: from the lowest bit its index (16), its zone (8), its flags (8).
    #[inline(always)]
    pub const fn packed(self) -> u32 {
        self.place as u32 | (self.zone as u32) << 16 | (self.flags as u32) << 24
    }

    /// From such a number.
    #[inline(always)]
    pub const fn from_packed(packed: u32) -> Self {
        Self {
            place: packed as u16,
            zone: (packed >> 16) as u8,
            flags: (packed >> 24) as u8,
        }
    }

    /// Its packets have no Ethernet header.
    pub const IS_IP: u8 = 1;
    /// It is stacked on another watched interface (as a VLAN, a bridge, a bond): packets that come
    /// in here may have been seen there before.
    pub const IS_ABOVE: u8 = 2;
    /// Another watched interface is stacked on it: packets that go out here may have been seen
    /// there before.
    pub const IS_BELOW: u8 = 4;
    /// Its packets have no Ethernet header, but incoming ones may still have that of the encrypted
    /// packet: `vti`, `xfrm`.
    pub const IS_DECRYPTED: u8 = 8;

    /// For an interface that is not watched and is stacked on one that is: packets that come in
    /// through it were seen below.
    pub const IS_SEEN_BELOW: Self = Self {
        place: NO_INTERFACE as u16,
        zone: 0,
        flags: 0,
    };

    /// Whether the interface itself is watched, and not only one [below it](Self::IS_SEEN_BELOW).
    #[inline(always)]
    pub const fn is_watched(self) -> bool {
        self.place != NO_INTERFACE as u16
    }

    /// Whether one of these flags is set.
    #[inline(always)]
    pub fn has(self, flags: u8) -> bool {
        self.flags & flags != 0
    }
}

/// Settings of the retransmission timers; see [`Config::rto`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Rto {
    /// 1: the timers run.
    pub on: u32,
    /// See [`Limits`](crate::rto::Limits).
    pub min: u32,
    /// Likewise.
    pub max: u32,
    /// Expiries after which a flow is stalled.
    pub max_retrans: u32,
    /// Microseconds in a clock unit.
    pub unit: u32,
}

/// Optional contents of pinned maps, and optional parts of a key; bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Features(pub u32);

impl Features {
    /// Packets and bytes are counted.
    pub const ACCOUNTING: Self = Self(1);
    /// There are retransmission timers.
    pub const RTO: Self = Self(2);
    /// Later packets of expired flows are refused for good.
    pub const ENFORCE: Self = Self(4);
    /// VLAN tags are part of a flow's key.
    pub const VLANS: Self = Self(8);
    /// Live flows are reported.
    pub const UPDATES: Self = Self(16);
    /// Programs can hand over timeouts.
    pub const OFFLOAD: Self = Self(32);

    /// The features that a configuration needs.
    pub fn needed_by(config: &Config) -> Self {
        let features = [
            (config.accounting != 0, Self::ACCOUNTING),
            (config.rto.on != 0, Self::RTO),
            (config.enforce.is_for_good(), Self::ENFORCE),
            (config.vlans != 0, Self::VLANS),
            (config.active_timeout != 0, Self::UPDATES),
            (config.offload != 0, Self::OFFLOAD),
        ];
        let of = features.into_iter().filter(|(is_on, _)| *is_on);
        Self(of.fold(0, |bits, (_, feature)| bits | feature.0))
    }

    /// Whether all features of `other` are among these.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What pinned maps were made for. A new `twheel run` adopts them only if its own settings are the
/// same.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Meta {
    /// [`LAYOUT`]; 0 in a map whose `twheel run` died before everything was set up.
    pub layout: u32,
    /// Clock units in a tick.
    pub tick: u32,
    /// Nanoseconds in a clock unit.
    pub unit_ns: u32,
    /// Shape of the wheels.
    pub geometry: Geometry,
    /// Capacity of the flow table.
    pub max_flows: u32,
    /// Optional contents.
    pub features: Features,
    /// The hash function of the table.
    pub hash: Hash,
    /// When the maps were made, nanoseconds since 1970: tells an instance from earlier ones of its
    /// name.
    pub made: u64,
}

/// Clock units in a tick, as [`Config::tick`].
#[derive(Clone, Copy, Debug)]
pub struct Tick(pub u32);

impl Tick {
    /// The tick that contains a time (units). (A tick of 0 units, which is never set, does not
    /// panic.)
    #[inline(always)]
    pub fn number(self, time: u64) -> u64 {
        time.checked_div(u64::from(self.0)).unwrap_or(time)
    }

    /// When the tick began that contains a time (units).
    #[inline(always)]
    pub fn begin(self, time: u64) -> u64 {
        self.number(time).wrapping_mul(u64::from(self.0))
    }

    /// The first tick that begins no earlier than a time (units).
    #[inline(always)]
    pub fn from(self, time: u64) -> u64 {
        self.number(time.wrapping_add(u64::from(self.0)).wrapping_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_refused_never_for_a_moment_or_for_good() {
        let is = |enforce: Enforce| (enforce.is_on(), enforce.is_for_good());
        assert_eq!(is(Enforce::NEVER), (false, false));
        assert_eq!(is(Enforce::FOR_A_MOMENT), (true, false));
        assert_eq!(is(Enforce::FOR_GOOD), (true, true));
    }

    #[test]
    fn features_are_those_of_the_configuration() {
        let none = Config {
            tick: 1,
            geometry: Geometry::default(),
            clock: CLOCK_VIRTUAL,
            max_stall: 0,
            max_flows: 1,
            details: 1,
            one_way: 1,
            strict: 1,
            one_armed: 1,
            protocols: 1,
            two_seconds: 1,
            accounting: 0,
            begins: 1,
            active_timeout: 0,
            rto: Rto::default(),
            enforce: Enforce::FOR_A_MOMENT,
            enforce_rate: 1,
            quota: 1,
            live: 1,
            vlans: 0,
            watched: 1,
            offload: 0,
        };
        assert_eq!(Features::needed_by(&none), Features(0));
        let rto = Rto {
            on: 1,
            ..Rto::default()
        };
        let each = [
            (
                Config {
                    accounting: 1,
                    ..none
                },
                Features::ACCOUNTING,
            ),
            (Config { rto, ..none }, Features::RTO),
            (
                Config {
                    enforce: Enforce::FOR_GOOD,
                    ..none
                },
                Features::ENFORCE,
            ),
            (Config { vlans: 1, ..none }, Features::VLANS),
            (
                Config {
                    active_timeout: 1,
                    ..none
                },
                Features::UPDATES,
            ),
            (Config { offload: 1, ..none }, Features::OFFLOAD),
        ];
        for (config, feature) in each {
            let of = Features::needed_by(&config);
            assert_eq!(of, feature);
            assert!(of.has(feature) && !Features(0).has(feature));
            assert!(!of.has(Features(of.0 | 1 << 8)));
        }
        let all = Config {
            accounting: 1,
            rto,
            enforce: Enforce::FOR_GOOD,
            vlans: 1,
            active_timeout: 1,
            offload: 1,
            ..none
        };
        assert_eq!(Features::needed_by(&all), Features(63));
    }
}
