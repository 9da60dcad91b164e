//! The sockets of the processes, and what twheel tells of them.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Write as _},
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::sys::socket::{Shutdown, shutdown};
use serde::Serialize;
use twheel_client::{
    LAG,
    channel::{Channel, Packet},
    cookie_of, end, idle_of,
    protocol::{self, BATCH, Event, Op, Outcome, Reply, Request, SOCKETS, TAGGED},
};

use super::{
    Action, Idle,
    processes::{Found, Processes},
};
use crate::{
    cli::select::while_read,
    connection::Ends,
    failure::{Failure, Kind},
    output::json,
};

/// How long to wait with a connection that twheel has refused.
const AGAIN: Duration = Duration::from_secs(10);

/// A socket of a process.
struct Held {
    pid: u32,
    descriptor: i32,
    /// Tells it from another socket with this inode.
    cookie: u64,
    ends: Option<Ends>,
    /// When it was found.
    since: Instant,
    /// The look that has seen it last.
    look: u64,
    phase: Phase,
    /// It was told that twheel cannot tell.
    is_unseen: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// To be registered, once it is a connection.
    New,
    /// twheel has its timer.
    Registered { id: u64, token: u64 },
    /// It was reported then.
    Reported(Instant),
    /// twheel has refused it; to be tried again then.
    Refused(Instant),
    /// twheel cannot tell whether it is idle: this keeps its timer, and asks the kernel then.
    Unseen(Instant),
    /// It cannot have a timer.
    Never,
}

/// What `twheel idle` does.
pub struct Watch {
    idle: Idle,
    /// Milliseconds.
    timeout: u32,
    processes: Processes,
    /// `None`: twheel has ended.
    channel: Option<Channel>,
    /// The table of the twheel that was there last.
    table: u64,
    /// By inode, which is also the tag.
    held: HashMap<u64, Held>,
    /// Number of the present look.
    look: u64,
    /// Reasons for which connections are not watched, and processes whose sockets cannot be taken,
    /// that were named before.
    told: HashSet<i32>,
    forbidden: HashSet<u32>,
}

impl Watch {
    /// Of these processes.
    pub fn new(idle: Idle, timeout: u32, processes: Processes, channel: Channel) -> Self {
        Self {
            idle,
            timeout,
            processes,
            table: channel.welcome().table,
            channel: Some(channel),
            held: HashMap::new(),
            look: 0,
            told: HashSet::new(),
            forbidden: HashSet::new(),
        }
    }

    /// The connection to twheel, if it has not ended.
    pub fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Whether all processes have ended.
    pub fn is_over(&mut self) -> bool {
        for pid in self.processes.ended() {
            say!("twheel: process {pid} has ended");
        }
        self.processes.is_over()
    }

    /// Looks for sockets, and registers those that are new.
    ///
    /// # Errors
    ///
    /// This process may not take the sockets; or standard output was closed.
    pub fn look(&mut self) -> Result<()> {
        if self.channel.is_none() {
            return Ok(());
        }
        self.look += 1;
        let mut found = Vec::new();
        for pid in self.processes.running() {
            if let Err(error) = self.look_at(pid, &mut found)? {
                self.cannot_look(pid, error)?;
            }
        }
        self.register(&mut found)?;
        self.forget()
    }

