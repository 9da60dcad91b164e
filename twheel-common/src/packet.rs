//! From the bytes of a frame to a TCP segment of a flow.
//!
//! Ethernet, up to two VLAN tags (802.1Q, 802.1ad), or neither; IPv4 with options (RFC 791) and an authentication header
//! (RFC 4302), IPv6 with extension headers (RFC 8200), TCP (RFC 9293). The parser is generic over how bytes are read, so
//! that XDP frames, socket buffers and plain slices all go through it.

use core::mem::MaybeUninit;

use crate::flow::{Direction, FlowKey, VLAN_BITS};

/// The bytes of a frame.
pub trait Bytes {
    /// A header of this frame.
    type Header<const N: usize>: Header;

    /// The `N` bytes at `offset`, or `None` where the frame (or what can be reached of it) ends
    /// before them.
    fn header<const N: usize>(&self, offset: usize) -> Option<Self::Header<N>>;

    /// How long the frame is, whatever can be reached of it.
    fn whole(&self) -> usize;

    /// [`extension`] of this frame. The data plane has it in a function that the verifier goes through by itself.
    #[inline(always)]
    fn extension(&self, header: u8, at: usize) -> Result<Extension, Skip> {
        extension(self, header, at)
    }
}

/// What an extension header of IPv6 says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// IANA number of the header behind it.
    pub next: u8,
    /// Where that begins.
    pub at: usize,
    /// Whether this is a first fragment: more of the datagram follows.
    pub more: bool,
}

/// A run of bytes that is there. Numbers are as they lie in memory: those of a packet are in network
/// order. Reading beyond the run is a defect, which a slice answers with a panic and the verifier
/// with a refusal.
pub trait Header {
    /// One byte.
    fn u8(&self, at: usize) -> u8;
    /// Two bytes.
    fn u16(&self, at: usize) -> u16;
    /// Four bytes.
    fn u32(&self, at: usize) -> u32;
    /// Eight bytes.
    fn u64(&self, at: usize) -> u64;
}

impl Bytes for [u8] {
    type Header<const N: usize> = [u8; N];

    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk().copied()
    }

    fn whole(&self) -> usize {
        self.len()
    }
}

impl<const N: usize> Header for [u8; N] {
    fn u8(&self, at: usize) -> u8 {
        self[at]
    }
    fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
}

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

    /// The combinations of SYN, FIN, RST, ACK and URG that a stack sends, as `tcp_valid_flags` in
    /// `net/netfilter/nf_conntrack_proto_tcp.c` has them: bit `i` stands for the flags `i`.
    const VALID: u64 = 1 << SYN
        | 1 << (SYN | URG)
        | 1 << (SYN | ACK)
        | 1 << RST
        | 1 << (RST | ACK)
        | 1 << (FIN | ACK)
        | 1 << (FIN | ACK | URG)
        | 1 << ACK
        | 1 << (ACK | URG);

    /// Whether a stack could have sent this combination (PSH, ECE and CWR go with any).
    #[inline(always)]
    pub const fn valid(flags: u8) -> bool {
        VALID >> (flags & (FIN | SYN | RST | ACK | URG)) & 1 == 1
    }
}

/// What stands in the place of [`tcp`]'s flags where the packet is another protocol's.
pub mod datagram {
    /// A UDP datagram.
    pub const UDP: u8 = 0x40;
    /// An ICMP or ICMPv6 query.
    pub const QUERY: u8 = 0x80;
    /// Its answer.
    pub const ANSWER: u8 = 0xc0;
    /// Any of them.
    pub const ANY: u8 = 0xc0;
}

