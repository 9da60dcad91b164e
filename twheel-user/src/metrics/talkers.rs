//! Who has flows, bytes and ends: sums by key, of which only the largest are kept.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, VecDeque},
    hash::Hash,
    net::IpAddr,
    time::Duration,
};

use serde::Serialize;
use twheel_common::flow::Traffic;

use crate::model::Flow;

/// Keys of a table, at most.
const MOST: usize = 2048;
/// Keys that stay when a table is full, by each of the sums.
const KEPT: usize = 512;
/// Lines of each order that are shown.
const SHOWN: usize = 10;
/// How long ends are counted.
const MINUTES: usize = 5;

/// The initiator's address.
pub(super) type Source = IpAddr;
/// The protocol and the port of the responder.
pub(super) type Service = (&'static str, u16);

/// What belongs to a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) flows: u64,
    pub(super) bytes: u64,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.flows += other.flows;
        self.bytes += other.bytes;
    }
}

/// Sums by key. When it is full, only the keys with the largest sums stay; so a key that was let go
/// of has less than it had.
#[derive(Clone, Debug)]
struct Table<K> {
    sums: HashMap<K, Sum>,
    /// No key was let go of.
    is_whole: bool,
}

impl<K> Default for Table<K> {
    fn default() -> Self {
        Self {
            sums: HashMap::new(),
            is_whole: true,
        }
    }
}

impl<K: Copy + Eq + Hash + Ord> Table<K> {
    fn add(&mut self, key: K, sum: Sum) {
        self.sums.entry(key).or_default().add(sum);
        if self.sums.len() > MOST {
            self.is_whole = false;
            let mut kept = self.largest(KEPT, |sum| sum.flows);
            kept.extend(self.largest(KEPT, |sum| sum.bytes));
            self.sums.retain(|key, _| kept.contains(key));
        }
    }

    fn merge(&mut self, other: &Self) {
        for (key, sum) in &other.sums {
            self.add(*key, *sum);
        }
        self.is_whole &= other.is_whole;
    }

    fn get(&self, key: &K) -> Sum {
        self.sums.get(key).copied().unwrap_or_default()
    }

    /// The keys with the largest sums.
    fn largest(&self, count: usize, of: impl Fn(&Sum) -> u64) -> BTreeSet<K> {
        let mut keys: Vec<_> = self.sums.iter().map(|(key, sum)| (of(sum), *key)).collect();
        keys.sort_unstable_by_key(|(sum, key)| (Reverse(*sum), *key));
        keys.into_iter().take(count).map(|(_, key)| key).collect()
    }
}

/// The sums of sources and of services.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    sources: Table<Source>,
    services: Table<Service>,
}

impl Sums {
    /// Adds a flow.
    pub(super) fn add(&mut self, flow: &Flow, account: Option<[Traffic; 2]>) {
        let sum = Sum {
            flows: 1,
            bytes: account.into_iter().flatten().map(|sent| sent.bytes).sum(),
        };
        self.sources.add(flow.src.ip(), sum);
        self.services.add((flow.proto, flow.dst.port()), sum);
    }

    /// Adds other sums.
    pub(super) fn merge(&mut self, other: &Self) {
        self.sources.merge(&other.sources);
        self.services.merge(&other.services);
    }
}

/// A line of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Line {
    /// An address, or a protocol and a port.
    name: String,
    /// Flows in the table.
    flows: u64,
    /// Bits a second since the pass before; absent if bytes are not counted, or not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    bits: Option<f64>,
    /// Ends within the last minutes.
    ended: u64,
}

/// What the page shows.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Shown {
    sources: Vec<Line>,
    services: Vec<Line>,
    /// Minutes within which ends are counted.
    minutes: usize,
    /// Keys were let go of: the numbers are those that the shown keys have at least.
    is_partial: bool,
}

/// Puts together what passes over the table find and which flows end between them.
#[derive(Default)]
pub(super) struct Talkers {
    before: Option<Sums>,
    /// Ends by minute, the latest minute first.
    minutes: VecDeque<Sums>,
    /// How much of the latest minute has passed.
    passed: Duration,
}

impl Talkers {
    /// Flows have ended, and time has passed since this was called last.
    pub(super) fn ended(&mut self, ended: &Sums, passed: Duration) {
        self.passed += passed;
        if self.minutes.is_empty() || self.passed >= Duration::from_secs(60) {
            self.passed = Duration::ZERO;
            self.minutes.push_front(Sums::default());
            self.minutes.truncate(MINUTES);
        }
        self.minutes[0].merge(ended);
    }