    /// Looks for sockets of a process.
    ///
    /// # Errors
    ///
    /// Inside: its sockets cannot be taken.
    fn look_at(&mut self, pid: u32, found: &mut Vec<(u64, OwnedFd)>) -> Result<io::Result<()>> {
        let process = match self.processes.get(pid) {
            Ok(process) => process,
            Err(error) => return Ok(Err(error)),
        };
        let sockets = match process.sockets() {
            Ok(sockets) => sockets,
            Err(error) => return Ok(Err(error)),
        };
        for (descriptor, inode) in sockets {
            let held = self.held.entry(inode).or_insert(Held {
                pid,
                descriptor,
                cookie: 0,
                ends: None,
                since: Instant::now(),
                look: 0,
                phase: Phase::New,
                is_unseen: false,
            });
            // Several descriptors, also of several processes, may be one socket.
            if held.look == self.look {
                continue;
            }
            (held.pid, held.descriptor, held.look) = (pid, descriptor, self.look);
            match held.phase {
                Phase::Registered { .. } | Phase::Never => continue,
                Phase::Refused(until) | Phase::Unseen(until) if Instant::now() < until => continue,
                Phase::New | Phase::Reported(_) | Phase::Refused(_) | Phase::Unseen(_) => {}
            }
            let socket = match process.take(descriptor) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Ok(Err(error));
                }
                // It was closed just now.
                Err(_) => continue,
                Ok(socket) => socket,
            };
            if held.is_wanted(socket.as_fd(), self.idle.life.bits(), self.timeout) {
                match held.phase {
                    Phase::Unseen(_) => self.look_at_unseen(inode, socket.as_fd())?,
                    _ => found.push((inode, socket)),
                }
            }
            // A packet has no more, and this process may have few.
            if found.len() == SOCKETS {
                self.register(found)?;
            }
        }
        Ok(Ok(()))
    }

    /// Asks the kernel whether a connection is idle.
    fn look_at_unseen(&mut self, inode: u64, socket: BorrowedFd<'_>) -> Result<()> {
        let Some(held) = self.held.get_mut(&inode) else {
            return Ok(());
        };
        let idle = held.idle(socket, self.idle.life.bits());
        let left = Duration::from_millis(self.timeout.into()).saturating_sub(idle);
        if !left.is_zero() {
            held.phase = Phase::Unseen(Instant::now() + left);
            return Ok(());
        }
        held.phase = Phase::Reported(Instant::now());
        end(socket, self.idle.action.into());
        let mut line = Vec::new();
        report(held, idle, &self.idle, &mut line)?;
        while_read(|out| Ok(out.write_all(&line)?))
    }

    fn cannot_look(&mut self, pid: u32, error: io::Error) -> Result<()> {
        match (error.kind(), error.raw_os_error()) {
            // It has ended.
            (io::ErrorKind::NotFound, _) | (_, Some(libc::ESRCH)) => Ok(()),
            (io::ErrorKind::PermissionDenied, _) => {
                let message = format!(
                    "cannot take the sockets of process {pid}: {error}: run this as root, or see \
                     `twheel idle --help`"
                );
                // Later ones may be of other users.
                if self.look == 1 {
                    return Err(Failure::new(Kind::Permission, message).into());
                }
                if self.forbidden.insert(pid) {
                    say!("twheel: {message}");
                }
                Ok(())
            }
            _ => Err(error).with_context(|| format!("cannot list the sockets of process {pid}")),
        }
    }

    /// Registers sockets.
    fn register(&mut self, found: &mut Vec<(u64, OwnedFd)>) -> Result<()> {
        for batch in std::mem::take(found).chunks(SOCKETS) {
            let requests: Vec<_> = batch
                .iter()
                .map(|(inode, socket)| self.start(*inode, socket.as_fd()))
                .collect();
            let sockets: Vec<_> = batch.iter().map(|(_, it)| it.as_fd()).collect();
            self.ask(&requests, &sockets)?;
        }
        Ok(())
    }

    /// Ends the timers of sockets that none of the processes has any more.
    fn forget(&mut self) -> Result<()> {
        let look = self.look;
        let gone = self.held.extract_if(|_, held| held.look != look);
        let stop = |(inode, held): (u64, Held)| match held.phase {
            Phase::Registered { id, .. } => {
                let mut request = Request::new(Op::Stop);
                (request.id, request.tag, request.flags) = (id, inode, TAGGED);
                Some(request)
            }
            _ => None,
        };
        let stops: Vec<_> = gone.filter_map(stop).collect();
        for batch in stops.chunks(BATCH) {
            self.ask(batch, &[])?;
        }
        Ok(())
    }

    /// Starts a socket's timer. It may have been idle already since it was found.
    fn start(&self, inode: u64, socket: BorrowedFd<'_>) -> Request {
        let mut request = self.request(Op::Start, inode);
        if let Some(held) = self.held.get(&inode) {
            let idle = held.idle(socket, request.life).as_millis();
            request.idle = u32::try_from(idle).unwrap_or(u32::MAX);
        }
        request
    }

    fn request(&self, op: Op, inode: u64) -> Request {
        let mut request = Request::new(op);
        request.tag = inode;
        request.timeout = self.timeout;
        request.life = self.idle.life.bits();
        request.action = protocol::Action::from(self.idle.action) as u8;
        request
    }

    /// Sends requests, and waits for their answers. If twheel has ended, there is nothing to do.
    fn ask(&mut self, requests: &[Request], sockets: &[BorrowedFd<'_>]) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        let Some(channel) = &self.channel else {
            return Ok(());
        };
        if let Err(error) = channel.send(1, requests, sockets) {
            return self.lost(Some(error));
        }
        loop {
            match self.packet()? {
                None => return Ok(()),
                Some(Packet::Replies(_, replies)) => {
                    for (request, reply) in requests.iter().zip(&replies) {
                        self.answered(request, reply);
                    }
                    return Ok(());
                }
                Some(Packet::Events(events)) => self.over(&events)?,
            }
        }
    }

    /// Receives the next packet, when there is one. `None`: twheel has ended.
    fn packet(&mut self) -> Result<Option<Packet>> {
        let received = self.channel.as_ref().map(Channel::receive);
        match received.transpose() {
            Ok(Some(Some(packet))) => return Ok(Some(packet)),
            Ok(_) => self.lost(None)?,
            Err(error) => self.lost(Some(error))?,
        }
        Ok(None)
    }

    /// Takes in what twheel has sent by itself.
    ///
    /// # Errors
    ///
    /// Standard output was closed.
    pub fn receive(&mut self) -> Result<()> {
        match self.packet()? {
            Some(Packet::Events(events)) => self.over(&events),
            Some(Packet::Replies(..)) | None => Ok(()),
        }
    }

    /// The connection to twheel has ended.
    fn lost(&mut self, error: Option<io::Error>) -> Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        self.channel = None;
        match error {
            Some(error) if ![BrokenPipe, ConnectionReset, NotConnected].contains(&error.kind()) => {
                Err(error).context("cannot speak with twheel")
            }
            _ => {
                say!("twheel: the running twheel has ended: waiting until it is back");
                Ok(())
            }
        }
    }

    /// Connects to twheel again, if it is back. It is to go on with the timers that it had.
    ///
    /// # Errors
    ///
    /// It is of another version.
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        let channel = match Channel::connect(path) {
            Ok(channel) => channel,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return Err(error.into()),
            Err(_) => return Ok(()),
        };
        say!("twheel: the running twheel is back");
        let table = channel.welcome().table;
        let same = std::mem::replace(&mut self.table, table) == table;
        self.channel = Some(channel);
        self.told.clear();
        let mut reclaims = Vec::new();
        for (inode, held) in &self.held {
            if let Phase::Registered { id, token } = held.phase
                && same
            {
                let mut request = self.request(Op::Reclaim, *inode);
                (request.id, request.token, request.cookie) = (id, token, held.cookie);
                reclaims.push(request);
            }
        }
        // Perhaps it watches other interfaces now.
        for held in self.held.values_mut() {
            if !matches!(held.phase, Phase::Reported(_) | Phase::Never) {
                held.phase = Phase::New;
            }
        }
        for batch in reclaims.chunks(BATCH) {
            self.ask(batch, &[])?;
        }
        Ok(())
    }

    fn answered(&mut self, request: &Request, reply: &Reply) {
        if request.op == Op::Stop as u8 {
            return;
        }
        let Some(held) = self.held.get_mut(&request.tag) else {
            return;
        };
        let error = reply.error as i32;
        held.phase = match error {
            0 => Phase::Registered {
                id: reply.id,
                token: reply.token,
            },
            // It is registered anew.
            _ if request.op == Op::Reclaim as u8 => Phase::New,
            // Not yet connected, or no longer.
            libc::ENOTCONN => Phase::New,
            libc::ENOTSOCK | libc::EPROTOTYPE | libc::EXDEV => Phase::Never,
            _ => Phase::Refused(Instant::now() + AGAIN),
        };
        let is_told = matches!(held.phase, Phase::Refused(_)) || error == libc::EXDEV;
        if is_told && self.told.insert(error) {
            say!(
                "twheel: {} of process {} is not watched, and perhaps others: {}",
                written(held.ends),
                held.pid,
                why(error)
            );
        }
    }

    /// Registrations are over.
    fn over(&mut self, events: &[Event]) -> Result<()> {
        let mut lines = Vec::new();
        for event in events {
            let Some(held) = self.held.get_mut(&event.tag) else {
                continue;
            };
            // Else it was another socket's, with the same inode.
            if !matches!(held.phase, Phase::Registered { id, .. } if id == event.id) {
                continue;
            }
            match Outcome::from_raw(event.what) {
                Some(Outcome::Expired) => {
                    held.phase = Phase::Reported(Instant::now());
                    // A connection to be destroyed, twheel has aborted.
                    if self.idle.action == Action::Shutdown
                        && let Err(error) = shut_down(&self.processes, held)
                    {
                        // If another process has it now, it gets a timer again.
                        log::debug!("cannot shut a socket down: {error}");
                        held.phase = Phase::New;
                        continue;
                    }
                    let idle = Duration::from_millis(event.idle.into());
                    report(held, idle, &self.idle, &mut lines)?;
                }
                Some(Outcome::Unseen) => {
                    held.phase = Phase::Unseen(Instant::now());
                    if !std::mem::replace(&mut held.is_unseen, true) {
                        say!(
                            "twheel: {} of process {}: the running twheel cannot tell whether it \
                             is idle (do its packets pass an interface that is watched?): the \
                             kernel is asked instead",
                            written(held.ends),
                            held.pid
                        );
                    }
                }
                // twheel no longer has the flow, but the socket may be open.
                Some(Outcome::Closed) | None => held.phase = Phase::New,
            }
        }
        match lines.is_empty() {
            true => Ok(()),
            false => while_read(|out| Ok(out.write_all(&lines)?)),
        }
    }
}

