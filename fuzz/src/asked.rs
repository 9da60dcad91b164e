//! Asks etherparse, and translates its answer into twheel's terms.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    Icmpv6Type, IpAuthHeaderSlice, IpNumber, Ipv6FragmentHeaderSlice, Ipv6RawExtHeaderSlice,
    LaxIpv4Slice, LaxIpv6Slice, LaxLinkExtSlice, LaxNetSlice, LaxSlicedPacket, LinkSlice,
    TcpOptionElement, TcpSlice, TransportSlice,
    err::{Layer, ipv6_exts::HeaderError, packet::SliceError},
    ether_type, ip_number,
};
use twheel_common::packet::{MAX_EXTENSION_HEADERS, Protocols, Segment, Skip, Wanted, datagram};

use crate::rules::{Rule, Rules};

/// A segment, as both parsers describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    proto: u8,
    source: SocketAddr,
    destination: SocketAddr,
    /// The outer and the inner VLAN identifier; 0: none.
    pub vlans: [u16; 2],
    flags: u8,
    numbers: [u32; 3],
    bytes: u32,
    stamp: [u32; 2],
    window: u32,
}

impl From<Segment> for Said {
    fn from(segment: Segment) -> Self {
        Self {
            proto: segment.key.proto(),
            source: segment.key.sender(segment.direction),
            destination: segment.key.sender(segment.direction.reverse()),
            vlans: segment.key.vlans(),
            flags: segment.flags,
            numbers: [segment.seq, segment.ack, segment.end],
            bytes: segment.bytes,
            stamp: segment.stamp,
            window: segment.window,
        }
    }
}

pub enum Next {
    Answer(Result<Said, Skip>),
    Again(Patch),
}

/// A change to a frame that removes what made etherparse stop.
pub enum Patch {
    /// Pad with zeros to this length.
    Pad(usize),
    /// Set a byte.
    Set(usize, u8),
    /// Set several bytes.
    SetAll(Vec<(usize, u8)>),
    /// Clear two bytes.
    Clear(usize),
}

impl Patch {
    pub fn apply(self, frame: &mut Vec<u8>) {
        match self {
            // Each change removes a reason to stop, so the number of changes is limited.
            Self::Pad(length) => {
                assert!(length > frame.len());
                frame.resize(length, 0);
            }
            Self::Set(at, value) => {
                assert_ne!(frame[at], value);
                frame[at] = value;
            }
            Self::SetAll(bytes) => {
                assert!(bytes.iter().any(|(at, value)| frame[*at] != *value));
                for (at, value) in bytes {
                    frame[at] = value;
                }
            }
            Self::Clear(at) => {
                assert_ne!(frame[at..at + 2], [0, 0]);
                frame[at..at + 2].fill(0);
            }
        }
    }
}

/// A frame that etherparse is asked about.
pub struct Asked {
    /// Its length before any change.
    pub whole: usize,
    pub wanted: Wanted,
    /// The identifiers of the VLANs that it is in, as many as are wanted.
    pub vlans: [u16; 2],
    /// It is a fragment, and more fragments follow.
    pub more: bool,
    /// Its payload is shorter than its extension headers or its authentication header.
    pub too_short: bool,
    pub rules: Rules,
}

/// The length of an Ethernet header, and of a tag.
const ETHERNET: usize = 14;
const TAG: usize = 4;
/// IPv6 destination options: other extension headers of the same form are changed into these.
const OPTIONS: u8 = 60;

impl Asked {
    fn refuse(&mut self, rule: Rule, skip: Skip) -> Next {
        self.rules.add(rule);
        Next::Answer(Err(skip))
    }

    fn again(&mut self, rule: Rule, patch: Patch) -> Next {
        self.rules.add(rule);
        Next::Again(patch)
    }

    /// Refuses a header of which the frame has only the beginning.
    fn part_of_header(&mut self, stop: Option<&SliceError>) -> Next {
        match stop {
            Some(SliceError::Len(_)) => Next::Answer(Err(Skip::Truncated)),
            _ => self.refuse(Rule::PartOfHeader, Skip::Truncated),
        }
    }

