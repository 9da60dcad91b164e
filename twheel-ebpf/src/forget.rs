//! A help to the verifier, which goes through all that follows once for each value that it can tell apart.

use core::mem::{MaybeUninit, offset_of};

use twheel_common::{flow::FlowKey, packet::Segment};

/// The same value, of which the verifier no longer knows what branches led to it. It keeps track of what is stored to the
/// stack in whole words, not in the second half of one.
#[inline(always)]
pub fn forget(value: u32) -> u32 {
    #[repr(C, align(8))]
    struct Word([u32; 2]);
    let mut word = Word([0, 0]);
    let place = &raw mut word.0[1];
    // SAFETY: a place on the stack that is this function's own.
    unsafe {
        place.write_volatile(value);
        place.read_volatile()
    }
}

/// The same for a segment, where it is: what is done with it is gone through once, and not for each way through
/// the parser. Where it has halves of words, as above; not so its key, whose words are read whole: the processor would have
/// to wait until their halves, and all that was stored before, are in the cache. To them something is added that is 0, which
/// the verifier cannot know: the sign of the time.
#[inline(always)]
pub fn forget_segment(segment: &mut Segment, now: u64) {
    const { assert!(align_of::<Segment>() == 8) };
    const KEY: usize = size_of::<FlowKey>() / 8;
    let zero = 0u64.wrapping_sub(now >> 63);
    let words = (&raw mut segment.key).cast::<u64>();
    for word in 0..KEY {
        // SAFETY: within the key, which is words alone.
        unsafe {
            let word = words.add(word);
            word.write_volatile(word.read_volatile() ^ zero);
        }
    }
    const { assert!(offset_of!(Segment, key) == 0) };
    let halves = (&raw mut *segment).cast::<MaybeUninit<u32>>();
    for half in 2 * KEY..size_of::<Segment>() / 4 {
        // SAFETY: within the segment, and what is written is what was there, padding or not.
        unsafe {
            let half = halves.add(half);
            half.write_volatile(half.read_volatile());
        }
    }
}

/// The same value, which is 0 or 1. The compiler knows that of a `bool` read from the stack, and drops any other
/// mask; the verifier does not.
#[inline(always)]
pub fn bit(value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    let value = {
        let mut value = value;
        // SAFETY: arithmetic on one register.
        unsafe {
            core::arch::asm!("{value} &= 1", value = inout(reg) value, options(pure, nomem, nostack));
        }
        value
    };
    value
}
