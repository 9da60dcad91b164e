//! Flows and the number of packets of each: what is compared.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
};

/// Protocol; both endpoints in order, so that both directions have one key; the outer and the inner
/// VLAN (0: none). For an ICMP query, both ports are its identifier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub proto: &'static str,
    pub ends: [SocketAddr; 2],
    pub vlans: [u16; 2],
}

impl Key {
    /// Returns the key, and which of the endpoints is the sender.
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

/// Packets that each endpoint has sent.
pub type Packets = BTreeMap<Key, [i64; 2]>;

pub fn add(to: &mut Packets, (key, side): (Key, usize), packets: i64) {
    to.entry(key).or_default()[side] += packets;
}

/// Parses an address as tshark writes it. An IPv4-mapped address becomes the IPv4 address, as in
/// twheel.
pub fn address(text: &str) -> Option<IpAddr> {
    Some(text.parse::<IpAddr>().ok()?.to_canonical())
}
