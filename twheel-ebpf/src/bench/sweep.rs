//! A tracker that looks at every flow to find the idle ones: one pass over the LRU hash map, in the
//! kernel.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::xdp_action,
    helpers::generated::{bpf_for_each_map_elem, bpf_jiffies64},
    macros::{map, xdp},
    maps::Array,
    programs::XdpContext,
};
use twheel_common::flow::FlowKey;

use crate::trackers::LRU;

/// A pass.
#[repr(C)]
pub struct Pass {
    /// Idle flows are deleted after so many jiffies without a packet; set by userspace.
    timeout: u64,
    /// When the pass began. The program writes this field and those below.
    now: u64,
    /// Flows inspected.
    met: u64,
    /// Flows deleted.
    deleted: u64,
}

/// The parameters of the next pass, and the results of the last one.
#[map]
static PASS: Array<Pass> = Array::with_max_entries(1, 0);

/// One pass.
#[xdp]
pub fn peer_sweep(_ctx: XdpContext) -> u32 {
    let Some(place) = PASS.get_ptr_mut(0) else {
        return xdp_action::XDP_ABORTED;
    };
    // SAFETY: the helper takes no argument; a place in a map, and one such program runs at a time.
    let mut pass = unsafe {
        Pass {
            timeout: (*place).timeout,
            now: bpf_jiffies64(),
            met: 0,
            deleted: 0,
        }
    };
    // SAFETY: the callback has the signature that the helper calls, and `pass` outlives the walk.
    unsafe {
        bpf_for_each_map_elem(
            (&raw const LRU).cast_mut().cast(),
            look as *mut c_void,
            (&raw mut pass).cast(),
            0,
        );
        *place = pass;
    }
    xdp_action::XDP_PASS
}

/// Returns 0 to be called again.
unsafe extern "C" fn look(
    _map: *mut c_void,
    key: *const FlowKey,
    flow: *mut u64,
    pass: *mut c_void,
) -> i64 {
    // SAFETY: `peer_sweep` passes a `Pass` to which there is no other reference meanwhile; key and
    // flow are valid memory while the program runs.
    unsafe {
        let pass = &mut *pass.cast::<Pass>();
        pass.met += 1;
        let idle = pass.now.wrapping_sub(flow.read_volatile()) as i64;
        if idle > pass.timeout as i64 && LRU.remove(*key).is_ok() {
            pass.deleted += 1;
        }
    }
    0
}
