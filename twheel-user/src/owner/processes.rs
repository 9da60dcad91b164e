//! The processes that hold sockets, by the descriptors in `/proc`.

use std::{
    collections::HashMap,
    fs, io,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::pacing::Pacing;

/// Most processes that are looked at in one scan.
const PROCESSES: usize = 1 << 15;
/// Most descriptors that are looked at in one scan; at most 24 MiB are kept of them.
const DESCRIPTORS: usize = 1 << 20;
/// Most time that one scan takes.
const TIME: Duration = Duration::from_secs(2);

/// A process that holds a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// From `/proc/PID/comm`: 15 bytes at most.
    pub(super) command: String,
}

/// The processes that hold sockets, as of the last scan.
#[derive(Default)]
pub(super) struct Processes {
    /// By the socket's inode: the process with the lowest number, and its descriptor.
    holders: HashMap<u32, (u32, u32)>,
    pacing: Pacing,
    /// What the last scan left out.
    omitted: Omitted,
    /// What scans left out that did not find a process.
    pub(super) missed: Omitted,
}

/// What a scan left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Omitted {
    /// Processes that this process may not look at.
    pub(super) refused: bool,
    /// What was beyond a limit.
    pub(super) rest: bool,
}

impl Processes {
    /// The process that holds a socket; that with the lowest number if there are several.
    pub(super) fn find(&mut self, inode: u32) -> Option<Process> {
        let mut found = self.known(inode);
        if found.is_none() {
            let holders = &mut self.holders;
            if let Some(omitted) = self.pacing.turn(|| Scan::run(holders)) {
                self.omitted = omitted;
                found = self.known(inode);
            }
        }
        if found.is_none() {
            self.missed.refused |= self.omitted.refused;
            self.missed.rest |= self.omitted.rest;
        }
        found
    }

    /// The same as of the last scan, if the process still holds the socket.
    fn known(&self, inode: u32) -> Option<Process> {
        let (pid, descriptor) = *self.holders.get(&inode)?;
        let process = PathBuf::from(format!("/proc/{pid}"));
        let link = fs::read_link(process.join(format!("fd/{descriptor}"))).ok()?;
        (socket(link.to_str()?)? == inode).then_some(())?;
        let command = fs::read(process.join("comm")).ok()?;
        Some(Process {
            pid,
            command: String::from_utf8_lossy(&command).trim_end().to_owned(),
        })
    }
}

/// One scan of all processes.
struct Scan {
    end: Instant,
    descriptors: usize,
}

impl Scan {
    fn run(holders: &mut HashMap<u32, (u32, u32)>) -> Omitted {
        let mut scan = Self {
            end: Instant::now() + TIME,
            descriptors: DESCRIPTORS,
        };
        holders.clear();
        let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
        let entries = fs::read_dir("/proc").into_iter().flatten();
        let mut pids: Vec<_> = entries.map_while(Result::ok).filter_map(pid).collect();
        pids.sort_unstable();
        let mut omitted = Omitted {
            refused: false,
            rest: pids.len() > PROCESSES,
        };
        for pid in pids.into_iter().take(PROCESSES) {
            if let Err(error) = scan.process(pid, holders) {
                // Any other error means that the process has ended.
                omitted.refused |= error.kind() == io::ErrorKind::PermissionDenied;
            }
            if scan.is_over() {
                omitted.rest = true;
                break;
            }
        }
        omitted
    }

    fn is_over(&self) -> bool {
        self.descriptors == 0 || Instant::now() > self.end
    }

    fn process(&mut self, pid: u32, holders: &mut HashMap<u32, (u32, u32)>) -> io::Result<()> {
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let entry = entry?;
            if self.is_over() {
                break;
            }
            self.descriptors -= 1;
            let link = match fs::read_link(entry.path()) {
                // The descriptor was closed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                link => link?,
            };
            let descriptor = entry.file_name().to_str().and_then(|it| it.parse().ok());
            if let (Some(inode), Some(descriptor)) = (link.to_str().and_then(socket), descriptor) {
                holders.entry(inode).or_insert((pid, descriptor));
            }
        }
        Ok(())
    }
}

/// The inode of a socket, from what a descriptor links to: `socket:[12345]`.
fn socket(link: &str) -> Option<u32> {
    link.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::fd::AsRawFd, process};

    use super::*;

    #[test]
    fn the_holder_of_a_socket_is_found_until_it_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = fs::read_link(format!("/proc/self/fd/{}", listener.as_raw_fd())).unwrap();
        let inode = socket(link.to_str().unwrap()).unwrap();
        let mut processes = Processes::default();
        let found = processes.find(inode).unwrap();
        assert_eq!(found.pid, process::id());
        let own = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(found.command, own.trim_end());
        assert_eq!(processes.missed, Omitted::default());
        drop(listener);
        assert_eq!(processes.known(inode), None);
    }

    #[test]
    fn only_sockets_are_sockets() {
        assert_eq!(socket("socket:[12]"), Some(12));
        for link in ["pipe:[12]", "socket:[12", "socket:[]", "/socket:[12]"] {
            assert_eq!(socket(link), None, "{link}");
        }
    }
}
