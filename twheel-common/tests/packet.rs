//! The parser against packets made by another library.
#![allow(missing_docs)]

use std::mem::MaybeUninit;

use etherparse::{PacketBuilder, VlanId};
use twheel_common::{
    flow::Direction,
    packet::{
        Outside, Protocols, Segment, Skip, Wanted, datagram, has_ethernet, is_tagged, parse,
        parse_any, parse_into, parse_plain, parse_tagged, tcp,
    },
};

const A: [u8; 4] = [10, 0, 0, 1];
const B: [u8; 4] = [10, 0, 0, 2];
const MAC: [u8; 6] = [2; 6];

fn v4(source: ([u8; 4], u16), destination: ([u8; 4], u16)) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv4(source.0, destination.0, 64)
        .tcp(source.1, destination.1, 1, 1024)
        .ack(1)
        .write(&mut frame, b"payload")
        .unwrap();
    frame
}

fn v6() -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv6([1; 16], [2; 16], 64)
        .tcp(1000, 80, 1, 1024)
        .syn()
        .write(&mut frame, b"")
        .unwrap();
    frame
}

/// `frame` with `headers` behind the IPv6 header, which must be the first one's `next`.
fn with_extensions(headers: &[(u8, &[u8])]) -> Vec<u8> {
    let mut frame = v6();
    let tcp = frame.split_off(54);
    let mut link = 20; // offset of the next-header field to fill in
    for (number, header) in headers {
        frame[link] = *number;
        link = frame.len();
        frame.extend_from_slice(header);
    }
    frame[link] = 6;
    frame.extend_from_slice(&tcp);
    let payload = (frame.len() - 54) as u16;
    frame[18..20].copy_from_slice(&payload.to_be_bytes());
    frame
}

/// The same segment in a packet with so many bytes more.
fn longer(segment: Segment, by: usize) -> Segment {
    Segment {
        bytes: segment.bytes + by as u32,
        ..segment
    }
}

#[test]
fn both_directions_have_one_key() {
    let there = parse(v4((A, 1000), (B, 80)).as_slice()).unwrap();
    let back = parse(v4((B, 80), (A, 1000)).as_slice()).unwrap();
    assert_eq!(there.key, back.key);
    assert_eq!(there.direction, back.direction.reverse());
    let sender = |direction| there.key.sender(direction).to_string();
    assert_eq!(sender(there.direction), "10.0.0.1:1000");
    assert_eq!(sender(back.direction), "10.0.0.2:80");
    assert_eq!(there.key.proto(), 6);
    assert_eq!(there.flags, tcp::ACK);
}

#[test]
fn every_part_of_the_five_tuple_counts() {
    let key = |source, destination| parse(v4(source, destination).as_slice()).unwrap().key;
    let base = key((A, 1000), (B, 80));
    for other in [
        key((A, 1001), (B, 80)),
        key((A, 1000), (B, 81)),
        key((A, 80), (B, 1000)),
        key(([10, 0, 0, 3], 1000), (B, 80)),
        key((A, 1000), ([10, 0, 1, 2], 80)),
    ] {
        assert_ne!(base, other);
    }
    // One address on both ends: the ports tell the directions apart.
    let there = parse(v4((A, 1), (A, 2)).as_slice()).unwrap();
    let back = parse(v4((A, 2), (A, 1)).as_slice()).unwrap();
    assert_eq!(there.key, back.key);
    assert_ne!(there.direction, back.direction);
}

#[test]
fn ipv6_is_not_mapped() {
    let segment = parse(v6().as_slice()).unwrap();
    assert_eq!(segment.flags, tcp::SYN);
    assert_eq!(
        segment.key.sender(segment.direction).to_string(),
        "[101:101:101:101:101:101:101:101]:1000"
    );
    assert!(matches!(segment.direction, Direction::FromLow));
}

