//! What happens to the connection between two hosts when packets of its expired flow are refused.
#![allow(missing_docs)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{CLIENT, Connection, Family, Pair, SERVER},
    running::Twheel,
};

/// How the program is attached, and what the client's end of the veth pair needs to receive an
/// answer.
struct Way {
    mode: &'static str,
    receives: fn(&Pair) -> Result<Option<Twheel>>,
}

const GENERIC: Way = Way {
    mode: "generic",
    receives: |_| Ok(None),
};
/// In native mode, what a program sends back at one end of a veth pair arrives only if the other
/// end has a program, too.
const NATIVE: Way = Way {
    mode: "native",
    receives: |pair| {
        Twheel::start(&pair.client, &["--iface", CLIENT, "--mode", "native"]).map(Some)
    },
};

const RESET: &str = "enforce=reset";

fn refusing(server: &Namespace, mode: &str, action: &str) -> Result<Twheel> {
    Twheel::start(
        server,
        &[
            "--iface",
            SERVER,
            "--mode",
            mode,
            "--timeout",
            "2s",
            "--reap",
            action,
            "--i-know-this-drops-traffic",
            "--json",
        ],
    )
}

/// Waits until the connection's flow has expired and its packets are refused.
fn expire(twheel: &Twheel, connection: &Connection) -> Result<()> {
    let line = twheel.line(PATIENCE)?.context("no flow has expired")?;
    ensure!(
        line.expiry()?.src == connection.name,
        "another flow has expired: {}",
        line.text
    );
    let line = twheel.line(PATIENCE)?.context("no action was reported")?;
    ensure!(line.text.contains(r#""outcome":"done""#), "{}", line.text);
    Ok(())
}

fn a_reset_comes(way: &Way) -> Result<()> {
    let pair = Pair::new()?;
    let _peer = (way.receives)(&pair)?;
    for family in [Family::V4, Family::V6] {
        let twheel = refusing(&pair.server, way.mode, RESET)?;
        let mut connection = pair.connect(family)?;
        connection.talk()?;
        expire(&twheel, &connection)?;
        connection.expect_reset()?;
        ensure!(
            pair.server.counter("enforced_reset")? >= 1,
            "the answers were not counted"
        );
        // The next connection is not affected.
        let mut next = pair.connect(family)?;
        next.talk()?;
        twheel.stop()?;
    }
    Ok(())
}

#[test]
fn the_peer_of_a_connection_that_has_expired_gets_a_reset_generic() -> Result<()> {
    require_root();
    a_reset_comes(&GENERIC)
}

#[test]
fn the_peer_of_a_connection_that_has_expired_gets_a_reset_native() -> Result<()> {
    require_root();
    a_reset_comes(&NATIVE)
}

#[test]
fn nothing_of_a_connection_that_has_expired_arrives() -> Result<()> {
    require_root();
    for (family, mode) in [(Family::V4, "native"), (Family::V6, "generic")] {
        // New hosts: otherwise packets of the first connection would disturb the second.
        let pair = Pair::new()?;
        let twheel = refusing(&pair.server, mode, "enforce=drop")?;
        let mut connection = pair.connect(family)?;
        connection.talk()?;
        expire(&twheel, &connection)?;
        ensure!(
            connection.unacknowledged(Duration::from_secs(1))? > 0,
            "acknowledged"
        );
        ensure!(
            pair.server.counter("enforced_dropped")? >= 1,
            "the drops were not counted"
        );
        twheel.stop()?;
    }
    Ok(())
}

#[test]
fn what_refuses_is_adopted_by_what_refuses() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = refusing(&pair.server, "generic", RESET)?;
    let mut connection = pair.connect(Family::V4)?;
    connection.talk()?;
    expire(&twheel, &connection)?;
    twheel.kill()?;
    let run = ["run", "--iface", SERVER, "--mode", "generic"];
    let ended = pair.server.twheel_once(&run)?;
    ensure!(
        ended.code() == Some(6) && ended.stderr.contains(" --i-know-this-drops-traffic, not "),
        "{ended:?}"
    );
    // Tombstones still refuse packets while no twheel is running, and under the next run.
    connection.expect_reset()?;
    let twheel = refusing(&pair.server, "auto", RESET)?;
    twheel.await_stderr("adopted")?;
    ensure!(
        pair.server.counter("enforced_reset")? >= 1,
        "the counters were lost"
    );
    twheel.stop()?;
    Ok(())
}
