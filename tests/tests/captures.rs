//! Recorded traffic, replayed with `tcpreplay` to a `twheel run --accounting`, and what tshark's conversation
//! statistics say of the same files: the same flows, with as many packets each way. Where the two differ,
//! the packets that make the difference are found in tshark's fields, one by one, and have a name
//! (`docs/captures.md`).
#![allow(missing_docs)]

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt, fs,
    io::Write,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::sync_channel,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::Map;
use etherparse::{
    Icmpv4Type, IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader,
    icmpv4::DestUnreachableHeader, ip_number,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::{data_plane, delete::delete_all, inspect::Reader};
use twheel_common::{counter::Counter, event::Reason, packet::tcp::URG, policy::TimeoutName};
use twheel_tests::{
    netns::{CLIENT, Namespace, SERVER, Twheel, require_root},
    plane::{ACK, FIN, RST, SYN},
    recorded::captures,
};

/// The folder with captures, searched through and through.
const FOLDER: &str = "TWHEEL_CAPTURES";
/// Longer than any of this takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// tshark's number of the link type.
const ETHERNET: usize = 1;
/// Longest frame that a veth takes: its MTU, and the Ethernet header.
const LONGEST: usize = 65_535 + 14;

// --- Flows ---------------------------------------------------------------------------------------------------

/// Protocol, both ends in order, so that both directions have one key, and the outer and the inner VLAN (0: none). An
/// ICMP query's identifier is the port of both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    proto: &'static str,
    ends: [SocketAddr; 2],
    vlans: [u16; 2],
}

impl Key {
    /// And which of the ends is the sender.
    fn new(proto: &'static str, from: SocketAddr, to: SocketAddr) -> (Self, usize) {
        let (ends, side) = if from <= to {
            ([from, to], 0)
        } else {
            ([to, from], 1)
        };
        let vlans = [0; 2];
        (Self { proto, ends, vlans }, side)
    }

    fn in_vlans(self, vlans: [u16; 2]) -> Self {
        Self { vlans, ..self }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.ends;
        write!(f, "{} {a} <-> {b}", self.proto)?;
        match self.vlans {
            [0, _] => Ok(()),
            [outer, inner] => write!(f, " in VLAN {outer}.{inner}"),
        }
    }
}

/// Packets that each end has sent.
type Packets = BTreeMap<Key, [i64; 2]>;

fn add(to: &mut Packets, (key, side): (Key, usize), packets: i64) {
    to.entry(key).or_default()[side] += packets;
}

/// As tshark writes it; an IPv4-mapped address is the IPv4 address, as it is to twheel.
fn address(text: &str) -> Option<IpAddr> {
    Some(text.parse::<IpAddr>().ok()?.to_canonical())
}

// --- tshark --------------------------------------------------------------------------------------------------

/// What is asked of each frame.
const FIELDS: [&str; 41] = [
    "frame.number",
    "frame.encap_type",
    "frame.cap_len",
    "frame.protocols",
    "eth.type",
    "vlan.id",
    "vlan.etype",
    "ieee8021ad.id",
    "ieee8021ad.svid",
    "ieee8021ad.cvid",
    "ip.src",
    "ip.dst",
    "ip.hdr_len",
    "ip.len",
    "ipv6.src",
    "ipv6.dst",
    "ipv6.plen",
    "ipv6.routing.type",
    "ipv6.routing.segleft",
    "ipv6.routing.src.addr",
    "ipv6.routing.mipv6.home_address",
    "ipv6.routing.rpl.full_address",
    "ipv6.routing.srh.addr",
    "ipv6.opt.mipv6.home_address",
    "tcp.srcport",
    "tcp.dstport",
    "tcp.flags",
    "tcp.hdr_len",
    "tcp.urgent_pointer",
    "udp.srcport",
    "udp.dstport",
    "udp.length",
    "udp.checksum",
    "icmp.type",
    "icmp.ident",
    "icmpv6.type",
    "icmpv6.echo.identifier",
    "ip.flags.mf",
    "ipv6.fraghdr.more",
    "_ws.short",
    "_ws.malformed",
];