#[test]
fn up_to_two_vlan_tags() {
    let key = parse(v4((A, 1000), (B, 80)).as_slice()).unwrap().key;
    let mut single = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .single_vlan(VlanId::try_new(7).unwrap())
        .ipv4(A, B, 64)
        .tcp(1000, 80, 1, 1024)
        .syn()
        .write(&mut single, b"")
        .unwrap();
    assert_eq!(parse(single.as_slice()).unwrap().key, key.in_vlans(7));
    let mut double = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .double_vlan(VlanId::try_new(7).unwrap(), VlanId::try_new(8).unwrap())
        .ipv4(A, B, 64)
        .tcp(1000, 80, 1, 1024)
        .syn()
        .write(&mut double, b"")
        .unwrap();
    let in_both = key.in_vlans(7 | 8 << 12);
    assert_eq!(parse(double.as_slice()).unwrap().key, in_both);
    assert_eq!(in_both.vlans(), [7, 8]);
    let ignored = Wanted {
        vlans: false,
        ..ANY
    };
    assert_eq!(parse_any(double.as_slice(), ignored).unwrap().key, key);
    let mut triple = double.clone();
    triple.splice(12..12, [0x81, 0, 0, 9]);
    assert_eq!(parse(triple.as_slice()), Err(Skip::NotIp));
}

fn parse_outside(frame: &[u8], outside: Outside) -> Result<Segment, Skip> {
    let mut segment = MaybeUninit::new(Segment::NONE);
    parse_into(frame, ANY, outside, &mut segment)?;
    // SAFETY: it is one from the beginning.
    Ok(unsafe { segment.assume_init() })
}

#[test]
fn a_tag_that_was_taken_out_is_the_outer_one() {
    let frame = v4((A, 1000), (B, 80));
    let key = parse(frame.as_slice()).unwrap().key;
    let with = |frame: &[u8], tag| {
        let outside = Outside { is_ip: false, tag };
        parse_outside(frame, outside).unwrap().key
    };
    // Priority and drop eligibility are no part of the identifier.
    assert_eq!(with(&frame, 0xf007), key.in_vlans(7));
    assert_eq!(with(&frame, 0xe000), key, "a priority alone");
    let mut inner = frame.clone();
    inner.splice(12..12, [0x81, 0, 0x20, 8]);
    assert_eq!(with(&inner, 7), key.in_vlans(7 | 8 << 12));
    assert_eq!(with(&inner, 0xe000), key.in_vlans(8));
    let mut both = inner.clone();
    both.splice(12..12, [0x88, 0xa8, 0, 9]);
    assert_eq!(with(&both, 0), key.in_vlans(9 | 8 << 12));
    assert_eq!(
        with(&both, 7),
        key.in_vlans(7 | 9 << 12),
        "a third counts as none"
    );
    let mut priority = inner;
    priority[14..16].copy_from_slice(&[0xe0, 0]);
    assert_eq!(with(&priority, 0), key);
}

#[test]
fn a_decrypted_packet_may_have_the_ethernet_header_of_the_encrypted_one() {
    for frame in [v4((A, 1), (B, 2)), v6()] {
        assert!(has_ethernet(frame.as_slice()));
        assert!(!has_ethernet(&frame[14..]), "it begins with the IP header");
        assert!(!has_ethernet(&frame[..14]), "there is no more");
    }
    // The type and the version must be those of one protocol.
    for (at, byte) in [(12, 0x86), (13, 0xdd), (14, 0x65), (14, 0x05)] {
        let mut frame = v4((A, 1), (B, 2));
        frame[at] = byte;
        assert!(!has_ethernet(frame.as_slice()), "{byte:#x} at {at}");
    }
}

#[test]
fn addresses_that_read_like_the_type_of_a_frame_are_none() {
    for source in [[8, 0, 64, 9], [134, 221, 96, 9]] {
        let frame = v4((source, 1), (B, 2));
        assert!(!has_ethernet(&frame[14..]), "{source:?}");
        assert!(has_ethernet(frame.as_slice()), "{source:?}");
        let mut longer = frame[14..].to_vec();
        longer.push(0);
        assert!(
            has_ethernet(longer.as_slice()),
            "nothing else tells them apart"
        );
    }
    for words in [[8, 0, 0x40], [0x86, 0xdd, 0x60]] {
        let mut frame = v6();
        frame[14 + 12..14 + 15].copy_from_slice(&words);
        assert!(!has_ethernet(&frame[14..]), "{words:?}");
        assert!(has_ethernet(frame.as_slice()), "{words:?}");
    }
}

