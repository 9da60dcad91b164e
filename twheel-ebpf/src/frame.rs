//! Reading the bytes of a packet where they are.

use twheel_common::packet::Bytes;

/// The directly accessible bytes of a packet.
#[derive(Clone, Copy)]
pub struct Frame {
    data: usize,
    end: usize,
}

/// No header chain is longer than this: bounds an offset for the verifier, which refuses a packet
/// pointer whose variable part may be large.
const MAX_OFFSET: usize = 0x3fff;

impl Frame {
    /// From the context's `data` and `data_end`.
    #[inline(always)]
    pub fn new(data: usize, end: usize) -> Self {
        Self { data, end }
    }
}

impl Bytes for Frame {
    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        if offset > MAX_OFFSET {
            return None;
        }
        let at = self.data + offset;
        if at + N > self.end {
            return None;
        }
        // SAFETY: `at .. at + N` lies between `data` and `data_end`, which the kernel guarantees to
        // be readable while the program runs; an array of bytes needs no alignment.
        Some(unsafe { (at as *const [u8; N]).read() })
    }
}
