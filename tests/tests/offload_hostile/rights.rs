//! Who may do what: other users, and programs with and without CAP_NET_ADMIN.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{SockaddrLike, UnixAddr},
        wait::{Id, WaitPidFlag, waitid, waitpid},
    },
    unistd::{ForkResult, Pid, fork, pipe, read},
};
use twheel_client::{
    Outcome,
    protocol::{Op, Request},
};
use twheel_tests::netns::PATIENCE;

use crate::{
    DATA, Lab, about,
    raw::{Raw, unconnected},
    reclaim, start, start_nobodys,
};

/// Who a process is when it connects.
#[derive(Clone, Copy)]
pub struct Who {
    /// Its user.
    pub uid: u32,
    /// It has CAP_NET_ADMIN.
    pub is_admin: bool,
    /// It is root again after it has connected, as one is that runs a set-user-ID program.
    pub returns: bool,
}

/// A user without rights.
pub const NOBODY: Who = Who {
    uid: crate::NOBODY,
    is_admin: false,
    returns: false,
};

/// Another process, which has connected, and waits until this is dropped.
pub struct Other {
    child: Pid,
    pub raw: Raw,
}

impl Other {
    /// Starts it, and reads the welcome.
    pub fn connect(path: &Path, who: Who) -> Result<Self> {
        let (child, socket) = Self::begin(path, who)?;
        match Raw::welcomed(socket) {
            Ok(raw) => Ok(Self { child, raw }),
            Err(error) => {
                end(child);
                Err(error)
            }
        }
    }

    /// Starts it. Returns its socket when it has connected.
    fn begin(path: &Path, who: Who) -> Result<(Pid, OwnedFd)> {
        let (socket, address) = (unconnected()?, UnixAddr::new(path)?);
        let (told, tells) = pipe()?;
        let (socket_fd, tells_fd) = (socket.as_raw_fd(), tells.as_raw_fd());
        // SAFETY: the child makes system calls with what was made before, and allocates nothing.
        match unsafe { fork() }? {
            // SAFETY: as above; the address has as many bytes as the call says.
            ForkResult::Child => unsafe {
                let done = become_and_connect(who, [socket_fd, tells_fd], &address);
                libc::write(4, (&raw const done).cast(), 1);
                loop {
                    libc::pause();
                }
            },
            ForkResult::Parent { child } => {
                drop(tells);
                let mut done = [0];
                let length = loop {
                    match read(&told, &mut done) {
                        Err(nix::Error::EINTR) => {}
                        length => break length?,
                    }
                };
                if (length, done) != (1, [0]) {
                    end(child);
                    anyhow::bail!("another process cannot connect: step {done:?}");
                }
                Ok((child, socket))
            }
        }
    }
}

/// # Safety
///
/// Called in a child after `fork`. The descriptors are a socket and a pipe, which become 3 and 4,
/// and all others are closed.
unsafe fn become_and_connect(who: Who, descriptors: [i32; 2], address: &UnixAddr) -> u8 {
    // `include/uapi/linux/capability.h`.
    const VERSION: u32 = 0x2008_0522;
    const NET_ADMIN: u32 = 1 << 12;
    let Who {
        uid,
        is_admin,
        returns,
    } = who;
    // SAFETY: system calls with local buffers that outlive them; the process has one thread.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Above all that may be open.
        let above = descriptors.map(|it| libc::fcntl(it, libc::F_DUPFD, 10_000));
        libc::dup2(above[0], 3);
        libc::dup2(above[1], 4);
        // The connections of other tests must end with these.
        if libc::syscall(libc::SYS_close_range, 5, u32::MAX, 0) != 0 {
            return 1;
        }
        if libc::prctl(libc::PR_SET_KEEPCAPS, 1) != 0 {
            return 2;
        }
        let saved = if returns { 0 } else { uid };
        if libc::syscall(libc::SYS_setresuid, uid, uid, saved) != 0 {
            return 3;
        }
        if !returns {
            let header = [VERSION, 0];
            let has = if is_admin { NET_ADMIN } else { 0 };
            let capabilities = [has, has, 0, 0, 0, 0];
            if libc::syscall(libc::SYS_capset, header.as_ptr(), capabilities.as_ptr()) != 0 {
                return 4;
            }
        }
        if libc::connect(3, address.as_ptr().cast(), address.len()) != 0 {
            return 5;
        }
        if returns && libc::syscall(libc::SYS_setresuid, u32::MAX, 0, u32::MAX) != 0 {
            return 6;
        }
        0
    }
}

