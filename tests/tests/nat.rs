//! The translated endpoints of flows on a gateway.

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    gateway::Gateway,
    netns::{PATIENCE, require_root},
    pair::Connection,
    running::Twheel,
};

fn events(twheel: &Twheel, count: usize) -> Result<Vec<String>> {
    let end = Instant::now() + PATIENCE;
    let mut events = Vec::new();
    while events.len() < count {
        if let Some(line) = twheel.line(Duration::from_millis(100))? {
            events.push(line.text);
        }
        ensure!(Instant::now() < end, "{events:?}");
    }
    Ok(events)
}

#[test]
fn a_gateways_flows_say_what_they_are_on_the_other_side() -> Result<()> {
    require_root();
    let lab = Gateway::new()?;
    let history = Directory::new("nat")?;
    let listener = lab
        .server
        .enter(|| Ok(TcpListener::bind("192.0.2.2:8080")?))?;
    let run = |interface: &str, more: &[&str]| {
        let mut args = vec!["--iface", interface, "--json", "--timeout", "700ms"];
        args.extend(["--events", "update,end", "--history", history.path()]);
        args.extend(more);
        Twheel::start(&lab.gateway, &args)
    };
    let inside = run("lan", &["--nat", "--active-timeout", "200ms"])?;
    let outside = run("wan", &["--nat"])?;
    let translated = listener.local_addr()?;
    let asked = "203.0.113.9:8080".parse()?;
    // Until the gateway's neighbours are known, a first attempt may take a second.
    let mut connection = Connection::open_to(&lab.client, &listener, asked)?;
    connection.talk()?;
    let here = connection.client.local_addr()?;
    let there = connection.name;
    ensure!(there.ip() == "192.0.2.1".parse::<std::net::IpAddr>()?);

    let mut told = events(&inside, 2)?;
    // On a busy machine its packets may be so far apart that it is updated more than once.
    while !told[told.len() - 1].contains("\"event\":\"end\"") {
        told.extend(events(&inside, 1)?);
    }
    for (number, line) in told.iter().enumerate() {
        let event: Value = serde_json::from_str(line)?;
        let kind = match number + 1 == told.len() {
            true => "end",
            false => "update",
        };
        assert_eq!(event["event"], kind, "{event}");
        assert_eq!(event["src"], here.ip().to_string());
        assert_eq!(event["dst"], "203.0.113.9");
        for (field, value) in [
            ("nat_src", Value::from(there.ip().to_string())),
            ("nat_sport", there.port().into()),
            ("nat_dst", translated.ip().to_string().into()),
            ("nat_dport", translated.port().into()),
        ] {
            assert_eq!(event[field], value, "{field}: {event}");
        }
    }
    let event: Value = serde_json::from_str(&events(&outside, 1)?[0])?;
    assert_eq!(event["src"], "192.0.2.1", "{event}");
    assert_eq!(event["nat_src"], "10.0.0.2", "{event}");
    assert_eq!(event["nat_dst"], "203.0.113.9", "{event}");

    // The history says the same.
    let args = ["expired", "--iface", "lan", "--json", "--events"];
    let args = [&args[..], &["update,end", "--history", history.path()]].concat();
    let past: Vec<_> = lab.gateway.twheel_once(&args)?.lines;
    let past: Vec<_> = past.into_iter().map(|it| it.text).collect();
    assert_eq!(past, told);
    inside.stop()?;

    // What is not translated has no such fields; nor has anything without the option.
    let plain = run("lan", &[])?;
    let mut connection = Connection::open_to(&lab.client, &listener, asked)?;
    connection.talk()?;
    let event: Value = serde_json::from_str(&events(&plain, 1)?[0])?;
    ensure!(event.get("nat_src").is_none(), "{event}");
    plain.stop()?;
    let own = lab
        .gateway
        .enter(|| TcpListener::bind("10.0.0.1:8080").context("cannot listen"))?;
    let inside = run("lan", &["--nat"])?;
    let mut connection = Connection::open(&lab.client, &own)?;
    connection.talk()?;
    let event: Value = serde_json::from_str(&events(&inside, 1)?[0])?;
    ensure!(event.get("nat_src").is_none(), "{event}");
    Ok(())
}
