//! Hostile packets at the loaded programs: what becomes of each is what the host's parser says, or what its name
//! says; and each counts once.
#![allow(missing_docs)]

use std::{collections::HashMap, env, fs, io::Write, path::Path};

use anyhow::{Context, Result};
use aya::{
    maps::PerCpuArray,
    programs::{TestRun, TestRunOptions},
};
use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use pcap_parser::{Block, PcapBlockOwned, PcapError, create_reader, traits::PcapNGPacketBlock};
use twheel_common::{
    counter::{Counter, Counters},
    flow::{Account, FlowKey},
    packet::{Protocols, Skip, Wanted, parse_any},
    state::{Seen, View},
};
use twheel_fuzz::{
    corpus, input,
    make::{Random, damage, packet},
};
use twheel_tests::{
    plane::{ACK, FIN, PASS, Plane, RST, SYN, Setup},
    recorded::captures,
};

/// The folder with captures, searched through and through.
const FOLDER: &str = "TWHEEL_CAPTURES";

// --- A program, watched ----------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Xdp,
    Egress,
}

const PROGRAMS: [Program; 2] = [Program::Xdp, Program::Egress];
/// No test run has less: an Ethernet header.
const LEAST: usize = 14;
/// As much as the buffers of a packet hold.
const LONGEST: usize = 65_000;
/// What a test run puts into a packet's first buffer: a page, less what XDP and the stack have in it. Of the rest an
/// XDP program sees nothing, so where no header says how long the packet is, so much of it counts.
const FIRST_BUFFER: usize = 4096 - 256 - 320;
/// What fits a page beside the buffer's own: no test run of a TC program has more.
const PAGE: usize = 3_500;

impl Program {
    /// Whether the kernel runs it on this: a test run of a TC program must have an IP header where one is announced.
    fn takes(self, frame: &[u8]) -> bool {
        let network = match frame.get(12..LEAST) {
            Some([0x08, 0x00]) => 20,
            Some([0x86, 0xdd]) => 40,
            Some(_) => 1,
            None => return false,
        };
        self == Self::Xdp || (LEAST + network..=PAGE).contains(&frame.len())
    }
}

/// A loaded program, and what it should have counted and noted.
struct Watch {
    plane: Plane,
    program: Program,
    before: Counters,
    sent: u64,
    flows: HashMap<FlowKey, Account>,
}

/// What these planes ask of a packet.
const WANTED: Wanted = Wanted {
    protocols: Protocols(7),
    timing: false,
    vlans: true,
};
/// And how they see it.
const VIEW: View = View {
    one_way: true,
    strict: false,
};

impl Watch {
    fn new(program: Program) -> Self {
        let plane = Setup {
            max_flows: 1 << 17,
            ring_bytes: 1 << 25,
            protocols: WANTED.protocols,
            accounting: true,
            one_way: VIEW.one_way,
            ..Setup::default()
        }
        .load();
        Self {
            before: Counters::default(),
            plane,
            program,
            sent: 0,
            flows: HashMap::new(),
        }
    }

    /// What the host makes of a frame of which so much can be reached, and notes of its flow.
    fn foresee(&mut self, reached: &[u8]) -> Counter {
        let segment = match parse_any(reached, WANTED) {
            Ok(segment) => segment,
            Err(Skip::NotIp) => return Counter::NotIp,
            Err(Skip::NotTracked) => return Counter::NotTracked,
            Err(Skip::Fragment) => return Counter::Fragment,
            Err(Skip::Truncated) => return Counter::Truncated,
            Err(Skip::Malformed) => return Counter::Malformed,
            Err(Skip::BadFlags) => return Counter::BadFlags,
        };
        let known = self.flows.contains_key(&segment.key);
        if !known && Seen::first(segment.direction, segment.flags, VIEW).is_none() {
            return Counter::NoFlow;
        }
        let account = self.flows.entry(segment.key).or_default();
        account[segment.direction as usize].packets += 1;
        account[segment.direction as usize].bytes += u64::from(segment.bytes);
        if known {
            Counter::Touched
        } else {
            Counter::Created
        }
    }

