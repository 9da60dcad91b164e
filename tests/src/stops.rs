//! Holds processes at some of their system calls, so that a test can act at exactly that moment.
//!
//! The kernel asks a listener before it runs such a call (`SECCOMP_RET_USER_NOTIF`, seccomp(2)), and
//! the process waits for the answer, which here is always that the call goes on.

use std::{
    mem::offset_of,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// A system call before which a process is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// It opens a directory, and not through a symbolic link.
    OpenDirectory,
    /// It locks an open file, or a directory.
    Lock,
}

/// What a process asks for with [`Call::OpenDirectory`], beside other flags.
const DIRECTORY: u32 = (libc::O_DIRECTORY | libc::O_NOFOLLOW) as u32;

/// The system calls that open something, and which of their arguments has the flags.
const OPENS: &[(libc::c_long, usize)] = &[
    (libc::SYS_openat, 2),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1),
];

/// Receives each stop of the processes that are held. When this is dropped, such a call fails with
/// `ENOSYS`.
pub struct Stops(OwnedFd);

impl Stops {
    /// Holds this thread, and every thread and process that it starts from now on. Somebody else must
    /// receive the stops.
    ///
    /// # Errors
    ///
    /// The kernel refuses the filter.
    pub fn of_this_thread() -> Result<Self> {
        let mut filter = filter();
        let program = libc::sock_fprog {
            len: filter.len() as libc::c_ushort,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: the kernel copies the program, which lives until the call returns.
        let listener = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
                &raw const program,
            )
        };
        let listener = Errno::result(listener).context("cannot hold system calls")?;
        // SAFETY: the kernel has just opened it for us.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(listener as i32) }))
    }

    /// Receives stops until all processes and threads that are held have ended: calls this closure
    /// while one is held, and then lets its call go on.
    ///
    /// # Errors
    ///
    /// There was no stop within this time, although some have not ended.
    pub fn each(&self, within: Duration, mut act: impl FnMut(Call)) -> Result<()> {
        loop {
            let mut awaited = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            let count = poll(&mut awaited, PollTimeout::try_from(within)?)?;
            ensure!(count > 0, "a process that is held does not end");
            let what = awaited[0].revents().unwrap_or(PollFlags::empty());
            if !what.contains(PollFlags::POLLIN) {
                return Ok(());
            }
            if let Some((id, call)) = self.next()? {
                act(call);
                self.go_on(id)?;
            }
        }
    }

    /// The next stop; `None` if its process has just been killed.
    fn next(&self) -> Result<Option<(u64, Call)>> {
        // SAFETY: all-zero bytes are a valid value.
        let mut stop: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes a value of this type.
        let received = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_RECV,
                &raw mut stop,
            )
        };
        match Errno::result(received) {
            Err(Errno::ENOENT) => return Ok(None),
            result => result.context("cannot receive a stop")?,
        };
        let call = match libc::c_long::from(stop.data.nr) == libc::SYS_flock {
            true => Call::Lock,
            false => Call::OpenDirectory,
        };
        Ok(Some((stop.id, call)))
    }

    /// Lets a call go on. Its process may have been killed meanwhile.
    fn go_on(&self, id: u64) -> Result<()> {
        let answer = libc::seccomp_notif_resp {
            id,
            val: 0,
            error: 0,
            flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        };
        // SAFETY: the kernel reads a value of this type.
        let sent = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND,
                &raw const answer,
            )
        };
        match Errno::result(sent) {
            Err(Errno::ENOENT) => Ok(()),
            result => result.map(drop).context("cannot let a call go on"),
        }
    }
}

/// The program that the kernel runs before each system call.
fn filter() -> Vec<libc::sock_filter> {
    let step = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let load = |offset: usize| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32);
    // Unless they are equal, so many steps are left out.
    let unless = |k: u32, jf: u8| libc::sock_filter {
        jf,
        ..step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k)
    };
    let end = |with: u32| step(libc::BPF_RET | libc::BPF_K, with);
    let (hold, allow) = (
        end(libc::SECCOMP_RET_USER_NOTIF),
        end(libc::SECCOMP_RET_ALLOW),
    );
    let mut filter = vec![
        load(offset_of!(libc::seccomp_data, nr)),
        unless(libc::SYS_flock as u32, 1),
        hold,
    ];
    for (call, argument) in OPENS {
        // The low half of the argument.
        let flags = offset_of!(libc::seccomp_data, args)
            + argument * size_of::<u64>()
            + if cfg!(target_endian = "big") { 4 } else { 0 };
        filter.extend([
            unless(*call as u32, 5),
            load(flags),
            step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, DIRECTORY),
            unless(DIRECTORY, 1),
            hold,
            allow,
        ]);
    }
    filter.push(allow);
    filter
}
