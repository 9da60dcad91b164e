//! Where objects are pinned: one directory per instance, below one for the layout's version. An
//! instance is named after the first value of `--iface`, an interface or a pattern.
//!
//! ```text
//! /sys/fs/bpf/twheel/vN/4026531840-eth0/    network namespace (inode) and first interface
//!     FLOWS WHEEL SLOTS EVENTS …            the maps
//!     twheel_xdp twheel_egress …            the programs
//!     xdp@eth0 ingress@eth0 egress@eth0     the BPF links
//!     clsact-2@eth0 qdisc-2@eth0 …          a filter instead of a BPF link: see `clsact/`
//!     next_xdp next_ingress next_egress     programs for other network namespaces: see `stub.rs`
//!     netns-0-4026532177-blue/              one of those namespaces: its programs and BPF links
//! ```
//!
//! | question | file |
//! |---|---|
//! | how directories and pins are named | `path.rs` |
//! | who may use them, and which process has them locked | `access.rs` |
//! | which instances exist, and which one holds an interface | `find.rs` |
//! | one instance, as a run has it | `instance.rs` |
//! | its maps and programs | `objects.rs` |
//! | its parts for other network namespaces | `parts.rs` |
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
    objects::{HOOK_PROGRAMS, PROGRAMS, PinnedProgram, Pins},
    path::{Hook, lasting_name, namespace},
};
pub(crate) use self::{
    find::{holding, renamed},
    path::{entries, link_name, unescape},
};
