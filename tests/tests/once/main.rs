//! Each packet counts once: if several interfaces of a host see the same packet, twheel still
//! counts what `nf_conntrack` counts.

mod between;
mod lab;

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::Family,
    running::Twheel,
};

use crate::lab::*;

/// A gateway with this many legs, of which these are named.
fn gateway(legs: usize, named: &[usize], options: &[&str]) -> Result<()> {
    require_root();
    let lab = Lab::new(legs)?;
    let names: Vec<_> = named.iter().map(|number| leg(*number)).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let twheel = lab.watch(&names, options)?;
    let open = lab.talk()?;
    for family in FAMILIES {
        let at = SocketAddr::new(address(family, 1, 2), 9000);
        datagrams(&lab.hosts[0], &lab.hosts[1], at, 5)?;
    }
    // Flows that use none of the named legs are not seen.
    let is_seen = |src: SocketAddr, dst: SocketAddr| {
        let is_of = |end: SocketAddr| {
            named.iter().any(|link| {
                FAMILIES
                    .iter()
                    .any(|family| address(*family, *link, 2) == end.ip())
            })
        };
        is_of(src) || is_of(dst)
    };
    let flows = agree(
        (&lab.router, names[0]),
        &lab.conntrack,
        is_seen,
        8 * legs * (legs - 1) / 2,
    )?;
    for flow in flows {
        let src: IpAddr = flow["src"].as_str().context("no src")?.parse()?;
        // A flow's interface is the one through which its initiator's packets come in, or, if that
        // is not watched, go out.
        let comes_in = named.iter().find(|link| {
            FAMILIES
                .iter()
                .any(|family| address(*family, **link, 2) == src)
        });
        match comes_in {
            Some(link) => {
                assert_eq!(flow["iface"], leg(*link), "{flow}");
                assert_eq!(flow["direction"], "in", "{flow}");
            }
            None => assert_eq!(flow["direction"], "out", "{flow}"),
        }
    }
    nothing_is_ignored(&lab.router)?;
    // Packets that another interface has already counted are counted apart.
    let (touched, again) = (
        lab.router.counter("touched")? + lab.router.counter("created")?,
        lab.router.counter("seen_again")?,
    );
    let packets: u64 = of_conntrack(&lab.conntrack)?
        .iter()
        .filter(|((_, src, dst), _)| is_seen(*src, *dst))
        .map(|(_, (_, [orig, reply]))| orig[0] + reply[0])
        .sum();
    ensure!(touched == packets, "{touched} and {again}, not {packets}");
    drop(open);
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn two_legs() -> Result<()> {
    gateway(2, &[0, 1], &[])
}

#[test]
fn two_legs_by_tcx() -> Result<()> {
    gateway(2, &[0, 1], &["--hook", "tcx"])
}

#[test]
fn three_legs_of_which_two_are_named() -> Result<()> {
    gateway(3, &[0, 2], &[])
}

#[test]
fn three_legs_of_which_one_is_named() -> Result<()> {
    gateway(3, &[1], &[])
}

#[test]
fn five_legs() -> Result<()> {
    gateway(5, &[4, 1, 0, 3, 2], &[])
}

#[test]
fn two_legs_with_retransmission_timers() -> Result<()> {
    gateway(2, &[0, 1], &["--rto", "on"])
}

/// The gateway and the hosts behind it are network namespaces of one machine.
#[test]
fn a_gateway_and_its_hosts() -> Result<()> {
    require_root();
    let lab = Lab::new(3)?;
    let names: Vec<_> = lab
        .hosts
        .iter()
        .chain([&lab.router])
        .map(Namespace::name)
        .collect();
    let names = names.join(",");
    let args = [&OPTIONS[..], &["--iface", "all", "--netns", &names]].concat();
    let twheel = Twheel::start(&lab.router, &args)?;
    for host in &lab.hosts {
        twheel.await_stderr(&format!("{}/{HOST}: attached", host.name()))?;
    }
    for link in 0..3 {
        twheel.await_stderr(&format!("{}/{}: attached", lab.router.name(), leg(link)))?;
    }
    let open = lab.talk()?;
    for family in FAMILIES {
        let at = SocketAddr::new(address(family, 1, 2), 9000);
        datagrams(&lab.hosts[0], &lab.hosts[1], at, 5)?;
    }
    let all = |_, _| true;
    let flows = agree((&lab.router, "all"), &lab.conntrack, all, 48)?;
    // Each flow was first seen when it left its initiator's host.
    for flow in flows {
        let src: IpAddr = flow["src"].as_str().context("no src")?.parse()?;
        let is_of = |link: &usize| {
            FAMILIES
                .iter()
                .any(|family| address(*family, *link, 2) == src)
        };
        let link = (0..3).find(is_of).context("not one of the hosts")?;
        assert_eq!(
            flow["iface"],
            format!("{}/{HOST}", lab.hosts[link].name()),
            "{flow}"
        );
        assert_eq!(flow["direction"], "out", "{flow}");
    }
    nothing_is_ignored(&lab.router)?;
    drop(open);
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// A host sends through one leg and receives through another; halfway, the first one changes.
#[test]
fn asymmetric_routes_and_one_that_changes() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    // A second link to the first host.
    join(&lab.hosts[0], &lab.router, "second", "leg2")?;
    for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
        let [gateway, own] = [1, 2].map(|it| address(family, 2, it));
        lab.router.add_address(gateway, length, "leg2")?;
        lab.hosts[0].add_address(own, length, "second")?;
        let host = match family {
            Family::V4 => format!("{}/32", address(family, 0, 2)),
            Family::V6 => format!("{}/128", address(family, 0, 2)),
        };
        // Packets to the first host use the second link.
        lab.router
            .ip(&format!("route add {host} via {own} dev leg2"))?;
    }
    lab.hosts[0].enter(|| {
        for interfaces in ["all", "default", HOST, "second"] {
            fs::write(
                format!("/proc/sys/net/ipv4/conf/{interfaces}/rp_filter"),
                "0",
            )?;
        }
        Ok(())
    })?;
    let names = [leg(0), leg(1), leg(2)];
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let twheel = lab.watch(&names, &[])?;
    let mut open = lab.talk()?;
    let all = |_, _| true;
    agree((&lab.router, names[0]), &lab.conntrack, all, 16)?;
    nothing_is_ignored(&lab.router)?;

    // From now on the host sends through its second link.
    for family in FAMILIES {
        let gateway = address(family, 2, 1);
        lab.hosts[0].ip(&format!("route replace default via {gateway} dev second"))?;
    }
    for _ in 0..5 {
        for connection in &mut open {
            connection.talk()?;
        }
    }
    let flows = agree((&lab.router, names[0]), &lab.conntrack, all, 16)?;
    let moved = lab.router.counter("moved")?;
    // For each open connection, the first host's side has moved.
    assert_eq!(moved, open.len() as u64);
    let from_second = flows.iter().filter(|flow| flow["iface"] == "leg2").count();
    assert_eq!(
        from_second,
        open.len() / 2,
        "flows that the first host began"
    );
    for counter in ["ignored", "same_way"] {
        assert_eq!(lab.router.counter(counter)?, 0, "{counter}");
    }
    drop(open);
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// Two hosts behind the ports of a bridge; the bridging host has an address on the bridge, too.
#[test]
fn a_bridge_and_its_ports() -> Result<()> {
    require_root();
    let bridge = Namespace::new("bridge")?;
    let conntrack = track(&bridge)?;
    bridge.ip("link add br0 type bridge")?;
    bridge.ip("link set br0 up")?;
    let mut hosts = Vec::new();
    let mut theirs = Vec::new();
    for number in 0..2 {
        let host = Namespace::new("host")?;
        join(&host, &bridge, HOST, &leg(number))?;
        bridge.ip(&format!("link set {} master br0", leg(number)))?;
        theirs.push(track(&host)?);
        hosts.push(host);
    }
    for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
        for (host, number, interface) in [
            (&bridge, 1, "br0"),
            (&hosts[0], 2, HOST),
            (&hosts[1], 3, HOST),
        ] {
            host.add_address(address(family, 0, number), length, interface)?;
        }
    }
    let (here, there) = (listen(&bridge, 0, 1)?, listen(&hosts[1], 0, 3)?);
    let twheel = watch(&bridge, &["leg0", "leg1", "br0"], &[])?;
    let mut open = Vec::new();
    for listener in here.iter().chain(&there) {
        open.extend(connections(&hosts[0], listener)?);
    }
    // Only the hosts' conntracks know what passes between the ports. The bridge's conntrack also
    // knows what is the bridge's own.
    let all = |_, _| true;
    let flows = agree((&bridge, "leg0"), &theirs[0], all, 16)?;
    assert!(
        flows.iter().all(|flow| flow["iface"] == "leg0"),
        "{flows:?}"
    );
    // It knows at least the bridge's own connections.
    assert!(of_conntrack(&conntrack)?.len() >= 8);
    nothing_is_ignored(&bridge)?;
    drop(open);
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// On the loopback interface, each packet goes out and comes in.
#[test]
fn loopback() -> Result<()> {
    require_root();
    let host = Namespace::new("host")?;
    let conntrack = track(&host)?;
    for hook in ["xdp", "tcx"] {
        let twheel = watch(&host, &["lo"], &["--hook", hook])?;
        let mut open = Vec::new();
        for at in ["127.0.0.1:7777", "[::1]:7777"] {
            let at: SocketAddr = at.parse()?;
            let listener = host.enter(|| Ok(TcpListener::bind(at)?))?;
            open.extend(connections(&host, &listener)?);
        }
        let ports: Vec<_> = of_twheel(&host, "lo")?
            .0
            .into_keys()
            .map(|key| key.1)
            .collect();
        let is_new = |src: SocketAddr, _| ports.contains(&src);
        agree((&host, "lo"), &conntrack, is_new, 8)?;
        nothing_is_ignored(&host)?;
        drop(open);
        ensure!(twheel.stop()?.code() == Some(0));
    }
    Ok(())
}
