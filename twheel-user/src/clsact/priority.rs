//! Which priority a filter gets among those of others.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::{
    order::{Order, Other, Position},
    tc::Filter,
};

/// The priority of a filter if there are no others.
pub const PRIORITY: u16 = 17;

/// The filters that packets meet, each once. (The kernel also lists each priority by itself, with
/// handle 0.)
pub(super) fn described(filters: &[Filter]) -> impl Iterator<Item = (&Filter, Other)> {
    let met = filters
        .iter()
        .filter(|it| it.chain == 0 && it.place.handle != 0);
    met.map(|filter| {
        let other = Other {
            id: filter.program,
            name: filter.name.clone(),
        };
        (filter, other)
    })
}

/// Whether a filter with this priority is where `order` wants it.
pub(super) fn stands(order: &Order, priority: u16, others: &[Filter]) -> bool {
    // If no priority before all others is free, there is no better one.
    if choose(Some(order), others).is_ok_and(|best| best == priority) {
        return true;
    }
    let (filters, others): (Vec<_>, Vec<_>) = described(others).unzip();
    let at = |index: usize| filters[index].place.priority;
    match order.position(&others) {
        Position::First => filters.iter().all(|it| it.place.priority > priority),
        Position::Last => filters.iter().all(|it| it.place.priority < priority),
        Position::Before(index) => priority < at(index),
        Position::After(index) => priority > at(index),
    }
}

/// Chooses a priority beside these filters: where `--order` says, by default before all others. If
/// no such priority is free, the next free one.
pub(super) fn choose(order: Option<&Order>, others: &[Filter]) -> Result<u16> {
    let taken: BTreeSet<_> = others
        .iter()
        .filter(|it| it.chain == 0)
        .map(|it| it.place.priority)
        .collect();
    let free_from = |from: u16| (from..=u16::MAX).find(|it| !taken.contains(it));
    let free_below = |below: u16| (1..below).rev().find(|it| !taken.contains(it));
    let (filters, others): (Vec<_>, Vec<_>) = described(others).unzip();
    let at = |index: usize| filters[index].place.priority;
    match order.map_or(Position::First, |order| order.position(&others)) {
        Position::First => match taken.first() {
            Some(&1) => free_from(2),
            Some(&first) => Some((first - 1).min(PRIORITY)),
            None => Some(PRIORITY),
        },
        Position::Last => match taken.last() {
            Some(&last) => last.checked_add(1).map(|next| next.max(PRIORITY)),
            None => Some(PRIORITY),
        },
        Position::Before(index) => free_below(at(index)),
        Position::After(index) => at(index).checked_add(1).and_then(free_from),
    }
    .context("no priority is free there: other filters use them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tc::{FilterId, Way};

    #[test]
    fn a_filter_stands_where_it_is_to_stand_if_there_is_room() {
        let taken = |priorities: &[u16], chain| -> Vec<_> {
            let filter = |&priority: &u16| Filter {
                place: FilterId {
                    index: 2,
                    way: Way::In,
                    priority,
                    handle: 1,
                },
                chain,
                name: Some(format!("at {priority}")),
                program: Some(priority.into()),
            };
            priorities.iter().map(filter).collect()
        };
        let order = |text: &str| text.parse::<Order>().unwrap();
        for (wanted, others, chosen) in [
            ("first", &[][..], Some(PRIORITY)),
            ("first", &[49152], Some(PRIORITY)),
            ("first", &[PRIORITY + 1], Some(PRIORITY)),
            ("first", &[PRIORITY, 49152], Some(PRIORITY - 1)),
            ("first", &[2], Some(1)),
            ("first", &[1], Some(2)),
            ("first", &[1, 2, 3, 5], Some(4)),
            ("last", &[], Some(PRIORITY)),
            ("last", &[1, 2], Some(PRIORITY)),
            ("last", &[1, 49152], Some(49153)),
            ("last", &[u16::MAX], None),
            ("before:at 5", &[1, 5, 9], Some(4)),
            ("before:id:5", &[1, 4, 5, 9], Some(3)),
            ("before:at 1", &[1, 5], None),
            ("after:at 5", &[1, 5, 9], Some(6)),
            ("after:id:5", &[5, 6, 9], Some(7)),
            ("after:at 65535", &[1, u16::MAX], None),
            // That filter is not in this direction.
            ("after:other", &[20], Some(PRIORITY)),
        ] {
            let (order, others) = (order(wanted), taken(others, 0));
            let found = choose(Some(&order), &others).ok();
            assert_eq!(found, chosen, "{wanted} {others:?}");
            if let Some(priority) = found {
                assert!(stands(&order, priority, &others), "{wanted} {others:?}");
            }
        }
        let others = taken(&[1, 17], 1);
        let found = choose(None, &others).unwrap();
        assert_eq!(found, PRIORITY, "another chain's");
        let all: Vec<u16> = (1..=u16::MAX).collect();
        assert!(choose(None, &taken(&all, 0)).is_err());
        for (wanted, priority, is) in [
            ("first", 10, false),
            ("first", 4, true),
            ("last", 30, true),
            ("last", 10, false),
            ("before:at 20", 19, true),
            ("before:at 20", 21, false),
            ("after:at 5", 6, true),
            ("after:at 5", 4, false),
        ] {
            let others = taken(&[5, 20], 0);
            assert_eq!(stands(&order(wanted), priority, &others), is, "{wanted}");
        }
    }
}