    /// A pass has found these flows; since the pass before, these have ended. `accounting`: bytes
    /// are counted.
    pub(super) fn passed(
        &mut self,
        live: Sums,
        ended: &Sums,
        took: Duration,
        accounting: bool,
    ) -> Shown {
        let mut recent = Sums::default();
        self.minutes.iter().for_each(|minute| recent.merge(minute));
        let before = self.before.as_ref().filter(|_| accounting);
        let seconds = took.as_secs_f64();
        let shown = Shown {
            sources: lines(
                &live.sources,
                before.map(|it| (&it.sources, &ended.sources, seconds)),
                &recent.sources,
                ToString::to_string,
            ),
            services: lines(
                &live.services,
                before.map(|it| (&it.services, &ended.services, seconds)),
                &recent.services,
                |(proto, port)| format!("{proto}/{port}"),
            ),
            minutes: MINUTES,
            is_partial: ![&live.sources, &recent.sources]
                .iter()
                .all(|table| table.is_whole)
                || ![&live.services, &recent.services]
                    .iter()
                    .all(|table| table.is_whole),
        };
        self.before = Some(live);
        shown
    }
}

/// The lines with the most flows, bits and ends. `before`: what was live at the pass before, what
/// has ended since, and how many seconds ago that was.
fn lines<K: Copy + Eq + Hash + Ord>(
    live: &Table<K>,
    before: Option<(&Table<K>, &Table<K>, f64)>,
    recent: &Table<K>,
    name: impl Fn(&K) -> String,
) -> Vec<Line> {
    // What a flow has sent is counted from its beginning. So what a key has sent meanwhile is what
    // its flows have by now, those included that have ended, less what they had.
    let bits = |key: &K| {
        let (before, ended, seconds) = before?;
        let is_known = [live, before, ended].iter().all(|table| table.is_whole);
        let bytes = live.get(key).bytes + ended.get(key).bytes;
        let bytes = bytes.saturating_sub(before.get(key).bytes);
        (is_known && seconds > 0.0).then(|| 8.0 * bytes as f64 / seconds)
    };
    let mut busy = Table::default();
    for key in live.sums.keys() {
        let bits = bits(key).unwrap_or(0.0) as u64;
        busy.sums.insert(
            *key,
            Sum {
                flows: 0,
                bytes: bits,
            },
        );
    }
    let mut keys = live.largest(SHOWN, |sum| sum.flows);
    keys.extend(busy.largest(SHOWN, |sum| sum.bytes));
    keys.extend(recent.largest(SHOWN, |sum| sum.flows));
    let mut lines: Vec<_> = keys
        .iter()
        .map(|key| Line {
            name: name(key),
            flows: live.get(key).flows,
            bits: bits(key).map(f64::round),
            ended: recent.get(key).flows,
        })
        .collect();
    lines.sort_by_key(|line| Reverse((line.flows, line.ended)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(flows: u64, bytes: u64) -> Sum {
        Sum { flows, bytes }
    }

    fn table(of: &[(u16, Sum)]) -> Table<u16> {
        let mut table = Table::default();
        of.iter().for_each(|(key, sum)| table.add(*key, *sum));
        table
    }

    #[test]
    fn a_flood_of_keys_leaves_the_large_ones() {
        let mut table = Table::default();
        table.add(1, sum(1, 1_000_000));
        for number in 0..100_000u32 {
            table.add(1000 + number, sum(1, 60));
            if number % 10 == 0 {
                table.add(2, sum(1, 60));
            }
        }
        assert!(table.sums.len() <= MOST, "{}", table.sums.len());
        assert!(!table.is_whole);
        assert_eq!(table.get(&1).bytes, 1_000_000, "few flows, many bytes");
        assert_eq!(table.get(&2).flows, 10_000, "many flows");
        assert_eq!(table.largest(1, |sum| sum.flows), BTreeSet::from([2]));
    }

    #[test]
    fn what_was_sent_between_two_passes_includes_what_ended() {
        let before = table(&[(1, sum(2, 1000)), (2, sum(1, 500))]);
        let live = table(&[(1, sum(1, 900)), (3, sum(1, 100))]);
        let ended = table(&[(1, sum(1, 600)), (2, sum(1, 500))]);
        let lines = lines(&live, Some((&before, &ended, 2.0)), &ended, |key| {
            key.to_string()
        });
        let shown: Vec<_> = lines
            .iter()
            .map(|line| (line.name.as_str(), line.flows, line.bits, line.ended))
            .collect();
        assert_eq!(
            shown,
            [
                ("1", 1, Some(2000.0), 1),
                ("3", 1, Some(400.0), 0),
                ("2", 0, Some(0.0), 1)
            ]
        );
    }

    #[test]
    fn ends_are_forgotten_after_some_minutes() {
        let mut talkers = Talkers::default();
        let mut ended = Sums::default();
        ended.services.add(("tcp", 80), sum(1, 0));
        talkers.ended(&ended, Duration::ZERO);
        let recent = |talkers: &mut Talkers| {
            let none = Sums::default();
            let shown = talkers.passed(Sums::default(), &none, Duration::ZERO, false);
            shown.services.first().map(|line| line.ended)
        };
        for _ in 0..MINUTES - 1 {
            talkers.ended(&Sums::default(), Duration::from_secs(60));
            assert_eq!(recent(&mut talkers), Some(1));
        }
        talkers.ended(&Sums::default(), Duration::from_secs(60));
        assert_eq!(recent(&mut talkers), None);
    }
}
