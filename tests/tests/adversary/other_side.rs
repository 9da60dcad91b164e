//! Packets forged in the name of the host, or of both sides.

use std::{
    net::{SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use twheel_tests::{
    forge::{Forger, Tap},
    netns::require_root,
    pair::{Connection, Family, PORT, Pair},
    running::PolicyFile,
};

use crate::{FAMILIES, end_silence, flow, header, run, run_with, silence, states, talk};

/// The run's host opens a connection and waits for the answer. An attacker outside can speak
/// neither for it, nor alone for the other end.
#[test]
fn nobody_outside_answers_for_a_host_that_is_asked() -> Result<()> {
    require_root();
    for family in FAMILIES {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let address = SocketAddr::new(family.client(), 4242);
        let listener = pair.client.enter(|| Ok(TcpListener::bind(address)?))?;
        pair.client.nft(
            "table inet deaf {
                chain input { type filter hook input priority filter; tcp dport 4242 drop; }
            }",
        )?;
        let twheel = run_with(
            &pair,
            "established=1h,syn_sent=1m,time_wait=1m,close=1m",
            &["--reap", "socket"],
        )?;
        let mut connection = thread::scope(|threads| -> Result<Connection> {
            let opening = threads.spawn(|| Connection::open(&pair.server, &listener));
            let patience = Instant::now() + Duration::from_secs(5);
            while states(&pair)?.is_empty() {
                ensure!(Instant::now() < patience, "the host sends no SYN");
            }
            let asked = flow(&pair)?;
            assert_eq!(asked["state"], "syn_sent", "{asked}");
            let text = |field: &str| asked[field].as_str().context("no address");
            let port = asked["sport"].as_u64().context("no port")?;
            let here = SocketAddr::new(text("src")?.parse()?, u16::try_from(port)?);
            for forged in [header("a", 1_000, 2_000), header("ar", 1_000, 2_000)] {
                attacker.send(address, here, forged)?;
                assert_eq!(flow(&pair)?["state"], "syn_sent");
            }
            for forged in [
                header("ar", 7, 0),
                header("a", 2_000, 1_000),
                header("s", 9_999, 0),
            ] {
                attacker.send(here, address, forged)?;
                assert_eq!(flow(&pair)?["state"], "syn_sent");
            }
            assert_eq!(pair.server.counter("same_way")?, 3);
            pair.client.nft("delete table inet deaf")?;
            opening
                .join()
                .expect("the thread that opens the connection panicked")
        })?;
        talk(&mut connection)?;
        assert_eq!(flow(&pair)?["state"], "established");
        let ends = [
            connection.client.local_addr()?,
            connection.server.local_addr()?,
        ];
        connection.close()?;
        let patience = Instant::now() + Duration::from_secs(5);
        while flow(&pair)?["state"] != "time_wait" {
            ensure!(Instant::now() < patience, "{}", flow(&pair)?);
        }
        // Nor does a packet from there begin another flow. (The host answers, and the other end
        // replies to the answer with a real RST.)
        pair.client.nft(
            "table inet quiet {
                chain output { type filter hook output priority filter; tcp flags rst drop; }
            }",
        )?;
        for (number, from) in [(0, 1), (1, 0)] {
            let seq = 0x4000_0000 + number;
            attacker.send(ends[from], ends[1 - from], header("s", seq, 0))?;
            attacker.send(ends[1 - from], ends[from], header("sa", 5, seq + 1))?;
            attacker.send(ends[from], ends[1 - from], header("a", seq + 1, 6))?;
            assert_eq!(flow(&pair)?["state"], "time_wait");
        }
        let ended = twheel.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        assert!(ended.lines.is_empty(), "{:?}", ended.lines);
    }
    Ok(())
}

/// A packet in the name of the attacked host, sent before a connection begins, does not decide
/// which rule the connection gets.
#[test]
fn a_packet_in_the_hosts_name_chooses_no_rule() -> Result<()> {
    require_root();
    let policy = PolicyFile::new(
        "planted",
        &format!(
            "[[rule]]\nname = 'kept'\ndport = {PORT}\nreap = []\ntimeouts = {{ established = '1h' }}\n"
        ),
    )?;
    for (family, planted) in [
        (Family::V4, "a"),
        (Family::V6, "a"),
        (Family::V4, "s"),
        (Family::V4, "sa"),
    ] {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        pair.client.enter(|| {
            let ports = "/proc/sys/net/ipv4/ip_local_port_range";
            std::fs::write(ports, "40000 40000").with_context(|| format!("cannot write {ports}"))
        })?;
        let client = SocketAddr::new(family.client(), 40_000);
        let server = SocketAddr::new(family.server(), PORT);
        let more = ["--reap", "socket", "--policy", policy.path()];
        let twheel = run_with(&pair, "1s", &more)?;
        attacker.send(server, client, header(planted, 5_000, 6_000))?;
        let planted = states(&pair)?.len();
        let mut connection = pair.connect(family)?;
        assert_eq!(connection.client.local_addr()?, client);
        talk(&mut connection)?;
        let found = flow(&pair)?;
        assert_eq!(found["state"], "established", "{found}");
        assert_eq!(found["rule"], "kept", "{found}");
        assert_eq!(
            (&found["sport"], &found["dport"]),
            (&40_000.into(), &PORT.into())
        );
        thread::sleep(Duration::from_millis(2500));
        talk(&mut connection)?;
        let ended = twheel.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        // The planted flow has ended, and no action was taken.
        let said: Vec<_> = ended.lines.iter().map(|line| &line.text).collect();
        assert_eq!(said.len(), planted, "{said:?}");
        assert!(
            said.iter().all(|said| said.contains("superseded")),
            "{said:?}"
        );
    }
    Ok(())
}

