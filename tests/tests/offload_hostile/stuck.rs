//! Descriptors that keep waiting whoever looks at them, or closes the last copy.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    ptr,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{UnixAddr, connect, setsockopt, sockopt::Linger},
};
use twheel_client::{
    Action, Outcome, cookie_of,
    protocol::{self, Kind, Op},
};
use twheel_tests::{netns::PATIENCE, pair::Connection};

use crate::{
    DATA, Lab, about, millis,
    raw::{Raw, unconnected},
    rights::{self, NOBODY, Other},
    start,
};

/// A connection whose client reads nothing. Who closes the server's end waits for an hour, unless
/// the client's is closed before.
fn lingering(lab: &Lab) -> Result<Connection> {
    let connection = lab.connect(0)?;
    let mut server = &connection.server;
    server.set_nonblocking(true)?;
    let much = vec![0; 1 << 16];
    while server.write(&much).is_ok() {}
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 3_600,
    };
    setsockopt(&connection.server, Linger, &linger)?;
    Ok(connection)
}

#[test]
fn a_descriptor_that_is_slow_to_close_holds_up_nobody_else() -> Result<()> {
    let lab = Lab::new("linger", &[])?;
    rights::open_to_all(&lab)?;
    let packet = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)]);
    let header = packet[..16].to_vec();
    for (what, packet, is_read_there) in [
        ("a registered one", packet.clone(), false),
        ("one that is read in its packet", packet, true),
        ("a refused one", header.clone(), false),
    ] {
        lab.withstands(what, || {
            let raw = lab.raw()?;
            let Connection { server, client, .. } = lingering(&lab)?;
            if is_read_there {
                cookie_of(server.as_fd())?;
            }
            lab.stopped(|| {
                raw.send(&packet, &[server.as_fd()])?;
                drop(server);
                Ok(())
            })?;
            ensure!(raw.replies()?.1.len() == 1);
            drop(raw);
            lab.serves()?;
            // What it has closed is now what has ended.
            drop(client);
            Ok(())
        })?;
    }
    lab.withstands("one that was never received", || {
        let raw = lab.raw()?;
        let Connection { server, client, .. } = lingering(&lab)?;
        lab.stopped(|| {
            // To twheel, a packet of no bytes is the end.
            raw.send(&[], &[])?;
            raw.send(&header, &[server.as_fd()])?;
            drop(server);
            Ok(())
        })?;
        ensure!(raw.receive()?.is_none());
        lab.serves()?;
        drop(client);
        Ok(())
    })?;
    lab.withstands("one of a program that finds no place", || {
        // Programs of a user have half of the places.
        let others = (0..PLACES).map(|_| lab.raw()).collect::<Result<Vec<_>>>()?;
        let Connection { server, client, .. } = lingering(&lab)?;
        let mut client = Some(client);
        let late = lab.stopped(|| {
            let late = early(&lab)?;
            match late.send(&header, &[server.as_fd()]) {
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => client = None,
                sent => sent?,
            }
            drop(server);
            Ok(late)
        })?;
        // A packet that was not received is an error of the connection, which is told first.
        let (_, replies) = late.replies().or_else(|_| late.replies())?;
        ensure!(replies[0].error == libc::EUSERS as u32);
        let other = Other::connect(&lab.path(), NOBODY)?;
        ensure!(other.raw.error(about(Op::Stop, 7), &[])? == libc::ENOENT);
        drop(client);
        drop((other, others));
        Ok(())
    })?;
    lab.end()
}

/// Programs of a user, at most.
const PLACES: usize = 512;

/// A connection that is not welcomed yet.
fn early(lab: &Lab) -> Result<Raw> {
    let socket = unconnected()?;
    connect(socket.as_raw_fd(), &UnixAddr::new(&lab.path())?)?;
    Ok(Raw::unread(socket))
}

/// A user whose connections take long to close has no more of them than of programs, and keeps out
/// nobody else.
#[test]
fn a_user_whose_connections_do_not_close_has_no_more_of_them() -> Result<()> {
    let lab = Lab::new("again", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("connections that are slow to close", || {
        let before = lab.standing()?.files;
        let Connection { server, client, .. } = lingering(&lab)?;
        let raw = lab.raw()?;
        let is_early_refused = lab.stopped(|| {
            raw.send(&[], &[])?;
            raw.send(&[1], &[server.as_fd()])?;
            let refused = early(&lab)?.send(&[1], &[std::io::stdin().as_fd()]);
            drop(server);
            Ok(refused.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)))
        })?;
        ensure!(raw.receive()?.is_none());
        // Those that find no place are closed at once, if nothing can have come with them.
        let (tries, mut refused) = (PLACES + 100, 0);
        for _ in 0..tries {
            let raw = early(&lab)?;
            let first = raw.receive()?.context("neither welcomed nor refused")?;
            refused += usize::from(protocol::kind(&first) == Some(Kind::Replies as u16));
        }
        let held = if is_early_refused { PLACES } else { tries + 2 };
        let now = lab.standing()?.files;
        ensure!(
            refused >= 100 && now <= before + held + 8,
            "{refused} were refused, {before} descriptors became {now}"
        );
        let other = Other::connect(&lab.path(), NOBODY)?;
        ensure!(other.raw.error(about(Op::Stop, 7), &[])? == libc::ENOENT);
        drop(client);
        Ok(())
    })?;
    lab.end()
}

