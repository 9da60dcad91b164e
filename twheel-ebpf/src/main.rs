//! Entry points of the data plane.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext,
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action, xdp_md},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use aya_log_ebpf::{debug, trace};
use twheel_common::{
    config::Watched,
    packet::{
        Bytes, Network, Outside, Protocols, Segment, Skip, Wanted, find_network, has_ethernet,
        is_tagged, parse_network, parse_plain, parse_tagged, with_tag,
    },
    point::Point,
    policy::Hook,
    step::{Enter, Step, Sweep},
    way::Way,
};
use twheel_ebpf::{
    answer, clock, config,
    count::{count_for, count_for_none, count_skip, is_watched},
    extension::{Context, Long, packed},
    frame::Frame,
    policy::{Arrival, Sight},
    step, sweep,
    touch::{Touched, touch},
    verifier::{given_mut, in_memory, masked},
};

/// Ingress: touches the flow of every packet. The packet always passes, unless it belongs to an
/// expired flow whose later packets a rule refuses.
#[xdp(frags)]
pub fn twheel_xdp(ctx: XdpContext) -> u32 {
    let index = ctx.ingress_ifindex() as u32;
    let Some((watched, added)) = count_for(index) else {
        return xdp_action::XDP_PASS;
    };
    let interface = added | index;
    let linear = ctx.data_end() - ctx.data();
    let frame = Frame::new(ctx.data(), ctx.data_end(), linear);
    let mut segment = MaybeUninit::uninit();
    let is_plain = !watched.has(Watched::IS_IP)
        && (parse_plain(&frame, wanted(), &mut segment)
            || is_tagged(&of_xdp(ctx.ctx))
                && xdp_parse_tagged(ctx.ctx, segment.as_mut_ptr()) == PARSED);
    if !is_plain {
        segment.write(Segment::NONE);
        let network = xdp_network(ctx.ctx, watched.flags.into());
        if xdp_parse(ctx.ctx, segment.as_mut_ptr(), network) != PARSED {
            return xdp_action::XDP_PASS;
        }
    }
    // SAFETY: one of the two parsers has written it.
    let segment = unsafe { segment.assume_init_mut() };
    enter_zone(segment, watched);
    let segment = in_memory(segment);
    let arrival = Arrival {
        interface,
        hook: Hook::Ingress,
        way: Way::new(interface, interface),
        sight: Sight::new(
            Point::new(watched.place.into(), Hook::Ingress),
            watched.has(Watched::IS_ABOVE),
        ),
        is_forwarded: false,
    };
    match touch(segment, clock::now(), arrival) {
        Touched::Refused => xdp_action::XDP_DROP,
        Touched::Answered => answer::answer_reset(ctx.ctx, segment) as u32,
        touched => {
            tell(&ctx, touched);
            xdp_action::XDP_PASS
        }
    }
}

/// Ingress where XDP is not available: the same, behind GRO. Leaves the verdict to the next program
/// (`TCX_NEXT` has the same value), unless the packet is refused, as above.
#[classifier]
pub fn twheel_ingress(ctx: TcContext) -> i32 {
    match touch_skb(&ctx, Hook::Ingress) {
        Some(Touched::Refused | Touched::Answered) => TC_ACT_SHOT,
        _ => TC_ACT_UNSPEC,
    }
}

/// Egress: the same for what this host sends or forwards. It never returns a verdict.
#[classifier]
pub fn twheel_egress(ctx: TcContext) -> i32 {
    touch_skb(&ctx, Hook::Egress);
    TC_ACT_UNSPEC
}

/// Touches the flow of a socket buffer. `None` if the packet belongs to no flow.
#[inline(always)]
fn touch_skb(ctx: &TcContext, hook: Hook) -> Option<Touched> {
    // SAFETY: the context of this program, which the kernel fills in; likewise below.
    let skb = unsafe { &*ctx.skb.skb };
    let (watched, added) = count_for(skb.ifindex)?;
    let interface = added | skb.ifindex;
    let frame = Frame::new(ctx.data(), ctx.data_end(), ctx.len() as usize);
    let mut segment = MaybeUninit::uninit();
    let tag = tag_of(skb);
    let is_plain = !watched.has(Watched::IS_IP) && parse_plain(&frame, wanted(), &mut segment);
    if !is_plain {
        segment.write(Segment::NONE);
        let flags = match hook {
            Hook::Ingress => watched.flags,
            Hook::Egress => watched.flags & !Watched::IS_DECRYPTED,
        };
        let network = skb_network(ctx.skb.skb, flags.into());
        let mut parsed = skb_parse(ctx.skb.skb, segment.as_mut_ptr(), network, 0);
        if parsed == TRUNCATED {
            // Only the linear part of a socket buffer can be read in place. Senders keep headers
            // there; where they do not, the headers are pulled there. That copies, so it is done
            // only if needed. A failure leaves the packet as it was.
            if ctx.len() as usize > ctx.data_end() - ctx.data() {
                let _ = ctx.pull_data(ctx.len().min(HEADERS));
            }
            let network = skb_network(ctx.skb.skb, flags.into());
            parsed = skb_parse(ctx.skb.skb, segment.as_mut_ptr(), network, 1);
        }
        if parsed != PARSED {
            return None;
        }
    }
    // SAFETY: one of the two parsers has written it.
    let segment = unsafe { segment.assume_init_mut() };
    if is_plain {
        enter_vlan(segment, tag);
    }
    enter_zone(segment, watched);
    let joined = segment.joined(skb.gso_segs, skb.gso_size);
    if joined > 1 {
        segment.count_joined(joined as u16);
    }
    let segment = in_memory(segment);
    let origin = match hook {
        Hook::Ingress => interface,
        Hook::Egress => added | skb.ingress_ifindex,
    };
    let is_forwarded = hook == Hook::Egress && is_watched(origin);
    let may_be_known = match hook {
        Hook::Ingress => watched.has(Watched::IS_ABOVE),
        // Without a branch: each is a state more for the verifier.
        Hook::Egress => is_forwarded | watched.has(Watched::IS_BELOW),
    };
    let arrival = Arrival {
        interface,
        hook,
        way: Way::new(interface, origin),
        sight: Sight::new(Point::new(watched.place.into(), hook), may_be_known),
        is_forwarded,
    };
    let touched = touch(segment, clock::now(), arrival);
    tell(ctx, touched);
    Some(touched)
}

