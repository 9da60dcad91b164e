//! The rules by which twheel answers differently from etherparse.

/// A reason why twheel answers differently from etherparse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// twheel skips two tags, not three.
    MoreTags,
    /// 0x9100, the tag of switches before 802.1ad, is no tag to twheel.
    OldTag,
    /// twheel does not look behind MACsec.
    Macsec,
    /// The EtherType says which version of IP follows, and the header must agree.
    Version,
    /// An incomplete header is truncated, whatever its bytes are.
    PartOfHeader,
    /// If a header is truncated, its rest is not needed: this holds for IP, extension headers and
    /// TCP options.
    Cut,
    /// The total length is less than that of the IP header and its authentication header.
    TotalLength,
    /// The payload length is less than that of the extension headers.
    PayloadLength,
    /// There is no length: the packet has yet to be segmented, or is a jumbogram.
    NoLength,
    /// A later fragment is recognised by its offset alone, whatever follows.
    LaterFragment,
    /// The first fragment has the ports, so it is parsed.
    FirstFragment,
    /// IPv6's fragment header ends the word of the offset with two reserved bits and the flag (RFC
    /// 8200, section 4.5); etherparse 0.18 expects the flag and the reserved bits first in the
    /// second byte.
    FragmentBits,
    /// Hop-by-hop options are skipped wherever they are.
    HopByHop,
    /// Mobility, HIP, shim6 and the two experimental headers are skipped.
    OtherExtension,
    /// An authentication header of 8 bytes is skipped, as the kernel skips it.
    ShortAuthentication,
    /// Nine extension headers are too many.
    TooManyExtensions,
    /// ICMPv6 in IPv4 is not tracked, nor is ICMP in IPv6.
    OtherIcmp,
    /// The only ICMP messages that are tracked are queries and answers.
    NoQuery,
    /// The length of an ICMP timestamp is not checked.
    TimestampLength,
    /// The UDP length does not fit.
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

/// The rules that were applied to a frame, as bits.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Rules(u32);

impl Rules {
    pub(crate) fn add(&mut self, rule: Rule) {
        self.0 |= 1 << rule as u32;
    }

    /// Whether no rule was applied: the two parsers agree without any.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over them.
    pub fn iter(self) -> impl Iterator<Item = Rule> {
        Rule::ALL
            .into_iter()
            .filter(move |rule| self.0 >> *rule as u32 & 1 == 1)
    }
}
