//! The loaded programs on crafted packets, under virtual time: hours pass in milliseconds, and no
//! test reads a clock.
#![allow(missing_docs)]

mod capacity;
mod cpus;
mod datagrams;
mod delete;
mod enforce;
mod lives;
mod parser;
mod policy;
mod reload;
mod ring;
mod rto;
mod updates;
mod wheel;

use twheel_common::{
    event::{Event, Reason},
    packet::parse,
    state::{State, View},
};
use twheel_tests::plane::{ACK, Plane, SYN, frame};

/// What the data planes of these tests see, unless a test says otherwise.
const ONE_WAY: View = View {
    one_way: true,
    strict: false,
};

fn ended(event: &Event) -> (Reason, State) {
    (
        Reason::from_raw(event.reason).unwrap(),
        event.seen().state(),
    )
}

fn all_ended(events: &[Event]) -> Vec<(Reason, State)> {
    events.iter().map(ended).collect()
}

/// Establishes a connection that is seen from both sides.
fn establish(plane: &mut Plane, client: u32) {
    plane.receive(&frame(client, false, SYN));
    plane.send(&frame(client, true, SYN | ACK));
    plane.receive(&frame(client, false, ACK));
}

/// The index of a client's record in the table.
fn index(plane: &mut Plane, client: u32) -> u32 {
    let key = parse(frame(client, false, SYN).as_slice()).unwrap().key;
    let flows = plane.plane().flows().unwrap();
    flows.iter().find(|flow| flow.key == key).unwrap().index
}

/// The frame with the tags of these VLANs, the outer one first.
fn tagged(frame: &[u8], vlans: &[u16]) -> Vec<u8> {
    let tags = vlans.iter().flat_map(|vlan| {
        let [high, low] = vlan.to_be_bytes();
        [0x81, 0, high, low]
    });
    let (addresses, rest) = frame.split_at(12);
    [addresses, &tags.collect::<Vec<_>>(), rest].concat()
}

/// A UDP datagram or an ICMP message from 10.0.0.`client` to 192.0.2.1, or back; similarly over
/// IPv6.
fn datagram(client: u8, back: bool, icmp: Option<u8>, v6: bool) -> Vec<u8> {
    let (low, high) = (client, 200);
    let (source, destination) = if back { (high, low) } else { (low, high) };
    let link = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip = if v6 {
        let address = |last| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        link.ipv6(address(source), address(destination), 64)
    } else {
        link.ipv4([10, 0, 0, source], [10, 0, 0, destination], 64)
    };
    let mut frame = Vec::new();
    match icmp {
        None => {
            let (sport, dport) = if back { (53, 5_000) } else { (5_000, 53) };
            ip.udp(sport, dport).write(&mut frame, &[0; 20]).unwrap();
        }
        Some(kind) => {
            let header = [kind, 0, 0, 0, 0x12, 0x34, 0, 1];
            let proto = if v6 { 58 } else { 1 };
            ip.write(&mut frame, proto.into(), &header).unwrap();
        }
    }
    frame
}

/// The client's port, as in [`frame`].
fn port(client: u32) -> u16 {
    1024 + client as u16
}

/// xorshift64*: the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

/// A segment over IPv4, with or without data, from the client or to it.
fn segment(back: bool, flags: u8, seq: u32, ack: u32, length: usize) -> Vec<u8> {
    let (client, server) = (([10, 0, 0, 1], 1025), ([192, 0, 2, 1], 80));
    let (from, to) = if back {
        (server, client)
    } else {
        (client, server)
    };
    let mut tcp = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv4(from.0, to.0, 64)
        .tcp(from.1, to.1, seq, 1_000);
    if flags & SYN != 0 {
        tcp = tcp.syn();
    }
    if flags & ACK != 0 {
        tcp = tcp.ack(ack);
    }
    let mut frame = Vec::new();
    tcp.write(&mut frame, &vec![0; length]).unwrap();
    frame
}
