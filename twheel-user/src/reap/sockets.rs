//! Closes local sockets through sock_diag (`net/ipv4/inet_diag.c`, `SOCK_DESTROY`).

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result};
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{
        AF_INET, AF_INET6, IPPROTO_TCP, SOCK_DESTROY, TCP_CLOSE_WAIT, TCP_CLOSING, TCP_ESTABLISHED,
        TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_LAST_ACK, TCP_LISTEN, TCP_SYN_SENT, TCP_TIME_WAIT,
    },
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags, nlas::Nla},
};
use twheel_common::{
    flow::Direction,
    state::{Seen, State},
};

use crate::netlink::Netlink;

/// A netlink socket to sock_diag of a network namespace.
pub struct Sockets(Netlink);

/// A local socket that was found.
#[derive(Debug)]
pub struct FoundSocket {
    id: SocketId,
    state: u8,
    /// Time since data or an ACK was last received or data last sent, by the kernel's clocks;
    /// `None` for a half-open socket, which has no such times.
    pub idle: Option<Duration>,
}

impl FoundSocket {
    /// Whether the socket has sent a SYN and waits for the answer.
    pub fn is_opening(&self) -> bool {
        self.state == TCP_SYN_SENT
    }

    /// The flow's state bits as the socket shows them: its state in conntrack's words, and which
    /// sides have sent a FIN. `None` for a half-open socket.
    pub fn seen(&self, local: Direction, initiator: Direction) -> Option<Seen> {
        let peer = local.reverse();
        let (state, finished): (_, &[_]) = match self.state {
            TCP_ESTABLISHED => (State::Established, &[]),
            TCP_FIN_WAIT1 => (State::FinWait, &[local]),
            // The socket's FIN was acknowledged.
            TCP_FIN_WAIT2 => (State::CloseWait, &[local]),
            TCP_CLOSE_WAIT => (State::CloseWait, &[peer]),
            TCP_CLOSING | TCP_LAST_ACK => (State::LastAck, &[local, peer]),
            _ => return None,
        };
        Some(Seen::of_socket(state, initiator, finished))
    }
}

/// From `struct tcp_info` (`include/uapi/linux/tcp.h`), which grows from kernel to kernel: the
/// least of `tcpi_last_data_sent`, `tcpi_last_data_recv` and `tcpi_last_ack_recv`, in milliseconds.
fn idle(tcp_info: &[u8]) -> Option<Duration> {
    [44, 52, 56]
        .into_iter()
        .map(|at| {
            let bytes = tcp_info.get(at..at + 4)?;
            bytes.try_into().ok().map(u32::from_ne_bytes)
        })
        .try_fold(u32::MAX, |least, ago| Some(least.min(ago?)))
        .map(|least| Duration::from_millis(least.into()))
}

impl Sockets {
    /// Opens a socket in this thread's network namespace.
    pub fn open() -> Result<Self> {
        let netlink = Netlink::open(netlink_sys::constants::NETLINK_SOCK_DIAG);
        netlink.map(Self).context("cannot open a netlink socket")
    }

