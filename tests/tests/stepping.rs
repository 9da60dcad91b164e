//! Both ways of running the programs that are not attached: the stepper, and those that delete and
//! sweep.

use std::{
    collections::BTreeSet,
    fs::File,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};
use twheel_common::config::LAYOUT;
use twheel_tests::{
    netns::require_root,
    pair::{Family, Pair, SERVER},
    running::{PolicyFile, Twheel},
};

/// More than one call deletes.
const CONNECTIONS: usize = 150;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// How the wheels of a pair's server are stepped, according to `stats`.
fn way(pair: &Pair) -> Result<String> {
    let stats = pair.server.twheel_once(&["stats", "--iface", SERVER])?;
    assert_eq!(stats.code(), Some(0), "{}", stats.stderr);
    let lines = stats.lines.iter().map(|line| line.text.as_str());
    let way = lines
        .filter_map(|line| line.strip_prefix("stepped by "))
        .next();
    Ok(way.context("stats does not name the way")?.to_owned())
}

#[test]
fn doctor_and_stats_name_the_way_that_a_run_takes() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let way = way(&pair)?;
    let doctor = pair.server.twheel_once(&["doctor", "--iface", SERVER])?;
    let lines: Vec<_> = doctor.lines.iter().map(|line| line.text.as_str()).collect();
    let said = lines.iter().find(|line| line.contains("stepping"));
    let said = said.with_context(|| format!("{lines:?}"))?;
    assert!(said.contains(&way), "{said}: {way}");
    twheel.stop()?;
    Ok(())
}

/// As on a kernel that supports only live frames: flows expire, are flushed, follow a policy, and
/// are adopted.
#[test]
fn live_frames_do_what_test_runs_do() -> Result<()> {
    require_root();
    let args = [
        "--iface",
        SERVER,
        "--stepping",
        "live-frames",
        "--timeout",
        "30s",
        "--json",
        "--keep",
    ];
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &args)?;
    assert_eq!(way(&pair)?, "live frames");
    let mut first = pair.connect(Family::V4)?;
    first.talk()?;

    // A policy shortens the flow's timeout, which takes a sweep and then a step.
    let policy = PolicyFile::new(
        "stepping",
        "[[rule]]\nname = \"all\"\ndport = 7777\ntimeouts = { established = \"1s\" }\n",
    )?;
    let load = ["policy", "load", policy.path(), "--iface", SERVER];
    let loaded = pair.server.twheel_once(&load)?;
    assert_eq!(loaded.code(), Some(0), "{}", loaded.stderr);
    let mut second = pair.connect(Family::V6)?;
    second.talk()?;
    let expiries = twheel.ends_within(millis(2500), 1)?;
    let found: Vec<_> = expiries.iter().map(|it| (it.src, &*it.reason)).collect();
    assert!(found.contains(&(second.name, "idle")), "{found:?}");
    policy
        .write("[[rule]]\nname = \"all\"\ndport = 7777\ntimeouts = { established = \"30s\" }\n")?;
    let loaded = pair.server.twheel_once(&load)?;
    assert_eq!(loaded.code(), Some(0), "{}", loaded.stderr);

    // Adopted by a run with the same way, and deleted in several calls.
    let ended = twheel.kill()?;
    assert_eq!(ended.signal(), Some(9));
    let twheel = Twheel::start(&pair.server, &args)?;
    twheel.await_stderr("adopted")?;
    let connections = (0..CONNECTIONS)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect::<Result<Vec<_>>>()?;
    thread::sleep(millis(200));
    let flushed = pair.server.twheel_once(&["flush", "--iface", SERVER])?;
    assert_eq!(flushed.code(), Some(0), "{}", flushed.stderr);
    let mut gone = BTreeSet::new();
    while connections.iter().any(|it| !gone.contains(&it.name)) {
        let ends = twheel.ends(1)?.into_iter();
        gone.extend(ends.filter(|it| it.reason == "flushed").map(|it| it.src));
    }
    twheel.stop()?;
    let detached = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
    pair.server.check_clean(SERVER)
}