/// A TCP segment, or another protocol's datagram: the flow it belongs to and what it says of it.
///
/// There is no padding: the kernel's verifier wants each byte written that a function is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Both directions of a connection have the same key.
    pub key: FlowKey,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgment number; means nothing without that flag.
    pub ack: u32,
    /// The sequence number behind the segment: SYN and FIN count one each.
    pub end: u32,
    /// Bytes of the IP packet, as its header says, or the frame where that cannot: beyond 64 KiB.
    pub bytes: u32,
    /// Timestamp value and echo reply (RFC 7323) where they stand as [RFC 7323, appendix A] has them, and 0 otherwise.
    ///
    /// [RFC 7323, appendix A]: https://www.rfc-editor.org/rfc/rfc7323#appendix-A
    pub stamp: [u32; 2],
    /// The window, unscaled. This and `stamp` are 0 where nobody [asks for them](Wanted::timing).
    pub window: u32,
    /// Which of the key's two endpoints sent it.
    pub direction: Direction,
    /// [`tcp`]'s, without ECE and CWR; or one of [`datagram`].
    pub flags: u8,
    /// Packets on the wire that were joined to this one, or that it will be cut into; 1 mostly.
    pub packets: u16,
}

const _: () = assert!(size_of::<Segment>() == size_of::<FlowKey>() + 32);

impl Segment {
    /// Packets on the wire that a socket buffer stands for: `gso_segs`; where the sender has not counted them (a virtual machine),
    /// by their size, `gso_size` bytes of data. 0: it is one packet.
    #[inline(always)]
    pub fn joined(&self, gso_segs: u32, gso_size: u32) -> u32 {
        match (gso_segs, gso_size) {
            (0, 1..) => self.data().div_ceil(gso_size),
            _ => gso_segs,
        }
    }

    /// Bytes of data, of TCP.
    #[inline(always)]
    fn data(&self) -> u32 {
        let opens_or_ends =
            u32::from(self.flags & tcp::SYN != 0) + u32::from(self.flags & tcp::FIN != 0);
        self.end.wrapping_sub(self.seq).wrapping_sub(opens_or_ends)
    }

    /// Makes the segment one of so many packets on the wire, of which each has all of its headers: what XDP would have
    /// seen. Of TCP; of datagrams the number of bytes stays that of the whole.
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

/// Why a frame is not a segment of a TCP flow. All of them pass, counted by reason.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// Neither IPv4 nor IPv6 behind at most two VLAN tags.
    NotIp = 0,
    /// IP, but of no protocol that is tracked.
    NotTracked,
    /// A fragment other than the first: it has no ports.
    Fragment,
    /// The frame ends, or what can be reached of it, before the header of its protocol does.
    Truncated,
    /// A header contradicts itself: a wrong version, lengths that do not fit one another, too many
    /// extension headers.
    Malformed,
    /// Flags that no stack sends together.
    BadFlags,
}

impl Skip {
    /// From its number.
    #[inline(always)]
    pub const fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::NotIp,
            1 => Self::NotTracked,
            2 => Self::Fragment,
            3 => Self::Truncated,
            5 => Self::BadFlags,
            _ => Self::Malformed,
        }
    }
}

/// Bytes of an Ethernet header without tags.
pub const ETH_HEADER: usize = 14;
const VLAN_TAG: usize = 4;
const IPV6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
/// IANA's number.
pub const PROTO_TCP: u8 = 6;
/// IANA's number.
pub const PROTO_UDP: u8 = 17;
/// IANA's number.
pub const PROTO_ICMP: u8 = 1;
/// IANA's number.
pub const PROTO_ICMP6: u8 = 58;
/// IANA's number of the authentication header (RFC 4302).
const PROTO_AH: u8 = 51;
/// Extension headers looked through before a packet is called malformed. RFC 8200 lists six, and
/// only destination options may stand twice.
pub const MAX_EXTENSION_HEADERS: usize = 8;

/// Protocols that are tracked; bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols(pub u32);

impl Protocols {
    /// TCP alone.
    pub const TCP: Self = Self(1);
    /// UDP.
    pub const UDP: Self = Self(2);
    /// ICMP and ICMPv6: queries and their answers.
    pub const ICMP: Self = Self(4);

    #[inline(always)]
    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// These, and those.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What is asked of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Segments and datagrams of these.
    pub protocols: Protocols,
    /// And what tells round trips.
    pub timing: bool,
    /// Whether VLAN tags are part of a flow's key.
    pub vlans: bool,
}

/// What is known of a frame beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// It has no Ethernet header, and begins with that of IP.
    pub is_ip: bool,
    /// The tag control information (IEEE 802.1Q) of a tag that was taken out of it; 0: of none.
    pub tag: u16,
}

