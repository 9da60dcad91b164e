//! What the kernel knows of a socket: its cookie, and how long it has been idle.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd, BorrowedFd, RawFd},
    sync::LazyLock,
    time::Duration,
};

use nix::time::{ClockId, clock_getres};

use crate::protocol::{Action, life};

/// A socket by its number. It belongs to somebody else, who may close it at any time: so its cookie
/// is compared before it is used.
#[derive(Clone, Copy, Debug)]
pub struct Socket {
    descriptor: RawFd,
    cookie: u64,
}

impl Socket {
    /// Of an open socket.
    ///
    /// # Errors
    ///
    /// It is not a TCP connection that is established, as twheel also asks for: ENOTSOCK,
    /// EPROTOTYPE, ENOTCONN.
    pub fn new(socket: BorrowedFd<'_>) -> io::Result<Self> {
        /// `TCP_ESTABLISHED` of `include/net/tcp_states.h`.
        const ESTABLISHED: u8 = 1;
        let descriptor = socket.as_raw_fd();
        let cookie = cookie(descriptor)?;
        // The state is the first byte of `struct tcp_info`.
        let mut state = [0];
        let refused = match option(descriptor, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state) {
            Err(_) => libc::EPROTOTYPE,
            Ok(_) if state[0] != ESTABLISHED => libc::ENOTCONN,
            Ok(_) => return Ok(Self { descriptor, cookie }),
        };
        Err(io::Error::from_raw_os_error(refused))
    }

    /// Its cookie.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// It, unless it was closed.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        if cookie(self.descriptor).ok()? != self.cookie {
            return None;
        }
        // SAFETY: the descriptor was open just now. Should its owner close it at this moment, then
        // calls fail, or meet another descriptor: twheel tells that by the cookie, and other calls
        // ask no more of it than its times.
        Some(unsafe { BorrowedFd::borrow_raw(self.descriptor) })
    }

    /// For how long there was nothing of what counts as life, [by the kernel's times](idle_of); `None`:
    /// the connection has ended.
    pub fn idle(&self, counts: u8) -> Option<Duration> {
        idle_of(self.get()?, counts)
    }

    /// Ends the connection, as an [`Action`] says.
    pub fn end(&self, action: Action) {
        if action == Action::Notify {
            return;
        }
        // A descriptor of its own: the number may mean another connection at any moment.
        let Some(Ok(own)) = self.get().map(|socket| socket.try_clone_to_owned()) else {
            return;
        };
        let descriptor = own.as_raw_fd();
        if cookie(descriptor).ok() != Some(self.cookie) {
            return;
        }
        end(own.as_fd(), action);
    }
}

/// Ends a connection, as an [`Action`] says. Does nothing if it has ended.
pub fn end(socket: BorrowedFd<'_>, action: Action) {
    let descriptor = socket.as_raw_fd();
    match action {
        Action::Notify => {}
        Action::Shutdown => {
            let _ = nix::sys::socket::shutdown(descriptor, nix::sys::socket::Shutdown::Both);
        }
        Action::Destroy => {
            let nowhere = libc::sockaddr {
                sa_family: libc::AF_UNSPEC as libc::sa_family_t,
                sa_data: [0; 14],
            };
            // SAFETY: the address has as many bytes as the call says. With this family the
            // kernel aborts the connection (`tcp_disconnect` in `net/ipv4/tcp.c`).
            unsafe {
                libc::connect(
                    descriptor,
                    &raw const nowhere,
                    size_of::<libc::sockaddr>() as libc::socklen_t,
                );
            }
        }
    }
}

/// The cookie of a socket (`SO_COOKIE`), which no other socket has until the host is restarted.
///
/// # Errors
///
/// It is no socket.
pub fn cookie_of(socket: BorrowedFd<'_>) -> io::Result<u64> {
    cookie(socket.as_raw_fd())
}

/// For how long a socket had nothing of what counts as life (bits of [`life`]), by the kernel's own
/// times, which [may be too old](LAG). Two readings of one time differ by a jiffy at most. `None`: the
/// connection has ended, or it is no TCP socket.
pub fn idle_of(socket: BorrowedFd<'_>, counts: u8) -> Option<Duration> {
    /// `TCP_CLOSE` of `include/net/tcp_states.h`.
    const CLOSE: u8 = 7;
    let descriptor = socket.as_raw_fd();
    let mut info = [0_u8; 60];
    if option(descriptor, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()? < info.len()
        || info[0] == CLOSE
    {
        return None;
    }
    // `tcpi_last_data_sent`, `tcpi_last_data_recv`, `tcpi_last_ack_recv` of `struct tcp_info`,
    // milliseconds.
    let ago = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    let parts = [
        (life::DATA_OUT | life::ANY, ago(44)),
        (life::DATA_IN | life::ANY, ago(52)),
        (life::ANY, ago(56)),
    ];
    let counted = parts.into_iter().filter(|(bits, _)| bits & counts != 0);
    let least = counted.map(|(_, ago)| ago).min()?;
    Some(Duration::from_millis(least.into()))
}

/// The kernel's unit of time, a jiffy.
pub static JIFFY: LazyLock<Duration> = LazyLock::new(|| {
    /// The longest that Linux has: 100 a second.
    const LONGEST: Duration = Duration::from_millis(10);
    let jiffy = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE);
    jiffy.map_or(LONGEST, Duration::from)
});

/// By how much the kernel's time of a packet may be too old: seven jiffies. Jiffies stand still while
/// the host of a virtual machine stops the CPU that counts them, until another CPU has had five ticks
/// meanwhile (`MAX_STALLED_JIFFIES` in `kernel/time/tick-sched.c`), of which the first may come a
/// jiffy late; and the time that is read counts a jiffy that has only begun.
pub static LAG: LazyLock<Duration> = LazyLock::new(|| *JIFFY * 7);

fn cookie(descriptor: RawFd) -> io::Result<u64> {
    let mut cookie = [0; 8];
    option(descriptor, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

/// Reads an option into these bytes. Returns how many it has filled.
fn option(descriptor: RawFd, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut length = value.len() as libc::socklen_t;
    // SAFETY: `value` has as many bytes as `length` says; both outlive the call.
    let failed = unsafe {
        libc::getsockopt(
            descriptor,
            level,
            name,
            value.as_mut_ptr().cast(),
            &mut length,
        )
    };
    match failed {
        0 => Ok(length as usize),
        _ => Err(io::Error::last_os_error()),
    }
}