#[test]
fn a_packet_without_an_ethernet_header_begins_with_its_version() {
    let outside = Outside {
        is_ip: true,
        tag: 0,
    };
    for frame in [v4((A, 1), (B, 2)), v6(), udp(&[]), icmp(false, 128)] {
        let parsed = parse_any(frame.as_slice(), ANY);
        assert_eq!(parse_outside(&frame[14..], outside), parsed);
        assert_eq!(
            parse_outside(&frame, outside),
            Err(Skip::NotIp),
            "MAC addresses"
        );
    }
    // An address that begins like an Ethernet type.
    let frame = v4(([8, 0, 69, 0], 1), ([1, 2, 3, 4], 2));
    let parsed = parse_any(frame.as_slice(), ANY);
    assert_eq!(parse_outside(&frame[14..], outside), parsed);
    assert_eq!(parse_outside(&[], outside), Err(Skip::Truncated));
}

#[test]
fn an_authentication_header_is_read_over() {
    let plain = v4((A, 1000), (B, 80));
    let segment = parse(plain.as_slice()).unwrap();
    // RFC 4302, section 2: next header, length in words minus 2, reserved, SPI, number, 12 bytes of ICV.
    let mut header = vec![6, 4, 0, 0];
    header.extend([0; 20]);
    let mut frame = plain.clone();
    frame[23] = 51;
    frame[17] += 24;
    frame.splice(34..34, header);
    assert_eq!(parse(frame.as_slice()), Ok(longer(segment, 24)));
    // One that reaches beyond the packet, and one within which the frame ends.
    let mut long = frame.clone();
    long[35] = 0xff;
    assert_eq!(parse(long.as_slice()), Err(Skip::Malformed));
    assert_eq!(parse(&frame[..36]), Err(Skip::Truncated));
    let mut short = frame.clone();
    short[17] = plain[17];
    assert_eq!(parse(short.as_slice()), Err(Skip::Malformed));
    // Of what is not tracked, and of another one.
    for next in [47, 51] {
        let mut other = frame.clone();
        other[34] = next;
        assert_eq!(parse(other.as_slice()), Err(Skip::NotTracked));
    }
}

#[test]
fn packets_that_were_joined_are_counted_with_their_headers() {
    let mut frame = v4((A, 1), (B, 2));
    frame[16..18].copy_from_slice(&4400u16.to_be_bytes());
    let mut segment = parse(frame.as_slice()).unwrap();
    let data = 4400 - 40;
    assert_eq!((segment.packets, segment.bytes), (1, 4400));
    // As the kernel has counted them; or by their size, where nobody has.
    for (told, packets) in [
        ((0, 0), 0),
        ((3, 1_448), 3),
        ((0, 1_448), 4),
        ((0, 1_454), 3),
        ((0, 5_000), 1),
    ] {
        assert_eq!(segment.joined(told.0, told.1), packets, "{told:?}");
    }
    segment.count_joined(3);
    assert_eq!((segment.packets, segment.bytes), (3, data + 3 * 40));
    let mut datagram = parse_any(udp(&[]).as_slice(), ANY).unwrap();
    let bytes = datagram.bytes;
    datagram.count_joined(3);
    assert_eq!((datagram.packets, datagram.bytes), (3, bytes));
}

#[test]
fn ipv4_options_move_the_tcp_header() {
    let plain = parse(v4((A, 1000), (B, 80)).as_slice()).unwrap();
    for words in 1..=10 {
        let mut frame = v4((A, 1000), (B, 80));
        frame.splice(34..34, vec![1; words * 4]);
        frame[14] = 0x45 + words as u8;
        let total = (frame.len() - 14) as u16;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        assert_eq!(
            parse(frame.as_slice()),
            Ok(longer(plain, words * 4)),
            "{words} words of options"
        );
    }
}