/// Parses an Ethernet frame for its TCP segment.
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(frame: &B) -> Result<Segment, Skip> {
    let wanted = Wanted {
        protocols: Protocols::TCP,
        timing: true,
        vlans: true,
    };
    parse_any(frame, wanted)
}

/// Parses an Ethernet frame for what is asked of it.
#[inline(always)]
pub fn parse_any<B: Bytes + ?Sized>(frame: &B, wanted: Wanted) -> Result<Segment, Skip> {
    let mut segment = MaybeUninit::uninit();
    parse_into(frame, wanted, Outside::default(), &mut segment)?;
    // SAFETY: who says `Ok` has written it.
    Ok(unsafe { segment.assume_init() })
}

/// The same, and the segment is written where it is wanted: the BPF target would copy it by way of the stack.
#[inline(always)]
pub fn parse_into<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    outside: Outside,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    parse_network(frame, wanted, find_network(frame, outside)?, segment)
}

/// Where the packet of IP begins in a frame, and in which VLANs it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Where its header begins.
    pub at: usize,
    /// The version of IP.
    pub version: u8,
    /// As [`FlowKey::in_vlans`] takes them.
    pub vlans: u32,
}

impl Network {
    /// As one number: from the lowest bit 24 of the VLANs, 8 of the version, 16 of the place.
    #[inline(always)]
    pub fn packed(self) -> u64 {
        u64::from(self.vlans) | u64::from(self.version) << 24 | (self.at as u64) << 32
    }

    /// From [`packed`](Self::packed).
    #[inline(always)]
    pub fn from_packed(packed: u64) -> Self {
        Self {
            at: (packed >> 32) as usize & 0xffff,
            version: (packed >> 24) as u8,
            vlans: packed as u32 & 0xff_ffff,
        }
    }
}

/// Whether a decrypted packet begins with the Ethernet header of the encrypted one, and not with its IP header: the kernel leaves it,
/// with the type of what is behind (`xfrm_remove_tunnel_encap`, `net/xfrm/xfrm_input.c`). The addresses of a packet may read like
/// such a type; then the frame is as long as its first bytes say if they are an IP header.
#[inline(always)]
pub fn has_ethernet<B: Bytes + ?Sized>(frame: &B) -> bool {
    let Some(bytes) = frame.header::<3>(ETH_HEADER - 2) else {
        return false;
    };
    let reads_so = matches!(
        (u16::from_be(bytes.u16(0)), bytes.u8(2) >> 4),
        (0x0800, 4) | (0x86dd, 6)
    );
    reads_so && !is_ip_of_its_length(frame)
}

/// Whether a frame is a packet of IP from its first byte to its last.
#[inline(always)]
fn is_ip_of_its_length<B: Bytes + ?Sized>(frame: &B) -> bool {
    let Some(bytes) = frame.header::<6>(0) else {
        return false;
    };
    let length = match bytes.u8(0) >> 4 {
        4 => usize::from(u16::from_be(bytes.u16(2))),
        6 => usize::from(u16::from_be(bytes.u16(4))) + IPV6_HEADER,
        _ => return false,
    };
    length == frame.whole()
}

/// Finds the packet of IP in a frame.
#[inline(always)]
pub fn find_network<B: Bytes + ?Sized>(frame: &B, outside: Outside) -> Result<Network, Skip> {
    if outside.is_ip {
        // Two bytes: the verifier does not follow what the compiler makes of the bound of one.
        let first = frame.header::<2>(0).ok_or(Skip::Truncated)?.u8(0);
        return Ok(Network {
            at: 0,
            version: first >> 4,
            vlans: 0,
        });
    }
    let (at, ether_type, vlans) = behind_tags(frame, outside.tag)?;
    let version = match ether_type {
        0x0800 => 4,
        0x86dd => 6,
        _ => return Err(Skip::NotIp),
    };
    Ok(Network { at, version, vlans })
}