    /// Those of no interface in particular: here, all.
    fn counters(&mut self) -> Counters {
        let map = self.plane.plane().map("COUNTERS").unwrap();
        let map = PerCpuArray::<_, Counters>::try_from(map).unwrap();
        Counters::sum(map.get(&0, 0).unwrap().iter())
    }

    /// What became of the packet that was sent just now: exactly one verdict, once.
    fn fate(&mut self) -> Counter {
        let now = self.counters();
        let moved: Vec<_> = Counter::VERDICTS
            .into_iter()
            .flat_map(|it| vec![it; (now.get(it) - self.before.get(it)) as usize])
            .collect();
        self.before = now;
        self.sent += 1;
        let [fate] = moved[..] else {
            panic!("one packet counts as {moved:?}");
        };
        fate
    }

    /// Sends a frame; what became of it is what the host says, and that is returned.
    fn send(&mut self, frame: &[u8]) -> Counter {
        match self.program {
            Program::Xdp => self.plane.receive(frame),
            Program::Egress => self.plane.send(frame),
        }
        let reached = match self.program {
            Program::Xdp => frame.len().min(FIRST_BUFFER),
            Program::Egress => frame.len(),
        };
        let expected = self.foresee(&frame[..reached]);
        let fate = self.fate();
        assert_eq!(fate, expected, "{:?}: {frame:02x?}", self.program);
        fate
    }

    /// As many verdicts as packets; and what ends has the host's keys, byte for byte, and of each and each direction
    /// its packets and bytes. Returns how many flows.
    fn end(mut self) -> usize {
        let counters = self.plane.counters();
        let verdicts = Counter::VERDICTS.into_iter();
        let sum: u64 = verdicts.map(|it| counters.get(it)).sum();
        assert_eq!(sum, self.sent, "packets sent");
        assert_eq!(counters.get(Counter::EventsLost), 0);
        let mut found: HashMap<FlowKey, Account> = HashMap::new();
        self.plane.pass(200_000);
        for event in self.plane.step() {
            let sums = found.entry(event.key).or_default();
            for (sum, traffic) in sums.iter_mut().zip(event.account) {
                sum.packets += traffic.packets;
                sum.bytes += traffic.bytes;
            }
        }
        assert_eq!(self.plane.counters().live(), 0);
        assert_eq!(found.len(), self.flows.len());
        for (key, account) in &self.flows {
            assert_eq!(found.get(key), Some(account), "{key:?}");
        }
        found.len()
    }
}

// --- Mutated packets --------------------------------------------------------------------------------------------

#[test]
fn the_programs_and_the_host_agree_on_mutated_packets() {
    let packets = match twheel_tests::is_soak() {
        true => 1_000_000,
        false => 100_000,
    };
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        let mut random = Random(program as u64 + 42);
        let mut frame = Vec::new();
        let mut fates: HashMap<&str, u64> = HashMap::new();
        while watch.sent < packets {
            packet(&mut random, &mut frame);
            if program.takes(&frame) {
                let fate = watch.send(&frame);
                *fates.entry(fate.name()).or_default() += 1;
            }
        }
        // All there is, and not just once.
        for fate in [
            Counter::Touched,
            Counter::Created,
            Counter::NotIp,
            Counter::NotTracked,
            Counter::Fragment,
            Counter::Truncated,
            Counter::Malformed,
            Counter::BadFlags,
            Counter::NoFlow,
        ] {
            let times = fates.get(fate.name()).copied().unwrap_or(0);
            assert!(times > packets / 1000, "{}: {times}", fate.name());
        }
        let flows = watch.end();
        say(&format!(
            "{program:?}: {packets} packets, {flows} flows, {fates:?}"
        ));
    }
}

/// To the terminal, also where `cargo test` keeps to itself what a test prints.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The kernel's `xdp_md`, of which a test run takes where the linear part ends.
#[repr(C)]
struct Linear {
    data: u32,
    end: u32,
    rest: [u32; 4],
}

