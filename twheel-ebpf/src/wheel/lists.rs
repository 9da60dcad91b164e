//! The lists of flows in the wheel's slots. A slot has several lists; the index of a flow's details
//! says which one the flow is in.

use twheel_common::wheel::{Heads, LISTS, Link, Slot};

use crate::{
    config,
    maps::SLOTS,
    record::{self, At},
};

use super::own::Own;

/// The heads of a slot's lists. They belong to this CPU, as its wheel does.
#[derive(Clone, Copy)]
pub struct Lists(*mut Heads);

impl Lists {
    /// The lists of the slot of this index.
    #[inline(always)]
    pub fn at(slot: u32) -> Option<Self> {
        SLOTS.get_ptr_mut(slot).map(Self)
    }

    #[inline(always)]
    fn place(self, list: u32) -> *mut Link {
        // SAFETY: within the value.
        unsafe { self.0.cast::<Link>().add(list as usize & (LISTS - 1)) }
    }

    /// The first flow of a list.
    #[inline(always)]
    pub fn get(self, list: u32) -> Link {
        // SAFETY: a place in a map, aligned to 4, that only this CPU reads and writes.
        unsafe { self.place(list).read_volatile() }
    }

    /// Sets the first flow of a list.
    #[inline(always)]
    pub fn set(self, list: u32, link: Link) {
        // SAFETY: as above; no references to it are made.
        unsafe { self.place(list).write_volatile(link) }
    }

    /// The first flow of the first list that is not empty, counted from this one on.
    #[inline(always)]
    pub fn first(self, from: u32) -> Link {
        let mut first = Link::NONE;
        for list in (0..LISTS as u32).rev() {
            let link = self.get(from + list);
            first = if link == Link::NONE { first } else { link };
        }
        first
    }

    /// Whether all lists are empty.
    #[inline(always)]
    pub fn are_empty(self) -> bool {
        (0..LISTS as u32).fold(0, |any, list| any | self.get(list).raw()) == 0
    }
}

/// The list of a flow, in whichever slot it stands.
#[inline(always)]
fn list_of(flow: At) -> u32 {
    flow.number() & (LISTS as u32 - 1)
}

/// The slot of flows that were handed out and await their timer visit.
#[inline(always)]
pub fn pending() -> u32 {
    config::geometry().slots()
}

/// Puts a flow at the front of a slot.
#[inline(always)]
pub fn push(wheel: Own, flow: At, slot: Slot) {
    let (number, list) = (flow.number(), list_of(flow));
    let Some(lists) = Lists::at(slot.index) else {
        return;
    };
    let first = lists.get(list);
    lists.set(list, Link::flow(number));
    wheel.set_latest(list);
    flow.set_next(first);
    flow.set_prev(Link::list(slot.index, list));
    match first.as_flow().and_then(record::with_details) {
        Some(first) => first.set_prev(Link::flow(number)),
        None => wheel.occupy(slot.index),
    }
}

/// Takes a flow out of the list in which it stands.
#[inline(always)]
pub fn unlink(wheel: Own, flow: At) {
    let (next, prev) = (flow.next(), flow.prev());
    if let Some(next) = next.as_flow().and_then(record::with_details) {
        next.set_prev(prev);
    }
    let Some((slot, list)) = prev.as_list() else {
        if let Some(prev) = prev.as_flow().and_then(record::with_details) {
            prev.set_next(next);
        }
        return;
    };
    let Some(lists) = Lists::at(slot) else {
        return;
    };
    lists.set(list, next);
    if next == Link::NONE && slot != pending() && lists.are_empty() {
        wheel.vacate(slot);
    }
}
