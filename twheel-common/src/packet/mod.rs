//! Parses the bytes of a frame into a segment of a flow.
//!
//! The parser is generic over how bytes are read, so that it can parse XDP frames, socket buffers
//! and plain slices.

mod bytes;
mod ethernet;
mod ip;
mod transport;
mod wanted;

use core::mem::MaybeUninit;

pub use self::{
    bytes::{Bytes, Extension, Header, Skip, extension},
    ethernet::{ETH_HEADER, Network, Outside, find_network, has_ethernet, with_tag},
    ip::{MAX_EXTENSION_HEADERS, PROTO_ICMP, PROTO_ICMP6, PROTO_TCP, PROTO_UDP},
    wanted::{Protocols, Wanted},
};
pub use crate::segment::{Segment, datagram, tcp};

use self::{
    bytes::be16,
    ethernet::{Behind, behind_tags, is_vlan},
    ip::{ipv4, ipv6, is_plain_ipv4},
    transport::transport,
};

/// Parses an Ethernet frame that contains a TCP segment.
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(frame: &B) -> Result<Segment, Skip> {
    let wanted = Wanted {
        protocols: Protocols::TCP,
        timing: true,
        vlans: true,
    };
    parse_any(frame, wanted)
}

/// Parses an Ethernet frame that contains a packet of a `wanted` protocol.
#[inline(always)]
pub fn parse_any<B: Bytes + ?Sized>(frame: &B, wanted: Wanted) -> Result<Segment, Skip> {
    let mut segment = MaybeUninit::uninit();
    parse_into(frame, wanted, Outside::default(), &mut segment)?;
    // SAFETY: `parse_into` has written the whole segment if it returns `Ok`.
    Ok(unsafe { segment.assume_init() })
}

/// The same for any frame. The segment is written to where the caller needs it: the BPF target
/// would copy a return value through the stack.
#[inline(always)]
pub fn parse_into<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    outside: Outside,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    parse_network(frame, wanted, find_network(frame, outside)?, segment)
}

/// Parses the IP packet that was found in a frame.
#[inline(always)]
pub fn parse_network<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    network: Network,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let vlans = match wanted.vlans {
        true => network.vlans,
        false => 0,
    };
    match network.version {
        4 => {
            let datagram = ipv4::<true, _>(frame, network.at, wanted)?;
            transport(frame, &datagram.in_vlans(vlans), wanted, segment)
        }
        6 => {
            let datagram = ipv6::<MAX_EXTENSION_HEADERS, _>(frame, network.at, wanted)?;
            transport(frame, &datagram.in_vlans(vlans), wanted, segment)
        }
        _ => Err(Skip::NotIp),
    }
}

/// Parses what nearly every frame is: an Ethernet header without tags, and an IP header without
/// options or extension headers. Returns whether the frame was that; then the segment is written.
/// Otherwise call [`parse_into`].
#[inline(always)]
pub fn parse_plain<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> bool {
    plain(frame, wanted, segment).is_ok()
}

#[inline(always)]
fn plain<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let behind = Behind {
        at: ETH_HEADER,
        ether_type: be16(frame, ETH_HEADER - 2)?,
        vlans: 0,
    };
    plain_at(frame, behind, wanted, segment)
}

/// Whether a frame has a VLAN tag.
#[inline(always)]
pub fn is_tagged<B: Bytes + ?Sized>(frame: &B) -> bool {
    be16(frame, ETH_HEADER - 2).is_ok_and(is_vlan)
}

/// Like [`parse_plain`], for a frame with one or two VLAN tags.
#[inline(always)]
pub fn parse_tagged<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> bool {
    tagged(frame, wanted, segment).is_ok()
}

#[inline(always)]
fn tagged<B: Bytes + ?Sized>(
    frame: &B,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let mut behind = behind_tags(frame, 0)?;
    behind.vlans = if wanted.vlans { behind.vlans } else { 0 };
    plain_at(frame, behind, wanted, segment)
}

#[inline(always)]
fn plain_at<B: Bytes + ?Sized>(
    frame: &B,
    Behind {
        at,
        ether_type,
        vlans,
    }: Behind,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    match ether_type {
        0x0800 if is_plain_ipv4(frame, at) => {
            let datagram = ipv4::<false, _>(frame, at, wanted)?.in_vlans(vlans);
            transport(frame, &datagram, wanted, segment)
        }
        0x86dd => {
            let datagram = ipv6::<0, _>(frame, at, wanted)?.in_vlans(vlans);
            transport(frame, &datagram, wanted, segment)
        }
        _ => Err(Skip::NotIp),
    }
}
