//! Netlink: sends requests to the kernel, and receives its notifications.

use std::{
    io, iter,
    ops::ControlFlow,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    time::Duration,
};

use netlink_packet_core::{
    NLM_F_REQUEST, NLMSG_ALIGNTO, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};
use socket2::SockRef;

/// How long to wait for an answer; the kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(5);
/// Larger than any netlink datagram.
const BUFFER: usize = 1 << 16;

/// A socket with one request at a time.
pub struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket of a netlink protocol in this thread's network namespace.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        SockRef::from(&socket).set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            socket,
            buffer: Vec::with_capacity(BUFFER),
            sequence: 0,
        })
    }

    /// Sends a request and takes its one answer: a message, or nothing if the kernel only
    /// acknowledges. `kind`: the message's type, if the payload does not imply it.
    ///
    /// # Errors
    ///
    /// The kernel's errors unchanged; an answer that cannot be read is
    /// [`io::ErrorKind::InvalidData`].
    pub fn ask<T: NetlinkSerializable + NetlinkDeserializable>(
        &mut self,
        request: NetlinkMessage<T>,
        kind: Option<u16>,
    ) -> io::Result<Option<T>> {
        let mut answer = None;
        self.exchange(request, kind, |message| {
            answer = Some(message);
            ControlFlow::Break(())
        })?;
        Ok(answer)
    }

    /// Sends a request with `NLM_F_DUMP` and passes all its answers on.
    ///
    /// # Errors
    ///
    /// As [`ask`](Self::ask).
    pub fn dump<T: NetlinkSerializable + NetlinkDeserializable>(
        &mut self,
        request: NetlinkMessage<T>,
        mut take: impl FnMut(T),
    ) -> io::Result<()> {
        self.exchange(request, None, |message| {
            take(message);
            ControlFlow::Continue(())
        })
    }

    /// Sends a request and passes each answer on, until there are no more or the caller wants no
    /// more.
    fn exchange<T: NetlinkSerializable + NetlinkDeserializable>(
        &mut self,
        mut request: NetlinkMessage<T>,
        kind: Option<u16>,
        mut take: impl FnMut(T) -> ControlFlow<()>,
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        request.header.sequence_number = self.sequence;
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        if let Some(kind) = kind {
            // `nlmsg_type`, which follows the length.
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        }
        self.socket.send(&bytes, 0)?;
        loop {
            receive(&self.socket, &mut self.buffer)?;
            for message in messages::<T>(&self.buffer) {
                let message = message?;
                if message.header.sequence_number != self.sequence {
                    // The answer to an earlier request that was given up.
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(message) => match take(message) {
                        ControlFlow::Break(()) => return Ok(()),
                        ControlFlow::Continue(()) => {}
                    },
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => {
                        return match error.code {
                            None => Ok(()),
                            Some(_) => Err(error.to_io()),
                        };
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Sends one request on a socket of its own, and takes all answers. `flag`: `NLM_F_ACK` or
/// `NLM_F_DUMP`, with which the kernel marks the last answer; with `NLM_F_DUMP` there may be
/// several.
///
/// # Errors
///
/// As [`Netlink::ask`].
pub fn ask_all<T>(protocol: isize, request: T, flag: u16) -> io::Result<Vec<T>>
where
    T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>>,
{
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flag;
    let request = NetlinkMessage::new(header, request.into());
    let mut answers = Vec::new();
    Netlink::open(protocol)?.dump(request, |answer| answers.push(answer))?;
    Ok(answers)
}

/// A socket that receives the kernel's notifications.
pub struct Notifications(Socket);

impl Notifications {
    /// Starts to receive the notifications of these groups, given as bits.
    pub fn open(protocol: isize, groups: u32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Self(socket))
    }

    /// Takes the next datagram. Returns whether there was one.
    ///
    /// # Errors
    ///
    /// `ENOBUFS`: notifications were lost because the socket's buffer was full.
    pub fn receive(&self, datagram: &mut Vec<u8>) -> io::Result<bool> {
        match receive(&self.0, datagram) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            received => received.map(|()| true),
        }
    }
}

impl AsFd for Notifications {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Notifications {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Takes one datagram.
fn receive(socket: &Socket, datagram: &mut Vec<u8>) -> io::Result<()> {
    loop {
        datagram.clear();
        datagram.reserve(BUFFER);
        match socket.recv(datagram, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => return received.map(drop),
        }
    }
}

/// The messages of a datagram.
pub fn messages<T: NetlinkDeserializable>(
    mut datagram: &[u8],
) -> impl Iterator<Item = io::Result<NetlinkMessage<T>>> {
    iter::from_fn(move || {
        if datagram.is_empty() {
            return None;
        }
        let message = NetlinkMessage::<T>::deserialize(datagram);
        // If a message cannot be read, its end is unknown.
        let length = message.as_ref().map_or(usize::MAX, |it| {
            let length = it.header.length as usize;
            length.max(1).next_multiple_of(NLMSG_ALIGNTO.into())
        });
        datagram = datagram.get(length..).unwrap_or_default();
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, format!("{error}"));
        Some(message.map_err(invalid))
    })
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NLM_F_DUMP;
    use netlink_packet_route::{RouteNetlinkMessage, link::LinkMessage};
    use netlink_sys::constants::NETLINK_ROUTE;

    use super::*;

    #[test]
    fn an_answer_to_an_earlier_question_is_passed_over() {
        let mut netlink = Netlink::open(NETLINK_ROUTE).unwrap();
        let ask = |index, flag| {
            let mut header = NetlinkHeader::default();
            header.flags = NLM_F_REQUEST | flag;
            let mut message = LinkMessage::default();
            message.header.index = index;
            NetlinkMessage::new(header, RouteNetlinkMessage::GetLink(message).into())
        };
        // Only the first of all interfaces is taken; the other answers are left unread.
        assert!(netlink.ask(ask(0, NLM_F_DUMP), None).unwrap().is_some());
        let answer = netlink.ask(ask(1, 0), None).unwrap();
        let Some(RouteNetlinkMessage::NewLink(it)) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(it.header.index, 1);
        let missing = netlink.ask(ask(u32::MAX >> 1, 0), None).unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn what_is_no_message_ends_the_datagram() {
        let mut read = messages::<RouteNetlinkMessage>(&[0; 40]);
        assert!(read.next().unwrap().is_err());
        assert!(read.next().is_none());
    }
}
