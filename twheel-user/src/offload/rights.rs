//! Who may register what: rights of a program, and what a passed socket is.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::fs::MetadataExt as _,
    },
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{AddressFamily, SockType, UnixCredentials, getsockopt, sockopt::PeerCredentials},
};

use crate::connection::{self, Ends, option};

/// What the kernel says of the program at the other end of a connection, as of when it connected.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// It has CAP_NET_ADMIN here, so it may name connections. It must still be the same user's:
    /// while it waited, its process may have run a set-user-ID program, or have ended.
    pub is_admin: bool,
}

/// `CAP_NET_ADMIN` of `include/uapi/linux/capability.h`.
const CAP_NET_ADMIN: u64 = 1 << 12;

impl Peer {
    /// Of a connection.
    ///
    /// # Errors
    ///
    /// The kernel does not tell; or it may tell later: [`is_for_now`].
    pub fn of(connection: BorrowedFd<'_>) -> io::Result<Self> {
        let credentials = getsockopt(&connection, PeerCredentials)?;
        Ok(Self {
            uid: credentials.uid(),
            // In this order: while the process lives, no other one has its number.
            is_admin: is_admin(&credentials)? && is_alive(connection)?,
        })
    }
}

/// Whether a process has CAP_NET_ADMIN, in this process's user namespace: there users have the same
/// numbers. If the kernel does not tell, it has not.
fn is_admin(credentials: &UnixCredentials) -> io::Result<bool> {
    let pid = credentials.pid();
    let read = |file: &str| told(fs::read_to_string(format!("/proc/{pid}/{file}")));
    let Some(status) = read("status")? else {
        return Ok(false);
    };
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
    let effective = field("CapEff:").and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    // Real, effective, saved and file system's. An effective one that changes is a sign of rights
    // that the process did not have when it connected.
    let users = field("Uid:").unwrap_or_default();
    let mut users = users.split_ascii_whitespace().map(str::parse::<u32>);
    let are_same = users.clone().count() == 4 && users.all(|uid| uid == Ok(credentials.uid()));
    if !are_same || effective.is_none_or(|set| set & CAP_NET_ADMIN == 0) {
        return Ok(false);
    }
    // The kernel gives the files of a process to root when it has gained rights by what it runs: its
    // program has capabilities of its own.
    let files = told(fs::metadata(format!("/proc/{pid}")))?;
    if files.is_none_or(|its| its.uid() != credentials.uid()) {
        return Ok(false);
    }
    let own = told(fs::read_to_string("/proc/self/uid_map"))?;
    Ok(own.is_some() && read("uid_map")? == own)
}

/// `SO_PEERPIDFD` of `include/uapi/asm-generic/socket.h`, since Linux 6.5.
const SO_PEERPIDFD: i32 = 77;

/// Whether the process at the other end, as of when it connected, lives; also if the kernel does not tell
/// that of any process.
fn is_alive(connection: BorrowedFd<'_>) -> io::Result<bool> {
    let process: RawFd = match option(connection, libc::SOL_SOCKET, SO_PEERPIDFD) {
        Ok(process) => process,
        Err(libc::ENOPROTOOPT) => return Ok(true),
        Err(error) => {
            let error = io::Error::from_raw_os_error(error);
            // Else it has ended, and its parent knows.
            return if is_for_now(&error) {
                Err(error)
            } else {
                Ok(false)
            };
        }
    };
    // SAFETY: the kernel has just opened it for this process.
    let process = unsafe { OwnedFd::from_raw_fd(process) };
    let mut polled = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut polled, PollTimeout::ZERO) == Ok(0))
}

/// What the kernel has told; `None`: it does not.
///
/// # Errors
///
/// It may tell later: [`is_for_now`].
fn told<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_for_now(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Whether something failed because this process may open no more files, or there is no memory: the
/// same may succeed later.
pub fn is_for_now(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    number.is_some_and(|it| [libc::EMFILE, libc::ENFILE, libc::ENOMEM].contains(&it))
}

/// A passed socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Its own endpoint.
    pub local: SocketAddr,
    /// The other one.
    pub remote: SocketAddr,
    /// `SO_COOKIE`.
    pub cookie: u64,
}

