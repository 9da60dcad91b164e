//! The flow table. Everything else reaches flows through this module alone, so that another table
//! can take its place.
//!
//! This one is the kernel's preallocated `BPF_MAP_TYPE_HASH`, the state in the value: what touch
//! costs is one lookup. A pointer into it stays valid memory for as long as the program runs, but
//! once the flow is removed the place may be given to another flow at once. Hence the rules of
//! [`Flow`]: a late stamp makes a stranger at most younger, and `word` changes by compare-and-swap
//! against a generation that no stranger has.

use twheel_common::flow::{Flow, FlowKey};

use crate::maps::FLOWS;

const BPF_NOEXIST: u64 = 1;
const EEXIST: i32 = -17;
const ENOENT: i32 = -2;

/// Why a flow could not enter.
pub enum Refused {
    /// Another CPU was faster.
    Exists,
    /// No room.
    Full,
}

/// The flow of a key.
#[inline(always)]
pub fn lookup(key: &FlowKey) -> Option<*mut Flow> {
    FLOWS.get_ptr_mut(key)
}

/// Enters a flow.
#[inline(always)]
pub fn insert(key: &FlowKey, flow: &Flow) -> Result<(), Refused> {
    match FLOWS.insert(key, flow, BPF_NOEXIST) {
        Ok(()) => Ok(()),
        Err(EEXIST) => Err(Refused::Exists),
        Err(_) => Err(Refused::Full),
    }
}

/// Removes a flow; `false` if it is still there, which the kernel's guard against deadlocks of the
/// bucket's lock can cause. Only the wheel on which it stands may ask for this: the lists of its
/// slots run through the flows.
#[inline(always)]
pub fn remove(key: &FlowKey) -> bool {
    matches!(FLOWS.remove(key), Ok(()) | Err(ENOENT))
}