#[test]
fn ipv6_extension_headers_are_walked() {
    let plain = parse(v6().as_slice()).unwrap();
    let eight: &[u8] = &[0; 8];
    let sixteen: &[u8] = &[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // An authentication header counts words of four bytes: 4 + 2 of them here.
    let authentication: &[u8] = &{
        let mut header = [0; 24];
        header[1] = 4;
        header
    };
    let first_fragment: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 9];
    for chain in [
        &[(0, eight)][..],
        &[(0, sixteen), (43, eight), (60, eight)],
        &[(51, authentication)],
        &[(44, first_fragment)],
        &[(60, eight); 8],
    ] {
        assert_eq!(
            parse(with_extensions(chain).as_slice()),
            Ok(longer(
                plain,
                chain.iter().map(|(_, header)| header.len()).sum()
            )),
            "{chain:?}"
        );
    }
    assert_eq!(
        parse(with_extensions(&[(60, eight); 9]).as_slice()),
        Err(Skip::Malformed)
    );
    let later_fragment: &[u8] = &[0, 0, 0, 8, 0, 0, 0, 9];
    assert_eq!(
        parse(with_extensions(&[(44, later_fragment)]).as_slice()),
        Err(Skip::Fragment)
    );
    // A chain that is longer than the payload it says it has.
    let mut lie = with_extensions(&[(60, eight)]);
    lie[18..20].copy_from_slice(&4u16.to_be_bytes());
    assert_eq!(parse(lie.as_slice()), Err(Skip::Malformed));
    // Encrypted from here on.
    assert_eq!(
        parse(with_extensions(&[(50, eight)]).as_slice()),
        Err(Skip::NotTracked)
    );
}

#[test]
fn extension_headers_with_addresses_leave_those_of_the_key() {
    let plain = parse(v6().as_slice()).unwrap();
    let header = |start: [u8; 8], addresses: &[[u8; 16]]| {
        let mut header = start.to_vec();
        header.extend(addresses.concat());
        header
    };
    let stops = [[3; 16], [4; 16]];
    for (number, header) in [
        // Routing headers of type 0, 2 and 4, with stops left and without.
        (43, header([0, 4, 0, 2, 0, 0, 0, 0], &stops)),
        (43, header([0, 4, 0, 0, 0, 0, 0, 0], &stops)),
        (43, header([0, 2, 2, 1, 0, 0, 0, 0], &stops[..1])),
        (43, header([0, 4, 4, 1, 1, 0, 0, 0], &stops)),
        (43, header([0, 4, 4, 0, 1, 0, 0, 0], &stops)),
        // A home address (RFC 6275, section 6.3) behind an option of padding.
        (60, header([0, 2, 1, 2, 0, 0, 0xc9, 16], &stops[..1])),
    ] {
        assert_eq!(
            parse(with_extensions(&[(number, &header)]).as_slice()),
            Ok(longer(plain, header.len())),
            "{number}: {header:?}"
        );
    }
}

#[test]
fn ipv4_fragments_but_the_first_have_no_ports() {
    let mut frame = v4((A, 1000), (B, 80));
    frame[20..22].copy_from_slice(&0x2000u16.to_be_bytes()); // more fragments, offset 0
    assert!(parse(frame.as_slice()).is_ok());
    frame[20..22].copy_from_slice(&0x2001u16.to_be_bytes());
    assert_eq!(parse(frame.as_slice()), Err(Skip::Fragment));
    frame[20..22].copy_from_slice(&0x1000u16.to_be_bytes());
    assert_eq!(parse(frame.as_slice()), Err(Skip::Fragment));
}

/// UDP's length is that of the whole datagram, of which a first fragment has a part.
#[test]
fn a_first_fragment_of_udp_is_shorter_than_its_datagram() {
    let wanted = Wanted {
        protocols: Protocols::UDP,
        timing: false,
        vlans: true,
    };
    let udp = |frame: &[u8]| parse_any(frame, wanted).map(|segment| segment.bytes);
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv4(A, B, 64)
        .udp(1000, 53)
        .write(&mut frame, &[0; 16])
        .unwrap();
    frame[38..40].copy_from_slice(&3000u16.to_be_bytes());
    assert_eq!(udp(&frame), Err(Skip::Malformed));
    frame[20] = 0x20; // more fragments
    assert_eq!(udp(&frame), Ok(44));
    frame[38..40].copy_from_slice(&7u16.to_be_bytes());
    assert_eq!(udp(&frame), Err(Skip::Malformed), "shorter than its header");

    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv6([1; 16], [2; 16], 64)
        .udp(1000, 53)
        .write(&mut frame, &[0; 16])
        .unwrap();
    frame[58..60].copy_from_slice(&3000u16.to_be_bytes());
    frame.splice(54..54, [17, 0, 0, 1, 0, 0, 0, 9]);
    frame[20] = 44;
    frame[18..20].copy_from_slice(&32u16.to_be_bytes());
    assert_eq!(udp(&frame), Ok(72));
    let mut again = frame.clone();
    frame[57] = 0; // the only fragment
    assert_eq!(udp(&frame), Err(Skip::Malformed));
    // A second fragment header takes nothing back.
    again.splice(62..62, [17, 0, 0, 0, 0, 0, 0, 9]);
    again[54] = 44;
    again[18..20].copy_from_slice(&40u16.to_be_bytes());
    assert_eq!(udp(&again), Ok(80));
}

