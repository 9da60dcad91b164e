//! Sets the CPU, the priority and the slice of a thread.

use std::{io, mem};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
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
    let result = unsafe { libc::syscall(call, 0, policy, &raw const parameters) };
    Ok(Errno::result(result).map(drop)?)
}

/// The shortest slice of a thread that the kernel allows, nanoseconds (`kernel/sched/syscalls.c`).
const SHORTEST: u64 = 100_000;

/// Asks for the shortest slice for this thread. So it runs soon after it is woken, although another
/// thread runs then. Before Linux 6.12, that changes nothing; nor does it if somebody has given the
/// thread another policy than the usual one.
///
/// # Errors
///
/// The kernel refuses.
pub fn run_soon() -> io::Result<()> {
    let mut attributes = attributes()?;
    if attributes.sched_policy as libc::c_int != libc::SCHED_OTHER {
        return Ok(());
    }
    attributes.sched_runtime = SHORTEST;
    // SAFETY: the attributes have the size that they name, and outlive the call; 0 means this thread.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    Ok(Errno::result(result).map(drop)?)
}

/// How the kernel runs this thread.
fn attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: all-zero bytes are valid attributes.
    let mut attributes: libc::sched_attr = unsafe { mem::zeroed() };
    let size = size_of_val(&attributes);
    // SAFETY: the attributes have as many bytes, and outlive the call; 0 means this thread.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    Errno::result(result)?;
    Ok(attributes)
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_gets_the_shortest_slice_and_keeps_the_rest() {
        thread::spawn(|| {
            let before = attributes().unwrap();
            run_soon().unwrap();
            let after = attributes().unwrap();
            // An older kernel tells nothing.
            if before.sched_runtime != 0 {
                assert_eq!(after.sched_runtime, SHORTEST);
            }
            let rest = |it: &libc::sched_attr| (it.sched_policy, it.sched_nice, it.sched_flags);
            assert_eq!(rest(&after), rest(&before));
        })
        .join()
        .unwrap();
    }
}
