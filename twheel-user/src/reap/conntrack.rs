//! Deleting entries of the kernel's connection tracking over ctnetlink (`net/netfilter/nf_conntrack_netlink.c`).

use std::{io, net::SocketAddr};

use anyhow::Result;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterProtoFamily,
    conntrack::{ConntrackAttribute, ConntrackMessage, IPTuple, ProtoTuple, Protocol, Tuple},
};

use super::netlink::Netlink;

/// A netlink socket to the conntrack of a network namespace.
pub struct Conntrack(Netlink);

impl Conntrack {
    /// Of this thread's network namespace.
    pub fn open() -> Result<Self> {
        Netlink::open(netlink_sys::constants::NETLINK_NETFILTER).map(Self)
    }

    /// Deletes the entry of which one tuple, original or reply, is that of packets from `src` to `dst`. Returns whether
    /// there was one.
    pub fn delete(
        &mut self,
        proto: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> io::Result<bool> {
        let family = match src {
            SocketAddr::V4(_) => NetfilterProtoFamily::IPv4,
            SocketAddr::V6(_) => NetfilterProtoFamily::IPv6,
        };
        // Named the original's, yet the kernel looks for it among both: it hashes either.
        let tuple = ConntrackAttribute::CtaTupleOrig(vec![
            Tuple::Ip(vec![
                IPTuple::SourceAddress(src.ip()),
                IPTuple::DestinationAddress(dst.ip()),
            ]),
            Tuple::Proto(vec![
                ProtoTuple::Protocol(proto),
                ProtoTuple::SourcePort(src.port()),
                ProtoTuple::DestinationPort(dst.port()),
            ]),
        ]);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK;
        let message = NetfilterMessage::new(
            NetfilterHeader::new(family, 0, 0),
            ConntrackMessage::Delete(vec![tuple]),
        );
        let request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        match self.0.ask(request, None) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}
