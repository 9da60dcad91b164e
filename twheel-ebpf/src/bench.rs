//! Entry points of the benches: one test run is a loop over packets of many flows, around the very
//! same inlined parser and touch as production has.
//!
//! The "packet" is a TCP segment and behind it, at [`ORDER`], the [`Order`] that says how many
//! packets to see and of which flows. Each turn writes the next source address and port into the
//! segment and then does what the program is named for. What the programs share (the loop and the
//! generator) is all that `bench_empty` does.
//!
//! They return `XDP_PASS`, or `XDP_ABORTED` where a packet was not what the bench says it is: a
//! figure of a program that found no flow would be worth nothing.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

use core::{ffi::c_void, hint::black_box};

use aya_ebpf::{
    bindings::{xdp_action, xdp_md},
    helpers::generated::bpf_loop,
    macros::{map, xdp},
    maps::HashMap,
    programs::XdpContext,
};
use twheel_common::{
    flow::FlowKey,
    packet::{Segment, parse},
};
use twheel_ebpf::{
    clock,
    count::count_skip,
    frame::Frame,
    touch::{Touched, touch},
};

/// What every tracker in eBPF keeps its flows in: the kernel's hash, preallocated. The value is as
/// large as a tracker's is, and makes an element two cache lines, the least that holds it: stamp,
/// state, and what else there is.
#[map]
pub static FLOOR: HashMap<FlowKey, [u64; 5]> = HashMap::with_max_entries(1, 0);

/// Ethernet, IPv4 and TCP without options.
const SEGMENT: usize = 54;
/// Where the order stands: behind the segment, aligned.
const ORDER: usize = 56;
const SOURCE_ADDRESS: usize = 26;
const SOURCE_PORT: usize = 34;

/// What userspace asks of a run, in machine byte order. `tests/src/bench/touch.rs` has the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct Order {
    /// Packets of the run, at most 2^23 (what `bpf_loop` takes).
    packets: u64,
    /// Flows, a power of two, minus 1.
    mask: u64,
    /// Where the generator begins.
    seed: u64,
    /// The generator: `x * multiplier + increment`, of which bits 32 and up number the flow.
    multiplier: u64,
    increment: u64,
}

/// What the loop carries from packet to packet.
#[repr(C)]
struct State {
    ctx: *mut xdp_md,
    random: u64,
    multiplier: u64,
    increment: u64,
    mask: u64,
    /// Clock at the beginning of the run, for the floor alone, which is not to pay for a clock.
    now: u64,
    verdict: u32,
}

type Callback = unsafe extern "C" fn(u64, *mut c_void) -> i64;

/// The generator alone.
#[xdp]
pub fn bench_empty(ctx: XdpContext) -> u32 {
    run(&ctx, empty)
}

/// And the parser.
#[xdp]
pub fn bench_parse(ctx: XdpContext) -> u32 {
    run(&ctx, parse_alone)
}

/// And what no table of flows can do without: one lookup, one store.
#[xdp]
pub fn bench_floor(ctx: XdpContext) -> u32 {
    run(&ctx, floor)
}

/// What production does with a packet.
#[xdp]
pub fn bench_touch(ctx: XdpContext) -> u32 {
    run(&ctx, touched)
}

/// What no table can do without for a packet of no flow that begins none: one lookup.
#[xdp]
pub fn bench_absent_floor(ctx: XdpContext) -> u32 {
    run(&ctx, absent_floor)
}

/// What production does with it.
#[xdp]
pub fn bench_absent_touch(ctx: XdpContext) -> u32 {
    run(&ctx, absent_touched)
}

/// One insertion, for one packet.
#[xdp]
pub fn bench_fill_floor(ctx: XdpContext) -> u32 {
    match parsed(Frame::new(ctx.data(), ctx.data_end())) {
        Some(segment) if FLOOR.insert(&segment.key, &[0; 5], BPF_NOEXIST).is_ok() => {
            xdp_action::XDP_PASS
        }
        _ => xdp_action::XDP_ABORTED,
    }
}

/// What production does with the first packet of a flow. No loop: the verifier would look at how a flow
/// begins once more for every state that the turn before may have left.
#[xdp]
pub fn bench_fill_touch(ctx: XdpContext) -> u32 {
    match see(Frame::new(ctx.data(), ctx.data_end())) {
        Some(Touched::Created) => xdp_action::XDP_PASS,
        _ => xdp_action::XDP_ABORTED,
    }
}

const BPF_NOEXIST: u64 = 1;