/// What is behind an Ethernet header and up to two tags: where, its type, and the VLANs, with a tag outside of these first.
#[inline(always)]
fn behind_tags<B: Bytes + ?Sized>(frame: &B, outside: u16) -> Result<(usize, u16, u32), Skip> {
    let mut at = ETH_HEADER;
    let mut ether_type = be16(frame, at - 2)?;
    let mut vlans = with_tag(0, outside);
    // Unrolled by hand: at most two tags.
    if is_vlan(ether_type) {
        vlans = with_tag(vlans, be16(frame, at)?);
        at += VLAN_TAG;
        ether_type = be16(frame, at - 2)?;
        if is_vlan(ether_type) {
            vlans = with_tag(vlans, be16(frame, at)?);
            at += VLAN_TAG;
            ether_type = be16(frame, at - 2)?;
        }
    }
    Ok((at, ether_type, vlans))
}

/// Parses the packet of IP that was found in a frame.
#[inline(always)]
pub fn parse_network<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    network: Network,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let vlans = match wanted.vlans {
        true => network.vlans,
        false => 0,
    };
    match network.version {
        4 => {
            let datagram = ipv4::<true, _>(frame, network.at, wanted)?;
            transport(frame, &datagram.in_vlans(vlans), wanted, segment)
        }
        6 => {
            let datagram = ipv6::<MAX_EXTENSION_HEADERS, _>(frame, network.at, wanted)?;
            transport(frame, &datagram.in_vlans(vlans), wanted, segment)
        }
        _ => Err(Skip::NotIp),
    }
}

/// Adds a tag (its control information, IEEE 802.1Q) that stands inside of those that there are, as [`FlowKey::in_vlans`] takes
/// them. One that names no VLAN counts as none (IEEE 802.1Q, section 9.6:
/// a priority alone), and so does a third.
#[inline(always)]
pub fn with_tag(vlans: u32, tag: u16) -> u32 {
    let vlan = u32::from(tag & 0xfff);
    match vlans {
        0 => vlan,
        outer if outer >> VLAN_BITS == 0 => outer | vlan << VLAN_BITS,
        both => both,
    }
}

/// Parses what nearly every frame is: an Ethernet header without tags, an IP header without options or extensions.
/// Says whether it was that, and has written the segment; else [`parse_into`] says what it is.
#[inline(always)]
pub fn parse_plain<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> bool {
    plain(frame, wanted, segment).is_ok()
}

#[inline(always)]
fn plain<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let ether_type = be16(frame, ETH_HEADER - 2)?;
    plain_at(frame, ETH_HEADER, ether_type, 0, wanted, segment)
}

/// Whether a frame has a VLAN tag.
#[inline(always)]
pub fn is_tagged<B: Bytes + ?Sized>(frame: &B) -> bool {
    be16(frame, ETH_HEADER - 2).is_ok_and(is_vlan)
}

/// As [`parse_plain`], of a frame with one VLAN tag or two.
#[inline(always)]
pub fn parse_tagged<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> bool {
    tagged(frame, wanted, segment).is_ok()
}

#[inline(always)]
fn tagged<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let (at, ether_type, vlans) = behind_tags(frame, 0)?;
    let vlans = if wanted.vlans { vlans } else { 0 };
    plain_at(frame, at, ether_type, vlans, wanted, segment)
}

#[inline(always)]
fn plain_at<B: Bytes + ?Sized>(
    frame: &B,
    at: usize,
    ether_type: u16,
    vlans: u32,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    match ether_type {
        0x0800 if is_plain_ipv4(frame, at) => {
            let datagram = ipv4::<false, _>(frame, at, wanted)?.in_vlans(vlans);
            transport(frame, &datagram, wanted, segment)
        }
        0x86dd => {
            let datagram = ipv6::<0, _>(frame, at, wanted)?.in_vlans(vlans);
            transport(frame, &datagram, wanted, segment)
        }
        _ => Err(Skip::NotIp),
    }
}

#[inline(always)]
fn is_plain_ipv4<B: Bytes + ?Sized>(frame: &B, at: usize) -> bool {
    match frame.header::<1>(at) {
        Some(header) => header.u8(0) == 0x45,
        None => false,
    }
}

