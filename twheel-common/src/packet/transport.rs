//! Parses a TCP segment (RFC 9293), a UDP datagram or an ICMP query.

use core::mem::MaybeUninit;

use crate::{
    key::{Direction, FlowKey},
    segment::{Segment, datagram, tcp},
};

use super::{
    bytes::{Bytes, Header, Skip},
    ip::{Datagram, Ends, PROTO_ICMP, PROTO_ICMP6, PROTO_TCP, PROTO_UDP},
    wanted::Wanted,
};

const TCP_HEADER: usize = 20;

#[inline(always)]
pub(super) fn transport<B: Bytes + ?Sized>(
    frame: &B,
    datagram: &Datagram<impl Ends>,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    match datagram.proto {
        PROTO_TCP => tcp_segment(frame, datagram, wanted, segment),
        PROTO_UDP => udp_datagram(frame, datagram, segment),
        _ => icmp_query(frame, datagram, segment),
    }
}

/// Parses a UDP datagram (RFC 768).
#[inline(always)]
fn udp_datagram<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let (room, more) = (ip.room, ip.more);
    let header = frame.header::<8>(ip.at).ok_or(Skip::Truncated)?;
    // A length of 0 means a jumbogram (RFC 2675), or that segmentation has yet to fill it in. The
    // length is that of the whole datagram, of which a first fragment has only a part.
    let length = usize::from(u16::from_be(header.u16(4)));
    if room < 8 || length != 0 && (length < 8 || length > room && !more) {
        return Err(Skip::Malformed);
    }
    let key = FlowKey::new(
        ip.ends.source(),
        header.u16(0),
        ip.ends.destination(),
        header.u16(2),
        PROTO_UDP,
    );
    segment.write(without_numbers(key, datagram::UDP, ip));
    Ok(())
}

/// Parses an ICMP query or its answer (RFC 792, RFC 4443). Its identifier stands for both ports.
/// Errors are about other flows, so they are not tracked.
#[inline(always)]
fn icmp_query<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let header = frame.header::<8>(ip.at).ok_or(Skip::Truncated)?;
    if ip.room < 8 {
        return Err(Skip::Malformed);
    }
    let flags = match (ip.proto, header.u8(0)) {
        // Echo, timestamp, information, address mask.
        (PROTO_ICMP, 8 | 13 | 15 | 17) | (PROTO_ICMP6, 128) => datagram::QUERY,
        (PROTO_ICMP, 0 | 14 | 16 | 18) | (PROTO_ICMP6, 129) => datagram::ANSWER,
        _ => return Err(Skip::NotTracked),
    };
    let id = header.u16(4);
    let key = FlowKey::new(ip.ends.source(), id, ip.ends.destination(), id, ip.proto);
    segment.write(without_numbers(key, flags, ip));
    Ok(())
}

#[inline(always)]
fn without_numbers<A>(
    (key, direction): (FlowKey, Direction),
    flags: u8,
    ip: &Datagram<A>,
) -> Segment {
    Segment {
        key: key.in_vlans(ip.vlans),
        direction,
        flags,
        bytes: ip.bytes,
        packets: 1,
        ..Segment::NONE
    }
}

/// Parses a TCP segment. `room` is the number of bytes from the TCP header to the end of the
/// datagram, as the IP header says.
#[inline(always)]
fn tcp_segment<B: Bytes + ?Sized>(
    frame: &B,
    ip: &Datagram<impl Ends>,
    wanted: Wanted,
    segment: &mut MaybeUninit<Segment>,
) -> Result<(), Skip> {
    let (offset, room) = (ip.at, ip.room);
    let header = frame.header::<TCP_HEADER>(offset).ok_or(Skip::Truncated)?;
    let header_len = usize::from(header.u8(12) >> 4) * 4;
    if header_len < TCP_HEADER || header_len > room {
        return Err(Skip::Malformed);
    }
    let flags = header.u8(13) & !datagram::ANY;
    if !tcp::valid(flags) {
        return Err(Skip::BadFlags);
    }
    let (key, direction) = FlowKey::new(
        ip.ends.source(),
        header.u16(0),
        ip.ends.destination(),
        header.u16(2),
        PROTO_TCP,
    );
    let place = segment.as_mut_ptr();
    // SAFETY: the pointer is to the segment. Written early, so that these values need no other
    // storage meanwhile.
    unsafe {
        (&raw mut (*place).key).write(key.in_vlans(ip.vlans));
        (&raw mut (*place).direction).write(direction);
    }
    let seq = u32::from_be(header.u32(4));
    let (mut stamp, mut window) = ([0; 2], 0);
    if wanted.timing {
        window = u16::from_be(header.u16(14)).into();
        // Only as stacks send it and look for it first: padded by two NOPs, and before all other
        // options.
        if header_len >= TCP_HEADER + 12
            && let Some(option) = frame.header::<12>(offset + TCP_HEADER)
            && u32::from_be(option.u32(0)) == 0x0101_080a
        {
            stamp = [u32::from_be(option.u32(4)), u32::from_be(option.u32(8))];
        }
    }
    // By the length in the IP header, not that of the frame, which may be padded or cut. Above 64
    // KiB the length is unknown.
    let data = if room <= 0xffff {
        (room - header_len) as u32
    } else {
        0
    };
    let counted = u32::from(flags & tcp::SYN != 0) + u32::from(flags & tcp::FIN != 0);
    // SAFETY: as above; after this every field is written.
    unsafe {
        (&raw mut (*place).seq).write(seq);
        (&raw mut (*place).ack).write(u32::from_be(header.u32(8)));
        (&raw mut (*place).end).write(seq.wrapping_add(data).wrapping_add(counted));
        (&raw mut (*place).bytes).write(ip.bytes);
        (&raw mut (*place).stamp).write(stamp);
        (&raw mut (*place).window).write(window);
        (&raw mut (*place).flags).write(flags);
        (&raw mut (*place).packets).write(1);
    }
    Ok(())
}
