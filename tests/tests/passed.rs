//! Reads many sockets at once, and compares the result with that of system calls for each.
#![allow(missing_docs)]

use std::{
    fs::{File, OpenOptions},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    libc,
    sys::socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, SockaddrIn, bind, connect, socket,
    },
};
use twheel::offload::{passed::SocketReader, rights};
use twheel_tests::netns::{Namespace, PATIENCE, require_root};

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
        // Not in the order of their descriptors.
        all.reverse();
        let namespace = rights::namespace()?;
        let reader = SocketReader::open(namespace)?;
        let read = reader.read(&all)?;
        ensure!(read.is_sorted_by_key(|(descriptor, _)| *descriptor));
        ensure!(read.len() == 2 * (150 + 100 + 50), "{}", read.len());
        for socket in &all {
            let found = read.iter().find(|(it, _)| *it == socket.as_raw_fd());
            let of_each = rights::passed(socket.as_fd(), namespace, |_| false);
            let found = found.map(|(_, passed)| *passed);
            ensure!(found == of_each.ok(), "{found:?} {of_each:?}");
        }
        // Only those that it is asked for.
        let some: Vec<_> = all.split_off(all.len() - 3);
        let read = reader.read(&some)?;
        let mut wanted: Vec<_> = some.iter().map(AsRawFd::as_raw_fd).collect();
        wanted.sort_unstable();
        ensure!(read.iter().map(|(it, _)| *it).eq(wanted), "{read:?}");
        ensure!(reader.read(&[])?.is_empty());
        Ok(())
    })
}

#[test]
fn each_thread_reads_the_sockets_that_it_asks_for() -> Result<()> {
    require_root();
    let host = Namespace::new("threads")?;
    host.enter(|| {
        let mut all = connections("127.0.0.1:0".parse()?, 40)?;
        let reader = SocketReader::open(rights::namespace()?)?;
        let halves = [all.split_off(40), all];
        let start = Barrier::new(halves.len());
        thread::scope(|scope| {
            let reads = halves.each_ref().map(|half| {
                scope.spawn(|| -> Result<()> {
                    start.wait();
                    for _ in 0..2_000 {
                        let read = reader.read(half)?.len();
                        ensure!(read == half.len(), "{read} of {}", half.len());
                    }
                    Ok(())
                })
            });
            let mut all = reads.into_iter();
            all.try_for_each(|it| it.join().expect("it does not panic"))
        })
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
        let reader = SocketReader::open(rights::namespace()?)?;
        let stops = AtomicBool::new(false);
        let sockets = [stream];
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
                    for (_, passed) in reader.read(&sockets)? {
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