#[test]
fn headers_in_another_buffer_are_called_truncated() {
    let mut watch = Watch::new(Program::Xdp);
    let mut random = Random(7);
    let mut frame = Vec::new();
    while watch.sent < 5_000 {
        packet(&mut random, &mut frame);
        if random.once_in(2) {
            damage(&mut random, &mut frame);
        }
        // A driver's first buffer: some of the packet, and the rest in the next.
        frame.resize(frame.len().max(LEAST) + 1 + random.below(5_000), 7);
        let linear = LEAST + random.below(frame.len().min(160) - LEAST);
        let context = Linear {
            data: 0,
            end: linear as u32,
            rest: [0; 4],
        };
        // SAFETY: plain words without padding, and the slice ends with the value.
        let context = unsafe {
            std::slice::from_raw_parts((&raw const context).cast::<u8>(), size_of::<Linear>())
        };
        let program = watch.plane.plane().xdp("twheel_xdp").unwrap();
        let result = program.test_run(TestRunOptions {
            data_in: Some(&frame),
            ctx_in: Some(context),
            ..TestRunOptions::new()
        });
        let result = match result {
            Ok(result) => result,
            Err(_) if watch.sent == 0 => {
                return twheel_tests::skipped(
                    "packets in parts: this kernel's test runs have none",
                );
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(result.return_value, PASS);
        let expected = watch.foresee(&frame[..linear]);
        assert_eq!(watch.fate(), expected, "{linear} of {frame:02x?}");
    }
    assert!(watch.plane.count(Counter::Truncated) > 1_000);
    let flows = watch.end();
    assert!(flows > 500, "{flows}");
}

// --- Packets by name --------------------------------------------------------------------------------------------

/// Makes frames, each of a flow of its own.
struct Frames(u16);

impl Frames {
    fn ip(v6: bool) -> PacketBuilderStep<IpHeaders> {
        let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
        if v6 {
            ethernet.ipv6([0xfd; 16], [0xfe; 16], 64)
        } else {
            ethernet.ipv4([10, 0, 0, 1], [192, 0, 2, 1], 64)
        }
    }

    fn tcp_with(&mut self, v6: bool, flags: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
        self.0 += 1;
        let mut header = TcpHeader::new(self.0, 80, 1, 1024);
        header.set_options_raw(options).unwrap();
        let mut frame = Vec::new();
        let ip = Self::ip(v6);
        ip.tcp_header(header).write(&mut frame, data).unwrap();
        frame[if v6 { 67 } else { 47 }] = flags;
        frame
    }

    fn tcp(&mut self, v6: bool) -> Vec<u8> {
        self.tcp_with(v6, ACK, &[], b"data")
    }

    fn udp(&mut self, v6: bool, data: &[u8]) -> Vec<u8> {
        self.0 += 1;
        let mut frame = Vec::new();
        Self::ip(v6)
            .udp(self.0, 53)
            .write(&mut frame, data)
            .unwrap();
        frame
    }

    fn echo(&mut self, v6: bool) -> Vec<u8> {
        self.0 += 1;
        let mut frame = Vec::new();
        if v6 {
            Self::ip(v6)
                .icmpv6_echo_request(self.0, 1)
                .write(&mut frame, b"?")
        } else {
            Self::ip(v6)
                .icmpv4_echo_request(self.0, 1)
                .write(&mut frame, b"?")
        }
        .unwrap();
        frame
    }

    /// TCP in IPv4 with one byte, or several, of another value.
    fn set(&mut self, v6: bool, at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(v6);
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    }

    fn tagged(&mut self, tags: &[u16]) -> Vec<u8> {
        let mut frame = self.tcp(tags.len().is_multiple_of(2));
        for tag in tags.iter().rev() {
            let [a, b] = tag.to_be_bytes();
            frame.splice(12..12, [a, b, 0, 7]);
        }
        frame
    }

    /// TCP in IPv4 behind so many bytes of options, and a length to fit.
    fn ip_options(&mut self, options: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(false);
        frame.splice(34..34, options.iter().copied());
        frame[14] += (options.len() / 4) as u8;
        let total = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame
    }

    /// TCP in IPv4 behind an authentication header, which says what is next, and a length to fit.
    fn authenticated(&mut self, next: u8, header: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(false);
        frame.splice(34..34, header.iter().copied());
        frame[23] = 51;
        frame[34] = next;
        let total = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame
    }

    /// TCP in IPv6 behind extension headers, and a length to fit.
    fn chain(&mut self, chain: &[(u8, &[u8])]) -> Vec<u8> {
        let mut frame = self.tcp(true);
        let tcp = frame.split_off(54);
        let mut link = 20;
        for (number, header) in chain {
            frame[link] = *number;
            link = frame.len();
            frame.extend_from_slice(header);
        }
        frame[link] = 6;
        frame.extend_from_slice(&tcp);
        let payload = frame.len() as u16 - 54;
        frame[18..20].copy_from_slice(&payload.to_be_bytes());
        frame
    }
}

/// An extension header of 8 bytes.
const EIGHT: &[u8] = &[0; 8];
/// Fragment headers, each but for the number of the next: the first, a middle one, the last, the only one.
const FIRST: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 9];
const MIDDLE: &[u8] = &[0, 0, 0, 0x41, 0, 0, 0, 9];
const LAST: &[u8] = &[0, 0, 0, 0x80, 0, 0, 0, 9];
const ATOMIC: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 9];
/// RFC 4302: 24 bytes.
const AUTHENTICATION: &[u8] = &[
    0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// What each is, and what becomes of it.
fn named() -> Vec<(&'static str, Vec<u8>, Counter)> {
    use Counter::{BadFlags, Created, Fragment, Malformed, NoFlow, NotIp, NotTracked, Truncated};
    let mut all = Vec::new();
    let f = &mut Frames(1_000);
    let mut is = |name, frame, fate| all.push((name, frame, fate));

    // Options of TCP are nobody's business but for one, and that is where it is looked for.
    is(
        "an option of length 0",
        f.tcp_with(false, ACK, &[2, 0, 0, 0], b""),
        Created,
    );
    is(
        "an option of length 1",
        f.tcp_with(true, ACK, &[2, 1, 0, 0], b""),
        Created,
    );
    is(
        "an option beyond the header",
        f.tcp_with(false, ACK, &[1, 1, 8, 255], b""),
        Created,
    );
    is(
        "half a timestamp",
        f.tcp_with(false, ACK, &[1, 1, 8, 10], b""),
        Created,
    );
    is(
        "40 bytes of options",
        f.tcp_with(true, SYN, &[1; 40], b""),
        Created,
    );
    is(
        "options after their end",
        f.tcp_with(false, SYN, &[0, 3, 0, 9], b""),
        Created,
    );
    is(
        "an IP option of length 0",
        f.ip_options(&[7, 0, 0, 0]),
        Created,
    );
    is(
        "an IP option of length 1",
        f.ip_options(&[7, 1, 0, 0]),
        Created,
    );
    is(
        "an IP option beyond the header",
        f.ip_options(&[7, 255, 4, 0]),
        Created,
    );
    is("40 bytes of IP options", f.ip_options(&[1; 40]), Created);
    is(
        "IP options without a place",
        f.set(false, 14, &[0x4f, 0, 1, 0]),
        Truncated,
    );
    is(
        "IP options beyond the total length",
        f.set(false, 14, &[0x4f, 0, 0, 40]),
        Malformed,
    );

    // Tags.
    is("802.1Q", f.tagged(&[0x8100]), Created);
    is("802.1Q twice", f.tagged(&[0x8100, 0x8100]), Created);
    is("802.1ad", f.tagged(&[0x88a8]), Created);
    is("802.1ad and 802.1Q", f.tagged(&[0x88a8, 0x8100]), Created);
    is("802.1Q and 802.1ad", f.tagged(&[0x8100, 0x88a8]), Created);
    is("three tags", f.tagged(&[0x88a8, 0x8100, 0x8100]), NotIp);
    is("0x9100", f.tagged(&[0x9100]), NotIp);
    is("802.1ad and 0x9100", f.tagged(&[0x88a8, 0x9100]), NotIp);
    is(
        "a tag and the end",
        f.tagged(&[0x8100])[..17].to_vec(),
        Truncated,
    );
    is(
        "a tag and nothing",
        f.tagged(&[0x8100])[..18].to_vec(),
        Truncated,
    );

    // Fragments, which nobody puts together here: the first has the ports, and what the others say of ports is
    // not believed.
    is("a first fragment", f.set(false, 20, &[0x20, 0]), Created);
    is("a middle one", f.set(false, 20, &[0x20, 9]), Fragment);
    is("the last one", f.set(false, 20, &[0, 9]), Fragment);
    is(
        "one that overlaps the ports",
        f.set(false, 20, &[0x20, 1]),
        Fragment,
    );
    is(
        "one beyond 64 KiB",
        f.set(false, 20, &[0x1f, 0xff]),
        Fragment,
    );
    is(
        "not to be fragmented, and one",
        f.set(false, 20, &[0x60, 0]),
        Created,
    );
    let mut tiny = f.set(false, 16, &[0, 28, 0, 0, 0x20, 0]);
    is("a tiny first one, padded", tiny.clone(), Malformed);
    tiny.truncate(42);
    is("a tiny first one", tiny, Truncated);
    is("IPv6: a first fragment", f.chain(&[(44, FIRST)]), Created);
    is("IPv6: a middle one", f.chain(&[(44, MIDDLE)]), Fragment);
    is("IPv6: the last one", f.chain(&[(44, LAST)]), Fragment);
    is(
        "IPv6: one that overlaps the ports",
        f.chain(&[(44, &[0, 0, 0, 9, 0, 0, 0, 9])]),
        Fragment,
    );
    is("IPv6: an atomic one", f.chain(&[(44, ATOMIC)]), Created);
    is(
        "IPv6: reserved bits",
        f.chain(&[(44, &[0, 255, 0, 6, 0, 0, 0, 9])]),
        Created,
    );
    is(
        "IPv6: a fragment of a fragment",
        f.chain(&[(44, FIRST), (44, LAST)]),
        Fragment,
    );
    let mut tiny = f.chain(&[(44, FIRST)]);
    tiny[18..20].copy_from_slice(&[0, 16]);
    is("IPv6: a tiny first one, padded", tiny.clone(), Malformed);
    tiny.truncate(70);
    is("IPv6: a tiny first one", tiny, Truncated);

    // Chains of extension headers.
    is("eight of them", f.chain(&[(60, EIGHT); 8]), Created);
    is("nine", f.chain(&[(60, EIGHT); 9]), Malformed);
    is("forty", f.chain(&[(0, EIGHT); 40]), Malformed);
    is("hop-by-hop", f.chain(&[(0, EIGHT)]), Created);
    is(
        "hop-by-hop behind others",
        f.chain(&[(60, EIGHT), (0, EIGHT)]),
        Created,
    );
    is(
        "hop-by-hop twice",
        f.chain(&[(0, EIGHT), (0, EIGHT)]),
        Created,
    );
    is("routing", f.chain(&[(43, EIGHT)]), Created);
    is(
        "all in order",
        f.chain(&[
            (0, EIGHT),
            (60, EIGHT),
            (43, EIGHT),
            (44, ATOMIC),
            (51, AUTHENTICATION),
            (60, EIGHT),
        ]),
        Created,
    );
    is("authentication", f.chain(&[(51, AUTHENTICATION)]), Created);
    is(
        "authentication of 8 bytes",
        f.chain(&[(51, EIGHT)]),
        Created,
    );
    is("mobility", f.chain(&[(135, EIGHT)]), Created);
    is("HIP", f.chain(&[(139, EIGHT)]), Created);
    is("shim6", f.chain(&[(140, EIGHT)]), Created);
    is("an experiment", f.chain(&[(253, EIGHT)]), Created);
    is("ESP", f.chain(&[(50, EIGHT)]), NotTracked);
    is(
        "ESP behind others",
        f.chain(&[(0, EIGHT), (50, EIGHT)]),
        NotTracked,
    );
    is("no next header", f.chain(&[(59, EIGHT)]), NotTracked);
    is("IP in IP", f.chain(&[(41, EIGHT)]), NotTracked);
    is(
        "beyond the packet",
        f.chain(&[(60, &[0, 200, 0, 0, 0, 0, 0, 0])]),
        Malformed,
    );
    let mut cut = f.chain(&[(60, &[0, 200, 0, 0, 0, 0, 0, 0])]);
    cut[18..20].copy_from_slice(&[255, 255]);
    is("beyond what there is", cut, Truncated);
    let mut lie = f.chain(&[(60, EIGHT), (60, EIGHT)]);
    lie[18..20].copy_from_slice(&[0, 8]);
    is("beyond the payload", lie, Malformed);
    let long = [0; 2048];
    let mut long = long.to_vec();
    long[1] = 255;
    is("the longest there is", f.chain(&[(60, &long)]), Created);
    is(
        "IPv4: authentication",
        f.authenticated(6, AUTHENTICATION),
        Created,
    );
    is(
        "IPv4: authentication of 8 bytes",
        f.authenticated(6, EIGHT),
        Created,
    );
    let twice = [&[6], &AUTHENTICATION[1..]].concat();
    is(
        "IPv4: authentication twice",
        f.authenticated(51, &[AUTHENTICATION, &twice].concat()),
        NotTracked,
    );
    is(
        "IPv4: authentication and ESP",
        f.authenticated(50, AUTHENTICATION),
        NotTracked,
    );
    is(
        "IPv4: a TCP header for authentication",
        f.set(false, 23, &[51]),
        NotTracked,
    );
    let mut first = f.authenticated(6, AUTHENTICATION);
    first[20] = 0x20;
    is("IPv4: authentication, a first fragment", first, Created);
    let mut last = f.authenticated(6, AUTHENTICATION);
    last[21] = 9;
    is("IPv4: authentication, the last fragment", last, Fragment);
    let mut lie = f.authenticated(6, AUTHENTICATION);
    lie[16..18].copy_from_slice(&[0, 43]);
    is(
        "IPv4: authentication beyond the total length",
        lie.clone(),
        Malformed,
    );
    lie[16..18].copy_from_slice(&[0, 63]);
    is(
        "IPv4: authentication, a byte short of TCP",
        lie.clone(),
        Malformed,
    );
    lie[16..18].copy_from_slice(&[0, 64]);
    is("IPv4: authentication, and TCP fits", lie, Created);
    is(
        "IPv4: half an authentication header",
        f.authenticated(6, AUTHENTICATION)[..37].to_vec(),
        Truncated,
    );
    let mut long = AUTHENTICATION.to_vec();
    long.resize(257 * 4, 0);
    long[1] = 255;
    is(
        "IPv4: the longest authentication",
        f.authenticated(6, &long),
        Created,
    );

    // Lengths.
    let jumbo = f.tcp_with(true, ACK, &[], &[7; 9_000]);
    is("a jumbo frame", jumbo, Created);
    let huge = f.tcp_with(false, ACK, &[], &[7; 60_000]);
    is("60,000 bytes", huge, Created);
    is("a total length of 0", f.set(false, 16, &[0, 0]), Created);
    is("one of 19", f.set(false, 16, &[0, 19]), Malformed);
    is("a byte short of TCP", f.set(false, 16, &[0, 39]), Malformed);
    is("all there can be", f.set(false, 16, &[255, 255]), Created);
    is("a jumbogram", f.set(true, 18, &[0, 0]), Created);
    is(
        "IPv6: a byte short of TCP",
        f.set(true, 18, &[0, 19]),
        Malformed,
    );
    is(
        "IPv6: all there can be",
        f.set(true, 18, &[255, 255]),
        Created,
    );
    is("a data offset of 4", f.set(false, 46, &[0x40]), Malformed);
    is("one of 0", f.set(true, 66, &[0]), Malformed);
    is(
        "one beyond the packet",
        f.set(false, 46, &[0xf0]),
        Malformed,
    );
    for (name, length, fate) in [
        ("UDP: none", 0u16, Created),
        ("UDP: less than a header", 7, Malformed),
        ("UDP: less than there is", 9, Created),
        ("UDP: as it should be", 12, Created),
        ("UDP: one too many", 13, Malformed),
    ] {
        let mut frame = f.udp(false, b"data");
        frame[38..40].copy_from_slice(&length.to_be_bytes());
        is(name, frame, fate);
    }

    // What contradicts itself, or means nothing.
    is("version 5", f.set(false, 14, &[0x55]), Malformed);
    is("version 6 in IPv4", f.set(false, 14, &[0x65]), Malformed);
    is("version 4 in IPv6", f.set(true, 14, &[0x45]), Malformed);
    is("a header of 16 bytes", f.set(false, 14, &[0x44]), Malformed);
    is("ARP", f.set(false, 12, &[8, 6]), NotIp);
    is(
        "a length for an EtherType",
        f.set(false, 12, &[0, 40]),
        NotIp,
    );
    is("GRE", f.set(false, 23, &[47]), NotTracked);
    is("ICMPv6 in IPv4", f.set(false, 23, &[58]), NotTracked);
    is("ICMP in IPv6", f.set(true, 20, &[1]), NotTracked);
    is("no flags", f.tcp_with(false, 0, &[], b""), BadFlags);
    is("all flags", f.tcp_with(true, 255, &[], b""), BadFlags);
    is(
        "SYN and FIN",
        f.tcp_with(false, SYN | FIN, &[], b""),
        BadFlags,
    );
    is(
        "SYN and RST",
        f.tcp_with(true, SYN | RST, &[], b""),
        BadFlags,
    );
    is("FIN alone", f.tcp_with(false, FIN, &[], b""), BadFlags);
    is("a RST of nothing", f.tcp_with(false, RST, &[], b""), NoFlow);
    is(
        "a FIN of nothing",
        f.tcp_with(true, FIN | ACK, &[], b""),
        NoFlow,
    );
    is("an echo", f.echo(false), Created);
    is("IPv6: an echo", f.echo(true), Created);
    let mut answer = f.echo(false);
    answer[34] = 0;
    is("an answer to nothing", answer, NoFlow);
    let mut error = f.echo(true);
    error[54] = 1;
    is("an error", error, NotTracked);
    is("from port 0", f.set(false, 34, &[0, 0]), Created);
    let mut land = f.set(false, 26, &[192, 0, 2, 1]);
    land[34..36].copy_from_slice(&[0, 80]);
    is("from itself to itself", land, Created);
    let mut padded = f.tcp_with(false, SYN, &[], b"");
    padded.resize(60, 0xff);
    is("padded", padded, Created);
    all
}

#[test]
fn packets_meet_the_fate_that_their_names_say() {
    let all = named();
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (name, frame, fate) in &all {
            if program.takes(frame) {
                assert_eq!(watch.send(frame), *fate, "{program:?}: {name}");
            }
        }
        watch.end();
    }
}

