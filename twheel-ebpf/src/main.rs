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
    packet::{Protocols, Segment, Skip, Wanted, parse_any},
    policy::Hook,
    step::{Step, Sweep},
};
use twheel_ebpf::{
    answer, clock, config,
    count::{count_for, count_skip},
    frame::Frame,
    policy::Place,
    rto, step,
    touch::{Touched, touch},
};

/// Ingress: touches the flow of every packet. Whatever it finds, the packet passes; unless it is of a flow that has
/// expired, and somebody has asked for such to be refused.
#[xdp(frags)]
pub fn twheel_xdp(ctx: XdpContext) -> u32 {
    let place = Place {
        interface: ctx.ingress_ifindex() as u32,
        hook: Hook::Ingress,
    };
    count_for(place.interface);
    // By reference: a copy would load words that were just stored in parts, and wait for those.
    let linear = ctx.data_end() - ctx.data();
    match &mut parse(ctx.data(), ctx.data_end(), linear) {
        // Those first that have another verdict: what passes is told apart no further.
        Ok(segment) => match touch(segment, clock::now(), place) {
            Touched::Refused => return xdp_action::XDP_DROP,
            Touched::Answered => return answer::answer(ctx.ctx, segment) as u32,
            touched => tell(&ctx, touched),
        },
        Err(reason) => skip(&ctx, *reason),
    }
    xdp_action::XDP_PASS
}

/// Egress: the same for what this host sends or forwards. Leaves the verdict to whoever comes next
/// (`TCX_NEXT` has the same value).
#[classifier]
pub fn twheel_egress(ctx: TcContext) -> i32 {
    // SAFETY: the context of this program, which the kernel fills in.
    count_for(unsafe { (*ctx.skb.skb).ifindex });
    // Only the linear part of a socket buffer can be read in place. Senders keep headers there; where
    // they do not, they are brought there. That costs a copy, so only if it is needed.
    let linear = ctx.data_end() - ctx.data();
    let whole = ctx.len() as usize;
    let mut segment = parse(ctx.data(), ctx.data_end(), whole);
    if segment == Err(Skip::Truncated) && whole > linear {
        // A failure leaves the packet as it was, and truncated.
        let _ = ctx.pull_data(ctx.len().min(HEADERS));
        segment = parse(ctx.data(), ctx.data_end(), whole);
    }
    let place = Place {
        // SAFETY: the context of this program, which the kernel fills in.
        interface: unsafe { (*ctx.skb.skb).ifindex },
        hook: Hook::Egress,
    };
    // A copy all the same: of two results made one, the compiler would store what is not there.
    match segment {
        Ok(mut segment) => tell(&ctx, touch(&mut segment, clock::now(), place)),
        Err(reason) => skip(&ctx, reason),
    }
    TC_ACT_UNSPEC
}

/// Ethernet with two tags, IPv6 and TCP, and room for some options.
const HEADERS: u32 = 128;

/// Unattached: one call of the stepper, through `BPF_PROG_TEST_RUN` on the wheel's CPU.
#[xdp]
pub fn twheel_step(ctx: XdpContext) -> u32 {
    let Some(call) = step::argument::<Step>(&ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    count_for(0);
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
    count_for(0);
    step::delete(&ctx);
    xdp_action::XDP_PASS
}

/// Unattached, likewise: arms flows as timeouts and rules are now.
#[xdp]
pub fn twheel_sweep(ctx: XdpContext) -> u32 {
    let Some(call) = step::argument::<Sweep>(&ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    count_for(0);
    step::sweep(call);
    xdp_action::XDP_PASS
}

/// What is wanted is the configuration's; the verifier drops the parsers of the rest.
#[inline(always)]
fn parse(data: usize, end: usize, whole: usize) -> Result<Segment, Skip> {
    let wanted = Wanted {
        protocols: Protocols(config!(protocols)),
        timing: rto::is_on(),
    };
    parse_any(&Frame::new(data, end, whole), wanted)
}

#[inline(always)]
fn tell<C: EbpfContext>(ctx: &C, touched: Touched) {
    match touched {
        Touched::Known => trace!(ctx, "touched"),
        Touched::Created => debug!(ctx, "new flow"),
        Touched::NoFlow => trace!(ctx, "no flow"),
        Touched::TableFull => debug!(ctx, "table full"),
        Touched::Refused | Touched::Answered => debug!(ctx, "of a flow that has expired"),
    }
}

#[inline(always)]
fn skip<C: EbpfContext>(ctx: &C, skip: Skip) {
    count_skip(skip);
    trace!(ctx, "not tracked");
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// The kernel's helpers of the packet path are for programs under the GPL or compatible with it.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