/// A frame as tshark dissects it: of each field all that it has found, in order.
struct Frame(BTreeMap<&'static str, Vec<String>>);

impl Frame {
    fn read(line: &str) -> Result<Self> {
        let columns: Vec<_> = line.split('\t').collect();
        ensure!(columns.len() == FIELDS.len(), "tshark says {line:?}");
        let values = columns.iter().map(|column| {
            let values = column.split('|').filter(|value| !value.is_empty());
            values.map(str::to_owned).collect()
        });
        Ok(Self(FIELDS.into_iter().zip(values).collect()))
    }

    fn text(&self, field: &str, at: usize) -> Option<&str> {
        Some(self.0.get(field)?.get(at)?)
    }

    /// Everything that tshark has found of a field.
    fn all(&self, field: &str) -> &[String] {
        self.0.get(field).map_or(&[], Vec::as_slice)
    }

    /// Decimal or hexadecimal.
    fn number(&self, field: &str, at: usize) -> Option<usize> {
        let text = self.text(field, at)?;
        match text.strip_prefix("0x") {
            Some(hex) => usize::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    }
}

/// A capture, as tshark sees it.
struct Capture {
    frames: Vec<Frame>,
    conversations: Packets,
}

/// Reads a capture with tshark: its fields, and its conversation statistics. `None`: nothing that tshark reads.
fn dissect(file: &Path) -> Result<Option<Capture>> {
    let mut command = Command::new("tshark");
    // Not what somebody has set up for himself. Fragments count where they are, not where the last of them is.
    command.env("WIRESHARK_CONFIG_DIR", "/nonexistent");
    command.args(["-n", "-o", "ip.defragment:FALSE"]);
    command.args(["-o", "ipv6.defragment:FALSE"]);
    command.arg("-r").arg(file).args(["-T", "fields"]);
    command.args(["-E", "occurrence=a", "-E", "aggregator=|"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    let output = command
        .args(["-z", "conv,tcp", "-z", "conv,udp"])
        .stdin(Stdio::null())
        .output()
        .context("cannot run `tshark`: is it installed?")?;
    // What it cannot read to the end (status 2) has a beginning all the same, and that is what is replayed.
    let text = String::from_utf8_lossy(&output.stdout);
    let Some((frames, statistics)) = text.split_once("=====") else {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let of_the_file =
            stderr.contains("contains record data that") || stderr.contains("isn't a capture file");
        ensure!(of_the_file, "no statistics from tshark: {}", stderr.trim());
        return Ok(None);
    };
    Ok(Some(Capture {
        frames: frames.lines().map(Frame::read).collect::<Result<_>>()?,
        conversations: conversations(statistics)?,
    }))
}

/// `ADDRESS:PORT <-> ADDRESS:PORT  FRAMES BYTES unit  FRAMES BYTES unit …`, those of `<-` first. A conversation
/// that tshark takes for several of one name adds up.
fn conversations(statistics: &str) -> Result<Packets> {
    let mut proto = "";
    let mut sum = Packets::new();
    for line in statistics.lines() {
        match line {
            "TCP Conversations" => proto = "tcp",
            "UDP Conversations" => proto = "udp",
            _ => {}
        }
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [one, "<->", other, rest @ ..] = &words[..] else {
            continue;
        };
        let end = |text: &str| {
            let (ip, port) = text.rsplit_once(':')?;
            Some(SocketAddr::new(address(ip)?, port.parse().ok()?))
        };
        let ends = end(one).zip(end(other));
        let (one, other) = ends.with_context(|| format!("no ends: {line}"))?;
        // `12 kB` and `12 bytes` alike.
        let frames = |at: usize| rest.get(at).and_then(|word| word.parse().ok());
        let frames = frames(0).zip(frames(3));
        let (back, forth) = frames.with_context(|| format!("no frames: {line}"))?;
        add(&mut sum, Key::new(proto, one, other), forth);
        add(&mut sum, Key::new(proto, other, one), back);
    }
    Ok(sum)
}

// --- What makes a difference ---------------------------------------------------------------------------------

/// Why a packet is in one of the counts and not in the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
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
use Name::*;

impl Name {
    fn text(self) -> &'static str {
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
struct Packet {
    flow: (Key, usize),
    /// It is in tshark's statistics.
    theirs: bool,
    /// It is in twheel's count, as far as the packet alone can tell.
    ours: bool,
    /// Where the two differ.
    name: Option<Name>,
    /// It is one with which a flow may begin.
    begins: bool,
}

/// The packets of flows in a frame: the one it carries, and those in tunnels.
fn packets(frame: &Frame) -> Vec<Packet> {
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

// --- The lab -------------------------------------------------------------------------------------------------

/// Two namespaces joined by a cable, with nobody in them who would say anything by himself; twheel at one end.
struct Lab {
    twheel: Twheel,
    reader: Reader,
    counters: Map,
    /// Flows that twheel has reported.
    reported: u64,
    sender: Namespace,
    receiver: Namespace,
}

/// What came of a replayed file.
struct Replayed {
    flows: Packets,
    sent: u64,
}

impl Lab {
    fn start() -> Result<Self> {
        let sender = Namespace::new("sender")?;
        let receiver = Namespace::new("receiver")?;
        for namespace in [&sender, &receiver] {
            namespace.enter(|| {
                ["all", "default"].iter().try_for_each(|of| {
                    let path = format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6");
                    fs::write(&path, "1").with_context(|| format!("cannot set {path}"))
                })
            })?;
        }
        // Jumbo frames, and what segmentation offload leaves whole.
        sender.ip(&format!(
            "link add {CLIENT} mtu 65535 type veth peer name {SERVER} mtu 65535 netns {}",
            receiver.name()
        ))?;
        sender.ip(&format!("link set {CLIENT} up"))?;
        receiver.ip(&format!("link set {SERVER} up"))?;
        // Nothing ends by itself; and both directions are seen, if only by one hook.
        let twheel = Twheel::start(
            &receiver,
            &[
                "--iface",
                SERVER,
                "--mode",
                "native",
                "--egress",
                "on",
                "--proto",
                "tcp,udp,icmp",
                "--accounting",
                "--json",
                "--timeout",
                &TimeoutName::NAMES
                    .map(|name| format!("{name}=1h"))
                    .join(","),
            ],
        )?;
        let reader = receiver.enter(|| Reader::open(Some(SERVER)))?;
        let counters = Map::PerCpuArray(reader.pins().map("COUNTERS")?);
        Ok(Self {
            twheel,
            reader,
            counters,
            reported: 0,
            sender,
            receiver,
        })
    }

    fn end(self) -> Result<()> {
        let ended = self.twheel.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        self.receiver.check_clean(SERVER)
    }

    /// Packets that the data plane has come to the end of.
    fn seen(&self) -> Result<u64> {
        let counters = data_plane::counters(&self.counters)?;
        let verdicts = Counter::VERDICTS.into_iter();
        Ok(verdicts.map(|counter| counters.get(counter)).sum())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.twheel.pid() as i32), signal).context("cannot signal twheel")
    }

    /// Replays a file, and takes out all flows that it has made. `None`: tcpreplay gives it up.
    fn replay(&mut self, file: &Path) -> Result<Option<Replayed>> {
        let before = self.seen()?;
        // A refused flow ends with the next tick, whatever the timeouts: not before the file does. (The packet
        // path goes on without the process.)
        self.signal(Signal::SIGSTOP)?;
        let sent = self.send(file);
        let end = Instant::now() + PATIENCE;
        let settled = sent.and_then(|sent| {
            let Some(sent) = sent else {
                // Nobody says how many there were.
                thread::sleep(Duration::from_millis(100));
                return Ok(None);
            };
            loop {
                let seen = self.seen()? - before;
                if seen == sent {
                    return Ok(Some(sent));
                }
                ensure!(
                    seen < sent && Instant::now() < end,
                    "{sent} packets were sent, {seen} seen"
                );
                thread::sleep(Duration::from_millis(1));
            }
        });
        self.signal(Signal::SIGCONT)?;
        let sent = settled?;
        self.delete_all()?;
        let counters = data_plane::counters(&self.counters)?;
        for counter in [
            Counter::EventsLost,
            Counter::Evicted,
            Counter::TableFull,
            Counter::WindowFull,
            Counter::Raced,
        ] {
            let count = counters.get(counter);
            ensure!(count == 0, "{}: {count}", counter.name());
        }
        let ended = counters.get(Counter::Created) + counters.get(Counter::Superseded);
        let mut flows = Packets::new();
        while self.reported < ended {
            let line = self
                .twheel
                .line(PATIENCE)?
                .context("a flow is not reported")?;
            self.reported += 1;
            report(&line.text, &mut flows).with_context(|| line.text.clone())?;
        }
        Ok(sent.map(|sent| Replayed { flows, sent }))
    }

    /// Returns how many packets were sent, unless tcpreplay gives up. On one CPU, so that they come in order.
    fn send(&self, file: &Path) -> Result<Option<u64>> {
        let output = self
            .sender
            .command("taskset")?
            .args(["-c", "0", "tcpreplay", "--topspeed", "-q", "-i", CLIENT])
            .arg(file)
            .stdin(Stdio::null())
            .output()
            .context("cannot run `taskset`")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() != Some(127),
            "cannot run `tcpreplay`: is it installed? {}",
            stderr.trim()
        );
        if stderr.contains("Invalid packet length") {
            return Ok(None);
        }
        ensure!(output.status.success(), "tcpreplay: {}", stderr.trim());
        // It says nothing where nothing was sent.
        let sent = String::from_utf8_lossy(&output.stdout)
            .lines()
            .find_map(|line| {
                line.trim()
                    .strip_prefix("Successful packets:")?
                    .trim()
                    .parse()
                    .ok()
            });
        Ok(Some(sent.unwrap_or(0)))
    }

    /// Deletes all flows.
    fn delete_all(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.reader.table().iter().next().is_some() {
            ensure!(Instant::now() < end, "flows stay in the table");
            delete_all(&self.reader, |_, _| true, Reason::Deleted, None)?;
        }
        Ok(())
    }
}

/// Adds the flow of a line of `twheel run --json --accounting`.
fn report(line: &str, to: &mut Packets) -> Result<()> {
    let value: Value = serde_json::from_str(line)?;
    let end = |ip: &str, port: &str| -> Result<SocketAddr> {
        let ip = value[ip].as_str().context("no address")?.parse()?;
        let port = value[port].as_u64().context("no port")?;
        Ok(SocketAddr::new(ip, u16::try_from(port)?))
    };
    let (src, dst) = (end("src", "sport")?, end("dst", "dport")?);
    let proto = value["proto"].as_str();
    let proto = ["tcp", "udp", "icmp", "icmpv6"]
        .into_iter()
        .find(|name| Some(*name) == proto)
        .context("no protocol")?;
    // Left out where there is none.
    let vlan = |field: &str| value[field].as_u64().unwrap_or(0) as u16;
    let vlans = [vlan("vlan"), vlan("inner_vlan")];
    for ((key, side), field) in [
        (Key::new(proto, src, dst), "orig_packets"),
        (Key::new(proto, dst, src), "reply_packets"),
    ] {
        let packets = value[field].as_i64().context("no count")?;
        add(to, (key.in_vlans(vlans), side), packets);
    }
    Ok(())
}

// --- The comparison ------------------------------------------------------------------------------------------

/// What comes of all files.
#[derive(Default)]
struct Summary {
    files: usize,
    sent: u64,
    flows: usize,
    packets: i64,
    /// Files of which nothing has to be explained; flows; and their packets.
    outright_files: usize,
    outright: usize,
    outright_packets: i64,
    /// Files that were not replayed, and flows and packets that make a difference, by name.
    skipped: BTreeMap<&'static str, usize>,
    explained: BTreeMap<Name, (BTreeSet<(usize, Key)>, i64)>,
    /// What nobody has explained.
    wrong: Vec<String>,
}

impl Summary {
    fn add(&mut self, file: &str, capture: &Capture, replayed: &Replayed) {
        self.files += 1;
        self.sent += replayed.sent;
        let mut theirs = Packets::new();
        let mut differences = Packets::new();
        let mut begun = BTreeSet::new();
        let frames = capture.frames.len() as u64;
        let unsent = frames.saturating_sub(replayed.sent);
        let is_long = |frame: &&Frame| frame.number("frame.cap_len", 0) > Some(LONGEST);
        let long = capture.frames.iter().filter(is_long).count() as u64;
        // tcpreplay cuts a frame that is longer than its file says frames are: then it may fit after all.
        if replayed.sent > frames || unsent != 0 && unsent != long {
            self.wrong.push(format!(
                "{file}: {} of {frames} frames were sent, and {long} are too long",
                replayed.sent
            ));
        }
        for frame in &capture.frames {
            let too_long = unsent != 0 && is_long(&frame);
            for packet in packets(frame) {
                let (key, _) = packet.flow;
                if packet.theirs {
                    add(&mut theirs, packet.flow, 1);
                }
                let known = packet.begins || begun.contains(&key);
                let (ours, name) = match packet.name {
                    name if too_long => (false, name.filter(|_| packet.theirs).or(Some(TooLong))),
                    None if packet.ours && !known => (false, Some(BeginsNothing)),
                    Some(OptionsCut | OtherAddress) if packet.ours && !known => (false, None),
                    name => (packet.ours, name),
                };
                if ours {
                    begun.insert(key);
                }
                let difference = i64::from(ours) - i64::from(packet.theirs);
                let Some(name) = name.filter(|_| difference != 0) else {
                    continue;
                };
                add(&mut differences, packet.flow, difference);
                let (flows, packets) = self.explained.entry(name).or_default();
                flows.insert((self.files, key));
                *packets += 1;
            }
        }
        self.check_statistics(file, &capture.conversations, &theirs);
        let all = [&theirs, &replayed.flows, &differences];
        self.outright_files += usize::from(differences.is_empty());
        let keys: BTreeSet<_> = all.into_iter().flatten().map(|(key, _)| *key).collect();
        for key in keys {
            let of = |packets: &Packets| packets.get(&key).copied().unwrap_or_default();
            let [theirs, ours, differences] = all.map(of);
            self.flows += 1;
            self.packets += theirs[0] + theirs[1];
            if theirs == ours {
                self.outright += 1;
                self.outright_packets += ours[0] + ours[1];
            }
            if [0, 1].map(|side| theirs[side] + differences[side]) != ours {
                self.wrong.push(format!(
                    "{file}: {key}: tshark has {theirs:?} packets, twheel {ours:?}, and of the difference \
                     {differences:?} is explained"
                ));
            }
        }
    }
}

impl Summary {
    /// tshark's fields must add up to its statistics, which tell neither VLANs apart nor have ICMP.
    fn check_statistics(&mut self, file: &str, statistics: &Packets, theirs: &Packets) {
        let mut sum = Packets::new();
        for (key, sides) in theirs {
            if !key.proto.starts_with("icmp") {
                let key = key.in_vlans([0; 2]);
                add(&mut sum, (key, 0), sides[0]);
                add(&mut sum, (key, 1), sides[1]);
            }
        }
        let keys: BTreeSet<_> = statistics.keys().chain(sum.keys()).collect();
        for key in keys {
            let [said, counted] = [statistics, &sum].map(|all| all.get(key).copied());
            if said.unwrap_or_default() != counted.unwrap_or_default() {
                self.wrong.push(format!(
                    "{file}: {key}: tshark's statistics have {said:?} packets, and its fields {counted:?}"
                ));
            }
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<36}{:>8}{:>8}{:>9}", "", "files", "flows", "packets")?;
        let mut line = |what: &str, files: usize, flows: usize, packets: i64| {
            writeln!(f, "{what:<36}{files:>8}{flows:>8}{packets:>9}")
        };
        line("compared", self.files, self.flows, self.packets)?;
        line(
            "agree outright",
            self.outright_files,
            self.outright,
            self.outright_packets,
        )?;
        for (name, (flows, packets)) in &self.explained {
            let files: BTreeSet<_> = flows.iter().map(|(file, _)| file).collect();
            line(name.text(), files.len(), flows.len(), *packets)?;
        }
        for (why, files) in &self.skipped {
            writeln!(f, "{:<36}{files:>8}", format!("not replayed: {why}"))?;
        }
        write!(f, "{} frames were replayed.", self.sent)
    }
}

/// Compares all files of a folder.
fn compare(lab: &mut Lab, folder: &Path) -> Result<Summary> {
    let paths = captures(folder)?;
    ensure!(!paths.is_empty(), "no captures in {}", folder.display());
    let mut summary = Summary::default();
    thread::scope(|scope| {
        // tshark reads a file while the one before is replayed.
        let (to, from) = sync_channel(2);
        scope.spawn(move || {
            for path in paths {
                let capture = dissect(&path);
                if to.send((path, capture)).is_err() {
                    break;
                }
            }
        });
        for (path, capture) in from {
            let name = path
                .strip_prefix(folder)
                .unwrap_or(&path)
                .display()
                .to_string();
            let Some(capture) = capture.with_context(|| name.clone())? else {
                *summary
                    .skipped
                    .entry("tshark does not read it")
                    .or_default() += 1;
                continue;
            };
            let of_ethernet = |frame: &Frame| frame.number("frame.encap_type", 0) == Some(ETHERNET);
            let why = if capture.frames.is_empty() {
                Some("has no frames")
            } else {
                let all = capture.frames.iter().all(of_ethernet);
                (!all).then_some("not Ethernet")
            };
            match why {
                Some(why) => *summary.skipped.entry(why).or_default() += 1,
                None => match lab.replay(&path).with_context(|| name.clone())? {
                    Some(replayed) => summary.add(&name, &capture, &replayed),
                    None => {
                        *summary.skipped.entry("tcpreplay gives it up").or_default() += 1;
                    }
                },
            }
        }
        Ok(summary)
    })
}

/// To the terminal, also where `cargo test` keeps to itself what a test prints.
fn say(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

// --- Captures of our own -------------------------------------------------------------------------------------

const MAC: [u8; 6] = [2; 6];
const HOSTS: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
const HOSTS_V6: [[u8; 16]; 2] = [[0xfd; 16], [0xfe; 16]];

/// An IP header behind an Ethernet one, from one of two hosts to the other.
fn ip(v6: bool, from: usize) -> PacketBuilderStep<IpHeaders> {
    let ethernet = PacketBuilder::ethernet2(MAC, MAC);
    if v6 {
        ethernet.ipv6(HOSTS_V6[from], HOSTS_V6[1 - from], 64)
    } else {
        ethernet.ipv4(HOSTS[from], HOSTS[1 - from], 64)
    }
}

/// Ports of the sender and of the receiver, if the first host sends; otherwise the other way round.
fn ports(from: usize, [one, other]: [u16; 2]) -> (u16, u16) {
    if from == 0 {
        (one, other)
    } else {
        (other, one)
    }
}

fn tcp(
    v6: bool,
    from: usize,
    of: [u16; 2],
    flags: u8,
    seq: u32,
    payload: &[u8],
) -> Result<Vec<u8>> {
    let (source, destination) = ports(from, of);
    let mut header = TcpHeader::new(source, destination, seq, 1024);
    header.syn = flags & SYN != 0;
    header.ack = flags & ACK != 0;
    header.fin = flags & FIN != 0;
    header.rst = flags & RST != 0;
    let mut frame = Vec::new();
    ip(v6, from).tcp_header(header).write(&mut frame, payload)?;
    Ok(frame)
}

fn udp(v6: bool, from: usize, of: [u16; 2], payload: &[u8]) -> Result<Vec<u8>> {
    let (source, destination) = ports(from, of);
    let mut frame = Vec::new();
    ip(v6, from)
        .udp(source, destination)
        .write(&mut frame, payload)?;
    Ok(frame)
}

fn echo(v6: bool, from: usize, id: u16) -> Result<Vec<u8>> {
    let mut frame = Vec::new();
    match (v6, from) {
        (false, 0) => ip(v6, from)
            .icmpv4_echo_request(id, 1)
            .write(&mut frame, b"?"),
        (false, _) => ip(v6, from)
            .icmpv4_echo_reply(id, 1)
            .write(&mut frame, b"?"),
        (true, 0) => ip(v6, from)
            .icmpv6_echo_request(id, 1)
            .write(&mut frame, b"?"),
        (true, _) => ip(v6, from)
            .icmpv6_echo_reply(id, 1)
            .write(&mut frame, b"?"),
    }?;
    Ok(frame)
}

/// With something between the addresses and the EtherType, or in the EtherType's place.
fn spliced(mut frame: Vec<u8>, at: std::ops::Range<usize>, bytes: &[u8]) -> Vec<u8> {
    frame.splice(at, bytes.iter().copied());
    frame
}

/// An 802.1Q tag.
const TAG: [u8; 4] = [0x81, 0, 0, 7];
/// One of another VLAN.
const OTHER_TAG: [u8; 4] = [0x81, 0, 0, 8];
/// One of no VLAN.
const PRIORITY: [u8; 4] = [0x81, 0, 0xe0, 0];
/// An 802.1ad tag.
const SERVICE_TAG: [u8; 4] = [0x88, 0xa8, 0, 9];

/// Cisco FabricPath: a header before Ethernet's. The frame ends in its checksum.
const FABRIC_PATH: [u8; 16] = [2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 2, 2, 0x89, 0x03, 0, 0x41];

/// With an authentication header (RFC 4302) behind an IPv4 header.
fn authenticated(frame: Vec<u8>) -> Vec<u8> {
    let mut header = [0; 24];
    header[..2].copy_from_slice(&[frame[23], 4]);
    let mut frame = spliced(frame, 34..34, &header);
    frame[23] = 51;
    let length = frame.len() as u16 - 14;
    frame[16..18].copy_from_slice(&length.to_be_bytes());
    frame
}

/// With a routing header behind an IPv6 header: so many of its two segments are left (RFC 8754).
fn routed(frame: Vec<u8>, left: u8) -> Vec<u8> {
    let mut header = vec![frame[20], 4, 4, left, 1, 0, 0, 0];
    header.extend([[0xfc; 16], HOSTS_V6[1]].concat());
    let mut frame = spliced(frame, 54..54, &header);
    frame[20] = 43;
    let length = frame.len() as u16 - 54;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame
}

/// With the home address of its sender in destination options (RFC 6275).
fn at_home(frame: Vec<u8>) -> Vec<u8> {
    let mut header = vec![frame[20], 2, 1, 2, 0, 0, 0xc9, 16];
    header.extend([0xfc; 16]);
    let mut frame = spliced(frame, 54..54, &header);
    frame[20] = 60;
    let length = frame.len() as u16 - 54;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame
}

/// Of what tshark and twheel say the same.
fn alike() -> Result<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    for v6 in [false, true] {
        let of = [40_000, 80];
        for (from, flags, seq, payload) in [
            (0, SYN, 0, &b""[..]),
            (1, SYN | ACK, 0, b""),
            (0, ACK, 1, b""),
            (0, ACK, 1, b"request"),
            // Sent again.
            (0, ACK, 1, b"request"),
            (1, ACK, 1, b"answer"),
            (1, FIN | ACK, 7, b""),
            (0, FIN | ACK, 8, b""),
            (1, ACK, 8, b""),
            // The port is used again.
            (0, SYN, 9_000_000, b""),
            (1, SYN | ACK, 9_000_000, b""),
            (0, RST, 9_000_001, b""),
        ] {
            frames.push(tcp(v6, from, of, flags, seq, payload)?);
        }
        // Refused, twice; the flow may end at once.
        for _ in 0..2 {
            frames.push(tcp(v6, 0, [40_001, 81], SYN, 0, b"")?);
            frames.push(tcp(v6, 1, [40_001, 81], RST | ACK, 0, b"")?);
        }
        // One that was there before.
        frames.push(tcp(v6, 1, [40_002, 80], ACK, 500, b"in the middle")?);
        // A question and its answer; tagged, once and twice.
        frames.push(udp(v6, 0, [40_000, 53], b"question")?);
        let answer = udp(v6, 1, [40_000, 53], b"answer")?;
        frames.push(spliced(answer.clone(), 12..12, &TAG));
        frames.push(spliced(answer.clone(), 12..12, &[TAG, TAG].concat()));
        // By another VLAN than the question; by none, with a priority; one tag within another, of either kind; and a
        // priority within or around a VLAN.
        for tags in [
            &[OTHER_TAG][..],
            &[PRIORITY],
            &[SERVICE_TAG],
            &[SERVICE_TAG, TAG],
            &[TAG, SERVICE_TAG],
            &[SERVICE_TAG, SERVICE_TAG],
            &[PRIORITY, OTHER_TAG],
            &[OTHER_TAG, PRIORITY],
        ] {
            frames.push(spliced(answer.clone(), 12..12, &tags.concat()));
        }
        frames.extend([echo(v6, 0, 77)?, echo(v6, 1, 77)?]);
    }
    frames.push(authenticated(tcp(false, 0, [40_003, 80], SYN, 0, b"")?));
    frames.push(authenticated(udp(false, 0, [40_003, 53], b"question")?));
    // At its last stop.
    frames.push(routed(tcp(true, 0, [40_003, 80], SYN, 0, b"")?, 0));
    // In two fragments, of which the second has no ports.
    let mut first = udp(false, 0, [40_001, 53], &[0; 1472])?;
    first[20] = 0x20;
    let mut second = first[..34].to_vec();
    second.extend([0; 100]);
    second[16..18].copy_from_slice(&120u16.to_be_bytes());
    second[20..22].copy_from_slice(&185u16.to_be_bytes());
    first[38..40].copy_from_slice(&1580u16.to_be_bytes());
    frames.extend([first, second]);
    // An error quotes a packet of a flow that there is not.
    let quoted = udp(false, 1, [40_009, 53], b"")?;
    let mut error = Vec::new();
    ip(false, 0)
        .icmpv4(Icmpv4Type::DestinationUnreachable(
            DestUnreachableHeader::Port,
        ))
        .write(&mut error, &quoted[14..])?;
    frames.push(error);
    Ok(frames)
}

/// What of it makes a difference.
fn different() -> Result<Vec<Vec<u8>>> {
    let inner = udp(false, 0, [1, 53], b"")?;
    let mut tunnelled = Vec::new();
    ip(false, 0).write(&mut tunnelled, ip_number::IPV4, &inner[14..])?;
    // MPLS.
    let labelled = udp(false, 0, [2, 53], b"")?;
    let labelled = spliced(labelled, 12..14, &[0x88, 0x47, 0, 1, 0x01, 0x40]);
    let tagged = spliced(
        udp(false, 0, [3, 53], b"")?,
        12..12,
        &[TAG, TAG, TAG].concat(),
    );
    let mut long = udp(false, 0, [4, 53], &[0; 65_000])?;
    long.resize(LONGEST + 1, 0);
    // Twelve bytes of options are said to be there, and four of them are.
    let mut cut = tcp(false, 0, [5, 80], ACK, 1, &[1; 12])?;
    cut[46] = 0x80;
    cut.truncate(58);
    // And the capture does not say that it is cut: forty bytes of options, and eight of them.
    let mut cut_unsaid = tcp(false, 0, [11, 80], ACK, 1, &[1; 40])?;
    cut_unsaid[46] = 0xf0;
    cut_unsaid.truncate(62);
    // tshark takes the last four bytes for a checksum: of the options in the second, which nobody counts.
    let fabric = udp(false, 0, [12, 53], b"12345678")?;
    let fabric = spliced(fabric, 0..0, &FABRIC_PATH);
    let mut in_options = tcp(false, 0, [13, 80], ACK, 1, &[1; 12])?;
    in_options[46] = 0x80;
    let in_options = spliced(in_options, 0..0, &FABRIC_PATH);
    // Without the checksum neither counts it.
    let mut udp_cut = udp(false, 0, [20, 53], &[0; 20])?;
    udp_cut.truncate(40);
    let old_tag = spliced(udp(false, 0, [14, 53], b"")?, 12..12, &[0x91, 0, 0, 7]);
    let mut malformed = udp(false, 0, [6, 53], b"12345678")?;
    malformed[38..40].copy_from_slice(&17u16.to_be_bytes());
    let mut unsaid = udp(false, 0, [7, 53], b"12345678")?;
    unsaid[38..40].copy_from_slice(&[0, 0]);
    Ok(vec![
        tunnelled,
        authenticated(authenticated(udp(false, 0, [19, 53], b"")?)),
        labelled,
        tagged,
        long,
        cut,
        malformed,
        unsaid,
        tcp(false, 0, [8, 80], SYN | FIN, 1, b"")?,
        tcp(false, 0, [9, 80], RST, 1, b"")?,
        echo(false, 1, 10)?,
        cut_unsaid,
        fabric,
        in_options,
        old_tag,
        routed(tcp(true, 0, [15, 80], ACK, 1, b"")?, 1),
        // It says that more of them are left than there are.
        routed(udp(true, 0, [16, 53], b"")?, 3),
        udp_cut,
        at_home(tcp(true, 0, [18, 80], ACK, 1, b"")?),
        // And one that begins nothing.
        routed(tcp(true, 0, [17, 80], RST, 1, b"")?, 1),
    ])
}

/// The simple format: <https://www.ietf.org/archive/id/draft-ietf-opsawg-pcap-05.html>.
fn pcap(link: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let header = [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 1 << 18, link];
    let mut file: Vec<u8> = header
        .iter()
        .flat_map(|word: &u32| word.to_ne_bytes())
        .collect();
    for (second, frame) in (0..).zip(frames) {
        let length = frame.len() as u32;
        // What was cut off is not known any more: tshark asks for it.
        let whole = length.max(60);
        let record = [second, 0, length, whole];
        file.extend(record.iter().flat_map(|word: &u32| word.to_ne_bytes()));
        file.extend(frame);
    }
    file
}

/// A directory of this process's own, gone when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = env::temp_dir().join(format!("twheel-captures-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn check_own(lab: &mut Lab) -> Result<()> {
    let folder = Scratch::new()?;
    let Scratch(path) = &folder;
    fs::create_dir(path.join("more"))?;
    fs::write(path.join("alike.pcap"), pcap(1, &alike()?))?;
    let summary = compare(lab, path)?;
    ensure!(summary.wrong.is_empty(), "{}", summary.wrong.join("\n"));
    let counts = (summary.flows, summary.packets, summary.explained.len());
    // Of each version three TCP flows of 12, 4 and 1, of UDP two packets in no VLAN, three in VLAN 8 and one in each of 6
    // others, an echo of 2; three with another header; and a first fragment.
    ensure!(counts == (2 * 12 + 4, 2 * 30 + 4, 0), "{summary}");
    ensure!(summary.outright == summary.flows, "{summary}");

    fs::remove_file(path.join("alike.pcap"))?;
    fs::write(path.join("more/different.pcap"), pcap(1, &different()?))?;
    // Linux's cooked captures.
    fs::write(path.join("more/cooked.pcap"), pcap(113, &different()?))?;
    let summary = compare(lab, path)?;
    ensure!(summary.wrong.is_empty(), "{}", summary.wrong.join("\n"));
    let names: Vec<_> = summary
        .explained
        .iter()
        .map(|(name, (flows, packets))| (*name, flows.len(), *packets))
        .collect();
    let expected = [
        (Tunnelled, 2, 2),
        (OtherLink, 3, 3),
        (MoreTags, 1, 1),
        (TooLong, 1, 1),
        (OptionsCut, 2, 2),
        (Malformed, 1, 1),
        (NoLength, 1, 1),
        (BadFlags, 1, 1),
        // tshark's flow and twheel's, of the last only tshark's.
        (OtherAddress, 7, 7),
        (BeginsNothing, 2, 2),
    ];
    ensure!(names == expected, "{names:?}");
    ensure!(
        summary.skipped.len() == 1 && summary.files == 1,
        "{summary}"
    );
    Ok(())
}

#[test]
fn flows_and_packets_are_those_of_tshark() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    check_own(&mut lab)?;
    match env::var_os(FOLDER) {
        None => twheel_tests::skipped(format_args!(
            "recorded captures; give a folder of them with {FOLDER}=…"
        )),
        Some(folder) => {
            let summary = compare(&mut lab, Path::new(&folder))?;
            say(&summary);
            ensure!(summary.wrong.is_empty(), "{}", summary.wrong.join("\n"));
        }
    }
    lab.end()
}
