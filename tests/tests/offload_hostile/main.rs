//! Programs that mean harm to `twheel run --offload`, and packets that are forged in the name of
//! registered connections.
//!
//! `TWHEEL_STRESS_SECONDS` sets for how many seconds mutated packets are sent: 4 by default, 600 if
//! `TWHEEL_LONG` is set.
#![allow(missing_docs)]

mod clients;
mod forged;
mod fuzz;
mod million;
mod protocol;
mod raw;
mod rights;
mod stuck;

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel::{offload::table::Mapping, pins::Instance};
use twheel_client::{
    Outcome,
    protocol::{Op, Reply, Request, life},
};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    pair::{Connection, Family, Pair, SERVER},
    running::Twheel,
};

use self::raw::{Raw, nobodys};

const DATA: u8 = life::DATA_IN | life::DATA_OUT;
/// What a timeout may come late by, and what two processes on a busy machine may take to run.
const LATE: Duration = Duration::from_millis(40 + 160);
/// User and group of nobody.
const NOBODY: u32 = 65534;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A pair with a twheel on the server, which serves programs.
struct Lab {
    // Ends before the namespaces.
    twheel: Twheel,
    directory: Directory,
    pair: Pair,
}

/// What twheel holds.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    files: usize,
    threads: usize,
    registered: usize,
}

impl Lab {
    fn new(name: &str, more: &[&str]) -> Result<Self> {
        require_root();
        let (pair, directory) = (Pair::new()?, Directory::new(&format!("hostile-{name}"))?);
        let path = directory.file("offload");
        let args = ["--iface", SERVER, "--tick", "100ms", "--offload", &path];
        let args = [&args[..], more].concat();
        let lab = Self {
            twheel: Twheel::start_muted(&pair.server, &args)?,
            directory,
            pair,
        };
        lab.settle()?;
        Ok(lab)
    }

    /// Has it serve a program, so that it has all that it takes for that.
    fn settle(&self) -> Result<()> {
        self.serves()?;
        self.at_rest().map(drop)
    }

    /// What it holds when nothing goes on.
    fn at_rest(&self) -> Result<Standing> {
        let end = Instant::now() + PATIENCE;
        let mut before = self.standing()?;
        loop {
            ensure!(Instant::now() < end, "it does not come to rest: {before:?}");
            thread::sleep(millis(60));
            let now = self.standing()?;
            let is_closing = self.threads()?.iter().any(|name| name == "twheel-close");
            if now == before && !is_closing {
                return Ok(now);
            }
            before = now;
        }
    }

