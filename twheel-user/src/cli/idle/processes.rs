//! Which processes are watched, and their sockets.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use anyhow::Result;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    connection::{self, Ends},
    failure::{Failure, Kind},
};

/// The processes that are watched.
pub struct Processes {
    /// Those that were named, and have not ended. What these descriptors refer to stays the same
    /// if a number is used again.
    named: BTreeMap<u32, OwnedFd>,
    cgroups: Vec<PathBuf>,
}

impl Processes {
    /// Those with these numbers, and those in these cgroups and below.
    ///
    /// # Errors
    ///
    /// A process is not running, or a cgroup cannot be read.
    pub fn new(pids: &[u32], cgroups: Vec<PathBuf>) -> Result<Self> {
        let refused = |message| anyhow::Error::new(Failure::new(Kind::Other, message));
        let mut named = BTreeMap::new();
        for pid in pids {
            let opened = open(*pid).map_err(|error| {
                refused(format!(
                    "--pid: {pid}: {error}: give the number of a running process, as `pgrep NAME` \
                     prints it"
                ))
            })?;
            named.insert(*pid, opened);
        }
        for cgroup in &cgroups {
            let file = cgroup.join(MEMBERS);
            fs::read(&file).map_err(|error| {
                refused(format!(
                    "--cgroup: cannot read {}: {error}: give the directory of a cgroup (version \
                     2), such as one below /sys/fs/cgroup",
                    file.display()
                ))
            })?;
        }
        Ok(Self { named, cgroups })
    }

    /// Takes out the named processes that have ended, and returns their numbers.
    pub fn ended(&mut self) -> Vec<u32> {
        let has_ended = |process: &OwnedFd| {
            let mut awaited = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            poll(&mut awaited, PollTimeout::ZERO) == Ok(1)
        };
        let ended: Vec<_> = self
            .named
            .iter()
            .filter(|(_, process)| has_ended(process))
            .map(|(pid, _)| *pid)
            .collect();
        ended.iter().for_each(|pid| drop(self.named.remove(pid)));
        ended
    }

    /// Whether there is nothing left to watch, and never will be.
    pub fn is_over(&self) -> bool {
        self.named.is_empty() && self.cgroups.is_empty()
    }

    /// The numbers of all that run now.
    pub fn running(&self) -> Vec<u32> {
        let mut pids: Vec<_> = self.named.keys().copied().collect();
        for cgroup in &self.cgroups {
            members(cgroup, &mut pids);
        }
        pids.sort_unstable();
        pids.dedup();
        // This process has copies of sockets for a moment.
        pids.retain(|pid| *pid != std::process::id());
        pids
    }

    /// One of them.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn get(&self, pid: u32) -> io::Result<Process> {
        let descriptor = match self.named.get(&pid) {
            Some(named) => named.try_clone()?,
            None => open(pid)?,
        };
        Ok(Process { pid, descriptor })
    }
}

/// The file that lists the processes of a cgroup.
const MEMBERS: &str = "cgroup.procs";

/// Adds the processes of a cgroup and of those below. If it was removed, as when its service is
/// restarted, it has none.
fn members(cgroup: &Path, pids: &mut Vec<u32>) {
    let text = fs::read_to_string(cgroup.join(MEMBERS)).unwrap_or_default();
    let numbers = text.lines().filter_map(|line| line.parse::<u32>().ok());
    // 0 is a process that has no number in this PID namespace.
    pids.extend(numbers.filter(|pid| *pid != 0));
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|it| it.is_dir()) {
            members(&entry.path(), pids);
        }
    }
}

/// A process.
pub struct Process {
    pid: u32,
    descriptor: OwnedFd,
}

impl Process {
    /// The numbers of its descriptors that are sockets, each with the socket's inode.
    ///
    /// # Errors
    ///
    /// It has ended, or this process may not look.
    pub fn sockets(&self) -> io::Result<Vec<(i32, u64)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid))? {
            let entry = entry?;
            let number = entry.file_name().to_str().and_then(|it| it.parse().ok());
            let inode = || inode(&fs::read_link(entry.path()).ok()?);
            found.extend(number.and_then(|number| Some((number, inode()?))));
        }
        Ok(found)
    }

    /// A copy of a descriptor.
    ///
    /// # Errors
    ///
    /// It was closed, the process has ended, or this process may not have it.
    pub fn take(&self, number: i32) -> io::Result<OwnedFd> {
        let process = self.descriptor.as_raw_fd();
        // SAFETY: the call takes three numbers.
        owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) })
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// What a call has returned that opens a descriptor.
fn owned(opened: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(opened) {
        // SAFETY: the kernel has just opened it for this process, and nothing else knows it.
        Ok(descriptor @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The inode of a socket, from the link of a descriptor (`proc_pid_fd(5)`).
fn inode(link: &Path) -> Option<u64> {
    let link = link.to_str()?.strip_prefix("socket:[")?;
    link.strip_suffix(']')?.parse().ok()
}

/// What a socket is.
pub enum Found {
    /// An established TCP connection.
    Connection(Ends),
    /// A TCP socket that is not, or no longer, connected.
    Unconnected,
    /// Something else, and will always be.
    Other,
}

impl Found {
    /// What a socket is.
    pub fn of(socket: BorrowedFd<'_>) -> Self {
        let ends = connection::check_protocol(socket)
            .and_then(|()| connection::check_established(socket))
            .and_then(|()| connection::ends(socket));
        match ends {
            Ok(ends) => Self::Connection(ends),
            Err(libc::ENOTCONN) => Self::Unconnected,
            Err(_) => Self::Other,
        }
    }
}
