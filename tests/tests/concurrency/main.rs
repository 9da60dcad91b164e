//! The loaded programs on two CPUs at once: packets of the same flows, steppers, deletions, and a
//! reader that never blocks them. The test advances virtual time meanwhile.
//!
//! `TWHEEL_STRESS_SECONDS` sets for how many seconds each load runs, half of it in each view: 5 by
//! default, 60 if `TWHEEL_LONG` is set.
#![allow(missing_docs)]

mod driver;
mod reset;
mod stress;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use twheel::flows::Flow;
use twheel_common::flow::{Direction, FlowKey};

/// The two CPUs that run the programs.
const CPUS: [u32; 2] = [0, 1];

/// The number of a key's client, if the key is one of a frame.
fn client(key: &FlowKey, keys: u32) -> Option<u32> {
    let ends = [Direction::FromLow, Direction::FromHigh].map(|end| key.sender(end));
    let server = SocketAddr::from(([192, 0, 2, 1], 80));
    let client = match ends {
        [client, end] | [end, client] if end == server => client,
        _ => return None,
    };
    let IpAddr::V4(address) = client.ip() else {
        return None;
    };
    let high = Ipv4Addr::to_bits(address).checked_sub(0x0a00_0000)?;
    let low = u32::from(client.port()).checked_sub(1024)?;
    let client = high.checked_mul(50_000)?.checked_add(low)?;
    (low < 50_000 && client < keys && key.proto() == 6).then_some(client)
}

/// Checks that a flow was read consistently.
fn check_flow(flow: &Flow, keys: u32) {
    assert!(client(&flow.key, keys).is_some(), "{flow:?}");
    assert!(CPUS.contains(&flow.cpu), "{flow:?}");
    assert!(!flow.word.is_dead() && !flow.word.seen().is_starting());
    // A CPU may be held up between reading the clock and storing the stamp, for example by another
    // virtual machine.
    let lived = flow.word.stamp().wrapping_sub(flow.created) as i32;
    assert!(lived >= -2, "{flow:?}");
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * u64::from(bound)) >> 32) as u32
    }
}
