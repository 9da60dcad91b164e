//! Turns a packet of a flow that has expired into its answer.

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

/// Answers a segment with a RST, in its own packet, or drops it where that cannot be: the program's verdict.
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

/// Says whether the packet is the answer by now. One of which only a part could be written is dropped.
#[inline(always)]
fn rewrite(ctx: *mut xdp_md, segment: &Segment) -> bool {
    let mut headers: Headers = [0; V6 / 2];
    let place = (&raw mut headers).cast::<c_void>();
    // By the helpers, so that nothing here is said of where the packet lies: its parts and its alignment are the
    // kernel's affair. Answers are few.
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
