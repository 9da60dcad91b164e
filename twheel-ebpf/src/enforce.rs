//! Packets of expired flows: what their tombstone demands, and whether their source may have
//! another answer.

use aya_ebpf::bindings::BPF_ANY;
use twheel_common::{
    counter::Counter,
    enforce::{Bucket, Tombstone, has_answer},
    key::Direction,
    policy::Hook,
    segment::{Segment, tcp},
};

use crate::{
    config,
    count::count,
    maps::{ANSWERS, TOMBSTONES},
    verifier::given,
};

/// What becomes of a packet, as one number, since global functions return nothing else: it passes.
pub const PASS: u64 = 0;
/// What becomes of a packet: it is dropped.
pub const DROP: u64 = 1;
/// What becomes of a packet: it is answered.
pub const ANSWER: u64 = 2;

/// What becomes of a packet of no flow in the table. An outgoing one always passes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn enforce_of_none(segment: *const Segment, now: u64, hook: u32) -> u64 {
    let Some(segment) = given(segment) else {
        return PASS;
    };
    if segment.flags & tcp::SYN != 0 {
        if segment.flags & tcp::ACK == 0 {
            // A new connection with the same key, whoever begins it: its tombstone is removed. That
            // there was none is no failure. (The key is copied, not borrowed from the segment: older
            // kernels accept no key from a caller's memory.)
            let _ = TOMBSTONES.remove(segment.key);
        }
        return PASS;
    }
    match Hook::from_raw(hook) {
        Hook::Ingress => judge(segment, now),
        Hook::Egress => PASS,
    }
}

/// What becomes of an incoming packet that begins no flow.
#[inline(always)]
fn judge(segment: &Segment, now: u64) -> u64 {
    let Some(tomb) = TOMBSTONES.get_ptr(segment.key) else {
        return PASS;
    };
    // SAFETY: a value that the map gave is valid memory while the program runs. The map may give it
    // to another key meanwhile, whose verdict then applies to this packet.
    let verdict = unsafe { (&raw const (*tomb).verdict).read_volatile() };
    if verdict != Tombstone::DROP && verdict != Tombstone::RESET {
        return PASS;
    }
    if verdict == Tombstone::DROP || !has_answer(segment.flags) {
        count(Counter::EnforcedDropped);
        return DROP;
    }
    if !takes_answer(segment, now) {
        count(Counter::EnforcedLimited);
        return DROP;
    }
    ANSWER
}

/// Takes one answer from what the segment's source may have. Returns whether there was one.
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
        // SAFETY: as above, and the value is one word.
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
        // A source whose answers cannot be counted gets none.
        None => ANSWERS.insert(source, after, BPF_ANY.into()).is_ok(),
    }
}
