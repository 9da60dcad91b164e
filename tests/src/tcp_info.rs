//! What the kernel knows about a TCP socket.

use std::{mem, net::TcpStream, os::fd::AsRawFd};

use anyhow::{Result, ensure};

/// `TCP_INFO` of a socket.
///
/// # Errors
///
/// The kernel does not tell.
pub fn tcp_info(stream: &TcpStream) -> Result<libc::tcp_info> {
    // SAFETY: all-zero bytes are valid, and the kernel fills in as much as it says.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the buffer is as long as passed.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    ensure!(result == 0, "no TCP_INFO");
    Ok(info)
}
