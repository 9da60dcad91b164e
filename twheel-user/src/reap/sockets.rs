//! Closing local sockets through sock_diag (`net/ipv4/inet_diag.c`, `SOCK_DESTROY`).

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use anyhow::Result;
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, SOCK_DESTROY, TCP_LISTEN, TCP_TIME_WAIT},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};

use super::netlink::Netlink;

/// A netlink socket to the sockets of a network namespace.
pub struct Sockets(Netlink);

/// A local socket that was found.
#[derive(Debug)]
pub struct Found(SocketId);

impl Sockets {
    /// Of this thread's network namespace.
    pub fn open() -> Result<Self> {
        Netlink::open(netlink_sys::constants::NETLINK_SOCK_DIAG).map(Self)
    }

    /// The TCP socket with these ends, if there is one that is neither listening nor about to be forgotten.
    ///
    /// What the kernel looks up may fall back to a listening socket with the local end: so it is looked at before it is
    /// closed, and meant by its cookie then.
    pub fn find(&mut self, local: SocketAddr, peer: SocketAddr) -> io::Result<Option<Found>> {
        let asked = SocketId {
            source_port: local.port(),
            destination_port: peer.port(),
            source_address: local.ip(),
            destination_address: peer.ip(),
            interface_id: 0,
            cookie: [0xff; 8],
        };
        let answer = match self.ask(asked, NLM_F_REQUEST, None) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            answer => answer?,
        };
        let Some(SockDiagMessage::InetResponse(found)) = answer else {
            return Ok(None);
        };
        let id = found.header.socket_id;
        let is_it = id.source_port == local.port()
            && id.destination_port == peer.port()
            && is_same(id.source_address, local.ip())
            && is_same(id.destination_address, peer.ip());
        let ends = [TCP_LISTEN, TCP_TIME_WAIT].contains(&found.header.state);
        Ok((is_it && !ends).then_some(Found(SocketId {
            // As it was asked for: a socket of IPv6 may have IPv4 ends.
            source_address: local.ip(),
            destination_address: peer.ip(),
            ..id
        })))
    }

    /// Closes a socket: its owner sees ECONNABORTED, and its peer gets a RST. `false`: it is gone.
    pub fn close(&mut self, socket: Found) -> io::Result<bool> {
        match self.ask(socket.0, NLM_F_REQUEST | NLM_F_ACK, Some(SOCK_DESTROY)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Err(io::Error::new(
                error.kind(),
                "this kernel closes no sockets: it has no CONFIG_INET_DIAG_DESTROY",
            )),
            Err(error) => Err(error),
        }
    }

    fn ask(
        &mut self,
        socket_id: SocketId,
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
            extensions: ExtensionFlags::empty(),
            states: StateFlags::all(),
            socket_id,
        };
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let request = SockDiagMessage::InetRequest(request).into();
        self.0.ask(NetlinkMessage::new(header, request), kind)
    }
}

/// Whether two addresses are the same, one of them perhaps mapped.
fn is_same(one: IpAddr, two: IpAddr) -> bool {
    let mapped = |address| match address {
        IpAddr::V4(address) => Ipv6Addr::to_canonical(&address.to_ipv6_mapped()),
        IpAddr::V6(address) => address.to_canonical(),
    };
    mapped(one) == mapped(two)
}
