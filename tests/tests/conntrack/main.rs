//! The same connections under `twheel` and `nf_conntrack`, with the same timeouts, in the same namespace: their
//! states on the way and the times of their ends are compared. Where the two differ on purpose
//! (`docs/states.md`), the difference itself is asserted.
//!
//! Real connections where they can be brought into a state reliably; otherwise segments that are crafted at
//! both ends, of which the kernels' own TCP does not speak.
#![allow(missing_docs)]

mod connections;
mod datagrams;
mod ends;
mod lab;
mod segments;
mod wire;
