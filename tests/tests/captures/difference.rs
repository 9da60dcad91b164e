//! Packets that twheel and tshark read differently, and why.

use std::net::{IpAddr, SocketAddr};

use Name::*;
use twheel_common::packet::tcp::URG;
use twheel_tests::plane::{ACK, FIN, RST, SYN};

use crate::{
    flows::{Key, address},
    tshark::Frame,
};

/// Why a packet is in only one of the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    Tunnelled,
    OtherLink,
    MoreTags,
    TooLong,
    OptionsCut,
    Malformed,
    NoLength,
    BadFlags,
    OtherAddress,
    BeginsNothing,
}

impl Name {
    pub fn text(self) -> &'static str {
        match self {
            Tunnelled => "tunnelled",
            OtherLink => "other link header",
            MoreTags => "more tags",
            TooLong => "too long",
            OptionsCut => "options cut",
            Malformed => "malformed",
            NoLength => "no length",
            BadFlags => "bad flags",
            OtherAddress => "other address",
            BeginsNothing => "begins nothing",
        }
    }
}

/// A packet of a flow, from tshark's fields.
pub struct Packet {
    pub flow: (Key, usize),
    /// It is in tshark's statistics.
    pub theirs: bool,
    /// It is in twheel's count, as far as the packet alone tells.
    pub ours: bool,
    /// Why the two counts differ.
    pub name: Option<Name>,
    /// A flow may begin with it.
    pub begins: bool,
}

/// The packets of flows in a frame: the outer one, and those in tunnels.
pub fn packets(frame: &Frame) -> Vec<Packet> {
    let mut found = Vec::new();
    let mut tags = Tags::default();
    let mut link = false;
    // The number of headers of each layer so far; the fields of the latest IP header; whether it is
    // followed by anything but its own extension headers.
    let (mut ip, mut ipv6, mut routing, mut tcp, mut udp) = (0, 0, 0, 0, 0);
    let mut network: Option<Network> = None;
    let mut between = false;
    let mut authentications = 0;
    let layers = frame.text("frame.protocols", 0).unwrap_or_default();
    for layer in layers.split(':') {
        let elsewhere = if ip + ipv6 != 1 || between {
            Some(Tunnelled)
        } else if link || tags.has_old {
            Some(OtherLink)
        } else {
            (tags.count > 2).then_some(MoreTags)
        };
        match layer {
            "eth" | "ethertype" => {}
            // Tags of an inner Ethernet header are not part of a key.
            "vlan" | "ieee8021ad" if network.is_some() => {}
            "vlan" => tags.add_vlan(frame),
            "ieee8021ad" => tags.add_ieee8021ad(frame),
            "ip" => {
                network = Some(Network::new("ip.src", "ip.dst", ip));
                ip += 1;
            }
            "ipv6" => {
                network = Some(Network::new("ipv6.src", "ipv6.dst", ipv6));
                ipv6 += 1;
            }
            "ipv6.routing" => {
                if let Some(network) = &mut network {
                    network.taken_for[1] = last_stop(frame, routing);
                }
                routing += 1;
            }
            "ipv6.dstopts" => {
                // RFC 6275, section 6.3: the home address of a mobile node.
                let home = frame.text("ipv6.opt.mipv6.home_address", 0);
                if let (Some(network), Some(home)) = (&mut network, home) {
                    network.taken_for[0] = address(home);
                }
            }
            // IPv4 has no chain of extension headers: twheel skips one authentication header,
            // tshark skips all.
            "ah" if network.is_some_and(|at| !at.is_v6()) => {
                authentications += 1;
                between |= authentications > 1;
            }
            "ipv6.hopopts" | "ipv6.fraghdr" | "ah" | "mipv6" | "hip" | "shim6" => {}
            "tcp" | "udp" => {
                let packet = network.and_then(|at| match layer {
                    "tcp" => tcp_packet(frame, at, tcp),
                    _ => udp_packet(frame, at, udp),
                });
                let nth = if layer == "tcp" { &mut tcp } else { &mut udp };
                *nth += 1;
                let packet = packet.map(|packet| packet.elsewhere(elsewhere));
                let taken_for = network.map_or([None; 2], |at| at.taken_for);
                match packet {
                    Some(packet) if taken_for != [None; 2] => {
                        found.extend(packet.readdressed(taken_for));
                    }
                    packet => found.extend(packet),
                }
                between = true;
            }
            "icmp" | "icmpv6" => {
                let packet = network.and_then(|at| query(frame, at, layer == "icmpv6"));
                found.extend(packet.map(|packet| packet.elsewhere(elsewhere)));
                // tshark does not count the packet that an error quotes, either.
                break;
            }
            _ if network.is_none() => link = true,
            _ => between = true,
        }
    }
    for packet in &mut found {
        packet.flow.0 = packet.flow.0.in_vlans(tags.vlans);
    }
    found
}

