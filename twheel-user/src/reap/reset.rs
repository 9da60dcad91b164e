//! Resets both ends of a connection by forged RST segments.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use anyhow::Result;
use caps::Capability;
use etherparse::PacketBuilder;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    failure::{Failure, Kind},
    privilege::lacks,
};

/// Raw sockets of a network namespace.
pub struct Resets {
    v4: Socket,
    v6: Socket,
}

/// A RST that its receiver takes for its peer's next segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// The other end, from which the RST seems to come.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
    /// The sequence number that the receiver expects next. Only an exact match resets the
    /// connection; else the receiver answers with a challenge ACK (RFC 5961, section 3.2).
    pub seq: u32,
    /// The receiver's own next sequence number.
    pub ack: u32,
}

impl Reset {
    /// The packet, from the IP header on.
    fn packet(&self) -> Result<Vec<u8>, io::Error> {
        const TTL: u8 = 64;
        let builder = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                PacketBuilder::ipv4(from.octets(), to.octets(), TTL)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                PacketBuilder::ipv6(from.octets(), to.octets(), TTL)
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let mut packet = Vec::with_capacity(60);
        builder
            .tcp(self.from.port(), self.to.port(), self.seq, 0)
            .rst()
            .ack(self.ack)
            .write(&mut packet, &[])
            .map_err(io::Error::other)?;
        Ok(packet)
    }
}

impl Resets {
    /// Opens sockets in this thread's network namespace.
    pub fn open() -> Result<Self> {
        // `IPPROTO_RAW` means, for either family, that the sender writes the IP header.
        let open = |domain, name| {
            let protocol = Some(Protocol::from(libc::IPPROTO_RAW));
            Socket::new(domain, Type::RAW, protocol).map_err(|error| {
                let kind = match error.kind() {
                    io::ErrorKind::PermissionDenied => Kind::Permission,
                    _ => Kind::Other,
                };
                let why = lacks(&error, Capability::CAP_NET_RAW);
                Failure::new(
                    kind,
                    format!("--reap reset: cannot open a raw socket of {name}: {why}"),
                )
            })
        };
        Ok(Self {
            v4: open(Domain::IPV4, "IPv4")?,
            v6: open(Domain::IPV6, "IPv6")?,
        })
    }

    /// Sends a RST.
    pub fn send(&self, reset: &Reset) -> io::Result<()> {
        let socket = match reset.to {
            SocketAddr::V4(_) => &self.v4,
            SocketAddr::V6(_) => &self.v6,
        };
        // A port has no meaning for a raw socket, and IPv6 refuses one.
        let to = SockAddr::from(SocketAddr::new(reset.to.ip(), 0));
        socket.send_to(&reset.packet()?, &to).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    use super::*;

    #[test]
    fn a_reset_has_the_numbers_and_checksums_that_its_end_expects() {
        for (from, to) in [
            ("192.0.2.1:80", "10.0.0.1:4000"),
            ("[2001:db8::1]:80", "[fd00::7]:4000"),
        ] {
            let reset = Reset {
                from: from.parse().unwrap(),
                to: to.parse().unwrap(),
                seq: 0xdead_beef,
                ack: 7,
            };
            let packet = reset.packet().unwrap();
            let sliced = SlicedPacket::from_ip(&packet).unwrap();
            let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
                panic!("no TCP");
            };
            assert_eq!((tcp.source_port(), tcp.destination_port()), (80, 4000));
            assert_eq!(
                (tcp.sequence_number(), tcp.acknowledgment_number()),
                (0xdead_beef, 7)
            );
            assert!(tcp.rst() && tcp.ack() && !tcp.syn() && !tcp.fin());
            let sum = match sliced.net.unwrap() {
                NetSlice::Ipv4(ip) => {
                    let header = ip.header().to_header();
                    assert_eq!(header.calc_header_checksum(), header.header_checksum);
                    tcp.calc_checksum_ipv4(header.source, header.destination)
                }
                NetSlice::Ipv6(ip) => {
                    let header = ip.header().to_header();
                    tcp.calc_checksum_ipv6(header.source, header.destination)
                }
                _ => panic!("another protocol"),
            };
            assert_eq!(sum.unwrap(), tcp.checksum());
        }
        let mixed = Reset {
            from: "192.0.2.1:80".parse().unwrap(),
            to: "[fd00::7]:1".parse().unwrap(),
            seq: 0,
            ack: 0,
        };
        assert!(mixed.packet().is_err());
    }
}