/// What IP says of a datagram.
struct Datagram<A> {
    /// Where its payload begins.
    at: usize,
    /// IANA number of its protocol, which is tracked.
    proto: u8,
    /// Bytes of its payload.
    room: usize,
    /// Whether this is a first fragment: more of the datagram follows.
    more: bool,
    /// The header with the addresses, which are read last: there are more of them than registers.
    ends: A,
    /// Bytes of the packet.
    bytes: u32,
    /// See [`FlowKey::in_vlans`].
    vlans: u32,
}

impl<A> Datagram<A> {
    #[inline(always)]
    fn in_vlans(self, vlans: u32) -> Self {
        Self { vlans, ..self }
    }
}

/// The addresses of a datagram.
trait Ends {
    fn source(&self) -> [u64; 2];
    fn destination(&self) -> [u64; 2];
}

/// Of an IPv4 header.
struct V4<H>(H);

impl<H: Header> Ends for V4<H> {
    #[inline(always)]
    fn source(&self) -> [u64; 2] {
        mapped(self.0.u32(12))
    }

    #[inline(always)]
    fn destination(&self) -> [u64; 2] {
        mapped(self.0.u32(16))
    }
}

/// Of an IPv6 header.
struct V6<H>(H);

impl<H: Header> Ends for V6<H> {
    #[inline(always)]
    fn source(&self) -> [u64; 2] {
        [self.0.u64(8), self.0.u64(16)]
    }

    #[inline(always)]
    fn destination(&self) -> [u64; 2] {
        [self.0.u64(24), self.0.u64(32)]
    }
}

#[inline(always)]
fn is_vlan(ether_type: u16) -> bool {
    matches!(ether_type, 0x8100 | 0x88a8)
}

#[inline(always)]
fn be16<B: Bytes + ?Sized>(frame: &B, offset: usize) -> Result<u16, Skip> {
    let field = frame.header::<2>(offset).ok_or(Skip::Truncated)?;
    Ok(u16::from_be(field.u16(0)))
}

/// Behind an authentication header, if it `may_be_authenticated`.
#[inline(always)]
fn ipv4<const MAY_BE_AUTHENTICATED: bool, B: Bytes + ?Sized>(
    frame: &B,
    offset: usize,
    wanted: Wanted,
) -> Result<Datagram<V4<B::Header<20>>>, Skip> {
    let header = frame.header::<20>(offset).ok_or(Skip::Truncated)?;
    let first = header.u8(0);
    let header_len = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || header_len < 20 {
        return Err(Skip::Malformed);
    }
    // The low 13 bits of the fragment word: the offset. Only the first fragment has the ports.
    let fragment = u16::from_be(header.u16(6));
    if fragment & 0x1fff != 0 {
        return Err(Skip::Fragment);
    }
    let mut more = fragment & 0x2000 != 0;
    let mut proto = header.u8(9);
    let mut at = offset + header_len;
    if MAY_BE_AUTHENTICATED && proto == PROTO_AH {
        let extension = frame.extension(proto, at)?;
        (proto, at) = (extension.next, extension.at);
        more |= extension.more;
    }
    if !tracked(proto, PROTO_ICMP, wanted.protocols) {
        return Err(Skip::NotTracked);
    }
    // A total length of 0 stands for "beyond 64 KiB" in the GSO packets that egress sees.
    let (total, bytes) = match u16::from_be(header.u16(2)) {
        0 => (usize::MAX, frame.whole().wrapping_sub(offset)),
        total => (total.into(), total.into()),
    };
    let Some(room) = total.checked_sub(at - offset) else {
        return Err(Skip::Malformed);
    };
    Ok(Datagram {
        at,
        proto,
        room,
        more,
        ends: V4(header),
        bytes: bytes as u32,
        vlans: 0,
    })
}

#[inline(always)]
fn tracked(proto: u8, icmp: u8, protocols: Protocols) -> bool {
    proto == PROTO_TCP && protocols.has(Protocols::TCP)
        || proto == PROTO_UDP && protocols.has(Protocols::UDP)
        || proto == icmp && protocols.has(Protocols::ICMP)
}