#[test]
fn every_truncation_is_called_one() {
    for frame in [
        v4((A, 1000), (B, 80)),
        v6(),
        with_extensions(&[(0, &[0; 8]), (60, &[0; 8])]),
    ] {
        let whole = parse(frame.as_slice()).unwrap();
        let mut needed = frame.len();
        while parse(&frame[..needed - 1]).is_ok() {
            needed -= 1;
        }
        for length in 0..needed {
            assert_eq!(
                parse(&frame[..length]),
                Err(Skip::Truncated),
                "{length} bytes"
            );
        }
        assert_eq!(parse(&frame[..needed]), Ok(whole));
    }
}

#[test]
fn headers_that_contradict_themselves() {
    let broken = |at: usize, value: u8| {
        let mut frame = v4((A, 1000), (B, 80));
        frame[at] = value;
        parse(frame.as_slice())
    };
    assert_eq!(broken(14, 0x55), Err(Skip::Malformed), "version 5");
    assert_eq!(
        broken(14, 0x44),
        Err(Skip::Malformed),
        "a header of 16 bytes"
    );
    assert_eq!(
        broken(46, 0x40),
        Err(Skip::Malformed),
        "a TCP header of 16 bytes"
    );
    assert_eq!(
        broken(46, 0xf0),
        Err(Skip::Malformed),
        "one of 60, in a datagram of 47"
    );
    assert_eq!(
        broken(17, 19),
        Err(Skip::Malformed),
        "a datagram shorter than its header"
    );
    assert_eq!(broken(17, 39), Err(Skip::Malformed), "a byte short of TCP");
    assert!(broken(17, 40).is_ok(), "no payload");
    let mut frame = v6();
    frame[14] = 0x40;
    assert_eq!(
        parse(frame.as_slice()),
        Err(Skip::Malformed),
        "version 4 in IPv6"
    );
}

#[test]
fn other_protocols_pass() {
    let mut frame = v4((A, 1000), (B, 80));
    frame[23] = 17;
    assert_eq!(parse(frame.as_slice()), Err(Skip::NotTracked));
    frame[12..14].copy_from_slice(&[8, 6]);
    assert_eq!(parse(frame.as_slice()), Err(Skip::NotIp));
}

#[test]
fn flags_that_no_stack_sends() {
    let with = |flags: u8| {
        let mut frame = v4((A, 1000), (B, 80));
        frame[47] = flags;
        parse(frame.as_slice()).map(|segment| segment.flags)
    };
    for flags in [0x02, 0x12, 0x10, 0x18, 0x11, 0x14, 0x04, 0x19, 0xc2, 0x30] {
        // Without ECN's.
        assert_eq!(with(flags), Ok(flags & 0x3f), "{flags:#x}");
    }
    for flags in [0x00, 0x03, 0x06, 0x01, 0x3f, 0x29, 0x08, 0x07] {
        assert_eq!(with(flags), Err(Skip::BadFlags), "{flags:#x}");
    }
    // Those of `tcp_valid_flags` in `net/netfilter/nf_conntrack_proto_tcp.c`, with PSH, ECE and CWR or without.
    let sent = [0x02, 0x22, 0x12, 0x04, 0x14, 0x11, 0x31, 0x10, 0x30];
    for flags in 0..=u8::MAX {
        assert_eq!(
            with(flags).is_ok(),
            sent.contains(&(flags & 0x37)),
            "{flags:#x}"
        );
    }
}

