//! Segments, and views of them, for the tests of states and sequence numbers.

use twheel_common::{
    flow::{Direction, FlowKey},
    packet::{
        Segment,
        tcp::{FIN, SYN},
    },
    state::View,
};

/// Both directions are seen.
pub const BOTH: View = View {
    one_way: false,
    strict: false,
};
/// One direction is seen.
pub const ONE_WAY: View = View {
    one_way: true,
    strict: false,
};

/// A segment with `length` bytes of data.
pub fn segment(direction: Direction, flags: u8, seq: u32, ack: u32, length: u32) -> Segment {
    let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment {
        key: FlowKey::default(),
        direction,
        flags,
        seq,
        ack,
        end: seq.wrapping_add(length).wrapping_add(counted),
        bytes: 40 + length,
        stamp: [0; 2],
        window: 1,
        packets: 1,
    }
}
