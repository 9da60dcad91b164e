//! Where the packet of IP begins in a frame: behind an Ethernet header and up to two VLAN tags (802.1Q, 802.1ad), or
//! neither.

use crate::key::VLAN_BITS;

use super::{
    bytes::{Bytes, Header, Skip, be16},
    ip::IPV6_HEADER,
};

/// Bytes of an Ethernet header without tags.
pub const ETH_HEADER: usize = 14;
const VLAN_TAG: usize = 4;

/// What is known of a frame beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// It has no Ethernet header, and begins with that of IP.
    pub is_ip: bool,
    /// The tag control information (IEEE 802.1Q) of a tag that was taken out of it; 0: of none.
    pub tag: u16,
}
/// Where the packet of IP begins in a frame, and in which VLANs it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Where its header begins.
    pub at: usize,
    /// The version of IP.
    pub version: u8,
    /// As [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans) takes them.
    pub vlans: u32,
}

impl Network {
    /// As one number: from the lowest bit 24 of the VLANs, 8 of the version, 16 of the place.
    #[inline(always)]
    pub fn packed(self) -> u64 {
        u64::from(self.vlans) | u64::from(self.version) << 24 | (self.at as u64) << 32
    }

    /// From [`packed`](Self::packed).
    #[inline(always)]
    pub fn from_packed(packed: u64) -> Self {
        Self {
            at: (packed >> 32) as usize & 0xffff,
            version: (packed >> 24) as u8,
            vlans: packed as u32 & 0xff_ffff,
        }
    }
}

/// Whether a decrypted packet begins with the Ethernet header of the encrypted one, and not with its IP header: the kernel leaves it,
/// with the type of what is behind (`xfrm_remove_tunnel_encap`, `net/xfrm/xfrm_input.c`). The addresses of a packet may read like
/// such a type; then the frame is as long as its first bytes say if they are an IP header.
#[inline(always)]
pub fn has_ethernet<B: Bytes + ?Sized>(frame: &B) -> bool {
    let Some(bytes) = frame.header::<3>(ETH_HEADER - 2) else {
        return false;
    };
    let reads_so = matches!(
        (u16::from_be(bytes.u16(0)), bytes.u8(2) >> 4),
        (0x0800, 4) | (0x86dd, 6)
    );
    reads_so && !is_ip_of_its_length(frame)
}

/// Whether a frame is a packet of IP from its first byte to its last.
#[inline(always)]
fn is_ip_of_its_length<B: Bytes + ?Sized>(frame: &B) -> bool {
    let Some(bytes) = frame.header::<6>(0) else {
        return false;
    };
    let length = match bytes.u8(0) >> 4 {
        4 => usize::from(u16::from_be(bytes.u16(2))),
        6 => usize::from(u16::from_be(bytes.u16(4))) + IPV6_HEADER,
        _ => return false,
    };
    length == frame.whole()
}

/// Finds the packet of IP in a frame.
#[inline(always)]
pub fn find_network<B: Bytes + ?Sized>(frame: &B, outside: Outside) -> Result<Network, Skip> {
    if outside.is_ip {
        // Two bytes: the verifier does not follow what the compiler makes of the bound of one.
        let first = frame.header::<2>(0).ok_or(Skip::Truncated)?.u8(0);
        return Ok(Network {
            at: 0,
            version: first >> 4,
            vlans: 0,
        });
    }
    let Behind {
        at,
        ether_type,
        vlans,
    } = behind_tags(frame, outside.tag)?;
    let version = match ether_type {
        0x0800 => 4,
        0x86dd => 6,
        _ => return Err(Skip::NotIp),
    };
    Ok(Network { at, version, vlans })
}

/// What is behind an Ethernet header and its tags.
pub(super) struct Behind {
    /// Where it begins.
    pub at: usize,
    /// Its type.
    pub ether_type: u16,
    /// As [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans) takes them.
    pub vlans: u32,
}

/// Finds what is behind an Ethernet header and up to two tags, and the VLANs: first that of a tag `outside` of these.
#[inline(always)]
pub(super) fn behind_tags<B: Bytes + ?Sized>(frame: &B, outside: u16) -> Result<Behind, Skip> {
    let mut at = ETH_HEADER;
    let mut ether_type = be16(frame, at - 2)?;
    let mut vlans = with_tag(0, outside);
    // Unrolled by hand: at most two tags.
    if is_vlan(ether_type) {
        vlans = with_tag(vlans, be16(frame, at)?);
        at += VLAN_TAG;
        ether_type = be16(frame, at - 2)?;
        if is_vlan(ether_type) {
            vlans = with_tag(vlans, be16(frame, at)?);
            at += VLAN_TAG;
            ether_type = be16(frame, at - 2)?;
        }
    }
    Ok(Behind {
        at,
        ether_type,
        vlans,
    })
}

/// Adds a tag (its control information, IEEE 802.1Q) that stands inside of those that there are, as
/// [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans) takes them. One that names no VLAN counts as none (IEEE 802.1Q,
/// section 9.6: a priority alone), and so does a third.
#[inline(always)]
pub fn with_tag(vlans: u32, tag: u16) -> u32 {
    let vlan = u32::from(tag & 0xfff);
    match vlans {
        0 => vlan,
        outer if outer >> VLAN_BITS == 0 => outer | vlan << VLAN_BITS,
        both => both,
    }
}

#[inline(always)]
pub(super) fn is_vlan(ether_type: u16) -> bool {
    matches!(ether_type, 0x8100 | 0x88a8)
}
