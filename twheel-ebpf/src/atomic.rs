//! Compare-and-swap. `core` has none on this target, whose instruction set got it with v3; the
//! kernel orders it fully on every architecture (`Documentation/bpf/standardization`, atomic
//! operations).

/// Stores `new` at `place` if it holds `old`; returns what it held.
///
/// # Safety
///
/// `place` must be valid, 8-byte aligned map memory that is changed by this function alone.
#[inline(always)]
pub unsafe fn compare_exchange(place: *mut u64, old: u64, new: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let held;
        // SAFETY: the caller's promise; the instruction reads and writes these eight bytes.
        unsafe {
            core::arch::asm!(
                "r0 = cmpxchg_64({place} + 0, r0, {new})",
                place = in(reg) place,
                new = in(reg) new,
                inout("r0") old => held,
            );
        }
        held
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        use core::sync::atomic::{AtomicU64, Ordering};
        // SAFETY: the caller's promise.
        match unsafe { AtomicU64::from_ptr(place) }.compare_exchange(
            old,
            new,
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(held) | Err(held) => held,
        }
    }
}