/// The same, but the host itself is about to open the connection.
#[test]
fn a_packet_in_the_hosts_name_ends_no_opening() -> Result<()> {
    require_root();
    for planted in ["a", "s"] {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        pair.server.enter(|| {
            let ports = "/proc/sys/net/ipv4/ip_local_port_range";
            std::fs::write(ports, "40000 40000").with_context(|| format!("cannot write {ports}"))
        })?;
        let here = SocketAddr::new(Family::V4.server(), 40_000);
        let address = SocketAddr::new(Family::V4.client(), 4242);
        let listener = pair.client.enter(|| Ok(TcpListener::bind(address)?))?;
        let twheel = run_with(&pair, "established=1h,unreplied=1s", &["--reap", "socket"])?;
        attacker.send(here, address, header(planted, 5_000, 6_000))?;
        thread::sleep(Duration::from_millis(500));
        pair.client.nft(
            "table inet deaf {
                chain input { type filter hook input priority filter; tcp dport 4242 drop; }
            }",
        )?;
        let mut connection = thread::scope(|threads| -> Result<Connection> {
            let opening = threads.spawn(|| Connection::open(&pair.server, &listener));
            thread::sleep(Duration::from_millis(1500));
            assert_eq!(flow(&pair)?["state"], "syn_sent");
            pair.client.nft("delete table inet deaf")?;
            opening
                .join()
                .expect("the thread that opens the connection panicked")
        })?;
        talk(&mut connection)?;
        assert_eq!(flow(&pair)?["state"], "established");
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

/// A connection within the host, whose loopback interface is watched as well: packets from outside
/// have no effect on it.
#[test]
fn nobody_outside_speaks_for_both_ends_that_are_here() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let attacker = Forger::new(&pair)?;
    let twheel = run_with(&pair, "established=1h,time_wait=1m", &["--iface", "lo"])?;
    let here = SocketAddr::new(Family::V4.server(), 4242);
    let listener = pair.server.enter(|| Ok(TcpListener::bind(here)?))?;
    let mut connection = Connection::open(&pair.server, &listener)?;
    talk(&mut connection)?;
    let client = connection.client.local_addr()?;
    assert_eq!(flow(&pair)?["state"], "established");
    connection.close()?;
    let patience = Instant::now() + Duration::from_secs(5);
    while flow(&pair)?["state"] != "time_wait" {
        ensure!(Instant::now() < patience, "{}", flow(&pair)?);
    }
    // Until then, a packet seen elsewhere is taken for a copy of one that was counted here.
    thread::sleep(Duration::from_millis(200));
    attacker.send(client, here, header("s", 0x4000_0000, 0))?;
    attacker.send(here, client, header("sa", 5, 0x4000_0001))?;
    attacker.send(client, here, header("a", 0x4000_0001, 6))?;
    assert_eq!(flow(&pair)?["state"], "time_wait");
    assert_eq!(pair.server.counter("same_way")?, 3);
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// Where outgoing packets are not seen, a flow that this host opens begins with the answer. The
/// flow's only packets are the other end's, and no incoming packet is taken for this host's.
#[test]
fn what_begins_with_an_answer_lives_by_the_packets_of_who_answers() -> Result<()> {
    require_root();
    for family in FAMILIES {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let tap = Tap::new(&pair)?;
        let address = SocketAddr::new(family.client(), 0);
        let listener = pair.client.enter(|| Ok(TcpListener::bind(address)?))?;
        let twheel = run_with(&pair, "established=2s,fin_wait=1s", &["--egress", "off"])?;
        let mut connection = Connection::open(&pair.server, &listener)?;
        for _ in 0..8 {
            talk(&mut connection)?;
            assert_eq!(flow(&pair)?["state"], "established");
            thread::sleep(Duration::from_millis(500));
        }
        assert_eq!(pair.server.counter("same_way")?, 0);
        let ends = [
            connection.client.local_addr()?,
            connection.server.local_addr()?,
        ];
        // A FIN in the name of the host, with its correct next sequence number; no packet of the
        // host itself was seen.
        let heard = tap.heard(ends[0])?;
        let next = heard.iter().rfind(|segment| segment.from_client);
        let next = next.context("the tap saw no segment of the host")?;
        let acked = next.header.acknowledgment_number;
        silence(&pair)?;
        attacker.send(ends[0], ends[1], header("fa", next.end(), acked))?;
        assert_eq!(flow(&pair)?["state"], "established");
        assert_eq!(pair.server.counter("same_way")?, 1);
        end_silence(&pair)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

/// Segments in the names of both ends come in through the client's interface: nobody has really
/// answered.
#[test]
fn who_forges_both_sides_makes_no_conversation() -> Result<()> {
    require_root();
    for family in FAMILIES {
        for (more, wanted, count) in [
            (&[][..], ["unreplied", "syn_sent"], 3),
            (&["--one-armed"], ["established", "established"], 0),
        ] {
            let pair = Pair::new()?;
            // The server knows no such connections and would answer with RSTs.
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
