//! Where things are pinned: one directory an instance, below one for the layout's version. It is named after what `--iface` gave
//! first, be that an interface or a pattern.
//!
//! ```text
//! /sys/fs/bpf/twheel/vN/4026531840-eth0/    network namespace (inode) and first interface
//!     FLOWS WHEEL SLOTS EVENTS …            the maps
//!     twheel_xdp twheel_egress …            the programs
//!     xdp@eth0 ingress@eth0 egress@eth0     the links
//!     clsact-2@eth0 qdisc-2@eth0 …          a filter instead of a link: see `clsact/`
//!     next_xdp next_ingress next_egress     the programs again, for those of other network namespaces: see `stub.rs`
//!     netns-0-4026532177-blue/              of that network namespace: its programs and links
//! ```
//!
//! | question | file |
//! |---|---|
//! | what directories and pins are called | `path.rs` |
//! | who may use them, who has them locked | `access.rs` |
//! | which instances there are, and which one holds an interface | `find.rs` |
//! | one of them, as a run has it | `instance.rs` |
//! | its maps and programs | `objects.rs` |
//! | what of it is of other network namespaces | `parts.rs` |
//! | how it is removed, and `twheel detach` | `remove.rs`, `detach.rs` |

mod access;
mod detach;
mod find;
mod instance;
mod objects;
mod parts;
pub(crate) mod path;
mod remove;

pub use self::{
    access::lock_start,
    detach::detach,
    find::{FoundInstance, found},
    instance::Instance,
    objects::{HOOK_PROGRAMS, PROGRAMS, Pins},
    path::{Hook, namespace},
};
pub(crate) use self::{
    find::{all_here, first_of, holding},
    path::{entries, link_name},
};