    /// Handles a header up to `end` that is longer than the frame, or than the IP header's length
    /// field allows. `rule` is for the latter; `length`: where that field is.
    fn beyond(&mut self, frame: &[u8], end: usize, rule: Rule, length: usize) -> Next {
        if end > frame.len() {
            return self.again(Rule::Cut, Patch::Pad(end));
        }
        // The length is cleared, to see what etherparse finds behind the header.
        self.too_short = true;
        self.again(rule, Patch::Clear(length))
    }

    pub fn ask(&mut self, frame: &[u8]) -> Next {
        let Ok(packet) = LaxSlicedPacket::from_ethernet(frame) else {
            return Next::Answer(Err(Skip::Truncated));
        };
        let Some(LinkSlice::Ethernet2(ethernet)) = &packet.link else {
            unreachable!("etherparse was asked for Ethernet");
        };
        // Each EtherType but the last is a tag's.
        let mut kind = ethernet.ether_type();
        let mut tags = 0;
        self.vlans = [0; 2];
        loop {
            match kind {
                ether_type::VLAN_DOUBLE_TAGGED_FRAME => {
                    return self.refuse(Rule::OldTag, Skip::NotIp);
                }
                ether_type::MACSEC => return self.refuse(Rule::Macsec, Skip::NotIp),
                ether_type::VLAN_TAGGED_FRAME | ether_type::PROVIDER_BRIDGING if tags == 2 => {
                    return self.refuse(Rule::MoreTags, Skip::NotIp);
                }
                ether_type::VLAN_TAGGED_FRAME | ether_type::PROVIDER_BRIDGING => {}
                ether_type::IPV4 => return self.ip(frame, &packet, ETHERNET + TAG * tags, 20),
                ether_type::IPV6 => return self.ip(frame, &packet, ETHERNET + TAG * tags, 40),
                _ => return Next::Answer(Err(Skip::NotIp)),
            }
            let Some(LaxLinkExtSlice::Vlan(tag)) = packet.link_exts.get(tags) else {
                return Next::Answer(Err(Skip::Truncated));
            };
            kind = tag.ether_type();
            tags += 1;
            // Identifier 0 is a priority tag and no VLAN: it is not stored.
            let vlan = tag.vlan_identifier().value();
            if self.wanted.vlans
                && let Some(place) = self.vlans.iter_mut().find(|vlan| **vlan == 0)
            {
                *place = vlan;
            }
        }
    }

    /// Parses the IP header at `at`, which has at least this length.
    fn ip(&mut self, frame: &[u8], packet: &LaxSlicedPacket, at: usize, least: usize) -> Next {
        let stop = packet.stop_err.as_ref().map(|(error, _)| error);
        if self.whole < at + least {
            return match (&packet.net, stop) {
                (None, Some(SliceError::Len(_))) => Next::Answer(Err(Skip::Truncated)),
                _ => self.refuse(Rule::PartOfHeader, Skip::Truncated),
            };
        }
        match (&packet.net, stop) {
            (Some(LaxNetSlice::Ipv4(ip)), _) if least == 20 => self.ipv4(frame, packet, ip, at),
            (Some(LaxNetSlice::Ipv6(ip)), _) if least == 40 => self.ipv6(frame, packet, ip, at),
            (None, Some(SliceError::Len(error))) if least == 20 => {
                self.again(Rule::Cut, Patch::Pad(at + error.required_len))
            }
            (None, Some(SliceError::Ip(_))) => Next::Answer(Err(Skip::Malformed)),
            _ => self.refuse(Rule::Version, Skip::Malformed),
        }
    }

    /// Whether the protocol is wanted, in either version of IP.
    fn is_wanted(&self, proto: IpNumber) -> bool {
        let of = match proto {
            ip_number::TCP => Protocols::TCP,
            ip_number::UDP => Protocols::UDP,
            ip_number::ICMP | ip_number::IPV6_ICMP => Protocols::ICMP,
            _ => return false,
        };
        self.wanted.protocols.0 & of.0 != 0
    }

