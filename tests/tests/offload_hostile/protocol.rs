//! Wrong messages, wrong descriptors, and guesses.

use std::{
    fs::File,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    thread,
    time::Instant,
};

use anyhow::{Result, ensure};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags},
    eventfd::EventFd,
    socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
        getpeername, getsockname, socket,
    },
};
use twheel::offload::rights;
use twheel_client::{
    Outcome,
    protocol::{self, BATCH, Kind, MAX_PACKET, Op, Request, SOCKETS},
};
use twheel_tests::pair::{Connection, Family};
use zerocopy::IntoBytes;

use crate::{DATA, LATE, Lab, about, millis, reclaim, start};

#[test]
fn a_packet_that_is_none_is_refused_and_nothing_is_kept() -> Result<()> {
    let lab = Lab::new("packets", &[])?;
    let connection = lab.connect(0)?;
    let sockets = [connection.server.as_fd()];
    let good = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 1)]);
    lab.withstands("wrong packets", || {
        let raw = lab.raw()?;
        for cut in 1..good.len() {
            ensure!(
                raw.refused(&good[..cut], &sockets)? == libc::EPROTO,
                "cut to {cut} bytes"
            );
        }
        for (version, error) in [(0, libc::EPROTONOSUPPORT), (2, libc::EPROTONOSUPPORT)] {
            let mut packet = good.clone();
            packet[0] = version;
            ensure!(raw.refused(&packet, &sockets)? == error, "{version}");
        }
        for kind in [0_u16, 2, 3, 4, 5, u16::MAX] {
            let mut packet = good.clone();
            packet[2..4].copy_from_slice(kind.as_bytes());
            ensure!(raw.refused(&packet, &sockets)? == libc::EPROTO, "{kind}");
        }
        for (entries, error) in [
            (0_u32, libc::EPROTO),
            (2, libc::EPROTO),
            (BATCH as u32, libc::EPROTO),
            (BATCH as u32 + 1, libc::E2BIG),
            (u32::MAX, libc::E2BIG),
        ] {
            let mut packet = good.clone();
            packet[4..8].copy_from_slice(entries.as_bytes());
            ensure!(raw.refused(&packet, &sockets)? == error, "{entries}");
        }
        let most = vec![about(Op::Stop, 7); BATCH];
        let replies = raw.ask(&most, &sockets)?;
        ensure!(
            replies.iter().all(|it| it.error == libc::ENOENT as u32),
            "{replies:?}"
        );
        let longest = protocol::write(Kind::Requests, 9, &most);
        ensure!(longest.len() == MAX_PACKET);
        for more in [1, 50_000, 120_000] {
            let packet = [&longest[..], &vec![0; more]].concat();
            ensure!(
                raw.refused(&packet, &sockets)? == libc::EMSGSIZE,
                "{more} bytes more"
            );
        }
        Ok(())
    })?;
    // To the kernel a packet of no bytes is the end of the connection.
    lab.withstands("an empty packet", || {
        let raw = lab.raw()?;
        raw.send(&[], &sockets)?;
        ensure!(raw.receive()?.is_none(), "the connection goes on");
        Ok(())
    })?;
    lab.withstands("wrong requests", || {
        let raw = lab.raw()?;
        let good = start(60_000, DATA, 1);
        let longest = 10 * 86_400_000;
        for (bad, error) in [
            (Request { timeout: 0, ..good }, libc::EINVAL),
            (
                Request {
                    timeout: longest + 1,
                    ..good
                },
                libc::EINVAL,
            ),
            (Request { life: 0, ..good }, libc::EINVAL),
            (Request { life: 15, ..good }, libc::EINVAL),
            (Request { action: 3, ..good }, libc::EINVAL),
            (Request { flags: 2, ..good }, libc::EINVAL),
            (Request { flags: 255, ..good }, libc::EINVAL),
            (Request { op: 0, ..good }, libc::EOPNOTSUPP),
            (Request { op: 255, ..good }, libc::EOPNOTSUPP),
        ] {
            let found = raw.error(bad, &sockets)?;
            ensure!(found == error, "{bad:?}: {found}");
        }
        // The longest timeout is one.
        let longest = Request {
            timeout: longest,
            ..good
        };
        ensure!(raw.error(longest, &sockets)? == 0);
        Ok(())
    })?;
    lab.end()
}

