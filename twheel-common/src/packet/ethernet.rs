//! Finds the IP packet in a frame: after an Ethernet header with up to two VLAN tags (802.1Q,
//! 802.1ad), or at the start of the frame.

use crate::key::VLAN_BITS;

use super::{
    bytes::{Bytes, Header, Skip, be16},
    ip::IPV6_HEADER,
};

/// Bytes of an Ethernet header without tags.
pub const ETH_HEADER: usize = 14;
const VLAN_TAG: usize = 4;

/// What is known of a frame besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// The frame has no Ethernet header and begins with the IP header.
    pub is_ip: bool,
    /// Tag control information (IEEE 802.1Q) of a tag that was removed from the frame; 0 if there
    /// was none.
    pub tag: u16,
}
/// Where the IP packet begins in a frame, and the VLANs that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Offset of the IP header.
    pub at: usize,
    /// The IP version.
    pub version: u8,
    /// As for [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans).
    pub vlans: u32,
}

impl Network {
    /// As one number: from the lowest bit 24 of the VLANs, 8 of the version, 16 of the offset.
    #[inline(always)]
    pub fn packed(self) -> u64 {
        u64::from(self.vlans) | u64::from(self.version) << 24 | (self.at as u64) << 32
    }

    /// The inverse of [`packed`](Self::packed).
    #[inline(always)]
    pub fn from_packed(packed: u64) -> Self {
        Self {
            at: (packed >> 32) as usize & 0xffff,
            version: (packed >> 24) as u8,
            vlans: packed as u32 & 0xff_ffff,
        }
    }
}

/// Whether a decrypted packet begins with the Ethernet header of the encrypted packet instead of
/// its own IP header: the kernel keeps that header and sets its type to that of the decrypted
/// packet (`xfrm_remove_tunnel_encap`, `net/xfrm/xfrm_input.c`). The addresses of an IP packet may
/// look like such a type by chance. Then the first bytes, read as an IP header, give exactly the
/// frame's length.
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

/// Whether a frame is an IP packet from its first byte to its last.
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

/// Finds the IP packet in a frame.
#[inline(always)]
pub fn find_network<B: Bytes + ?Sized>(frame: &B, outside: Outside) -> Result<Network, Skip> {
    if outside.is_ip {
        // Two bytes: the verifier does not understand the bounds check that the compiler emits for
        // one.
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

/// What follows an Ethernet header and its tags.
pub(super) struct Behind {
    /// Its offset.
    pub at: usize,
    /// Its EtherType.
    pub ether_type: u16,
    /// As for [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans).
    pub vlans: u32,
}

/// Finds what follows an Ethernet header and up to two tags, and the VLANs; the VLAN of the tag
/// `outside` the frame comes first.
#[inline(always)]
pub(super) fn behind_tags<B: Bytes + ?Sized>(frame: &B, outside: u16) -> Result<Behind, Skip> {
    let mut at = ETH_HEADER;
    let mut ether_type = be16(frame, at - 2)?;
    let mut vlans = with_tag(0, outside);
    // Unrolled by hand, for at most two tags.
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

/// Adds a tag (its control information, IEEE 802.1Q) inside the tags that `vlans` already has; the
/// format is that of [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans). A tag that names no VLAN
/// (IEEE 802.1Q, section 9.6: only a priority) is left out, and so is a third one.
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
