//! Floods of packets that are forged in the names of both sides.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use etherparse::TcpHeader;
use twheel::{flows::Flows, pins::Instance};
use twheel_common::flow::Direction;
use twheel_tests::{
    forge::Forger,
    netns::require_root,
    pair::{Connection, Family, Pair, SERVER},
};

use crate::{run, talk};

/// Connections that are open while the floods come.
const CONNECTIONS: usize = 10_000;
/// Pairs of forged packets in a flood.
const PAIRS: u32 = 1_000_000;

/// The floods come in through one interface, and seem to come from both ends of a million
/// connections.
#[test]
fn floods_of_both_sides_evict_no_connection() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // Each half of the connections has a file descriptor table of its own: a process may not be
    // allowed enough descriptors for both halves.
    thread::scope(|scope| {
        let (named, names) = mpsc::channel();
        let (talk_on, asked) = mpsc::channel();
        let pair = &pair;
        let half = scope.spawn(move || -> Result<()> {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES)?;
            // `Command::spawn` waits until its pipe is closed everywhere, so no program is started
            // before this thread has a table of its own.
            named.send(Vec::new())?;
            asked.recv()?;
            let mut held = open(pair)?;
            named.send(name_of(&held))?;
            asked.recv()?;
            held.iter_mut().try_for_each(talk)?;
            named.send(Vec::new())?;
            // Keeps the connections open until the other side hangs up.
            let _ = asked.recv();
            Ok(())
        });
        let flooded = names
            .recv()
            .map_err(Into::into)
            .and_then(|_| floods(pair, &names, &talk_on));
        drop(talk_on);
        let held = half
            .join()
            .expect("the thread that holds half of the connections panicked");
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
    // The server knows no such connections and would answer with RSTs.
    pair.server.nft(
        "table inet lab {
            chain output { type filter hook output priority filter; tcp flags rst drop; }
        }",
    )?;
    let forger = Forger::new(pair)?;
    // All the connections are of one client.
    let twheel = run(pair, &["--max-flows", "32768", "--source-share", "100"])?;
    let flows = pair
        .server
        .enter(|| Flows::pinned(&Instance::with(SERVER)?))?;
    others_talk.send(())?;
    let others = others_named.recv()?;
    let mut connections = open(pair)?;
    let names: BTreeSet<_> = name_of(&connections).into_iter().chain(others).collect();
    ensure!(names.len() == CONNECTIONS, "{} names", names.len());
    let server = connections[0].server.local_addr()?;
    let real = format!("\"src\":\"{}\"", Family::V4.client());
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
        ensure!(
            lost.is_empty(),
            "{what}: {} connections were evicted",
            lost.len()
        );
        // Only forged flows have ended.
        while let Some(line) = twheel.line(Duration::ZERO)? {
            ensure!(
                line.text.contains("\"src\":\"") && !line.text.contains(&real),
                "{what}: {}",
                line.text
            );
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
        ensure!(
            full > u64::from(PAIRS) / 2,
            "{what}: the table was full only {full} times"
        );
    }
    others_talk.send(())?;
    connections.iter_mut().try_for_each(talk)?;
    others_named.recv()?;
    check("after")?;
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}
