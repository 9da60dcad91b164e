//! Maps of the kernel in this process's memory, as words.
//!
//! The kernel reads and writes the memory meanwhile, so each word is accessed atomically, and no
//! reference to anything but such words is made.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    slice,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use memmap2::{MmapOptions, MmapRaw};
use zerocopy::{FromBytes, IntoBytes};

const WORD: usize = size_of::<u64>();

/// Memory that this process reads and writes.
pub struct Mapped(MmapRaw);

impl Mapped {
    /// Maps the first bytes of a map.
    ///
    /// # Errors
    ///
    /// The map cannot be mapped.
    pub fn new(map: impl AsFd, bytes: usize) -> io::Result<Self> {
        let memory = MmapOptions::new()
            .len(bytes)
            .map_raw(map.as_fd().as_raw_fd());
        memory.map(Self)
    }

    /// A word, by its index.
    ///
    /// # Panics
    ///
    /// If it lies beyond the end.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &words(&self.0)[index]
    }
}

/// Memory that this process only reads.
pub struct ReadOnly(MmapRaw);

impl ReadOnly {
    /// Maps bytes of a map, from an offset on that is a multiple of the page size.
    ///
    /// # Errors
    ///
    /// The map cannot be mapped.
    pub fn new(map: impl AsFd, offset: u64, bytes: usize) -> io::Result<Self> {
        let memory = MmapOptions::new()
            .offset(offset)
            .len(bytes)
            .map_raw_read_only(map.as_fd().as_raw_fd());
        memory.map(Self)
    }

    /// Loads a word, by its index.
    ///
    /// # Panics
    ///
    /// If it lies beyond the end.
    pub fn load(&self, index: usize) -> u64 {
        // A relaxed load: the only access that Rust allows to memory that cannot be written.
        words(&self.0)[index].load(Ordering::Relaxed)
    }

    /// The same, before all later accesses.
    ///
    /// # Panics
    ///
    /// If it lies beyond the end.
    pub fn acquire(&self, index: usize) -> u64 {
        let word = self.load(index);
        fence(Ordering::Acquire);
        word
    }

    /// A copy of what begins at a word: each of its words is whole, but they may be of different
    /// moments. `None` if it does not end within the memory.
    pub fn copy<T: FromBytes + IntoBytes>(&self, index: usize) -> Option<T> {
        const { assert!(size_of::<T>().is_multiple_of(WORD), "whole words") };
        let words = words(&self.0).get(index..)?.get(..size_of::<T>() / WORD)?;
        let mut copy = T::new_zeroed();
        let (places, _) = copy.as_mut_bytes().as_chunks_mut();
        for (place, word) in places.iter_mut().zip(words) {
            *place = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        Some(copy)
    }
}

/// All words of a mapping. Only loads are allowed if it is read-only.
fn words(map: &MmapRaw) -> &[AtomicU64] {
    let start = map.as_mut_ptr().cast::<AtomicU64>();
    assert!(start.is_aligned(), "a mapping begins with a page");
    // SAFETY: the mapping has that many bytes, begins with a whole word and lives as long as `map`.
    // Any bytes are an `AtomicU64`, and nothing in this process has another reference to them.
    unsafe { slice::from_raw_parts(start, map.len() / WORD) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_is_mapped_is_read_and_written_by_words() {
        let mut file = tempfile::tempfile().unwrap();
        for word in 1..=4_u64 {
            file.write_all(&word.to_ne_bytes()).unwrap();
        }
        let (mapped, read) = (
            Mapped::new(&file, 32).unwrap(),
            ReadOnly::new(&file, 0, 32).unwrap(),
        );
        assert_eq!(read.copy(1), Some([2_u64, 3]));
        assert_eq!(read.copy::<[u64; 2]>(3), None);
        assert_eq!(read.copy::<[u64; 2]>(usize::MAX), None);
        mapped.word(2).store(7, Ordering::Relaxed);
        assert_eq!((read.load(2), read.acquire(3)), (7, 4));
        assert_eq!(read.copy(2), Some([7_u32.to_le(), 0, 4, 0]));
    }
}
