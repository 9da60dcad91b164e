//! Sets the CPU and the priority of a thread.

use std::io;

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// Gives this thread the lowest real-time priority, or takes it away.
pub fn run_ahead(ahead: bool) -> io::Result<()> {
    let (policy, priority) = match ahead {
        true => (libc::SCHED_FIFO, 1),
        false => (libc::SCHED_OTHER, 0),
    };
    // The kernel's `sched_param`. musl has more in its own, and a function that always fails.
    let parameters: libc::c_int = priority;
    let call = libc::SYS_sched_setscheduler;
    // SAFETY: the parameters outlive the call; 0 means this thread.
    match unsafe { libc::syscall(call, 0, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Pins this thread to a CPU.
pub fn pin_to(cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .with_context(|| {
            format!(
                "cannot run on CPU {cpu}, which twheel needs for the wheel of that CPU: does a \
                 cpuset exclude it?"
            )
        })
}
