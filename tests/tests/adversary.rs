//! What somebody can do who is not on the path of a connection, and sends packets with its addresses: nothing that ends it.
//!
//! A client and a server have a connection of real sockets. The attacker's packets come in by the interface by which the
//! client's do.
#![allow(missing_docs)]

use std::{
    io::{Read, Write},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use serde_json::Value;
use twheel_common::state::State;
use twheel_tests::{
    ctnetlink::Conntrack,
    forge::Forger,
    netns::{Connection, Family, Line, Pair, SERVER, Twheel, require_root},
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A SYN with an arbitrary number.
fn syn(forger: &Forger, from: SocketAddr, to: SocketAddr) -> Result<()> {
    let syn = TcpHeader {
        syn: true,
        sequence_number: 0x1234_5678,
        ..TcpHeader::default()
    };
    forger.send(from, to, syn)
}

/// Reads what a run says until it has reported what became of an action.
fn reaped(twheel: &Twheel, within: Duration) -> Result<Value> {
    let end = Instant::now() + within;
    while let Some(line) = twheel.line(end.saturating_duration_since(Instant::now()))? {
        let value: Value = serde_json::from_str(&line.text)?;
        if value["event"] == "reap" {
            return Ok(value);
        }
    }
    anyhow::bail!("nothing was reaped: {}", twheel.stderr())
}

/// Both ends have what the other sends.
fn talk(connection: &mut Connection) -> Result<()> {
    connection.talk().context("the client is not heard")?;
    connection.server.write_all(b"!")?;
    let mut byte = [0];
    connection
        .client
        .read_exact(&mut byte)
        .context("the server is not heard")
}

/// A run on the server that takes a SYN without an answer for over after a second, and a connection after an hour.
fn run(pair: &Pair, more: &[&str]) -> Result<Twheel> {
    let mut args = vec![
        "--iface",
        SERVER,
        "--json",
        "--tick",
        "50ms",
        "--timeout",
        "established=1h,syn_sent=1s",
        "--reap-max-share",
        "100",
    ];
    args.extend(more);
    Twheel::start(&pair.server, &args)
}

/// The states of the flows that are tracked.
fn states(pair: &Pair) -> Result<Vec<String>> {
    let ended = pair
        .server
        .twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    let state = |line: &Line| -> Result<String> {
        let flow: Value = serde_json::from_str(&line.text)?;
        Ok(flow["state"].as_str().context("no state")?.to_owned())
    };
    ended.lines.iter().map(state).collect()
}

/// A connection from before the start, which is quiet, and one SYN that seems to be its client's or its server's. What the
/// action came to.
fn after_one_syn(
    family: Family,
    from_client: bool,
    arguments: &[&str],
    wanted: &str,
) -> Result<()> {
    let pair = Pair::new()?;
    let attacker = Forger::new(&pair)?;
    let mut connection = pair.connect(family)?;
    talk(&mut connection)?;
    let ends = [
        connection.client.local_addr()?,
        connection.server.local_addr()?,
    ];
    let twheel = run(&pair, arguments)?;
    let forge = || match from_client {
        true => syn(&attacker, ends[0], ends[1]),
        false => syn(&attacker, ends[1], ends[0]),
    };
    forge()?;
    let said = reaped(&twheel, Duration::from_secs(5))?;
    assert_eq!(said["outcome"], wanted, "{said}");
    if wanted == "alive" {
        assert_eq!(states(&pair)?, ["established"]);
    }
    talk(&mut connection)?;
    // Again, once what was seen of it is of the connection.
    forge()?;
    thread::sleep(Duration::from_millis(1500));
    talk(&mut connection)?;
    assert_eq!(states(&pair)?, ["established"]);
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    Ok(())
}

#[test]
fn one_syn_closes_no_socket() -> Result<()> {
    require_root();
    for family in FAMILIES {
        for from_client in [true, false] {
            after_one_syn(family, from_client, &["--reap", "socket"], "alive")?;
        }
    }
    // Where only what comes in is seen.
    after_one_syn(
        Family::V4,
        true,
        &["--reap", "socket", "--egress", "off"],
        "alive",
    )
}

#[test]
fn one_syn_has_no_packets_refused_and_nobody_reset() -> Result<()> {
    require_root();
    for action in ["enforce=reset", "enforce=drop", "reset"] {
        let arguments = ["--reap", action, "--i-know-this-drops-traffic"];
        after_one_syn(Family::V4, true, &arguments, "one_sided")?;
    }
    Ok(())
}

/// A connection that conntrack knows, and one SYN that seems to be its client's.
#[test]
fn one_syn_deletes_no_entry_of_conntrack() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    pair.server.nft(
        "table inet lab {
            chain input { type filter hook input priority filter; ct state established accept; }
        }",
    )?;
    pair.server.enter(|| {
        let timestamp = "/proc/sys/net/netfilter/nf_conntrack_timestamp";
        std::fs::write(timestamp, "1").with_context(|| format!("cannot write {timestamp}"))
    })?;
    let conntrack = Conntrack::open(&pair.server)?;
    let attacker = Forger::new(&pair)?;
    let mut connection = pair.connect(Family::V4)?;
    talk(&mut connection)?;
    let name = connection.client.local_addr()?;
    let entry = || -> Result<Option<State>> {
        let entries = conntrack.dump()?;
        let entry = entries.iter().find(|entry| entry.src == name);
        Ok(entry.and_then(|entry| entry.state))
    };
    assert_eq!(entry()?, Some(State::Established));
    let twheel = run(&pair, &["--reap", "conntrack"])?;
    syn(&attacker, name, connection.server.local_addr()?)?;
    let said = reaped(&twheel, Duration::from_secs(5))?;
    assert_eq!(said["outcome"], "alive", "{said}");
    assert_eq!(entry()?, Some(State::Established));
    assert_eq!(states(&pair)?, ["established"]);
    talk(&mut connection)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// What `twheel flows` says of the only flow.
fn flow(pair: &Pair) -> Result<Value> {
    let ended = pair
        .server
        .twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    ensure!(ended.lines.len() == 1, "{} flows", ended.lines.len());
    Ok(serde_json::from_str(&ended.lines[0].text)?)
}

/// Segments of which one or two lie within the window that a FIN or RST is accepted in, wherever that is: half a window
/// apart over all numbers.
fn sweep(attacker: &Forger, from: SocketAddr, to: SocketAddr, segment: &TcpHeader) -> Result<()> {
    for number in 0..1 << 14 {
        let sequence_number = number << 18;
        let segment = TcpHeader {
            sequence_number,
            ..segment.clone()
        };
        attacker.send(from, to, segment)?;
    }
    Ok(())
}

/// Resets with guessed numbers, then a SYN: the connection goes on, and so does its flow.
#[test]
fn guessed_resets_and_a_syn_end_nothing() -> Result<()> {
    require_root();
    for family in FAMILIES {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let twheel = run(&pair, &["--reap", "socket"])?;
        let mut connection = pair.connect(family)?;
        talk(&mut connection)?;
        let client = connection.client.local_addr()?;
        let server = connection.server.local_addr()?;
        for (from, to) in [(client, server), (server, client)] {
            let reset = TcpHeader {
                rst: true,
                ..TcpHeader::default()
            };
            sweep(&attacker, from, to, &reset)?;
            assert_eq!(flow(&pair)?["state"], "close", "a guess was right");
            syn(&attacker, from, to)?;
            talk(&mut connection)?;
            talk(&mut connection)?;
            let flow = flow(&pair)?;
            assert_eq!(flow["state"], "established", "{flow}");
        }
        let ended = twheel.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        let ends: Vec<_> = ended.lines.iter().map(|line| &line.text).collect();
        assert!(ends.is_empty(), "{ends:?}");
    }
    Ok(())
}

/// Segments that seem to be of both ends come in where the client's do: nobody has answered.
#[test]
fn who_forges_both_sides_makes_no_conversation() -> Result<()> {
    require_root();
    for family in FAMILIES {
        for (more, wanted, count) in [
            (&[][..], ["unreplied", "syn_sent"], 3),
            (&["--one-armed"], ["established", "established"], 0),
        ] {
            let pair = Pair::new()?;
            // The server knows of no such connections, and would say so.
            pair.server.nft(
                "table inet lab {
                    chain output { type filter hook output priority filter; tcp flags rst drop; }
                }",
            )?;
            let attacker = Forger::new(&pair)?;
            let twheel = run(&pair, more)?;
            let end = |address, port| SocketAddr::new(address, port);
            let server = end(family.server(), 9);
            let with = |syn, ack, seq, acked| TcpHeader {
                syn,
                ack,
                sequence_number: seq,
                acknowledgment_number: acked,
                ..TcpHeader::default()
            };
            let clients = [1111, 2222].map(|port| end(family.client(), port));
            attacker.send(clients[0], server, with(false, true, 100, 900))?;
            attacker.send(server, clients[0], with(false, true, 900, 100))?;
            attacker.send(clients[1], server, with(true, false, 100, 0))?;
            attacker.send(server, clients[1], with(true, true, 900, 101))?;
            attacker.send(clients[1], server, with(false, true, 101, 901))?;
            attacker.send(server, clients[1], with(false, true, 901, 101))?;
            let mut found = states(&pair)?;
            found.sort();
            let mut wanted = wanted.map(str::to_owned);
            wanted.sort();
            assert_eq!(found, wanted, "{more:?}");
            assert_eq!(pair.server.counter("same_way")?, count, "{more:?}");
            assert_eq!(twheel.stop()?.code(), Some(0));
        }
    }
    Ok(())
}
