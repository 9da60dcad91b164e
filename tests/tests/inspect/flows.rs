//! What `twheel flows` lists.

use std::{collections::BTreeSet, net::SocketAddr, thread, time::Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::{PATIENCE, require_root},
    pair::{Family, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::{lines, millis, names, objects, sources, src};

#[test]
fn flows_are_listed_with_what_they_are_and_how_long_they_have_left() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--accounting",
        "--keep",
        "--timeout",
        "60s",
    ];
    let twheel = Twheel::start(&pair.server, &args)?;
    let old = pair.connect_some(5)?;
    thread::sleep(millis(5000));
    let mut young = pair.connect_some(5)?;
    let begun = Instant::now();
    let half_open = pair.half_open(Family::V4)?;
    let closed = pair.connect(Family::V6)?;
    let closed_name = closed.name;
    closed.close()?;

    for loader in [true, false] {
        let all = objects(&pair.server, &["flows", "--json"])?;
        let mut expected: BTreeSet<_> = names(&old).union(&names(&young)).copied().collect();
        expected.extend([half_open, closed_name]);
        assert_eq!(sources(&all)?, expected);
        assert_eq!(all.len(), 12, "not each flow once");
        for flow in &all {
            let number = |key: &str| flow[key].as_u64().with_context(|| format!("no {key}"));
            let state = flow["state"].as_str().context("no state")?;
            let timeout = match src(flow)? {
                it if it == half_open => (assert_eq!(state, "syn_sent"), 60_000_000).1,
                it if it == closed_name => (assert_eq!(state, "time_wait"), 60_000_000).1,
                _ => (assert_eq!(state, "established"), 60_000_000).1,
            };
            // Rounded up to clock units, of 10 ms at most, plus one.
            let sum = number("idle_us")? + number("expires_us")?;
            assert!((timeout..=timeout + 20_000).contains(&sum), "{flow}");
            assert!(number("age_us")? >= number("idle_us")?, "{flow}");
            assert_eq!(flow["proto"], "tcp");
            assert_eq!(flow["rule"], Value::Null);
            assert_eq!(flow["picked_up"], false);
            assert_eq!(u16::try_from(number("dport")?)?, PORT);
            if state == "established" {
                assert!(number("orig_packets")? >= 2, "{flow}");
                assert!(number("reply_bytes")? > 0, "{flow}");
            }
        }

        let of = |filter: &[&str]| -> Result<BTreeSet<SocketAddr>> {
            let args = [&["flows", "--json"], filter].concat();
            sources(&objects(&pair.server, &args)?)
        };
        // Longer than the young ones are, even if this command takes seconds.
        let idle = begun.elapsed() + millis(4000);
        let long = format!("{}ms", idle.as_millis());
        let silent = format!("state == established and idle > {long} and age > {long}");
        assert_eq!(of(&[&silent])?.len(), 5);
        assert_eq!(
            of(&["state", "==", "syn_sent"])?,
            BTreeSet::from([half_open])
        );
        let port = young[0].name.port();
        assert_eq!(
            of(&[&format!(
                "sport == {port} and src == {}",
                young[0].name.ip()
            )])?,
            BTreeSet::from([young[0].name])
        );
        assert_eq!(
            of(&["src in fd00::/8"])?.len(),
            expected.iter().filter(|it| it.is_ipv6()).count()
        );

        // Sorted, and limited to the first of them.
        let sorted = objects(
            &pair.server,
            &[
                "flows", "--json", "--sort", "idle", "--limit", "5", "--iface", SERVER,
            ],
        )?;
        assert_eq!(
            sources(&sorted)?,
            names(&old),
            "not those that were idle longest"
        );
        let idle: Vec<_> = sorted.iter().map(|it| it["idle_us"].as_u64()).collect();
        assert!(idle.is_sorted_by(|a, b| a >= b), "{idle:?}");
        let reversed = objects(
            &pair.server,
            &["flows", "--json", "--sort", "idle", "--reverse"],
        )?;
        let idle: Vec<_> = reversed.iter().map(|it| it["idle_us"].as_u64()).collect();
        assert!(idle.is_sorted(), "{idle:?}");

        // The same as a table.
        let table = lines(&pair.server, &["flows"])?;
        assert_eq!(table.len(), 13, "{table:?}");
        for column in [
            "PROTO", "STATE", "SRC", "DST", "IDLE", "EXPIRES", "AGE", "PACKETS",
        ] {
            assert!(table[0].contains(column), "{}", table[0]);
        }
        for name in &expected {
            let found = table
                .iter()
                .filter(|line| line.contains(&format!("{name} ")));
            assert_eq!(found.count(), 1, "{name} in {table:#?}");
        }
        assert!(table.iter().all(|line| !line.contains('\x1b')), "{table:?}");

        let stats = lines(&pair.server, &["stats"])?;
        let head = if loader {
            "; twheel run is running"
        } else {
            "; twheel run is not running"
        };
        assert!(
            stats[0].starts_with("12 flows of at most 131072; tick 100ms"),
            "{}",
            stats[0]
        );
        assert!(stats[0].contains(head), "{}", stats[0]);
        if loader {
            // The pins can still be read.
            for connection in &mut young {
                connection.talk()?;
            }
            thread::sleep(millis(1100));
            break_off(&twheel)?;
        }
    }
    assert_eq!(
        pair.server
            .twheel_once(&["detach", "--iface", SERVER])?
            .code(),
        Some(0)
    );
    drop(twheel);
    pair.server.check_clean(SERVER)
}

/// Kills the run with SIGKILL, and waits until it is dead.
fn break_off(twheel: &Twheel) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(twheel.pid() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
    let end = Instant::now() + PATIENCE;
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // Nobody has waited for it yet.
        if stat
            .rsplit(") ")
            .next()
            .is_some_and(|it| it.starts_with('Z'))
        {
            return Ok(());
        }
        ensure!(Instant::now() < end, "it is not dead: {stat}");
        thread::sleep(millis(5));
    }
}
