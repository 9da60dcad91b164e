//! Enforcement: verdicts on later packets of expired flows, how many are answered, and the answer.
//!
//! The answer is that of a host that does not know the connection: a RST that the packet's sender
//! accepts (RFC 9293, section 3.10.7.1).

use crate::{
    key::{Direction, FlowKey},
    packet::PROTO_TCP,
    segment::{Segment, datagram, tcp},
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Most tombstones, if packets can be refused for good.
pub const MAX_TOMBS: u32 = 1 << 16;
/// Most tombstones if they cannot. Packets are then refused only for a moment, of never more than
/// one flow at a time.
pub const HELD: u32 = 1 << 8;
/// Most sources whose answers are counted.
pub const MAX_SOURCES: u32 = 1 << 14;
/// Highest rate of answers to a source, per second: the clock's units times this fit into 64 bits.
pub const MAX_RATE: u32 = 1_000_000;

const _: () = assert!(HELD > 0 && HELD < MAX_SOURCES && MAX_SOURCES < MAX_TOMBS);

/// A tombstone: the value in the map `TOMBSTONES` for the key of an expired flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Tombstone {
    /// [`DROP`](Self::DROP) or [`RESET`](Self::RESET). With any other value, packets pass.
    pub verdict: u32,
    /// Always 0.
    pub reserved: u32,
}

impl Tombstone {
    /// Packets are dropped.
    pub const DROP: u32 = 1;
    /// TCP segments are answered with a RST; everything else is dropped.
    pub const RESET: u32 = 2;

    /// A tombstone with this verdict.
    pub const fn new(verdict: u32) -> Self {
        Self {
            verdict,
            reserved: 0,
        }
    }
}

/// Whether a segment is answered under the verdict [`Tombstone::RESET`]: a RST never is, nor a packet
/// that is not TCP.
#[inline(always)]
pub fn has_answer(flags: u8) -> bool {
    flags & (datagram::ANY | tcp::RST) == 0
}

/// How many more answers a source may have. The value is the time (clock units times the rate)
/// after which the source may have a whole second's answers at once. It is one word, so it is never
/// torn; two CPUs at the same time may give one answer too many.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket(pub u64);

impl Bucket {
    /// Takes an answer. There are `rate` answers per `second` (units), and at most as many at once.
    /// `None` if none is left.
    #[inline(always)]
    pub fn take(self, now: u64, rate: u32, second: u32) -> Option<Self> {
        let (rate, second) = (u64::from(rate), u64::from(second));
        let now = now.wrapping_mul(rate);
        let full = if self.0 > now { self.0 } else { now };
        let full = full.wrapping_add(second);
        (full.wrapping_sub(now) <= rate.wrapping_mul(second)).then_some(Self(full))
    }
}

/// The halfwords of a frame's headers, as they are in memory; as many as the longer answer has.
pub type Headers = [u16; V6 / 2];
/// Bytes of an answer over IPv4, and of the shortest frame that can be answered: Ethernet, IPv4 and
/// TCP without options.
pub const V4: usize = 54;
/// Bytes of an answer over IPv6.
pub const V6: usize = 74;

/// Halfwords of the Ethernet header; the IP header begins after them.
const IP: usize = 7;
/// Hop limit of an answer.
const TTL: u16 = 64;

