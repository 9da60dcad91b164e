//! Entry points of the benches. One test run is a loop over packets of many flows, around the same
//! inlined code as production runs, or around the least that a table in the kernel's hash map must
//! do.
//!
//! `ORDER` names the flows of the packets. The "packet" of the run is a TCP segment, into which
//! each turn writes the next flow's source address and port before it does what the program is
//! named for. What the programs share (the loop and the writing) is all that `bench_empty` does.
//!
//! They return `XDP_PASS`, or `XDP_ABORTED` if a packet did not take the path that the bench is to
//! measure: the figure of a program that found no flow would be worthless. `bench_touch` counts, as
//! production does; its caller checks the counters.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

mod packets;

use core::{ffi::c_void, hint::black_box, mem::MaybeUninit};

use aya_ebpf::{
    bindings::{BPF_RB_NO_WAKEUP, xdp_action},
    helpers::generated::bpf_loop,
    macros::{map, xdp},
    maps::{Array, HashMap, ring_buf::RingBufEntry},
    programs::XdpContext,
};
use twheel_common::{
    event::{Birth, Event, Pace, Reason},
    flow::{Account, Word},
    key::FlowKey,
    packet::{Protocols, Wanted, parse_plain},
    point::Point,
    policy::Hook,
    state::{Seen, SideWay, Way},
    step::Step,
    visit::visit,
};
use twheel_ebpf::{
    atomic, clock, config,
    count::count_for,
    emit::{self, Ended, Stage},
    frame,
    policy::{self, Arrival, Sight},
    rule, step, table,
    touch::{Touched, touch},
    verifier::in_memory,
};

use crate::{
    frame::Frame,
    packets::{parsed, run},
};

/// Where every tracker in eBPF keeps its flows: the kernel's hash map, preallocated. This size of
/// the value makes an element two cache lines, and what a packet reads is then in the line of the
/// key's end. It is the fastest: with a value of 8 bytes elements straddle lines, and with one of
/// 104 bytes an element has three lines.
#[map]
pub static FLOOR: HashMap<FlowKey, [u64; 5]> = HashMap::with_max_entries(1, 0);

/// The flows of a wheel on the kernel's hash map: its next pointers are keys.
#[map]
pub static LISTED: HashMap<FlowKey, Listed> = HashMap::with_max_entries(1 << 20, 0);

/// The lists: the first holds the flows to visit, the others are one for each slot.
#[map]
pub static LISTS: Array<FlowKey> = Array::with_max_entries(1 + SLOTS, 0);

/// Slots of that wheel, a power of two. It has only one level, and no bitmap.
const SLOTS: u32 = 512;

/// What a table in the kernel's hash map keeps of a flow: an element of three cache lines.
#[repr(C)]
pub struct Listed {
    word: Word,
    created: u32,
    cpu: u32,
    next: FlowKey,
    reserved: [u64; 6],
}

const BPF_NOEXIST: u64 = 1;

/// Only the loop.
#[xdp]
pub fn bench_empty(ctx: XdpContext) -> u32 {
    run(&ctx, |_, _| true)
}

/// The loop and the parser.
#[xdp]
pub fn bench_parse(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => {
            // In memory, as a lookup needs it; otherwise the compiler drops the parser.
            black_box(&segment.key);
            true
        }
        None => false,
    })
}

/// The loop, the parser, and the least that any table of flows does: one lookup, one store.
#[xdp]
pub fn bench_floor(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, now| {
        match parsed(frame).and_then(|segment| FLOOR.get_ptr_mut(segment.key)) {
            Some(flow) => {
                // SAFETY: a pointer that the table gave is valid memory while the program runs.
                unsafe { flow.cast::<u64>().write_volatile(now) };
                true
            }
            None => false,
        }
    })
}

/// The parser, and only the lookup.
#[xdp]
pub fn bench_lookup(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => FLOOR.get_ptr_mut(segment.key).is_some(),
        None => false,
    })
}

/// The parser, and the lookup of the packet's flow in twheel's table: what a touch does before it
/// has the flow.
#[xdp]
pub fn bench_find(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => {
            let Some((watched, _)) = count_for(1) else {
                return false;
            };
            let key = segment.key.in_zone(watched.zone.into());
            table::find(table::place(&key), &key).is_some()
        }
        None => false,
    })
}

/// The least that any table does for a packet that has no flow and begins none: one lookup.
#[xdp]
pub fn bench_floor_absent(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => FLOOR.get_ptr_mut(segment.key).is_none(),
        None => false,
    })
}

/// The least that any table does for the first packet of a flow: one insertion.
#[xdp]
pub fn bench_floor_insert(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => FLOOR.insert(segment.key, [0; 5], BPF_NOEXIST).is_ok(),
        None => false,
    })
}

/// Of what production does with a new flow, only the policy's part.
#[xdp]
pub fn bench_rule(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => {
            let segment = in_memory(&segment);
            black_box(policy::policy_rule(segment, 0, 1, Hook::Ingress as u32));
            true
        }
        None => false,
    })
}

