//! Options, extension headers, fragments, and truncated packets.

use etherparse::PacketBuilder;
use twheel_common::packet::{Protocols, Skip, Wanted, parse, parse_any};

use crate::{A, B, MAC, longer, v4, v6, with_extensions};

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
    // An authentication header counts in words of four bytes: here 4 + 2 of them.
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
    // A chain that is longer than the declared payload.
    let mut lie = with_extensions(&[(60, eight)]);
    lie[18..20].copy_from_slice(&4u16.to_be_bytes());
    assert_eq!(parse(lie.as_slice()), Err(Skip::Malformed));
    // Everything behind this header is encrypted.
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
        // A home address (RFC 6275, section 6.3) behind a padding option.
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

/// The UDP length is that of the whole datagram, and a first fragment has only a part of it.
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
    // A second fragment header does not undo the first.
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
    assert_eq!(
        broken(17, 39),
        Err(Skip::Malformed),
        "one byte too short for TCP"
    );
    assert!(broken(17, 40).is_ok(), "no payload");
    let mut frame = v6();
    frame[14] = 0x40;
    assert_eq!(
        parse(frame.as_slice()),
        Err(Skip::Malformed),
        "version 4 in IPv6"
    );
}
