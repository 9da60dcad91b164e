//! What the kernel tells of a TCP connection by a descriptor of its socket. Errors are error numbers
//! of Linux.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::sys::socket::{SockaddrStorage, getpeername, getsockname};

/// The own and the other endpoint of a connection.
pub type Ends = (SocketAddr, SocketAddr);

/// Checks that a descriptor is of a socket of TCP's number. It may be a raw one.
///
/// # Errors
///
/// ENOTSOCK; EPROTOTYPE if it is a socket of something else.
pub fn check_protocol(socket: BorrowedFd<'_>) -> Result<(), i32> {
    match option::<i32>(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
        Ok(libc::IPPROTO_TCP) => Ok(()),
        Ok(_) => Err(libc::EPROTOTYPE),
        // Of a descriptor that is a mere path (`O_PATH`).
        Err(libc::EBADF) => Err(libc::ENOTSOCK),
        Err(error) => Err(error),
    }
}

/// Checks that a connection is established, by a socket of TCP's number. This takes longer than all
/// else here, and as long as the socket is locked.
///
/// # Errors
///
/// ENOTCONN if it is not; EPROTOTYPE if it is a raw socket.
pub fn check_established(socket: BorrowedFd<'_>) -> Result<(), i32> {
    /// `TCP_ESTABLISHED` of `include/net/tcp_states.h`.
    const ESTABLISHED: u8 = 1;
    // The state is the first byte of `struct tcp_info`. A raw socket has none.
    match option::<u8>(socket, libc::IPPROTO_TCP, libc::TCP_INFO) {
        Ok(ESTABLISHED) => Ok(()),
        Ok(_) => Err(libc::ENOTCONN),
        Err(_) => Err(libc::EPROTOTYPE),
    }
}

/// The endpoints of a connection, which may be ending.
///
/// # Errors
///
/// ENOTCONN if it has not begun, or has ended; EPROTOTYPE if it is of another address family.
pub fn ends(socket: BorrowedFd<'_>) -> Result<Ends, i32> {
    let address = |found: nix::Result<SockaddrStorage>| {
        let found = found.map_err(|error| error as i32)?;
        let v4 = found
            .as_sockaddr_in()
            .map(|it| SocketAddr::V4((*it).into()));
        let v6 = found
            .as_sockaddr_in6()
            .map(|it| SocketAddr::V6((*it).into()));
        let found = v4.or(v6).ok_or(libc::EPROTOTYPE)?;
        Ok::<_, i32>(SocketAddr::new(found.ip().to_canonical(), found.port()))
    };
    let descriptor = socket.as_raw_fd();
    let local = address(getsockname(descriptor))?;
    let remote = address(getpeername(descriptor))?;
    // Its owner may connect it elsewhere meanwhile, from another port: these are of one connection.
    match address(getsockname(descriptor))? == local {
        true => Ok((local, remote)),
        false => Err(libc::ENOTCONN),
    }
}

/// Reads an option of a socket that is a number, or the beginning of something longer.
///
/// # Errors
///
/// That of `getsockopt(2)`.
pub fn option<T: Default + zerocopy::FromBytes>(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
) -> Result<T, i32> {
    let mut value = T::default();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` has as many bytes as `length` says, any of which are a `T`, and both outlive
    // the call.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &mut length,
        )
    };
    match failed {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EINVAL)),
    }
}
