//! A program's connection: what was received, and what waits to be sent.

use std::{
    collections::VecDeque,
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, send},
};
use twheel_client::protocol::{
    self, BATCH, Event, Header, Kind, MAX_PACKET, Reply, Request, SOCKETS,
};
use zerocopy::FromBytes;

use super::rights::Peer;

/// Most packets of a program whose sockets are looked at.
pub const WAITING: usize = 2;

/// A program's connection.
pub struct Program {
    socket: OwnedFd,
    /// Who it is.
    pub peer: Peer,
    /// Its registrations, and the ends of such that it has not yet received.
    pub held: u32,
    /// It is asked for nothing until its user's descriptors are closed.
    pub is_stalled: bool,
    /// Its number: no other program ever has it.
    pub number: u64,
    /// Its packets whose sockets are being looked at. It is asked for no more than [`WAITING`].
    pub waiting: usize,
    /// Whole packets, oldest first.
    packets: VecDeque<Vec<u8>>,
    /// Events after those, not yet in a packet.
    events: Vec<Event>,
}

/// What was received.
pub enum Received {
    /// A packet of requests.
    Requests {
        /// Its number.
        number: u64,
        /// The requests.
        requests: Vec<Request>,
    },
    /// Something else; with an error number for it.
    Bad {
        /// The packet's number, as far as it has one.
        number: u64,
        /// The error.
        error: i32,
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
            socket,
            peer,
            held: 0,
            is_stalled: false,
            number,
            waiting: 0,
            packets: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// Its connection. What was not received may have descriptors, too.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Receives a packet, without waiting. The descriptors that came with it are added to `passed`,
    /// whatever was received.
    pub fn receive(&self, buffer: &mut Vec<u8>, passed: &mut Vec<OwnedFd>) -> Received {
        buffer.resize(MAX_PACKET, 0);
        let mut rights = cmsg_space!([i32; SOCKETS]);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let descriptor = self.socket.as_raw_fd();
        let message = match recvmsg::<UnixAddr>(descriptor, &mut parts, Some(&mut rights), flags) {
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Received::Nothing,
            Err(_) => return Received::End,
            Ok(message) => message,
        };
        let (bytes, flags) = (message.bytes, message.flags);
        // If the rest did not fit, what did fit was received all the same.
        for part in message.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(descriptors) = part {
                // SAFETY: the kernel has just opened these for this process, and nothing else knows
                // them.
                let owned = |descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) };
                passed.extend(descriptors.into_iter().map(owned));
            }
        }
        if bytes == 0 {
            return Received::End;
        }
        let packet = &buffer[..bytes];
        let number = Header::read_from_prefix(packet).map_or(0, |(header, _)| header.number);
        let error = match flags {
            _ if flags.contains(MsgFlags::MSG_TRUNC) => libc::EMSGSIZE,
            // There is room for as many as can be sent: this process may have no more.
            _ if flags.contains(MsgFlags::MSG_CTRUNC) => libc::EMFILE,
            _ => 0,
        };
        if error != 0 {
            return Received::Bad { number, error };
        }
        match protocol::read(packet, Kind::Requests) {
            Ok((number, requests)) => Received::Requests { number, requests },
            Err(error) => Received::Bad { number, error },
        }
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
