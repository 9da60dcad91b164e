//! The programs that TCX runs on an interface, by id. Unlike names, ids can be queried with the
//! capabilities that the running twheel keeps.

use std::{io, mem};

use aya::programs::{LinkOrder, ProgramId};
use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd};

use crate::{
    bpf,
    order::{Order, Other, Position, ProgramNames},
    tc::Way,
};

/// The most programs that the kernel runs on one hook (`BPF_MPROG_MAX`).
const MOST: usize = 64;

/// The programs of an interface for one direction, in the order in which packets meet them.
///
/// # Errors
///
/// `EINVAL`: the kernel has no TCX. `EPERM`: without `CAP_NET_ADMIN`.
pub fn programs(index: u32, way: Way) -> io::Result<Vec<u32>> {
    let mut ids = [0u32; MOST];
    // SAFETY: all-zero bytes are a valid `bpf_attr`.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.query.__bindgen_anon_1.target_ifindex = index;
    attr.query.attach_type = match way {
        Way::In => bpf_attach_type::BPF_TCX_INGRESS,
        Way::Out => bpf_attach_type::BPF_TCX_EGRESS,
    } as u32;
    attr.query.prog_ids = (&raw mut ids).addr() as u64;
    attr.query.__bindgen_anon_2.count = MOST as u32;
    // SAFETY: the attribute is filled for this command, and points to as many ids as it says, which
    // outlive the call.
    unsafe { bpf::call(bpf_cmd::BPF_PROG_QUERY, &mut attr) }?;
    // SAFETY: the kernel has written the count, and any bits are a valid number.
    let count = unsafe { attr.query.__bindgen_anon_2.count } as usize;
    Ok(ids[..count.min(MOST)].to_vec())
}

/// Whether the kernel has TCX: without it, the kernel does not know the query.
pub fn exists(index: u32) -> bool {
    let answer = programs(index, Way::In);
    answer.map_or_else(|error| error.raw_os_error() != Some(libc::EINVAL), |_| true)
}

/// The same without twheel's own program, with the names that are known.
///
/// # Errors
///
/// As [`programs`].
pub fn others(
    index: u32,
    way: Way,
    own: Option<u32>,
    names: &ProgramNames,
) -> io::Result<Vec<Other>> {
    let all = programs(index, way)?.into_iter();
    let others = all.filter(|id| Some(*id) != own);
    Ok(others.map(|id| names.other(id)).collect())
}

/// A position in the form that the kernel takes.
pub fn link_order(order: &Order, others: &[Other]) -> LinkOrder {
    // SAFETY: the id came from the kernel. If its program has been unloaded meanwhile, the kernel
    // reports that.
    let id = |index: usize| unsafe { ProgramId::new(others[index].id.unwrap_or_default()) };
    match order.position(others) {
        Position::First => LinkOrder::first(),
        Position::Last => LinkOrder::last(),
        Position::Before(index) => LinkOrder::before_program_id(id(index)),
        Position::After(index) => LinkOrder::after_program_id(id(index)),
    }
}

/// Whether twheel's program is where `order` wants it in this list, which includes it.
pub fn stands(order: &Order, own: u32, all: &[Other]) -> bool {
    let Some(at) = all.iter().position(|it| it.id == Some(own)) else {
        return false;
    };
    let (before, after) = (&all[..at], &all[at + 1..]);
    let others = [before, after].concat();
    match order.position(&others) {
        Position::First => before.is_empty(),
        Position::Last => after.is_empty(),
        Position::Before(index) => index >= at,
        Position::After(index) => index < at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_stands_where_it_was_told_to_or_not() {
        let names = ProgramNames::default();
        let all: Vec<_> = (1..=4).map(|id| names.other(id)).collect();
        for (order, own, is) in [
            ("first", 1, true),
            ("first", 2, false),
            ("last", 4, true),
            ("last", 3, false),
            ("before:id:3", 2, true),
            ("before:id:3", 1, true),
            ("before:id:3", 4, false),
            ("after:id:3", 4, true),
            ("after:id:3", 2, false),
            // The anchor does not exist: first.
            ("after:id:9", 1, true),
            ("after:id:9", 2, false),
            ("first", 9, false),
        ] {
            let order: Order = order.parse().unwrap();
            assert_eq!(stands(&order, own, &all), is, "{order} {own}");
        }
    }
}
