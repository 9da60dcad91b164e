//! A connection to twheel that sends any bytes and descriptors.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{self, IoSlice},
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::{
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv,
        sendmsg, setsockopt, socket, sockopt,
    },
    time::TimeVal,
};
use twheel_client::protocol::{self, Event, Header, Kind, Reply, Request, Welcome};
use zerocopy::FromBytes;

/// A connection to twheel.
pub struct Raw {
    socket: OwnedFd,
    /// Events that came before what was waited for.
    events: RefCell<VecDeque<Event>>,
}

/// A socket that is not yet connected.
pub fn unconnected() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    // A test that waits for what never comes has failed.
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(10, 0))?;
    Ok(socket)
}

impl Raw {
    /// Connects, and reads the welcome.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = unconnected()?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Self::welcomed(socket)
    }

    /// From a connected socket, whose welcome is read.
    pub fn welcomed(socket: OwnedFd) -> Result<Self> {
        let raw = Self::unread(socket);
        let packet = raw.receive()?.context("no welcome")?;
        let read = protocol::read::<Welcome>(&packet, Kind::Welcome);
        read.map_err(io::Error::from_raw_os_error)?;
        Ok(raw)
    }

    /// From a connected socket, from which nothing was read.
    pub fn unread(socket: OwnedFd) -> Self {
        let events = RefCell::default();
        Self { socket, events }
    }

    /// Sends a packet.
    pub fn send(&self, packet: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
        let passed: Vec<_> = passed.iter().map(AsRawFd::as_raw_fd).collect();
        self.send_with(packet, &passed, MsgFlags::empty())
    }

    /// The same; it does not wait.
    pub fn try_send(&self, packet: &[u8], passed: &[RawFd]) -> io::Result<()> {
        self.send_with(packet, passed, MsgFlags::MSG_DONTWAIT)
    }

    fn send_with(&self, packet: &[u8], passed: &[RawFd], flags: MsgFlags) -> io::Result<()> {
        let rights = [ControlMessage::ScmRights(passed)];
        let rights = if passed.is_empty() { &[][..] } else { &rights };
        let (packet, flags) = ([IoSlice::new(packet)], flags | MsgFlags::MSG_NOSIGNAL);
        sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &packet, rights, flags, None)?;
        Ok(())
    }

    /// The next packet; `None`: twheel has ended the connection.
    pub fn receive(&self) -> Result<Option<Vec<u8>>> {
        self.receive_with(MsgFlags::empty())
    }

    /// The same; it does not wait.
    pub fn try_receive(&self) -> Result<Option<Vec<u8>>> {
        self.receive_with(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_with(&self, flags: MsgFlags) -> Result<Option<Vec<u8>>> {
        let mut buffer = vec![0; protocol::MAX_PACKET];
        let received = loop {
            match recv(self.socket.as_raw_fd(), &mut buffer, flags) {
                Err(nix::Error::EINTR) => {}
                received => break received,
            }
        };
        match received {
            Ok(0) | Err(nix::Error::ECONNRESET) => return Ok(None),
            Ok(length) => buffer.truncate(length),
            Err(nix::Error::EAGAIN) => bail!("nothing was received"),
            Err(error) => return Err(error.into()),
        }
        Ok(Some(buffer))
    }

    /// Sends what twheel answers by one packet of replies, and returns its number and them.
    pub fn answer(&self, packet: &[u8], passed: &[BorrowedFd<'_>]) -> Result<(u64, Vec<Reply>)> {
        self.send(packet, passed)?;
        self.replies()
    }

    /// The next replies.
    pub fn replies(&self) -> Result<(u64, Vec<Reply>)> {
        loop {
            let packet = self.receive()?.context("twheel has ended the connection")?;
            if protocol::kind(&packet) == Some(Kind::Replies as u16) {
                let read = protocol::read(&packet, Kind::Replies);
                return Ok(read.map_err(io::Error::from_raw_os_error)?);
            }
            self.events.borrow_mut().extend(events(&packet)?);
        }
    }

    /// Sends requests. Returns the answers.
    pub fn ask(&self, requests: &[Request], passed: &[BorrowedFd<'_>]) -> Result<Vec<Reply>> {
        let packet = protocol::write(Kind::Requests, 77, requests);
        let (number, replies) = self.answer(&packet, passed)?;
        ensure!(
            number == 77 && replies.len() == requests.len(),
            "{} answers to {number}",
            replies.len()
        );
        Ok(replies)
    }

    /// Sends one request. Returns the error number.
    pub fn error(&self, request: Request, passed: &[BorrowedFd<'_>]) -> Result<i32> {
        Ok(self.ask(&[request], passed)?[0].error as i32)
    }

    /// Sends a packet that is refused as a whole. Returns the error number.
    pub fn refused(&self, packet: &[u8], passed: &[BorrowedFd<'_>]) -> Result<i32> {
        let sent = Header::read_from_prefix(packet).map_or(0, |(header, _)| header.number);
        let (number, replies) = self.answer(packet, passed)?;
        let [reply] = replies[..] else {
            bail!("{} answers to a packet that is none", replies.len());
        };
        ensure!(number == sent, "an answer to packet {number}, not {sent}");
        ensure!((reply.id, reply.token) == (0, 0), "{reply:?}");
        Ok(reply.error as i32)
    }

    /// The next events.
    pub fn events(&self) -> Result<Vec<Event>> {
        let waiting: Vec<_> = self.events.borrow_mut().drain(..).collect();
        if !waiting.is_empty() {
            return Ok(waiting);
        }
        events(&self.receive()?.context("twheel has ended the connection")?)
    }
}

impl Raw {
    /// Events that have come or come within this time; none if nothing comes.
    pub fn events_within(&self, within: Duration) -> Result<Vec<Event>> {
        if self.events.borrow().is_empty() && !self.is_ready(within)? {
            return Ok(Vec::new());
        }
        self.events()
    }

    /// Whether a packet has come or comes within this time.
    pub fn is_ready(&self, within: Duration) -> Result<bool> {
        let mut awaited = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        match poll(&mut awaited, PollTimeout::try_from(within)?) {
            Err(nix::Error::EINTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn events(packet: &[u8]) -> Result<Vec<Event>> {
    let (_, events) = protocol::read(packet, Kind::Events).map_err(io::Error::from_raw_os_error)?;
    Ok(events)
}

/// The endpoints of a flow of [`frame`](twheel_tests::plane::frame), by its number: first those of
/// its server.
pub fn framed(number: u32) -> (SocketAddr, SocketAddr) {
    ends(0x0a00_0000, number)
}

/// The endpoints of a connection that nobody has, by number.
pub fn nobodys(number: u32) -> (SocketAddr, SocketAddr) {
    ends(0x0a50_0000, number)
}

fn ends(from: u32, number: u32) -> (SocketAddr, SocketAddr) {
    let other = Ipv4Addr::from(from + number / 50_000);
    let port = 1024 + (number % 50_000) as u16;
    (
        SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 80),
        SocketAddr::new(other.into(), port),
    )
}
