//! Reading the bytes of a packet where they are.

use twheel_common::packet::{Bytes, Header};

/// The bytes of a packet that can be accessed directly.
#[derive(Clone, Copy)]
pub struct Frame {
    data: usize,
    end: usize,
    whole: usize,
}

/// No header chain is longer than this. It bounds an offset for the verifier, which refuses a
/// packet pointer whose variable part may be large.
const MAX_OFFSET: usize = 0x3fff;

impl Frame {
    /// From the context's `data` and `data_end`, and the length of the whole packet, with the parts
    /// that cannot be accessed.
    #[inline(always)]
    pub fn new(data: usize, end: usize, whole: usize) -> Self {
        Self { data, end, whole }
    }
}

impl Bytes for Frame {
    type Header<const N: usize> = At;

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<At> {
        if offset > MAX_OFFSET {
            return None;
        }
        let at = self.data + offset;
        (at + N <= self.end).then_some(At(at))
    }

    #[inline(always)]
    fn whole(&self) -> usize {
        self.whole
    }
}

/// A position in a packet behind which as many bytes as were asked for can be read.
#[derive(Clone, Copy)]
pub struct At(usize);

/// A load of one instruction. The compiler may not assume that fields of a packet are aligned, and
/// would read them byte by byte. The kernel accepts unaligned loads on every architecture on which
/// they are efficient, such as x86-64 and arm64.
macro_rules! load {
    ($at:expr, $type:ty, $instruction:literal) => {{
        let at = $at;
        #[cfg(target_arch = "bpf")]
        {
            let value: u64;
            // SAFETY: reads packet memory that `Frame::header` has checked; the verifier checks it
            // as well.
            unsafe {
                core::arch::asm!(
                    concat!("{value} = *(", $instruction, " *)({at} + 0)"),
                    at = in(reg) at,
                    value = lateout(reg) value,
                    options(pure, readonly, nostack, preserves_flags),
                );
            }
            value as $type
        }
        #[cfg(not(target_arch = "bpf"))]
        // SAFETY: as above.
        unsafe {
            (at as *const $type).read_unaligned()
        }
    }};
}

impl Header for At {
    #[inline(always)]
    fn u8(&self, at: usize) -> u8 {
        load!(self.0 + at, u8, "u8")
    }
    #[inline(always)]
    fn u16(&self, at: usize) -> u16 {
        load!(self.0 + at, u16, "u16")
    }
    #[inline(always)]
    fn u32(&self, at: usize) -> u32 {
        load!(self.0 + at, u32, "u32")
    }
    #[inline(always)]
    fn u64(&self, at: usize) -> u64 {
        load!(self.0 + at, u64, "u64")
    }
}
