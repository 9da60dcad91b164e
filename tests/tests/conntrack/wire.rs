//! Segments that the test crafts.

use std::{
    fmt::Debug,
    net::{SocketAddr, SocketAddrV4},
    os::fd::AsRawFd,
};

use anyhow::{Context, Result, bail};
use etherparse::PacketBuilder;
use nix::sys::socket::{MsgFlags, SockaddrStorage, sendto};
use twheel_common::state::State::{self, Established, SynRecv, SynSent};
use twheel_tests::{
    pair::Family,
    plane::{ACK, FIN, RST, SYN},
};

use crate::{
    lab::{CRAFTED, Lab, Name},
    wire::Side::{Client, Server},
};

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client = 0,
    Server = 1,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Client => Server,
            Server => Client,
        }
    }
}

/// A connection whose segments are crafted.
pub struct Wire {
    pub client_port: u16,
    /// The next sequence number of each side.
    pub next: [u32; 2],
}

/// The data of a segment: `length` bytes from sequence number `seq` on.
pub struct Data {
    pub seq: u32,
    pub length: u32,
}

impl Wire {
    /// The first sequence number of a side.
    pub fn first(side: Side) -> u32 {
        [1_000_000, 2_000_000][side as usize]
    }

    pub fn name(&self) -> Name {
        (
            SocketAddr::new(Family::V4.client(), self.client_port),
            SocketAddr::new(Family::V4.server(), CRAFTED),
        )
    }

    pub fn check(&self, lab: &Lab, state: State) -> Result<()> {
        lab.check(self.name(), state)
    }

    /// Sends the next segment of a side, without data.
    pub fn send(&mut self, lab: &Lab, side: Side, flags: u8) -> Result<()> {
        self.send_data(lab, side, flags, 0)
    }

    /// Sends segments without data, and checks the state after each.
    pub fn walk(&mut self, lab: &Lab, steps: &[(Side, u8, State)]) -> Result<()> {
        for (side, flags, state) in steps {
            self.send(lab, *side, *flags)?;
            self.check(lab, *state)?;
        }
        Ok(())
    }

    pub fn send_data(&mut self, lab: &Lab, side: Side, flags: u8, length: u32) -> Result<()> {
        let seq = self.next[side as usize];
        self.put(lab, side, flags, Data { seq, length })?;
        let longer = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        self.next[side as usize] = seq.wrapping_add(length + longer);
        Ok(())
    }

    /// Sends a segment without data that does not change its sender's next sequence number.
    pub fn send_at(&self, lab: &Lab, side: Side, flags: u8, seq: u32) -> Result<()> {
        self.put(lab, side, flags, Data { seq, length: 0 })
    }

    /// The same with data.
    pub fn put(&self, lab: &Lab, side: Side, flags: u8, data: Data) -> Result<()> {
        let (client, server) = self.name();
        let (from, to) = match side {
            Client => (client, server),
            Server => (server, client),
        };
        let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else {
            bail!("crafted segments must be IPv4");
        };
        let mut segment = PacketBuilder::ipv4(from.ip().octets(), to.ip().octets(), 64).tcp(
            from.port(),
            to.port(),
            data.seq,
            u16::MAX,
        );
        if flags & ACK != 0 {
            segment = segment.ack(self.next[side.other() as usize]);
        }
        if flags & SYN != 0 {
            segment = segment.syn();
        }
        if flags & FIN != 0 {
            segment = segment.fin();
        }
        if flags & RST != 0 {
            segment = segment.rst();
        }
        let mut packet = Vec::new();
        segment.write(&mut packet, &vec![0; data.length as usize])?;
        let to = SockaddrStorage::from(SocketAddrV4::new(*to.ip(), 0));
        let socket = lab.raw[side as usize].as_raw_fd();
        sendto(socket, &packet, &to, MsgFlags::empty()).context("cannot send a segment")?;
        Ok(())
    }
}

impl Lab {
    pub fn craft(&mut self) -> Wire {
        self.next_port += 1;
        Wire {
            client_port: self.next_port,
            next: [Client, Server].map(Wire::first),
        }
    }

    /// A crafted connection that is established.
    pub fn craft_established(&mut self) -> Result<Wire> {
        let mut wire = self.craft();
        let handshake = [
            (Client, SYN, SynSent),
            (Server, SYN | ACK, SynRecv),
            (Client, ACK, Established),
        ];
        wire.walk(self, &handshake)?;
        Ok(wire)
    }
}

/// The segments that establish a connection.
pub const HANDSHAKE: &[(Side, u8)] = &[(Client, SYN), (Server, SYN | ACK), (Client, ACK)];