    fn ipv4(
        &mut self,
        frame: &[u8],
        packet: &LaxSlicedPacket,
        ip: &LaxIpv4Slice,
        at: usize,
    ) -> Next {
        let header = ip.header();
        if header.fragments_offset().value() != 0 {
            if packet.stop_err.is_some() {
                self.rules.add(Rule::LaterFragment);
            }
            return Next::Answer(Err(Skip::Fragment));
        }
        let mut proto = header.protocol();
        let mut length = header.slice().len();
        if proto == ip_number::AUTH {
            let Some(authentication) = ip.extensions().auth else {
                return self.authentication(frame, packet, at, at + length);
            };
            proto = authentication.next_header();
            length += authentication.slice().len();
        }
        if !self.is_wanted(proto) {
            return Next::Answer(Err(Skip::NotTracked));
        }
        if proto == ip_number::IPV6_ICMP {
            return self.refuse(Rule::OtherIcmp, Skip::NotTracked);
        }
        if self.too_short {
            return Next::Answer(Err(Skip::Malformed));
        }
        let room = match usize::from(header.total_len()) {
            0 => {
                self.rules.add(Rule::NoLength);
                None
            }
            total if total < length => return self.refuse(Rule::TotalLength, Skip::Malformed),
            total => Some(total - length),
        };
        if header.more_fragments() {
            self.more = true;
            // Clears the other bits of the fragment word; the offset is 0.
            return self.again(Rule::FirstFragment, Patch::Clear(at + 6));
        }
        self.transport(
            packet,
            Network {
                vlans: self.vlans,
                source: header.source_addr().into(),
                destination: header.destination_addr().into(),
                proto,
                at: at + length,
                room,
                bytes: match room {
                    Some(room) => length + room,
                    None => self.whole - at,
                },
            },
        )
    }

    /// Handles an authentication header in IPv4 at which etherparse stopped. `ip`: where the IP
    /// header is; `at`: where the authentication header is.
    fn authentication(
        &mut self,
        frame: &[u8],
        packet: &LaxSlicedPacket,
        ip: usize,
        at: usize,
    ) -> Next {
        let stop = packet.stop_err.as_ref().map(|(error, _)| error);
        if self.whole < at + 4 {
            return self.part_of_header(stop);
        }
        if frame[at + 1] == 0 {
            let (first, next) = (frame[ip], frame[at]);
            // A second authentication header behind it is not skipped; etherparse would skip it
            // after the change.
            if next == ip_number::AUTH.0 {
                return self.refuse(Rule::ShortAuthentication, Skip::NotTracked);
            }
            let patch = if first & 0xf < 14 {
                // The 8 bytes of the header become IP options.
                vec![(ip, first + 2), (ip + 9, next)]
            } else {
                // The last 4 bytes of the options become the header's first bytes.
                vec![(ip, first - 1), (at - 4, next), (at - 3, 1)]
            };
            return self.again(Rule::ShortAuthentication, Patch::SetAll(patch));
        }
        match stop {
            Some(SliceError::Len(error)) => {
                let end = at + error.required_len;
                self.beyond(frame, end, Rule::TotalLength, ip + 2)
            }
            _ => unreachable!("etherparse stops at an authentication header: {stop:?}"),
        }
    }

