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

/// Protocol and both ends, in order: one name for both directions. An ICMP query's identifier is the port of both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    proto: &'static str,
    ends: [SocketAddr; 2],
}

impl Key {
    /// And which of the ends is the sender.
    fn new(proto: &'static str, from: SocketAddr, to: SocketAddr) -> (Self, usize) {
        if from <= to {
            let ends = [from, to];
            (Self { proto, ends }, 0)
        } else {
            let ends = [to, from];
            (Self { proto, ends }, 1)
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.ends;
        write!(f, "{} {a} <-> {b}", self.proto)
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
const FIELDS: [&str; 27] = [
    "frame.number",
    "frame.encap_type",
    "frame.cap_len",
    "frame.protocols",
    "ip.src",
    "ip.dst",
    "ip.hdr_len",
    "ip.len",
    "ipv6.src",
    "ipv6.dst",
    "ipv6.plen",
    "tcp.srcport",
    "tcp.dstport",
    "tcp.flags",
    "tcp.hdr_len",
    "tcp.urgent_pointer",
    "udp.srcport",
    "udp.dstport",
    "udp.length",
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
    let mut tags = 0;
    let mut link = false;
    // How many of each layer there were, the fields of the latest IP header, and whether it is followed by
    // something else than its own extensions.
    let (mut ip, mut ipv6, mut tcp, mut udp) = (0, 0, 0, 0);
    let mut network = None;
    let mut between = false;
    let layers = frame.text("frame.protocols", 0).unwrap_or_default();
    for layer in layers.split(':') {
        let elsewhere = if ip + ipv6 != 1 || between {
            Some(Tunnelled)
        } else if link {
            Some(OtherLink)
        } else {
            (tags > 2).then_some(MoreTags)
        };
        match layer {
            "eth" | "ethertype" => {}
            "vlan" | "ieee8021ad" => tags += 1,
            "ip" => {
                network = Some(Network("ip.src", "ip.dst", ip));
                ip += 1;
            }
            "ipv6" => {
                network = Some(Network("ipv6.src", "ipv6.dst", ipv6));
                ipv6 += 1;
            }
            "ipv6.hopopts" | "ipv6.routing" | "ipv6.fraghdr" | "ipv6.dstopts" | "ah" | "mipv6"
            | "hip" | "shim6" => {}
            "tcp" => {
                let packet = network.and_then(|at| tcp_packet(frame, at, tcp));
                found.extend(packet.map(|packet| packet.elsewhere(elsewhere)));
                tcp += 1;
                between = true;
            }
            "udp" => {
                let packet = network.and_then(|at| udp_packet(frame, at, udp));
                found.extend(packet.map(|packet| packet.elsewhere(elsewhere)));
                udp += 1;
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
    found
}

/// An IP header: the fields of its addresses, and which of its version it is in the frame.
#[derive(Clone, Copy)]
struct Network(&'static str, &'static str, usize);

impl Network {
    fn is_v6(self) -> bool {
        self.0 == "ipv6.src"
    }

    /// What it says is behind it; `None` where it says nothing.
    fn room(self, frame: &Frame) -> Option<usize> {
        if self.is_v6() {
            // Extension headers are of it, too: an upper bound.
            return frame.number("ipv6.plen", self.2).filter(|plen| *plen != 0);
        }
        let header = frame.number("ip.hdr_len", self.2)?;
        frame.number("ip.len", self.2)?.checked_sub(header)
    }

    /// More fragments follow.
    fn has_more(self, frame: &Frame) -> bool {
        let field = if self.is_v6() {
            "ipv6.fraghdr.more"
        } else {
            "ip.flags.mf"
        };
        frame.number(field, self.2) == Some(1)
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
            Some(SocketAddr::new(address(frame.text(ip, self.2)?)?, port))
        };
        Some(Key::new(proto, end(self.0, sport)?, end(self.1, dport)?))
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
        frame
            .text(field, 0)
            .is_some_and(|text| text.contains(": TCP"))
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
    for (flow, field) in [
        (Key::new(proto, src, dst), "orig_packets"),
        (Key::new(proto, dst, src), "reply_packets"),
    ] {
        let packets = value[field].as_i64().context("no count")?;
        add(to, flow, packets);
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
        let mut theirs = capture.conversations.clone();
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
                if key.proto.starts_with("icmp") && packet.theirs {
                    add(&mut theirs, packet.flow, 1);
                }
                let known = packet.begins || begun.contains(&key);
                let (ours, name) = match packet.name {
                    name if too_long => (false, name.filter(|_| packet.theirs).or(Some(TooLong))),
                    None if packet.ours && !known => (false, Some(BeginsNothing)),
                    Some(OptionsCut) if !known => (false, None),
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
        frames.push(spliced(answer, 12..12, &[TAG, TAG].concat()));
        frames.extend([echo(v6, 0, 77)?, echo(v6, 1, 77)?]);
    }
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

/// What of it makes a difference: one of each name, two of the last.
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
    let mut malformed = udp(false, 0, [6, 53], b"12345678")?;
    malformed[38..40].copy_from_slice(&17u16.to_be_bytes());
    let mut unsaid = udp(false, 0, [7, 53], b"12345678")?;
    unsaid[38..40].copy_from_slice(&[0, 0]);
    Ok(vec![
        tunnelled,
        labelled,
        tagged,
        long,
        cut,
        malformed,
        unsaid,
        tcp(false, 0, [8, 80], SYN | FIN, 1, b"")?,
        tcp(false, 0, [9, 80], RST, 1, b"")?,
        echo(false, 1, 10)?,
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
    // Of each version three TCP flows of 12, 4 and 1, a UDP flow of 3, an echo of 2; and a first fragment.
    ensure!(counts == (11, 45, 0), "{summary}");
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
        (Tunnelled, 1, 1),
        (OtherLink, 1, 1),
        (MoreTags, 1, 1),
        (TooLong, 1, 1),
        (OptionsCut, 1, 1),
        (Malformed, 1, 1),
        (NoLength, 1, 1),
        (BadFlags, 1, 1),
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
