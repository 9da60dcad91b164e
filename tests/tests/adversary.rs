//! What somebody can do who is not on the path of a connection, and sends packets with its addresses: nothing that ends it.
//!
//! A client and a server have a connection of real sockets. The attacker's packets come in by the interface by which the
//! client's do.
#![allow(missing_docs)]

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use serde_json::Value;
use twheel::{flows::Flows, pins::Instance};
use twheel_common::{flow::Direction, state::State};
use twheel_tests::{
    ctnetlink::Conntrack,
    forge::{Forger, Heard, Tap},
    is_soak,
    netns::{Connection, Family, Line, PORT, Pair, PolicyFile, SERVER, Twheel, require_root},
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
    run_with(pair, "established=1h,syn_sent=1s,time_wait=1s", more)
}

fn run_with(pair: &Pair, timeouts: &str, more: &[&str]) -> Result<Twheel> {
    let mut args = vec![
        "--iface",
        SERVER,
        "--json",
        "--tick",
        "50ms",
        "--timeout",
        timeouts,
        "--reap-max-share",
        "100",
    ];
    args.extend(more);
    Twheel::start(&pair.server, &args)
}

/// Drops what the server sends without data, such as its answer to a SYN that does not fit (RFC 5961, section 4).
fn silence(pair: &Pair) -> Result<()> {
    pair.server.nft(
        "table inet silence {
            chain output {
                type filter hook output priority raw;
                tcp flags & (fin | syn | rst | psh | ack) == ack drop;
            }
        }",
    )
}