    /// The names of its threads.
    fn threads(&self) -> Result<Vec<String>> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.twheel.pid()))?;
        let names = tasks.flatten().filter_map(|task| {
            // `None`: it has ended just now.
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            Some(name.trim_end().to_owned())
        });
        Ok(names.collect())
    }

    fn path(&self) -> PathBuf {
        self.directory.0.join("offload")
    }

    fn raw(&self) -> Result<Raw> {
        Raw::connect(&self.path())
    }

    fn connect(&self, number: usize) -> Result<Connection> {
        let mut connection = self.pair.connect(Family::alternate(number))?;
        connection.talk()?;
        Ok(connection)
    }

    fn standing(&self) -> Result<Standing> {
        let [_, _, files] = self.twheel.held()?;
        let pins = self.pair.server.enter(|| Instance::with(SERVER))?;
        Ok(Standing {
            files,
            threads: self.threads()?.len(),
            registered: Mapping::new(&pins, 0)?.marked().len(),
        })
    }

    /// Has it one descriptor left; returns how many it might have before.
    fn leave_one_descriptor(&self) -> Result<usize> {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.twheel.pid()))?;
        let used: BTreeSet<usize> = files
            .flatten()
            .filter_map(|file| file.file_name().to_str()?.parse().ok())
            .collect();
        // The limit is that of their numbers.
        let mut free = (0..).filter(|number| !used.contains(number));
        self.limit_descriptors(free.nth(1).context("no end of numbers")?)
    }

    /// Sets how many descriptors it may have; returns how many it might have before.
    fn limit_descriptors(&self, count: usize) -> Result<usize> {
        let mut before = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        let pid = self.twheel.pid() as i32;
        let set = |new: *const libc::rlimit, old: *mut libc::rlimit| {
            // SAFETY: both are null, or limits that outlive the call; the process is a child of this
            // one.
            let done = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, new, old) };
            ensure!(done == 0, "{}", std::io::Error::last_os_error());
            Ok(())
        };
        set(std::ptr::null(), &raw mut before)?;
        let new = libc::rlimit {
            rlim_cur: count as libc::rlim_t,
            ..before
        };
        set(&raw const new, std::ptr::null_mut())?;
        Ok(before.rlim_cur as usize)
    }

    /// Resident memory in KiB.
    fn memory(&self) -> Result<usize> {
        Ok(self.twheel.held()?[0])
    }

    /// A program that means no harm is served: a timer that it starts expires on time, and one that
    /// it stops does not.
    fn serves(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.has_served()? {
            ensure!(Instant::now() < end, "this machine is too busy");
        }
        Ok(())
    }

    /// The same. `false`: this test was held up for so long that a timer had expired when it was to be
    /// stopped.
    fn has_served(&self) -> Result<bool> {
        const TIMEOUT: u64 = 150;
        let raw = self.raw()?;
        let connections = [self.connect(0)?, self.connect(1)?];
        let last = Instant::now();
        let requests = [1, 2].map(|tag| start(TIMEOUT as u32, DATA, tag));
        let replies = raw.ask(&requests, &both(&connections))?;
        let replied = Instant::now();
        ensure!(replies.iter().all(|it| it.error == 0), "{replies:?}");
        let stopped = raw.ask(&[about(Op::Stop, replies[1].id)], &[])?;
        if stopped[0].error as i32 == libc::ENOENT && last.elapsed() >= millis(TIMEOUT) {
            return Ok(false);
        }
        ensure!(stopped[0].error == 0, "{stopped:?}");
        let events = raw.events()?;
        let [event] = events[..] else {
            anyhow::bail!("{events:?}");
        };
        ensure!(
            (event.what, event.tag, event.id) == (Outcome::Expired as u32, 1, replies[0].id),
            "{event:?}"
        );
        let (most, least) = (last.elapsed(), replied.elapsed());
        ensure!(most >= millis(TIMEOUT), "early: {most:?}");
        ensure!(least <= millis(TIMEOUT) + LATE, "late: {least:?}");
        Ok(true)
    }

    /// After an attack twheel serves others, and holds what it held before.
    fn withstands(&self, what: &str, attack: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = self.at_rest()?;
        attack().with_context(|| what.to_owned())?;
        // Until then its user may have no place for another program.
        self.becomes(&before)
            .with_context(|| format!("after {what}"))?;
        self.serves().with_context(|| format!("after {what}"))?;
        self.becomes(&before)
            .with_context(|| format!("after {what}"))
    }

    /// Waits until it holds this.
    fn becomes(&self, wanted: &Standing) -> Result<()> {
        let end = Instant::now() + PATIENCE / 6;
        loop {
            let now = self.standing()?;
            if now == *wanted {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{wanted:?} became {now:?}");
            thread::sleep(millis(5));
        }
    }

    /// The same with a twheel that follows on one that is killed, for one with `--keep`.
    fn killed_and_restarted(self) -> Result<Self> {
        let Self {
            twheel,
            directory,
            pair,
        } = self;
        twheel.kill()?;
        let path = directory.file("offload");
        let args = ["--iface", SERVER, "--tick", "100ms", "--keep"];
        let args = [&args[..], &["--offload", &path]].concat();
        Ok(Self {
            twheel: Twheel::start_muted(&pair.server, &args)?,
            directory,
            pair,
        })
    }

    /// Runs a closure while twheel stands still.
    fn stopped<T>(&self, inside: impl FnOnce() -> Result<T>) -> Result<T> {
        let pid = Pid::from_raw(self.twheel.pid() as i32);
        kill(pid, Signal::SIGSTOP)?;
        let end = Instant::now() + PATIENCE;
        let stands = || -> Result<bool> {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
            Ok(stat
                .rsplit(") ")
                .next()
                .is_some_and(|it| it.starts_with('T')))
        };
        while !stands()? {
            ensure!(Instant::now() < end, "twheel does not stand still");
            thread::sleep(millis(1));
        }
        let done = inside();
        kill(pid, Signal::SIGCONT)?;
        done
    }

    /// Ends twheel, which has nothing to report.
    fn end(self) -> Result<()> {
        let ended = self.twheel.stop()?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        // Many sockets of a packet were read at once.
        for word in ["panicked", "no longer serving", "one by one"] {
            ensure!(!ended.stderr.contains(word), "{}", ended.stderr);
        }
        self.pair.server.check_clean(SERVER)
    }
}

fn both(connections: &[Connection; 2]) -> [BorrowedFd<'_>; 2] {
    connections.each_ref().map(|it| it.server.as_fd())
}

fn start(timeout: u32, life: u8, tag: u64) -> Request {
    let mut request = Request::new(Op::Start);
    (request.timeout, request.life, request.tag) = (timeout, life, tag);
    request
}

/// A start that names endpoints that nobody has, by number.
fn start_nobodys(timeout: u32, number: u32, tag: u64) -> Request {
    let mut request = start(timeout, DATA, tag);
    let (local, remote) = nobodys(number);
    request.name(local, remote);
    request
}

/// Reclaims what was registered with this reply.
fn reclaim(timeout: u32, reply: &Reply) -> Request {
    Request {
        timeout,
        life: DATA,
        cookie: reply.cookie,
        token: reply.token,
        ..about(Op::Reclaim, reply.id)
    }
}

fn about(op: Op, id: u64) -> Request {
    let mut request = Request::new(op);
    request.id = id;
    request
}
