//! The parser against packets made by another library.
#![allow(missing_docs)]

use etherparse::{PacketBuilder, VlanId};
use twheel_common::{
    flow::Direction,
    packet::{Protocols, Segment, Skip, Wanted, parse, parse_any, tcp},
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
    assert_eq!(parse(single.as_slice()).unwrap().key, key);
    let mut double = Vec::new();
    PacketBuilder::ethernet2(MAC, MAC)
        .double_vlan(VlanId::try_new(7).unwrap(), VlanId::try_new(8).unwrap())
        .ipv4(A, B, 64)
        .tcp(1000, 80, 1, 1024)
        .syn()
        .write(&mut double, b"")
        .unwrap();
    assert_eq!(parse(double.as_slice()).unwrap().key, key);
    let mut triple = double.clone();
    triple.splice(12..12, [0x81, 0, 0, 9]);
    assert_eq!(parse(triple.as_slice()), Err(Skip::NotIp));
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
