//! Atomic operations. `core` has none on this target, whose instruction set got them with v3. All
//! of these are fully ordered on every architecture: the kernel requires that of operations that
//! return what the memory held (`Documentation/bpf/standardization`, atomic operations; a
//! compare-and-swap that fails orders nothing).

macro_rules! atomic {
    ($(#[doc = $doc:literal])+ $name:ident, $type:ty, $instruction:literal, $host:ident) => {
        $(#[doc = $doc])+
        /// Returns the value before.
        ///
        /// # Safety
        ///
        /// `place` must be valid, aligned map memory.
        #[inline(always)]
        pub unsafe fn $name(place: *mut $type, value: $type) -> $type {
            #[cfg(target_arch = "bpf")]
            {
                let held: u64;
                // SAFETY: the caller's promise; the instruction reads and writes that place alone.
                unsafe {
                    core::arch::asm!(
                        $instruction,
                        place = in(reg) place,
                        inout("r0") u64::from(value) => held,
                    );
                }
                held as $type
            }
            #[cfg(not(target_arch = "bpf"))]
            {
                use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
                trait Atomic {
                    type Of;
                }
                impl Atomic for u32 {
                    type Of = AtomicU32;
                }
                impl Atomic for u64 {
                    type Of = AtomicU64;
                }
                // SAFETY: the caller's promise.
                unsafe { <$type as Atomic>::Of::from_ptr(place) }.$host(value, Ordering::SeqCst)
            }
        }
    };
}

atomic!(
    /// Stores a value.
    swap, u64, "r0 = xchg_64({place} + 0, r0)", swap
);
atomic!(
    /// Adds a value, wrapping.
    add, u64, "r0 = atomic_fetch_add((u64 *)({place} + 0), r0)", fetch_add
);
atomic!(
    /// Sets the bits of a value.
    or, u32, "w0 = atomic_fetch_or((u32 *)({place} + 0), w0)", fetch_or
);
atomic!(
    /// Clears the bits that are not set in a value.
    and, u32, "w0 = atomic_fetch_and((u32 *)({place} + 0), w0)", fetch_and
);
atomic!(
    /// Sets the bits of a value.
    or_64, u64, "r0 = atomic_fetch_or((u64 *)({place} + 0), r0)", fetch_or
);
atomic!(
    /// Clears the bits that are not set in a value.
    and_64, u64, "r0 = atomic_fetch_and((u64 *)({place} + 0), r0)", fetch_and
);

macro_rules! compare_exchange {
    ($name:ident, $type:ty, $register:ident, $atomic:ident, $instruction:literal) => {
        /// Stores `new` at `place` if it holds `old`; returns the value before.
        ///
        /// # Safety
        ///
        /// `place` must be valid, aligned map memory.
        #[inline(always)]
        pub unsafe fn $name(place: *mut $type, old: $type, new: $type) -> $type {
            #[cfg(target_arch = "bpf")]
            {
                let held: u64;
                // SAFETY: the caller's promise; the instruction reads and writes that place alone.
                unsafe {
                    core::arch::asm!(
                        $instruction,
                        place = in(reg) place,
                        new = in($register) new,
                        inout("r0") u64::from(old) => held,
                    );
                }
                held as $type
            }
            #[cfg(not(target_arch = "bpf"))]
            {
                use core::sync::atomic::{$atomic, Ordering::SeqCst};
                // SAFETY: the caller's promise.
                let place = unsafe { $atomic::from_ptr(place) };
                match place.compare_exchange(old, new, SeqCst, SeqCst) {
                    Ok(held) | Err(held) => held,
                }
            }
        }
    };
}

compare_exchange!(
    compare_exchange,
    u64,
    reg,
    AtomicU64,
    "r0 = cmpxchg_64({place} + 0, r0, {new})"
);
compare_exchange!(
    compare_exchange_32,
    u32,
    wreg,
    AtomicU32,
    "w0 = cmpxchg32_32({place} + 0, w0, {new})"
);