/// Of what production does with a new flow, only the table's part: look up, count in, enter. The
/// flow has no rule and is on no wheel, so it cannot end.
#[xdp]
pub fn bench_enter(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| {
        let Some(segment) = parsed(frame) else {
            return false;
        };
        let segment = in_memory(&segment);
        let place = table::place(&segment.key);
        if table::find(place, &segment.key).is_some() || !table::has_room() {
            return false;
        }
        let way = u64::from(SideWay::ANY.0) << 32;
        table::is_new(table::enter(segment, place, clock::now(), Seen(0), way))
    })
}

/// Deletes flows from the floor's table.
#[xdp]
pub fn bench_floor_delete(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => FLOOR.remove(segment.key).is_ok(),
        None => false,
    })
}

/// What production does with a packet, whether its flow is known, is new, or there is none.
#[xdp]
pub fn bench_touch(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| see(frame).is_some())
}

/// The stepper of production.
#[xdp]
pub fn twheel_step(mut ctx: XdpContext) -> u32 {
    answer(&mut ctx, step::step);
    step::answer(&ctx)
}

/// The deletion of production.
#[xdp]
pub fn twheel_delete(ctx: XdpContext) -> u32 {
    step::delete(&ctx);
    xdp_action::XDP_PASS
}

/// Enters flows into the list of flows to visit.
#[xdp]
pub fn bench_listed_insert(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| {
        let Some(segment) = parsed(frame) else {
            return false;
        };
        let Some(first) = LISTS.get_ptr_mut(0) else {
            return false;
        };
        let flow = Listed {
            word: Word::new(clock::now(), 0, Seen(0)),
            created: clock::now() as u32,
            cpu: 0,
            // SAFETY: a place in a map; the bench runs on one CPU.
            next: unsafe { load(first) },
            reserved: [0; 6],
        };
        // SAFETY: as above.
        unsafe { segment.key.store(first) };
        LISTED.insert(segment.key, &flow, BPF_NOEXIST).is_ok()
    })
}

/// Touches flows.
#[xdp]
pub fn bench_listed_touch(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| {
        match parsed(frame).and_then(|segment| LISTED.get_ptr_mut(segment.key)) {
            Some(flow) => {
                // SAFETY: as in the floor; the bench runs on one CPU.
                unsafe {
                    (&raw mut (*flow).word).write_volatile(Word::new(clock::now(), 0, Seen(0)))
                };
                true
            }
            None => false,
        }
    })
}

/// The least that a stepper on the kernel's hash map does: a call like production's, which visits
/// the flows of the list that `next` numbers. No counters, no bitmaps, no levels; otherwise it does
/// what a timer visit does.
#[xdp]
pub fn bench_listed_step(mut ctx: XdpContext) -> u32 {
    answer(&mut ctx, |call| {
        let mut state = Walk {
            now: clock::now(),
            list: call.next as u32,
            visits: 0,
            expired: 0,
        };
        // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
        unsafe {
            bpf_loop(
                call.budget,
                visit_one as *mut c_void,
                (&raw mut state).cast(),
                0,
            );
        }
        call.visits = state.visits;
        call.expired = state.expired;
    })
}

/// The least that an eviction does: reserve an event, fill it in and submit it. `expired` returns
/// how many.
#[xdp]
pub fn bench_record(mut ctx: XdpContext) -> u32 {
    answer(&mut ctx, |call| repeat(call, record_one as *mut c_void))
}

/// The same with sixteen events in a record, as the stepper stages them.
#[xdp]
pub fn bench_batch(mut ctx: XdpContext) -> u32 {
    answer(&mut ctx, |call| {
        repeat(call, stage_one as *mut c_void);
        emit::emit_flush();
    })
}

/// Calls `one` as often as the budget says.
#[inline(always)]
fn repeat(call: &mut Step, one: *mut c_void) {
    let mut records = 0_u32;
    // SAFETY: the callback has the signature that the helper calls, and `records` outlives the loop.
    unsafe {
        bpf_loop(call.budget, one, (&raw mut records).cast(), 0);
    }
    call.visits = records;
    call.expired = records;
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn record_one(index: u64, records: *mut c_void) -> i64 {
    let Some(entry) = emit::reserve() else {
        return 1;
    };
    let (key, ended) = some_end(index);
    submit(entry, &key, &ended, index);
    // SAFETY: `repeat` passes a number to which there is no other reference meanwhile.
    unsafe { *records.cast::<u32>() += 1 };
    0
}

/// As [`record_one`].
unsafe extern "C" fn stage_one(index: u64, records: *mut c_void) -> i64 {
    let Some(stage) = emit::stage().or_else(flushed) else {
        return 1;
    };
    let (key, ended) = some_end(index);
    // SAFETY: the event is valid memory, aligned, and no other code accesses it.
    unsafe { fill(stage.event(), &key, &ended, index) };
    stage.keep();
    // SAFETY: as in `record_one`.
    unsafe { *records.cast::<u32>() += 1 };
    0
}

/// Reserves an event, after putting the staged events into the ring.
#[inline(always)]
fn flushed() -> Option<Stage> {
    emit::emit_flush();
    emit::stage()
}

/// Submits the end of a flow that is not in the table. The ring's reader is not woken.
#[inline(always)]
fn submit(mut entry: RingBufEntry<Event>, key: &FlowKey, ended: &Ended, now: u64) {
    // SAFETY: the ring gave room for an `Event`, aligned to 8, to this code alone.
    unsafe { fill(entry.as_mut_ptr(), key, ended, now) };
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
}

/// Fills in the end of a flow that is not in the table.
///
/// # Safety
///
/// `event` is valid for writes, aligned, and no other code accesses it.
#[inline(always)]
unsafe fn fill(event: *mut Event, key: &FlowKey, ended: &Ended, now: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        emit::fill_end(event, key, ended, now);
        (&raw mut (*event).account).write(Account::default());
        (&raw mut (*event).pace).write([Pace::default(); 2]);
        (&raw mut (*event).positions).write([0; 2]);
        (&raw mut (*event).point).write(Point::NONE);
        (&raw mut (*event).birth).write(Birth::default());
    }
}