/// The VLAN tags of a frame.
#[derive(Default)]
struct Tags {
    count: usize,
    /// The number of the next `vlan` layer.
    next_vlan: usize,
    /// A tag has the EtherType that switches used before 802.1ad (0x9100), which twheel does not
    /// read.
    has_old: bool,
    /// The first two identifiers; 0, which is a priority alone, does not count.
    vlans: [u16; 2],
}

impl Tags {
    fn add(&mut self, id: Option<usize>) {
        self.count += 1;
        let id = id.unwrap_or(0) as u16;
        if let Some(free) = self.vlans.iter_mut().find(|vlan| **vlan == 0) {
            *free = id;
        }
    }

    fn add_vlan(&mut self, frame: &Frame) {
        let nth = self.next_vlan;
        let ether_type = match nth {
            _ if self.count == 0 => frame.number("eth.type", 0),
            // Behind 802.1ad, where tshark has no field for the EtherType.
            0 => None,
            _ => frame.number("vlan.etype", nth - 1),
        };
        self.has_old |= ether_type.is_some_and(|it| !matches!(it, 0x8100 | 0x88a8));
        self.next_vlan += 1;
        self.add(frame.number("vlan.id", nth));
    }

    /// tshark takes two such tags in a row for one layer, whose fields have other names. If a frame
    /// had another of these layers, it would have three tags, so only the first one matters.
    fn add_ieee8021ad(&mut self, frame: &Frame) {
        match frame.number("ieee8021ad.svid", 0) {
            Some(outer) => {
                self.add(Some(outer));
                self.add(frame.number("ieee8021ad.cvid", 0));
            }
            None => self.add(frame.number("ieee8021ad.id", 0)),
        }
    }
}

/// The final destination of a packet with this routing header; `None` if the packet has arrived
/// there, or if tshark does not know the header's type. tshark takes this address for the flow's;
/// twheel takes that of the IPv6 header.
fn last_stop(frame: &Frame, nth: usize) -> Option<IpAddr> {
    if frame.number("ipv6.routing.segleft", nth)? == 0 {
        return None;
    }
    let stops = |field| frame.all(field);
    let last = match frame.number("ipv6.routing.type", nth)? {
        0 => stops("ipv6.routing.src.addr").last(),
        2 => stops("ipv6.routing.mipv6.home_address").last(),
        3 => stops("ipv6.routing.rpl.full_address").last(),
        // Segment routing lists the final destination first (RFC 8754, section 2).
        4 => stops("ipv6.routing.srh.addr").first(),
        _ => None,
    };
    address(last?)
}

/// An IP header.
#[derive(Clone, Copy)]
struct Network {
    /// The fields of its addresses.
    source: &'static str,
    destination: &'static str,
    /// Its number among the frame's IP headers of the same version.
    nth: usize,
    /// Other addresses that tshark takes instead, because an extension header names them.
    taken_for: [Option<IpAddr>; 2],
}

impl Network {
    fn new(source: &'static str, destination: &'static str, nth: usize) -> Self {
        Self {
            source,
            destination,
            nth,
            taken_for: [None; 2],
        }
    }

    fn is_v6(self) -> bool {
        self.source == "ipv6.src"
    }

    /// The length of what follows it, by its length field; `None` if the field does not tell.
    fn room(self, frame: &Frame) -> Option<usize> {
        if self.is_v6() {
            // This includes extension headers, so it is an upper bound.
            return frame
                .number("ipv6.plen", self.nth)
                .filter(|plen| *plen != 0);
        }
        // This includes an authentication header.
        let header = frame.number("ip.hdr_len", self.nth)?;
        frame.number("ip.len", self.nth)?.checked_sub(header)
    }

    /// More fragments follow.
    fn has_more(self, frame: &Frame) -> bool {
        let field = if self.is_v6() {
            "ipv6.fraghdr.more"
        } else {
            "ip.flags.mf"
        };
        frame.number(field, self.nth) == Some(1)
    }

    fn flow(
        self,
        frame: &Frame,
        proto: &'static str,
        [sport, dport]: [&str; 2],
        nth: usize,
    ) -> Option<(Key, usize)> {
        let end = |ip, port| {
            let port = u16::try_from(frame.number(port, nth)?).ok()?;
            Some(SocketAddr::new(address(frame.text(ip, self.nth)?)?, port))
        };
        Some(Key::new(
            proto,
            end(self.source, sport)?,
            end(self.destination, dport)?,
        ))
    }
}

