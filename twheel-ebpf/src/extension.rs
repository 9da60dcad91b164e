//! Extension headers of IPv6: read by a function that the verifier checks once, rather than once
//! for each combination of headers.

use twheel_common::packet::{self, Bytes, Extension, Skip};

use crate::{
    frame::{At, Frame},
    verifier::masked,
};

/// A frame and its context.
pub struct Long<C: Context>(pub Frame, pub *mut C::Of);

/// A program's context that gives access to a packet.
pub trait Context {
    /// The kernel's type of the context.
    type Of;

    /// Reads the extension header at this position of the packet: [`packed`].
    fn extension(context: *mut Self::Of, header: u8, at: usize) -> u64;
}

/// An extension header as one number: 2^63 and the reason why there is none; or, from the lowest
/// bit, 8 bits of the next header's number, 1 bit of `more`, and where the next header begins.
#[inline(always)]
pub fn packed(frame: &Frame, header: u8, at: usize) -> u64 {
    match packet::extension(frame, header, at) {
        Ok(Extension { next, at, more }) => {
            u64::from(next) | u64::from(more) << 8 | (at as u64) << 9
        }
        Err(reason) => 1 << 63 | reason as u64,
    }
}

impl<C: Context> Bytes for Long<C> {
    type Header<const N: usize> = At;

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<At> {
        self.0.header::<N>(offset)
    }

    #[inline(always)]
    fn whole(&self) -> usize {
        self.0.whole()
    }

    #[inline(always)]
    fn extension(&self, header: u8, at: usize) -> Result<Extension, Skip> {
        let packed = C::extension(self.1, header, at);
        if packed >> 63 != 0 {
            return Err(Skip::from_raw(masked::<7>(packed)));
        }
        Ok(Extension {
            next: packed as u8,
            at: (packed >> 9) as usize,
            more: packed & 1 << 8 != 0,
        })
    }
}