/// The end of a flow that never existed.
#[inline(always)]
fn some_end(number: u64) -> (FlowKey, Ended) {
    let ended = Ended {
        created: 0,
        word: Word::new(number, 0, Seen(0)),
        rule: 0,
        reason: Reason::Idle as u32,
    };
    (FlowKey::from_parts([number; 4], number), ended)
}

#[repr(C)]
struct Walk {
    now: u64,
    list: u32,
    visits: u32,
    expired: u32,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn visit_one(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `bench_listed_step` passes a `Walk` to which there is no other reference meanwhile.
    let state = unsafe { &mut *state.cast::<Walk>() };
    let Some(list) = LISTS.get_ptr_mut(state.list) else {
        return 1;
    };
    // SAFETY: a place in a map; the bench runs on one CPU.
    let key = unsafe { load(list) };
    let Some(flow) = LISTED.get_ptr_mut(key) else {
        return 1;
    };
    // SAFETY: as above.
    let (word, created, next) = unsafe {
        (
            (&raw const (*flow).word).read_volatile(),
            (&raw const (*flow).created).read_volatile(),
            load(&raw const (*flow).next),
        )
    };
    let visit = visit(state.now, word, rule::timeout(0, word.seen()), clock::doubt);
    match visit.end {
        None => {
            let slot = 1 + (clock::tick().from(visit.due) as u32 & (SLOTS - 1));
            let Some(to) = LISTS.get_ptr_mut(slot) else {
                return 1;
            };
            // SAFETY: as above.
            unsafe {
                next.store(list);
                load(to).store(&raw mut (*flow).next);
                key.store(to);
            }
        }
        Some(_) => {
            let Some(entry) = emit::reserve() else {
                return 1;
            };
            // SAFETY: as above; a `Word` is a `u64`.
            let held = unsafe {
                atomic::compare_exchange((&raw mut (*flow).word).cast(), word.0, word.dead().0)
            };
            if held != word.0 || LISTED.remove(key).is_err() {
                entry.discard(0);
                return 1;
            }
            let ended = Ended {
                created,
                word,
                rule: 0,
                reason: Reason::of_expiry(word.seen()) as u32,
            };
            submit(entry, &key, &ended, state.now);
            // SAFETY: as above.
            unsafe { next.store(list) };
            state.expired += 1;
        }
    }
    state.visits += 1;
    0
}

/// A copy of a key, word by word, as `FlowKey::store` writes one.
///
/// # Safety
///
/// `place` is valid for reads and aligned.
#[inline(always)]
unsafe fn load(place: *const FlowKey) -> FlowKey {
    let words = place.cast::<u64>();
    // SAFETY: the caller's promise; a key is five words.
    let word = |at| unsafe { words.add(at).read_volatile() };
    FlowKey::from_parts([word(0), word(1), word(2), word(3)], word(4))
}

/// Steps as the packet says, and writes the answer into it.
#[inline(always)]
fn answer(ctx: &mut XdpContext, step: impl FnOnce(&mut Step)) -> u32 {
    let Some(call) = step::argument(ctx) else {
        return xdp_action::XDP_ABORTED;
    };
    step(call);
    xdp_action::XDP_PASS
}

/// What `twheel_xdp` does with a packet, without its log messages, whose code the verifier drops if
/// they are off.
#[inline(always)]
fn see(frame: Frame) -> Option<Touched> {
    let (watched, _) = count_for(1)?;
    let arrival = Arrival {
        interface: 1,
        hook: Hook::Ingress,
        way: Way::new(1, 1),
        sight: Sight::new(Point::new(watched.place.into(), Hook::Ingress), false),
        is_forwarded: false,
    };
    let wanted = Wanted {
        protocols: Protocols::TCP,
        timing: config::rto_is_on(),
        vlans: true,
    };
    let mut segment = MaybeUninit::uninit();
    if !parse_plain(&frame, wanted, &mut segment) {
        return None;
    }
    // SAFETY: it was just written.
    let segment = unsafe { segment.assume_init_mut() };
    segment.key = segment.key.in_zone(watched.zone.into());
    let segment = in_memory(segment);
    Some(touch(segment, clock::now(), arrival))
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// As in `main.rs`.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
