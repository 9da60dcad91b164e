//! Entry points of the data plane.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

use aya_ebpf::{
    EbpfContext,
    bindings::{TC_ACT_UNSPEC, xdp_action},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use aya_log_ebpf::{debug, trace};
use twheel_common::{
    packet::{Segment, Skip, parse},
    policy::Hook,
    step::{Step, Sweep},
};
use twheel_ebpf::{
    clock,
    count::count_skip,
    frame::Frame,
    policy::Place,
    step,
    touch::{Touched, touch},
};

/// Ingress: touches the flow of every packet. Whatever it finds, the packet passes.
#[xdp(frags)]
pub fn twheel_xdp(ctx: XdpContext) -> u32 {
    let place = Place {
        interface: ctx.ingress_ifindex() as u32,
        hook: Hook::Ingress,
    };
    see(&ctx, parse(&Frame::new(ctx.data(), ctx.data_end())), place);
    xdp_action::XDP_PASS
}

/// Egress: the same for what this host sends or forwards. Leaves the verdict to whoever comes next
/// (`TCX_NEXT` has the same value).
#[classifier]
pub fn twheel_egress(ctx: TcContext) -> i32 {
    // Only the linear part of a socket buffer can be read in place. Senders keep headers there; where
    // they do not, they are brought there. That costs a copy, so only if it is needed.
    let linear = ctx.data_end() - ctx.data();
    let mut segment = parse(&Frame::new(ctx.data(), ctx.data_end()));
    if segment == Err(Skip::Truncated) && (ctx.len() as usize) > linear {
        // A failure leaves the packet as it was, and truncated.
        let _ = ctx.pull_data(ctx.len().min(HEADERS));
        segment = parse(&Frame::new(ctx.data(), ctx.data_end()));
    }
    let place = Place {
        // SAFETY: the context of this program, which the kernel fills in.
        interface: unsafe { (*ctx.skb.skb).ifindex },
        hook: Hook::Egress,
    };
    see(&ctx, segment, place);
    TC_ACT_UNSPEC
}

/// Ethernet with two tags, IPv6 and TCP, and room for some options.
const HEADERS: u32 = 128;

/// Unattached: one call of the stepper, through `BPF_PROG_TEST_RUN` on the wheel's CPU.
#[xdp]
pub fn twheel_step(ctx: XdpContext) -> u32 {
    let call = ctx.data();
    if call + size_of::<Step>() > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    // SAFETY: the bounds were just checked, nobody else has the test run's buffer, and the kernel
    // aligns it (a page plus XDP_PACKET_HEADROOM of 256).
    let call = unsafe { &mut *(call as *mut Step) };
    step::step(call);
    debug!(
        &ctx,
        "step: {} visits, {} expired", call.visits, call.expired
    );
    xdp_action::XDP_PASS
}

/// Unattached, like the stepper and run where it is: deletes flows.
#[xdp]
pub fn twheel_delete(ctx: XdpContext) -> u32 {
    step::delete(&ctx);
    xdp_action::XDP_PASS
}

/// Unattached, likewise: arms flows as timeouts and rules are now.
#[xdp]
pub fn twheel_sweep(ctx: XdpContext) -> u32 {
    let call = ctx.data();
    if call + size_of::<Sweep>() > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    // SAFETY: as in `twheel_step`.
    step::sweep(unsafe { &mut *(call as *mut Sweep) });
    xdp_action::XDP_PASS
}

#[inline(always)]
fn see<C: EbpfContext>(ctx: &C, segment: Result<Segment, Skip>, place: Place) {
    match segment {
        Ok(mut segment) => match touch(&mut segment, clock::now(), place) {
            Touched::Known => trace!(ctx, "touched"),
            Touched::Created => debug!(ctx, "new flow"),
            Touched::NoFlow => trace!(ctx, "no flow"),
            Touched::TableFull => debug!(ctx, "table full"),
        },
        Err(skip) => {
            count_skip(skip);
            trace!(ctx, "not a TCP segment");
        }
    }
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// The kernel's helpers of the packet path are for programs under the GPL or compatible with it.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