#[inline(always)]
fn transport<B: Bytes + ?Sized>(
    frame: &B,
    datagram: &Datagram<impl Ends>,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    match datagram.proto {
        PROTO_TCP => tcp_segment(frame, datagram, wanted, segment),
        PROTO_UDP => udp_datagram(frame, datagram, segment),
        _ => icmp_query(frame, datagram, segment),
    }
}

/// RFC 768.
#[inline(always)]
fn udp_datagram<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let (room, more) = (ip.room, ip.more);
    let header = frame.header::<8>(ip.at).ok_or(Skip::Truncated)?;
    // A length of 0 stands for a jumbogram (RFC 2675), or for what segmentation is still to fill in.
    // It is that of the whole datagram, of which a first fragment has a part.
    let length = usize::from(u16::from_be(header.u16(4)));
    if room < 8 || length != 0 && (length < 8 || length > room && !more) {
        return Err(Skip::Malformed);
    }
    let key = FlowKey::new(
        ip.ends.source(),
        header.u16(0),
        ip.ends.destination(),
        header.u16(2),
        PROTO_UDP,
    );
    segment.write(without_numbers(key, datagram::UDP, ip));
    Ok(())
}

/// A query or its answer, whose identifier stands for both ports (RFC 792, RFC 4443); errors are about other flows.
#[inline(always)]
fn icmp_query<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let header = frame.header::<8>(ip.at).ok_or(Skip::Truncated)?;
    if ip.room < 8 {
        return Err(Skip::Malformed);
    }
    let flags = match (ip.proto, header.u8(0)) {
        // Echo, timestamp, information, address mask.
        (PROTO_ICMP, 8 | 13 | 15 | 17) | (PROTO_ICMP6, 128) => datagram::QUERY,
        (PROTO_ICMP, 0 | 14 | 16 | 18) | (PROTO_ICMP6, 129) => datagram::ANSWER,
        _ => return Err(Skip::NotTracked),
    };
    let id = header.u16(4);
    let key = FlowKey::new(ip.ends.source(), id, ip.ends.destination(), id, ip.proto);
    segment.write(without_numbers(key, flags, ip));
    Ok(())
}

#[inline(always)]
fn without_numbers<A>(
    (key, direction): (FlowKey, Direction),
    flags: u8,
    ip: &Datagram<A>,
) -> Segment {
    Segment {
        key: key.in_vlans(ip.vlans),
        direction,
        flags,
        bytes: ip.bytes,
        packets: 1,
        ..Segment::NONE
    }
}

/// The words of an IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2), from the four bytes as they
/// lie in memory.
#[inline(always)]
fn mapped(address: u32) -> [u64; 2] {
    let address = u64::from(address);
    // Bytes 8 to 15 of the address: 00 00 ff ff, and the four.
    #[cfg(target_endian = "little")]
    return [0, address << 32 | 0xffff_0000];
    #[cfg(target_endian = "big")]
    return [0, 0xffff_0000_0000 | address];
}

/// Reads an extension header of this number: hop-by-hop, routing, fragment, authentication, destination options,
/// mobility, HIP, shim6, or one of the two for experiments (RFC 3692).
#[inline(always)]
pub fn extension<B: Bytes + ?Sized>(frame: &B, header: u8, at: usize) -> Result<Extension, Skip> {
    if !matches!(header, 0 | 43 | 44 | 51 | 60 | 135 | 139 | 140 | 253 | 254) {
        return Err(Skip::NotTracked);
    }
    let bytes = frame.header::<4>(at).ok_or(Skip::Truncated)?;
    let words = usize::from(bytes.u8(1));
    let mut more = false;
    let length = match header {
        44 => {
            let fragment = u16::from_be(bytes.u16(2));
            if fragment & 0xfff8 != 0 {
                return Err(Skip::Fragment);
            }
            more = fragment & 1 != 0;
            8
        }
        // RFC 4302, section 2.2: in words of four bytes, minus 2.
        51 => (words + 2) * 4,
        _ => (words + 1) * 8,
    };
    Ok(Extension {
        next: bytes.u8(0),
        at: at + length,
        more,
    })
}