fn end(child: Pid) {
    // Both fail only if it has been waited for.
    let _ = kill(child, Signal::SIGKILL);
    let _ = waitpid(child, None);
}

/// The error number with which another process, which is ended then, is answered.
fn error_of((child, socket): (Pid, OwnedFd), request: Request) -> Result<i32> {
    let found = Raw::welcomed(socket).and_then(|raw| raw.error(request, &[]));
    end(child);
    found
}

impl Drop for Other {
    fn drop(&mut self) {
        end(self.child);
    }
}

/// A lab whose socket everybody may use.
fn open_lab(name: &str, more: &[&str]) -> Result<Lab> {
    let lab = Lab::new(name, more)?;
    open_to_all(&lab)?;
    Ok(lab)
}

/// Lets everybody connect.
pub fn open_to_all(lab: &Lab) -> Result<()> {
    use std::{fs, os::unix::fs::PermissionsExt};
    let all = |mode| fs::Permissions::from_mode(mode);
    fs::set_permissions(&lab.directory.0, all(0o755))?;
    fs::set_permissions(lab.path(), all(0o666)).context("cannot open the socket to all")
}

#[test]
fn only_who_may_connect_does() -> Result<()> {
    let lab = Lab::new("mode", &[])?;
    std::fs::set_permissions(
        &lab.directory.0,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    ensure!(
        Other::connect(&lab.path(), NOBODY).is_err(),
        "the socket has another mode"
    );
    lab.end()
}

#[test]
fn endpoints_are_named_by_administrators_alone() -> Result<()> {
    let lab = open_lab("named", &[])?;
    let connection = lab.connect(0)?;
    let mut named = start(60_000, DATA, 1);
    named.name(connection.server.local_addr()?, connection.name);
    for (what, who, error) in [
        ("nobody", NOBODY, libc::EPERM),
        (
            "root without the capability",
            Who { uid: 0, ..NOBODY },
            libc::EPERM,
        ),
        (
            "nobody with it",
            Who {
                is_admin: true,
                ..NOBODY
            },
            0,
        ),
    ] {
        lab.withstands(what, || {
            let other = Other::connect(&lab.path(), who)?;
            let found = other.raw.error(named, &[])?;
            ensure!(found == error, "{found}");
            // Endpoints that a socket goes with are not looked at.
            let found = other.raw.error(named, &[connection.server.as_fd()])?;
            ensure!(found == if error == 0 { libc::EEXIST } else { error });
            // The connection of a socket is registered by whoever has it.
            let own = lab.connect(1)?;
            let found = other
                .raw
                .error(start(60_000, DATA, 2), &[own.server.as_fd()])?;
            ensure!(found == 0, "with a socket: {found}");
            Ok(())
        })?;
    }
    // It has connected as nobody, and runs a program of root's before twheel looks at it.
    lab.withstands("who has become root since", || {
        let returns = Who {
            returns: true,
            ..NOBODY
        };
        let other = lab.stopped(|| Other::begin(&lab.path(), returns))?;
        let found = error_of(other, named)?;
        ensure!(found == libc::EPERM, "{found}");
        Ok(())
    })?;
    // It has ended before twheel looks at it: another process may have its number then.
    lab.withstands("who has ended since", || {
        let admin = Who {
            is_admin: true,
            ..NOBODY
        };
        let other = lab.stopped(|| {
            let begun = Other::begin(&lab.path(), admin)?;
            kill(begun.0, Signal::SIGKILL)?;
            // Its number is still its own.
            waitid(
                Id::Pid(begun.0),
                WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT,
            )?;
            Ok(begun)
        })?;
        let found = error_of(other, named)?;
        ensure!(found == libc::EPERM, "{found}");
        Ok(())
    })?;
    lab.end()
}

#[test]
fn named_connections_need_not_exist() -> Result<()> {
    let lab = Lab::new(
        "nobodys",
        &["--max-flows", "1024", "--offload-limit", "100000"],
    )?;
    lab.withstands("odd endpoints", || {
        let raw = lab.raw()?;
        for (local, remote) in [
            ("0.0.0.0:0", "0.0.0.0:0"),
            ("10.77.0.2:7777", "10.77.0.2:7777"),
            ("255.255.255.255:65535", "224.0.0.1:1"),
            ("10.77.0.2:7777", "[fd77::1]:9"),
            ("[::]:0", "[ff02::1]:0"),
        ] {
            let mut request = start(200, DATA, 1);
            request.name(local.parse()?, remote.parse()?);
            let replies = raw.ask(&[request], &[])?;
            ensure!(replies[0].error == 0, "{local}, {remote}: {replies:?}");
            let events = raw.events()?;
            ensure!(events.len() == 1 && events[0].id == replies[0].id);
        }
        Ok(())
    })?;
    // Until the table is full.
    let raw = lab.raw()?;
    let mut registered = 0;
    let refused = loop {
        let requests: Vec<_> = (registered..registered + 500)
            .map(|number| start_nobodys(60_000, number, 1))
            .collect();
        let replies = raw.ask(&requests, &[])?;
        let held = replies.iter().filter(|it| it.error == 0).count();
        registered += held as u32;
        if held < replies.len() {
            break replies
                .iter()
                .find(|it| it.error != 0)
                .map(|it| it.error as i32);
        }
    };
    println!("{registered} of 1,024 records");
    ensure!(refused == Some(libc::ENOSPC), "{refused:?}");
    ensure!(registered > 600, "{registered}");
    let begun = Instant::now();
    drop(raw);
    while lab.standing()?.registered != 0 {
        ensure!(begun.elapsed() < PATIENCE / 6, "they stay registered");
    }
    lab.end()
}

#[test]
fn a_token_is_of_its_user() -> Result<()> {
    let lab = open_lab("tokens", &["--keep"])?;
    let connection = lab.connect(0)?;
    let raw = lab.raw()?;
    let reply = raw.ask(&[start(60_000, DATA, 1)], &[connection.server.as_fd()])?[0];
    ensure!(reply.error == 0, "{reply:?}");
    let right = reclaim(60_000, &reply);
    // While it is held, and when another run waits for it to be reclaimed.
    let other = Other::connect(&lab.path(), NOBODY)?;
    ensure!(other.raw.error(right, &[])? == libc::EPERM);
    drop(other);
    let lab = lab.killed_and_restarted()?;
    open_to_all(&lab)?;
    let other = Other::connect(&lab.path(), NOBODY)?;
    ensure!(other.raw.error(right, &[])? == libc::EPERM);
    let raw = lab.raw()?;
    for wrong in [
        Request { token: 0, ..right },
        Request {
            cookie: right.cookie ^ 1,
            ..right
        },
        Request {
            id: right.id ^ 1,
            ..right
        },
        Request {
            id: right.id ^ 1 << 48,
            ..right
        },
        Request {
            token: right.token ^ 1 << 63,
            ..right
        },
    ] {
        ensure!(raw.error(wrong, &[])? == libc::EPERM, "{wrong:?}");
    }
    // It is held by whoever comes first, once.
    ensure!(raw.error(right, &[])? == 0);
    ensure!(raw.error(right, &[])? == libc::EEXIST);
    ensure!(raw.error(about(Op::Stop, right.id), &[])? == 0);
    ensure!(raw.error(right, &[])? == libc::ENOENT);
    drop((raw, other));
    let ended = lab.twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

/// twheel sees none of its packets, before it is restarted and after.
#[test]
fn what_is_reclaimed_unseen_is_not_taken_for_idle() -> Result<()> {
    let lab = Lab::new("reclaimed", &["--keep"])?;
    let (one, other) = lab.pair.server.enter(|| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let one = TcpStream::connect(listener.local_addr()?)?;
        Ok((one, listener.accept()?.0))
    })?;
    let raw = lab.raw()?;
    let reply = raw.ask(&[start(60_000, DATA, 1)], &[one.as_fd()])?[0];
    ensure!(reply.error == 0, "{reply:?}");
    let lab = lab.killed_and_restarted()?;
    let raw = lab.raw()?;
    ensure!(raw.error(reclaim(700, &reply), &[])? == 0);
    let end = Instant::now() + PATIENCE / 6;
    let events = loop {
        (&other).write_all(b"!")?;
        let events = raw.events_within(crate::millis(20))?;
        if !events.is_empty() {
            break events;
        }
        ensure!(Instant::now() < end, "nothing is told");
    };
    ensure!(events[0].what == Outcome::Unseen as u32, "{events:?}");
    drop(raw);
    let ended = lab.twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}