/// Reads what a passed socket is. `namespace`: the cookie of the network namespace that is watched.
/// `is_established`: what its packets tell of a connection. If that is nothing, the kernel is asked.
///
/// # Errors
///
/// An error number of Linux: ENOTSOCK, EPROTOTYPE if it is no TCP socket, ENOTCONN if it is not
/// connected, EXDEV if it is of another network namespace.
pub fn passed(
    socket: BorrowedFd<'_>,
    namespace: u64,
    is_established: impl Fn(Ends) -> bool,
) -> Result<Passed, i32> {
    connection::check_protocol(socket)?;
    if namespace_of(socket)? != namespace {
        return Err(libc::EXDEV);
    }
    let ends = connection::ends(socket);
    if !ends.is_ok_and(is_established) {
        connection::check_established(socket)?;
    }
    let (local, remote) = ends?;
    Ok(Passed {
        local,
        remote,
        cookie: option(socket, libc::SOL_SOCKET, libc::SO_COOKIE)?,
    })
}

/// `SO_NETNS_COOKIE` of `include/uapi/asm-generic/socket.h`, since Linux 5.14.
const SO_NETNS_COOKIE: i32 = 71;

/// The cookie of this thread's network namespace.
///
/// # Errors
///
/// No socket can be made.
pub fn namespace() -> io::Result<u64> {
    use nix::sys::socket::{SockFlag, socket};
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    namespace_of(socket.as_fd()).map_err(io::Error::from_raw_os_error)
}

/// The cookie of a socket's network namespace.
///
/// # Errors
///
/// An error number of Linux.
pub fn namespace_of(socket: BorrowedFd<'_>) -> Result<u64, i32> {
    option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// `SO_PASSRIGHTS` of `include/uapi/asm-generic/socket.h`, since Linux 6.16.
const SO_PASSRIGHTS: i32 = 83;

/// Whether others may pass descriptors through a Unix socket, and those that it accepts. Returns
/// whether the kernel knows of that.
pub fn accept_descriptors(socket: BorrowedFd<'_>, may: bool) -> bool {
    let may = i32::from(may);
    let size = size_of_val(&may) as libc::socklen_t;
    // SAFETY: `may` has as many bytes, and outlives the call.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const may).cast(),
            size,
        )
    };
    failed == 0
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream, UdpSocket},
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn only_a_connected_tcp_socket_of_the_namespace_passes() {
        let here = namespace().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let passed_of = |socket: BorrowedFd<'_>| passed(socket, here, |_| false);
        let found = passed_of(stream.as_fd()).unwrap();
        assert_eq!(found.local, stream.local_addr().unwrap());
        assert_eq!(found.remote, listener.local_addr().unwrap());
        assert_ne!(found.cookie, 0);
        let error = |socket: BorrowedFd<'_>| passed_of(socket).unwrap_err();
        assert_eq!(error(listener.as_fd()), libc::ENOTCONN);
        assert_eq!(
            error(UdpSocket::bind("127.0.0.1:0").unwrap().as_fd()),
            libc::EPROTOTYPE
        );
        assert_eq!(
            error(std::fs::File::open("/dev/null").unwrap().as_fd()),
            libc::ENOTSOCK
        );
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(error(unix.as_fd()), libc::EPROTOTYPE);
        let elsewhere = passed(stream.as_fd(), here + 1, |_| true);
        assert_eq!(elsewhere.unwrap_err(), libc::EXDEV);
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(error(stream.as_fd()), libc::ENOTCONN);
        // Until the other end is closed, too, it has its endpoints, and packets tell what it is.
        assert_eq!(passed(stream.as_fd(), here, |_| true).err(), None);
        drop(listener);
        let end = Instant::now() + Duration::from_secs(5);
        while connection::ends(stream.as_fd()).is_ok() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = passed(stream.as_fd(), here, |_| true);
        assert_eq!(ended.unwrap_err(), libc::ENOTCONN);
    }

    #[test]
    fn rights_are_read_from_the_kernel() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::of(one.as_fd()).unwrap();
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(
            peer.is_admin,
            crate::privilege::has(caps::Capability::CAP_NET_ADMIN)
        );
    }
}