    fn ipv6(
        &mut self,
        frame: &[u8],
        packet: &LaxSlicedPacket,
        ip: &LaxIpv6Slice,
        at: usize,
    ) -> Next {
        // Where the number of the extension header is stored that etherparse has reached.
        let mut link = at + 6;
        let mut behind = at + 40;
        let mut kind = ip.header().next_header();
        let mut count = 0;
        // Slices the headers one by one: the iterator of etherparse 0.18 reads beyond the end of a
        // truncated chain.
        let mut rest = ip.extensions().slice();
        while !rest.is_empty() {
            let whole = "etherparse has read this header";
            let (next, length) = match kind {
                ip_number::IPV6_FRAG => {
                    let header = Ipv6FragmentHeaderSlice::from_slice(rest).expect(whole);
                    let word = u16::from_be_bytes([header.slice()[2], header.slice()[3]]);
                    let (offset, more) = (word >> 3, word & 1 != 0);
                    if offset != header.fragment_offset().value() || more != header.more_fragments()
                    {
                        self.rules.add(Rule::FragmentBits);
                    }
                    if offset != 0 {
                        if packet.stop_err.is_some() {
                            self.rules.add(Rule::LaterFragment);
                        }
                        return Next::Answer(Err(Skip::Fragment));
                    }
                    self.more |= more;
                    if word != 0 {
                        let rule = if more {
                            Rule::FirstFragment
                        } else {
                            Rule::FragmentBits
                        };
                        return self.again(rule, Patch::Clear(behind + 2));
                    }
                    (header.next_header(), header.slice().len())
                }
                ip_number::AUTH => {
                    let header = IpAuthHeaderSlice::from_slice(rest).expect(whole);
                    (header.next_header(), header.slice().len())
                }
                _ => {
                    let header = Ipv6RawExtHeaderSlice::from_slice(rest).expect(whole);
                    (header.next_header(), header.slice().len())
                }
            };
            kind = next;
            rest = &rest[length..];
            link = behind;
            behind += length;
            count += 1;
            if count > MAX_EXTENSION_HEADERS {
                return self.refuse(Rule::TooManyExtensions, Skip::Malformed);
            }
        }
        let proto = ip.payload().ip_number;
        if matches!(proto.0, 0 | 43 | 44 | 51 | 60) {
            return self.extension(frame, packet, (at, link, behind), proto);
        }
        if matches!(proto.0, 135 | 139 | 140 | 253 | 254) {
            return self.again(Rule::OtherExtension, Patch::Set(link, OPTIONS));
        }
        if !self.is_wanted(proto) {
            return Next::Answer(Err(Skip::NotTracked));
        }
        if proto == ip_number::ICMP {
            return self.refuse(Rule::OtherIcmp, Skip::NotTracked);
        }
        if self.too_short {
            return Next::Answer(Err(Skip::Malformed));
        }
        let payload = usize::from(ip.header().payload_length());
        let room = if payload == 0 {
            self.rules.add(Rule::NoLength);
            None
        } else {
            Some(payload - (behind - at - 40))
        };
        let bytes = if payload == 0 {
            self.whole - at
        } else {
            payload + 40
        };
        self.transport(
            packet,
            Network {
                vlans: self.vlans,
                source: ip.header().source_addr().into(),
                destination: ip.header().destination_addr().into(),
                proto,
                at: behind,
                room,
                bytes,
            },
        )
    }

    /// Handles an extension header at which etherparse stopped. `ip`: where the IP header is;
    /// `link`: where the extension header's number is stored; `at`: where the extension header is.
    fn extension(
        &mut self,
        frame: &[u8],
        packet: &LaxSlicedPacket,
        (ip, link, at): (usize, usize, usize),
        kind: IpNumber,
    ) -> Next {
        let stop = packet.stop_err.as_ref().map(|(error, _)| error);
        if self.whole < at + 4 {
            return self.part_of_header(stop);
        }
        if kind == ip_number::AUTH && frame[at + 1] == 0 {
            return self.again(Rule::ShortAuthentication, Patch::Set(link, OPTIONS));
        }
        match stop {
            Some(SliceError::Ipv6Exts(HeaderError::HopByHopNotAtStart)) => {
                self.again(Rule::HopByHop, Patch::Set(link, OPTIONS))
            }
            Some(SliceError::Len(error)) => {
                let end = at + error.required_len;
                self.beyond(frame, end, Rule::PayloadLength, ip + 4)
            }
            _ => unreachable!("etherparse stops at {kind:?}: {stop:?}"),
        }
    }

