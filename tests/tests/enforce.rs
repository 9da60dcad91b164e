//! Packets of a flow that has expired, between two hosts: what becomes of the connection.
#![allow(missing_docs)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use twheel_common::{
    enforce::Tomb,
    flow::{Direction, FlowKey},
};
use twheel_tests::netns::{
    CLIENT, Connection, Family, Namespace, PATIENCE, Pair, SERVER, Twheel, require_root,
};

/// How the program runs, and what the client's end of a veth pair must have so that an answer gets there.
struct Way {
    mode: &'static str,
    receives: fn(&Pair) -> Result<Option<Twheel>>,
}

const GENERIC: Way = Way {
    mode: "generic",
    receives: |_| Ok(None),
};
/// What a program of one end sends back the other takes only if it has a program, too.
const NATIVE: Way = Way {
    mode: "native",
    receives: |pair| {
        Twheel::start(&pair.client, &["--iface", CLIENT, "--mode", "native"]).map(Some)
    },
};

fn refusing(server: &Namespace, mode: &str) -> Result<Twheel> {
    Twheel::start(
        server,
        &[
            "--iface",
            SERVER,
            "--mode",
            mode,
            "--timeout",
            "2s",
            "--i-know-this-drops-traffic",
            "--json",
        ],
    )
}

/// Waits until the connection's flow has expired, and says what becomes of its packets, as userspace does.
fn expire(
    server: &Namespace,
    twheel: &Twheel,
    connection: &Connection,
    family: Family,
    verdict: u32,
) -> Result<()> {
    let line = twheel.line(PATIENCE)?.context("nothing has expired")?;
    let expiry = line.expiry()?;
    ensure!(expiry.src == connection.name, "another has expired");
    let [instance] = &server.instances()?[..] else {
        anyhow::bail!("not one instance");
    };
    let map = MapData::from_pin(instance.join("EXPIRED"))?;
    let mut tombs = HashMap::<_, FlowKey, Tomb>::try_from(Map::LruHashMap(map))?;
    let end = |address: std::net::IpAddr| {
        let octets = match address {
            std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(address) => address.octets(),
        };
        let (words, _) = octets.as_chunks();
        [u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])]
    };
    let (key, _) = FlowKey::new(
        end(family.client()),
        expiry.src.port().to_be(),
        end(family.server()),
        expiry.dst.port().to_be(),
        6,
    );
    ensure!(
        [Direction::FromLow, Direction::FromHigh]
            .iter()
            .any(|it| key.sender(*it) == connection.name),
        "another key"
    );
    tombs.insert(key, Tomb::new(verdict), 0)?;
    Ok(())
}

fn counted(server: &Namespace, counter: &str) -> Result<u64> {
    let ended = server.twheel_once(&["stats", "--json"])?;
    for line in &ended.lines {
        let value: serde_json::Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            return value["total"].as_u64().context("no total");
        }
    }
    anyhow::bail!("no {counter}")
}

fn a_reset_comes(way: &Way) -> Result<()> {
    let pair = Pair::new()?;
    let _peer = (way.receives)(&pair)?;
    for family in [Family::V4, Family::V6] {
        let twheel = refusing(&pair.server, way.mode)?;
        let mut connection = pair.connect(family)?;
        connection.talk()?;
        expire(&pair.server, &twheel, &connection, family, Tomb::RESET)?;
        connection.expect_reset()?;
        ensure!(counted(&pair.server, "enforced_reset")? >= 1, "not counted");
        // The next connection is none of this.
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
    let pair = Pair::new()?;
    for (family, mode) in [(Family::V4, "native"), (Family::V6, "generic")] {
        let twheel = refusing(&pair.server, mode)?;
        let mut connection = pair.connect(family)?;
        connection.talk()?;
        expire(&pair.server, &twheel, &connection, family, Tomb::DROP)?;
        ensure!(
            connection.unacknowledged(Duration::from_secs(1))? > 0,
            "acknowledged"
        );
        ensure!(
            counted(&pair.server, "enforced_dropped")? >= 1,
            "not counted"
        );
        twheel.stop()?;
    }
    Ok(())
}

#[test]
fn what_refuses_is_adopted_by_what_refuses() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = refusing(&pair.server, "generic")?;
    let mut connection = pair.connect(Family::V4)?;
    connection.talk()?;
    expire(&pair.server, &twheel, &connection, Family::V4, Tomb::RESET)?;
    twheel.kill()?;
    let run = ["run", "--iface", SERVER, "--mode", "generic"];
    let ended = pair.server.twheel_once(&run)?;
    ensure!(
        ended.code() == Some(6) && ended.stderr.contains(" --reap enforce, not "),
        "{ended:?}"
    );
    // What was buried is refused without a loader, and by the next one.
    connection.expect_reset()?;
    let twheel = refusing(&pair.server, "auto")?;
    twheel.await_stderr("adopted")?;
    ensure!(
        counted(&pair.server, "enforced_reset")? >= 1,
        "the counters are gone"
    );
    twheel.stop()?;
    Ok(())
}
