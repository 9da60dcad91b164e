//! A program's connection: what was received, and what waits to be sent.

use std::{
    collections::VecDeque,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
    },
};
use twheel_client::protocol::{
    self, BATCH, Event, Header, Kind, MAX_PACKET, Reply, Request, SOCKETS,
};
use zerocopy::FromBytes;

use super::rights::Peer;

/// A program's connection.
pub struct Program {
    /// Also the thread's that receives what was passed, while it does.
    connection: Arc<Connection>,
    /// Who it is.
    pub peer: Peer,
    /// Its registrations, and the ends of such that it has not yet received.
    pub held: u32,
    /// Those of them of which the kernel is being asked.
    pub asked: u32,
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
    pub fn new(connection: Connection, peer: Peer, number: u64) -> Self {
        Self {
            connection: Arc::new(connection),
            peer,
            held: 0,
            asked: 0,
            is_stalled: false,
            number,
            is_receiving: false,
            packets: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// Its connection. What was not received may have descriptors, too.
    pub fn into_connection(self) -> Arc<Connection> {
        self.connection
    }

    /// Its connection, for the thread that receives its first packet.
    pub fn connection(&self) -> Arc<Connection> {
        self.connection.clone()
    }

    /// Looks at the first packet, without waiting. It stays there, with what was passed: to take that
    /// may take long.
    pub fn peek(&self, buffer: &mut Vec<u8>) -> Waiting {
        buffer.resize(MAX_PACKET, 0);
        let mut parts = [IoSliceMut::new(buffer)];
        // Without room for what was passed.
        let mut rights = RecvAncillaryBuffer::default();
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let message = match recvmsg(&self.connection, &mut parts, &mut rights, flags) {
            Err(Errno::AGAIN | Errno::INTR) => return Waiting::Nothing,
            Err(_) => return Waiting::End,
            Ok(message) => message,
        };
        let (bytes, flags) = (message.bytes, message.flags);
        if bytes == 0 {
            return Waiting::End;
        }
        let packet = &buffer[..bytes];
        let number = Header::read_from_prefix(packet).map_or(0, |(header, _)| header.number);
        let is_cut = flags.contains(ReturnFlags::TRUNC);
        let (number, requests) = match protocol::read(packet, Kind::Requests) {
            _ if is_cut => (number, Err(libc::EMSGSIZE)),
            Ok((number, requests)) => (number, Ok(requests)),
            Err(error) => (number, Err(error)),
        };
        Waiting::Packet {
            number,
            requests,
            passes: flags.contains(ReturnFlags::CTRUNC),
        }
    }

    /// Receives the first packet, with which nothing was passed.
    pub fn let_go(&self) {
        self.connection.let_go();
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
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.connection, packet, flags) {
                Err(Errno::AGAIN | Errno::NOBUFS) => break,
                Err(Errno::INTR) => continue,
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
        self.connection.as_fd()
    }
}

/// A program's connection. It counts as its user's until it is closed, with what its program has passed
/// and nobody has received.
pub struct Connection {
    /// `None`: it is being closed.
    socket: Option<OwnedFd>,
    count: Arc<AtomicUsize>,
}

impl Connection {
    /// Counts it there.
    pub fn new(socket: OwnedFd, count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        let socket = Some(socket);
        Self { socket, count }
    }

    /// Takes the first packet that waits, and lets go of what was passed. That may take long, unless it
    /// is nothing.
    pub fn let_go(&self) {
        let receive = || rustix::net::recv(self, &mut [0_u8; 0], RecvFlags::DONTWAIT);
        // The first call may tell instead that the other end was closed.
        if receive() == Err(Errno::CONNRESET) {
            let _ = receive();
        }
    }

    /// Takes the first packet that waits. The descriptors that were passed are added to these.
    ///
    /// # Errors
    ///
    /// EMFILE if this process may have no more: some were added. To let go of the others may take long.
    pub fn take(&self, passed: &mut Vec<OwnedFd>) -> Result<(), i32> {
        let mut receive = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
            let mut rights = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let message = rustix::net::recvmsg(self, &mut [], &mut rights, flags)?;
            for part in rights.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = part {
                    passed.extend(descriptors);
                }
            }
            // There is room for as many as can be sent.
            match message.flags.contains(ReturnFlags::CTRUNC) {
                true => Err(Errno::MFILE),
                false => Ok(()),
            }
        };
        let received = match receive() {
            Err(Errno::CONNRESET) => receive(),
            received => received,
        };
        received.map_err(Errno::raw_os_error)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let socket = self.socket.as_ref().expect("it is closed when dropped");
        socket.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.socket.take());
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}