#[test]
fn tags_tell_flows_apart_and_a_priority_does_not() {
    use Counter::{Created, Touched};
    const CUSTOMER: u16 = 0x8100;
    const SERVICE: u16 = 0x88a8;
    let untagged = Frames(1_000).tcp(false);
    // EtherType and control information of each tag, the outer one first.
    let tagged: [(&[[u16; 2]], Counter); 13] = [
        (&[], Created),
        (&[[CUSTOMER, 0]], Touched),
        (&[[CUSTOMER, 0xe000]], Touched),
        (&[[CUSTOMER, 0], [CUSTOMER, 0xe000]], Touched),
        (&[[CUSTOMER, 7]], Created),
        (&[[CUSTOMER, 0xf007]], Touched),
        (&[[SERVICE, 7]], Touched),
        (&[[SERVICE, 0], [CUSTOMER, 7]], Touched),
        (&[[SERVICE, 7], [CUSTOMER, 0]], Touched),
        (&[[CUSTOMER, 0xfff]], Created),
        (&[[SERVICE, 7], [CUSTOMER, 0xfff]], Created),
        (&[[SERVICE, 0xfff], [CUSTOMER, 7]], Created),
        (&[[CUSTOMER, 7], [CUSTOMER, 7]], Created),
    ];
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (tags, fate) in tagged {
            let bytes: Vec<u8> = tags
                .iter()
                .flatten()
                .flat_map(|it| it.to_be_bytes())
                .collect();
            let mut frame = untagged.clone();
            frame.splice(12..12, bytes);
            assert_eq!(watch.send(&frame), fate, "{program:?}: {tags:04x?}");
        }
        assert_eq!(watch.end(), 6);
    }
}

