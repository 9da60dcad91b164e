//! Conntrack entries are deleted, and both ends are reset.

use std::{
    collections::HashSet,
    fs,
    io::{Read, Write},
    net::SocketAddr,
};

use anyhow::{Context, Result};
use twheel_tests::{
    ctnetlink::Conntrack,
    netns::{Namespace, require_root},
    pair::Connection,
    running::Twheel,
};

use crate::{Busy, FAMILIES, HOST, LEGS, Lab, actions, count, is_open, is_reset, millis, run};

/// Makes the router track connections and masquerade those that leave by its first leg.
fn masquerade(router: &Namespace) -> Result<Conntrack> {
    router.enter(|| {
        Ok(fs::write(
            "/proc/sys/net/netfilter/nf_conntrack_timestamp",
            "1",
        )?)
    })?;
    let conntrack = Conntrack::open(router)?;
    router.nft(&format!(
        "table inet lab {{
            chain post {{ type nat hook postrouting priority srcnat; oifname {0} masquerade; }}
            chain forward {{ type filter hook forward priority filter; ct state invalid drop; }}
        }}",
        LEGS[0]
    ))?;
    Ok(conntrack)
}

/// A router with NAT between the server and a client, and a run on this leg of the router, with
/// these actions.
fn reap_behind_nat(leg: &str, actions: &str) -> Result<(Lab, Conntrack, Twheel)> {
    let lab = Lab::new(2)?;
    let conntrack = masquerade(&lab.router)?;
    let twheel = run(
        &lab.router,
        leg,
        &[
            "--timeout",
            "1s",
            "--reap",
            actions,
            "--reap-max-share",
            "100",
        ],
    )?;
    Ok((lab, conntrack, twheel))
}

/// The clients' endpoints of the connections that conntrack knows.
fn known(conntrack: &Conntrack) -> Result<HashSet<SocketAddr>> {
    Ok(conntrack.dump()?.iter().map(|entry| entry.src).collect())
}

#[test]
fn conntrack_entries_behind_nat_are_deleted_by_either_tuple() -> Result<()> {
    require_root();
    // The watched legs: the LAN's, where flows have the addresses before NAT, and the WAN's.
    for leg in [LEGS[1], LEGS[0]] {
        let (lab, conntrack, twheel) = reap_behind_nat(leg, "conntrack")?;
        let busy = lab.connect_some(1, 20)?;
        let busy_names: HashSet<_> = busy
            .iter()
            .map(|it| it.client.local_addr())
            .collect::<Result<_, _>>()?;
        let busy = Busy::start(busy, millis(100));
        let idle = lab.connect_some(1, 20)?;
        let translated =
            |it: &Connection| Ok::<_, std::io::Error>(it.client.local_addr()? != it.name);
        assert!(translated(&idle[0])? && translated(&idle[1])?, "no NAT");
        assert_eq!(known(&conntrack)?.len(), 40);
        let said = actions(&twheel, 20, millis(3000))?;
        assert_eq!(count(&said, "conntrack", "done"), 20, "{leg}: {said:?}");
        assert_eq!(known(&conntrack)?, busy_names, "{leg}");
        busy.stop()?;
        // The conntrack action closes no sockets.
        assert!(idle.iter().all(|it| is_open(&it.server)));
        twheel.stop()?;
    }
    Ok(())
}

/// Connections of three kinds: no data was sent; one side has sent; both have.
fn spoken(lab: &Lab) -> Result<Vec<Connection>> {
    let mut connections = Vec::new();
    for family in FAMILIES {
        for kind in 0..3 {
            let mut connection = lab.connect(1, family)?;
            if kind > 0 {
                connection.talk()?;
            }
            if kind > 1 {
                for size in [1, 100_000, 7] {
                    connection.server.write_all(&vec![7; size])?;
                    connection.client.read_exact(&mut vec![0; size])?;
                    connection.talk()?;
                }
            }
            connections.push(connection);
        }
    }
    Ok(connections)
}

#[test]
fn both_ends_of_an_idle_connection_are_reset() -> Result<()> {
    require_root();
    let args = [
        "--timeout",
        "1s",
        "--reap",
        "reset",
        "--reap-max-share",
        "100",
    ];
    let lab = Lab::new(2)?;
    // On the router, and on the host of one end.
    for (at, interface) in [
        (&lab.router, LEGS[0]),
        (&lab.router, LEGS[1]),
        (lab.server(), HOST),
        (&lab.hosts[1], HOST),
    ] {
        let twheel = run(at, interface, &args)?;
        let mut connections = spoken(&lab)?;
        let busy = Busy::start(lab.connect_some(1, 4)?, millis(100));
        let said = actions(&twheel, 6, millis(3000))?;
        assert_eq!(count(&said, "reset", "done"), 6, "{interface}: {said:?}");
        for connection in &mut connections {
            is_reset(connection).with_context(|| format!("{} {interface}", at.name()))?;
        }
        busy.stop()?;
        twheel.stop()?;
    }
    Ok(())
}

#[test]
fn resets_find_their_way_through_nat_before_the_entry_goes() -> Result<()> {
    require_root();
    for leg in [LEGS[1], LEGS[0]] {
        // The actions in the other order.
        let (lab, conntrack, twheel) = reap_behind_nat(leg, "conntrack,reset")?;
        let mut connections = spoken(&lab)?;
        let said = actions(&twheel, 12, millis(3000))?;
        assert_eq!(count(&said, "reset", "done"), 6, "{leg}: {said:?}");
        assert_eq!(count(&said, "conntrack", "done"), 6, "{leg}: {said:?}");
        for connection in &mut connections {
            is_reset(connection).with_context(|| leg.to_owned())?;
        }
        assert_eq!(known(&conntrack)?.len(), 0);
        twheel.stop()?;
    }
    Ok(())
}