/// The VLAN tag that the kernel has taken out of the frame; 0: none.
#[inline(always)]
fn tag_of(skb: &__sk_buff) -> u16 {
    match skb.vlan_present {
        0 => 0,
        _ => skb.vlan_tci as u16,
    }
}

/// Puts the segment into the VLAN whose tag the kernel has taken out of the frame (0: none).
#[inline(always)]
fn enter_vlan(segment: &mut Segment, tag: u16) {
    if tag != 0 && wanted().vlans {
        segment.key = segment.key.in_vlans(with_tag(0, tag));
    }
}

/// Puts the segment into the interface's zone.
#[inline(always)]
fn enter_zone(segment: &mut Segment, watched: Watched) {
    if watched.zone != 0 {
        segment.key = segment.key.in_zone(watched.zone.into());
    }
}

/// Result of parsing a frame that is not plain: it was parsed.
const PARSED: u64 = 0;
/// Result of parsing: the frame belongs to no flow, and was counted.
const SKIPPED: u64 = 1;
/// Result of parsing: the frame may belong to a flow, if its headers can be pulled to where they
/// can be read.
const TRUNCATED: u64 = 2;

/// Parses a frame that is plain except for its tags. [`PARSED`], or another value if it is not such
/// a frame.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_parse_tagged(ctx: *mut xdp_md, segment: *mut Segment) -> u64 {
    let Some(segment) = given_mut(segment.cast::<MaybeUninit<Segment>>()) else {
        return SKIPPED;
    };
    match parse_tagged(&of_xdp(ctx), wanted(), segment) {
        true => PARSED,
        false => SKIPPED,
    }
}

/// Finds the IP packet in a frame that arrived on an interface with these flags. Returns [`found`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_network(ctx: *mut xdp_md, flags: u32) -> u64 {
    let frame = of_xdp(ctx);
    let outside = Outside {
        is_ip: begins_with_ip(&frame, flags),
        tag: 0,
    };
    found(find_network(&frame, outside))
}

#[inline(always)]
fn begins_with_ip<B: Bytes>(frame: &B, flags: u32) -> bool {
    let has = |flag: u8| flags & u32::from(flag) != 0;
    has(Watched::IS_IP) && !(has(Watched::IS_DECRYPTED) && has_ethernet(frame))
}

/// The position of an IP packet as one number; or the reason why there is none, with [`NONE`].
#[inline(always)]
fn found(network: Result<Network, Skip>) -> u64 {
    match network {
        Ok(network) => network.packed(),
        Err(reason) => NONE | reason as u64,
    }
}

/// In the number that [`found`] returns: there is no IP packet; the low bits say why.
const NONE: u64 = 1 << 63;

/// Parses a frame that [`parse_plain`] does not parse, from the position that [`found`] returned.
#[inline(always)]
fn parse_found<B: Bytes>(
    frame: &B,
    found: u64,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    if found & NONE != 0 {
        return Err(Skip::from_raw(masked::<7>(found)));
    }
    parse_network(frame, wanted(), Network::from_packed(found), segment)
}

/// Calls [`parse_found`]. Returns what became of the frame.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_parse(ctx: *mut xdp_md, segment: *mut Segment, found: u64) -> u64 {
    let Some(segment) = given_mut(segment.cast::<MaybeUninit<Segment>>()) else {
        return SKIPPED;
    };
    match parse_found(&Long::<Xdp>(of_xdp(ctx), ctx), found, segment) {
        Ok(()) => PARSED,
        Err(reason) => skip(&XdpContext::new(ctx), reason),
    }
}

