//! Bit operations that the verifier can follow.

/// The number of the lowest bit that is set; `word` must not be 0.
#[inline(always)]
pub fn lowest(word: u64) -> u32 {
    let bit = word.trailing_zeros();
    // The compiler knows the result's range and drops any mask. The verifier does not know the
    // range: it sees a table being read.
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

/// A number as an index below 2^16.
#[inline(always)]
pub fn index(number: u16) -> usize {
    #[cfg(target_arch = "bpf")]
    {
        let mut index = u64::from(number);
        // As above; and before Linux 6.13 the verifier does not know the range after a swap of two
        // bytes.
        // SAFETY: arithmetic on one register.
        unsafe {
            core::arch::asm!("{index} &= 0xffff", index = inout(reg) index, options(pure, nomem, nostack))
        }
        index as usize
    }
    #[cfg(not(target_arch = "bpf"))]
    number.into()
}
