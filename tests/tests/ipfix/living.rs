//! Flows that are reported while they live, and flows whose endpoints are translated.

use std::{
    fs,
    net::{IpAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    gateway::Gateway,
    netns::{PATIENCE, require_root},
    pair::{Connection, Family, Pair, SERVER},
    running::Twheel,
};

use crate::{
    collectors::{Nfcapd, free_port, is_installed},
    dissected::record,
    flows::{Exporter, Record, past},
    listener::{Session, the_number},
};

/// Active timeout; reason of a record (IANA element 136).
const ACTIVE: u8 = 2;

/// Runs twheel until so many flows have ended; returns the lines that it has printed.
fn events_until_ended(twheel: &Twheel, ends: usize) -> Result<Vec<Value>> {
    let end = Instant::now() + PATIENCE;
    let mut events: Vec<Value> = Vec::new();
    while events.iter().filter(|it| it["event"] == "end").count() < ends {
        if let Some(line) = twheel.line(Duration::from_millis(100))? {
            events.push(serde_json::from_str(&line.text)?);
        }
        ensure!(Instant::now() < end, "{events:?}");
    }
    Ok(events)
}

/// Packets and bytes of all records that one end of a flow has sent.
fn sums(records: &[Record], sender: (IpAddr, u16)) -> (u64, u64) {
    let sent = records.iter().filter(|it| it.ends[0] == sender);
    sent.fold((0, 0), |sum, it| (sum.0 + it.packets, sum.1 + it.bytes))
}

/// The records of each flow add up to what its end says.
fn add_up(records: &[Record], ends: &[Value]) -> Result<()> {
    for end in ends {
        let number = |key: &str| {
            let number = end[key].as_u64();
            number.with_context(|| format!("no {key}: {end}"))
        };
        for (address, port, side) in [("src", "sport", "orig"), ("dst", "dport", "reply")] {
            let address = end[address].as_str().context("no address")?.parse()?;
            let port = number(port)? as u16;
            // The flows have one responder: the receiver tells them apart.
            let other = number(if side == "orig" { "dport" } else { "sport" })? as u16;
            let records: Vec<_> = records
                .iter()
                .filter(|it| it.ends[1].1 == other)
                .cloned()
                .collect();
            let total = (
                number(&format!("{side}_packets"))?,
                number(&format!("{side}_bytes"))?,
            );
            assert_eq!(sums(&records, (address, port)), total, "{side}: {end}");
        }
    }
    Ok(())
}

#[test]
fn the_records_of_a_living_flow_add_up_to_its_end() -> Result<()> {
    require_root();
    let directory = Directory::new("ipfix-updates")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--json", "--accounting"];
    args.extend(["--events", "update,end", "--active-timeout", "300ms"]);
    args.extend(["--timeout", "established=1h,close=300ms,time_wait=300ms"]);
    args.extend(["--history", directory.path()]);
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut connections = [pair.connect(Family::V4)?, pair.connect(Family::V6)?];
    for _ in 0..20 {
        for connection in &mut connections {
            connection.talk()?;
        }
        thread::sleep(Duration::from_millis(60));
    }
    for connection in connections {
        connection.close()?;
    }
    let events = events_until_ended(&twheel, 2)?;
    ensure!(twheel.stop()?.code() == Some(0));
    let updates = events.iter().filter(|it| it["event"] == "update");
    // A side that has sent nothing meanwhile, since this machine was held up, has no record.
    let sides = updates.flat_map(|it| [&it["orig_packets_delta"], &it["reply_packets_delta"]]);
    let updates = sides.filter(|packets| **packets != 0).count();
    ensure!(updates >= 8, "{updates} updates");
    let ends = past(&pair.server, directory.path())?;
    assert_eq!(ends.len(), 2);

    let exporter = Exporter {
        host: &pair.server,
        interface: SERVER,
        directory: &directory,
    };
    let session = Session::parse(&exporter.messages("parsed", &[])?, 0)?;
    let read = session.flows.iter().map(record);
    let read = read.collect::<Result<Vec<_>>>()?;
    add_up(&read, &ends)?;
    let of = |reason: u8| read.iter().filter(|it| it.end_reason == reason).count();
    assert_eq!((of(ACTIVE), of(3), read.len()), (updates, 4, updates + 4));
    for event in events.iter().filter(|it| it["event"] == "update") {
        let sent = (&event["sport"], &event["orig_packets_delta"]);
        let is_it = |it: &&Record| {
            it.end_reason == ACTIVE && (&it.ends[0].1.into(), &it.packets.into()) == sent
        };
        assert!(read.iter().any(|it| is_it(&it)), "{event} {read:#?}");
    }
    if is_installed("nfcapd") {
        let port = free_port(&pair.server)?;
        let nfcapd = Nfcapd::start(&pair.server, &directory, port)?;
        exporter.once(&format!("127.0.0.1:{port}"), "nfcapd-state", &[])?;
        let (stored, _) = nfcapd.stop()?;
        assert_eq!(stored.len(), read.len());
        add_up(&stored, &ends)?;
        fs::remove_dir_all(directory.0.join("nfcapd"))?;
    }
    Ok(())
}

#[test]
fn translated_endpoints_are_in_their_elements() -> Result<()> {
    require_root();
    let lab = Gateway::new()?;
    let directory = Directory::new("ipfix-nat")?;
    let listener = lab
        .server
        .enter(|| Ok(TcpListener::bind("192.0.2.2:8080")?))?;
    let mut args = vec!["--iface", "lan", "--json", "--timeout", "700ms", "--nat"];
    args.extend(["--accounting", "--history", directory.path()]);
    let twheel = Twheel::start(&lab.gateway, &args)?;
    let asked = "203.0.113.9:8080".parse()?;
    let mut connection = Connection::open_to(&lab.client, &listener, asked)?;
    connection.talk()?;
    let here = connection.client.local_addr()?;
    let there = connection.name;
    events_until_ended(&twheel, 1)?;
    ensure!(twheel.stop()?.code() == Some(0));

    let exporter = Exporter {
        host: &lab.gateway,
        interface: "lan",
        directory: &directory,
    };
    let session = Session::parse(&exporter.messages("state", &[])?, 0)?;
    assert_eq!(session.flows.len(), 2);
    for fields in &session.flows {
        let ends = record(fields)?.ends;
        let (mut outside, inside) = ([there, listener.local_addr()?], [here, asked]);
        if ends[0].0 != here.ip() {
            outside.reverse();
            assert_eq!(ends[0], (inside[1].ip(), inside[1].port()));
        }
        for (side, end) in [("source", outside[0]), ("destination", outside[1])] {
            let name = format!("IANA(PostNat{side}Ipv4address)");
            let address = fields.get(&name).with_context(|| format!("{fields:?}"))?;
            let address = <[u8; 4]>::try_from(&address[..])?;
            assert_eq!(IpAddr::from(address), end.ip());
            let name = format!("IANA(PostNapt{side}TransportPort)");
            assert_eq!(the_number(fields, &name)?, u64::from(end.port()));
        }
    }
    Ok(())
}