#[test]
fn wrong_descriptors_are_refused_and_closed() -> Result<()> {
    let lab = Lab::new("descriptors", &[])?;
    let connections = [lab.connect(0)?, lab.connect(1)?, lab.connect(2)?];
    let [first, second, third] = &connections;
    let good = start(60_000, DATA, 1);
    let null = File::open("/dev/null")?;
    let tcp = |kind, protocol| -> Result<OwnedFd> {
        Ok(socket(
            AddressFamily::Inet,
            kind,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?)
    };
    lab.withstands("descriptors of other kinds", || {
        let raw = lab.raw()?;
        let pipe = nix::unistd::pipe()?;
        let path = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open("/dev/null")?;
        let (unix, _other) = UnixStream::pair()?;
        let (listening, udp, unconnected, bare) = lab.pair.server.enter(|| {
            Ok((
                TcpListener::bind("127.0.0.1:0")?,
                UdpSocket::bind("127.0.0.1:0")?,
                tcp(SockType::Stream, None)?,
                tcp(SockType::Raw, Some(SockProtocol::Tcp))?,
            ))
        })?;
        let halved = lab.connect(0)?;
        halved.server.shutdown(std::net::Shutdown::Write)?;
        let reset = lab.connect(1)?;
        let reset_server = reset.server.try_clone()?;
        reset.reset()?;
        let (event, epoll) = (EventFd::new()?, Epoll::new(EpollCreateFlags::empty())?.0);
        let directory = File::open("/")?;
        let others = [
            ("a device", null.as_fd(), libc::ENOTSOCK),
            ("a pipe", pipe.0.as_fd(), libc::ENOTSOCK),
            ("an eventfd", event.as_fd(), libc::ENOTSOCK),
            ("an epoll", epoll.as_fd(), libc::ENOTSOCK),
            ("a directory", directory.as_fd(), libc::ENOTSOCK),
            ("a mere path", path.as_fd(), libc::ENOTSOCK),
            ("a Unix socket", unix.as_fd(), libc::EPROTOTYPE),
            ("the connection to twheel", raw.as_fd(), libc::EPROTOTYPE),
            ("UDP", udp.as_fd(), libc::EPROTOTYPE),
            ("a raw socket", bare.as_fd(), libc::EPROTOTYPE),
            ("a listening socket", listening.as_fd(), libc::ENOTCONN),
            ("a new socket", unconnected.as_fd(), libc::ENOTCONN),
            ("a half-closed one", halved.server.as_fd(), libc::ENOTCONN),
            ("a reset one", reset_server.as_fd(), libc::ENOTCONN),
            ("another namespace's", first.client.as_fd(), libc::EXDEV),
        ];
        for (what, passed, error) in others {
            let found = raw.error(good, &[passed])?;
            ensure!(found == error, "{what}: {found}, not {error}");
        }
        // The same among connections, of which as many are read at once.
        let served = (0..others.len()).map(|at| lab.connect(at));
        let served = served.collect::<Result<Vec<_>>>()?;
        let mixed: Vec<_> = served
            .iter()
            .zip(others)
            .flat_map(|(connection, (_, other, _))| [connection.server.as_fd(), other])
            .collect();
        let replies = raw.ask(&vec![good; mixed.len()], &mixed)?;
        let namespace = lab.pair.server.enter(|| Ok(rights::namespace()?))?;
        for (at, (what, _, error)) in others.into_iter().enumerate() {
            let (connection, found) = (&replies[2 * at], replies[2 * at + 1].error as i32);
            ensure!(found == error, "{what}: {found}, not {error}");
            let passed = rights::passed(mixed[2 * at], namespace, |_| false);
            let passed = passed.map_err(std::io::Error::from_raw_os_error)?;
            ensure!(
                (connection.error, connection.cookie) == (0, passed.cookie),
                "{connection:?}, not {passed:?}"
            );
        }
        Ok(())
    })?;
    lab.withstands("a raw socket with the endpoints of a connection", || {
        let raw = lab.raw()?;
        // A raw socket's own port is its protocol's number.
        let server = SocketAddr::new(Family::V4.server(), libc::IPPROTO_TCP as u16);
        let listener = lab.pair.server.enter(|| Ok(TcpListener::bind(server)?))?;
        let mut connection = Connection::open(&lab.pair.client, &listener)?;
        connection.talk()?;
        let of = |address: SocketAddr| SockaddrStorage::from(address);
        let ends = (server, connection.server.peer_addr()?);
        let bare = lab.pair.server.enter(|| {
            let bare = tcp(SockType::Raw, Some(SockProtocol::Tcp))?;
            bind(bare.as_raw_fd(), &of(SocketAddr::new(ends.0.ip(), 0)))?;
            connect(bare.as_raw_fd(), &of(ends.1))?;
            Ok(bare)
        })?;
        let its = (
            getsockname(bare.as_raw_fd())?,
            getpeername(bare.as_raw_fd())?,
        );
        ensure!(its == (of(ends.0), of(ends.1)), "{its:?}");
        let found = raw.error(good, &[bare.as_fd()])?;
        ensure!(found == libc::EPROTOTYPE, "{found}");
        ensure!(raw.error(good, &[connection.server.as_fd()])? == 0);
        Ok(())
    })?;
    lab.withstands("more and fewer descriptors than starts", || {
        let raw = lab.raw()?;
        let most = vec![null.as_fd(); SOCKETS];
        let header = &protocol::write(Kind::Requests, 9, &[good])[..16];
        for _ in 0..20 {
            ensure!(raw.refused(header, &most)? == libc::EPROTO);
            ensure!(raw.refused(&header[..1], &most)? == libc::EPROTO);
            ensure!(raw.error(about(Op::Stop, 7), &most)? == libc::ENOENT);
        }
        let found = raw.error(
            good,
            &[vec![first.server.as_fd()], most[1..].to_vec()].concat(),
        )?;
        ensure!(found == 0, "{found}");
        let errors: Vec<_> = raw
            .ask(&vec![good; SOCKETS], &[second.server.as_fd(), null.as_fd()])?
            .iter()
            .map(|it| it.error as i32)
            .collect();
        ensure!(errors[..2] == [0, libc::ENOTSOCK], "{errors:?}");
        ensure!(
            errors[2..].iter().all(|it| *it == libc::EBADF),
            "{errors:?}"
        );
        // Each start without endpoints takes one, also a wrong one.
        let bad = Request { timeout: 0, ..good };
        let sockets = [first.server.as_fd(), third.server.as_fd()];
        let replies = raw.ask(&[bad, good], &sockets)?;
        let errors = [0, 1].map(|at| replies[at].error as i32);
        ensure!(errors == [libc::EINVAL, 0], "{errors:?}");
        Ok(())
    })?;
    lab.withstands("a socket that its program closes at once", || {
        let raw = lab.raw()?;
        let connection = lab.connect(0)?;
        let packet = protocol::write(Kind::Requests, 9, &[start(300, DATA, 5)]);
        // So twheel has the only descriptor.
        lab.stopped(|| {
            raw.send(&packet, &[connection.server.as_fd()])?;
            drop(connection.server);
            Ok(())
        })?;
        let (_, replies) = raw.replies()?;
        ensure!(replies[0].error == 0, "{replies:?}");
        let [event] = raw.events()?[..] else {
            anyhow::bail!("not one event");
        };
        let ends = [Outcome::Expired as u32, Outcome::Closed as u32];
        ensure!(ends.contains(&event.what) && event.tag == 5, "{event:?}");
        Ok(())
    })?;
    lab.end()
}

#[test]
fn guesses_reach_no_other_program() -> Result<()> {
    let lab = Lab::new("guesses", &["--max-flows", "4096"])?;
    let connection = lab.connect(0)?;
    let victim = lab.raw()?;
    lab.withstands("guesses", || {
        let reply = victim.ask(&[start(700, DATA, 3)], &[connection.server.as_fd()])?[0];
        let begun = Instant::now();
        ensure!(reply.error == 0, "{reply:?}");
        let guesser = lab.raw()?;
        let mut ids = vec![
            reply.id,
            reply.id ^ 1 << 48,
            reply.id | 1 << 63,
            reply.id ^ 1 << 32,
            0,
            u64::MAX,
            u64::from(u32::MAX),
            1 << 31,
        ];
        // All records, those behind the table's end too, and some generations.
        let generations = (0..3).map(|it| it << 32);
        ids.extend(generations.flat_map(|generation| (0..6_000).map(move |it| it | generation)));
        for op in [Op::Stop, Op::Restart, Op::Reclaim] {
            for some in ids.chunks(BATCH) {
                let request = |id: &u64| Request {
                    timeout: 60_000,
                    life: DATA,
                    cookie: reply.cookie,
                    token: reply.token ^ 1,
                    ..about(op, *id)
                };
                let requests: Vec<_> = some.iter().map(request).collect();
                let wanted = match op {
                    Op::Reclaim => libc::EPERM,
                    _ => libc::ENOENT,
                };
                for (request, reply) in requests.iter().zip(guesser.ask(&requests, &[])?) {
                    ensure!(reply.error as i32 == wanted, "{request:?}: {reply:?}");
                }
            }
        }
        // The right token names a registration that is held.
        let right = reclaim(60_000, &reply);
        ensure!(guesser.error(right, &[])? == libc::EEXIST);
        let [event] = victim.events()?[..] else {
            anyhow::bail!("not one event");
        };
        ensure!((event.what, event.tag) == (Outcome::Expired as u32, 3));
        ensure!(
            begun.elapsed() <= millis(700) + LATE,
            "{:?}",
            begun.elapsed()
        );
        // Nothing is there to be reclaimed now.
        ensure!(guesser.error(right, &[])? == libc::ENOENT);
        thread::sleep(millis(50));
        ensure!(victim.try_receive().is_err(), "a second end");
        Ok(())
    })?;
    drop(victim);
    lab.end()
}