    /// The TCP socket with these endpoints, unless it is a listening socket or one in TIME_WAIT.
    ///
    /// The kernel's lookup may fall back to a listening socket with the local endpoint. So the
    /// socket is inspected before it is closed, and then closed by its cookie.
    ///
    /// `bound`: the interface that the socket is bound to; 0: none.
    pub fn find(
        &mut self,
        local: SocketAddr,
        peer: SocketAddr,
        bound: u32,
    ) -> io::Result<Option<FoundSocket>> {
        let asked = SocketId {
            source_port: local.port(),
            destination_port: peer.port(),
            source_address: local.ip(),
            destination_address: peer.ip(),
            interface_id: bound,
            cookie: [0xff; 8],
        };
        let answer = match self.ask(asked, ExtensionFlags::INFO, NLM_F_REQUEST, None) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            answer => answer?,
        };
        let Some(SockDiagMessage::InetResponse(found)) = answer else {
            return Ok(None);
        };
        let id = found.header.socket_id;
        let is_it = id.source_port == local.port()
            && id.destination_port == peer.port()
            && id.interface_id == bound
            && is_same(id.source_address, local.ip())
            && is_same(id.destination_address, peer.ip());
        let ends = [TCP_LISTEN, TCP_TIME_WAIT].contains(&found.header.state);
        Ok((is_it && !ends).then_some(FoundSocket {
            state: found.header.state,
            idle: found.nlas.iter().find_map(|nla| match nla {
                Nla::TcpInfo(info) => idle(info),
                _ => None,
            }),
            id: SocketId {
                // The addresses as asked for, since an IPv6 socket may have IPv4 endpoints.
                source_address: local.ip(),
                destination_address: peer.ip(),
                ..id
            },
        }))
    }

    /// Closes a socket: its owner gets ECONNABORTED, and its peer gets a RST. `false`: the socket
    /// no longer exists.
    pub fn close(&mut self, socket: FoundSocket) -> io::Result<bool> {
        let flags = NLM_F_REQUEST | NLM_F_ACK;
        match self.ask(
            socket.id,
            ExtensionFlags::empty(),
            flags,
            Some(SOCK_DESTROY),
        ) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Err(io::Error::new(
                error.kind(),
                "this kernel cannot close sockets: it has no CONFIG_INET_DIAG_DESTROY",
            )),
            Err(error) => Err(error),
        }
    }

    fn ask(
        &mut self,
        socket_id: SocketId,
        extensions: ExtensionFlags,
        flags: u16,
        kind: Option<u16>,
    ) -> io::Result<Option<SockDiagMessage>> {
        let family = match socket_id.source_address {
            IpAddr::V4(_) => AF_INET,
            IpAddr::V6(_) => AF_INET6,
        };
        let request = InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions,
            states: StateFlags::all(),
            socket_id,
        };
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let request = SockDiagMessage::InetRequest(request).into();
        self.0.ask(NetlinkMessage::new(header, request), kind)
    }
}

/// Whether two addresses are the same, where either may be an IPv4-mapped one.
fn is_same(one: IpAddr, two: IpAddr) -> bool {
    let mapped = |address| match address {
        IpAddr::V4(address) => Ipv6Addr::to_canonical(&address.to_ipv6_mapped()),
        IpAddr::V6(address) => address.to_canonical(),
    };
    mapped(one) == mapped(two)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(sent: u32, received: u32, acknowledged: u32) -> Vec<u8> {
        let mut info = vec![0; 104];
        // The kernel does not keep `tcpi_last_ack_sent`: it is 0.
        for (at, ago) in [(44, sent), (48, 0), (52, received), (56, acknowledged)] {
            info[at..at + 4].copy_from_slice(&ago.to_ne_bytes());
        }
        info
    }

    #[test]
    fn a_socket_is_idle_since_whatever_came_or_went_last() {
        for (sent, received, acknowledged) in [(7, 30, 20), (30, 7, 20), (20, 30, 7)] {
            let idle = idle(&info(sent, received, acknowledged));
            assert_eq!(idle, Some(Duration::from_millis(7)));
        }
        assert_eq!(idle(&info(7, 7, 7)[..59]), None);
    }

    #[test]
    fn the_state_of_a_socket_is_told_in_conntracks_words() {
        let (local, peer) = (Direction::FromHigh, Direction::FromLow);
        let seen = |state| {
            let found = FoundSocket {
                id: SocketId::new_v4(),
                state,
                idle: None,
            };
            found.seen(local, peer)
        };
        for (state, wanted) in [
            (TCP_ESTABLISHED, State::Established),
            (TCP_FIN_WAIT1, State::FinWait),
            (TCP_FIN_WAIT2, State::CloseWait),
            (TCP_CLOSE_WAIT, State::CloseWait),
            (TCP_CLOSING, State::LastAck),
            (TCP_LAST_ACK, State::LastAck),
        ] {
            let seen = seen(state).unwrap();
            assert_eq!((seen.state(), seen.initiator()), (wanted, peer));
            assert!(seen.is_replied() && seen.is_pickup());
        }
        // SYN_SENT and SYN_RECV are half open.
        assert_eq!((seen(2), seen(3)), (None, None));
    }
}
