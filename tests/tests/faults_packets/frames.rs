//! Named packets, and the verdict for each.

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use twheel_common::counter::Counter;
use twheel_tests::plane::{ACK, FIN, RST, SYN};

/// Makes frames; each is of a flow of its own.
pub struct Frames(pub u16);

impl Frames {
    fn ip(v6: bool) -> PacketBuilderStep<IpHeaders> {
        let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
        if v6 {
            ethernet.ipv6([0xfd; 16], [0xfe; 16], 64)
        } else {
            ethernet.ipv4([10, 0, 0, 1], [192, 0, 2, 1], 64)
        }
    }

    pub fn tcp_with(&mut self, v6: bool, flags: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
        self.0 += 1;
        let mut header = TcpHeader::new(self.0, 80, 1, 1024);
        header.set_options_raw(options).unwrap();
        let mut frame = Vec::new();
        let ip = Self::ip(v6);
        ip.tcp_header(header).write(&mut frame, data).unwrap();
        frame[if v6 { 67 } else { 47 }] = flags;
        frame
    }

    pub fn tcp(&mut self, v6: bool) -> Vec<u8> {
        self.tcp_with(v6, ACK, &[], b"data")
    }

    pub fn udp(&mut self, v6: bool, data: &[u8]) -> Vec<u8> {
        self.0 += 1;
        let mut frame = Vec::new();
        Self::ip(v6)
            .udp(self.0, 53)
            .write(&mut frame, data)
            .unwrap();
        frame
    }

    pub fn echo(&mut self, v6: bool) -> Vec<u8> {
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

    /// A TCP frame with these bytes at this offset.
    fn set(&mut self, v6: bool, at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(v6);
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    }

    pub fn tagged(&mut self, tags: &[u16]) -> Vec<u8> {
        let mut frame = self.tcp(tags.len().is_multiple_of(2));
        for tag in tags.iter().rev() {
            let [a, b] = tag.to_be_bytes();
            frame.splice(12..12, [a, b, 0, 7]);
        }
        frame
    }

    /// A TCP frame over IPv4 with these IP options; the length fields fit.
    pub fn ip_options(&mut self, options: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(false);
        frame.splice(34..34, options.iter().copied());
        frame[14] += (options.len() / 4) as u8;
        let total = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame
    }

    /// A TCP frame over IPv4 with an authentication header, which names the next header; the length
    /// fields fit.
    pub fn authenticated(&mut self, next: u8, header: &[u8]) -> Vec<u8> {
        let mut frame = self.tcp(false);
        frame.splice(34..34, header.iter().copied());
        frame[23] = 51;
        frame[34] = next;
        let total = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame
    }

    /// A TCP frame over IPv6 with extension headers; the length fields fit.
    pub fn chain(&mut self, chain: &[(u8, &[u8])]) -> Vec<u8> {
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
pub const EIGHT: &[u8] = &[0; 8];
/// Fragment headers without the number of the next header: the first fragment, a middle one, the
/// last, the only one.
pub const FIRST: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 9];
const MIDDLE: &[u8] = &[0, 0, 0, 0x41, 0, 0, 0, 9];
const LAST: &[u8] = &[0, 0, 0, 0x80, 0, 0, 0, 9];
const ATOMIC: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 9];
/// An authentication header of 24 bytes (RFC 4302).
pub const AUTHENTICATION: &[u8] = &[
    0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// The name of each packet, the packet, and its verdict.
pub fn named() -> Vec<(&'static str, Vec<u8>, Counter)> {
    use Counter::{BadFlags, Created, Fragment, Malformed, NoFlow, NotIp, NotTracked, Truncated};
    let mut all = Vec::new();
    let f = &mut Frames(1_000);
    let mut is = |name, frame, fate| all.push((name, frame, fate));

    // The parser needs one TCP option only, and looks for it in one place.
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

    // VLAN tags.
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

    // Fragments, which are not reassembled here: the first has the ports, and the others' bytes are
    // not taken for ports.
    is("a first fragment", f.set(false, 20, &[0x20, 0]), Created);
    is("a middle one", f.set(false, 20, &[0x20, 9]), Fragment);
    is("the last one", f.set(false, 20, &[0, 9]), Fragment);
    is(
        "a fragment that overlaps the ports",
        f.set(false, 20, &[0x20, 1]),
        Fragment,
    );
    is(
        "a fragment beyond 64 KiB",
        f.set(false, 20, &[0x1f, 0xff]),
        Fragment,
    );
    is(
        "a fragment that must not be fragmented",
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
        "IPv6: a fragment that overlaps the ports",
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
        "IPv6: the longest packet",
        f.set(true, 18, &[255, 255]),
        Created,
    );
    is("a data offset of 4", f.set(false, 46, &[0x40]), Malformed);
    is("one of 0", f.set(true, 66, &[0]), Malformed);
    is(
        "a length beyond the packet",
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

    // Packets that contradict themselves, or mean nothing.
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
        "a FIN without an ACK",
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
