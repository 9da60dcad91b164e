//! Quotas: which sources hold more of a full table than one source may, while others need capacity.
//!
//! The packet path calls for this when it finds the table full of established flows, at most once a
//! second. The table is then read three times: first for the few sources that can hold so much, in
//! memory that does not grow with the table; then for how many flows these really hold; then for
//! those of their flows that have been idle longest. Until then, quotas cost nothing.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet},
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::{
    maps::{self, Array, Map, MapData, PerCpuArray, PerCpuValues},
    util::nr_cpus,
};
use nix::{ifaddrs::getifaddrs, sys::socket::SockaddrStorage};
use twheel_common::{
    flow::{Direction, idle},
    quota::{LASTS, MAX_OVER_QUOTA, OverQuota, VICTIMS, Victims, source},
};
use zerocopy::transmute;

use crate::{
    data_plane::DataPlane,
    flows::{Flow, Flows},
};

/// How long flows have been idle, and their records' indexes, by the CPU of their wheel and their
/// source: the longest of each.
type Longest = HashMap<(u32, Source), BinaryHeap<Reverse<(u32, u32)>>>;

/// How many more victims to name than may be evicted.
const SPARE: u64 = 16;

/// How much of a full table a source may hold, in percent; `None`: all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota(pub Option<u8>);

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        match text.trim_end_matches('%').parse() {
            Ok(percent @ 1..=100) => Ok(Self(Some(percent))),
            _ => Err("give a percentage from 1 to 100, or off".to_owned()),
        }
    }
}

/// The source that an address counts for: the address itself, or its 64-bit network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source([u64; 2]);

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: [u8; 16] = transmute!(self.0);
        match Ipv6Addr::from(bytes).to_canonical() {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(network) => write!(f, "{network}/64"),
        }
    }
}

/// A source that holds more than its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The source.
    pub source: Source,
    /// How many flows it holds.
    pub flows: u64,
    /// It did not exceed its quota when the table was last read.
    pub is_new: bool,
}

/// Reads the table when it is full.
pub struct QuotaReader {
    flows: Flows,
    over_quota: maps::HashMap<MapData, [u64; 2], OverQuota>,
    victims: PerCpuArray<MapData, Victims>,
    full: Array<MapData, u64>,
    /// How many flows a source may hold.
    most: u64,
    /// Whether a flow of which one direction was seen counts as established.
    one_way: bool,
    /// In clock units.
    lasts: u64,
    known: BTreeSet<Source>,
}

impl QuotaReader {
    /// Of a table of which a source may hold this many percent.
    pub fn new(plane: &DataPlane, percent: u8) -> Result<Self> {
        let open = |name: &str| plane.open(name);
        let room = u64::from(plane.config().max_flows);
        Ok(Self {
            flows: plane.flows()?,
            over_quota: maps::HashMap::try_from(Map::HashMap(open("OVER_QUOTA")?))?,
            victims: PerCpuArray::try_from(Map::PerCpuArray(open("VICTIMS")?))?,
            full: Array::try_from(Map::Array(open("FULL")?))?,
            one_way: plane.config().one_way != 0,
            most: (room * u64::from(percent) / 100).max(1),
            lasts: plane.clock().units_ceil(Duration::from_secs(LASTS)),
            known: BTreeSet::new(),
        })
    }

    /// How many flows a source may hold.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Tells the data plane which sources exceed their quota, and which of their flows to evict
    /// first.
    ///
    /// # Errors
    ///
    /// A map cannot be read or written, or this host's addresses cannot be listed.
    pub fn read(&mut self) -> Result<Vec<Holder>> {
        let now = self.full.get(&0, 0).context("cannot read FULL")?;
        let own = own_addresses()?;
        // While sources are being counted, none of their flows may be evicted.
        let over_quota = self.over_quota.iter().collect::<Result<Vec<_>, _>>();
        for (source, entry) in over_quota.context("cannot read OVER_QUOTA")? {
            let held = OverQuota { excess: 0, ..entry };
            self.over_quota
                .insert(source, held, 0)
                .context("cannot write OVER_QUOTA")?;
        }
        let sources = |flow: &Flow| sources(flow, &own);
        // Flows that are not established make room for any new flow anyway, and a source could not
        // keep a quota of them.
        let one_way = self.one_way;
        let flows = || {
            let flows = self.flows.iter();
            flows.filter(move |flow| flow.word.seen().is_established(one_way))
        };

        let mut candidates = Candidates::default();
        flows()
            .flat_map(|flow| sources(&flow))
            .for_each(|source| candidates.add(source));
        let mut counts: BTreeMap<Source, u64> =
            candidates.0.into_keys().map(|source| (source, 0)).collect();
        for source in flows().flat_map(|flow| sources(&flow)) {
            if let Some(count) = counts.get_mut(&source) {
                *count += 1;
            }
        }
        counts.retain(|_, count| *count > self.most);

        // For each source no more flows than it has too many, and some spares in case some cannot
        // be evicted at once.
        let mut first = Longest::new();
        if !counts.is_empty() {
            for flow in flows() {
                for source in sources(&flow) {
                    let Some(count) = counts.get(&source) else {
                        continue;
                    };
                    let heap = first.entry((flow.cpu, source)).or_default();
                    heap.push(Reverse((idle(now, flow.word.stamp()), flow.index)));
                    if heap.len() as u64 > (count - self.most + SPARE).min(VICTIMS as u64) {
                        heap.pop();
                    }
                }
            }
        }
        self.write_victims(first)?;
        self.write_over_quota(now, &counts)?;

        let holders = counts.iter().map(|(source, flows)| Holder {
            source: *source,
            flows: *flows,
            is_new: !self.known.contains(source),
        });
        let holders = holders.collect();
        self.known = counts.into_keys().collect();
        Ok(holders)
    }