/// Turns the first [`V4`] bytes of the segment's frame into the answer. Returns the answer's length
/// in bytes; 0 if the frame cannot be answered in place, because it has VLAN tags, IPv4 options or
/// extension headers, or is a fragment.
#[inline(always)]
pub fn answer(frame: &mut Headers, segment: &Segment) -> usize {
    let length = match u16::from_be(frame[6]) {
        0x0800 => V4,
        0x86dd => V6,
        _ => return 0,
    };
    let begins = u16::from_be(frame[IP]) >> 8;
    if length == V4 {
        let fragment = u16::from_be(frame[IP + 3]) & 0x3fff;
        let protocol = u16::from_be(frame[IP + 4]) as u8;
        if begins != 0x45 || fragment != 0 || protocol != PROTO_TCP {
            return 0;
        }
        frame[IP] = 0x4500_u16.to_be();
        frame[IP + 1] = (V4 as u16 - 14).to_be();
        frame[IP + 2] = 0;
        frame[IP + 3] = 0x4000_u16.to_be();
        frame[IP + 4] = (TTL << 8 | u16::from(PROTO_TCP)).to_be();
        frame[IP + 5] = 0;
        exchange::<2>(frame, IP + 6);
        let mut sum = 0;
        for halfword in &frame[IP..IP + 10] {
            sum += u64::from(*halfword);
        }
        frame[IP + 5] = checksum(sum);
        transport::<{ IP + 10 }>(frame, segment);
    } else {
        let protocol = (u16::from_be(frame[IP + 3]) >> 8) as u8;
        if begins >> 4 != 6 || protocol != PROTO_TCP {
            return 0;
        }
        frame[IP] = 0x6000_u16.to_be();
        frame[IP + 1] = 0;
        frame[IP + 2] = 20_u16.to_be();
        frame[IP + 3] = (u16::from(PROTO_TCP) << 8 | TTL).to_be();
        exchange::<8>(frame, IP + 4);
        transport::<{ IP + 20 }>(frame, segment);
    }
    exchange::<3>(frame, 0);
    length
}

/// Exchanges a field of `N` halfwords with the one after it.
#[inline(always)]
fn exchange<const N: usize>(frame: &mut Headers, at: usize) {
    for at in at..at + N {
        (frame[at], frame[at + N]) = (frame[at + N], frame[at]);
    }
}

/// Writes the TCP header at this halfword.
#[inline(always)]
fn transport<const AT: usize>(frame: &mut Headers, segment: &Segment) {
    let (seq, ack, flags) = if segment.flags & tcp::ACK != 0 {
        (segment.ack, 0, tcp::RST)
    } else {
        (0, segment.end, tcp::RST | tcp::ACK)
    };
    let [to, from] = ports(&segment.key, segment.direction);
    let (seq, ack) = (halves(seq), halves(ack));
    let header = [
        from,
        to,
        seq[0],
        seq[1],
        ack[0],
        ack[1],
        // A header of five words.
        (0x5000 | u16::from(flags)).to_be(),
        0,
        0,
        0,
    ];
    // The pseudo-header. Besides its four bytes, a mapped IPv4 address has one halfword of ones,
    // which adds nothing to the sum.
    let mut sum = u64::from(20_u16.to_be()) + u64::from(u16::from(PROTO_TCP).to_be());
    for word in segment.key.addresses() {
        sum += (word & 0xffff_ffff) + (word >> 32);
    }
    for (place, halfword) in header.into_iter().enumerate() {
        sum += u64::from(halfword);
        frame[AT + place] = halfword;
    }
    frame[AT + 8] = checksum(sum);
}

/// The ports of a segment as they are in memory, that of its sender first.
#[inline(always)]
fn ports(key: &FlowKey, direction: Direction) -> [u16; 2] {
    // The bytes of a key's ports are those of the packet, whatever this machine's byte order is.
    let (low, high) = (key.ports() as u16, (key.ports() >> 16) as u16);
    match direction {
        Direction::FromLow => [low.to_le(), high.to_le()],
        Direction::FromHigh => [high.to_le(), low.to_le()],
    }
}

/// A number as it is in a packet.
#[inline(always)]
fn halves(number: u32) -> [u16; 2] {
    [((number >> 16) as u16).to_be(), (number as u16).to_be()]
}

