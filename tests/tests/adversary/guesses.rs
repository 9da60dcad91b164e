//! RSTs and FINs of an attacker who guesses sequence numbers.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context, Result};
use etherparse::TcpHeader;
use serde_json::Value;
use twheel_tests::{
    forge::{Forger, Tap},
    netns::require_root,
    pair::{Family, Pair},
};

use crate::{
    FAMILIES, acknowledge_at_once, end_silence, flow, header, reaped, run, run_with, set, silence,
    states, syn, talk,
};

/// Sends segments whose numbers are half a window apart, over all numbers, so that one or two lie
/// within the window in which a FIN or RST is accepted, wherever that window is.
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

/// After resets with guessed numbers and a SYN, the connection continues, and so does its flow.
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
            // Forged in the server's name: the server's real packets do not come in here.
            (server, client, "established"),
        ] {
            let reset = TcpHeader {
                rst: true,
                ..TcpHeader::default()
            };
            sweep(&attacker, from, to, &reset)?;
            assert_eq!(
                flow(&pair)?["state"],
                state,
                "wrong state after the guessed resets"
            );
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

/// On a quiet connection, an attacker sends a guessed RST, then a SYN and its answer in the names
/// of both ends, all through the interface of the client's packets. Nobody has really answered.
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
        assert_eq!(
            flow(&pair)?["state"],
            "close",
            "wrong state after the guessed resets"
        );
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
        // The connection was quiet for as long as a RST is in doubt; no action was taken.
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

/// A FIN in the name of the client, with the number of something that it has already sent: the
/// server does not answer.
fn old_fin(tap: &Tap, client: SocketAddr) -> Result<TcpHeader> {
    thread::sleep(Duration::from_millis(100));
    let heard = tap.heard(client)?;
    let last = heard.iter().rfind(|segment| segment.from_client);
    let last = last.context("the tap saw no segment of the client")?;
    let acked = last.header.acknowledgment_number;
    Ok(header("fa", last.end().wrapping_sub(1000), acked))
}

/// The connection is quiet, and the number of a FIN was guessed: nobody has acknowledged it, and
/// the kernel knows that the connection is open.
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

/// A connection without data is kept alive by its client, and a FIN is guessed: the kernel's
/// account of a socket does not show keepalives, but the packets do.
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
    // Drops what the client sends, until the next probe is due.
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