impl Packet {
    /// The same packet in a place where twheel does not look, if `name` is given.
    fn elsewhere(self, name: Option<Name>) -> Self {
        if name.is_none() {
            return self;
        }
        Self {
            ours: false,
            name: name.filter(|_| self.theirs),
            ..self
        }
    }

    /// The same packet where tshark takes other addresses: first twheel's packet, then tshark's.
    fn readdressed(self, [from, to]: [Option<IpAddr>; 2]) -> [Self; 2] {
        let (key, side) = self.flow;
        let other = |end: SocketAddr, ip: Option<IpAddr>| {
            SocketAddr::new(ip.unwrap_or(end.ip()), end.port())
        };
        let from = other(key.ends[side], from);
        let to = other(key.ends[1 - side], to);
        let name = self.name.unwrap_or(OtherAddress);
        let ours = Self {
            theirs: false,
            name: self.ours.then_some(name),
            ..self
        };
        let theirs = Self {
            flow: Key::new(key.proto, from, to),
            ours: false,
            name: self.theirs.then_some(name),
            ..self
        };
        [ours, theirs]
    }
}

/// The flags of `tcp_valid_flags` in the kernel's conntrack, without PSH, ECE and CWR.
const SENT_TOGETHER: [u8; 9] = [
    SYN,
    SYN | URG,
    SYN | ACK,
    RST,
    RST | ACK,
    FIN | ACK,
    FIN | ACK | URG,
    ACK,
    ACK | URG,
];

fn tcp_packet(frame: &Frame, at: Network, nth: usize) -> Option<Packet> {
    let flow = at.flow(frame, "tcp", ["tcp.srcport", "tcp.dstport"], nth)?;
    let flags = frame.number("tcp.flags", nth).unwrap_or(0) as u8 & (FIN | SYN | RST | ACK | URG);
    let header = frame.number("tcp.hdr_len", nth).unwrap_or(0);
    let room = at.room(frame);
    let fits = header >= 20 && room.is_none_or(|room| header <= room);
    // The last field before the options.
    let whole = fits && frame.number("tcp.urgent_pointer", nth).is_some();
    // tshark counts a packet when it has read all of the header.
    let given_up = ["_ws.short", "_ws.malformed"].iter().any(|field| {
        let mut texts = frame.all(field).iter();
        // tshark writes more text in that field, in front and behind.
        texts.any(|text| {
            let rest = text.split_once(": TCP").map(|(_, rest)| rest);
            rest.is_some_and(|rest| rest.starts_with([']', ':', ' ']))
        })
    });
    let theirs = whole && !given_up;
    let is_sent = SENT_TOGETHER.contains(&flags);
    let ours = whole && is_sent;
    let name = match (theirs, ours) {
        (true, false) => Some(BadFlags),
        (false, true) => Some(OptionsCut),
        _ => None,
    };
    Some(Packet {
        flow,
        theirs,
        ours,
        name,
        begins: flags & (SYN | FIN | RST) == 0 || flags & (SYN | ACK) == SYN,
    })
}

fn udp_packet(frame: &Frame, at: Network, nth: usize) -> Option<Packet> {
    let flow = at.flow(frame, "udp", ["udp.srcport", "udp.dstport"], nth)?;
    let length = frame.number("udp.length", nth)?;
    // The checksum is the last field of the header. If the length is less than the header's, tshark
    // stops before it.
    if length >= 8 && frame.number("udp.checksum", nth).is_none() {
        return None;
    }
    let theirs = length >= 8;
    // A first fragment carries the length of the whole datagram.
    let fits = at.room(frame).is_none_or(|room| length <= room) || at.has_more(frame);
    let ours = length == 0 || theirs && fits;
    let name = match (theirs, ours) {
        (true, false) => Some(Malformed),
        (false, true) => Some(NoLength),
        _ => None,
    };
    Some(Packet {
        flow,
        theirs,
        ours,
        name,
        begins: true,
    })
}

/// An ICMP query, or an answer. tshark's conversation statistics do not have these, so its fields
/// are counted.
fn query(frame: &Frame, at: Network, v6: bool) -> Option<Packet> {
    let (proto, kind, id) = if v6 {
        ("icmpv6", "icmpv6.type", "icmpv6.echo.identifier")
    } else {
        ("icmp", "icmp.type", "icmp.ident")
    };
    let begins = match (v6, frame.number(kind, 0)?) {
        (false, 8 | 13 | 15 | 17) | (true, 128) => true,
        (false, 0 | 14 | 16 | 18) | (true, 129) => false,
        _ => return None,
    };
    Some(Packet {
        flow: at.flow(frame, proto, [id, id], 0)?,
        theirs: true,
        ours: true,
        name: None,
        begins,
    })
}
