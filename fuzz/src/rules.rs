//! By which rules twheel says something else than etherparse.

/// Why twheel does not say what etherparse says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Two tags are looked behind, not three.
    MoreTags,
    /// 0x9100, the tag of switches before 802.1ad, is none.
    OldTag,
    /// MACsec is not looked behind.
    Macsec,
    /// The EtherType says which version of IP it is, and the header must agree.
    Version,
    /// A header of which there is but a part is truncated, whatever is in that part.
    PartOfHeader,
    /// The rest of a header of IP, of an extension or of TCP's options that was cut off is not needed.
    Cut,
    /// The total length is less than that of the headers: its own, and an authentication header's.
    TotalLength,
    /// The payload's length is less than that of its extension headers.
    PayloadLength,
    /// No length: segmentation is still to come, or it is a jumbogram.
    NoLength,
    /// A later fragment is one as soon as that is said, whatever is behind.
    LaterFragment,
    /// The first fragment has the ports.
    FirstFragment,
    /// IPv6's fragment header ends the word of the offset with two reserved bits and the flag (RFC 8200, section 4.5);
    /// etherparse 0.18 has the flag and the reserved bits first in its second byte.
    FragmentBits,
    /// Hop-by-hop options are walked over wherever they stand.
    HopByHop,
    /// Mobility, HIP, shim6 and the two for experiments are walked over.
    OtherExtension,
    /// An authentication header of 8 bytes is walked over as the kernel does.
    ShortAuthentication,
    /// Nine extension headers are too many.
    TooManyExtensions,
    /// ICMPv6 in IPv4 is not tracked, nor is ICMP in IPv6.
    OtherIcmp,
    /// Of ICMP, queries and answers are tracked.
    NoQuery,
    /// The length of an ICMP timestamp is not checked.
    TimestampLength,
    /// A UDP length that does not fit.
    UdpLength,
    /// TCP flags that no stack sends together.
    BadFlags,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::MoreTags,
        Self::OldTag,
        Self::Macsec,
        Self::Version,
        Self::PartOfHeader,
        Self::Cut,
        Self::TotalLength,
        Self::PayloadLength,
        Self::NoLength,
        Self::LaterFragment,
        Self::FirstFragment,
        Self::FragmentBits,
        Self::HopByHop,
        Self::OtherExtension,
        Self::ShortAuthentication,
        Self::TooManyExtensions,
        Self::OtherIcmp,
        Self::NoQuery,
        Self::TimestampLength,
        Self::UdpLength,
        Self::BadFlags,
    ];
}

/// The rules that a frame has met: bits.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Rules(u32);

impl Rules {
    pub(crate) fn add(&mut self, rule: Rule) {
        self.0 |= 1 << rule as u32;
    }

    /// None: the two agree outright.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Rule> {
        Rule::ALL
            .into_iter()
            .filter(move |rule| self.0 >> *rule as u32 & 1 == 1)
    }
}
