//! Checks of what is loaded, pinned, staged and counted.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map, PerCpuArray, loaded_maps},
    programs::{
        ProgramInfo,
        links::{FdLink, PinnedLink},
        loaded_links, loaded_programs,
    },
};
use serde_json::Value;
use twheel::{
    data_plane,
    inspect::Reader,
    pins::{Instance, PROGRAMS, Pins},
    wheels::{Counted, Wheels},
};
use twheel_common::{
    counter::Counter,
    event::{BATCH, Staged},
};
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE},
    pair::SERVER,
};

use crate::millis;

pub fn key(line: &str) -> Result<(SocketAddr, SocketAddr)> {
    let value: Value =
        serde_json::from_str(line).with_context(|| format!("incomplete line: {line:?}"))?;
    let end = |ip: &str, port: &str| -> Result<SocketAddr> {
        let ip = value[ip].as_str().context("no address")?.parse()?;
        Ok(SocketAddr::new(
            ip,
            value[port].as_u64().context("no port")? as u16,
        ))
    };
    Ok((end("src", "sport")?, end("dst", "dport")?))
}

/// The key of the flow of packet `number` of a [`Sender`].
pub fn key_of(number: u32) -> (SocketAddr, SocketAddr) {
    let ip = (0x0a00_0000 + number / 50_000).to_be_bytes();
    let src = SocketAddr::from((ip, 1024 + (number % 50_000) as u16));
    (src, SocketAddr::from(([192, 0, 2, 1], 80)))
}

pub fn pinned(namespace: &Namespace) -> Result<PathBuf> {
    match namespace.instances()?.as_slice() {
        [one] => Ok(one.clone()),
        other => anyhow::bail!("expected one instance: {other:?}"),
    }
}

/// Ends of flows that are staged outside the ring; the flows still take capacity.
fn staged(pins: &Pins) -> Result<u64> {
    let staged = PerCpuArray::<_, [u8; size_of::<Staged>()]>::try_from(Map::PerCpuArray(
        pins.map("STAGED")?,
    ))?;
    let of_each = staged.get(&0, 0)?;
    let counts = of_each
        .iter()
        .filter_map(|it| it[8..].first_chunk().copied().map(u64::from_ne_bytes));
    Ok(counts.sum())
}

/// The number of flows that take capacity.
pub fn tracked(pins: &Pins) -> Result<u64> {
    let tracked = Array::<_, u64>::try_from(Map::Array(pins.map("TRACKED")?))?;
    Ok(tracked.get(&0, 0)?)
}

/// Checks, while the table does not change, that the flows in the table, the flows on the wheels,
/// the capacity taken and the output of `flows` agree. Returns their number.
pub fn check_accounts(namespace: &Namespace) -> Result<usize> {
    let listed = namespace.enter(|| {
        let pins = Instance::with(SERVER)?;
        let tracked = tracked(&pins)?;
        let counters = data_plane::counters(&Map::PerCpuArray(pins.map("COUNTERS")?))?;
        let staged = staged(&pins)?;
        let reader = Reader::open_pins(pins)?;
        let in_use = reader.table().iter().count();
        assert_eq!(counters.live(), in_use as u64, "flows created, less ended");
        assert_eq!(tracked, in_use as u64 + staged, "capacity taken");
        let on_wheels = Wheels::read(&reader, reader.now()?)?.count(&reader)?;
        let on_wheels: u64 = on_wheels.iter().map(Counted::flows).sum();
        assert_eq!(on_wheels, in_use as u64, "flows on the wheels");
        for counter in [Counter::Orphans, Counter::EventsLost, Counter::TableFull] {
            assert_eq!(counters.get(counter), 0, "{}", counter.meaning());
        }
        Ok(in_use)
    })?;
    let ended = namespace.twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), listed, "flows listed");
    Ok(listed)
}

/// The maps in the kernel with this many entries, and the programs that use them. Other tests have
/// maps of the same names, but of other sizes.
pub fn loaded(entries: u32) -> (usize, BTreeSet<u32>) {
    let maps = loaded_maps().filter_map(Result::ok);
    let maps: BTreeSet<_> = maps
        .filter(|map| map.max_entries() == entries)
        .map(|map| map.id())
        .collect();
    let programs = loaded_programs().filter_map(Result::ok).filter(|program| {
        let used = program.map_ids().ok().flatten().unwrap_or_default();
        used.iter().any(|id| maps.contains(id))
    });
    (maps.len(), programs.map(|it| it.id()).collect())
}

