//! What a packet says of its flow, independent of how its headers were laid out.

use crate::key::{Direction, FlowKey};

/// TCP header flags, byte 13 of the header (RFC 9293, section 3.1).
pub mod tcp {
    /// No more data from sender.
    pub const FIN: u8 = 0x01;
    /// Synchronize sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// Push function.
    pub const PSH: u8 = 0x08;
    /// Acknowledgment field is significant.
    pub const ACK: u8 = 0x10;
    /// Urgent pointer field is significant.
    pub const URG: u8 = 0x20;

    /// The combinations of SYN, FIN, RST, ACK and URG that a stack sends, from `tcp_valid_flags` in
    /// `net/netfilter/nf_conntrack_proto_tcp.c`: bit `i` stands for the flags `i`.
    const VALID: u64 = 1 << SYN
        | 1 << (SYN | URG)
        | 1 << (SYN | ACK)
        | 1 << RST
        | 1 << (RST | ACK)
        | 1 << (FIN | ACK)
        | 1 << (FIN | ACK | URG)
        | 1 << ACK
        | 1 << (ACK | URG);

    /// Whether a stack could have sent this combination. PSH, ECE and CWR are valid with any.
    #[inline(always)]
    pub const fn valid(flags: u8) -> bool {
        VALID >> (flags & (FIN | SYN | RST | ACK | URG)) & 1 == 1
    }
}

/// Stands in place of [`tcp`]'s flags if the packet is not TCP.
pub mod datagram {
    /// A UDP datagram.
    pub const UDP: u8 = 0x40;
    /// An ICMP or ICMPv6 query.
    pub const QUERY: u8 = 0x80;
    /// Its answer.
    pub const ANSWER: u8 = 0xc0;
    /// Mask: a packet that is not TCP has at least one of these bits.
    pub const ANY: u8 = 0xc0;
}

/// A TCP segment or a datagram of another protocol: the flow that it belongs to and what it says of
/// it.
///
/// There is no padding, because the kernel's verifier requires that every byte passed to a function
/// is initialized.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Both directions of a connection have the same key.
    pub key: FlowKey,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgment number; meaningless without the ACK flag.
    pub ack: u32,
    /// The sequence number after the segment: SYN and FIN count one each.
    pub end: u32,
    /// Bytes of the IP packet as its header says; the length of the frame if the header cannot say
    /// it (above 64 KiB).
    pub bytes: u32,
    /// Timestamp value and echo reply (RFC 7323) if they are laid out as in [RFC 7323, appendix A];
    /// else 0.
    ///
    /// [RFC 7323, appendix A]: https://www.rfc-editor.org/rfc/rfc7323#appendix-A
    pub stamp: [u32; 2],
    /// The window, unscaled. It and `stamp` are 0 unless [asked
    /// for](crate::packet::Wanted::timing).
    pub window: u32,
    /// Which of the key's two endpoints sent the segment.
    pub direction: Direction,
    /// Flags of [`tcp`] without ECE and CWR, or one of [`datagram`].
    pub flags: u8,
    /// Packets on the wire that were joined to this one, or that it will be split into; mostly 1.
    pub packets: u16,
}

const _: () = assert!(size_of::<Segment>() == size_of::<FlowKey>() + 32);

impl Segment {
    /// The number of packets on the wire that a socket buffer stands for: `gso_segs`. If the sender
    /// (a virtual machine) has not counted them, it is computed from their size: `gso_size` bytes
    /// of data each. 0 means a single packet.
    #[inline(always)]
    pub fn joined(&self, gso_segs: u32, gso_size: u32) -> u32 {
        match (gso_segs, gso_size) {
            (0, 1..) => self.data().div_ceil(gso_size),
            _ => gso_segs,
        }
    }

    /// Bytes of data; for TCP only.
    #[inline(always)]
    fn data(&self) -> u32 {
        let opens_or_ends =
            u32::from(self.flags & tcp::SYN != 0) + u32::from(self.flags & tcp::FIN != 0);
        self.end.wrapping_sub(self.seq).wrapping_sub(opens_or_ends)
    }

    /// Makes the segment stand for `packets` packets on the wire, each with its own headers: what
    /// XDP would have seen. For TCP only; the bytes of a datagram stay those of the whole.
    #[inline(always)]
    pub fn count_joined(&mut self, packets: u16) {
        let headers = match self.flags & datagram::ANY {
            0 => self.bytes.wrapping_sub(self.data()),
            _ => 0,
        };
        self.bytes = self
            .bytes
            .wrapping_add(headers.wrapping_mul(u32::from(packets) - 1));
        self.packets = packets;
    }

    /// All fields 0: no packet.
    pub const NONE: Self = Self {
        key: FlowKey::NONE,
        seq: 0,
        ack: 0,
        end: 0,
        bytes: 0,
        stamp: [0; 2],
        window: 0,
        direction: Direction::FromLow,
        flags: 0,
        packets: 0,
    };
}
