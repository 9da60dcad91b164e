//! Very many expiries at once.

use std::{
    collections::HashSet,
    fs,
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::require_root,
    pair::{Connection, Pair, SERVER},
    running::{Ended, Twheel},
};

use crate::{Said, millis, run};

const MANY: u32 = 100_000;

/// A process's peak memory in bytes (`VmHWM`).
fn most_memory(twheel: &Twheel) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", twheel.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes: u64 = line
        .and_then(|it| it.trim().strip_suffix("kB")?.trim().parse().ok())
        .context("no VmHWM")?;
    Ok(kibibytes << 10)
}

/// The tick of [`very_many`] in milliseconds. A flow may be late by up to one tick, so a long tick
/// would hide delays by the reaper.
const TICK: u64 = 100;

/// Very many flows expire in a few ticks. Returns the longest delay of one, and the peak memory.
fn very_many(more: &[&str]) -> Result<(u64, u64, Ended)> {
    const TIMEOUT: u64 = 5_000;
    let pair = Pair::new()?;
    // A server listens at their destination, which has no such connections: the kernel's lookup
    // falls back to the listening socket.
    pair.server.ip("addr add 192.0.2.1/32 dev lo")?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("192.0.2.1:80")?))?;
    let tick = format!("{TICK}ms");
    let mut args = vec!["--timeout", "5s", "--tick", &tick, "--mode", "generic"];
    args.extend(more);
    let twheel = run(&pair.server, SERVER, &args)?;
    let begun = Instant::now();
    pair.server.begin_flows(SERVER, MANY)?;
    let filled = begun.elapsed();
    assert!(
        filled < millis(TIMEOUT),
        "this machine is too slow: {filled:?}"
    );
    let lines = match more {
        [] => MANY,
        _ => 2 * MANY,
    };
    let end = Instant::now() + Duration::from_secs(60);
    let mut printed = Vec::new();
    // This thread takes lines seldom, and parses them later. For each line it would use more of the
    // CPUs than twheel, and twheel would be late.
    while printed.len() < lines as usize {
        while let Some(line) = twheel.line(Duration::ZERO)? {
            printed.push(line);
        }
        let read = printed.len();
        ensure!(Instant::now() < end, "only {read} lines of {lines}");
        thread::sleep(millis(10));
    }
    let until_read = begun.elapsed();
    let (mut seen, mut latest, mut reaped) = (HashSet::new(), 0, 0);
    for line in printed {
        let value: Value = serde_json::from_str(&line.text)?;
        let said = Said { at: line.at, value };
        if said.is("reap") {
            assert_eq!(said.text("outcome"), "nothing");
            reaped += 1;
            continue;
        }
        assert!(seen.insert(said.src()), "reported twice: {}", line.text);
        let idle = said.value["idle_us"].as_u64().context("no idle_us")? / 1000;
        latest = latest.max(idle.checked_sub(TIMEOUT).context("early")?);
    }
    assert_eq!((seen.len(), reaped), (MANY as usize, lines - MANY));
    println!(
        "{more:?}: filled in {filled:?}, {until_read:?} until all was read; the latest {latest} ms"
    );
    let memory = most_memory(&twheel)?;
    Connection::open(&pair.server, &listener)?.talk()?;
    Ok((latest, memory, twheel.stop()?))
}

#[test]
fn very_many_expiries_at_once_neither_get_lost_nor_wait_for_the_reaper() -> Result<()> {
    require_root();
    let (late, memory, _) = very_many(&[])?;
    let (late_reaping, memory_reaping, ended) =
        very_many(&["--reap", "socket", "--reap-max-share", "100"])?;
    println!(
        "lateness {late} ms, with the reaper {late_reaping} ms; memory {} KiB and {} KiB",
        memory >> 10,
        memory_reaping >> 10
    );
    assert!(
        ended.stderr.contains("100000 flows ended, 0 live"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("100000  socket: nothing to do"),
        "{}",
        ended.stderr
    );
    // Lateness beyond the tick. A busy machine adds some hundred milliseconds; waiting for the
    // reaper would add two seconds.
    let [beyond, beyond_reaping] = [late, late_reaping].map(|late| late.saturating_sub(TICK));
    assert!(beyond <= 500, "{late} ms late");
    assert!(
        beyond_reaping <= beyond + 400,
        "{late_reaping} ms late, {late} without the reaper"
    );
    assert!(
        memory_reaping < memory + (40 << 20),
        "{memory_reaping}, without the reaper {memory}"
    );
    Ok(())
}
