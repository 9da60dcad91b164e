//! Forged segments of connections between the two hosts of a [`Pair`], with any sender's address.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
};

use anyhow::{Context, Result, ensure};
use etherparse::{PacketBuilder, PacketHeaders, TcpHeader, TransportHeader, VlanId};
use serde_json::Value;

use crate::{
    netns::Namespace,
    pair::{CLIENT, Family, Pair, SERVER},
    path,
};

/// Sends segments that arrive at the server's interface.
pub struct Forger {
    socket: OwnedFd,
    /// The link-layer addresses of the client and the server.
    macs: [[u8; 6]; 2],
}

impl Forger {
    /// On the client's host.
    pub fn new(pair: &Pair) -> Result<Self> {
        Ok(Self {
            socket: pair.client.enter(|| path::open(CLIENT, 0))?,
            macs: [mac(&pair.client, CLIENT)?, mac(&pair.server, SERVER)?],
        })
    }

    /// Sends a segment without data that appears to come from one end of a connection.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, segment: TcpHeader) -> Result<()> {
        self.send_data(from, to, segment, &[])
    }

    /// Sends a segment that appears to come from one end of a connection.
    pub fn send_data(
        &self,
        from: SocketAddr,
        to: SocketAddr,
        segment: TcpHeader,
        data: &[u8],
    ) -> Result<()> {
        let link = PacketBuilder::ethernet2(self.macs[0], self.macs[1]);
        let tcp = TcpHeader {
            source_port: from.port(),
            destination_port: to.port(),
            window_size: 1000,
            ..segment
        };
        let packet = match (from, to) {
            (SocketAddr::V4(from), SocketAddr::V4(to)) => {
                link.ipv4(from.ip().octets(), to.ip().octets(), 64)
            }
            (SocketAddr::V6(from), SocketAddr::V6(to)) => {
                link.ipv6(from.ip().octets(), to.ip().octets(), 64)
            }
            _ => anyhow::bail!("{from} and {to} are of two families"),
        };
        let mut frame = Vec::new();
        packet.tcp_header(tcp).write(&mut frame, data)?;
        path::send(&self.socket, &frame)
    }

    /// Sends an IPv4 datagram from and to this port, in a VLAN.
    pub fn tagged(&self, port: u16, vlan: VlanId) -> Result<()> {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (Family::V4.client(), Family::V4.server()) else {
            anyhow::bail!("two families");
        };
        let mut frame = Vec::new();
        PacketBuilder::ethernet2(self.macs[0], self.macs[1])
            .single_vlan(vlan)
            .ipv4(from.octets(), to.octets(), 64)
            .udp(port, port)
            .write(&mut frame, b"tagged")?;
        path::send(&self.socket, &frame)
    }

    /// Sends an echo request with this identifier, which the server answers.
    pub fn ping(&self, family: Family, id: u16) -> Result<()> {
        let link = PacketBuilder::ethernet2(self.macs[0], self.macs[1]);
        let mut frame = Vec::new();
        match (family.client(), family.server()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => link
                .ipv4(from.octets(), to.octets(), 64)
                .icmpv4_echo_request(id, 1)
                .write(&mut frame, b"?"),
            (IpAddr::V6(from), IpAddr::V6(to)) => link
                .ipv6(from.octets(), to.octets(), 64)
                .icmpv6_echo_request(id, 1)
                .write(&mut frame, b"?"),
            _ => anyhow::bail!("two families"),
        }?;
        path::send(&self.socket, &frame)
    }
}

/// Captures what the two ends of a connection send, each at the receiving host.
pub struct Tap([OwnedFd; 2]);

/// A captured segment.
#[derive(Clone, Debug)]
pub struct Heard {
    /// Its source is the client, really or apparently.
    pub from_client: bool,
    /// Its TCP header.
    pub header: TcpHeader,
    /// Its data.
    pub data: Vec<u8>,
}

impl Heard {
    /// The sequence number after its last byte.
    pub fn end(&self) -> u32 {
        let flags = u32::from(self.header.syn) + u32::from(self.header.fin);
        let start = self.header.sequence_number;
        start.wrapping_add(self.data.len() as u32 + flags)
    }
}

impl Tap {
    /// Captures on both hosts.
    pub fn new(pair: &Pair) -> Result<Self> {
        let all = libc::ETH_P_ALL as u16;
        Ok(Self([
            pair.server.enter(|| path::open(SERVER, all))?,
            pair.client.enter(|| path::open(CLIENT, all))?,
        ]))
    }

    /// What was captured of a client's connection since the last call; each side's segments in
    /// order.
    pub fn heard(&self, client: SocketAddr) -> Result<Vec<Heard>> {
        let mut all = Vec::new();
        for socket in &self.0 {
            let mut frame = vec![0; 1 << 16];
            while let Ok(length) = nix::unistd::read(socket, &mut frame) {
                let packet = PacketHeaders::from_ethernet_slice(&frame[..length])?;
                let Some(TransportHeader::Tcp(header)) = packet.transport else {
                    continue;
                };
                let from_client = header.source_port == client.port();
                if from_client || header.destination_port == client.port() {
                    let data = packet.payload.slice().to_vec();
                    all.push(Heard {
                        from_client,
                        header,
                        data,
                    });
                }
            }
        }
        Ok(all)
    }
}

fn mac(host: &Namespace, interface: &str) -> Result<[u8; 6]> {
    let links: Value = serde_json::from_str(&host.ip(&format!("-j link show {interface}"))?)?;
    let text = links[0]["address"].as_str().context("no address")?;
    let bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    let bytes: Vec<_> = bytes.collect::<Result<_, _>>()?;
    ensure!(bytes.len() == 6, "{text} is no address of Ethernet");
    Ok(bytes.as_slice().try_into()?)
}