/// Lets that pass again.
fn end_silence(pair: &Pair) -> Result<()> {
    pair.server.nft("delete table inet silence")
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
    silence(&pair)?;
    forge()?;
    let said = reaped(&twheel, Duration::from_secs(5))?;
    assert_eq!(said["outcome"], wanted, "{said}");
    if wanted == "alive" {
        assert_eq!(states(&pair)?, ["established"]);
    }
    end_silence(&pair)?;
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
    silence(&pair)?;
    syn(&attacker, name, connection.server.local_addr()?)?;
    let said = reaped(&twheel, Duration::from_secs(5))?;
    assert_eq!(said["outcome"], "alive", "{said}");
    assert_eq!(entry()?, Some(State::Established));
    assert_eq!(states(&pair)?, ["established"]);
    end_silence(&pair)?;
    talk(&mut connection)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// One SYN on a quiet connection that the run has not seen: the server answers as one that has the connection.
#[test]
fn the_answer_to_a_syn_tells_of_the_connection_that_was_there() -> Result<()> {
    require_root();
    for family in FAMILIES {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let mut connection = pair.connect(family)?;
        talk(&mut connection)?;
        let ends = [
            connection.client.local_addr()?,
            connection.server.local_addr()?,
        ];
        let twheel = run(&pair, &["--reap", "socket"])?;
        syn(&attacker, ends[0], ends[1])?;
        assert_eq!(states(&pair)?, ["established"]);
        // Longer than the flow of a SYN without an answer.
        let said = twheel.line(Duration::from_secs(2))?;
        assert!(said.is_none(), "{said:?}");
        connection.close()?;
        let said = twheel.line(Duration::from_secs(5))?.context("no end")?;
        let said: Value = serde_json::from_str(&said.text)?;
        assert_eq!(said["reason"], "closed", "{said}");
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
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
        for (from, to, state) in [
            (client, server, "close"),
            // The server's packets do not come in.
            (server, client, "established"),
        ] {
            let reset = TcpHeader {
                rst: true,
                ..TcpHeader::default()
            };
            sweep(&attacker, from, to, &reset)?;
            assert_eq!(flow(&pair)?["state"], state, "a guess was right");
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

/// A connection that is quiet: a guessed RST, and a SYN with its answer, which seem to be of both ends, and come in where
/// the client's packets do. Nobody has answered.
#[test]
fn nobody_outside_answers_a_syn_on_what_was_reset() -> Result<()> {
    require_root();
    for (family, action) in [
        (Family::V4, "reset,socket"),
        (Family::V6, "reset,socket"),
        (Family::V4, "enforce=reset"),
    ] {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let more = ["--reap", action, "--i-know-this-drops-traffic"];
        let twheel = run_with(&pair, "established=1h,close=1s,syn_recv=1s", &more)?;
        let mut connection = pair.connect(family)?;
        talk(&mut connection)?;
        let client = connection.client.local_addr()?;
        let server = connection.server.local_addr()?;
        silence(&pair)?;
        let reset = TcpHeader {
            rst: true,
            ..TcpHeader::default()
        };
        sweep(&attacker, client, server, &reset)?;
        assert_eq!(flow(&pair)?["state"], "close", "a guess was right");
        syn(&attacker, client, server)?;
        let answer = TcpHeader {
            syn: true,
            ack: true,
            sequence_number: 900,
            acknowledgment_number: 0x1234_5679,
            ..TcpHeader::default()
        };
        attacker.send(server, client, answer)?;
        assert_eq!(pair.server.counter("same_way")?, 1);
        // The connection was quiet for as long as a RST must be borne out; nothing is done to it.
        let line = twheel.line(Duration::from_secs(5))?.context("no end")?;
        let said: Value = serde_json::from_str(&line.text)?;
        assert_eq!(said["reason"], "reset", "{said}");
        let more = twheel.line(Duration::from_secs(2))?;
        assert!(more.is_none(), "{more:?}");
        end_silence(&pair)?;
        talk(&mut connection)?;
        talk(&mut connection)?;
        assert_eq!(states(&pair)?, ["established"]);
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

/// What a client says that has sent a FIN, with the number of something that it has sent before: the server says nothing.
fn old_fin(tap: &Tap, client: SocketAddr) -> Result<TcpHeader> {
    thread::sleep(Duration::from_millis(100));
    let heard = tap.heard(client)?;
    let last = heard.iter().rfind(|segment| segment.from_client);
    let last = last.context("the client was not heard")?;
    let acked = last.header.acknowledgment_number;
    Ok(header("fa", last.end().wrapping_sub(1000), acked))
}

/// A connection that is quiet, and a FIN whose number was guessed: nobody has acknowledged it, and the kernel knows better.
#[test]
fn a_quiet_connection_with_a_guessed_fin_is_not_reset() -> Result<()> {
    require_root();
    for (action, wanted) in [
        ("reset", &["one_sided"][..]),
        ("enforce=reset", &["one_sided"]),
        ("reset,socket", &["one_sided", "alive"]),
    ] {
        let pair = Pair::new()?;
        let attacker = Forger::new(&pair)?;
        let tap = Tap::new(&pair)?;
        let more = ["--reap", action, "--i-know-this-drops-traffic"];
        let twheel = run_with(&pair, "established=1h,fin_wait=1s", &more)?;
        let mut connection = pair.connect(Family::V4)?;
        let client = connection.client.local_addr()?;
        let server = connection.server.local_addr()?;
        acknowledge_at_once(&connection.server)?;
        talk(&mut connection)?;
        let fin = old_fin(&tap, client)?;
        silence(&pair)?;
        attacker.send(client, server, fin)?;
        assert_eq!(flow(&pair)?["state"], "fin_wait");
        for wanted in wanted {
            let said = reaped(&twheel, Duration::from_secs(5))?;
            assert_eq!(said["outcome"], *wanted, "{said}");
        }
        end_silence(&pair)?;
        talk(&mut connection)?;
        assert_eq!(states(&pair)?, ["established"]);
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

/// A connection without data that its client keeps alive, and a guessed FIN: what the kernel tells of a socket knows nothing
/// of keepalives, and the packets do.
#[test]
fn a_connection_that_is_kept_alive_is_not_closed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let attacker = Forger::new(&pair)?;
    let tap = Tap::new(&pair)?;
    let timeouts = "established=4s,fin_wait=1s";
    let twheel = run_with(&pair, timeouts, &["--reap", "socket"])?;
    let mut connection = pair.connect(Family::V4)?;
    let client = connection.client.local_addr()?;
    acknowledge_at_once(&connection.server)?;
    talk(&mut connection)?;
    let fin = old_fin(&tap, client)?;
    for (option, value) in [
        (libc::TCP_KEEPIDLE, 1),
        (libc::TCP_KEEPINTVL, 1),
        (libc::TCP_KEEPCNT, 60),
    ] {
        set(&connection.client, libc::IPPROTO_TCP, option, value)?;
    }
    set(&connection.client, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    silence(&pair)?;
    thread::sleep(Duration::from_secs(6));
    assert_eq!(flow(&pair)?["state"], "established");
    // Until the next probe is due.
    pair.client.nft(
        "table inet mute {
            chain output { type filter hook output priority filter; drop; }
        }",
    )?;
    attacker.send(client, connection.server.local_addr()?, fin)?;
    assert_eq!(flow(&pair)?["state"], "fin_wait");
    let said = reaped(&twheel, Duration::from_secs(5))?;
    assert_eq!(said["outcome"], "alive", "{said}");
    end_silence(&pair)?;
    pair.client.nft("delete table inet mute")?;
    talk(&mut connection)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

fn header(flags: &str, sequence_number: u32, acknowledgment_number: u32) -> TcpHeader {
    TcpHeader {
        syn: flags.contains('s'),
        ack: flags.contains('a'),
        fin: flags.contains('f'),
        rst: flags.contains('r'),
        sequence_number,
        acknowledgment_number,
        ..TcpHeader::default()
    }
}

/// The host of the run opens a connection, and waits for the answer: who is outside speaks neither for it, nor alone for
/// the other end.
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
                ensure!(Instant::now() < patience, "no SYN");
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
            opening.join().expect("it does not panic")
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
        // Nor does another life begin from there. (The host answers, and to that the other end has a real RST.)
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

/// A packet in the name of the host that is attacked, before a connection begins: it does not choose what the connection is
/// taken for.
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
        // What was planted has ended, and nothing was done to it.
        let said: Vec<_> = ended.lines.iter().map(|line| &line.text).collect();
        assert_eq!(said.len(), planted, "{said:?}");
        assert!(
            said.iter().all(|said| said.contains("superseded")),
            "{said:?}"
        );
    }
    Ok(())
}

/// The same, where the host is about to open the connection.
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
            opening.join().expect("it does not panic")
        })?;
        talk(&mut connection)?;
        assert_eq!(flow(&pair)?["state"], "established");
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

/// A connection within the host, where its loopback interface is watched as well: nobody outside has a part in it.
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
    // Before, what is seen elsewhere is taken for what was counted here.
    thread::sleep(Duration::from_millis(200));
    attacker.send(client, here, header("s", 0x4000_0000, 0))?;
    attacker.send(here, client, header("sa", 5, 0x4000_0001))?;
    attacker.send(client, here, header("a", 0x4000_0001, 6))?;
    assert_eq!(flow(&pair)?["state"], "time_wait");
    assert_eq!(pair.server.counter("same_way")?, 3);
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// Where what goes out is not seen, the answer is what begins a flow of this host: it is of the other end, and what comes
/// in there is none of this host's.
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
        // Its own next number, and none of its packets.
        let heard = tap.heard(ends[0])?;
        let next = heard.iter().rfind(|segment| segment.from_client);
        let next = next.context("the host was not heard")?;
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

/// How the connection stands that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// It was up before the run, which has not seen it yet.
    Fresh,
    /// The run has seen its packets, but not its beginning.
    PickedUp,
    /// The run has seen all of it.
    Quiet,
    /// It has packets all the time.
    Busy,
    /// The client has sent a FIN.
    HalfClosed,
    /// The run has seen all that came in.
    EgressOff,
}

const SCENES: [Scene; 6] = [
    Scene::Fresh,
    Scene::PickedUp,
    Scene::Quiet,
    Scene::Busy,
    Scene::HalfClosed,
    Scene::EgressOff,
];

/// What is done to flows that expire, and may be done to the connection.
const ACTIONS: [&str; 4] = ["socket", "conntrack", "reset", "enforce=reset"];

/// A live connection of real sockets, a run, and somebody who forges.
struct Siege {
    scene: Scene,
    twheel: Twheel,
    flows: Flows,
    forger: Forger,
    tap: Tap,
    connection: Option<Connection>,

    ends: [SocketAddr; 2],
    /// What each side has sent, the server first.
    heard: [Vec<Heard>; 2],
    seed: u64,
    _pair: Pair,
}

impl Siege {
    fn new(scene: Scene, action: &str) -> Result<Self> {
        let pair = Pair::new()?;
        let forger = Forger::new(&pair)?;
        let tap = Tap::new(&pair)?;
        let mut connection = pair.connect(Family::V4)?;
        talk(&mut connection)?;
        let mut arguments = vec!["--reap", action, "--i-know-this-drops-traffic"];
        if scene == Scene::EgressOff {
            arguments.extend(["--egress", "off"]);
        }
        let is_early = matches!(scene, Scene::Fresh | Scene::PickedUp);
        let twheel = run(&pair, &arguments)?;
        if !is_early {
            connection = pair.connect(Family::V4)?;
        }
        let ends = [
            connection.client.local_addr()?,
            connection.server.local_addr()?,
        ];
        let flows = pair
            .server
            .enter(|| Flows::pinned(&Instance::of(SERVER)?))?;
        let mut siege = Self {
            scene,
            twheel,
            flows,
            forger,
            tap,
            connection: Some(connection),
            ends,
            heard: [Vec::new(), Vec::new()],
            seed: 0x9e37_79b9_7f4a_7c15,
            _pair: pair,
        };
        if scene != Scene::Fresh {
            siege.talk()?;
        }
        if scene == Scene::HalfClosed {
            let connection = siege.connection.as_mut().context("no connection")?;
            connection.client.shutdown(std::net::Shutdown::Write)?;
            ensure!(connection.server.read(&mut [0])? == 0, "no end");
        }
        siege.talk()?;
        Ok(siege)
    }

    /// Both ends have what the other sends.
    fn talk(&mut self) -> Result<()> {
        // What was forged is not what the ends say.
        self.tap.heard(self.ends[0])?;
        let connection = self.connection.as_mut().context("no connection")?;
        let is_half = self.scene == Scene::HalfClosed && !self.heard[0].is_empty();
        for _ in 0..2 {
            if !is_half {
                // An acknowledgment without data tells that its sender has not come to an end.
                acknowledge_at_once(&connection.server)?;
                connection.talk().context("the client is not heard")?;
            }
            acknowledge_at_once(&connection.client)?;
            connection
                .server
                .write_all(b"!")
                .context("the server cannot send")?;
            let heard = connection.client.read_exact(&mut [0]);
            heard.context("the server is not heard")?;
        }
        // The last acknowledgment may wait for more.
        let patience = Instant::now() + Duration::from_secs(1);
        loop {
            for segment in self.tap.heard(self.ends[0])? {
                self.heard[usize::from(segment.from_client)].push(segment);
            }
            let last = self.heard.each_ref().map(|side| side.last());
            if let [Some(server), Some(client)] = last
                && client.header.acknowledgment_number == server.end()
            {
                return Ok(());
            }
            ensure!(Instant::now() < patience, "not acknowledged: {last:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next number of each side, the server first.
    fn next(&self) -> [u32; 2] {
        self.heard
            .each_ref()
            .map(|side| side.last().map_or(0, Heard::end))
    }

    fn forge(&self, from_client: bool, segment: &TcpHeader, data: &[u8]) -> Result<()> {
        let [client, server] = self.ends;
        let (from, to) = match from_client {
            true => (client, server),
            false => (server, client),
        };
        self.forger.send_data(from, to, segment.clone(), data)
    }

    fn random(&mut self) -> u32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 16) as u32
    }

    /// The connection goes on, and its flow is what its sockets are.
    fn check(&mut self, what: &dyn std::fmt::Debug) -> Result<()> {
        let scene = self.scene;
        self.talk()
            .with_context(|| format!("{scene:?}, after {what:?}"))?;
        let wanted = match scene {
            // A side that only sends data says nothing against a FIN ahead of it.
            Scene::HalfClosed => &[State::CloseWait, State::LastAck][..],
            _ => &[State::Established],
        };
        let name = self.ends;
        let state = |siege: &Self| {
            let is_it = |flow: &twheel::flows::Flow| {
                let ends =
                    [Direction::FromLow, Direction::FromHigh].map(|from| flow.key.sender(from));
                ends == name || ends == [name[1], name[0]]
            };
            let flow = siege.flows.iter().find(is_it);
            flow.map(|flow| flow.word.seen().state())
        };
        let end = Instant::now() + Duration::from_secs(if scene == Scene::Fresh { 3 } else { 0 });
        while !state(self).is_some_and(|state| wanted.contains(&state)) {
            ensure!(
                Instant::now() < end,
                "{scene:?}, after {what:?}: {:?}, not {wanted:?}",
                state(self)
            );
            thread::sleep(Duration::from_millis(200));
            self.talk()?;
        }
        while let Some(line) = self.twheel.line(Duration::ZERO)? {
            let said: Value = serde_json::from_str(&line.text)?;
            let is_forged = scene == Scene::Fresh && said["state"] == "syn_sent";
            let is_harmless =
                is_forged || matches!(said["outcome"].as_str(), Some("alive" | "one_sided"));
            ensure!(is_harmless, "{scene:?}, after {what:?}: {said}");
        }
        Ok(())
    }

    /// The connection ends, and so does its flow.
    fn end(mut self) -> Result<()> {
        let connection = self.connection.take().context("no connection")?;
        let scene = self.scene;
        connection
            .close()
            .with_context(|| format!("{scene:?}: it does not close"))?;
        if scene == Scene::EgressOff {
            // Who sees one FIN waits for the timeout of that.
            return Ok(());
        }
        let end = Instant::now() + Duration::from_secs(5);
        while let Some(line) = self
            .twheel
            .line(end.saturating_duration_since(Instant::now()))?
        {
            let said: Value = serde_json::from_str(&line.text)?;
            if said["event"] == "end" || said["reason"] == "closed" {
                ensure!(said["reason"] == "closed", "{scene:?}: {said}");
                let ended = self.twheel.stop()?;
                ensure!(ended.code() == Some(0), "{}", ended.stderr);
                return Ok(());
            }
        }
        anyhow::bail!("{scene:?}: its end was not seen")
    }
}

/// Has the next data acknowledged when it comes, and not with what is sent next.
fn acknowledge_at_once(socket: &TcpStream) -> Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1)
}

fn set(socket: &TcpStream, level: i32, option: i32, value: libc::c_int) -> Result<()> {
    // SAFETY: the option's value is an `int`, which is alive.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    ensure!(set == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

/// What somebody may send who knows much, but no exact number: of one side, whose next number is `mine`.
fn forgeries(mine: u32, theirs: u32) -> Vec<TcpHeader> {
    // Beyond the windows of the sockets, and near enough for twheel; and what was sent before.
    let (far, ahead, behind) = (
        mine ^ 1 << 31,
        mine.wrapping_add(200_000),
        mine.wrapping_sub(3_000),
    );
    let unsent = theirs.wrapping_add(1 << 30);
    let header = |flags: &str, sequence_number, acknowledgment_number| TcpHeader {
        syn: flags.contains('S'),
        ack: flags.contains('A'),
        fin: flags.contains('F'),
        rst: flags.contains('R'),
        psh: flags.contains('P'),
        sequence_number,
        acknowledgment_number,
        ..TcpHeader::default()
    };
    vec![
        header("S", far, 0),
        header("S", ahead, 0),
        header("S", behind, 0),
        header("SA", far, unsent),
        header("SA", ahead, theirs),
        header("SA", behind, theirs),
        header("R", far, 0),
        header("R", ahead, 0),
        header("R", behind, 0),
        header("RA", far, unsent),
        header("RA", ahead, theirs),
        header("RA", behind, theirs),
        header("FA", far, unsent),
        header("FA", ahead, theirs),
        header("FA", ahead, unsent),
        header("FA", behind, theirs),
        header("A", far, unsent),
        header("A", ahead, theirs),
        header("A", behind, theirs),
        header("PA", ahead, unsent),
    ]
}

/// All pairs of two forged segments, from either end.
fn pairs(scene: Scene, action: &str) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    let count = 2 * forgeries(0, 0).len();
    // All of the first and all of the second, too.
    let every = if is_soak() { 1 } else { 7 };
    for number in (0..count * count).step_by(every) {
        let [server, client] = siege.next();
        let both = [forgeries(server, client), forgeries(client, server)];
        let chosen = [number / count, number % count].map(|which| {
            let from_client = which % 2 == 1;
            (
                from_client,
                both[usize::from(from_client)][which / 2].clone(),
            )
        });
        for (from_client, segment) in &chosen {
            siege.forge(*from_client, segment, &[])?;
        }
        siege.check(&chosen)?;
    }
    siege.end()
}

/// Random numbers, of each kind and from either end.
fn numbers(scene: Scene, action: &str, count: u32) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    for flags in ["R", "F", "A", "S"] {
        for number in 0..count {
            let segment = TcpHeader {
                rst: flags == "R",
                fin: flags == "F",
                syn: flags == "S",
                ack: flags != "R" || number % 4 > 1,
                sequence_number: siege.random(),
                acknowledgment_number: siege.random(),
                ..TcpHeader::default()
            };
            siege.forge(number % 2 == 0, &segment, &[])?;
            if scene == Scene::Busy && number % 1024 == 0 {
                siege.talk()?;
            }
        }
        siege.check(&flags)?;
    }
    siege.end()
}

/// One SYN, a RST and a SYN, and all that the ends have sent, once more.
fn replays(scene: Scene, action: &str) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    let syn = TcpHeader {
        syn: true,
        sequence_number: 0x1234_5678,
        ..TcpHeader::default()
    };
    let reset = TcpHeader {
        rst: true,
        sequence_number: 0x8765_4321,
        ..TcpHeader::default()
    };
    for from_client in [true, false] {
        siege.forge(from_client, &syn, &[])?;
        siege.check(&"a SYN")?;
        siege.forge(from_client, &reset, &[])?;
        siege.forge(from_client, &syn, &[])?;
        siege.check(&"a RST and a SYN")?;
    }
    for _ in 0..3 {
        let old = siege.heard.concat();
        for segment in &old {
            // An old FIN is what it was.
            siege.forge(segment.from_client, &segment.header, &segment.data)?;
        }
        siege.check(&"what was sent before")?;
        for segment in old.iter().rev() {
            siege.forge(segment.from_client, &segment.header, &segment.data)?;
        }
        siege.check(&"what was sent before, the last first")?;
    }
    siege.end()
}