/// If the kernel, or an option, has changed how the programs are run, the next run still adopts.
#[test]
fn a_run_adopts_what_was_stepped_in_another_way() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let live = ["--stepping", "live-frames"];
    let mut connection = pair.connect(Family::V4)?;
    let usual = {
        let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
        let way = way(&pair)?;
        twheel.stop()?;
        way
    };
    for (first, options) in [(true, [&live[..], &[]]), (false, [&[], &live[..]])] {
        for (run, options) in options.into_iter().enumerate() {
            let mut args = vec!["--iface", SERVER, "--keep", "--json"];
            args.extend(options);
            let twheel = Twheel::start(&pair.server, &args)?;
            let is_live = !options.is_empty();
            assert_eq!(is_live, first == (run == 0));
            let wanted = if is_live { "live frames" } else { &usual };
            assert_eq!(way(&pair)?, wanted, "run {run}");
            connection.talk()?;
            // The clock is read, the wheel is stepped, and flows are deleted.
            thread::sleep(millis(50));
            let flush = ["flush", "--iface", SERVER, "--json"];
            let flushed = pair.server.twheel_once(&flush)?;
            assert_eq!(flushed.code(), Some(0), "{}", flushed.stderr);
            let line = &flushed.lines[0].text;
            assert!(line.ends_with(r#","deleted":1,"stayed":0}"#), "{line}");
            if run == 0 {
                twheel.kill()?;
            } else {
                twheel.stop()?;
            }
        }
        let detach = ["detach", "--iface", SERVER];
        let detached = pair.server.twheel_once(&detach)?;
        assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
        pair.server.check_clean(SERVER)?;
    }
    Ok(())
}

/// The programs that commands call are replaced while commands call them.
#[test]
fn commands_are_answered_while_a_run_changes_the_way() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let mut connection = pair.connect(Family::V4)?;
    let args = ["--iface", SERVER, "--keep"];
    let live = [&args[..], &["--stepping", "live-frames"]].concat();
    let twheel = Twheel::start(&pair.server, &live)?;
    connection.talk()?;
    twheel.kill()?;
    for args in [&args[..], &live] {
        let starts = AtomicBool::new(true);
        let twheel = thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let mut asked = 0;
                // At least four, also if the start is over sooner.
                while starts.load(Relaxed) || asked < 4 {
                    let flows = pair.server.twheel_once(&["flows", "--json"])?;
                    ensure!(flows.code() == Some(0), "after {asked}: {}", flows.stderr);
                    ensure!(flows.lines.len() == 1, "after {asked}: {:?}", flows.lines);
                    asked += 1;
                }
                Ok(())
            });
            let twheel = Twheel::start(&pair.server, args);
            starts.store(false, Relaxed);
            asked.join().expect("the thread panicked")?;
            twheel
        })?;
        twheel.kill()?;
    }
    let detached = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
    pair.server.check_clean(SERVER)
}

/// A run that adopts goes on stepping the wheels while it loads, with the program of the run before.
/// Here it cannot go on loading, because a policy is locked.
#[test]
fn a_restart_steps_the_wheels_before_it_has_loaded() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let timeout = ["--timeout", "700ms", "--tick", "20ms"];
    let args = [&["--iface", SERVER, "--keep", "--json"][..], &timeout].concat();
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, 50)?;
    twheel.kill()?;

    let pins = File::open(format!("/sys/fs/bpf/twheel/v{LAYOUT}"))?;
    let locked = Flock::lock(pins, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
    let loaded = AtomicBool::new(false);
    let twheel = thread::scope(|scope| {
        let stepped = scope.spawn(|| {
            // Unlocks when it ends, so that the start does.
            let _locked = locked;
            let end = Instant::now() + millis(8000);
            while pair.server.counter("expired")? < 50 {
                ensure!(Instant::now() < end, "no wheel is stepped");
                thread::sleep(millis(20));
            }
            ensure!(!loaded.load(Relaxed), "it has loaded, in spite of the lock");
            Ok(())
        });
        // Here: a twheel ends with the thread that has started it.
        let twheel = Twheel::start(&pair.server, &args)?;
        loaded.store(true, Relaxed);
        stepped.join().expect("the thread panicked")?;
        anyhow::Ok(twheel)
    })?;
    let expired = twheel.ends_within(millis(500), 50)?;
    assert_eq!(expired.len(), 50);
    twheel.stop()?;
    let detached = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
    pair.server.check_clean(SERVER)
}

/// The messages of a start, each with the time since its process began; and when it had attached.
fn start(pair: &Pair, more: &[&str]) -> Result<(Vec<(Duration, String)>, Duration)> {
    let (to_lines, lines) = channel();
    let begun = Instant::now();
    let args = [&["--iface", SERVER], more].concat();
    let twheel = Twheel::start_with(&pair.server, &args, move |line| {
        let _ = to_lines.send((begun.elapsed(), line.to_owned()));
    })?;
    let attached = begun.elapsed();
    twheel.stop()?;
    Ok((lines.try_iter().collect(), attached))
}

#[test]
fn a_start_says_that_it_loads_and_is_attached_in_half_a_second() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let mut took = Vec::new();
    for _ in 0..5 {
        took.push(start(&pair, &[])?.1);
    }
    took.sort();
    println!("attached after {took:?}");
    assert!(took[2] <= millis(500), "{took:?}");

    // This table takes longer to create.
    let mut said = Vec::new();
    for _ in 0..3 {
        let (lines, attached) = start(&pair, &["--max-flows", "4000000"])?;
        let line = lines.iter().find(|(_, line)| line.contains("loading"));
        said.push(line.with_context(|| format!("{lines:?}, {attached:?}"))?.0);
    }
    said.sort();
    println!("said that it loads after {said:?}");
    assert!(said[1] <= millis(200), "{said:?}");
    Ok(())
}
