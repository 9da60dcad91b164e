//! Keys, tags, and packets without an Ethernet header.

use std::mem::MaybeUninit;

use etherparse::{PacketBuilder, VlanId};
use twheel_common::{
    flow::Direction,
    packet::{
        Network, Outside, Segment, Skip, Wanted, has_ethernet, parse, parse_any, parse_into, tcp,
    },
};

use crate::{A, ANY, B, MAC, icmp, longer, udp, v4, v6};

#[test]
fn where_the_ip_packet_begins_fits_into_a_number() {
    for (at, version, vlans) in [(0, 4, 0), (14, 6, 0), (22, 4, 0x00ab_cdef), (0xffff, 6, 7)] {
        let network = Network { at, version, vlans };
        assert_eq!(Network::from_packed(network.packed()), network);
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
    // Both ends have the same address: the ports tell the directions apart.
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
    // SAFETY: it was initialised at the start.
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
    // Priority and drop eligibility are not part of the identifier.
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
        "a third tag must not count"
    );
    let mut priority = inner;
    priority[14..16].copy_from_slice(&[0xe0, 0]);
    assert_eq!(with(&priority, 0), key);
}

#[test]
fn a_decrypted_packet_may_have_the_ethernet_header_of_the_encrypted_one() {
    for frame in [v4((A, 1), (B, 2)), v6()] {
        assert!(has_ethernet(frame.as_slice()));
        assert!(
            !has_ethernet(&frame[14..]),
            "a frame that begins with the IP header"
        );
        assert!(
            !has_ethernet(&frame[..14]),
            "a frame that ends behind the Ethernet header"
        );
    }
    // The EtherType and the version must match.
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
            "frames with a longer packet"
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
            "a frame that begins with MAC addresses"
        );
    }
    // An address that reads like an EtherType.
    let frame = v4(([8, 0, 69, 0], 1), ([1, 2, 3, 4], 2));
    let parsed = parse_any(frame.as_slice(), ANY);
    assert_eq!(parse_outside(&frame[14..], outside), parsed);
    assert_eq!(parse_outside(&[], outside), Err(Skip::Truncated));
}

#[test]
fn an_authentication_header_is_read_over() {
    let plain = v4((A, 1000), (B, 80));
    let segment = parse(plain.as_slice()).unwrap();
    // RFC 4302, section 2: next header, length in words minus 2, reserved, SPI, number, 12 bytes of
    // ICV.
    let mut header = vec![6, 4, 0, 0];
    header.extend([0; 20]);
    let mut frame = plain.clone();
    frame[23] = 51;
    frame[17] += 24;
    frame.splice(34..34, header);
    assert_eq!(parse(frame.as_slice()), Ok(longer(segment, 24)));
    // A header that reaches beyond the packet, and a frame that ends within it.
    let mut long = frame.clone();
    long[35] = 0xff;
    assert_eq!(parse(long.as_slice()), Err(Skip::Malformed));
    assert_eq!(parse(&frame[..36]), Err(Skip::Truncated));
    let mut short = frame.clone();
    short[17] = plain[17];
    assert_eq!(parse(short.as_slice()), Err(Skip::Malformed));
    // The next header is a protocol that is not tracked, or another authentication header.
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
    // The kernel's count, or, if there is none, a count by size.
    for (told, packets) in [
        ((0, 0), 0),
        ((3, 1_448), 3),
        ((0, 1_448), 4),
        ((0, 1_454), 3),
        ((0, 5_000), 1),
    ] {
        assert_eq!(segment.joined(told.0, told.1), packets, "{told:?}");
    }
    // A SYN or FIN has a number, and is no data.
    for flag in [tcp::SYN, tcp::FIN] {
        let counted = Segment {
            flags: tcp::ACK | flag,
            end: segment.end + 1,
            ..segment
        };
        assert_eq!(counted.joined(0, data / 4), 4, "{flag}");
    }
    segment.count_joined(3);
    assert_eq!((segment.packets, segment.bytes), (3, data + 3 * 40));
    let mut datagram = parse_any(udp(&[]).as_slice(), ANY).unwrap();
    let bytes = datagram.bytes;
    datagram.count_joined(3);
    assert_eq!((datagram.packets, datagram.bytes), (3, bytes));
}
