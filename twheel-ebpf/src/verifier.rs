//! Functions that tell the kernel's verifier what it cannot infer, or keep it from exploring cases
//! one by one. `docs/design.md` says how to stay within its budget.

use core::{ffi::c_void, mem::MaybeUninit};

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{key::FlowKey, segment::Segment};

/// The bits of a value that are in a mask, even if the value can have no others. The compiler drops
/// a mask if it knows that (of a `bool` read from the stack, or of what another function returns);
/// the verifier does not know it.
#[inline(always)]
pub fn masked<const MASK: u64>(value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = value;
        // SAFETY: arithmetic on one register.
        unsafe {
            core::arch::asm!(
                "{value} &= {mask}",
                value = inout(reg) value,
                mask = const MASK,
                options(pure, nomem, nostack),
            );
        }
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        value & MASK
    }
}

/// The same value, which is 0 or 1, masked.
#[inline(always)]
pub fn bit(value: u64) -> u64 {
    masked::<1>(value)
}

/// The same value, of which the compiler reads every part from memory from here on. Otherwise it
/// keeps a second copy on the stack, of which a program with all functions that it calls has 512
/// bytes.
#[inline(always)]
pub fn in_memory<T>(value: &T) -> &T {
    #[cfg(target_arch = "bpf")]
    let value = {
        let mut place = core::ptr::from_ref(value);
        // SAFETY: the register still has the address of `value`.
        unsafe {
            core::arch::asm!("{place} = {place}", place = inout(reg) place, options(nostack));
            &*place
        }
    };
    value
}

/// A type that global functions take by pointer.
///
/// # Safety
///
/// A raw pointer to such a value is made only from a reference, as the argument of a global
/// function, and is read only by [`given`] and [`given_mut`].
pub unsafe trait Given {}

// SAFETY: only arguments have pointers to segments and keys (a flow's key in the map is read
// through its record).
unsafe impl Given for Segment {}
// SAFETY: as above.
unsafe impl Given for MaybeUninit<Segment> {}
// SAFETY: as above.
unsafe impl Given for FlowKey {}

/// The argument of a global function: null, or memory that is valid while the function runs and
/// that nothing else writes. The verifier checks that at each call.
#[inline(always)]
#[allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "the verifier checks every caller"
)]
pub fn given<'a, T: Given>(argument: *const T) -> Option<&'a T> {
    // SAFETY: `Given`, and the verifier's check.
    unsafe { argument.as_ref() }
}

/// As [`given`], for an argument that the function writes to.
#[inline(always)]
#[allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "the verifier checks every caller"
)]
pub fn given_mut<'a, T: Given>(argument: *mut T) -> Option<&'a mut T> {
    // SAFETY: as above, and nothing else reads it.
    unsafe { argument.as_mut() }
}

/// Calls `turn` with 0, 1, … until it returns `true`, at most `turns` times.
#[inline(always)]
pub fn repeat<F: FnMut(u32) -> bool>(turns: u32, mut turn: F) {
    unsafe extern "C" fn call<F: FnMut(u32) -> bool>(index: u64, turn: *mut c_void) -> i64 {
        // SAFETY: `repeat` passes an `F` to which there is no other reference meanwhile.
        let turn = unsafe { &mut *turn.cast::<F>() };
        let stop = turn(index as u32).into();
        bit(stop) as i64
    }
    // SAFETY: the callback has the signature that the helper calls, and `turn` outlives the loop.
    // (`bpf_loop`, so that the verifier goes through a turn once.)
    unsafe { bpf_loop(turns, call::<F> as *mut c_void, (&raw mut turn).cast(), 0) };
}
