//! Real connections between two hosts, which `twheel` watches.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::Stdio,
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    time::{ClockId, clock_getres},
    unistd::Pid,
};
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{Busy, Family, PORT, Pair, SERVER},
    running::{Expiry, PolicyFile, Twheel, wait_within},
};

const TICK: Duration = Duration::from_millis(100);
/// Time for the threads of this test and of twheel to be scheduled.
const SCHEDULING: Duration = Duration::from_millis(100);

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// How late an expiry may be: a tick, scheduling delays, and the clock's resolution.
fn lateness() -> Duration {
    let jiffy = Duration::from(clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).unwrap());
    TICK + SCHEDULING + 2 * jiffy
}

/// Expiries by flow. A flow that is reported twice is an error.
fn by_name(expiries: &[Expiry]) -> Result<HashMap<SocketAddr, &Expiry>> {
    let mut found = HashMap::new();
    for expiry in expiries {
        let twice = found.insert(expiry.src, expiry);
        ensure!(twice.is_none(), "reported twice: {expiry:?}");
    }
    Ok(found)
}

/// The names in order, so that a failure shows the difference.
fn names<'a>(names: impl IntoIterator<Item = &'a SocketAddr>) -> Vec<SocketAddr> {
    let mut names: Vec<_> = names.into_iter().copied().collect();
    names.sort();
    names
}

/// Fails if the test's own threads were stalled for so long that an expiry would be correct.
fn check_pace(gap: Duration, timeout: Duration) {
    assert!(
        gap < timeout,
        "this machine is too slow to test on: a busy connection was silent for {gap:?}"
    );
}

#[test]
fn exactly_the_idle_half_expires_and_on_time() -> Result<()> {
    require_root();
    let timeout = millis(2000);
    let pair = Pair::new()?;
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--timeout",
            "2s",
            "--tick",
            "100ms",
            "--json",
        ],
    )?;
    let busy = pair.connect_some(100)?;
    let busy_names = names(busy.iter().map(|it| &it.name));
    let busy = Busy::start(busy, timeout / 10);
    let mut idle = Vec::new();
    for i in 0..100 {
        // Spread over several ticks.
        thread::sleep(millis(7));
        idle.push(pair.connect(Family::alternate(i))?);
    }
    // The busy connections last longer than one timeout.
    let expiries = twheel.ends_within(2 * timeout, idle.len())?;
    let rest = busy.stop()?;
    check_pace(rest.longest_gap, timeout);

    let found = by_name(&expiries)?;
    assert_eq!(
        names(found.keys()),
        names(idle.iter().map(|it| &it.name)),
        "not exactly the idle ones have expired"
    );
    for connection in &idle {
        let expiry = found[&connection.name];
        assert_eq!((&*expiry.reason, &*expiry.state), ("idle", "established"));
        // The last packet was sent between `before` and `after`. When it ended, the event says itself:
        // a busy machine may read it later.
        let read = SystemTime::now() - expiry.at.elapsed();
        let waited = read.duration_since(expiry.time).unwrap_or_default();
        let since = expiry.at - connection.after;
        for (early, late) in [
            (expiry.idle, expiry.idle),
            (expiry.at - connection.before, since.saturating_sub(waited)),
        ] {
            assert!(early >= timeout, "{early:?}, too early: {expiry:?}");
            assert!(
                late <= timeout + lateness(),
                "{late:?}, too late: {expiry:?}"
            );
        }
    }
    // Had the busy connections not been seen at all, they would not have expired, either: so they
    // must expire now.
    let expiries = twheel.ends_within(timeout + millis(500), busy_names.len())?;
    assert_eq!(names(by_name(&expiries)?.keys()), busy_names);

    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("200 flows ended, 0 live"),
        "{}",
        ended.stderr
    );
    Ok(())
}

#[test]
fn a_killed_run_loses_no_flow_and_the_next_one_adopts() -> Result<()> {
    require_root();
    let timeout = millis(2000);
    let args = ["--iface", SERVER, "--timeout", "2s", "--keep", "--json"];
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &args)?;
    let idle = pair.connect_some(20)?;
    let busy = Busy::start(pair.connect_some(20)?, timeout / 10);
    assert_eq!(
        twheel.expiries_until(Instant::now() + millis(300))?.len(),
        0
    );
    let ended = twheel.kill()?;
    assert_eq!(ended.signal(), Some(9));
    assert_eq!(ended.lines.len(), 0);
    assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);

    // Longer than the timeout: the busy connections are kept only by packets that are seen now.
    thread::sleep(timeout + millis(500));
    let twheel = Twheel::start(&pair.server, &args)?;
    // Idle connections that are due may have ended before twheel counts.
    let stderr = twheel.await_stderr("\nadopted ")?;
    let attached = format!("{SERVER}: attached, adopted XDP, both directions");
    assert!(stderr.contains(&attached), "{stderr}");
    let adopted: usize = stderr
        .lines()
        .find_map(|line| line.strip_prefix("adopted ")?.strip_suffix(" flows"))
        .with_context(|| format!("no count of flows: {stderr}"))?
        .parse()?;
    assert!((20..=40).contains(&adopted), "{adopted} flows adopted");
    let expiries = twheel.ends_within(timeout + millis(500), idle.len())?;
    let found = by_name(&expiries)?;
    assert_eq!(names(found.keys()), names(idle.iter().map(|it| &it.name)));
    for expiry in found.values() {
        // No run was stepping meanwhile.
        assert!(expiry.idle >= timeout + millis(500), "{expiry:?}");
        assert_eq!(expiry.reason, "idle");
    }

    let before = pair.server.pins()?;
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("20 flows ended, 20 live"),
        "{}",
        ended.stderr
    );
    assert_eq!(ended.lines.len(), 0);
    assert!(!before.is_empty());
    assert_eq!(pair.server.pins()?, before, "--keep keeps all pins");
    assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);
    check_pace(busy.stop()?.longest_gap, timeout);

    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    pair.server.check_clean(SERVER)
}

