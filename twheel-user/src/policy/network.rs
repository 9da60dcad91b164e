//! Networks, and sets of addresses as ranges of numbers.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use twheel_common::policy::Prefix;

/// A network of either family: an address, and how many of its bits count. The order is such that a
/// network comes before everything inside it, and all of that before what follows the network.
///
/// IPv4 is mapped into IPv6, as everywhere in twheel, but the families are separate: `::/0`
/// contains every IPv6 address, and no IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Network {
    address: u128,
    bits: u32,
}

impl Network {
    /// All addresses of either family. An LPM trie must have this entry, so that each lookup finds
    /// something.
    pub(super) const ANY: Self = Self {
        address: 0,
        bits: 0,
    };
    /// All of IPv4.
    pub(crate) const IPV4: Self = Self {
        address: 0xffff << 32,
        bits: 96,
    };

    /// Parses `ADDRESS` or `ADDRESS/BITS`.
    ///
    /// # Errors
    ///
    /// What is wrong and what may have been meant, without the location.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| {
            format!(
                "`{text}` is not an address or network: give one such as 192.0.2.1, 192.0.2.0/24 \
                 or 2001:db8::/32"
            )
        })?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => longest,
            Some(bits) => number(bits)
                .filter(|bits| *bits <= longest)
                .ok_or_else(|| format!("`{text}`: the prefix length is 0 to {longest}"))?,
        };
        let network = Self {
            address: mapped(address).to_bits(),
            bits: 128 - longest + bits,
        };
        let canonical = Self {
            address: network.address & mask(network.bits),
            ..network
        };
        if network != canonical {
            return Err(format!(
                "`{text}` has bits beyond its prefix: give {canonical} for the network, or {} for \
                 the one address",
                mapped(address).to_canonical()
            ));
        }
        Ok(canonical)
    }

    fn is_ipv4(self) -> bool {
        self.bits >= 96 && self.address >> 32 == 0xffff
    }

    /// Whether the network contains an address (IPv4 mapped).
    pub fn contains(self, address: Ipv6Addr) -> bool {
        let same_family = self.is_ipv4() == address.to_ipv4_mapped().is_some();
        same_family && address.to_bits() & mask(self.bits) == self.address
    }

    /// Whether `other` is inside this network as the trie sees it: by bits alone.
    pub(super) fn encloses(self, other: Self) -> bool {
        self.bits <= other.bits && other.address & mask(self.bits) == self.address
    }

    /// The network of this prefix length that contains an address.
    pub(super) fn around(address: Ipv6Addr, bits: u32) -> Self {
        Self {
            address: address.to_bits() & mask(bits),
            bits,
        }
    }

    /// The prefix length, 0 to 128.
    pub(super) fn bits(self) -> u32 {
        self.bits
    }

    /// Its first and its last address, IPv4 mapped.
    pub fn range(self) -> [Ipv6Addr; 2] {
        let last = self.address | !mask(self.bits);
        [self.address, last].map(Ipv6Addr::from_bits)
    }

    /// The network as the key of an LPM trie.
    pub fn prefix(self) -> Prefix {
        Prefix {
            bits: self.bits,
            address: self.address.to_be_bytes(),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, longest) = if self.is_ipv4() {
            (Ipv6Addr::from_bits(self.address).to_canonical(), 32)
        } else {
            (Ipv6Addr::from_bits(self.address).into(), 128)
        };
        match self.bits {
            128 => write!(f, "{address}"),
            bits => write!(f, "{address}/{}", bits + longest - 128),
        }
    }
}

