//! `twheel stats` and `twheel top`: counters and talkers.

use std::{
    collections::BTreeMap,
    mem,
    net::{TcpListener, TcpStream},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Family, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::{history::follow, lines, millis, objects};

#[test]
fn counters_and_talkers_add_up() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--accounting"])?;
    let connections = pair.connect_some(30)?;
    for _ in 0..7 {
        pair.half_open(Family::V4)?;
    }
    let counters = objects(&pair.server, &["stats", "--json"])?;
    let total = |name: &str| -> Result<u64> {
        let of = counters.iter().find(|it| it["counter"] == name);
        let of = of.with_context(|| format!("no {name}"))?;
        let cpus = of["cpus"].as_array().context("no cpus")?;
        let sum: u64 = cpus.iter().filter_map(Value::as_u64).sum();
        assert_eq!(Some(sum), of["total"].as_u64(), "{name}");
        assert_eq!(of["interfaces"], json!({ SERVER: sum }), "{name}");
        assert!(of["meaning"].as_str().is_some_and(|it| !it.is_empty()));
        Ok(sum)
    };
    assert_eq!(counters.len(), twheel_common::counter::COUNT);
    assert_eq!(total("created")?, 37);
    assert!(total("touched")? >= 60);
    assert_eq!(total("expired")?, 0);
    // Rates, from what comes between two readings.
    let mut watch = follow(
        &pair.server,
        &["stats", "--json", "--watch", "--interval", "300ms"],
    )?;
    let (mut rates, mut before) = (Vec::new(), Instant::now());
    let mut more = Vec::new();
    for number in 0..4 * twheel_common::counter::COUNT {
        let line = watch.line()?;
        if line["counter"] == "created" {
            // A busy machine makes an interval longer.
            let since = mem::replace(&mut before, Instant::now()).elapsed();
            rates.push(
                line["per_second"]
                    .as_f64()
                    .map(|rate| rate * since.as_secs_f64()),
            );
            if number < twheel_common::counter::COUNT {
                more = pair.connect_some(6)?;
            }
        }
    }
    assert_eq!(rates[0], None);
    let sum: f64 = rates[1..].iter().flatten().sum();
    assert!((3.0..=7.5).contains(&sum), "six: {rates:?}");

    let talkers = objects(&pair.server, &["talkers", "--json"])?;
    let flows =
        |talkers: &[Value]| -> u64 { talkers.iter().filter_map(|it| it["flows"].as_u64()).sum() };
    let share: f64 = talkers.iter().filter_map(|it| it["share"].as_f64()).sum();
    assert_eq!((talkers.len(), flows(&talkers)), (2, 43), "{talkers:?}");
    assert!((share - 1.0).abs() < 1e-9);
    assert!(talkers[0]["flows"].as_u64() >= talkers[1]["flows"].as_u64());
    assert!(talkers[0]["bytes"].as_u64() > Some(1000), "{talkers:?}");
    let ports = objects(&pair.server, &["talkers", "--json", "--by", "port"])?;
    assert_eq!(ports.len(), 1);
    assert_eq!(ports[0]["talker"], format!("tcp/{PORT}"));
    let state = objects(
        &pair.server,
        &["talkers", "--json", "--by", "dst", "--state", "syn_sent"],
    )?;
    assert_eq!((state.len(), flows(&state)), (1, 7));
    assert_eq!(state[0]["talker"], Family::V4.silent().to_string());
    let text = lines(&pair.server, &["talkers", "--limit", "1"])?;
    assert!(text[2].starts_with("and 1 more, of 43 flows"), "{text:?}");
    drop((connections, more));
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// A counter: the total, and the count of each interface.
fn counted(namespace: &Namespace, name: &str) -> Result<(u64, BTreeMap<String, u64>)> {
    let args = ["stats", "--json", "--iface", SERVER];
    let counters = objects(namespace, &args)?;
    let of = counters.iter().find(|it| it["counter"] == name);
    let of = of.with_context(|| format!("no {name}"))?;
    let total = of["total"].as_u64().context("no total")?;
    Ok((total, serde_json::from_value(of["interfaces"].clone())?))
}

#[test]
fn each_of_several_interfaces_has_its_own_counters() -> Result<()> {
    require_root();
    const OTHER: &str = "server1";
    const ADDRESS: &str = "10.71.0.2";
    let pair = Pair::new()?;
    pair.client.ip(&format!(
        "link add name client1 type veth peer name {OTHER} netns {}",
        pair.server.name()
    ))?;
    for (host, interface, address) in [
        (&pair.client, "client1", "10.71.0.1"),
        (&pair.server, OTHER, ADDRESS),
    ] {
        host.ip(&format!("addr add {address}/24 dev {interface}"))?;
        host.ip(&format!("link set {interface} up"))?;
    }
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind((ADDRESS, PORT))?))?;
    let connect_other = |count: usize| -> Result<Vec<[TcpStream; 2]>> {
        let one = |_| {
            let client = pair
                .client
                .enter(|| Ok(TcpStream::connect((ADDRESS, PORT))?))?;
            Ok([client, listener.accept()?.0])
        };
        (0..count).map(one).collect()
    };
    let check = |name: &str, here: u64, there: u64| -> Result<()> {
        let expected = BTreeMap::from([(SERVER.to_owned(), here), (OTHER.to_owned(), there)]);
        assert_eq!(
            counted(&pair.server, name)?,
            (here + there, expected),
            "{name}"
        );
        Ok(())
    };

    let args = ["--accounting", "--iface", SERVER, "--iface", OTHER];
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut connections = pair.connect_some(5)?;
    let mut others = connect_other(9)?;
    check("created", 5, 9)?;
    // All packets, as counted in the flows.
    for connection in &mut connections {
        connection.talk()?;
    }
    thread::sleep(millis(300));
    let packets = |filter: &str| -> Result<u64> {
        let flows = objects(
            &pair.server,
            &["flows", "--json", "--iface", SERVER, filter],
        )?;
        let of = |flow: &Value, key: &str| flow[key].as_u64().unwrap_or(0);
        let sum = |flow| of(flow, "orig_packets") + of(flow, "reply_packets");
        Ok(flows.iter().map(sum).sum())
    };
    let there = packets(&format!("dst == {ADDRESS}"))?;
    let here = packets(&format!("dst != {ADDRESS}"))?;
    assert!(here >= 5 * 5 && there >= 9 * 3, "{here} {there}");
    check("touched", here - 5, there - 9)?;
    let table = lines(&pair.server, &["stats", "--iface", SERVER])?;
    let head = table.iter().find(|line| line.starts_with("COUNTER"));
    let head = head.context("no table")?.split_ascii_whitespace();
    assert_eq!(
        head.take(4).collect::<Vec<_>>(),
        ["COUNTER", "TOTAL", SERVER, OTHER]
    );

    // The data plane keeps counting without a run, and so does the next run, whatever the order of
    // its interfaces.
    twheel.kill()?;
    connections.extend(pair.connect_some(2)?);
    check("created", 7, 9)?;
    let args = ["--accounting", "--iface", OTHER, "--iface", SERVER];
    let twheel = Twheel::start(&pair.server, &args)?;
    twheel.await_stderr("adopted 16 flows")?;
    check("created", 7, 9)?;
    connections.extend(pair.connect_some(1)?);
    others.extend(connect_other(4)?);
    check("created", 8, 13)?;

    // Deletions by userspace count for no interface.
    let filter = format!("dst == {ADDRESS}");
    lines(&pair.server, &["delete", "--iface", SERVER, &filter])?;
    let (deleted, apart) = counted(&pair.server, "deleted")?;
    assert_eq!((deleted, apart.values().sum::<u64>()), (13, 0));

    // An interface that is gone keeps its counters.
    twheel.kill()?;
    pair.server.ip(&format!("link del {OTHER}"))?;
    let (total, apart) = counted(&pair.server, "created")?;
    assert_eq!((total, apart.get(OTHER)), (21, Some(&13)), "{apart:?}");
    drop((connections, others));
    for interface in [SERVER, OTHER] {
        lines(&pair.server, &["detach", "--iface", interface])?;
    }
    pair.server.check_clean(SERVER)
}