    fn write_victims(&mut self, first: Longest) -> Result<()> {
        let cpus = nr_cpus().map_err(|(path, error)| {
            anyhow::Error::new(error).context(format!("cannot read {path}"))
        })?;
        let mut of_cpus: Vec<BTreeSet<Reverse<(u32, u32)>>> = vec![BTreeSet::new(); cpus];
        for ((cpu, _), heap) in first {
            if let Some(of_cpu) = of_cpus.get_mut(cpu as usize) {
                of_cpu.extend(heap);
            }
        }
        let victims = of_cpus.into_iter().map(|flows| {
            let mut victims = Victims::default();
            for (place, Reverse((_, index))) in victims.flows.iter_mut().zip(flows) {
                *place = index;
                victims.count += 1;
            }
            victims
        });
        let victims = PerCpuValues::try_from(victims.collect::<Vec<_>>())?;
        self.victims
            .set(0, victims, 0)
            .context("cannot write VICTIMS")
    }

    fn write_over_quota(&mut self, now: u64, counts: &BTreeMap<Source, u64>) -> Result<()> {
        let old = self.over_quota.keys().collect::<Result<Vec<_>, _>>();
        for source in old.context("cannot read OVER_QUOTA")? {
            if !counts.contains_key(&Source(source)) {
                self.over_quota
                    .remove(&source)
                    .context("cannot write OVER_QUOTA")?;
            }
        }
        for (Source(source), count) in counts {
            let entry = OverQuota {
                excess: (count - self.most) as i64,
                until: now.saturating_add(self.lasts),
            };
            self.over_quota
                .insert(source, entry, 0)
                .context("cannot write OVER_QUOTA")?;
        }
        Ok(())
    }
}

/// Every source that occurs more often than one in [`MAX_OVER_QUOTA`] is among these candidates
/// (Misra and Gries, 1982). Only that many are kept; when another source comes, the count of each
/// kept one is decremented, and the new one is not kept.
#[derive(Default)]
struct Candidates(HashMap<Source, u64>);

impl Candidates {
    fn add(&mut self, source: Source) {
        if self.0.len() < MAX_OVER_QUOTA as usize || self.0.contains_key(&source) {
            *self.0.entry(source).or_default() += 1;
            return;
        }
        self.0.retain(|_, count| {
            *count -= 1;
            *count > 0
        });
    }
}

/// The source of a flow: its initiator; both ends if its beginning was not seen. Flows that this
/// host began have no source: this host is not one of the sources that compete for capacity.
fn sources(flow: &Flow, own: &HashSet<[u64; 2]>) -> impl Iterator<Item = Source> + use<> {
    let [a, b, c, d] = flow.key.addresses();
    let seen = flow.word.seen();
    let (initiator, other) = match seen.initiator() {
        Direction::FromLow => ([a, b], [c, d]),
        Direction::FromHigh => ([c, d], [a, b]),
    };
    let whose = |address: [u64; 2]| (!own.contains(&address)).then(|| Source(source(address)));
    let first = whose(initiator);
    let second = whose(other).filter(|other| seen.is_pickup() && Some(*other) != first);
    first.into_iter().chain(second)
}

/// This host's addresses, in the form that keys have.
fn own_addresses() -> Result<HashSet<[u64; 2]>> {
    let addresses = getifaddrs().context("cannot list this host's addresses")?;
    let ip = |address: SockaddrStorage| -> Option<IpAddr> {
        let v4 = address.as_sockaddr_in().map(|it| it.ip().into());
        v4.or_else(|| address.as_sockaddr_in6().map(|it| it.ip().into()))
    };
    Ok(addresses
        .filter_map(|interface| ip(interface.address?))
        .map(words)
        .collect())
}

/// An address in the form that keys have.
fn words(address: IpAddr) -> [u64; 2] {
    let address = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    transmute!(address.octets())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_percent_or_off() {
        assert_eq!("25".parse(), Ok(Quota(Some(25))));
        assert_eq!("100%".parse(), Ok(Quota(Some(100))));
        assert_eq!("off".parse(), Ok(Quota(None)));
        for wrong in ["0", "101", "-1", "on", ""] {
            assert!(wrong.parse::<Quota>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_source_is_an_address_or_a_network() {
        let source = |text: &str| Source(source(words(text.parse().unwrap())));
        assert_eq!(source("192.0.2.7").to_string(), "192.0.2.7");
        assert_ne!(source("192.0.2.7"), source("192.0.2.8"));
        assert_eq!(source("2001:db8::7").to_string(), "2001:db8::/64");
        assert_eq!(source("2001:db8::7"), source("2001:db8::8:1"));
        assert_ne!(source("2001:db8::7"), source("2001:db8:0:1::7"));
    }

    #[test]
    fn who_holds_much_is_a_candidate_however_many_others_there_are() {
        let mut candidates = Candidates::default();
        // Two in a hundred; one of them spread out, one at the end.
        for number in 0..100_000 {
            let is_large = number % 100 == 0 || number >= 99_000;
            let source = if is_large { 0 } else { 1 + number };
            candidates.add(Source([0, source]));
        }
        assert!(candidates.0.len() <= MAX_OVER_QUOTA as usize);
        assert!(candidates.0.contains_key(&Source([0, 0])));
    }
}