#[test]
fn no_two_forged_segments_end_a_connection() -> Result<()> {
    require_root();
    for (number, scene) in SCENES.into_iter().enumerate() {
        for (other, action) in ACTIONS.into_iter().enumerate() {
            if is_soak() || number % ACTIONS.len() == other {
                pairs(scene, action)?;
            }
        }
    }
    Ok(())
}

#[test]
fn no_random_numbers_end_a_connection() -> Result<()> {
    require_root();
    // A million.
    numbers(Scene::Busy, "socket", 1 << 18)?;
    for scene in SCENES {
        for action in ACTIONS {
            numbers(scene, action, if is_soak() { 1 << 18 } else { 1 << 12 })?;
        }
    }
    Ok(())
}

#[test]
fn what_was_sent_before_ends_no_connection() -> Result<()> {
    require_root();
    for scene in SCENES {
        for action in ACTIONS {
            replays(scene, action)?;
        }
    }
    Ok(())
}

/// Connections that are up while the floods come.
const CONNECTIONS: usize = 10_000;
/// Pairs in a flood.
const PAIRS: u32 = 1_000_000;

/// Floods that come in by one interface, and seem to be of both ends of a million connections.
#[test]
fn floods_of_both_sides_evict_no_connection() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // Each half of the connections among descriptors of its own: both may be more than a process can have.
    thread::scope(|scope| {
        let (named, names) = mpsc::channel();
        let (talk_on, asked) = mpsc::channel();
        let pair = &pair;
        let half = scope.spawn(move || -> Result<()> {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES)?;
            // Whoever starts a program waits until nobody has its pipe.
            named.send(Vec::new())?;
            asked.recv()?;
            let mut held = open(pair)?;
            named.send(name_of(&held))?;
            asked.recv()?;
            held.iter_mut().try_for_each(talk)?;
            named.send(Vec::new())?;
            // Until nobody asks any more.
            let _ = asked.recv();
            Ok(())
        });
        let flooded = names
            .recv()
            .map_err(Into::into)
            .and_then(|_| floods(pair, &names, &talk_on));
        drop(talk_on);
        let held = half.join().expect("it does not panic");
        flooded.and(held)
    })
}

