//! Captures that the test makes.

use std::{env, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use etherparse::{
    Icmpv4Type, IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader,
    icmpv4::DestUnreachableHeader, ip_number,
};
use twheel_tests::plane::{ACK, FIN, RST, SYN};

use crate::{
    LONGEST,
    difference::Name::{
        BadFlags, BeginsNothing, Malformed, MoreTags, NoLength, OptionsCut, OtherAddress,
        OtherLink, TooLong, Tunnelled,
    },
    lab::Lab,
    summary::compare,
};

const MAC: [u8; 6] = [2; 6];
const HOSTS: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
const HOSTS_V6: [[u8; 16]; 2] = [[0xfd; 16], [0xfe; 16]];

/// An IP header behind an Ethernet header, from one of two hosts to the other.
pub fn ip(v6: bool, from: usize) -> PacketBuilderStep<IpHeaders> {
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

/// One end of a conversation: its number (0 or 1), and the ports of both.
struct Side {
    v6: bool,
    from: usize,
    ports: [u16; 2],
}

fn side(v6: bool, from: usize, ports: [u16; 2]) -> Side {
    Side { v6, from, ports }
}

impl Side {
    fn tcp(&self, flags: u8, seq: u32, payload: &[u8]) -> Result<Vec<u8>> {
        let (source, destination) = ports(self.from, self.ports);
        let mut header = TcpHeader::new(source, destination, seq, 1024);
        header.syn = flags & SYN != 0;
        header.ack = flags & ACK != 0;
        header.fin = flags & FIN != 0;
        header.rst = flags & RST != 0;
        let mut frame = Vec::new();
        ip(self.v6, self.from)
            .tcp_header(header)
            .write(&mut frame, payload)?;
        Ok(frame)
    }

    fn udp(&self, payload: &[u8]) -> Result<Vec<u8>> {
        let (source, destination) = ports(self.from, self.ports);
        let mut frame = Vec::new();
        ip(self.v6, self.from)
            .udp(source, destination)
            .write(&mut frame, payload)?;
        Ok(frame)
    }
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

/// A frame with bytes inserted between the addresses and the EtherType, or put in the EtherType's
/// place.
fn spliced(mut frame: Vec<u8>, at: std::ops::Range<usize>, bytes: &[u8]) -> Vec<u8> {
    frame.splice(at, bytes.iter().copied());
    frame
}

/// An 802.1Q tag.
const TAG: [u8; 4] = [0x81, 0, 0, 7];
/// An 802.1Q tag of another VLAN.
const OTHER_TAG: [u8; 4] = [0x81, 0, 0, 8];
/// An 802.1Q tag with a priority and no VLAN.
const PRIORITY: [u8; 4] = [0x81, 0, 0xe0, 0];
/// An 802.1ad tag.
const SERVICE_TAG: [u8; 4] = [0x88, 0xa8, 0, 9];

/// A header of Cisco FabricPath, which precedes the Ethernet header. The frame ends with
/// FabricPath's checksum.
const FABRIC_PATH: [u8; 16] = [2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 2, 2, 0x89, 0x03, 0, 0x41];

/// A frame with an authentication header (RFC 4302) behind the IPv4 header.
fn authenticated(frame: Vec<u8>) -> Vec<u8> {
    let mut header = [0; 24];
    header[..2].copy_from_slice(&[frame[23], 4]);
    let mut frame = spliced(frame, 34..34, &header);
    frame[23] = 51;
    let length = frame.len() as u16 - 14;
    frame[16..18].copy_from_slice(&length.to_be_bytes());
    frame
}

/// A frame with a routing header of two segments (RFC 8754) behind the IPv6 header, of which `left`
/// are left.
fn routed(frame: Vec<u8>, left: u8) -> Vec<u8> {
    let mut header = vec![frame[20], 4, 4, left, 1, 0, 0, 0];
    header.extend([[0xfc; 16], HOSTS_V6[1]].concat());
    let mut frame = spliced(frame, 54..54, &header);
    frame[20] = 43;
    let length = frame.len() as u16 - 54;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame
}

/// A frame with the home address of its sender in destination options (RFC 6275).
fn at_home(frame: Vec<u8>) -> Vec<u8> {
    let mut header = vec![frame[20], 2, 1, 2, 0, 0, 0xc9, 16];
    header.extend([0xfc; 16]);
    let mut frame = spliced(frame, 54..54, &header);
    frame[20] = 60;
    let length = frame.len() as u16 - 54;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame
}

/// Frames that tshark and twheel read alike.
fn alike() -> Result<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    for v6 in [false, true] {
        let of = [40_000, 80];
        for (from, flags, seq, payload) in [
            (0, SYN, 0, &b""[..]),
            (1, SYN | ACK, 0, b""),
            (0, ACK, 1, b""),
            (0, ACK, 1, b"request"),
            // A retransmission.
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
            frames.push(side(v6, from, of).tcp(flags, seq, payload)?);
        }
        // Refused twice; the flow may end at once.
        for _ in 0..2 {
            frames.push(side(v6, 0, [40_001, 81]).tcp(SYN, 0, b"")?);
            frames.push(side(v6, 1, [40_001, 81]).tcp(RST | ACK, 0, b"")?);
        }
        // A connection that was open before.
        frames.push(side(v6, 1, [40_002, 80]).tcp(ACK, 500, b"in the middle")?);
        // A question and its answer, without a tag, with one and with two.
        frames.push(side(v6, 0, [40_000, 53]).udp(b"question")?);
        let answer = side(v6, 1, [40_000, 53]).udp(b"answer")?;
        frames.push(spliced(answer.clone(), 12..12, &TAG));
        frames.push(spliced(answer.clone(), 12..12, &[TAG, TAG].concat()));
        // The answer comes in another VLAN than the question; in none, with a priority; with one
        // tag within another, of either kind; and with a priority within or around a VLAN.
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
    frames.push(authenticated(
        side(false, 0, [40_003, 80]).tcp(SYN, 0, b"")?,
    ));
    frames.push(authenticated(
        side(false, 0, [40_003, 53]).udp(b"question")?,
    ));
    // It has arrived at its final destination.
    frames.push(routed(side(true, 0, [40_003, 80]).tcp(SYN, 0, b"")?, 0));
    // In two fragments, of which the second has no ports.
    let mut first = side(false, 0, [40_001, 53]).udp(&[0; 1472])?;
    first[20] = 0x20;
    let mut second = first[..34].to_vec();
    second.extend([0; 100]);
    second[16..18].copy_from_slice(&120u16.to_be_bytes());
    second[20..22].copy_from_slice(&185u16.to_be_bytes());
    first[38..40].copy_from_slice(&1580u16.to_be_bytes());
    frames.extend([first, second]);
    // An error quotes a packet of a flow that does not exist.
    let quoted = side(false, 1, [40_009, 53]).udp(b"")?;
    let mut error = Vec::new();
    ip(false, 0)
        .icmpv4(Icmpv4Type::DestinationUnreachable(
            DestUnreachableHeader::Port,
        ))
        .write(&mut error, &quoted[14..])?;
    frames.push(error);
    Ok(frames)
}

/// Frames that tshark and twheel read differently.
fn different() -> Result<Vec<Vec<u8>>> {
    let inner = side(false, 0, [1, 53]).udp(b"")?;
    let mut tunnelled = Vec::new();
    ip(false, 0).write(&mut tunnelled, ip_number::IPV4, &inner[14..])?;
    // MPLS.
    let labelled = side(false, 0, [2, 53]).udp(b"")?;
    let labelled = spliced(labelled, 12..14, &[0x88, 0x47, 0, 1, 0x01, 0x40]);
    let tagged = spliced(
        side(false, 0, [3, 53]).udp(b"")?,
        12..12,
        &[TAG, TAG, TAG].concat(),
    );
    let mut long = side(false, 0, [4, 53]).udp(&[0; 65_000])?;
    long.resize(LONGEST + 1, 0);
    // The header promises twelve bytes of options, and four of them are there.
    let mut cut = side(false, 0, [5, 80]).tcp(ACK, 1, &[1; 12])?;
    cut[46] = 0x80;
    cut.truncate(58);
    // The same in a capture that does not record the truncation: forty bytes of options, of which
    // eight are there.
    let mut cut_unsaid = side(false, 0, [11, 80]).tcp(ACK, 1, &[1; 40])?;
    cut_unsaid[46] = 0xf0;
    cut_unsaid.truncate(62);
    // tshark takes the last four bytes for a checksum: in the second frame, four bytes of the
    // options. Neither counts that frame.
    let fabric = side(false, 0, [12, 53]).udp(b"12345678")?;
    let fabric = spliced(fabric, 0..0, &FABRIC_PATH);
    let mut in_options = side(false, 0, [13, 80]).tcp(ACK, 1, &[1; 12])?;
    in_options[46] = 0x80;
    let in_options = spliced(in_options, 0..0, &FABRIC_PATH);
    // Without the checksum, neither counts the packet.
    let mut udp_cut = side(false, 0, [20, 53]).udp(&[0; 20])?;
    udp_cut.truncate(40);
    let old_tag = spliced(side(false, 0, [14, 53]).udp(b"")?, 12..12, &[0x91, 0, 0, 7]);
    let mut malformed = side(false, 0, [6, 53]).udp(b"12345678")?;
    malformed[38..40].copy_from_slice(&17u16.to_be_bytes());
    let mut unsaid = side(false, 0, [7, 53]).udp(b"12345678")?;
    unsaid[38..40].copy_from_slice(&[0, 0]);
    Ok(vec![
        tunnelled,
        authenticated(authenticated(side(false, 0, [19, 53]).udp(b"")?)),
        labelled,
        tagged,
        long,
        cut,
        malformed,
        unsaid,
        side(false, 0, [8, 80]).tcp(SYN | FIN, 1, b"")?,
        side(false, 0, [9, 80]).tcp(RST, 1, b"")?,
        echo(false, 1, 10)?,
        cut_unsaid,
        fabric,
        in_options,
        old_tag,
        routed(side(true, 0, [15, 80]).tcp(ACK, 1, b"")?, 1),
        // The header claims more segments left than there are.
        routed(side(true, 0, [16, 53]).udp(b"")?, 3),
        udp_cut,
        at_home(side(true, 0, [18, 80]).tcp(ACK, 1, b"")?),
        // This one begins no flow.
        routed(side(true, 0, [17, 80]).tcp(RST, 1, b"")?, 1),
    ])
}

/// The original pcap format: <https://www.ietf.org/archive/id/draft-ietf-opsawg-pcap-05.html>.
fn pcap(link: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let header = [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 1 << 18, link];
    let mut file: Vec<u8> = header
        .iter()
        .flat_map(|word: &u32| word.to_ne_bytes())
        .collect();
    for (second, frame) in (0..).zip(frames) {
        let length = frame.len() as u32;
        // The original length of a truncated frame is not known here, but tshark needs one.
        let whole = length.max(60);
        let record = [second, 0, length, whole];
        file.extend(record.iter().flat_map(|word: &u32| word.to_ne_bytes()));
        file.extend(frame);
    }
    file
}

/// A directory for this process alone; removed when dropped.
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

pub fn check_own(lab: &mut Lab) -> Result<()> {
    let folder = Scratch::new()?;
    let Scratch(path) = &folder;
    fs::create_dir(path.join("more"))?;
    fs::write(path.join("alike.pcap"), pcap(1, &alike()?))?;
    let summary = compare(lab, path)?;
    ensure!(summary.wrong.is_empty(), "{}", summary.wrong.join("\n"));
    let counts = (summary.flows, summary.packets, summary.explained.len());
    // For each version of IP: three TCP flows of 12, 4 and 1 packets; two UDP packets in no VLAN,
    // three in VLAN 8 and one in each of 6 other VLANs; an echo of 2 packets. Also three packets
    // with another header, and a first fragment.
    ensure!(counts == (2 * 12 + 4, 2 * 30 + 4, 0), "{summary}");
    ensure!(summary.outright == summary.flows, "{summary}");

    fs::remove_file(path.join("alike.pcap"))?;
    fs::write(path.join("more/different.pcap"), pcap(1, &different()?))?;
    // The frames again in Linux's format for cooked captures.
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
        // Both tshark's flow and twheel's count; for the last frame only tshark's.
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
