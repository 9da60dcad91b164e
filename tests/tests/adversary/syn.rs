//! A SYN on an existing connection.

use std::{thread, time::Duration};

use anyhow::{Context, Result};
use serde_json::Value;
use twheel_common::state::State;
use twheel_tests::{
    ctnetlink::Conntrack,
    forge::Forger,
    netns::require_root,
    pair::{Family, Pair},
};

use crate::{FAMILIES, end_silence, reaped, run, silence, states, syn, talk};

/// Sends one SYN in the name of the client or the server on a quiet connection from before the
/// start. The action has the outcome `wanted`.
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
    // Sends the SYN again, now that the connection's own packets were seen.
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
    // Only incoming packets are seen.
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

/// One SYN in the client's name on a connection that conntrack knows.
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

/// One SYN on a quiet connection that the run has not seen: the server's answer shows that it has
/// the connection.
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
        // Longer than the timeout of an unanswered SYN.
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
