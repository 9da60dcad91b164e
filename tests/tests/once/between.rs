//! Interfaces that are not named, between named ones; and packets that change nothing.

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::Family,
};

use crate::lab::*;

/// Puts a bridge before the router's first leg, and moves the router's addresses to it.
fn bridge(lab: &Lab) -> Result<()> {
    lab.router.ip("link add br0 type bridge")?;
    lab.router.ip("link set br0 up")?;
    lab.router.ip("addr flush dev leg0")?;
    lab.router.ip("link set leg0 master br0")?;
    for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
        lab.router
            .add_address(address(family, 0, 1), length, "br0")?;
    }
    Ok(())
}

/// twheel counts what conntrack counts, and ignores no packet.
fn agree_on_all(lab: &Lab) -> Result<()> {
    agree((&lab.router, "leg0"), &lab.conntrack, |_, _| true, 16)?;
    nothing_is_ignored(&lab.router)
}

/// twheel has counted each of conntrack's packets once.
fn counted_once(lab: &Lab) -> Result<()> {
    let packets: u64 = of_conntrack(&lab.conntrack)?
        .values()
        .map(|(_, [orig, reply])| orig[0] + reply[0])
        .sum();
    let counted = lab.router.counter("touched")? + lab.router.counter("created")?;
    ensure!(counted == packets, "{counted} packets, not {packets}");
    Ok(())
}

/// For a packet that leaves by one leg, the kernel names the bridge as its incoming interface; but
/// it was seen at the bridge's port.
#[test]
fn a_bridge_that_is_not_named_between_two_legs_that_are() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    bridge(&lab)?;
    let twheel = lab.watch(&["leg0", "leg1"], &[])?;
    let _open = lab.talk()?;
    agree_on_all(&lab)?;
    counted_once(&lab)?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// The same with a bridge that is made, and gets its port, after the run has started.
#[test]
fn a_bridge_that_comes_between_later() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let twheel = lab.watch(&["leg*"], &[])?;
    bridge(&lab)?;
    // Long enough for the programs to be told.
    thread::sleep(Duration::from_millis(500));
    let _open = lab.talk()?;
    agree_on_all(&lab)?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// A client that gets no answer sends its SYN again: each is counted where it comes in, and not
/// again where it goes out. (conntrack counts only the first of them: `nf_conntrack_tcp_packet`
/// does not change an entry that has seen no answer.)
#[test]
fn a_syn_that_is_sent_again() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let twheel = lab.watch(&["leg0", "leg1"], &[])?;
    let nobody: IpAddr = address(Family::V4, 1, 9);
    lab.router.ip(&format!(
        "neigh add {nobody} lladdr 02:00:00:00:00:09 dev leg1"
    ))?;
    let host = &lab.hosts[0];
    let before = retransmitted(host)?;
    host.enter(|| {
        let at = SocketAddr::new(nobody, 9);
        let answer = TcpStream::connect_timeout(&at, Duration::from_millis(3500));
        ensure!(answer.is_err(), "{nobody} answers");
        Ok(())
    })?;
    let again = retransmitted(host)? - before;
    ensure!(again >= 2, "{again}");
    let (_, flows) = of_twheel(&lab.router, "leg0")?;
    ensure!(flows.len() == 1, "{flows:?}");
    ensure!(flows[0]["orig_packets"] == 1 + again, "{again}: {flows:?}");
    let [ignored, seen] = ["ignored", "seen_again"].map(|it| lab.router.counter(it));
    assert_eq!((ignored?, seen?), (again, 1 + again));
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// How many segments a host has sent again.
fn retransmitted(host: &Namespace) -> Result<u64> {
    let told = host.enter(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?))?;
    let mut lines = told.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = lines.next().zip(lines.next()).context("no line of TCP")?;
    let mut fields = names.split(' ').zip(values.split(' '));
    let of = fields.find(|(name, _)| *name == "RetransSegs");
    Ok(of.context("no RetransSegs")?.1.parse()?)
}
