//! Hostile packets: what makes them, and what another library says of each.
//!
//! | question | modules |
//! |---|---|
//! | Which packets? | [`make`], [`corpus`] |
//! | What does etherparse say of one, and may twheel say something else? | [`opinion`], [`rules`], `asked` |

mod asked;
pub mod corpus;
pub mod make;
pub mod opinion;
pub mod rules;

use twheel_common::packet::{Protocols, Wanted};

/// Takes an input apart: what is asked, and of which frame.
pub fn input(bytes: &[u8]) -> Option<(Wanted, &[u8])> {
    let (&first, frame) = bytes.split_first()?;
    let wanted = Wanted {
        protocols: Protocols(u32::from(first & 7)),
        timing: first & 8 != 0,
        vlans: first & 16 != 0,
    };
    Some((wanted, frame))
}
