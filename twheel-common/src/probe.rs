//! What the programs that ask the kernel how it runs programs share with whoever runs them.

/// The value of their map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Set by the caller: how long a CPU is held at most, nanoseconds.
    pub hold: u64,
    /// Set by the caller: it is held no longer.
    pub leave: u64,
    /// 1 while a CPU is held.
    pub inside: u64,
    /// 1: somebody has come to that CPU,
    pub entered: u64,
    /// and found it held.
    pub met: u64,
    /// 1: the timer was started.
    pub started: u64,
}
