//! A packet that somebody forges in one zone or VLAN closes no socket of another.

use std::{
    net::{SocketAddr, TcpListener},
    thread,
};

use anyhow::{Context, Result, ensure};
use etherparse::{PacketBuilder, TcpHeader};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Connection, Family, PORT},
    path,
    running::{PolicyFile, Twheel},
    skipped,
};

use crate::{FAMILIES, HOST, LEGS, Lab, Said, actions, is_open, millis, run};

/// Flows outside a zone expire soon, and those in it late, or the reverse.
fn policy(action: &str, outside: &str, inside: &str) -> String {
    format!(
        "reap = ['{action}']\n[timeouts]\nestablished = '{outside}'\nunreplied = '{outside}'\n\
         [[rule]]\nname = 'inside'\nzone = 7\n\
         timeouts = {{ established = '{inside}', unreplied = '{inside}' }}\n"
    )
}

/// A connection from a host to an address of the router.
fn connect(lab: &Lab, host: usize, local: SocketAddr) -> Result<Connection> {
    let listen = || TcpListener::bind(local).context("cannot listen");
    let listener = lab.router.enter(listen)?;
    let mut connection = Connection::open(&lab.hosts[host], &listener)?;
    connection.talk()?;
    Ok(connection)
}

/// Sends an ACK of a connection through another host's interface. twheel sees it; to the router's
/// network stack it is for somebody else.
fn forge(from: &Namespace, client: SocketAddr, server: SocketAddr) -> Result<()> {
    let link = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let packet = match (client, server) {
        (SocketAddr::V4(client), SocketAddr::V4(server)) => {
            link.ipv4(client.ip().octets(), server.ip().octets(), 64)
        }
        (SocketAddr::V6(client), SocketAddr::V6(server)) => {
            link.ipv6(client.ip().octets(), server.ip().octets(), 64)
        }
        _ => anyhow::bail!("{client} and {server} are of two families"),
    };
    let packet = packet.tcp_header(TcpHeader {
        source_port: client.port(),
        destination_port: server.port(),
        sequence_number: 12_345,
        acknowledgment_number: 54_321,
        ack: true,
        window_size: 1000,
        ..TcpHeader::default()
    });
    let mut frame = Vec::new();
    packet.write(&mut frame, &[])?;
    path::send(&from.enter(|| path::open(HOST, 0))?, &frame)
}

/// Expects one action for each connection, with this outcome; and that the sockets are open unless
/// they were closed.
fn expect(twheel: &Twheel, connections: &[&Connection], outcome: &str) -> Result<()> {
    let said = actions(twheel, connections.len(), millis(6000))?;
    let reaped: Vec<&Said> = said.iter().filter(|it| it.is("reap")).collect();
    ensure!(reaped.len() == connections.len(), "{said:?}");
    for connection in connections {
        let its = reaped.iter().find(|it| it.src() == connection.name);
        let its = its.with_context(|| format!("nothing on {}: {said:?}", connection.name))?;
        ensure!(its.text("outcome") == outcome, "{its:?}");
        ensure!(
            is_open(&connection.server) == (outcome != "done"),
            "{its:?}"
        );
    }
    Ok(())
}

fn addresses(link: usize, port: u16) -> [SocketAddr; 2] {
    FAMILIES.map(|family| SocketAddr::new(Lab::address(family, link, 1), port))
}

fn start(lab: &Lab, policy: &PolicyFile) -> Result<Twheel> {
    let zone = format!("{}=7", LEGS[1]);
    let options = [
        "--iface",
        LEGS[1],
        "--zone",
        &zone,
        "--tick",
        "100ms",
        "--policy",
        policy.path(),
        "--reap-max-share",
        "100",
    ];
    run(&lab.router, LEGS[0], &options)
}