/// A user whose descriptors do not close is not asked for more, and twheel holds only some of them.
#[test]
fn a_user_whose_descriptors_do_not_close_waits() -> Result<()> {
    let lab = Lab::new("slow", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("many that are slow to close", || {
        let before = lab.standing()?.files;
        let other = Other::connect(&lab.path(), NOBODY)?;
        let raw = &other.raw;
        let Connection { server, client, .. } = lingering(&lab)?;
        let null = std::fs::File::open("/dev/null")?;
        let header = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)])[..16].to_vec();
        lab.stopped(|| {
            raw.send(&header, &[server.as_fd()])?;
            drop(server);
            Ok(())
        })?;
        ensure!(raw.replies()?.1.len() == 1);
        let many = vec![null.as_raw_fd(); protocol::SOCKETS];
        // Those that are not received wait in the kernel.
        for _ in 0..50 {
            if raw.try_send(&header, &many).is_err() {
                break;
            }
        }
        std::thread::sleep(millis(300));
        let files = lab.standing()?.files;
        ensure!(
            files > before && files <= before + 3 * protocol::SOCKETS,
            "{before} descriptors became {files}"
        );
        lab.serves()?;
        // All is closed now, and it is asked again.
        drop(client);
        ensure!(raw.replies()?.1.len() == 1);
        drop(other);
        Ok(())
    })?;
    lab.end()
}

/// Who passes many goes on while another user's are slow to close, whether they are read in their
/// packet or received.
#[test]
fn who_passes_many_sockets_goes_on_beside_those_that_are_slow_to_close() -> Result<()> {
    let lab = Lab::new("many", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("sockets that are slow to close", || {
        let (other, own) = (Other::connect(&lab.path(), NOBODY)?, lab.raw()?);
        let served = (0..24).map(|at| lab.connect(at));
        let served = served.collect::<Result<Vec<_>>>()?;
        let header = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)])[..16].to_vec();
        let raw = lab.raw()?;
        let slow = (0..100).map(|_| lingering(&lab));
        let slow = slow.collect::<Result<Vec<_>>>()?;
        let clients: Vec<_> = lab.stopped(|| {
            let sockets: Vec<_> = slow.iter().map(|it| it.server.as_fd()).collect();
            raw.send(&header, &sockets)?;
            Ok(slow.into_iter().map(|it| it.client).collect())
        })?;
        ensure!(raw.replies()?.1.len() == 1);
        serves_many(&own, &served)?;
        let are_known = served
            .iter()
            .map(|it| cookie_of(it.server.as_fd()).map(drop));
        are_known.collect::<std::io::Result<()>>()?;
        for _ in 0..3 {
            serves_many(&own, &served)?;
        }
        // twheel closes one after the other, each for as long as its client lives, which is until the
        // other user was served twice more.
        for client in clients {
            serves_many(&other.raw, &served)?;
            serves_many(&other.raw, &served)?;
            drop(client);
        }
        serves_many(&other.raw, &served)?;
        drop((other, own, raw));
        Ok(())
    })?;
    lab.end()
}

/// A program's timers of all these connections are started with one packet, and stopped.
fn serves_many(raw: &Raw, connections: &[Connection]) -> Result<()> {
    let begun = Instant::now();
    let sockets: Vec<_> = connections.iter().map(|it| it.server.as_fd()).collect();
    let started = raw.ask(&vec![start(60_000, DATA, 6); sockets.len()], &sockets)?;
    let stops: Vec<_> = started.iter().map(|it| about(Op::Stop, it.id)).collect();
    let stopped = raw.ask(&stops, &[])?;
    let mut all = started.iter().chain(&stopped);
    ensure!(all.all(|it| it.error == 0), "{started:?} {stopped:?}");
    let took = begun.elapsed();
    ensure!(took < millis(1_000), "it took {took:?}");
    Ok(())
}

/// Memory that is there only when the test says so.
struct Withheld {
    handler: OwnedFd,
    at: *mut libc::c_void,
}

