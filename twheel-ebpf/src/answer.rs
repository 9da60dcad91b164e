//! Turns a packet of an expired flow into its answer.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{xdp_action, xdp_md},
    helpers::generated::{
        bpf_xdp_adjust_tail, bpf_xdp_get_buff_len, bpf_xdp_load_bytes, bpf_xdp_store_bytes,
    },
};
use twheel_common::{
    counter::Counter,
    enforce::{self, Headers, V4, V6},
    segment::Segment,
};

use crate::count::count;
use crate::verifier::given;

/// Answers a segment with a RST, in the segment's own packet; drops the packet if that fails.
/// Returns the program's verdict.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn answer_reset(ctx: *mut xdp_md, segment: *const Segment) -> u64 {
    let answered = match given(segment) {
        Some(segment) => rewrite(ctx, segment),
        None => false,
    };
    if !answered {
        count(Counter::EnforcedDropped);
        return xdp_action::XDP_DROP.into();
    }
    count(Counter::EnforcedReset);
    xdp_action::XDP_TX.into()
}

/// Returns whether the packet is now the answer. The caller drops a packet that was only partly
/// rewritten.
#[inline(always)]
fn rewrite(ctx: *mut xdp_md, segment: &Segment) -> bool {
    let mut headers: Headers = [0; V6 / 2];
    let place = (&raw mut headers).cast::<c_void>();
    // Through helpers, so that this code need not know how the packet lies in memory, in which
    // fragments and how aligned. Answers are few.
    // SAFETY: the context of the program, and `headers` is longer than what is read.
    if unsafe { bpf_xdp_load_bytes(ctx, 0, place, V4 as u32) } != 0 {
        return false;
    }
    let length = enforce::answer(&mut headers, segment);
    if length == 0 {
        return false;
    }
    // SAFETY: the context of the program.
    let whole = unsafe { bpf_xdp_get_buff_len(ctx) };
    // SAFETY: as above; an answer is no longer than `headers`.
    let stored = unsafe { bpf_xdp_store_bytes(ctx, 0, place, length as u32) };
    // SAFETY: as above.
    stored == 0 && unsafe { bpf_xdp_adjust_tail(ctx, length as i32 - whole as i32) } == 0
}
