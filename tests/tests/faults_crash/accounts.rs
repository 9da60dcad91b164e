//! What is loaded, pinned, staged and counted.

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
    let value: Value = serde_json::from_str(line).with_context(|| format!("torn: {line:?}"))?;
    let end = |ip: &str, port: &str| -> Result<SocketAddr> {
        let ip = value[ip].as_str().context("no address")?.parse()?;
        Ok(SocketAddr::new(
            ip,
            value[port].as_u64().context("no port")? as u16,
        ))
    };
    Ok((end("src", "sport")?, end("dst", "dport")?))
}

/// The flow of a packet of [`Sender`]'s.
pub fn key_of(number: u32) -> (SocketAddr, SocketAddr) {
    let ip = (0x0a00_0000 + number / 50_000).to_be_bytes();
    let src = SocketAddr::from((ip, 1024 + (number % 50_000) as u16));
    (src, SocketAddr::from(([192, 0, 2, 1], 80)))
}

pub fn pinned(namespace: &Namespace) -> Result<PathBuf> {
    match namespace.instances()?.as_slice() {
        [one] => Ok(one.clone()),
        other => anyhow::bail!("not one instance: {other:?}"),
    }
}

/// Events that wait beside the ring, for which their flows' room is still taken.
fn staged(pins: &Pins) -> Result<u64> {
    let staged = PerCpuArray::<_, [u8; size_of::<Staged>()]>::try_from(Map::PerCpuArray(
        pins.map("STAGED")?,
    ))?;
    let of_each = staged.get(&0, 0)?;
    let counts = of_each
        .iter()
        .filter_map(|it| it.first_chunk().copied().map(u64::from_ne_bytes));
    Ok(counts.sum())
}

/// Flows that room is taken for.
pub fn tracked(pins: &Pins) -> Result<u64> {
    let tracked = Array::<_, u64>::try_from(Map::Array(pins.map("TRACKED")?))?;
    Ok(tracked.get(&0, 0)?)
}

/// While nobody changes it: the flows of the table, those on the wheels, the room that is taken, and what is listed agree.
/// Returns how many.
pub fn check_accounts(namespace: &Namespace) -> Result<usize> {
    let listed = namespace.enter(|| {
        let pins = Instance::of(SERVER)?;
        let tracked = tracked(&pins)?;
        let counters = data_plane::counters(&Map::PerCpuArray(pins.map("COUNTERS")?))?;
        let staged = staged(&pins)?;
        let reader = Reader::of(pins)?;
        let in_use = reader.table().iter().count();
        assert_eq!(counters.live(), in_use as u64, "created less ended");
        assert_eq!(tracked, in_use as u64 + staged, "room taken");
        let on_wheels = Wheels::read(&reader, reader.now()?)?.count(&reader)?;
        let on_wheels: u64 = on_wheels.iter().map(Counted::flows).sum();
        assert_eq!(on_wheels, in_use as u64, "on the wheels");
        for counter in [Counter::Orphans, Counter::EventsLost, Counter::TableFull] {
            assert_eq!(counters.get(counter), 0, "{}", counter.meaning());
        }
        Ok(in_use)
    })?;
    let ended = namespace.twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), listed, "what is listed");
    Ok(listed)
}

/// Maps with so many entries in the kernel, and programs that use them: others have other maps of these names.
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

/// Programs that are held there by a pin, or by a link in the kernel. Of a run that is killed between the two a hook has
/// another program than the one that is pinned, until the next run.
pub fn held(instance: &Path) -> Result<BTreeSet<u32>> {
    let mut held = BTreeSet::new();
    for name in programs_by_xdp() {
        held.insert(ProgramInfo::from_pin(instance.join(name))?.id());
    }
    let links = loaded_links().filter_map(Result::ok);
    held.extend(links.map(|link| link.program_id()));
    Ok(held)
}

/// The kernel's numbers of the links that are pinned there.
pub fn link_ids(instance: &Path) -> Result<[u32; 2]> {
    let id = |hook: &str| -> Result<u32> {
        let link = PinnedLink::from_pin(instance.join(format!("{hook}@{SERVER}")))?;
        Ok(FdLink::from(link).info()?.id())
    };
    Ok([id("xdp")?, id("egress")?])
}

/// Lines that were printed again: in a row, how many each time. A run that was killed while it wrote has written up to 4096
/// bytes that it had not noted, and the next begins with the record in which that begins.
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
        assert!(bytes <= 4096, "{} lines again, in a row", row.len());
    }
    Ok(rows.iter().map(Vec::len).collect())
}

/// Names of what is pinned of the one instance.
pub fn names(namespace: &Namespace) -> Result<Vec<String>> {
    let pins = namespace.pins()?;
    let name = |path: &PathBuf| Some(path.file_name()?.to_str()?.to_owned());
    Ok(pins.iter().filter_map(name).collect())
}

/// What the history has, each flow once; nothing is lost or damaged there.
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

/// What `twheel stats` says of a counter.
pub fn counted_by(namespace: &Namespace, counter: &str) -> Result<u64> {
    let ended = namespace.twheel_once(&["stats", "--iface", SERVER, "--json"])?;
    for line in &ended.lines {
        let value: Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            return value["total"].as_u64().context("a number");
        }
    }
    anyhow::bail!("no {counter}: {}", ended.stderr)
}

/// Detaches, after which nothing is there.
pub fn detached(namespace: &Namespace) -> Result<()> {
    let ended = namespace.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(namespace)
}

/// The kernel takes a moment to let go of a map or a program.
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
            "{found:?} are loaded, not {maps} maps and {held:?}"
        );
        thread::sleep(millis(20));
    }
}

/// The kernel takes a moment to let go of a link.
pub fn await_clean(namespace: &Namespace) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match namespace.check_clean(SERVER) {
            Err(_) if Instant::now() < end => thread::sleep(millis(20)),
            result => return result,
        }
    }
}
