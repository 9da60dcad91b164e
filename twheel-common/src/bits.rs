//! Bits.

/// The number of the lowest bit that is set; `word` is not 0.
#[inline(always)]
pub fn lowest(word: u64) -> u32 {
    let bit = word.trailing_zeros();
    // The compiler knows the range, and drops any mask; the verifier, which sees a table being read,
    // does not.
    #[cfg(target_arch = "bpf")]
    let bit = {
        let mut bit = u64::from(bit);
        // SAFETY: arithmetic on one register.
        unsafe {
            core::arch::asm!("{bit} &= 63", bit = inout(reg) bit, options(pure, nomem, nostack))
        }
        bit as u32
    };
    bit
}