#[test]
fn cut_at_every_byte_a_packet_is_truncated_until_its_header_is_there() {
    let f = &mut Frames(1_000);
    let stamped = [1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];
    // Where the header ends that it takes: of options nothing is needed.
    let all = [
        (f.tcp(false), 54),
        (f.tcp(true), 74),
        (f.tcp_with(false, ACK, &stamped, b"data"), 54),
        (f.tcp_with(true, ACK, &stamped, b"data"), 74),
        (f.tagged(&[0x88a8, 0x8100]), 82),
        (f.ip_options(&[1; 40]), 94),
        (f.authenticated(6, AUTHENTICATION), 78),
        (
            f.chain(&[(0, EIGHT), (51, AUTHENTICATION), (44, FIRST)]),
            114,
        ),
        (f.udp(false, b"data"), 42),
        (f.udp(true, b"data"), 62),
        (f.echo(false), 42),
        (f.echo(true), 62),
    ];
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (frame, header) in &all {
            for length in LEAST..=frame.len() {
                if !program.takes(&frame[..length]) {
                    continue;
                }
                let expected = match length.cmp(header) {
                    std::cmp::Ordering::Less => Counter::Truncated,
                    std::cmp::Ordering::Equal => Counter::Created,
                    std::cmp::Ordering::Greater => Counter::Touched,
                };
                let fate = watch.send(&frame[..length]);
                assert_eq!(fate, expected, "{program:?}: {length} of {frame:02x?}");
            }
        }
        assert_eq!(watch.end(), all.len());
    }
}

