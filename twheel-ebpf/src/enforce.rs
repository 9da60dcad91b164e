//! Packets of flows that have expired: what userspace has said of them, and whether their source is still answered.

use aya_ebpf::bindings::BPF_ANY;
use twheel_common::{
    counter::Counter,
    enforce::{Bucket, Tomb, has_answer},
    key::Direction,
    policy::Hook,
    segment::{Segment, tcp},
};

use crate::{
    config,
    count::count,
    maps::{ANSWERS, EXPIRED},
    verifier::given,
};

/// What becomes of a packet, as one number, since the programs' functions return no more: it passes;
pub const PASS: u64 = 0;
/// it is dropped;
pub const DROP: u64 = 1;
/// it is answered.
pub const ANSWER: u64 = 2;

/// What becomes of a packet of no flow in the table. One that goes out always passes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn enforce_of_none(segment: *const Segment, now: u64, hook: u32) -> u64 {
    let Some(segment) = given(segment) else {
        return PASS;
    };
    if segment.flags & tcp::SYN != 0 {
        if segment.flags & tcp::ACK == 0 {
            // A connection of the same name, whoever begins it. That nothing was there is no failure. (Of the key itself:
            // older kernels take none from a caller's memory.)
            let _ = EXPIRED.remove(segment.key);
        }
        return PASS;
    }
    match Hook::from_raw(hook) {
        Hook::Ingress => judge(segment, now),
        Hook::Egress => PASS,
    }
}

/// What becomes of a packet that begins nothing and comes in.
#[inline(always)]
fn judge(segment: &Segment, now: u64) -> u64 {
    let Some(tomb) = EXPIRED.get_ptr(segment.key) else {
        return PASS;
    };
    // SAFETY: a value that the map gave is valid memory while the program runs. It may be given to another key
    // meanwhile, whose verdict is then this packet's.
    let verdict = unsafe { (&raw const (*tomb).verdict).read_volatile() };
    if verdict != Tomb::DROP && verdict != Tomb::RESET {
        return PASS;
    }
    if verdict == Tomb::DROP || !has_answer(segment.flags) {
        count(Counter::EnforcedDropped);
        return DROP;
    }
    if !takes_answer(segment, now) {
        count(Counter::EnforcedLimited);
        return DROP;
    }
    ANSWER
}

/// Whether the segment's source may have another answer; it has it then.
#[inline(always)]
fn takes_answer(segment: &Segment, now: u64) -> bool {
    let [a, b, c, d] = segment.key.addresses();
    let source = match segment.direction {
        Direction::FromLow => [a, b],
        Direction::FromHigh => [c, d],
    };
    let (rate, second) = (config!(enforce_rate), config!(two_seconds) / 2);
    let bucket = ANSWERS.get_ptr_mut(source);
    let before = match bucket {
        // SAFETY: as above, and it is one word.
        Some(bucket) => unsafe { bucket.read_volatile() },
        None => Bucket::default(),
    };
    let Some(after) = before.take(now, rate, second) else {
        return false;
    };
    match bucket {
        Some(bucket) => {
            // SAFETY: as above.
            unsafe { bucket.write_volatile(after) };
            true
        }
        // Whose answers cannot be counted has none.
        None => ANSWERS.insert(source, after, BPF_ANY.into()).is_ok(),
    }
}
