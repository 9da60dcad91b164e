//! Packets of many flows in one test run.

use core::{ffi::c_void, mem::MaybeUninit};

use aya_ebpf::{
    bindings::{xdp_action, xdp_md},
    helpers::{
        bpf_get_smp_processor_id,
        generated::{bpf_jiffies64, bpf_loop},
    },
    macros::map,
    maps::Array,
    programs::XdpContext,
};
use twheel_common::packet::{Protocols, Segment, Wanted, parse_plain};

use crate::frame::Frame;

/// For each CPU, the number of packets and the flows that they belong to: for each packet the
/// address of its flow's own end, in network byte order; its low half is also the port.
#[map]
pub static ORDER: Array<[u32; 1 + PACKETS]> = Array::with_max_entries(CPUS, 0);

/// CPUs on which packets can be run at once, a power of two.
const CPUS: u32 = 4;

/// Most packets in a run, a power of two. `tests/bench/src/plane.rs` has the same number.
const PACKETS: usize = 1 << 13;

/// Ethernet, IPv4 and TCP without options.
pub const SEGMENT: usize = 54;
/// The last byte of the sender's Ethernet address. It says whether the flow's own end has sent the
/// packet, or the end that all flows have in common.
const SENDER: usize = 11;
const COMMON_END: u8 = 2;
/// Where the address and port of each sender are.
const ADDRESSES: [usize; 2] = [26, 30];
const PORTS: [usize; 2] = [34, 36];

/// The order for this CPU.
#[inline(always)]
fn order() -> Option<&'static [u32; 1 + PACKETS]> {
    // SAFETY: the helper takes no argument.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    ORDER.get(cpu & (CPUS - 1))
}

/// What the loop carries from packet to packet.
#[repr(C)]
struct State<F> {
    ctx: *mut xdp_md,
    /// When the run began: read once, so that the programs to compare do not pay for reading a
    /// clock.
    now: u64,
    verdict: u32,
    packet: F,
}

/// Calls `packet` with a packet of each flow that [`ORDER`] names, until it returns `false`.
#[inline(always)]
pub fn run<F: Fn(Frame, u64) -> bool>(ctx: &XdpContext, packet: F) -> u32 {
    unsafe extern "C" fn turn<F: Fn(Frame, u64) -> bool>(number: u64, state: *mut c_void) -> i64 {
        // SAFETY: `run` passes a `State` to which there is no other reference meanwhile.
        let state = unsafe { &mut *state.cast::<State<F>>() };
        match next(state.ctx, number) {
            Some(frame) if (state.packet)(frame, state.now) => 0,
            _ => {
                state.verdict = xdp_action::XDP_ABORTED;
                1
            }
        }
    }
    let Some(order) = order() else {
        return xdp_action::XDP_ABORTED;
    };
    let mut state = State {
        ctx: ctx.ctx,
        // SAFETY: the helper takes no argument.
        now: unsafe { bpf_jiffies64() },
        verdict: xdp_action::XDP_PASS,
        packet,
    };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
        bpf_loop(
            order[0],
            turn::<F> as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
    state.verdict
}

#[inline(always)]
pub fn parsed(frame: Frame) -> Option<Segment> {
    let wanted = Wanted {
        protocols: Protocols::TCP,
        timing: false,
        vlans: true,
    };
    let mut segment = MaybeUninit::uninit();
    // SAFETY: `parse_plain` has written it if it returns `true`.
    parse_plain(&frame, wanted, &mut segment).then(|| unsafe { segment.assume_init() })
}

/// Makes the packet one of the next flow, sent from its own end or to it.
#[inline(always)]
fn next(ctx: *mut xdp_md, number: u64) -> Option<Frame> {
    let ctx = XdpContext::new(ctx);
    let (data, end) = (ctx.data(), ctx.data_end());
    if data + SEGMENT > end {
        return None;
    }
    let flow = u64::from(order()?[1 + (number as usize & (PACKETS - 1))]);
    // SAFETY: the bounds were just checked, and the packet is this test run's own.
    unsafe {
        if *((data + SENDER) as *const u8) != COMMON_END {
            store_u32(data + ADDRESSES[0], flow);
            store_u16(data + PORTS[0], flow);
        } else {
            store_u32(data + ADDRESSES[1], flow);
            store_u16(data + PORTS[1], flow);
        }
    }
    Some(Frame::new(data, end, SEGMENT))
}

/// Stores of one instruction, for the reason given at the loads in `frame.rs`.
macro_rules! store {
    ($name:ident, $type:ty, $instruction:literal) => {
        /// # Safety
        ///
        /// `at` points to as many bytes of a packet, to which there is no other reference.
        #[inline(always)]
        pub unsafe fn $name(at: usize, value: u64) {
            #[cfg(target_arch = "bpf")]
            // SAFETY: the caller's promise; the verifier checks it as well.
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
