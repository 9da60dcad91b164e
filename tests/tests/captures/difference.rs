//! Where twheel reads a packet otherwise than tshark, and why.

use std::net::{IpAddr, SocketAddr};

use Name::*;
use twheel_common::packet::tcp::URG;
use twheel_tests::plane::{ACK, FIN, RST, SYN};

use crate::{
    flows::{Key, address},
    tshark::Frame,
};

/// Why a packet is in one of the counts and not in the other.
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

/// A packet of a flow, as tshark's fields have it.
pub struct Packet {
    pub flow: (Key, usize),
    /// It is in tshark's statistics.
    pub theirs: bool,
    /// It is in twheel's count, as far as the packet alone can tell.
    pub ours: bool,
    /// Where the two differ.
    pub name: Option<Name>,
    /// It is one with which a flow may begin.
    pub begins: bool,
}

/// The packets of flows in a frame: the one it carries, and those in tunnels.
pub fn packets(frame: &Frame) -> Vec<Packet> {
    let mut found = Vec::new();
    let mut tags = Tags::default();
    let mut link = false;
    // How many of each layer there were, the fields of the latest IP header, and whether it is followed by
    // something else than its own extensions.
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
            // Tags of an inner Ethernet header are part of no key.
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
                // RFC 6275, section 6.3: where a mobile node is at home.
                let home = frame.text("ipv6.opt.mipv6.home_address", 0);
                if let (Some(network), Some(home)) = (&mut network, home) {
                    network.taken_for[0] = address(home);
                }
            }
            // IPv4 has no chain of extension headers: twheel reads over one of these, and tshark over all.
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
                // What an error quotes, tshark does not count either.
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
    /// Which of the layers `vlan` is next.
    next_vlan: usize,
    /// One is of an EtherType that switches had before 802.1ad (0x9100), which twheel does not read.
    has_old: bool,
    /// The first two identifiers; 0, a priority alone, is none.
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
            // Behind 802.1ad: tshark has no field of the EtherType there.
            0 => None,
            _ => frame.number("vlan.etype", nth - 1),
        };
        self.has_old |= ether_type.is_some_and(|it| !matches!(it, 0x8100 | 0x88a8));
        self.next_vlan += 1;
        self.add(frame.number("vlan.id", nth));
    }

    /// tshark takes two such tags in a row for one layer, of which the fields have other names. Beside another of these
    /// layers that would make three tags, so it is the first that counts.
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

/// Where a packet with this routing header goes in the end; `None` if it is there, or if tshark does not know the
/// header's type. tshark takes that address for the flow's, and twheel that of the IPv6 header.
fn last_stop(frame: &Frame, nth: usize) -> Option<IpAddr> {
    if frame.number("ipv6.routing.segleft", nth)? == 0 {
        return None;
    }
    let stops = |field| frame.all(field);
    let last = match frame.number("ipv6.routing.type", nth)? {
        0 => stops("ipv6.routing.src.addr").last(),
        2 => stops("ipv6.routing.mipv6.home_address").last(),
        3 => stops("ipv6.routing.rpl.full_address").last(),
        // Segment routing has the last of them first (RFC 8754, section 2).
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
    /// Which of its version it is in the frame.
    nth: usize,
    /// What tshark takes for the addresses, if not these: an extension header names others.
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

    /// What it says is behind it; `None` where it says nothing.
    fn room(self, frame: &Frame) -> Option<usize> {
        if self.is_v6() {
            // Extension headers are of it, too: an upper bound.
            return frame
                .number("ipv6.plen", self.nth)
                .filter(|plen| *plen != 0);
        }
        // An authentication header is of it, too.
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
    /// The same where twheel does not look, if it is there.
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

    /// The same where tshark takes other addresses: twheel's packet, and tshark's.
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

/// As `tcp_valid_flags` of the kernel's conntrack has them, PSH, ECE and CWR aside.
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
        // tshark has more of that field, before it and behind it.
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
    // The last field of the header; where the length is less than that of it, tshark does not read on.
    if length >= 8 && frame.number("udp.checksum", nth).is_none() {
        return None;
    }
    let theirs = length >= 8;
    // A first fragment has the length of the whole datagram.
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

/// An ICMP query, or an answer. tshark has no conversations of these: its fields are counted.
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
