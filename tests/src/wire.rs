//! Flows whose packets are counted one by one.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    netns::{Namespace, PATIENCE},
    pair::{Family, Pair, SERVER},
};

/// A UDP flow that the server begins, from this port.
pub struct Wire {
    /// The server's socket.
    pub server: UdpSocket,
    /// The client's socket.
    pub client: UdpSocket,
}

impl Wire {
    /// Between the hosts of a pair.
    pub fn new(pair: &Pair, port: u16) -> Result<Self> {
        let bind = |host: &Namespace, address: SocketAddr| {
            host.enter(|| UdpSocket::bind(address).context("cannot bind"))
        };
        let server = bind(&pair.server, (Family::V4.server(), port).into())?;
        let client = bind(&pair.client, (Family::V4.client(), 0).into())?;
        server.connect(client.local_addr()?)?;
        client.connect(server.local_addr()?)?;
        client.set_read_timeout(Some(PATIENCE))?;
        server.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { server, client })
    }

    /// Sends this many datagrams out, and this many back.
    pub fn talk(&self, out: usize, back: usize) -> Result<()> {
        for (from, to, count) in [
            (&self.server, &self.client, out),
            (&self.client, &self.server, back),
        ] {
            for _ in 0..count {
                from.send(b"!")?;
                to.recv(&mut [0])?;
            }
        }
        Ok(())
    }

    /// How many packets twheel has counted out and back; zero for a flow that it does not know.
    pub fn counted(&self, host: &Namespace) -> Result<(u64, u64)> {
        let port = self.server.local_addr()?.port();
        let peer = self.client.local_addr()?.port();
        let filter = format!(
            "(sport == {port} and dport == {peer}) or (sport == {peer} and dport == {port})"
        );
        let args = ["flows", "--iface", SERVER, "--json", &filter];
        let ended = host.twheel_once(&args)?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        let Some(line) = ended.lines.first() else {
            return Ok((0, 0));
        };
        let flow: Value = serde_json::from_str(&line.text)?;
        let number = |key: &str| flow[key].as_u64().with_context(|| format!("no {key}"));
        let (orig, reply) = (number("orig_packets")?, number("reply_packets")?);
        Ok(match flow["sport"] == port {
            true => (orig, reply),
            false => (reply, orig),
        })
    }
}
