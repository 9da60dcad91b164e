//! What options and rules request, protect and refuse.

use std::{
    io::ErrorKind,
    net::{TcpListener, TcpStream},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{Connection, Family, PORT, Pair, SERVER},
    running::PolicyFile,
};

use crate::{Said, actions, count, events, is_open, is_reset, millis, read_error, run_on, summed};

#[test]
fn a_dry_run_says_what_and_why_and_does_nothing() -> Result<()> {
    require_root();
    let file = PolicyFile::new(
        "dry",
        &format!("[[rule]]\nname = 'web'\ndport = {PORT}\nreap = ['socket', 'reset']\n"),
    )?;
    let pair = Pair::new()?;
    let options = "--timeout 500ms --dry-run --policy";
    let twheel = run_on(&pair, options, &[file.path()])?;
    let connection = pair.connect(Family::V4)?;
    let said = actions(&twheel, 2, millis(3000))?;
    let reaps: Vec<_> = said.iter().filter(|it| it.is("reap")).collect();
    assert_eq!(reaps.len(), 2);
    for (reap, action) in reaps.iter().zip(["reset", "socket"]) {
        assert_eq!(reap.src(), connection.name);
        for (key, value) in [
            ("action", action),
            ("outcome", "would"),
            ("rule", "web"),
            ("reason", "idle"),
            ("state", "established"),
        ] {
            assert_eq!(reap.text(key), value, "{reap:?}");
        }
        assert!(reap.value["error"].is_null() && reap.value["idle_us"].as_u64() >= Some(500_000));
    }
    assert!(is_open(&connection.server) && is_open(&connection.client));
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_is_protected_is_left_alone() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let protect = format!("src == {}", Family::V4.client());
    let protect = ["--protect", &protect, "--protect", "dport == 22"];
    let twheel = run_on(&pair, "--timeout 500ms --reap socket", &protect)?;
    let mut connections = pair.connect_some(2)?;
    let said = actions(&twheel, 2, millis(3000))?;
    let outcomes = ["protected", "done"].map(|outcome| count(&said, "socket", outcome));
    assert_eq!(outcomes, [1, 1], "{said:?}");
    connections[0].talk()?;
    assert_eq!(
        read_error(&mut connections[1].server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

#[test]
fn actions_keep_their_rate_and_ctrl_c_does_not_wait_for_them() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let options = "--timeout 500ms --reap socket --reap-max-share 100 --reap-rate 20";
    let twheel = run_on(&pair, options, &[])?;
    let connections = pair.connect_some(100)?;
    let said = actions(&twheel, 60, millis(6000))?;
    let times: Vec<_> = said
        .iter()
        .filter(|it| it.is("reap"))
        .map(|it| it.at)
        .collect();
    assert_eq!(times.len(), 60);
    // One action per 50 ms; up to two that were missed are made up for.
    for (number, time) in times.iter().enumerate() {
        let least = millis(50) * (number as u32).saturating_sub(2);
        assert!(
            *time - times[0] + millis(20) >= least,
            "{number} after {:?}",
            *time - times[0]
        );
    }
    assert!(
        times[59] - times[0] < millis(3600),
        "{:?}",
        times[59] - times[0]
    );
    println!("60 actions in {:?}", times[59] - times[0]);

    let begun = Instant::now();
    let ended = twheel.stop()?;
    assert!(begun.elapsed() < millis(1000), "{:?}", begun.elapsed());
    let done = summed(&ended, "socket: done");
    let rest = summed(
        &ended,
        "socket: not done: the reaper's queue was full, or the run ended first",
    );
    assert_eq!(done + rest, 100, "{}", ended.stderr);
    assert!((60..65).contains(&done), "{}", ended.stderr);
    assert_eq!(
        connections.iter().filter(|it| is_open(&it.server)).count(),
        rest
    );
    Ok(())
}

#[test]
fn what_came_back_to_a_full_table_is_not_taken_for_gone() -> Result<()> {
    require_root();
    const IDLE: usize = 10;
    const ROOM: usize = 40;
    let pair = Pair::new()?;
    let table = format!("--timeout 2s --tick 50ms --max-flows {ROOM}");
    let reap = "--reap socket --reap-max-share 100 --reap-rate 1";
    let twheel = run_on(&pair, &format!("{table} {reap}"), &[])?;
    let mut idle = pair.connect_some(IDLE)?;
    // The first action is done; the others wait for their turn, one a second.
    let said = actions(&twheel, 1, millis(6000))?;
    assert_eq!(count(&said, "socket", "done"), 1);
    // Other flows take all the capacity, and keep it.
    let mut others = pair.connect_some(ROOM + 10)?;
    others.iter_mut().try_for_each(Connection::talk)?;
    let busy = twheel_tests::pair::Busy::start(others, millis(200));
    let alive: Vec<_> = idle
        .iter_mut()
        .map(|connection| connection.talk().is_ok())
        .collect();
    let alive_then = alive.iter().filter(|it| **it).count();
    assert!(alive_then >= IDLE - 2, "{alive:?}");
    let said = actions(&twheel, IDLE - 1, millis(15_000))?;
    let kept = count(&said, "socket", "unknown") + count(&said, "socket", "back");
    assert!(kept >= alive_then, "{kept} of {alive_then}");
    assert!(
        count(&said, "socket", "unknown") > 0,
        "the table was not full"
    );
    for (connection, alive) in idle.iter_mut().zip(alive) {
        assert!(
            !alive || connection.talk().is_ok(),
            "a connection that talked was closed"
        );
    }
    busy.stop()?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

#[test]
fn what_the_policy_asks_for_no_more_is_not_done() -> Result<()> {
    require_root();
    // One action a second, so that most are waiting when the policy comes.
    const CONNECTIONS: usize = 20;
    let pair = Pair::new()?;
    let asks = PolicyFile::new("asks", "reap = [\"socket\"]\n")?;
    let asks_not = PolicyFile::new("asks-not", "reap = []\n")?;
    let options = "--timeout 500ms --reap-max-share 100 --reap-rate 1 --policy";
    let twheel = run_on(&pair, options, &[asks.path()])?;
    let connections = pair.connect_some(CONNECTIONS)?;
    let mut said = actions(&twheel, 1, millis(6000))?;
    assert_eq!(count(&said, "socket", "done"), 1);
    // Flows that expire under the new policy would not be reaped in the first place, so wait for
    // all expiries.
    let expired = |said: &[Said]| said.iter().filter(|it| it.is("end")).count();
    let rest = CONNECTIONS - expired(&said);
    said.extend(events(&twheel, "end", rest, PATIENCE)?);
    assert_eq!(expired(&said), CONNECTIONS, "not all flows have expired");
    let load = ["policy", "load", asks_not.path(), "--iface", SERVER];
    assert_eq!(pair.server.twheel_once(&load)?.code(), Some(0));
    let early = said.iter().filter(|it| it.is("reap")).count();
    said.extend(actions(&twheel, CONNECTIONS - early, PATIENCE)?);
    let mut outcomes = said.iter().filter(|it| it.is("reap"));
    let revoked = |it: &Said| it.text("outcome") == "revoked";
    let done = outcomes.by_ref().take_while(|it| !revoked(it)).count();
    assert!(done < CONNECTIONS / 2, "{done} actions were done meanwhile");
    assert!(outcomes.all(revoked), "{said:?}");
    let open = connections.iter().filter(|it| is_open(&it.server)).count();
    assert_eq!(open, count(&said, "socket", "revoked"), "{said:?}");
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

#[test]
fn rules_say_what_is_done_to_their_flows() -> Result<()> {
    require_root();
    let file = PolicyFile::new(
        "rules",
        &format!(
            "[[rule]]\nname = 'kept'\nsrc = '{}'\nreap = []\n[[rule]]\nname = 'reset'\ndport = {PORT}\nreap = ['reset']\n",
            Family::V4.client()
        ),
    )?;
    let pair = Pair::new()?;
    let options = "--timeout 500ms --reap socket --policy";
    let twheel = run_on(&pair, options, &[file.path()])?;
    let mut connections = pair.connect_some(2)?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind((Family::V6.server(), PORT + 2))?))?;
    let mut other = Connection::open(&pair.client, &listener)?;
    let said = actions(&twheel, 3, millis(1500))?;
    assert_eq!(said.iter().filter(|it| it.is("end")).count(), 3);
    let done = ["reset", "socket"].map(|action| count(&said, action, "done"));
    assert_eq!(done, [1, 1], "{said:?}");
    assert_eq!(said.iter().filter(|it| it.is("reap")).count(), 2);
    connections[0].talk()?;
    is_reset(&mut connections[1])?;
    assert_eq!(
        read_error(&mut other.server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

/// The rule that protects a connection gets another name, and a timeout that has passed.
#[test]
fn a_renamed_rule_still_protects() -> Result<()> {
    require_root();
    let policy = |name: &str, timeout: &str| {
        format!(
            "reap = ['socket']\n[[rule]]\nname = '{name}'\ndport = {PORT}\nreap = []\n\
             timeouts = {{ established = '{timeout}' }}\n"
        )
    };
    let file = PolicyFile::new("renamed", &policy("kept", "1h"))?;
    let pair = Pair::new()?;
    let options = "--timeout 300ms --reap-max-share 100 --policy";
    let twheel = run_on(&pair, options, &[file.path()])?;
    let mut connections = pair.connect_some(20)?;
    thread::sleep(millis(700));
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let loaded = |text: &str, said: &str| -> Result<()> {
        file.write(text)?;
        let ended = pair.server.twheel_once(&load)?;
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        Ok(())
    };
    loaded(
        &policy("renamed", "500ms"),
        "20 live flows: 20 changed their rule, 20 are due now",
    )?;
    let said = events(&twheel, "end", 20, PATIENCE)?;
    assert!(said.iter().all(|it| it.text("rule") == "renamed"));
    assert_eq!(actions(&twheel, 1, millis(500))?.len(), 0);
    loaded(&policy("renamed", "1h"), "0 live flows: no change")?;
    connections.iter_mut().try_for_each(Connection::talk)?;
    // Without the rule the policy protects them no more, and says so.
    loaded(
        "reap = ['socket']\n",
        "20 live flows: 20 lost their rule, 20 may now be reaped",
    )?;
    let said = actions(&twheel, 20, PATIENCE)?;
    assert_eq!(count(&said, "socket", "done"), 20, "{said:?}");
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_attached() -> Result<()> {
    require_root();
    let host = Namespace::new("host")?;
    for (args, why) in [
        (
            &["--reap", "enforce"][..],
            "to confirm, add --i-know-this-drops-traffic",
        ),
        (
            &["--reap", "socket,enforce=reset"],
            "to confirm, add --i-know-this-drops-traffic",
        ),
        (
            &["--reap", "socket", "--pickup", "strict"],
            "--reap with --pickup strict",
        ),
        (
            &["--reap", "socket", "--reap-netns", "there-is-none"],
            "--reap-netns there-is-none: not a network namespace",
        ),
        (&["--reap", "sockets"], "unknown action `sockets`"),
        (&["--reap", "socket", "--protect", "prot == 1"], "prot"),
        (&["--reap", "socket", "--protect", ""], "give a filter"),
    ] {
        let mut all = vec!["run", "--iface", "lo"];
        all.extend(args);
        let ended = host.twheel_once(&all)?;
        assert_eq!(ended.code(), Some(2), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(why), "{args:?}: {}", ended.stderr);
        host.check_clean("lo")?;
    }
    Ok(())
}

#[test]
fn a_policy_enforces_only_where_that_was_confirmed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let file = PolicyFile::new(
        "enforce",
        &format!("[[rule]]\nname = 'web'\ndport = {PORT}\nreap = ['enforce=reset']\n"),
    )?;
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let twheel = run_on(&pair, "--timeout 500ms", &[])?;
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("--i-know-this-drops-traffic"),
        "{}",
        ended.stderr
    );
    twheel.stop()?;
    let options = "--timeout 500ms --mode generic --i-know-this-drops-traffic";
    let twheel = run_on(&pair, options, &[])?;
    assert_eq!(pair.server.twheel_once(&load)?.code(), Some(0));
    let mut connection = pair.connect(Family::V4)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "enforce=reset", "done"), 1, "{said:?}");
    connection.expect_reset()?;
    // A new connection with the same endpoints.
    let name = connection.client.local_addr()?;
    drop(connection);
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind((Family::V4.server(), PORT + 2))?))?;
    drop(listener);
    let again = pair.client.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(name)?;
            let connecting = socket.connect((Family::V4.server(), PORT).into());
            Ok(tokio::time::timeout(PATIENCE, connecting)
                .await??
                .into_std()?)
        })
    });
    let again: TcpStream = again.context("the same name is refused")?;
    assert_eq!(again.local_addr()?, name);
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_fails_is_counted_with_its_reason() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = run_on(&pair, "--timeout 500ms --reap reset,socket", &[])?;
    let mut connection = pair.connect(Family::V4)?;
    pair.server
        .ip(&format!("route del 10.77.0.0/24 dev {SERVER}"))?;
    let said = actions(&twheel, 2, millis(3000))?;
    assert_eq!(count(&said, "reset", "failed"), 1, "{said:?}");
    let failed = said
        .iter()
        .find(|it| it.text("outcome") == "failed")
        .context("none")?;
    let error = failed.text("error");
    assert!(
        error.starts_with("cannot send a RST to 10.77.0.1:") && error.contains("unreachable"),
        "{error}"
    );
    // The other end is reset all the same.
    assert_eq!(
        read_error(&mut connection.server),
        Some(ErrorKind::ConnectionReset)
    );
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("1  reset: failed"),
        "{}",
        ended.stderr
    );

    // Requested by a policy, which is not checked against --pickup: each action fails and says so.
    let file = PolicyFile::new("strict", "reap = ['socket']\n")?;
    let options = "--timeout 500ms --pickup strict --policy";
    let twheel = run_on(&pair, options, &[file.path()])?;
    let connection = pair.connect(Family::V6)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "failed"), 1, "{said:?}");
    assert!(
        said.iter()
            .any(|it| it.text("error").contains("--pickup strict")),
        "{said:?}"
    );
    assert!(is_open(&connection.server));
    twheel.stop()?;
    Ok(())
}