/// `struct uffdio_api`, `uffdio_register` and `uffdio_zeropage` of `include/uapi/linux/userfaultfd.h`,
/// and the numbers of their calls.
const API: (libc::c_ulong, u64) = (0xc018_aa3f, 0xaa);
const REGISTER: (libc::c_ulong, u64) = (0xc020_aa00, 1);
const ZEROPAGE: libc::c_ulong = 0xc020_aa04;

impl Withheld {
    fn new() -> Result<Self> {
        // Else it cannot be waited for.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: a call without pointers; what it returns is this process's alone.
        let handler = unsafe {
            let descriptor = libc::syscall(libc::SYS_userfaultfd, flags);
            nix::errno::Errno::result(descriptor)?;
            OwnedFd::from_raw_fd(descriptor as i32)
        };
        let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at a place that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) };
        ensure!(at != libc::MAP_FAILED, "no memory");
        let withheld = Self { handler, at };
        withheld.ask(API.0, &mut [API.1, 0, 0])?;
        let (from, length) = withheld.range();
        withheld.ask(REGISTER.0, &mut [from, length, REGISTER.1, 0])?;
        Ok(withheld)
    }

    fn range(&self) -> (u64, u64) {
        (self.at as u64, PAGE as u64)
    }

    fn ask(&self, call: libc::c_ulong, words: &mut [u64]) -> Result<()> {
        // SAFETY: the structure of each call has as many words.
        let done = unsafe { libc::ioctl(self.handler.as_raw_fd(), call, words.as_mut_ptr()) };
        nix::errno::Errno::result(done)?;
        Ok(())
    }

    /// Sends it through a socket, which is locked until it is there.
    fn send(&self, socket: &TcpStream) -> Result<()> {
        let (socket, at) = (socket.as_raw_fd(), self.at);
        // SAFETY: a page, which is mapped for as long as this.
        let sent = unsafe { libc::send(socket, at, PAGE, libc::MSG_NOSIGNAL) };
        ensure!(sent == PAGE as isize, "{sent} bytes were sent");
        Ok(())
    }

    /// Waits until the kernel waits for it, and so has locked the socket.
    fn await_wanted(&self) -> Result<()> {
        let mut awaited = [PollFd::new(self.handler.as_fd(), PollFlags::POLLIN)];
        poll(&mut awaited, PollTimeout::try_from(PATIENCE)?)?;
        let is_wanted = awaited[0].revents() == Some(PollFlags::POLLIN);
        ensure!(is_wanted, "nobody sends the memory: {awaited:?}");
        Ok(())
    }

    /// Lets it be there.
    fn appear(&self) -> Result<()> {
        let (from, length) = self.range();
        self.ask(ZEROPAGE, &mut [from, length, 0, 0])
    }
}

const PAGE: usize = 4_096;

// SAFETY: the memory is read and written by the kernel alone.
unsafe impl Sync for Withheld {}

impl Drop for Withheld {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and used by nobody any longer.
        unsafe { libc::munmap(self.at, PAGE) };
    }
}

/// Whoever looks at a socket waits while data is sent from memory that comes late.
#[test]
fn a_socket_that_is_locked_holds_up_nobody_else() -> Result<()> {
    let lab = Lab::new("locked", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("a locked socket", || {
        let other = Other::connect(&lab.path(), NOBODY)?;
        let (raw, withheld) = (&other.raw, Withheld::new()?);
        let Connection { server, client, .. } = lab.connect(0)?;
        let packet = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)]);
        std::thread::scope(|scope| -> Result<()> {
            let sender = scope.spawn(|| withheld.send(&server));
            let looked = (|| {
                withheld.await_wanted()?;
                ensure!(!sender.is_finished(), "the memory was there");
                raw.send(&packet, &[server.as_fd()])?;
                raw.send(&packet[..16], &[])?;
                ensure!(!raw.is_ready(millis(300))?, "it was not locked");
                lab.serves()
            })();
            withheld.appear()?;
            sender.join().expect("the sender panicked")?;
            looked
        })?;
        // In the order in which it was asked.
        let (number, replies) = raw.replies()?;
        ensure!(number == 9 && replies[0].error == 0, "{replies:?}");
        ensure!(raw.replies()?.1[0].error != 0);
        drop((client, other));
        Ok(())
    })?;
    lab.end()
}