#[test]
fn a_packet_outside_a_zone_closes_no_socket_in_it() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    // An address that tells nothing of the zone.
    let anywhere = SocketAddr::new("10.79.0.1".parse()?, PORT);
    lab.router.add_address(anywhere.ip(), 32, "lo")?;
    let policy = PolicyFile::new("outside", &policy("socket", "2s", "1h"))?;
    let twheel = start(&lab, &policy)?;
    let [v4, v6] = addresses(1, PORT);
    let inside: Vec<_> = [v4, v6, anywhere]
        .into_iter()
        .map(|local| connect(&lab, 1, local))
        .collect::<Result<_>>()?;
    for (connection, local) in inside.iter().zip([v4, v6, anywhere]) {
        forge(&lab.hosts[0], connection.name, local)?;
    }
    expect(&twheel, &inside.iter().collect::<Vec<_>>(), "other_zone")?;
    // Even if the table does not know the flows of the zone.
    let deleted = ["delete", "--iface", LEGS[0], "zone == 7"];
    let ended = lab.router.twheel_once(&deleted)?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    for (connection, local) in inside.iter().zip([v4, v6]) {
        forge(&lab.hosts[0], connection.name, local)?;
    }
    expect(&twheel, &[&inside[0], &inside[1]], "other_zone")?;
    // Sockets outside the zone are closed, whichever address they have.
    let outside: Vec<_> = addresses(0, PORT)
        .into_iter()
        .map(|local| connect(&lab, 0, local))
        .chain([connect(&lab, 0, SocketAddr::new(anywhere.ip(), PORT + 1))])
        .collect::<Result<_>>()?;
    expect(&twheel, &outside.iter().collect::<Vec<_>>(), "done")?;
    ensure!(inside.iter().all(|it| is_open(&it.server)));
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn a_packet_outside_a_zone_resets_nobody_in_it() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let policy = PolicyFile::new("reset", &policy("reset", "1s", "1h"))?;
    let twheel = start(&lab, &policy)?;
    let local = addresses(1, PORT)[0];
    let inside = connect(&lab, 1, local)?;
    forge(&lab.hosts[0], inside.name, local)?;
    expect(&twheel, &[&inside], "other_zone")?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn a_packet_in_a_zone_closes_no_socket_outside_it() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let policy = PolicyFile::new("inside", &policy("socket", "1h", "2s"))?;
    let twheel = start(&lab, &policy)?;
    // They come in outside the zone, to addresses of the interface in it.
    let locals = addresses(1, PORT);
    let outside: Vec<_> = locals
        .into_iter()
        .map(|local| connect(&lab, 0, local))
        .collect::<Result<_>>()?;
    for (connection, local) in outside.iter().zip(locals) {
        forge(&lab.hosts[1], connection.name, local)?;
    }
    expect(&twheel, &outside.iter().collect::<Vec<_>>(), "other_zone")?;
    // A socket in the zone is closed.
    let inside = connect(&lab, 1, addresses(1, PORT + 1)[0])?;
    expect(&twheel, &[&inside], "done")?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn a_packet_without_a_tag_closes_no_socket_of_a_vlan() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    let leg = LEGS[0];
    for (namespace, below, address) in [(&lab.router, leg, 1), (&lab.hosts[0], HOST, 2)] {
        let add = format!("link add link {below} name vlan10 type vlan id 10");
        if let Err(error) = namespace.ip(&add) {
            ensure!(error.to_string().contains("Unknown device type"), "{error}");
            skipped("this kernel has no VLAN devices");
            return Ok(());
        }
        namespace.ip("link set vlan10 up")?;
        namespace.add_address(Lab::address(Family::V4, 9, address), 24, "vlan10")?;
    }
    let policy = "reap = ['socket']\n[timeouts]\nestablished = '2s'\nunreplied = '2s'\n\
                  [[rule]]\nname = 'vlan'\nvlan = 10\ntimeouts = { established = '1h' }\n";
    let policy = PolicyFile::new("vlan", policy)?;
    let options = [
        "--tick",
        "100ms",
        "--policy",
        policy.path(),
        "--hook",
        "tcx",
    ];
    let twheel = run(&lab.router, leg, &options)?;
    let local = addresses(9, PORT)[0];
    let tagged = connect(&lab, 0, local)?;
    forge(&lab.hosts[0], tagged.name, local)?;
    expect(&twheel, &[&tagged], "other_zone")?;
    // One without a tag is closed.
    let untagged = connect(&lab, 0, addresses(0, PORT)[0])?;
    expect(&twheel, &[&untagged], "done")?;
    thread::sleep(millis(500));
    ensure!(is_open(&tagged.server));
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}
