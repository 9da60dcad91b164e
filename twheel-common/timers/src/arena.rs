//! Memory that grows without being moved.

use alloc::{
    alloc::{Layout, alloc_zeroed, handle_alloc_error},
    boxed::Box,
    vec::Vec,
};
use core::ptr;

/// Types of which all bytes may be zero.
///
/// # Safety
///
/// A value whose bytes are all zero is valid, and the type is not of size zero.
pub unsafe trait Zeroed {}

/// log2 of the places in a chunk.
const BITS: u32 = 13;

/// Places in the first chunk, at first.
const FEW: usize = 64;

/// Places with indices, in chunks of 8,192. The first chunk is smaller at first: it is doubled, and
/// moved, until it is a whole one. After that no place is ever moved.
#[derive(Debug)]
pub struct Arena<N> {
    chunks: Vec<Box<[N]>>,
    /// Number of places.
    places: u32,
}

/// The chunk of a place, and where the place is in it.
#[inline(always)]
fn locate(index: u32) -> (usize, usize) {
    (
        (index >> BITS) as usize,
        (index & ((1 << BITS) - 1)) as usize,
    )
}

impl<N: Zeroed> Arena<N> {
    /// Without places.
    pub const fn new() -> Self {
        Self {
            chunks: Vec::new(),
            places: 0,
        }
    }

    /// Number of places.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Adds places, all zero. The pages of a chunk take no memory until they are written to.
    #[cold]
    pub fn grow(&mut self) {
        match self.chunks.first_mut() {
            Some(first) if first.len() < 1 << BITS => {
                let mut chunk = zeroed::<N>(2 * first.len());
                chunk[..first.len()].swap_with_slice(first);
                *first = chunk;
            }
            None => self.chunks.push(zeroed(FEW)),
            Some(_) => self.chunks.push(zeroed(1 << BITS)),
        }
        self.places = self.chunks.iter().map(|chunk| chunk.len() as u32).sum();
    }

    /// A place.
    #[inline(always)]
    pub fn at(&self, index: u32) -> &N {
        let (chunk, at) = locate(index);
        &self.chunks[chunk][at]
    }

    /// A place, to change it.
    #[inline(always)]
    pub fn at_mut(&mut self, index: u32) -> &mut N {
        let (chunk, at) = locate(index);
        &mut self.chunks[chunk][at]
    }

    /// A place that is known to exist, to change it.
    ///
    /// # Safety
    ///
    /// The index is less than [`places`](Self::places).
    #[inline(always)]
    pub unsafe fn at_known(&mut self, index: u32) -> &mut N {
        debug_assert!(index < self.places);
        let (chunk, at) = locate(index);
        // SAFETY: all chunks but the first are whole, so the places up to the last one are in these
        // chunks, and each in the part of its chunk that is there.
        unsafe { self.chunks.get_unchecked_mut(chunk).get_unchecked_mut(at) }
    }

    /// Prefetches a place into the cache, if the processor has an instruction for it.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        prefetch(self.at(index));
    }
}

impl<N> Arena<N> {
    /// Calls a function with the first `count` places.
    pub fn each(&mut self, count: u32, act: impl FnMut(&mut N)) {
        let places = self.chunks.iter_mut().flat_map(|chunk| chunk.iter_mut());
        places.take(count as usize).for_each(act);
    }
}

/// Places that are all zero.
fn zeroed<N: Zeroed>(count: usize) -> Box<[N]> {
    let Ok(layout) = Layout::array::<N>(count) else {
        unreachable!("{count} places are more than an address space has");
    };
    // SAFETY: `Zeroed` promises that the size of `N` is not zero, and `count` is not.
    let memory = unsafe { alloc_zeroed(layout) }.cast::<N>();
    if memory.is_null() {
        handle_alloc_error(layout);
    }
    // SAFETY: the global allocator has given the memory for this layout, nobody else has it, and
    // `Zeroed` promises that its zeros are values of `N`.
    unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(memory, count)) }
}

#[inline(always)]
fn prefetch<N>(place: &N) {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse"))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which may name any address and changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr::from_ref(place).cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(any(
        all(target_arch = "x86_64", target_feature = "sse"),
        target_arch = "aarch64"
    )))]
    let _ = place;
}

#[cfg(test)]
mod tests {
    use super::Arena;

    #[test]
    fn each_index_has_a_place_of_its_own() {
        let mut arena = Arena::<u32>::new();
        for index in 0..40_000 {
            if index == arena.places() {
                let before = arena.places();
                arena.grow();
                let grown = arena.places() - before;
                assert!(grown <= before.clamp(64, 8_192), "{grown} at {before}");
            }
            assert_eq!(*arena.at(index), 0, "{index} was used before");
            *arena.at_mut(index) = index + 1;
            arena.prefetch(index);
        }
        assert!((0..40_000).all(|index| *arena.at(index) == index + 1));
        let mut sum = 0;
        arena.each(10_000, |place| sum += *place);
        assert_eq!(sum, 10_000 * 10_001 / 2);
    }
}