// --- Recorded packets -------------------------------------------------------------------------------------------

/// The frames of a capture, of whatever link type, as far as it can be read.
fn frames(path: &Path) -> Result<Vec<Vec<u8>>> {
    let file = fs::File::open(path)?;
    let mut frames = Vec::new();
    let Ok(mut reader) = create_reader(1 << 20, file) else {
        return Ok(frames);
    };
    loop {
        match reader.next() {
            Ok((length, block)) => {
                match block {
                    PcapBlockOwned::Legacy(packet) => frames.push(packet.data.to_vec()),
                    PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
                        frames.push(packet.packet_data().to_vec());
                    }
                    PcapBlockOwned::NG(Block::SimplePacket(packet)) => {
                        frames.push(packet.packet_data().to_vec());
                    }
                    _ => {}
                }
                reader.consume(length);
            }
            Err(PcapError::Incomplete(_)) => {
                if reader.reader_exhausted() || reader.refill().is_err() {
                    return Ok(frames);
                }
            }
            _ => return Ok(frames),
        }
    }
}

/// Those of the corpus, and of a folder if one is given. What is not Ethernet is taken for it: hostile enough.
#[test]
fn recorded_packets_meet_the_fate_that_the_host_says() -> Result<()> {
    let mut recorded: Vec<_> = corpus::kept()
        .filter_map(|bytes| Some(input(&bytes)?.1.to_vec()))
        .collect();
    let folder = env::var_os(FOLDER);
    let paths = folder.map_or(Ok(Vec::new()), |folder| captures(Path::new(&folder)))?;
    for path in &paths {
        recorded.extend(frames(path).with_context(|| path.display().to_string())?);
    }
    if paths.is_empty() {
        twheel_tests::skipped(format_args!(
            "recorded captures; give a folder of them with {FOLDER}=…"
        ));
    }
    for frame in &recorded {
        for wanted in [
            WANTED,
            Wanted {
                timing: true,
                ..WANTED
            },
            Wanted {
                vlans: false,
                ..WANTED
            },
        ] {
            twheel_fuzz::opinion::compare(frame, wanted).unwrap_or_else(|wrong| panic!("{wrong}"));
        }
    }
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for frame in &recorded {
            if program.takes(frame) && frame.len() <= LONGEST {
                watch.send(frame);
            }
        }
        let sent = watch.sent;
        anyhow::ensure!(sent > 20, "{program:?}: {sent} packets only");
        let flows = watch.end();
        say(&format!(
            "{program:?}: {sent} packets of the corpus and of {} files, {flows} flows",
            paths.len()
        ));
    }
    Ok(())
}
