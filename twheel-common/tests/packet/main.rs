//! The parser against packets made by another library.
#![allow(missing_docs)]

mod ethernet;
mod ip;
mod transport;

use etherparse::PacketBuilder;
use twheel_common::packet::{Protocols, Segment, Wanted};

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

/// The same segment in a packet that is longer by this many bytes.
fn longer(segment: Segment, by: usize) -> Segment {
    Segment {
        bytes: segment.bytes + by as u32,
        ..segment
    }
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
