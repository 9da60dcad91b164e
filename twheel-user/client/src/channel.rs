//! The connection to a running twheel: sends packets of requests, receives packets of answers.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::sys::{
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, recvmsg,
        sendmsg, setsockopt, socket, sockopt,
    },
    time::TimeVal,
};

use crate::protocol::{self, BATCH, Event, Header, Kind, Reply, Request, Welcome};

/// Where a running twheel listens, unless it was told otherwise.
pub const DEFAULT_PATH: &str = "/run/twheel/offload";

/// The environment variable that names another path.
pub const PATH_VARIABLE: &str = "TWHEEL_OFFLOAD";

/// How long a twheel may take to answer who connects.
const ANSWER: TimeVal = TimeVal::new(1, 0);

/// The path of twheel's socket: from the environment, or the default one.
pub fn default_path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE).map_or_else(|| DEFAULT_PATH.into(), PathBuf::from)
}

/// A connection to a running twheel. It can be shared: one thread sends, another receives.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    welcome: Welcome,
}

/// What twheel has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// The answers to the requests of the packet with this number, in order.
    Replies(u64, Vec<Reply>),
    /// Registrations that are over.
    Events(Vec<Event>),
}

impl Channel {
    /// Connects to the twheel that listens at this path.
    ///
    /// # Errors
    ///
    /// None listens there, or this process may not connect; or it is of another version
    /// ([`io::ErrorKind::Unsupported`]), serves as many programs as it may, or as many of this user
    /// ([`io::ErrorKind::QuotaExceeded`]), or does not answer ([`io::ErrorKind::TimedOut`]).
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        // Of the connect, too (`unix(7)`).
        setsockopt(&socket, sockopt::SendTimeout, &ANSWER)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &ANSWER)?;
        let mut buffer = [0; 256];
        let received = connect(socket.as_raw_fd(), &UnixAddr::new(path)?)
            .map_err(io::Error::from)
            .and_then(|()| receive(socket.as_fd(), &mut buffer, MsgFlags::empty()))
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => {
                    let message = "the running twheel does not answer: see whether it is stopped";
                    io::Error::new(io::ErrorKind::TimedOut, message)
                }
                _ => error,
            })?;
        let forever = TimeVal::new(0, 0);
        setsockopt(&socket, sockopt::SendTimeout, &forever)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &forever)?;
        let packet = &buffer[..received];
        // Who is not served is told why.
        if let Ok((_, replies)) = protocol::read::<Reply>(packet, Kind::Replies)
            && let Some(reply) = replies.first()
        {
            return Err(refused(reply.error as i32));
        }
        let (_, all) = protocol::read::<Welcome>(packet, Kind::Welcome).map_err(refused)?;
        let welcome = all.first().copied().ok_or_else(|| refused(libc::EPROTO))?;
        Ok(Self { socket, welcome })
    }

    /// What twheel has said of itself.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Sends a packet of requests, and the sockets of its starts. Waits while twheel has no room.
    ///
    /// # Errors
    ///
    /// twheel has ended ([`io::ErrorKind::BrokenPipe`], [`io::ErrorKind::ConnectionReset`]).
    pub fn send(
        &self,
        number: u64,
        requests: &[Request],
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_with(number, requests, sockets, MsgFlags::empty())
    }

    /// The same, without waiting.
    ///
    /// # Errors
    ///
    /// Also [`io::ErrorKind::WouldBlock`]: twheel has no room now.
    pub fn try_send(
        &self,
        number: u64,
        requests: &[Request],
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_with(number, requests, sockets, MsgFlags::MSG_DONTWAIT)
    }

    fn send_with(
        &self,
        number: u64,
        requests: &[Request],
        sockets: &[BorrowedFd<'_>],
        flags: MsgFlags,
    ) -> io::Result<()> {
        let packet = protocol::write(Kind::Requests, number, requests);
        let sockets: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&sockets)];
        let rights = if sockets.is_empty() { &[][..] } else { &rights };
        let packet = [IoSlice::new(&packet)];
        let flags = MsgFlags::MSG_NOSIGNAL | flags;
        loop {
            match sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &packet, rights, flags, None) {
                Err(nix::Error::EINTR) => {}
                sent => return sent.map(drop).map_err(io::Error::from),
            }
        }
    }

    /// Waits for the next packet; `None`: twheel has ended.
    ///
    /// # Errors
    ///
    /// The packet cannot be received, or is none of this version.
    pub fn receive(&self) -> io::Result<Option<Packet>> {
        self.receive_with(MsgFlags::empty())
    }

    /// The same, without waiting.
    ///
    /// # Errors
    ///
    /// Also [`io::ErrorKind::WouldBlock`]: there is none now.
    pub fn try_receive(&self) -> io::Result<Option<Packet>> {
        self.receive_with(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_with(&self, flags: MsgFlags) -> io::Result<Option<Packet>> {
        // No packet to a program is longer.
        let mut buffer = [0; size_of::<Header>() + BATCH * size_of::<Reply>()];
        let received = match receive(self.socket.as_fd(), &mut buffer, flags) {
            Ok(0) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => received?,
        };
        let packet = &buffer[..received];
        if protocol::kind(packet) == Some(Kind::Replies as u16) {
            let (number, replies) = protocol::read(packet, Kind::Replies).map_err(refused)?;
            return Ok(Some(Packet::Replies(number, replies)));
        }
        let (_, events) = protocol::read(packet, Kind::Events).map_err(refused)?;
        Ok(Some(Packet::Events(events)))
    }

    /// Ends the connection, also for a thread that waits for a packet. twheel ends all registrations
    /// of this program.
    pub fn shutdown(&self) {
        // Fails only if twheel has ended already.
        let _ =
            nix::sys::socket::shutdown(self.socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn refused(error: i32) -> io::Error {
    match error {
        libc::EPROTONOSUPPORT => io::Error::new(
            io::ErrorKind::Unsupported,
            "the running twheel speaks another version of the protocol: update the older one",
        ),
        libc::EUSERS => io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "the running twheel serves no more programs: end some, or connect once for many threads",
        ),
        error => io::Error::from_raw_os_error(error),
    }
}

fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], flags: MsgFlags) -> io::Result<usize> {
    let mut buffer = [IoSliceMut::new(buffer)];
    loop {
        match recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut buffer, None, flags) {
            Err(nix::Error::EINTR) => {}
            received => return Ok(received?.bytes),
        }
    }
}