/// With `MOST` extension headers.
#[inline(always)]
fn ipv6<const MOST: usize, B: Bytes + ?Sized>(
    frame: &B,
    offset: usize,
    wanted: Wanted,
) -> Result<Datagram<V6<B::Header<IPV6_HEADER>>>, Skip> {
    let header = frame.header::<IPV6_HEADER>(offset).ok_or(Skip::Truncated)?;
    if header.u8(0) >> 4 != 6 {
        return Err(Skip::Malformed);
    }
    // A payload length of 0 stands for a jumbogram (RFC 2675).
    let (payload, bytes) = match u16::from_be(header.u16(4)) {
        0 => (usize::MAX, frame.whole().wrapping_sub(offset)),
        payload => (payload.into(), usize::from(payload) + IPV6_HEADER),
    };
    let mut next = header.u8(6);
    let start = offset + IPV6_HEADER;
    let mut at = start;
    let mut more = false;
    let mut extensions = 0;
    while !tracked(next, PROTO_ICMP6, wanted.protocols) {
        if MOST == 0 {
            return Err(Skip::NotTracked);
        }
        let extension = frame.extension(next, at)?;
        (next, at) = (extension.next, extension.at);
        more |= extension.more;
        extensions += 1;
        if extensions > MOST {
            return Err(Skip::Malformed);
        }
    }
    let Some(room) = payload.checked_sub(at - start) else {
        return Err(Skip::Malformed);
    };
    Ok(Datagram {
        at,
        proto: next,
        room,
        more,
        ends: V6(header),
        bytes: bytes as u32,
        vlans: 0,
    })
}

/// Its room: bytes from the TCP header to the end of the datagram, as the IP header says.
#[inline(always)]
fn tcp_segment<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let (offset, room) = (ip.at, ip.room);
    let header = frame.header::<TCP_HEADER>(offset).ok_or(Skip::Truncated)?;
    let header_len = usize::from(header.u8(12) >> 4) * 4;
    if header_len < TCP_HEADER || header_len > room {
        return Err(Skip::Malformed);
    }
    let flags = header.u8(13) & !datagram::ANY;
    if !tcp::valid(flags) {
        return Err(Skip::BadFlags);
    }
    let (key, direction) = FlowKey::new(
        ip.ends.source(),
        header.u16(0),
        ip.ends.destination(),
        header.u16(2),
        PROTO_TCP,
    );
    let place = segment.as_mut_ptr();
    // SAFETY: the segment's own. Early, so that nothing of it is kept elsewhere meanwhile.
    unsafe {
        (&raw mut (*place).key).write(key.in_vlans(ip.vlans));
        (&raw mut (*place).direction).write(direction);
    }
    let seq = u32::from_be(header.u32(4));
    let (mut stamp, mut window) = ([0; 2], 0);
    if wanted.timing {
        window = u16::from_be(header.u16(14)).into();
        // Padded by two NOPs, and nothing before it: what stacks send, and look for first.
        if header_len >= TCP_HEADER + 12
            && let Some(option) = frame.header::<12>(offset + TCP_HEADER)
            && u32::from_be(option.u32(0)) == 0x0101_080a
        {
            stamp = [u32::from_be(option.u32(4)), u32::from_be(option.u32(8))];
        }
    }
    // What the IP header says, not what the frame holds: that may be padded, or cut. Beyond 64 KiB nobody
    // says.
    let data = if room <= 0xffff {
        (room - header_len) as u32
    } else {
        0
    };
    let counted = u32::from(flags & tcp::SYN != 0) + u32::from(flags & tcp::FIN != 0);
    // SAFETY: as above; with these every field is written.
    unsafe {
        (&raw mut (*place).seq).write(seq);
        (&raw mut (*place).ack).write(u32::from_be(header.u32(8)));
        (&raw mut (*place).end).write(seq.wrapping_add(data).wrapping_add(counted));
        (&raw mut (*place).bytes).write(ip.bytes);
        (&raw mut (*place).stamp).write(stamp);
        (&raw mut (*place).window).write(window);
        (&raw mut (*place).flags).write(flags);
        (&raw mut (*place).packets).write(1);
    }
    Ok(())
}
