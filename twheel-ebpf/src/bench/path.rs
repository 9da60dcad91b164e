//! Ends of a forwarding path: a source of frames of many flows, whose program makes live frames of test runs, and a sink.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, xdp_action},
    helpers::generated::bpf_redirect,
    macros::{map, xdp},
    maps::{Array, PerCpuArray},
    programs::XdpContext,
};

use crate::packets::{SEGMENT, store_u16, store_u32};

/// What the frames of a run are. `tests/src/bench/path.rs` has the same.
#[repr(C)]
pub struct Frames {
    /// The interface by which they leave.
    interface: u32,
    /// How many have been made.
    made: u32,
    /// Number of the first flow.
    first: u32,
    /// There are two to the power of so many flows, and all of them come by in some order; 0: one after the other, all new.
    bits: u32,
    /// Whether they go back to the flow's source.
    back: u32,
    /// Sum of the IPv4 header's words as they stand in memory, without what differs between flows.
    ip_sum: u32,
    /// And of the TCP header's and the pseudo header's.
    tcp_sum: u32,
    /// The rest of a cache line.
    reserved: [u32; 9],
}

/// One run at a time.
#[map]
pub static FRAMES: Array<Frames> = Array::with_max_entries(1, 0);

/// Frames that have come to their end.
#[map]
pub static SUNK: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// To 02:00:00:00:00:02; pages are used again, and forwarding has written its own.
const DESTINATION: usize = 0;
/// TTL, protocol and checksum.
const TTL: usize = 22;
const IP_ADDRESSES: [usize; 2] = [26, 30];
const PORTS: [usize; 2] = [34, 36];
const TCP_CHECKSUM: usize = 50;

/// A bijection of the numbers of so many bits, two at least: as good as random.
#[inline(always)]
fn scatter(number: u32, bits: u32) -> u32 {
    let mask = u32::MAX >> ((32 - bits) & 31);
    let shift = (bits / 2 + 1) & 31;
    let mut it = number & mask;
    it = it.wrapping_mul(0x9e37_79b1) & mask;
    it ^= it >> shift;
    it = it.wrapping_mul(0x85eb_ca6b) & mask;
    it ^= it >> shift;
    it = it.wrapping_mul(0xc2b2_ae35) & mask;
    it ^ it >> shift
}

/// A sum of words, folded and inverted.
#[inline(always)]
fn checksum(sum: u32) -> u64 {
    let sum = (sum & 0xffff) + (sum >> 16);
    u64::from(!(sum + (sum >> 16)) & 0xffff)
}

/// Makes a frame one of the next flow, and sends it off.
#[xdp]
pub fn peer_source(ctx: XdpContext) -> u32 {
    let (data, end) = (ctx.data(), ctx.data_end());
    let Some(frames) = FRAMES.get_ptr_mut(0) else {
        return xdp_action::XDP_ABORTED;
    };
    if data + SEGMENT > end {
        return xdp_action::XDP_ABORTED;
    }
    // SAFETY: there is one run at a time, on one CPU.
    let frames = unsafe { &mut *frames };
    let made = frames.made;
    frames.made = made.wrapping_add(1);
    let number = match frames.bits {
        0 => made,
        bits => scatter(made, bits),
    };
    // 10.0.0.0/8, as it stands in a packet, and a port from 1024 up.
    let flow = scatter(frames.first.wrapping_add(number), 24);
    let address = flow << 8 | 10;
    let port = flow & 0xffff | 0x04;
    let words = (address & 0xffff) + (address >> 16);
    let side = usize::from(frames.back != 0);
    // SAFETY: the bounds were just checked, and the frame is this run's own.
    unsafe {
        store_u32(data + DESTINATION, 0x0000_0002);
        store_u16(data + DESTINATION + 4, 0x0200);
        store_u32(data + TTL, 0x0640 | checksum(frames.ip_sum + words) << 16);
        if side == 0 {
            store_u32(data + IP_ADDRESSES[0], address.into());
            store_u16(data + PORTS[0], port.into());
        } else {
            store_u32(data + IP_ADDRESSES[1], address.into());
            store_u16(data + PORTS[1], port.into());
        }
        store_u16(data + TCP_CHECKSUM, checksum(frames.tcp_sum + words + port));
        bpf_redirect(frames.interface, 0) as u32
    }
}

/// Passes, as the least program does.
#[xdp]
pub fn peer_pass(_: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// The end of the path. (Not by aya's macro: its argument's type refers to two of the kernel's that are not described, and
/// LLVM writes such in one order or the other, so the same sources would not give the same object.)
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier")]
pub extern "C" fn peer_sink(_packet: *mut c_void) -> i32 {
    if let Some(sunk) = SUNK.get_ptr_mut(0) {
        // SAFETY: this CPU's.
        unsafe { *sunk += 1 };
    }
    TC_ACT_SHOT
}