/// The programs of a run whose interface has XDP.
pub fn programs_by_xdp() -> impl Iterator<Item = &'static str> {
    PROGRAMS.into_iter().filter(|it| *it != "twheel_ingress")
}

/// Programs that are held by a pin there, or by a BPF link. If a run is killed between replacing
/// the program of a hook and pinning it, the two differ until the next run.
pub fn held(instance: &Path) -> Result<BTreeSet<u32>> {
    let mut held = BTreeSet::new();
    for name in programs_by_xdp() {
        held.insert(ProgramInfo::from_pin(instance.join(name))?.id());
    }
    let links = loaded_links().filter_map(Result::ok);
    held.extend(links.map(|link| link.program_id()));
    Ok(held)
}

/// The kernel's numbers of the BPF links that are pinned there.
pub fn link_ids(instance: &Path) -> Result<[u32; 2]> {
    let id = |hook: &str| -> Result<u32> {
        let link = PinnedLink::from_pin(instance.join(format!("{hook}@{SERVER}")))?;
        Ok(FdLink::from(link).info()?.id())
    };
    Ok([id("xdp")?, id("egress")?])
}

/// How many lines were printed again each time, in a row. A run that was killed while writing has
/// written up to 4096 bytes without noting so; the next run begins again with the record that
/// contains the first of them.
pub fn repeated(lines: &[String]) -> Result<Vec<usize>> {
    let (mut seen, mut rows) = (BTreeSet::new(), Vec::<Vec<&String>>::new());
    let mut in_row = false;
    for line in lines {
        if seen.insert(key(line)?) {
            in_row = false;
            continue;
        }
        match rows.last_mut() {
            Some(row) if in_row && !row.contains(&line) => row.push(line),
            _ => rows.push(vec![line]),
        }
        in_row = true;
    }
    for row in &rows {
        let bytes: usize = row.iter().skip(BATCH).map(|line| line.len() + 1).sum();
        assert!(bytes <= 4096, "{} lines in a row printed again", row.len());
    }
    Ok(rows.iter().map(Vec::len).collect())
}

/// Names of the pins of the only instance.
pub fn names(namespace: &Namespace) -> Result<Vec<String>> {
    let pins = namespace.pins()?;
    let name = |path: &PathBuf| Some(path.file_name()?.to_str()?.to_owned());
    Ok(pins.iter().filter_map(name).collect())
}

/// The flows in the history. Checks that each occurs once, and that nothing in it is lost or
/// damaged.
pub fn kept(
    namespace: &Namespace,
    history: &Directory,
) -> Result<BTreeSet<(SocketAddr, SocketAddr)>> {
    let args = ["expired", "--iface", SERVER, "--json", "--history"];
    let ended = namespace.twheel_once(&[&args[..], &[history.path()]].concat())?;
    assert_eq!((ended.code(), &*ended.stderr), (Some(0), ""));
    let mut kept = BTreeSet::new();
    for line in &ended.lines {
        let key = key(&line.text)?;
        assert!(kept.insert(key), "twice in the history: {}", line.text);
    }
    Ok(kept)
}

/// A counter, from `twheel stats`.
pub fn counted_by(namespace: &Namespace, counter: &str) -> Result<u64> {
    let ended = namespace.twheel_once(&["stats", "--iface", SERVER, "--json"])?;
    for line in &ended.lines {
        let value: Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            return value["total"].as_u64().context("the total is not a number");
        }
    }
    anyhow::bail!("no {counter}: {}", ended.stderr)
}

/// Detaches and checks that nothing is left.
pub fn detached(namespace: &Namespace) -> Result<()> {
    let ended = namespace.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(namespace)
}

/// Waits until only these maps and programs are loaded: the kernel frees them with a short delay.
pub fn await_loaded(
    entries: u32,
    maps: usize,
    held: impl Fn() -> Result<BTreeSet<u32>>,
) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let (found, held) = (loaded(entries), held()?);
        if found.0 == maps && found.1.is_subset(&held) {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "{found:?} are loaded, expected {maps} maps and {held:?}"
        );
        thread::sleep(millis(20));
    }
}

/// Waits until nothing is left: the kernel removes BPF links with a short delay.
pub fn await_clean(namespace: &Namespace) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match namespace.check_clean(SERVER) {
            Err(_) if Instant::now() < end => thread::sleep(millis(20)),
            result => return result,
        }
    }
}