#[inline(always)]
fn of_xdp(ctx: *mut xdp_md) -> Frame {
    let ctx = XdpContext::new(ctx);
    Frame::new(ctx.data(), ctx.data_end(), ctx.data_end() - ctx.data())
}

/// Calls [`packed`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_extension(ctx: *mut xdp_md, header: u32, at: u64) -> u64 {
    packed(&of_xdp(ctx), header as u8, at as usize)
}

/// As [`xdp_network`], for a socket buffer.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn skb_network(skb: *mut __sk_buff, flags: u32) -> u64 {
    // SAFETY: the context of the program, which the kernel fills in.
    let tag = tag_of(unsafe { &*skb });
    let frame = of_skb(skb);
    let outside = Outside {
        is_ip: begins_with_ip(&frame, flags),
        tag,
    };
    found(find_network(&frame, outside))
}

/// As [`xdp_parse`]. With `last`, headers that cannot be read are out of reach for good.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn skb_parse(skb: *mut __sk_buff, segment: *mut Segment, found: u64, last: u32) -> u64 {
    let Some(segment) = given_mut(segment.cast::<MaybeUninit<Segment>>()) else {
        return SKIPPED;
    };
    match parse_found(&Long::<Skb>(of_skb(skb), skb), found, segment) {
        Ok(()) => PARSED,
        Err(Skip::Truncated) if last == 0 => TRUNCATED,
        Err(reason) => skip(&TcContext::new(skb), reason),
    }
}

#[inline(always)]
fn of_skb(skb: *mut __sk_buff) -> Frame {
    let ctx = TcContext::new(skb);
    Frame::new(ctx.data(), ctx.data_end(), ctx.len() as usize)
}

/// Calls [`packed`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn skb_extension(skb: *mut __sk_buff, header: u32, at: u64) -> u64 {
    packed(&of_skb(skb), header as u8, at as usize)
}

/// Ethernet with two tags, IPv6 and TCP, and some bytes of options.
const HEADERS: u32 = 128;

/// Give the parser access to the two functions that read extension headers.
struct Xdp;
struct Skb;

impl Context for Xdp {
    type Of = xdp_md;

    #[inline(always)]
    fn extension(context: *mut xdp_md, header: u8, at: usize) -> u64 {
        xdp_extension(context, header.into(), at as u64)
    }
}

impl Context for Skb {
    type Of = __sk_buff;

    #[inline(always)]
    fn extension(context: *mut __sk_buff, header: u8, at: usize) -> u64 {
        skb_extension(context, header.into(), at as u64)
    }
}

/// Not attached: one call of the stepper, through `BPF_PROG_TEST_RUN` on the wheel's CPU.
#[xdp]
pub fn twheel_step(mut ctx: XdpContext) -> u32 {
    let Some(call) = step::argument::<Step>(&mut ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    count_for_none();
    step::step(call);
    let (visits, expired) = (call.visits, call.expired);
    debug!(&ctx, "step: {} visits, {} expired", visits, expired);
    step::answer(&ctx)
}

/// Not attached; run as the stepper is: deletes flows.
#[xdp]
pub fn twheel_delete(ctx: XdpContext) -> u32 {
    count_for_none();
    step::delete(&ctx);
    step::answer(&ctx)
}

/// Not attached; run as the stepper is: enters a flow that userspace knows.
#[xdp]
pub fn twheel_enter(mut ctx: XdpContext) -> u32 {
    let Some(call) = step::argument::<Enter>(&mut ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    count_for_none();
    step::enter(call);
    step::answer(&ctx)
}

/// Not attached; run as the stepper is: gives flows their rules of the policy in force, and arms
/// them by the present timeouts.
#[xdp]
pub fn twheel_sweep(mut ctx: XdpContext) -> u32 {
    let Some(call) = step::argument::<Sweep>(&mut ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    count_for_none();
    sweep::sweep(call);
    step::answer(&ctx)
}

/// What the configuration asks the parser for. The verifier drops the parsers of the rest.
#[inline(always)]
fn wanted() -> Wanted {
    Wanted {
        protocols: Protocols(config!(protocols)),
        timing: config::rto_is_on(),
        vlans: config!(vlans) != 0,
    }
}

#[inline(always)]
fn tell<C: EbpfContext>(ctx: &C, touched: Touched) {
    match touched {
        Touched::Known => trace!(ctx, "touched"),
        Touched::Created => debug!(ctx, "new flow"),
        Touched::NoFlow => trace!(ctx, "no flow"),
        Touched::TableFull | Touched::WindowFull => debug!(ctx, "table full"),
        Touched::Refused | Touched::Answered => debug!(ctx, "of a flow that has expired"),
    }
}

/// Counts a frame that belongs to no flow.
#[inline(always)]
fn skip<C: EbpfContext>(ctx: &C, skip: Skip) -> u64 {
    count_skip(skip);
    trace!(ctx, "not tracked");
    SKIPPED
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// The kernel allows the packet path's helpers only to programs under the GPL or a compatible
/// licence.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