/// An address of either family as an IPv6 address.
pub fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// Parses decimal digits and nothing else (`parse` accepts a sign).
pub(super) fn number(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

fn mask(bits: u32) -> u128 {
    u128::MAX.checked_shl(128 - bits).unwrap_or(0)
}

/// A set of numbers: ranges in order, with a gap between each two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ranges(Vec<(u128, u128)>);

impl Ranges {
    /// The union of these ranges, which include both ends.
    pub fn new(ranges: impl IntoIterator<Item = (u128, u128)>) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().collect();
        ranges.sort_unstable();
        let mut apart: Vec<(u128, u128)> = Vec::new();
        for (low, high) in ranges {
            match apart.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => apart.push((low, high)),
            }
        }
        Self(apart)
    }

    /// The addresses of any of these networks.
    pub fn from_networks(networks: &[Network]) -> Self {
        Self::new(networks.iter().flat_map(|network| {
            let (low, high) = (network.address, network.address | !mask(network.bits));
            let [v4_low, v4_high] = IPV4;
            // IPv4 lies inside the number space of IPv6, but is not part of IPv6.
            match !network.is_ipv4() && low <= v4_low && v4_high <= high {
                true => vec![(low, v4_low - 1), (v4_high + 1, high)],
                false => vec![(low, high)],
            }
        }))
    }

    /// All addresses of IPv4, and all of IPv6.
    pub fn families() -> [Self; 2] {
        let [low, high] = IPV4;
        [
            Self(vec![(low, high)]),
            Self(vec![(0, low - 1), (high + 1, u128::MAX)]),
        ]
    }

    pub fn all() -> Self {
        Self(vec![(0, u128::MAX)])
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers that are in both sets.
    pub fn and(&self, other: &Self) -> Self {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&(a_low, a_high)), Some(&&(b_low, b_high))) = (a.peek(), b.peek()) {
            let (low, high) = (a_low.max(b_low), a_high.min(b_high));
            if low <= high {
                both.push((low, high));
            }
            if a_high < b_high {
                a.next()
            } else {
                b.next()
            };
        }
        Self(both)
    }

    /// Whether this set contains all numbers of the other.
    pub fn covers(&self, other: &Self) -> bool {
        let mut ranges = self.0.iter().peekable();
        other.0.iter().all(|&(low, high)| {
            while ranges.next_if(|range| range.1 < low).is_some() {}
            ranges
                .peek()
                .is_some_and(|range| range.0 <= low && high <= range.1)
        })
    }
}

const IPV4: [u128; 2] = [0xffff << 32, 0xffff << 32 | 0xffff_ffff];

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        Network::parse(text).unwrap()
    }

    #[test]
    fn networks_are_written_as_they_are_read() {
        for text in [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "192.0.2.1",
            "::/0",
            "2001:db8::/32",
            "::1",
        ] {
            assert_eq!(network(text).to_string(), text);
        }
        assert_eq!(network("::ffff:10.0.0.0/104"), network("10.0.0.0/8"));
        assert_eq!(network("10.0.0.1/32").to_string(), "10.0.0.1");
    }

    #[test]
    fn what_was_meant_is_said() {
        let error = Network::parse("10.1.2.3/8").unwrap_err();
        assert!(
            error.contains("10.0.0.0/8") && error.contains("10.1.2.3 "),
            "{error}"
        );
        let error = Network::parse("2001:db8::1/32").unwrap_err();
        assert!(error.contains("2001:db8::/32"), "{error}");
        assert!(
            Network::parse("10.0.0.0/33")
                .unwrap_err()
                .contains("0 to 32")
        );
        assert!(Network::parse("::/129").unwrap_err().contains("0 to 128"));
        for text in [
            "",
            "/",
            "10.0.0/8",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0.0/8/8",
            "fe80::1%lo",
            "a.example",
        ] {
            assert!(Network::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_families_are_apart() {
        let v4 = mapped("10.0.0.1".parse().unwrap());
        let v6 = mapped("2001:db8::1".parse().unwrap());
        assert!(network("0.0.0.0/0").contains(v4) && !network("0.0.0.0/0").contains(v6));
        assert!(network("::/0").contains(v6) && !network("::/0").contains(v4));
        assert!(!network("::/16").contains(v4));
        let [v4, v6] = Ranges::families();
        assert_eq!(Ranges::from_networks(&[network("0.0.0.0/0")]), v4);
        assert_eq!(Ranges::from_networks(&[network("::/0")]), v6);
        assert_eq!(
            Ranges::from_networks(&[network("::/0"), network("0.0.0.0/0")]),
            Ranges::all()
        );
        assert!(v4.and(&v6).is_empty());
    }

    #[test]
    fn ranges_join_meet_and_cover() {
        let ranges = |ranges: &[(u128, u128)]| Ranges::new(ranges.iter().copied());
        assert_eq!(
            ranges(&[(5, 9), (0, 4), (20, 30), (7, 8)]),
            ranges(&[(0, 9), (20, 30)])
        );
        let (a, b) = (ranges(&[(0, 9), (20, 30)]), ranges(&[(5, 25), (30, 40)]));
        assert_eq!(a.and(&b), ranges(&[(5, 9), (20, 25), (30, 30)]));
        assert!(a.covers(&ranges(&[(0, 1), (3, 9), (21, 30)])));
        assert!(!a.covers(&ranges(&[(9, 20)])) && !a.covers(&b) && !a.covers(&Ranges::all()));
        assert!(a.covers(&ranges(&[])) && Ranges::all().covers(&a));
    }
}
