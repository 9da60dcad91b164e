//! Random packets that do not belong to a flow.

use etherparse::{PacketBuilder, TcpHeader};
use twheel_common::{
    flow::FlowKey,
    packet::{parse, tcp},
    state::Seen,
};
use twheel_tests::plane::{ACK, FIN, Plane, RST, SYN};

use crate::{Random, put, word};

/// A segment of a client's connection; `back`: sent by the server.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    pub client: u32,
    pub back: bool,
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    pub data: usize,
}

impl Packet {
    pub fn frame(self) -> Vec<u8> {
        let client = ([10, 0, 0, 1], 1024 + self.client as u16);
        let server = ([192, 0, 2, 1], 80);
        let (from, to) = if self.back {
            (server, client)
        } else {
            (client, server)
        };
        let mut header = TcpHeader::new(from.1, to.1, self.seq, 1024);
        header.acknowledgment_number = self.ack;
        header.fin = self.flags & FIN != 0;
        header.syn = self.flags & SYN != 0;
        header.rst = self.flags & RST != 0;
        header.ack = self.flags & ACK != 0;
        header.psh = self.flags & tcp::PSH != 0;
        header.urg = self.flags & tcp::URG != 0;
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4(from.0, to.0, 64)
            .tcp_header(header)
            .write(&mut frame, &vec![7; self.data])
            .unwrap();
        frame
    }
}

/// Offsets of the flags and the checksum in the frame of a [`Packet`].
const FLAGS: usize = 47;
const CHECKSUM: usize = 50;

/// A live connection, as its ends see it.
#[derive(Clone, Copy)]
pub struct Live {
    pub client: u32,
    /// The next sequence numbers of the client and of the server.
    pub next: [u32; 2],
}

impl Live {
    /// Opens a connection, with a simultaneous open or without.
    pub fn open(plane: &mut Plane, client: u32, first: [u32; 2], simultaneous: bool) -> Self {
        let mut live = Self {
            client,
            next: first,
        };
        if simultaneous {
            for back in [false, true] {
                live.put(plane, live.packet(back, SYN, first[usize::from(back)], 0));
            }
            live.next = first.map(|it| it.wrapping_add(1));
            for back in [true, false] {
                let seq = first[usize::from(back)];
                live.put(plane, live.packet(back, SYN | ACK, seq, 0));
            }
        } else {
            live.put(plane, live.packet(false, SYN, first[0], 0));
            live.next[0] = first[0].wrapping_add(1);
            live.put(plane, live.packet(true, SYN | ACK, first[1], 0));
            live.next[1] = first[1].wrapping_add(1);
        }
        live.say(plane, false, 0);
        live.say(plane, true, 0);
        live
    }

    pub fn packet(&self, back: bool, flags: u8, seq: u32, data: usize) -> Packet {
        Packet {
            client: self.client,
            back,
            flags,
            seq,
            ack: self.next[usize::from(!back)],
            data,
        }
    }

    /// The client's packets come in, and the server's go out.
    pub fn put(&self, plane: &mut Plane, packet: Packet) {
        put(plane, &packet.frame(), packet.back);
    }

    /// Sends data that acknowledges all that the other side has sent.
    pub fn say(&mut self, plane: &mut Plane, back: bool, data: usize) {
        let seq = self.next[usize::from(back)];
        self.put(plane, self.packet(back, ACK, seq, data));
        self.next[usize::from(back)] = seq.wrapping_add(data as u32);
    }

    /// Sends the FIN of one side.
    pub fn finish(&mut self, plane: &mut Plane, back: bool) {
        let seq = self.next[usize::from(back)];
        self.put(plane, self.packet(back, FIN | ACK, seq, 0));
        self.next[usize::from(back)] = seq.wrapping_add(1);
    }

    pub fn key(&self) -> FlowKey {
        let packet = self.packet(false, ACK, 0, 0);
        parse(packet.frame().as_slice()).unwrap().key
    }

    /// Its state and the time of its latest packet, which determine the deadline, and its
    /// generation.
    pub fn fate(&self, plane: &mut Plane) -> Option<(Seen, u32, u16)> {
        let word = word(plane, self.key())?;
        Some((word.seen(), word.stamp(), word.generation()))
    }
}

/// How far the number of a RST or FIN may be from its sender's next one: docs/states.md.
pub const WINDOW: u32 = 1 << 18;
/// How far an acknowledgment may be behind the other side's next number, and how far ahead of it.
pub const ACKNOWLEDGED: [u32; 2] = [1 << 26, 1 << 20];

/// A distance that is out of the window on either side, sometimes by one.
fn outside(random: &mut Random) -> u32 {
    match random.below(4) {
        0 => WINDOW + 1,
        1 => (WINDOW + 1).wrapping_neg(),
        2 => 1 << 31,
        _ => random.range(WINDOW + 1, (WINDOW + 1).wrapping_neg()),
    }
}

/// The distance of an acknowledgment of data that was never sent, or was sent long ago.
pub fn never_sent(random: &mut Random) -> u32 {
    let [behind, ahead] = ACKNOWLEDGED;
    match random.below(3) {
        0 => ahead + 1,
        1 => (behind + 1).wrapping_neg(),
        _ => random.range(ahead + 1, (behind + 1).wrapping_neg()),
    }
}

/// A packet that does not belong to a live flow and must change nothing: the frame, and whether it
/// goes out.
pub fn hostile(random: &mut Random, live: &Live) -> (Vec<u8>, bool) {
    let back = random.coin();
    let [mine, theirs] = if back {
        [live.next[1], live.next[0]]
    } else {
        live.next
    };
    let mut packet = Packet {
        client: live.client,
        back,
        flags: 0,
        seq: mine.wrapping_add(outside(random)),
        ack: random.choose(&[theirs, random.0 as u32]),
        data: random.choose(&[0, 0, 1, 1400]),
    };
    let mut invalid = None;
    match random.below(8) {
        0 => packet.flags = RST,
        1 => packet.flags = RST | ACK,
        2 => {
            // An old one, sometimes by one byte only.
            packet.flags = RST | ACK;
            packet.seq = mine.wrapping_sub(random.range(1, 1 << 30));
        }
        3 => packet.flags = FIN | ACK,
        4 => {
            packet.flags = FIN | ACK;
            packet.seq = mine.wrapping_sub(random.below(WINDOW));
            packet.ack = theirs.wrapping_add(never_sent(random));
        }
        // The beginning of another connection, or of this one; sometimes with the right numbers.
        5 => (packet.flags, packet.seq) = (SYN, random.choose(&[mine, packet.seq])),
        6 => (packet.flags, packet.seq) = (SYN | ACK, random.choose(&[mine, packet.seq])),
        _ => {
            packet.seq = mine;
            let all = 0..64u8;
            let flags: Vec<u8> = all.filter(|flags| !tcp::valid(*flags)).collect();
            invalid = Some(random.choose(&flags));
        }
    }
    let mut frame = packet.frame();
    if let Some(flags) = invalid {
        frame[FLAGS] = flags;
    }
    if random.below(4) == 0 {
        frame[CHECKSUM] ^= 1 << random.below(8);
    }
    // It comes in or goes out, whoever its sender seems to be.
    (frame, random.coin())
}
