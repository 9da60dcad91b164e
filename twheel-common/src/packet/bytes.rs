//! How the bytes of a frame are read, and why a frame may belong to no flow.

/// The bytes of a frame.
pub trait Bytes {
    /// A header of this frame.
    type Header<const N: usize>: Header;

    /// The `N` bytes at `offset`; `None` if the frame, or the part of it that can be read, ends
    /// before them.
    fn header<const N: usize>(&self, offset: usize) -> Option<Self::Header<N>>;

    /// The length of the whole frame, even if only part of it can be read.
    fn whole(&self) -> usize;

    /// [`extension`] of this frame. The data plane has this in a global function, which the
    /// verifier checks once.
    #[inline(always)]
    fn extension(&self, header: u8, at: usize) -> Result<Extension, Skip> {
        extension(self, header, at)
    }
}

/// What an extension header of IPv6 says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// IANA number of the next header.
    pub next: u8,
    /// Offset of the next header.
    pub at: usize,
    /// Whether this is a first fragment: more of the datagram follows.
    pub more: bool,
}

/// Bytes that are known to exist. Numbers are returned as they are in memory: those of a packet are
/// in network order. Reading beyond the end is a defect: a slice panics, and the verifier rejects
/// the program.
pub trait Header {
    /// One byte.
    fn u8(&self, at: usize) -> u8;
    /// Two bytes.
    fn u16(&self, at: usize) -> u16;
    /// Four bytes.
    fn u32(&self, at: usize) -> u32;
    /// Eight bytes.
    fn u64(&self, at: usize) -> u64;
}

impl Bytes for [u8] {
    type Header<const N: usize> = [u8; N];

    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk().copied()
    }

    fn whole(&self) -> usize {
        self.len()
    }
}

impl<const N: usize> Header for [u8; N] {
    fn u8(&self, at: usize) -> u8 {
        self[at]
    }
    fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(*self[at..].first_chunk().expect("inside the header"))
    }
}

/// Why a frame is not a packet of a tracked flow. Such frames pass, and are counted by reason.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// Neither IPv4 nor IPv6 after at most two VLAN tags.
    NotIp = 0,
    /// IP, but not of a tracked protocol.
    NotTracked,
    /// A fragment other than the first: it has no ports.
    Fragment,
    /// The frame, or the part of it that can be read, ends within the header of its protocol.
    Truncated,
    /// A header contradicts itself: a wrong version, lengths that contradict each other, too many
    /// extension headers.
    Malformed,
    /// A combination of flags that no stack sends.
    BadFlags,
}

impl Skip {
    /// The reason of a number.
    #[inline(always)]
    pub const fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::NotIp,
            1 => Self::NotTracked,
            2 => Self::Fragment,
            3 => Self::Truncated,
            5 => Self::BadFlags,
            _ => Self::Malformed,
        }
    }
}

#[inline(always)]
pub(super) fn be16<B: Bytes + ?Sized>(frame: &B, offset: usize) -> Result<u16, Skip> {
    let field = frame.header::<2>(offset).ok_or(Skip::Truncated)?;
    Ok(u16::from_be(field.u16(0)))
}

/// Reads an extension header with this number: hop-by-hop, routing, fragment, authentication,
/// destination options, mobility, HIP, shim6, or one of the two for experiments (RFC 3692).
#[inline(always)]
pub fn extension<B: Bytes + ?Sized>(frame: &B, header: u8, at: usize) -> Result<Extension, Skip> {
    if !matches!(header, 0 | 43 | 44 | 51 | 60 | 135 | 139 | 140 | 253 | 254) {
        return Err(Skip::NotTracked);
    }
    let bytes = frame.header::<4>(at).ok_or(Skip::Truncated)?;
    let words = usize::from(bytes.u8(1));
    let mut more = false;
    let length = match header {
        44 => {
            let fragment = u16::from_be(bytes.u16(2));
            if fragment & 0xfff8 != 0 {
                return Err(Skip::Fragment);
            }
            more = fragment & 1 != 0;
            8
        }
        // RFC 4302, section 2.2: the length in words of four bytes, minus 2.
        51 => (words + 2) * 4,
        _ => (words + 1) * 8,
    };
    Ok(Extension {
        next: bytes.u8(0),
        at: at + length,
        more,
    })
}