fn open(pair: &Pair) -> Result<Vec<Connection>> {
    (0..CONNECTIONS / 2)
        .map(|_| pair.connect(Family::V4))
        .collect()
}

fn name_of(connections: &[Connection]) -> Vec<SocketAddr> {
    connections.iter().map(|it| it.name).collect()
}

fn floods(
    pair: &Pair,
    others_named: &mpsc::Receiver<Vec<SocketAddr>>,
    others_talk: &mpsc::Sender<()>,
) -> Result<()> {
    // The server knows of no such connections, and would say so.
    pair.server.nft(
        "table inet lab {
            chain output { type filter hook output priority filter; tcp flags rst drop; }
        }",
    )?;
    let forger = Forger::new(pair)?;
    // All the connections are one client's.
    let twheel = run(pair, &["--max-flows", "32768", "--source-share", "100"])?;
    let flows = pair
        .server
        .enter(|| Flows::pinned(&Instance::of(SERVER)?))?;
    others_talk.send(())?;
    let others = others_named.recv()?;
    let mut connections = open(pair)?;
    let names: BTreeSet<_> = name_of(&connections).into_iter().chain(others).collect();
    ensure!(names.len() == CONNECTIONS, "{} names", names.len());
    let server = connections[0].server.local_addr()?;
    let check = |what: &str| -> Result<()> {
        let mut kept = BTreeSet::new();
        for flow in flows.iter() {
            let [a, b] =
                [Direction::FromLow, Direction::FromHigh].map(|from| flow.key.sender(from));
            let name = if a.port() == server.port() { b } else { a };
            let is_real = names.contains(&name);
            let seen = flow.word.seen();
            ensure!(
                is_real == seen.is_established(false),
                "{what}: {name} is {:?}, replied: {}",
                seen.state(),
                seen.is_replied()
            );
            if is_real {
                kept.insert(name);
            }
        }
        let lost: Vec<_> = names.difference(&kept).collect();
        ensure!(lost.is_empty(), "{what}: {} were evicted", lost.len());
        // What has ended was forged.
        while let Some(line) = twheel.line(Duration::ZERO)? {
            let said: Value = serde_json::from_str(&line.text)?;
            let src = said["src"].as_str().unwrap_or_default();
            ensure!(src != Family::V4.client().to_string(), "{what}: {said}");
        }
        Ok(())
    };
    check("before")?;
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for what in ["ACK, ACK", "SYN, SYN/ACK, ACK"] {
        for number in 0..PAIRS {
            let source = random();
            let address = Ipv4Addr::from(0x0b00_0000 | source as u32 >> 8);
            let client = SocketAddr::new(address.into(), (source >> 48) as u16 | 1024);
            let [seq, other] = [random() as u32, random() as u32];
            let with = |syn, ack, sequence_number: u32, acknowledgment_number: u32| TcpHeader {
                syn,
                ack,
                sequence_number,
                acknowledgment_number,
                ..TcpHeader::default()
            };
            if what == "ACK, ACK" {
                forger.send(client, server, with(false, true, seq, other))?;
                forger.send(server, client, with(false, true, other, seq))?;
            } else {
                let [next, answer] = [seq, other].map(|number| number.wrapping_add(1));
                forger.send(client, server, with(true, false, seq, 0))?;
                forger.send(server, client, with(true, true, other, next))?;
                forger.send(client, server, with(false, true, next, answer))?;
            }
            if number % (PAIRS / 8) == 0 {
                check(&format!("{what}, {number}"))?;
            }
        }
        check(what)?;
        let full = ["evicted", "table_full", "window_full"].map(|name| pair.server.counter(name));
        let full = full.into_iter().sum::<Result<u64>>()?;
        ensure!(full > u64::from(PAIRS) / 2, "{what}: no room {full} times");
    }
    others_talk.send(())?;
    connections.iter_mut().try_for_each(talk)?;
    others_named.recv()?;
    check("after")?;
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}
