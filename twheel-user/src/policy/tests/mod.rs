//! Policies: read, checked, compiled.

mod check;
mod compile;
mod parse;

use std::net::Ipv6Addr;

use twheel_common::policy::{
    Dimensions, Hook, MAX_RULES, Protocol, Rules, TIMEOUTS, Tables, TimeoutName, Tuple, first_match,
};

use super::*;
use crate::{
    failure::{Kind, exit_code},
    toml_file::Location,
};

const ALLOWED: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(1_000_000);

fn parse(text: &str) -> Result<Policy> {
    Policy::parse("p", text.as_bytes(), ALLOWED)
}

/// Rules `r1`, `r2`, … with these conditions, one per line.
fn rules(conditions: &[impl AsRef<str>]) -> String {
    let mut text = String::new();
    for (number, conditions) in (1..).zip(conditions) {
        let conditions = conditions.as_ref();
        let comma = if conditions.is_empty() { "" } else { ", " };
        let number: usize = number;
        text += &format!("  {{ name = \"r{number}\"{comma}{conditions} }},\n");
    }
    format!("rule = [\n{text}]\n")
}

fn refused(text: &[u8], error: &str) {
    let found = Policy::parse("p", text, ALLOWED).unwrap_err();
    let text = String::from_utf8_lossy(text);
    assert_eq!(exit_code(&found), Kind::Usage as u8, "{text}");
    let found = found.to_string();
    assert!(
        found.starts_with(error),
        "of:\n{text}\nfound:  {found}\nwanted: {error}"
    );
}

/// The names and numbers that random rules use.
const INTERFACES: [&str; 3] = ["a", "b", "c"];
const VLANS: [u16; 4] = [0, 10, 20, 30];
const ZONES: [u16; 3] = [0, 7, 8];

/// xorshift64*: the same policies each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn some<T>(&mut self, one: impl Fn(&mut Self) -> T) -> Vec<T> {
        (0..1 + self.below(3)).map(|_| one(self)).collect()
    }

    /// Addresses close to each other, so that prefixes nest and tuples fall into them.
    fn address(&mut self) -> Ipv6Addr {
        let close = |random: &mut Self| random.pick(&[0u8, 1, 2, 127, 128, 255]);
        if self.one_in(2) {
            let [a, b, c, d] = [
                10 + self.below(2) as u8,
                close(self),
                close(self),
                close(self),
            ];
            return mapped(std::net::Ipv4Addr::new(a, b, c, d).into());
        }
        let mut bytes = [0; 16];
        match self.below(4) {
            // Addresses close to where IPv4 is mapped.
            0 => bytes[10] = 0xfe,
            1 => bytes[0] = 0x80,
            _ => bytes[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]),
        }
        bytes[7] = close(self);
        bytes[15] = close(self);
        bytes.into()
    }

    fn network(&mut self) -> String {
        let address = self.address();
        let (shown, bits) = match address.to_ipv4_mapped() {
            Some(v4) => {
                let bits = self.pick(&[0, 7, 8, 9, 16, 17, 24, 31, 32]);
                let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                (
                    std::net::Ipv4Addr::from_bits(v4.to_bits() & mask).to_string(),
                    bits,
                )
            }
            None => {
                let bits = self.pick(&[0, 1, 16, 32, 64, 80, 88, 95, 96, 120, 127, 128]);
                let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                (
                    Ipv6Addr::from_bits(address.to_bits() & mask).to_string(),
                    bits,
                )
            }
        };
        format!("{shown}/{bits}")
    }

    fn rule(&mut self) -> String {
        let mut parts = Vec::new();
        for key in ["src", "dst", "any"] {
            if self.one_in(3) {
                parts.push(format!("{key} = {:?}", self.some(Self::network)));
            }
        }
        if self.one_in(3) {
            let low = 1 + self.below(40);
            let high = low + self.below(20);
            parts.push(format!(
                "dport = ['{low}-{high}', {}]",
                high + 1 + self.below(3)
            ));
        }
        if self.one_in(4) {
            parts.push(format!(
                "iface = {:?}",
                self.some(|random| random.pick(&INTERFACES))
            ));
        }
        if self.one_in(4) {
            let vlans = self.some(|random| random.pick(&VLANS));
            parts.push(format!("vlan = {vlans:?}"));
        }
        if self.one_in(4) {
            let zones = self.some(|random| random.pick(&ZONES));
            parts.push(format!("zone = {zones:?}"));
        }
        if self.one_in(4) {
            parts.push(format!("direction = '{}'", self.pick(&["in", "out"])));
        }
        if self.one_in(3) {
            parts.push(format!(
                "proto = {:?}",
                self.some(|random| random.pick(&["tcp", "udp"]))
            ));
        }
        parts.join(", ")
    }

    fn query(&mut self) -> Query {
        let source = self.address();
        let destination = loop {
            let address = self.address();
            if address.to_ipv4_mapped().is_some() == source.to_ipv4_mapped().is_some() {
                break address;
            }
        };
        Query {
            protocol: Some(self.pick(&Protocol::ALL)),
            source: Some(source),
            destination: Some(destination),
            port: Some(self.below(64) as u16),
            interface: Some(self.pick(&["a", "b", "c", "d"]).to_owned()),
            hook: Some(self.pick(&[Hook::Ingress, Hook::Egress])),
            // One VLAN and one zone are in no rule.
            vlans: Some([0; 2].map(|_| self.pick(&[0, 0, 10, 20, 30, 40]))),
            zone: Some(self.pick(&[0, 0, 7, 8, 9])),
        }
    }
}
