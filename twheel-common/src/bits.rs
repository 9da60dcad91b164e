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

/// The same number, as an index below 2^16.
#[inline(always)]
pub fn index(number: u16) -> usize {
    #[cfg(target_arch = "bpf")]
    {
        let mut index = u64::from(number);
        // As above; and before 6.13 the verifier does not know what a swap of two bytes leaves.
        // SAFETY: arithmetic on one register.
        unsafe {
            core::arch::asm!("{index} &= 0xffff", index = inout(reg) index, options(pure, nomem, nostack))
        }
        index as usize
    }
    #[cfg(not(target_arch = "bpf"))]
    number.into()
}