#[test]
fn ctrl_c_leaves_nothing_behind() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let _connections = pair.connect_some(4)?;
    assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);
    assert_eq!(pair.server.instances()?.len(), 1);
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("0 flows ended, 4 live"),
        "{}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)
}

#[test]
fn lo_runs_generic_when_asked_and_when_native_is_refused() -> Result<()> {
    require_root();
    let host = Namespace::new("lo")?;
    for (option, value, refused) in [("--mode", "generic", false), ("--hook", "xdp", true)] {
        let twheel = Twheel::start(
            &host,
            &[
                "--iface",
                "lo",
                option,
                value,
                "--timeout",
                "500ms",
                "--json",
            ],
        )?;
        let stderr = twheel.stderr();
        assert!(stderr.contains("lo: attached, generic XDP"), "{stderr}");
        assert_eq!(
            stderr.contains("the driver has no native XDP"),
            refused,
            "{stderr}"
        );
        assert!(host.ip("-d link show dev lo")?.contains("xdpgeneric"));

        let listener = host.enter(|| Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?))?;
        let address = listener.local_addr()?;
        let client = host.enter(|| Ok(TcpStream::connect(address)?))?;
        let expiries = twheel.ends_within(millis(1000), 1)?;
        assert_eq!(names(by_name(&expiries)?.keys()), [client.local_addr()?]);
        let ended = twheel.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        host.check_clean("lo")?;
    }
    Ok(())
}

#[test]
fn ipv4_and_ipv6_expire_by_their_addresses() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(
        &pair.server,
        &["--iface", SERVER, "--timeout", "500ms", "--json"],
    )?;
    let connections = pair.connect_some(2)?;
    let expiries = twheel.ends_within(millis(1000), 2)?;
    let found = by_name(&expiries)?;
    assert_eq!(found.len(), 2, "{expiries:?}");
    for (connection, family) in connections.iter().zip([Family::V4, Family::V6]) {
        let expiry = found[&connection.name];
        assert_eq!(expiry.src.ip(), family.client());
        assert_eq!(expiry.dst.ip(), family.server());
    }
    Ok(())
}

#[test]
fn the_way_a_connection_ends_is_told() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--timeout",
            "10s,time_wait=500ms,close=500ms",
            "--json",
        ],
    )?;
    let [closed, reset] = [pair.connect(Family::V4)?, pair.connect(Family::V6)?];
    let (closed_name, reset_name) = (closed.name, reset.name);
    closed.close()?;
    reset.reset()?;
    let expiries = twheel.ends_within(millis(1000), 2)?;
    let found = by_name(&expiries)?;
    assert_eq!(found.len(), 2, "{expiries:?}");
    for (name, state, reason) in [
        (closed_name, "time_wait", "closed"),
        (reset_name, "close", "reset"),
    ] {
        let expiry = found[&name];
        assert_eq!((&*expiry.state, &*expiry.reason), (state, reason));
        assert!(expiry.idle >= millis(500), "{expiry:?}");
    }
    Ok(())
}

/// A policy with one rule for the port of the tests' servers, and its timeout for established
/// flows.
fn policy(rule: &str, established: &str) -> String {
    format!(
        "[[rule]]\nname = '{rule}'\ndport = {PORT}\niface = '{SERVER}'\ndirection = 'in'\n\
         timeouts = {{ established = '{established}' }}\n"
    )
}