#[test]
fn bytes_are_the_ip_packets() {
    let padded = |mut frame: Vec<u8>| {
        frame.resize(frame.len() + 6, 0);
        frame
    };
    assert_eq!(
        parse(padded(v4((A, 1), (B, 2))).as_slice()).unwrap().bytes,
        47
    );
    assert_eq!(parse(padded(v6()).as_slice()).unwrap().bytes, 60);
    // Segmentation is still to come, and 16 bits say no more than so much.
    let mut frame = v4((A, 1), (B, 2));
    frame[16..18].copy_from_slice(&[0, 0]);
    assert_eq!(parse(frame.as_slice()).unwrap().bytes, 47);
    let mut frame = v6();
    frame[18..20].copy_from_slice(&[0, 0]);
    assert_eq!(parse(frame.as_slice()).unwrap().bytes, 60);
}

#[test]
fn timestamps_are_read_where_stacks_put_them() {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv4(A, B, 64)
        .tcp(1000, 80, 1, 513)
        .ack(1)
        .options(&[
            etherparse::TcpOptionElement::Noop,
            etherparse::TcpOptionElement::Noop,
            etherparse::TcpOptionElement::Timestamp(7, 9),
        ])
        .unwrap()
        .write(&mut frame, b"payload")
        .unwrap();
    let segment = parse(frame.as_slice()).unwrap();
    assert_eq!((segment.stamp, segment.window), ([7, 9], 513));
    // Cut there, the segment is one all the same.
    assert_eq!(parse(&frame[..60]).unwrap().stamp, [0, 0]);
    assert_eq!(parse(v4((A, 1), (B, 2)).as_slice()).unwrap().stamp, [0, 0]);
}

#[test]
fn what_looks_like_a_timestamp_behind_the_header_is_none() {
    let mut data = vec![1, 1, 8, 10];
    data.extend([7; 8]);
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv4(A, B, 64)
        .tcp(1000, 80, 1, 513)
        .ack(1)
        .write(&mut frame, &data)
        .unwrap();
    assert_eq!(parse(frame.as_slice()).unwrap().stamp, [0, 0]);
}

const ANY: Wanted = Wanted {
    protocols: Protocols(7),
    timing: true,
    vlans: true,
};

fn udp(data: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .ipv4(A, B, 64)
        .udp(1000, 53)
        .write(&mut frame, data)
        .unwrap();
    frame
}

#[test]
fn datagrams_of_both_directions_have_one_key() {
    let there = udp(&[]);
    let mut back = there.clone();
    back[26..30].copy_from_slice(&B);
    back[30..34].copy_from_slice(&A);
    back[34..38].rotate_left(2);
    let [there, back] = [there, back].map(|frame| parse_any(frame.as_slice(), ANY).unwrap());
    assert_eq!(there.key, back.key);
    assert_eq!(there.direction, back.direction.reverse());
    let sender = |direction| there.key.sender(direction).to_string();
    assert_eq!(sender(there.direction), "10.0.0.1:1000");
    assert_eq!(sender(back.direction), "10.0.0.2:53");
}

/// An ICMP message of this type over IPv4, or ICMPv6 over IPv6.
fn icmp(is_ipv4: bool, number: u8) -> Vec<u8> {
    let mut frame = Vec::new();
    let ends = PacketBuilder::ethernet2(MAC, MAC);
    if is_ipv4 {
        let echo = ends.ipv4(A, B, 64).icmpv4_echo_request(7, 1);
        echo.write(&mut frame, &[]).unwrap();
        frame[34] = number;
    } else {
        let echo = ends.ipv6([1; 16], [2; 16], 64).icmpv6_echo_request(7, 1);
        echo.write(&mut frame, &[]).unwrap();
        frame[54] = number;
    }
    frame
}

