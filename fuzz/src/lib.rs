//! Hostile packets: a generator for them, and the answer of another library about each.
//!
//! | question | modules |
//! |---|---|
//! | Which packets are tried? | [`make`], [`corpus`] |
//! | How does etherparse answer, and where may twheel answer differently? | [`opinion`], [`rules`], `asked` |

mod asked;
pub mod corpus;
pub mod make;
pub mod opinion;
pub mod rules;

use twheel_common::packet::{Protocols, Wanted};

/// Splits an input into what is wanted of the parser, and the frame to parse.
pub fn input(bytes: &[u8]) -> Option<(Wanted, &[u8])> {
    let (&first, frame) = bytes.split_first()?;
    let wanted = Wanted {
        protocols: Protocols(u32::from(first & 7)),
        timing: first & 8 != 0,
        vlans: first & 16 != 0,
    };
    Some((wanted, frame))
}