#[inline(always)]
fn run(ctx: &XdpContext, callback: Callback) -> u32 {
    let order = ctx.data() + ORDER;
    if order + size_of::<Order>() > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    // SAFETY: the bounds were just checked, the kernel aligns the buffer of a test run, and nobody
    // else has it.
    let order = unsafe { *(order as *const Order) };
    let mut state = State {
        ctx: ctx.ctx,
        random: order.seed,
        multiplier: order.multiplier,
        increment: order.increment,
        mask: order.mask,
        now: clock::now(),
        verdict: xdp_action::XDP_PASS,
    };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
        bpf_loop(
            order.packets as u32,
            callback as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
    state.verdict
}

unsafe extern "C" fn empty(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `run` passes a `State` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<State>() };
    match next(state) {
        Some(_) => 0,
        None => abort(state),
    }
}

unsafe extern "C" fn parse_alone(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: as in `empty`.
    let state = unsafe { &mut *state.cast::<State>() };
    match next(state).and_then(parsed) {
        Some(segment) => {
            // In memory, as a lookup needs it; else the compiler drops the parser.
            black_box(&segment.key);
            0
        }
        None => abort(state),
    }
}

unsafe extern "C" fn floor(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: as in `empty`.
    let state = unsafe { &mut *state.cast::<State>() };
    let Some(segment) = next(state).and_then(parsed) else {
        return abort(state);
    };
    let Some(flow) = FLOOR.get_ptr_mut(&segment.key) else {
        return abort(state);
    };
    // SAFETY: a pointer that the table gave is valid memory while the program runs.
    unsafe { flow.cast::<u64>().write_volatile(state.now) };
    0
}

unsafe extern "C" fn touched(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: as in `empty`.
    let state = unsafe { &mut *state.cast::<State>() };
    match next(state).and_then(see) {
        Some(Touched::Known) => 0,
        _ => abort(state),
    }
}

unsafe extern "C" fn absent_floor(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: as in `empty`.
    let state = unsafe { &mut *state.cast::<State>() };
    match next(state).and_then(parsed) {
        Some(segment) if FLOOR.get_ptr_mut(&segment.key).is_none() => 0,
        _ => abort(state),
    }
}

unsafe extern "C" fn absent_touched(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: as in `empty`.
    let state = unsafe { &mut *state.cast::<State>() };
    match next(state).and_then(see) {
        Some(Touched::NoFlow) => 0,
        _ => abort(state),
    }
}

#[inline(always)]
fn parsed(frame: Frame) -> Option<Segment> {
    match parse(&frame) {
        Ok(segment) => Some(segment),
        Err(skip) => {
            count_skip(skip);
            None
        }
    }
}

/// What `see` of `main.rs` does, without its diagnostics, which the verifier drops when they are off.
#[inline(always)]
fn see(frame: Frame) -> Option<Touched> {
    parsed(frame).map(|segment| touch(&segment, clock::now()))
}

/// Ends the loop.
#[inline(always)]
fn abort(state: &mut State) -> i64 {
    state.verdict = xdp_action::XDP_ABORTED;
    1
}

/// Makes the packet one of the next flow.
#[inline(always)]
fn next(state: &mut State) -> Option<Frame> {
    let ctx = XdpContext::new(state.ctx);
    let (data, end) = (ctx.data(), ctx.data_end());
    if data + SEGMENT > end {
        return None;
    }
    state.random = state
        .random
        .wrapping_mul(state.multiplier)
        .wrapping_add(state.increment);
    let flow = state.random >> 32 & state.mask;
    // SAFETY: the bounds were just checked, and the packet is this test run's own.
    unsafe {
        // 10.0.0.0/8 on a little-endian machine; userspace does the same.
        store_u32(data + SOURCE_ADDRESS, flow << 8 | 10);
        store_u16(data + SOURCE_PORT, flow);
    }
    Some(Frame::new(data, end))
}

/// Stores of one instruction, for the reason that the loads of `frame.rs` have.
macro_rules! store {
    ($name:ident, $type:ty, $instruction:literal) => {
        /// # Safety
        ///
        /// `at` points to as many bytes of a packet that nobody else refers to.
        #[inline(always)]
        unsafe fn $name(at: usize, value: u64) {
            #[cfg(target_arch = "bpf")]
            // SAFETY: the caller's promise; the verifier checks as much.
            unsafe {
                core::arch::asm!(
                    concat!("*(", $instruction, " *)({at} + 0) = {value}"),
                    at = in(reg) at,
                    value = in(reg) value,
                    options(nostack, preserves_flags),
                );
            }
            #[cfg(not(target_arch = "bpf"))]
            // SAFETY: the caller's promise.
            unsafe {
                (at as *mut $type).write_unaligned(value as $type);
            }
        }
    };
}

store!(store_u32, u32, "u32");
store!(store_u16, u16, "u16");

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// As in `main.rs`.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