#[test]
fn protocols_are_tracked_as_asked() {
    let frames = [
        (Protocols::TCP, v4((A, 1), (B, 2))),
        (Protocols::TCP, v6()),
        (Protocols::UDP, udp(&[])),
        (Protocols::ICMP, icmp(true, 8)),
        (Protocols::ICMP, icmp(false, 128)),
    ];
    for wanted in [Protocols::TCP, Protocols::UDP, Protocols::ICMP] {
        for (protocol, frame) in &frames {
            let one = Wanted {
                protocols: wanted,
                ..ANY
            };
            let parsed = parse_any(frame.as_slice(), one);
            match wanted == *protocol {
                true => assert!(parsed.is_ok()),
                false => assert_eq!(parsed.map(|it| it.flags), Err(Skip::NotTracked)),
            }
            assert!(parse_any(frame.as_slice(), ANY).is_ok());
        }
    }
    assert_eq!(
        Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
        ANY.protocols
    );
    assert_eq!(Protocols::UDP.with(Protocols::UDP), Protocols::UDP);
}

#[test]
fn queries_and_answers_have_the_numbers_that_iana_gave_them() {
    for is_ipv4 in [true, false] {
        let (queries, answers): (&[u8], &[u8]) = match is_ipv4 {
            true => (&[8, 13, 15, 17], &[0, 14, 16, 18]),
            false => (&[128], &[129]),
        };
        for number in 0..=255 {
            let parsed = parse_any(icmp(is_ipv4, number).as_slice(), ANY).map(|it| it.flags);
            let expected = if queries.contains(&number) {
                Ok(datagram::QUERY)
            } else if answers.contains(&number) {
                Ok(datagram::ANSWER)
            } else {
                Err(Skip::NotTracked)
            };
            assert_eq!(parsed, expected, "{is_ipv4} {number}");
        }
        // The identifier stands for both ports.
        let number = queries[0];
        let ping = parse_any(icmp(is_ipv4, number).as_slice(), ANY).unwrap();
        for direction in [Direction::FromLow, Direction::FromHigh] {
            assert_eq!(ping.key.sender(direction).port(), 7);
        }
        assert_eq!(ping.key.proto(), if is_ipv4 { 1 } else { 58 });
    }
}

#[test]
fn datagrams_that_are_too_short_contradict_themselves() {
    // The length of the IP packet: with a header of 8 bytes, and with one byte less.
    for frame in [udp(&[]), icmp(true, 8)] {
        assert_eq!(frame[17], 28);
        assert!(parse_any(frame.as_slice(), ANY).is_ok());
        let mut short = frame.clone();
        short[17] = 27;
        assert_eq!(parse_any(short.as_slice(), ANY), Err(Skip::Malformed));
        assert_eq!(
            parse_any(&frame[..frame.len() - 1], ANY),
            Err(Skip::Truncated)
        );
    }
    // UDP's own: 0 is a jumbogram's; else from 8 to what IP has room for.
    for (length, is_right) in [
        (0, true),
        (1, false),
        (7, false),
        (8, true),
        (12, true),
        (13, false),
    ] {
        let mut frame = udp(&[0; 4]);
        frame[38..40].copy_from_slice(&u16::to_be_bytes(length));
        let parsed = parse_any(frame.as_slice(), ANY);
        assert_eq!(parsed.is_ok(), is_right, "{length}");
        if let Ok(segment) = parsed {
            assert_eq!(segment.flags, datagram::UDP);
            assert_eq!(segment.key.proto(), 17);
            assert_eq!(segment.bytes, 32);
        }
    }
}

#[test]
fn numbers_of_a_segment_are_those_of_its_header() {
    for (flags, counted) in [(0x02, 1), (0x12, 1), (0x10, 0), (0x11, 1)] {
        let mut frame = v4((A, 1000), (B, 80));
        frame[38..42].copy_from_slice(&(u32::MAX - 2).to_be_bytes());
        frame[42..46].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
        frame[47] = flags;
        let segment = parse(frame.as_slice()).unwrap();
        assert_eq!((segment.seq, segment.ack), (u32::MAX - 2, 0x1234_5678));
        // Seven bytes of data.
        assert_eq!(segment.end, 4 + counted, "{flags:#x}");
        assert_eq!((segment.window, segment.packets), (1024, 1));
        // The window and stamps only where they are asked for.
        let wanted = Wanted {
            timing: false,
            vlans: true,
            ..ANY
        };
        let window = parse_any(frame.as_slice(), wanted).unwrap().window;
        assert_eq!(window, 0);
    }
    // Beyond 64 KiB nobody says how much data there is.
    let mut frame = v4((A, 1000), (B, 80));
    frame[16..18].copy_from_slice(&[0, 0]);
    let segment = parse(frame.as_slice()).unwrap();
    assert_eq!(segment.end, segment.seq);
    // As much as IP can say.
    frame[16..18].copy_from_slice(&[0xff, 0xff]);
    let segment = parse(frame.as_slice()).unwrap();
    assert_eq!(segment.end - segment.seq, 65_535 - 40);
    assert_eq!(segment.bytes, 65_535);
}