impl Held {
    /// For how long it has been idle by the kernel's times, since it was found.
    fn idle(&self, socket: BorrowedFd<'_>, life: u8) -> Duration {
        let told = idle_of(socket, life).unwrap_or_default();
        told.saturating_sub(*LAG).min(self.since.elapsed())
    }

    /// Whether a socket is to be registered.
    fn is_wanted(&mut self, socket: BorrowedFd<'_>, life: u8, timeout: u32) -> bool {
        let cookie = cookie_of(socket).unwrap_or(0);
        if cookie != self.cookie {
            (self.cookie, self.phase) = (cookie, Phase::New);
            (self.since, self.is_unseen) = (Instant::now(), false);
        }
        match Found::of(socket) {
            Found::Other => self.phase = Phase::Never,
            Found::Unconnected => {}
            Found::Connection(ends) => {
                self.ends = Some(ends);
                return match self.phase {
                    Phase::Reported(at) => {
                        // The latest life is either after the report, or at least a timeout before.
                        let before = at.elapsed() + Duration::from_millis(timeout.into()) / 2;
                        idle_of(socket, life).is_some_and(|idle| idle < before)
                    }
                    _ => true,
                };
            }
        }
        false
    }
}

/// Shuts a socket down, if its process still has it.
fn shut_down(processes: &Processes, held: &Held) -> io::Result<()> {
    let socket = processes.get(held.pid)?.take(held.descriptor)?;
    if cookie_of(socket.as_fd())? != held.cookie {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(shutdown(socket.as_raw_fd(), Shutdown::Both)?)
}

/// Why a connection is not registered.
fn why(error: i32) -> String {
    match error {
        libc::EXDEV => {
            "it is in another network namespace than twheel: run twheel there, too".to_owned()
        }
        libc::EEXIST => format!(
            "it has a timer of another program: it is tried again every {} s",
            AGAIN.as_secs()
        ),
        libc::EDQUOT => "this program, or its user, has as many timers as it may: give `twheel \
                         run` a larger --offload-limit or --offload-program-limit"
            .to_owned(),
        libc::ENOSPC => "the flow table is full: give `twheel run` a larger --max-flows".to_owned(),
        error => io::Error::from_raw_os_error(error).to_string(),
    }
}

fn written(ends: Option<Ends>) -> String {
    ends.map_or("a socket".to_owned(), |(local, remote)| {
        format!("{local} -> {remote}")
    })
}

/// Writes that a connection was idle.
fn report(held: &Held, passed: Duration, idle: &Idle, to: &mut Vec<u8>) -> io::Result<()> {
    if idle.json {
        let body = Line {
            local: held.ends.map(|(local, _)| local),
            remote: held.ends.map(|(_, remote)| remote),
            pid: held.pid,
            idle_us: passed.as_micros() as u64,
            action: match idle.action {
                Action::Notify => "notify",
                Action::Shutdown => "shutdown",
                Action::Destroy => "destroy",
            },
        };
        return json::write_now("idle", body, to);
    }
    let done = match idle.action {
        Action::Notify => "",
        Action::Shutdown => "  shut down",
        Action::Destroy => "  destroyed",
    };
    let (ends, pid, seconds) = (written(held.ends), held.pid, passed.as_secs_f64());
    writeln!(to, "idle     {ends}  process {pid}  {seconds:.1}s{done}")
}

/// What a line of JSON tells.
#[derive(Serialize)]
struct Line {
    #[serde(skip_serializing_if = "Option::is_none")]
    local: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<SocketAddr>,
    pid: u32,
    idle_us: u64,
    action: &'static str,
}