    fn transport(&mut self, packet: &LaxSlicedPacket, network: Network) -> Next {
        let Some(transport) = &packet.transport else {
            let (error, layer) = packet
                .stop_err
                .as_ref()
                .expect("etherparse has a reason to stop");
            return match (error, layer) {
                (SliceError::Len(error), Layer::TcpHeader)
                    if error.required_len > 20 && network.at + error.required_len > self.whole =>
                {
                    if network.room.is_some_and(|room| error.required_len > room) {
                        return Next::Answer(Err(Skip::Malformed));
                    }
                    self.again(Rule::Cut, Patch::Pad(network.at + error.required_len))
                }
                (SliceError::Len(error), Layer::Icmpv4) if error.required_len == 20 => {
                    self.again(Rule::TimestampLength, Patch::Set(network.at + 1, 1))
                }
                // Either the frame lacks the bytes that etherparse needed, or it has them, but by
                // the headers' lengths they do not belong to the packet.
                (SliceError::Len(error), _) if network.at + error.required_len > self.whole => {
                    Next::Answer(Err(Skip::Truncated))
                }
                _ => Next::Answer(Err(Skip::Malformed)),
            };
        };
        match transport {
            TransportSlice::Tcp(tcp) => self.tcp(tcp, network),
            TransportSlice::Udp(udp) => {
                let length = usize::from(udp.length());
                let beyond = !self.more && network.room.is_some_and(|room| length > room);
                if length != 0 && (length < 8 || beyond) {
                    return self.refuse(Rule::UdpLength, Skip::Malformed);
                }
                let ports = [udp.source_port(), udp.destination_port()];
                Next::Answer(Ok(network.said(ports, datagram::UDP)))
            }
            TransportSlice::Icmpv4(icmp) => {
                let flags = match icmp.type_u8() {
                    8 | 13 | 15 | 17 => datagram::QUERY,
                    0 | 14 | 16 | 18 => datagram::ANSWER,
                    _ => return self.refuse(Rule::NoQuery, Skip::NotTracked),
                };
                let [a, b, ..] = icmp.bytes5to8();
                Next::Answer(Ok(network.said([u16::from_be_bytes([a, b]); 2], flags)))
            }
            TransportSlice::Icmpv6(icmp) => {
                let flags = match icmp.icmp_type() {
                    Icmpv6Type::EchoRequest(_) => datagram::QUERY,
                    Icmpv6Type::EchoReply(_) => datagram::ANSWER,
                    _ => match icmp.type_u8() {
                        // Their code has no meaning.
                        128 => datagram::QUERY,
                        129 => datagram::ANSWER,
                        _ => return self.refuse(Rule::NoQuery, Skip::NotTracked),
                    },
                };
                let [a, b, ..] = icmp.bytes5to8();
                Next::Answer(Ok(network.said([u16::from_be_bytes([a, b]); 2], flags)))
            }
        }
    }

    fn tcp(&mut self, tcp: &TcpSlice, network: Network) -> Next {
        let flags = [
            tcp.fin(),
            tcp.syn(),
            tcp.rst(),
            tcp.psh(),
            tcp.ack(),
            tcp.urg(),
        ];
        let [fin, syn, rst, _, ack, urg] = flags;
        // RFC 9293 allows no other combinations except for tests, and conntrack accepts no others.
        let sent = match (fin, syn, rst, ack) {
            (false, true, false, true) | (false, false, true, _) => !urg,
            (false, true, false, false) | (_, false, false, true) => true,
            _ => false,
        };
        if !sent {
            return self.refuse(Rule::BadFlags, Skip::BadFlags);
        }
        let length = tcp.header_slice().len();
        let data = network.room.map_or(0, |room| room - length);
        let seq = tcp.sequence_number();
        let counted = u32::from(syn) + u32::from(fin);
        let mut said = network.said(
            [tcp.source_port(), tcp.destination_port()],
            (0..)
                .zip(flags)
                .map(|(bit, set)| u8::from(set) << bit)
                .sum(),
        );
        said.numbers = [
            seq,
            tcp.acknowledgment_number(),
            seq.wrapping_add(data as u32).wrapping_add(counted),
        ];
        if self.wanted.timing {
            said.window = tcp.window_size().into();
            let mut options = tcp.options_iterator();
            let mut next = || options.next().and_then(Result::ok);
            if let (
                Some(TcpOptionElement::Noop),
                Some(TcpOptionElement::Noop),
                Some(TcpOptionElement::Timestamp(value, echo)),
            ) = (next(), next(), next())
                // Not if the option was truncated.
                && network.at + 32 <= self.whole
            {
                said.stamp = [value, echo];
            }
        }
        Next::Answer(Ok(said))
    }
}

/// What the headers in front of the transport header say.
struct Network {
    vlans: [u16; 2],
    source: IpAddr,
    destination: IpAddr,
    proto: IpNumber,
    /// Where the transport header is.
    at: usize,
    /// Length from there to the end of the packet, if the headers tell.
    room: Option<usize>,
    bytes: usize,
}

impl Network {
    fn said(&self, [sport, dport]: [u16; 2], flags: u8) -> Said {
        Said {
            proto: self.proto.0,
            source: SocketAddr::new(self.source.to_canonical(), sport),
            destination: SocketAddr::new(self.destination.to_canonical(), dport),
            vlans: self.vlans,
            flags,
            numbers: [0; 3],
            bytes: self.bytes as u32,
            stamp: [0; 2],
            window: 0,
        }
    }
}