/// The Internet checksum of a sum of halfwords, in any byte order (RFC 1071, section 2).
#[inline(always)]
fn checksum(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    // The second sum is 0x1fffe at most, so this one leaves no carry.
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::parse;
    use etherparse::{Ipv4Header, Ipv6FlowLabel, Ipv6Header, PacketBuilder, TcpHeader};

    const NEAR: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const FAR: [u8; 6] = [2, 0, 0, 0, 0, 2];

    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 16) as u32
        }
    }

    /// The answer to a frame; empty if there is none.
    fn answer_to(frame: &[u8]) -> Vec<u8> {
        let segment = parse(frame).unwrap();
        let mut headers = [0; V6 / 2];
        for (word, bytes) in headers.iter_mut().zip(frame[..V4].chunks(2)) {
            *word = u16::from_ne_bytes([bytes[0], bytes[1]]);
        }
        let length = answer(&mut headers, &segment);
        headers
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .take(length)
            .collect()
    }

    /// The RST that RFC 9293, section 3.10.7.1, asks for.
    fn reset(header: &TcpHeader, data: u32) -> TcpHeader {
        let (from, to) = (header.destination_port, header.source_port);
        let mut reset = TcpHeader::new(from, to, 0, 0);
        reset.rst = true;
        if header.ack {
            reset.sequence_number = header.acknowledgment_number;
        } else {
            reset.ack = true;
            reset.acknowledgment_number = header
                .sequence_number
                .wrapping_add(data)
                .wrapping_add(u32::from(header.syn) + u32::from(header.fin));
        }
        reset
    }

    #[test]
    fn answers_are_those_of_another_implementation_byte_for_byte() {
        let mut random = Random(7);
        for round in 0..20_000 {
            let data = vec![3; random.next() as usize % 1400];
            let mut header = TcpHeader::new(
                random.next() as u16,
                random.next() as u16,
                random.next(),
                512,
            );
            match round % 4 {
                0 => header.ack = true,
                1 => (header.ack, header.fin) = (true, true),
                2 => (header.ack, header.psh) = (true, true),
                // It would not be answered, but it is the one without ACK.
                _ => header.syn = true,
            }
            header.acknowledgment_number = random.next();
            let reset = reset(&header, data.len() as u32);
            let (mut frame, mut expected) = (Vec::new(), Vec::new());
            let there = PacketBuilder::ethernet2(FAR, NEAR);
            let back = PacketBuilder::ethernet2(NEAR, FAR);
            if round % 2 == 0 {
                let (a, b) = (random.next().to_be_bytes(), random.next().to_be_bytes());
                let mut ip = Ipv4Header::new(0, 17, 6.into(), a, b).unwrap();
                ip.identification = random.next() as u16;
                ip.dont_fragment = random.next().is_multiple_of(2);
                there
                    .ip(etherparse::IpHeaders::Ipv4(ip.clone(), Default::default()))
                    .tcp_header(header)
                    .write(&mut frame, &data)
                    .unwrap();
                (ip.source, ip.destination) = (b, a);
                (ip.time_to_live, ip.identification, ip.dont_fragment) = (64, 0, true);
                back.ip(etherparse::IpHeaders::Ipv4(ip, Default::default()))
                    .tcp_header(reset)
                    .write(&mut expected, &[])
                    .unwrap();
            } else {
                let address = |random: &mut Random| {
                    let mut address = [0; 16];
                    address.fill_with(|| random.next() as u8);
                    address
                };
                let (a, b) = (address(&mut random), address(&mut random));
                let mut ip = Ipv6Header {
                    traffic_class: random.next() as u8,
                    flow_label: Ipv6FlowLabel::try_new(random.next() & 0xf_ffff).unwrap(),
                    source: a,
                    destination: b,
                    hop_limit: 3,
                    ..Default::default()
                };
                there
                    .ip(etherparse::IpHeaders::Ipv6(ip.clone(), Default::default()))
                    .tcp_header(header)
                    .write(&mut frame, &data)
                    .unwrap();
                (ip.source, ip.destination, ip.hop_limit) = (b, a, 64);
                (ip.traffic_class, ip.flow_label) = (0, Ipv6FlowLabel::ZERO);
                back.ip(etherparse::IpHeaders::Ipv6(ip, Default::default()))
                    .tcp_header(reset)
                    .write(&mut expected, &[])
                    .unwrap();
            }
            assert_eq!(answer_to(&frame), expected, "to {frame:02x?}");
        }
    }

    #[test]
    fn a_checksum_is_the_complement_of_the_sum_of_halfwords() {
        let mut random = Random(11);
        let edges = [
            0,
            1,
            0xffff,
            0x1_0000,
            0xffff_ffff,
            0x1_0000_0000,
            u64::MAX - 1,
            u64::MAX,
        ];
        let drawn = (0..10_000).map(|_| u64::from(random.next()) << 32 | u64::from(random.next()));
        for sum in edges.into_iter().chain(drawn.collect::<Vec<_>>()) {
            let mut folded = sum;
            while folded > 0xffff {
                folded = (folded & 0xffff) + (folded >> 16);
            }
            assert_eq!(checksum(sum), !folded as u16, "{sum:#x}");
        }
    }

    #[test]
    fn what_cannot_be_answered_in_place_is_not() {
        let frame = || {
            let mut frame = Vec::new();
            PacketBuilder::ethernet2(FAR, NEAR)
                .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9)
                .tcp(1, 2, 3, 4)
                .ack(5)
                .write(&mut frame, &[0; 40])
                .unwrap();
            frame
        };
        assert_eq!(answer_to(&frame()).len(), V4);
        let mut tagged = frame();
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        assert!(answer_to(&tagged).is_empty());
        let mut options = frame();
        options[14] = 0x46;
        options[17] += 4;
        options.splice(34..34, [1; 4]);
        assert!(answer_to(&options).is_empty());
        let mut first = frame();
        first[20] = 0x20;
        assert!(answer_to(&first).is_empty());
        let mut extended = Vec::new();
        PacketBuilder::ethernet2(FAR, NEAR)
            .ipv6([1; 16], [2; 16], 9)
            .tcp(1, 2, 3, 4)
            .ack(5)
            .write(&mut extended, &[])
            .unwrap();
        assert_eq!(answer_to(&extended).len(), V6);
        extended[19] += 8;
        extended[20] = 60;
        extended.splice(54..54, [6, 0, 1, 4, 0, 0, 0, 0]);
        assert!(answer_to(&extended).is_empty());
    }

    #[test]
    fn resets_and_datagrams_have_no_answer() {
        assert!(has_answer(tcp::ACK) && has_answer(tcp::FIN | tcp::ACK));
        assert!(!has_answer(tcp::RST) && !has_answer(tcp::RST | tcp::ACK));
        assert!([datagram::UDP, datagram::QUERY, datagram::ANSWER].map(has_answer) == [false; 3]);
    }

    /// How many of `tries` attempts at one time get an answer.
    fn takes(bucket: &mut Bucket, now: u64, rate: u32, second: u32, tries: u32) -> u32 {
        let mut taken = 0;
        for _ in 0..tries {
            if let Some(left) = bucket.take(now, rate, second) {
                *bucket = left;
                taken += 1;
            }
        }
        taken
    }

    #[test]
    fn a_second_has_so_many_answers_at_once() {
        // The clock's units per second, from the coarsest to the finest.
        for second in [100, 250, 1_000] {
            for rate in [1, 3, 10, 1_000, 100_000] {
                let mut bucket = Bucket::default();
                let now = 1 << 40;
                assert_eq!(takes(&mut bucket, now, rate, second, 2 * rate), rate);
                let later = now + u64::from(second);
                assert_eq!(takes(&mut bucket, later, rate, second, 2 * rate), rate);
                let half = later + u64::from(second / 2);
                assert_eq!(takes(&mut bucket, half, rate, second, 2 * rate), rate / 2);
                let long = half + 100 * u64::from(second);
                assert_eq!(takes(&mut bucket, long, rate, second, 2 * rate), rate);
            }
        }
        assert_eq!(Bucket::default().take(5, 0, 250), None);
    }

    #[test]
    fn a_minute_of_flood_has_a_minute_of_answers() {
        let (mut bucket, mut taken) = (Bucket::default(), 0);
        for now in 0..60 * 250 {
            taken += takes(&mut bucket, now, 10, 250, 3);
        }
        assert_eq!(taken, 10 + 10 * 60 - 1);
    }
}
