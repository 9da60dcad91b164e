//! Hostile flows: packets of others change nothing in live flows, and no source keeps all of a full
//! table.
//!
//! Under virtual time, except for the last test, whose hosts and connections are real.
#![allow(missing_docs)]

mod full;
mod guesses;
mod packets;
mod shares;

use std::net::{IpAddr, Ipv4Addr};

use twheel_common::flow::{FlowKey, Word};
use twheel_tests::plane::Plane;

/// xorshift64*
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn word(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(bound)) >> 32) as u32
    }

    /// A number between `from` and `to`, both inclusive.
    fn range(&mut self, from: u32, to: u32) -> u32 {
        from + self.below(to - from + 1)
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }
}

fn put(plane: &mut Plane, frame: &[u8], out: bool) {
    if out {
        plane.send(frame);
    } else {
        plane.receive(frame);
    }
}

fn word(plane: &mut Plane, key: FlowKey) -> Option<Word> {
    let flows = plane.plane().flows().unwrap();
    flows.iter().find(|flow| flow.key == key).map(|it| it.word)
}

/// Four further addresses of the client, from which others than its first address connect.
fn source(number: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, 100 + (number % 4) as u8).into()
}