/// So does whoever asks the kernel of the socket when its timer is over, or has it end the connection.
#[test]
fn a_socket_that_is_locked_at_its_end_holds_up_nobody_else() -> Result<()> {
    let lab = Lab::new("end", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("a socket that is locked when it is to be destroyed", || {
        let other = Other::connect(&lab.path(), NOBODY)?;
        let (raw, withheld) = (&other.raw, Withheld::new()?);
        let Connection { server, client, .. } = lab.connect(0)?;
        let mut request = start(500, DATA, 5);
        request.action = Action::Destroy as u8;
        ensure!(raw.error(request, &[server.as_fd()])? == 0);
        std::thread::scope(|scope| -> Result<()> {
            let sender = scope.spawn(|| withheld.send(&server));
            let served = (|| {
                withheld.await_wanted()?;
                std::thread::sleep(millis(200));
                ensure!(!sender.is_finished(), "the memory was there");
                ensure!(!raw.is_ready(millis(700))?, "it was not locked");
                lab.serves()
            })();
            withheld.appear()?;
            sender.join().expect("the sender panicked")?;
            served
        })?;
        let events = raw.events()?;
        ensure!(events[0].what == Outcome::Expired as u32, "{events:?}");
        let end = std::io::copy(&mut &client, &mut std::io::sink());
        let end = end.expect_err("an end in order").kind();
        ensure!(end == std::io::ErrorKind::ConnectionReset, "{end}");
        drop(other);
        Ok(())
    })?;
    lab.end()
}

/// A socket that is read in its packet is not waited for.
#[test]
fn a_socket_that_is_locked_is_read_in_its_packet() -> Result<()> {
    let lab = Lab::new("read", &[])?;
    lab.withstands("a locked socket that is known", || {
        let (raw, withheld) = (lab.raw()?, Withheld::new()?);
        let Connection { server, client, .. } = lab.connect(0)?;
        let cookie = cookie_of(server.as_fd())?;
        std::thread::scope(|scope| -> Result<()> {
            let sender = scope.spawn(|| withheld.send(&server));
            let wanted = withheld.await_wanted();
            let started = raw.ask(&[start(60_000, DATA, 5)], &[server.as_fd()]);
            let is_locked = !sender.is_finished();
            withheld.appear()?;
            sender.join().expect("the sender panicked")?;
            wanted?;
            let started = started?[0];
            ensure!(is_locked, "the memory was there");
            ensure!(
                (started.error, started.cookie) == (0, cookie),
                "{started:?}"
            );
            Ok(())
        })?;
        drop(client);
        Ok(())
    })?;
    lab.end()
}

/// Ends of which the kernel is being asked are their user's also when their program has ended. And a
/// connection is not ended that has a packet meanwhile.
#[test]
fn what_the_kernel_is_asked_of_is_its_users() -> Result<()> {
    let lab = Lab::new("asked", &["--offload-limit", "10"])?;
    rights::open_to_all(&lab)?;
    lab.withstands("ends that wait behind a locked socket", || {
        let other = || Other::connect(&lab.path(), NOBODY);
        let (first, second, third) = (other()?, other()?, other()?);
        let connections = (0..16).map(|at| lab.connect(at));
        let all = connections.collect::<Result<Vec<_>>>()?;
        for it in &all {
            cookie_of(it.server.as_fd())?;
        }
        let destroy = |timeout| {
            let mut request = start(timeout, DATA, 5);
            request.action = Action::Destroy as u8;
            request
        };
        let start_all = |other: &Other, request, some: &[Connection]| {
            let started = some.iter().map(|it| {
                let sockets = [it.server.as_fd()];
                other.raw.error(request, &sockets)
            });
            started.collect::<Result<Vec<_>>>()
        };
        let withheld = Withheld::new()?;
        ensure!(start_all(&first, destroy(300), &all[..1])? == [0]);
        std::thread::scope(|scope| -> Result<()> {
            let sender = scope.spawn(|| withheld.send(&all[0].server));
            let looked = (|| {
                withheld.await_wanted()?;
                std::thread::sleep(millis(700));
                ensure!(!sender.is_finished(), "the memory was there");
                ensure!(start_all(&second, destroy(100), &all[1..6])? == [0; 5]);
                std::thread::sleep(millis(400));
                drop(second);
                for it in &all[1..3] {
                    (&it.client).write_all(b"!")?;
                }
                let started = start_all(&third, start(60_000, DATA, 6), &all[6..])?;
                let refused = [libc::EDQUOT; 6];
                ensure!(
                    started[..4] == [0; 4] && started[4..] == refused,
                    "{started:?}"
                );
                lab.serves()
            })();
            withheld.appear()?;
            sender.join().expect("the sender panicked")?;
            looked
        })?;
        let is_open = |it: &Connection| {
            it.client.set_nonblocking(true)?;
            let read = (&it.client).read(&mut [0]);
            Ok(read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock))
        };
        // There is room for six more once all six are answered, and no earlier.
        let end = Instant::now() + PATIENCE;
        for it in all[10..].chunks(1) {
            while start_all(&third, start(60_000, DATA, 6), it)? != [0] {
                ensure!(Instant::now() < end, "they are not answered");
            }
        }
        let open = all[1..6].iter().map(is_open).collect::<Result<Vec<_>>>()?;
        ensure!(open == [true, true, false, false, false], "{open:?}");
        drop((first, third));
        Ok(())
    })?;
    lab.end()
}
