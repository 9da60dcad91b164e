//! The same connections under `twheel` and `nf_conntrack`, with the same timeouts, in the same
//! namespace. The test compares their states on the way and the times of their ends. Where the two
//! differ on purpose (`docs/states.md`), it asserts the difference itself.
//!
//! Uses real connections where they can be brought into a state reliably. The other segments are
//! crafted at both ends, and the kernels' own TCP does not answer them.
#![allow(missing_docs)]

mod connections;
mod datagrams;
mod ends;
mod lab;
mod segments;
mod wire;
