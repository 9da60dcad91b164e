//! Reads sockets that were passed, in the packet that waits, and compares the result with that of system
//! calls for each.
#![allow(missing_docs)]

use std::{
    fs::{File, OpenOptions},
    io::IoSliceMut,
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    cmsg_space, libc,
    sys::socket::{
        AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockProtocol,
        SockType, SockaddrIn, bind, connect, recvmsg, sendmsg, socket, socketpair,
    },
    unistd::close,
};
use twheel::offload::{passed::SocketReader, rights};
use twheel_client::{cookie_of, protocol::SOCKETS};
use twheel_tests::netns::{Namespace, PATIENCE, require_root};

/// A Unix socket, and its other end, as a program and twheel have them.
struct Connection {
    program: OwnedFd,
    own: OwnedFd,
}

impl Connection {
    fn new() -> Result<Self> {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (program, own) = socketpair(AddressFamily::Unix, kind, None, flags)?;
        Ok(Self { program, own })
    }

    /// Passes descriptors, in a packet of one byte.
    fn pass(&self, sockets: &[OwnedFd]) -> Result<()> {
        let descriptors: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let parts = [std::io::IoSlice::new(b"!")];
        let rights = if sockets.is_empty() { &[][..] } else { &rights };
        sendmsg::<()>(
            self.program.as_raw_fd(),
            &parts,
            rights,
            MsgFlags::empty(),
            None,
        )?;
        Ok(())
    }

    /// Receives a packet. How many descriptors it has; they are closed.
    fn receive(&self) -> Result<usize> {
        let (mut byte, mut rights) = ([0], cmsg_space!([i32; SOCKETS]));
        let mut parts = [IoSliceMut::new(&mut byte)];
        let (own, flags) = (self.own.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        let message = recvmsg::<()>(own, &mut parts, Some(&mut rights), flags)?;
        let mut count = 0;
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(descriptors) = part {
                count += descriptors.len();
                descriptors.into_iter().try_for_each(close)?;
            }
        }
        Ok(count)
    }
}

/// Connections to a listener, both ends of each.
fn connections(to: SocketAddr, count: usize) -> Result<Vec<OwnedFd>> {
    let listener = TcpListener::bind(to)?;
    let mut address = listener.local_addr()?;
    if let (SocketAddr::V6(mapped), true) = (&mut address, to.ip() == Ipv6Addr::UNSPECIFIED) {
        mapped.set_ip(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
    }
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(TcpStream::connect(address)?.into());
        all.push(listener.accept()?.0.into());
    }
    Ok(all)
}

/// Sockets and files that are no established TCP connections, though some come close.
fn others() -> Result<Vec<OwnedFd>> {
    let home = || SockaddrIn::new(127, 0, 0, 1, 0);
    let new = |kind, protocol| {
        socket(AddressFamily::Inet, kind, SockFlag::SOCK_CLOEXEC, protocol)
            .context("cannot make a socket")
    };
    let raw = new(SockType::Raw, SockProtocol::Tcp)?;
    bind(raw.as_raw_fd(), &home())?;
    connect(raw.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 9))?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    udp.connect("127.0.0.1:9")?;
    let (unix, _other) = UnixStream::pair()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let half_closed = TcpStream::connect(listener.local_addr()?)?;
    half_closed.shutdown(Shutdown::Both)?;
    let path = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open("/dev/null")?;
    Ok(vec![
        raw,
        udp.into(),
        unix.into(),
        new(SockType::Stream, SockProtocol::Tcp)?,
        half_closed.into(),
        listener.into(),
        path.into(),
        File::open("/dev/null")?.into(),
    ])
}

#[test]
fn many_sockets_are_read_as_by_system_calls() -> Result<()> {
    require_root();
    let (here, elsewhere) = (Namespace::new("passed")?, Namespace::new("apart")?);
    let foreign = elsewhere.enter(|| connections("127.0.0.1:0".parse()?, 20))?;
    here.enter(|| {
        let mut all = connections("127.0.0.1:0".parse()?, 150)?;
        all.extend(others()?);
        all.extend(connections("[::1]:0".parse()?, 100)?);
        all.extend(connections("[::]:0".parse()?, 50)?);
        all.extend(foreign);
        all.iter().for_each(|it| drop(cookie_of(it.as_fd())));
        let namespace = rights::namespace()?;
        let (reader, connection) = (SocketReader::open()?, Connection::new()?);
        let mut found = 0;
        // The last packet has as many as one can have.
        for some in all.rchunks(SOCKETS) {
            connection.pass(some)?;
            let read = reader.read(connection.own.as_fd()).context("not read")?;
            ensure!(read.len() == some.len(), "{} of {}", read.len(), some.len());
            for (socket, read) in some.iter().zip(&read) {
                let of_each = rights::passed(socket.as_fd(), namespace, |_| false);
                ensure!(*read == of_each.ok(), "{read:?} {of_each:?}");
                found += usize::from(read.is_some());
            }
            ensure!(
                connection.receive()? == some.len(),
                "all stay in the packet"
            );
        }
        ensure!(found == 2 * (150 + 100 + 50), "{found}");
        Ok(())
    })
}

