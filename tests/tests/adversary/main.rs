//! What an attacker who is not on the path of a connection can do by sending packets with its
//! addresses: nothing that ends it.
//!
//! A client and a server have a connection of real sockets. The attacker's packets come in through
//! the same interface as the client's.
#![allow(missing_docs)]

mod floods;
mod guesses;
mod other_side;
mod siege;
mod syn;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use serde_json::Value;
use twheel_tests::{
    forge::Forger,
    pair::{Connection, Family, Pair, SERVER},
    running::{Printed, Twheel},
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

/// Reads the output of a run until it reports the outcome of an action.
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

/// Each end receives what the other sends.
fn talk(connection: &mut Connection) -> Result<()> {
    connection
        .talk()
        .context("the server does not receive the client's data")?;
    connection.server.write_all(b"!")?;
    let mut byte = [0];
    connection
        .client
        .read_exact(&mut byte)
        .context("the client does not receive the server's data")
}

/// A run on the server with a timeout of a second for unanswered SYNs, and of an hour for
/// connections.
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

/// Drops the server's packets without data, such as its answer to a SYN that does not fit (RFC
/// 5961, section 4).
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

/// Lets those packets pass again.
fn end_silence(pair: &Pair) -> Result<()> {
    pair.server.nft("delete table inet silence")
}

/// The states of the flows that are tracked.
fn states(pair: &Pair) -> Result<Vec<String>> {
    let ended = pair
        .server
        .twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    let state = |line: &Printed| -> Result<String> {
        let flow: Value = serde_json::from_str(&line.text)?;
        Ok(flow["state"].as_str().context("no state")?.to_owned())
    };
    ended.lines.iter().map(state).collect()
}

/// The only flow, as `twheel flows` prints it.
fn flow(pair: &Pair) -> Result<Value> {
    let ended = pair
        .server
        .twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    ensure!(ended.lines.len() == 1, "{} flows", ended.lines.len());
    Ok(serde_json::from_str(&ended.lines[0].text)?)
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

/// Makes the kernel acknowledge the next data when it comes, and not with the next data sent.
fn acknowledge_at_once(socket: &TcpStream) -> Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1)
}

fn set(socket: &TcpStream, level: i32, option: i32, value: libc::c_int) -> Result<()> {
    // SAFETY: the option's value is an `int` that lives until the call returns.
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