#[test]
fn reasons_have_their_numbers() {
    for reason in [
        Skip::NotIp,
        Skip::NotTracked,
        Skip::Fragment,
        Skip::Truncated,
        Skip::Malformed,
        Skip::BadFlags,
    ] {
        assert_eq!(Skip::from_raw(reason as u64), reason);
    }
}

#[test]
fn what_is_plain_is_read_alike_and_nothing_else_is() {
    let plain = |frame: &[u8]| {
        let mut segment = MaybeUninit::new(Segment::NONE);
        // SAFETY: it is one from the beginning.
        parse_plain(frame, ANY, &mut segment).then(|| unsafe { segment.assume_init() })
    };
    let behind_tags = |frame: &[u8], wanted| {
        let mut segment = MaybeUninit::new(Segment::NONE);
        // SAFETY: as above.
        parse_tagged(frame, wanted, &mut segment).then(|| unsafe { segment.assume_init() })
    };
    let without_vlans = Wanted {
        vlans: false,
        ..ANY
    };
    for frame in [
        v4((A, 1), (B, 2)),
        v6(),
        udp(&[]),
        icmp(true, 8),
        icmp(false, 128),
    ] {
        let parsed = parse_any(frame.as_slice(), ANY).unwrap();
        assert_eq!(plain(&frame), Some(parsed));
        let mut tagged = frame.clone();
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        let in_vlan = Segment {
            key: parsed.key.in_vlans(7),
            ..parsed
        };
        assert_eq!(parse_any(tagged.as_slice(), ANY), Ok(in_vlan));
        assert_eq!(plain(&tagged), None);
        assert_eq!(behind_tags(&tagged, ANY), Some(in_vlan));
        assert_eq!(behind_tags(&tagged, without_vlans), Some(parsed));
        assert_eq!(
            [&frame, &tagged].map(|it| is_tagged(it.as_slice())),
            [false, true]
        );
        tagged.splice(12..12, [0x88, 0xa8, 0, 9]);
        let in_both = Segment {
            key: parsed.key.in_vlans(9 | 7 << 12),
            ..parsed
        };
        assert_eq!(parse_any(tagged.as_slice(), ANY), Ok(in_both));
        assert_eq!(behind_tags(&tagged, ANY), Some(in_both));
        assert!(is_tagged(tagged.as_slice()));
        // A third tag is not looked behind.
        tagged.splice(12..12, [0x88, 0xa8, 0, 9]);
        assert_eq!(behind_tags(&tagged, ANY), None);
    }
    let mut options = v4((A, 1), (B, 2));
    options[14] = 0x46;
    options[17] += 4;
    options.splice(34..34, [1; 4]);
    assert!(parse(options.as_slice()).is_ok());
    assert_eq!(plain(&options), None);
    let extended = with_extensions(&[(60, &[0; 8])]);
    assert!(parse(extended.as_slice()).is_ok());
    assert_eq!(plain(&extended), None);
    assert_eq!(plain(&[0; 14]), None);
    assert_eq!(plain(&v4((A, 1), (B, 2))[..14]), None);
}

#[test]
fn a_chain_of_extensions_has_every_kind() {
    let plain = parse(v6().as_slice()).unwrap();
    for kind in 0..=255 {
        let parsed = parse(with_extensions(&[(kind, &[0; 8])]).as_slice());
        match kind {
            // TCP itself, which begins too early here.
            6 => assert!(parsed.is_err()),
            // Hop-by-hop, routing, fragment, authentication, destination options, mobility, HIP, shim6, experiments.
            0 | 43 | 44 | 51 | 60 | 135 | 139 | 140 | 253 | 254 => {
                assert_eq!(parsed, Ok(longer(plain, 8)), "{kind}")
            }
            _ => assert_eq!(parsed, Err(Skip::NotTracked), "{kind}"),
        }
    }
}
