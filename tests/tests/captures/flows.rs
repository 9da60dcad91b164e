//! Flows and how many packets each has: what both sides are compared by.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
};

/// Protocol, both ends in order, so that both directions have one key, and the outer and the inner VLAN (0: none). An
/// ICMP query's identifier is the port of both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub proto: &'static str,
    pub ends: [SocketAddr; 2],
    pub vlans: [u16; 2],
}

impl Key {
    /// And which of the ends is the sender.
    pub fn new(proto: &'static str, from: SocketAddr, to: SocketAddr) -> (Self, usize) {
        let (ends, side) = if from <= to {
            ([from, to], 0)
        } else {
            ([to, from], 1)
        };
        let vlans = [0; 2];
        (Self { proto, ends, vlans }, side)
    }

    pub fn in_vlans(self, vlans: [u16; 2]) -> Self {
        Self { vlans, ..self }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.ends;
        write!(f, "{} {a} <-> {b}", self.proto)?;
        match self.vlans {
            [0, _] => Ok(()),
            [outer, inner] => write!(f, " in VLAN {outer}.{inner}"),
        }
    }
}

/// Packets that each end has sent.
pub type Packets = BTreeMap<Key, [i64; 2]>;

pub fn add(to: &mut Packets, (key, side): (Key, usize), packets: i64) {
    to.entry(key).or_default()[side] += packets;
}

/// As tshark writes it; an IPv4-mapped address is the IPv4 address, as it is to twheel.
pub fn address(text: &str) -> Option<IpAddr> {
    Some(text.parse::<IpAddr>().ok()?.to_canonical())
}
