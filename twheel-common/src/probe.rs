//! Shared memory of the programs that find out how the kernel runs programs, and of their callers.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The value of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Probe {
    /// Set by the caller: how long a CPU is held at most, in nanoseconds.
    pub hold: u64,
    /// Set by the caller: the CPU is to be released.
    pub leave: u64,
    /// 1 while a CPU is held.
    pub inside: u64,
    /// 1: another program has run on that CPU,
    pub entered: u64,
    /// and found it held.
    pub met: u64,
    /// 1: the timer was started.
    pub started: u64,
}
