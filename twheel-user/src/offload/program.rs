//! A program's connection: what was received, and what waits to be sent.

use std::{
    collections::VecDeque,
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recv, recvmsg, send},
};
use twheel_client::protocol::{
    self, BATCH, Event, Header, Kind, MAX_PACKET, Reply, Request, SOCKETS,
};
use zerocopy::FromBytes;

use super::rights::Peer;

/// A program's connection.
pub struct Program {
    /// Also of the thread that receives what was passed, while it does.
    socket: Arc<OwnedFd>,
    /// Who it is.
    pub peer: Peer,
    /// Its registrations, and the ends of such that it has not yet received.
    pub held: u32,
    /// It is asked for nothing until its user's descriptors are closed.
    pub is_stalled: bool,
    /// Its number: no other program ever has it.
    pub number: u64,
    /// A thread is receiving its first packet, with what was passed. Nobody else may receive or read
    /// it meanwhile.
    pub is_receiving: bool,
    /// Whole packets, oldest first.
    packets: VecDeque<Vec<u8>>,
    /// Events after those, not yet in a packet.
    events: Vec<Event>,
}

/// What waits at a connection.
pub enum Waiting {
    /// A packet.
    Packet {
        /// Its number, as far as it has one.
        number: u64,
        /// Its requests; or an error number for all of it.
        requests: Result<Vec<Request>, i32>,
        /// Something was passed with it.
        passes: bool,
    },
    /// Nothing for now.
    Nothing,
    /// The program has ended the connection.
    End,
}

impl Program {
    /// From its connection. `number`: of the program.
    pub fn new(socket: OwnedFd, peer: Peer, number: u64) -> Self {
        Self {
            socket: Arc::new(socket),
            peer,
            held: 0,
            is_stalled: false,
            number,
            is_receiving: false,
            packets: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// Its connection. What was not received may have descriptors, too.
    pub fn into_socket(self) -> Arc<OwnedFd> {
        self.socket
    }

    /// Its connection, for the thread that receives its first packet.
    pub fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Looks at the first packet, without waiting. It stays there, with what was passed: to take that
    /// may take long.
    pub fn peek(&self, buffer: &mut Vec<u8>) -> Waiting {
        buffer.resize(MAX_PACKET, 0);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        let descriptor = self.socket.as_raw_fd();
        let message = match recvmsg::<UnixAddr>(descriptor, &mut parts, None, flags) {
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Waiting::Nothing,
            Err(_) => return Waiting::End,
            Ok(message) => message,
        };
        let (bytes, flags) = (message.bytes, message.flags);
        if bytes == 0 {
            return Waiting::End;
        }
        let packet = &buffer[..bytes];
        let number = Header::read_from_prefix(packet).map_or(0, |(header, _)| header.number);
        let is_cut = flags.contains(MsgFlags::MSG_TRUNC);
        let (number, requests) = match protocol::read(packet, Kind::Requests) {
            _ if is_cut => (number, Err(libc::EMSGSIZE)),
            Ok((number, requests)) => (number, Ok(requests)),
            Err(error) => (number, Err(error)),
        };
        Waiting::Packet {
            number,
            requests,
            // No room was given for it.
            passes: flags.contains(MsgFlags::MSG_CTRUNC),
        }
    }

    /// Receives the first packet, with which nothing was passed.
    pub fn let_go(&self) {
        let_go(&self.socket);
    }

    /// Sends a packet after all else.
    pub fn send(&mut self, packet: Vec<u8>) {
        self.pack_events();
        self.packets.push_back(packet);
    }

    /// Sends replies after all else.
    pub fn reply(&mut self, number: u64, replies: &[Reply]) {
        self.send(protocol::write(Kind::Replies, number, replies));
    }

    /// Sends an event after all else.
    pub fn tell(&mut self, event: Event) {
        self.events.push(event);
        if self.events.len() == BATCH {
            self.pack_events();
        }
    }

    fn pack_events(&mut self) {
        if !self.events.is_empty() {
            let packet = protocol::write(Kind::Events, 0, &self.events);
            self.packets.push_back(packet);
            self.events.clear();
        }
    }

    /// Whether something waits to be sent.
    pub fn is_behind(&self) -> bool {
        !self.packets.is_empty() || !self.events.is_empty()
    }

    /// Sends what there is room for, without waiting. Returns how many events the program now has.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn flush(&mut self) -> io::Result<u32> {
        self.pack_events();
        let mut told = 0;
        while let Some(packet) = self.packets.front() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.socket.as_raw_fd(), packet, flags) {
                Err(nix::Error::EAGAIN | nix::Error::ENOBUFS) => break,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            if let Ok((header, _)) = Header::read_from_prefix(packet)
                && header.kind == Kind::Events as u16
            {
                told += header.entries;
            }
            self.packets.pop_front();
        }
        Ok(told)
    }
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Takes the first packet that waits at a connection, and lets go of what was passed. That may take
/// long, unless it is nothing.
pub fn let_go(socket: &OwnedFd) {
    let receive = || recv(socket.as_raw_fd(), &mut [], MsgFlags::MSG_DONTWAIT);
    // The first call may tell instead that the other end was closed.
    if receive() == Err(nix::Error::ECONNRESET) {
        let _ = receive();
    }
}

/// Takes the first packet that waits at a connection, and the descriptors that were passed.
///
/// # Errors
///
/// EMFILE if this process may have no more. Those that it has taken are added all the same; to let go
/// of the others may take long.
pub fn take(socket: &OwnedFd, passed: &mut Vec<OwnedFd>) -> Result<(), i32> {
    let mut receive = || {
        let mut rights = cmsg_space!([i32; SOCKETS]);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let descriptor = socket.as_raw_fd();
        let message = recvmsg::<UnixAddr>(descriptor, &mut [], Some(&mut rights), flags)?;
        for part in message.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(descriptors) = part {
                // SAFETY: the kernel has just opened these for this process, and nothing else knows
                // them.
                let owned = |descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) };
                passed.extend(descriptors.into_iter().map(owned));
            }
        }
        // There is room for as many as can be sent.
        match message.flags.contains(MsgFlags::MSG_CTRUNC) {
            true => Err(nix::Error::EMFILE),
            false => Ok(()),
        }
    };
    // As in `let_go`.
    let received = match receive() {
        Err(nix::Error::ECONNRESET) => receive(),
        received => received,
    };
    received.map_err(|error| error as i32)
}
