//! Forged segments: of connections between the two hosts of a [`Pair`], from whoever seems to have sent them.

use std::{net::SocketAddr, os::fd::OwnedFd};

use anyhow::{Context, Result, ensure};
use etherparse::{PacketBuilder, TcpHeader};
use serde_json::Value;

use crate::{
    netns::{CLIENT, Namespace, Pair, SERVER},
    path,
};

/// Sends segments that come in by the server's interface.
pub struct Forger {
    socket: OwnedFd,
    /// The client's address and the server's.
    macs: [[u8; 6]; 2],
}

impl Forger {
    /// Beside the client.
    pub fn new(pair: &Pair) -> Result<Self> {
        Ok(Self {
            socket: pair.client.enter(|| path::open(CLIENT, 0))?,
            macs: [mac(&pair.client, CLIENT)?, mac(&pair.server, SERVER)?],
        })
    }

    /// Sends a segment without data that seems to be one end's to the other.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, segment: TcpHeader) -> Result<()> {
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
        packet.tcp_header(tcp).write(&mut frame, &[])?;
        path::send(&self.socket, &frame)
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