#[test]
fn a_policy_is_replaced_while_flows_live() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let file = PolicyFile::new("run", &policy("first", "1s"))?;
    let args = ["--iface", SERVER, "--policy", file.path(), "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    let first = pair.connect(Family::V4)?;
    let expiries = twheel.ends_within(millis(1500), 1)?;
    let [expiry] = expiries.as_slice() else {
        anyhow::bail!("one flow should have ended: {expiries:?}");
    };
    assert_eq!(
        (expiry.src, expiry.rule.as_deref()),
        (first.name, Some("first"))
    );
    assert!(expiry.idle >= millis(1000) && expiry.idle < millis(1000) + lateness() + SCHEDULING);

    // After the policy is read again, a flow lives for a minute.
    file.write(&policy("second", "60s"))?;
    let pid = Pid::from_raw(twheel.pid().try_into()?);
    kill(pid, Signal::SIGHUP)?;
    twheel.await_stderr(": in force; 0 live flows: no change")?;
    let second = pair.connect(Family::V6)?;
    assert_eq!(
        twheel.expiries_until(Instant::now() + millis(1500))?.len(),
        0
    );

    // An invalid policy changes nothing, whether the run or another process loads it.
    file.write(&policy("second", "soon"))?;
    kill(pid, Signal::SIGHUP)?;
    let stderr = twheel.await_stderr("the old policy stays in force")?;
    assert!(stderr.contains(&format!("{}:6:", file.path())), "{stderr}");
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(2), "{}", ended.stderr);
    assert_eq!(
        twheel.expiries_until(Instant::now() + millis(300))?.len(),
        0
    );

    // Loaded beside the run, by another process.
    file.write(&policy("third", "500ms"))?;
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    let said = "in force; 1 live flow: 1 changed its rule, 1 is due now";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    let expiries = twheel.ends_within(millis(500), 1)?;
    let [expiry] = expiries.as_slice() else {
        anyhow::bail!("one flow should have ended: {expiries:?}");
    };
    // It was idle for longer than the timeout of the rule that it has now.
    assert_eq!(
        (expiry.src, expiry.rule.as_deref()),
        (second.name, Some("third"))
    );
    let third = pair.connect(Family::V4)?;
    let expiries = twheel.ends_within(millis(1000), 1)?;
    let [expiry] = expiries.as_slice() else {
        anyhow::bail!("one flow should have ended: {expiries:?}");
    };
    assert_eq!(
        (expiry.src, expiry.rule.as_deref()),
        (third.name, Some("third"))
    );

    // A rule that keeps its name gives its flows its new timeouts.
    file.write(&policy("third", "60s"))?;
    let loaded = pair.server.twheel_once(&load)?;
    assert_eq!(loaded.code(), Some(0), "{}", loaded.stderr);
    let fourth = pair.connect(Family::V6)?;
    thread::sleep(millis(700));
    file.write(&policy("third", "500ms"))?;
    let loaded = pair.server.twheel_once(&load)?;
    assert_eq!(loaded.code(), Some(0), "{}", loaded.stderr);
    let expiries = twheel.ends_within(millis(400), 1)?;
    assert_eq!(names(by_name(&expiries)?.keys()), [fourth.name]);
    drop(second);

    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(
        ended.code(),
        Some(6),
        "no instance to load it into: {}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)
}

#[test]
fn a_flush_deletes_all_flows_and_says_so() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let flush = ["flush", "--iface", SERVER];
    let ended = pair.server.twheel_once(&flush)?;
    assert_eq!(ended.code(), Some(6), "nothing to flush: {}", ended.stderr);
    let args = ["--iface", SERVER, "--json", "--accounting"];
    let twheel = Twheel::start(&pair.server, &args)?;
    let connections = (0..300)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect::<Result<Vec<_>>>()?;
    let ended = pair.server.twheel_once(&flush)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("300 flows deleted"),
        "{}",
        ended.stderr
    );
    let expiries = twheel.ends_within(millis(500), connections.len())?;
    let found = by_name(&expiries)?;
    assert_eq!(
        names(found.keys()),
        names(connections.iter().map(|it| &it.name))
    );
    for expiry in found.values() {
        assert_eq!(
            (&*expiry.reason, &*expiry.state),
            ("flushed", "established")
        );
    }
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("300 flows ended, 0 live"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("flushed in established"),
        "{}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)
}

#[test]
fn an_idle_host_is_left_alone() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(
        &pair.server,
        &["--iface", SERVER, "--timeout", "500ms", "--json"],
    )?;
    let asleep = twheel.switches()?;
    let _connections = pair.connect_some(2)?;
    let expiries = twheel.ends_within(millis(1500), 2)?;
    assert_eq!(expiries.len(), 2, "{expiries:?}");

    let before = twheel.switches()?;
    assert_ne!(before, asleep, "this test does not notice threads that run");
    thread::sleep(millis(3000));
    assert_eq!(twheel.switches()?, before, "a thread has run");
    Ok(())
}

#[test]
fn a_reader_that_goes_away_ends_the_run() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let mut command = pair
        .server
        .twheel(&["run", "--iface", SERVER, "--timeout", "300ms"])?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stderr = BufReader::new(child.stderr.take().context("no stderr")?);
    let mut text = String::new();
    while !text.contains(": attached") && stderr.read_line(&mut text)? > 0 {}
    drop(child.stdout.take());
    let connections = pair.connect_some(2)?;

    let Some(status) = wait_within(&mut child, PATIENCE)? else {
        panic!("twheel keeps running without a reader: {text}");
    };
    while stderr.read_line(&mut text)? > 0 {}
    assert_eq!(status.code(), Some(0), "{text}");
    drop(connections);
    pair.server.check_clean(SERVER)
}
