//! Flags, timestamps, datagrams, and the fields that are read from a segment.

use std::mem::MaybeUninit;

use etherparse::PacketBuilder;
use twheel_common::{
    flow::Direction,
    packet::{
        Protocols, Segment, Skip, Wanted, datagram, is_tagged, parse, parse_any, parse_plain,
        parse_tagged,
    },
};

use crate::{A, ANY, B, MAC, icmp, longer, udp, v4, v6, with_extensions};

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
        // Without the flags of ECN.
        assert_eq!(with(flags), Ok(flags & 0x3f), "{flags:#x}");
    }
    for flags in [0x00, 0x03, 0x06, 0x01, 0x3f, 0x29, 0x08, 0x07] {
        assert_eq!(with(flags), Err(Skip::BadFlags), "{flags:#x}");
    }
    // The combinations of `tcp_valid_flags` in `net/netfilter/nf_conntrack_proto_tcp.c`, with or
    // without PSH, ECE and CWR.
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
    // The packet has yet to be segmented, and its length does not fit into 16 bits.
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
    // A segment that is truncated there is still valid.
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
        // The identifier takes the place of both ports.
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
    // The UDP length: 0 in a jumbogram, otherwise from 8 to what fits into the IP packet.
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
        // Window and timestamps are read only if they are wanted.
        let wanted = Wanted {
            timing: false,
            vlans: true,
            ..ANY
        };
        let window = parse_any(frame.as_slice(), wanted).unwrap().window;
        assert_eq!(window, 0);
    }
    // Beyond 64 KiB, no header tells how much data there is.
    let mut frame = v4((A, 1000), (B, 80));
    frame[16..18].copy_from_slice(&[0, 0]);
    let segment = parse(frame.as_slice()).unwrap();
    assert_eq!(segment.end, segment.seq);
    // The most that the IP length can express.
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
        // SAFETY: it was initialised at the start.
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
        // The parser does not look behind a third tag.
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
            // Hop-by-hop, routing, fragment, authentication, destination options, mobility, HIP,
            // shim6, experiments.
            0 | 43 | 44 | 51 | 60 | 135 | 139 | 140 | 253 | 254 => {
                assert_eq!(parsed, Ok(longer(plain, 8)), "{kind}")
            }
            _ => assert_eq!(parsed, Err(Skip::NotTracked), "{kind}"),
        }
    }
}