#[test]
fn the_first_packet_is_read_and_no_other() -> Result<()> {
    require_root();
    let host = Namespace::new("first")?;
    host.enter(|| {
        let mut sockets = connections("127.0.0.1:0".parse()?, 3)?;
        let cookies = sockets.iter().map(|it| cookie_of(it.as_fd()));
        let cookies: Vec<_> = cookies.collect::<Result<_, _>>()?;
        let (reader, connection) = (SocketReader::open()?, Connection::new()?);
        let read = || -> Result<Vec<_>> {
            let read = reader.read(connection.own.as_fd()).context("not read")?;
            Ok(read.iter().map(|it| it.map(|it| it.cookie)).collect())
        };
        ensure!(read()?.is_empty(), "nothing waits");
        connection.pass(&sockets[..1])?;
        connection.pass(&[])?;
        connection.pass(&sockets[1..])?;
        for part in [&cookies[..1], &[], &cookies[1..]] {
            ensure!(read()?.into_iter().eq(part.iter().map(|it| Some(*it))));
            ensure!(read()?.len() == part.len(), "it stays");
            ensure!(connection.receive()? == part.len());
        }
        // One that its owner has closed since is there nevertheless.
        connection.pass(&sockets.split_off(5))?;
        ensure!(read()? == [Some(cookies[5])]);
        ensure!(connection.receive()? == 1);
        // Without a cookie that anybody knows, descriptors are needed.
        let unknown = connections("127.0.0.1:0".parse()?, 1)?;
        connection.pass(&unknown)?;
        ensure!(read()? == [None, None]);
        cookie_of(unknown[0].as_fd())?;
        ensure!(read()?.iter().filter(|it| it.is_some()).count() == 1);
        // What is no socket has no packets.
        let none = reader.read(File::open("/dev/null")?.as_fd());
        ensure!(none.is_none(), "{none:?}");
        Ok(())
    })
}

/// A socket is connected to two listeners in turn: what is read is one of these connections, and never
/// the address of one with the port of the other.
#[test]
fn a_socket_that_is_connected_anew_is_read_as_one_connection() -> Result<()> {
    require_root();
    let host = Namespace::new("changes")?;
    host.enter(|| {
        let listeners = ["127.0.0.2:2222", "127.0.0.3:3333"].map(TcpListener::bind);
        let [one, two] = listeners;
        let (one, two) = (one?, two?);
        let remotes = [one.local_addr()?, two.local_addr()?];
        let stream = socket(
            AddressFamily::Inet,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::Tcp,
        )?;
        cookie_of(stream.as_fd())?;
        let (reader, connection) = (SocketReader::open()?, Connection::new()?);
        let stops = AtomicBool::new(false);
        let sockets = [stream];
        connection.pass(&sockets)?;
        thread::scope(|scope| {
            let changes = scope.spawn(|| -> Result<()> {
                while !stops.load(Ordering::SeqCst) {
                    for listener in [&one, &two] {
                        let SocketAddr::V4(to) = listener.local_addr()? else {
                            continue;
                        };
                        connect(sockets[0].as_raw_fd(), &SockaddrIn::from(to))?;
                        drop(listener.accept()?);
                        disconnect(&sockets[0])?;
                    }
                }
                Ok(())
            });
            let mut seen = [0_u32; 2];
            let mut looks = || -> Result<()> {
                let end = Instant::now() + PATIENCE;
                while seen.iter().any(|it| *it < 100) {
                    ensure!(Instant::now() < end, "seen: {seen:?}");
                    let read = reader.read(connection.own.as_fd()).context("not read")?;
                    for passed in read.into_iter().flatten() {
                        let at = remotes.iter().position(|it| *it == passed.remote);
                        seen[at.with_context(|| format!("{passed:?}"))?] += 1;
                    }
                }
                Ok(())
            };
            let looked = looks();
            stops.store(true, Ordering::SeqCst);
            changes.join().expect("it does not panic")?;
            looked
        })
    })
}

/// Ends a connection at once, so that the socket can be connected again.
fn disconnect(socket: &OwnedFd) -> Result<()> {
    let nowhere = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    let size = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the address has as many bytes as the call says, and outlives it.
    let failed = unsafe { libc::connect(socket.as_raw_fd(), &raw const nowhere, size) };
    ensure!(failed == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}
