//! The ends of a forwarding path: a source, whose program turns live frames of test runs into
//! frames of many flows, and a sink.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, xdp_action},
    helpers::generated::bpf_redirect,
    macros::{map, xdp},
    maps::{Array, PerCpuArray},
    programs::XdpContext,
};

use crate::packets::{SEGMENT, store_u16, store_u32};

/// Describes the frames of a run. `tests/bench/src/path.rs` has the same struct.
#[repr(C)]
pub struct Frames {
    /// The interface through which they are sent.
    interface: u32,
    /// How many frames were made.
    made: u32,
    /// Number of the first flow.
    first: u32,
    /// 2 to the power of this is the number of flows, which appear in a fixed scattered order; 0:
    /// each frame begins a new flow.
    bits: u32,
    /// Whether the frames go back to the flow's source.
    back: u32,
    /// Sum of the IPv4 header's words as they lie in memory, without those that differ between
    /// flows.
    ip_sum: u32,
    /// Sum of the words of the TCP header and the pseudo header.
    tcp_sum: u32,
    /// Fills the cache line.
    reserved: [u32; 9],
}

/// The frames of the present run; there is one run at a time.
#[map]
pub static FRAMES: Array<Frames> = Array::with_max_entries(1, 0);

/// Frames that reached the end of the path.
#[map]
pub static SUNK: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// To 02:00:00:00:00:02. The pages of frames are reused, and forwarding has overwritten the
/// address.
const DESTINATION: usize = 0;
/// TTL, protocol and checksum.
const TTL: usize = 22;
const IP_ADDRESSES: [usize; 2] = [26, 30];
const PORTS: [usize; 2] = [34, 36];
const TCP_CHECKSUM: usize = 50;

/// A bijection of the numbers of this many bits (two at least) that looks random.
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

/// Turns a frame into one of the next flow, and sends it.
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
    // 10.0.0.0/8, in network byte order, and a port from 1024 up.
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

/// Passes each frame: the least that a program can do.
#[xdp]
pub fn peer_pass(_: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// The end of the path. (Not declared by aya's macro: its argument's type refers to two kernel
/// types that are not described, which LLVM writes in varying order, so the same sources would not
/// give the same object.)
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier")]
pub extern "C" fn peer_sink(_packet: *mut c_void) -> i32 {
    if let Some(sunk) = SUNK.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own.
        unsafe { *sunk += 1 };
    }
    TC_ACT_SHOT
}
