//! What is tracked and what has ended, from the command line, beside real connections.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use twheel_tests::{
    directory::Directory,
    netns::{
        Busy, Connection, Ended, Family, Namespace, PORT, Pair, SERVER, Twheel, once, require_root,
        wait_within,
    },
};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn connect(pair: &Pair, count: usize) -> Result<Vec<Connection>> {
    (0..count)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect()
}

fn names(connections: &[Connection]) -> BTreeSet<SocketAddr> {
    connections.iter().map(|it| it.name).collect()
}

/// The output of a command that succeeds.
fn lines(namespace: &Namespace, args: &[&str]) -> Result<Vec<String>> {
    let ended = namespace.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{args:?}: {}", ended.stderr);
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

fn objects(namespace: &Namespace, args: &[&str]) -> Result<Vec<Value>> {
    lines(namespace, args)?
        .iter()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}")))
        .collect()
}

fn src(object: &Value) -> Result<SocketAddr> {
    end(object, "src", "sport")
}

fn end(object: &Value, address: &str, port: &str) -> Result<SocketAddr> {
    let text = object[address].as_str();
    let ip = text.with_context(|| format!("no {address}"))?.parse()?;
    let number = object[port].as_u64();
    let number = number.with_context(|| format!("no {port}"))?;
    Ok(SocketAddr::new(ip, u16::try_from(number)?))
}

fn sources(objects: &[Value]) -> Result<BTreeSet<SocketAddr>> {
    objects.iter().map(src).collect()
}

/// A command that fails, with this exit code, in one sentence.
#[track_caller]
fn refused(ended: &Ended, code: i32, part: &str) {
    assert_eq!(ended.code(), Some(code), "{}", ended.stderr);
    assert!(ended.stderr.contains(part), "{}", ended.stderr);
    assert!(ended.lines.is_empty(), "{:?}", ended.lines);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn flows_are_listed_with_what_they_are_and_how_long_they_have_left() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--accounting",
        "--keep",
        "--timeout",
        "60s",
    ];
    let twheel = Twheel::start(&pair.server, &args)?;
    let old = connect(&pair, 5)?;
    thread::sleep(millis(1500));
    let mut young = connect(&pair, 5)?;
    let half_open = pair.half_open(Family::V4)?;
    let closed = pair.connect(Family::V6)?;
    let closed_name = closed.name;
    closed.close()?;

    for loader in [true, false] {
        let all = objects(&pair.server, &["flows", "--json"])?;
        let mut expected: BTreeSet<_> = names(&old).union(&names(&young)).copied().collect();
        expected.extend([half_open, closed_name]);
        assert_eq!(sources(&all)?, expected);
        assert_eq!(all.len(), 12, "each once");
        for flow in &all {
            let number = |key: &str| flow[key].as_u64().with_context(|| format!("no {key}"));
            let state = flow["state"].as_str().context("no state")?;
            let timeout = match src(flow)? {
                it if it == half_open => (assert_eq!(state, "syn_sent"), 60_000).1,
                it if it == closed_name => (assert_eq!(state, "time_wait"), 60_000).1,
                _ => (assert_eq!(state, "established"), 60_000).1,
            };
            // Rounded up to units of the clock, of 10 ms at most, and one more.
            let sum = number("idle_ms")? + number("expires_ms")?;
            assert!((timeout..=timeout + 20).contains(&sum), "{flow}");
            assert!(number("age_ms")? >= number("idle_ms")?, "{flow}");
            assert_eq!(flow["proto"], "tcp");
            assert_eq!(flow["rule"], Value::Null);
            assert_eq!(flow["picked_up"], false);
            assert_eq!(u16::try_from(number("dport")?)?, PORT);
            if state == "established" {
                assert!(number("orig_packets")? >= 2, "{flow}");
                assert!(number("reply_bytes")? > 0, "{flow}");
            }
        }

        let of = |filter: &[&str]| -> Result<BTreeSet<SocketAddr>> {
            let args = [&["flows", "--json"], filter].concat();
            sources(&objects(&pair.server, &args)?)
        };
        assert_eq!(
            of(&["state == established and idle > 1s and age > 1s"])?.len(),
            if loader { 5 } else { 10 }
        );
        assert_eq!(
            of(&["state", "==", "syn_sent"])?,
            BTreeSet::from([half_open])
        );
        let port = young[0].name.port();
        assert_eq!(
            of(&[&format!(
                "sport == {port} and src == {}",
                young[0].name.ip()
            )])?,
            BTreeSet::from([young[0].name])
        );
        assert_eq!(
            of(&["src in fd00::/8"])?.len(),
            expected.iter().filter(|it| it.is_ipv6()).count()
        );

        // Sorted, and the first of them.
        let sorted = objects(
            &pair.server,
            &[
                "flows", "--json", "--sort", "idle", "--limit", "5", "--iface", SERVER,
            ],
        )?;
        assert_eq!(
            sources(&sorted)?,
            names(&old),
            "those that are idle for longest"
        );
        let idle: Vec<_> = sorted.iter().map(|it| it["idle_ms"].as_u64()).collect();
        assert!(idle.is_sorted_by(|a, b| a >= b), "{idle:?}");
        let reversed = objects(
            &pair.server,
            &["flows", "--json", "--sort", "idle", "--reverse"],
        )?;
        let idle: Vec<_> = reversed.iter().map(|it| it["idle_ms"].as_u64()).collect();
        assert!(idle.is_sorted(), "{idle:?}");

        // The same for people.
        let table = lines(&pair.server, &["flows"])?;
        assert_eq!(table.len(), 13, "{table:?}");
        for column in [
            "PROTO", "STATE", "SRC", "DST", "IDLE", "EXPIRES", "AGE", "PACKETS",
        ] {
            assert!(table[0].contains(column), "{}", table[0]);
        }
        for name in &expected {
            let found = table
                .iter()
                .filter(|line| line.contains(&format!("{name} ")));
            assert_eq!(found.count(), 1, "{name} in {table:#?}");
        }
        assert!(table.iter().all(|line| !line.contains('\x1b')), "{table:?}");

        let stats = lines(&pair.server, &["stats"])?;
        let head = if loader {
            "; twheel run is running"
        } else {
            "; twheel run is not running"
        };
        assert!(
            stats[0].starts_with("12 flows of at most 131072; tick 100ms"),
            "{}",
            stats[0]
        );
        assert!(stats[0].contains(head), "{}", stats[0]);
        if loader {
            // What is pinned goes on being read.
            for connection in &mut young {
                connection.talk()?;
            }
            thread::sleep(millis(1100));
            break_off(&twheel)?;
        }
    }
    assert_eq!(
        pair.server
            .twheel_once(&["detach", "--iface", SERVER])?
            .code(),
        Some(0)
    );
    drop(twheel);
    pair.server.check_clean(SERVER)
}

/// SIGKILL.
fn break_off(twheel: &Twheel) -> Result<()> {
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(twheel.pid() as i32),
        nix::sys::signal::Signal::SIGKILL,
    )?;
    thread::sleep(millis(200));
    Ok(())
}

#[test]
fn what_has_ended_is_in_the_history_after_any_end_of_the_loader() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("history")?;
    let run = [
        "--iface",
        SERVER,
        "--timeout",
        "500ms",
        "--json",
        "--history",
        directory.path(),
    ];
    let expired = [
        "expired",
        "--json",
        "--iface",
        SERVER,
        "--history",
        directory.path(),
    ];
    let mut told = Vec::new();
    // Who closes a connection after its flow has ended begins another.
    let mut open = Vec::new();

    // Killed, stopped, and running.
    for round in 0..3 {
        let twheel = Twheel::start(&pair.server, &run)?;
        open.extend(connect(&pair, 10)?);
        let expiries = twheel.expiries_until(Instant::now() + millis(900))?;
        assert_eq!(expiries.len(), 10);
        told.extend(expiries);
        let mut history = objects(&pair.server, &expired)?;
        assert_eq!(history.len(), told.len(), "round {round}");
        for (line, expiry) in history.iter_mut().zip(&told) {
            assert_eq!(src(line)?, expiry.src);
            assert_eq!(line["reason"], expiry.reason.as_str());
            assert_eq!(line["idle_ms"], expiry.idle.as_millis() as u64);
            assert!(
                line["time"]
                    .as_str()
                    .is_some_and(|time| time.ends_with('Z')),
                "{line}"
            );
        }
        match round {
            0 => drop(twheel.kill()?),
            1 => assert_eq!(twheel.stop()?.code(), Some(0)),
            _ => {
                // Followed from before it happens.
                let mut follow = follow(
                    &pair.server,
                    &[
                        &expired[..],
                        &["-f", "--since", "1h", "--limit", "1", "reason == idle"],
                    ]
                    .concat(),
                )?;
                let first = follow.line()?;
                assert_eq!(src(&first)?, told.last().context("none")?.src);
                let connection = pair.connect(Family::V4)?;
                assert_eq!(src(&follow.line()?)?, connection.name);
                twheel.stop()?;
            }
        }
    }
    // What is pinned is gone, and the history is still there.
    let ended = objects(&pair.server, &[&expired[..], &["--since", "1h"]].concat())?;
    assert_eq!(ended.len(), 31);
    assert_eq!(
        objects(&pair.server, &[&expired[..], &["--since", "1ms"]].concat())?.len(),
        0
    );
    assert_eq!(
        objects(&pair.server, &[&expired[..], &["--limit", "3"]].concat())?,
        ended[28..]
    );
    assert_eq!(
        objects(
            &pair.server,
            &[&expired[..], &["src in 10.0.0.0/8 and idle < 1m"]].concat()
        )?
        .len(),
        16
    );
    let text = lines(&pair.server, &["expired", "--history", directory.path()])?;
    assert_eq!(text.len(), 31, "the only history here");
    assert!(text[0].contains("expired  tcp"), "{}", text[0]);
    // Of nobody else's business.
    let instance = fs::read_dir(&directory.0)?
        .next()
        .context("no directory")??
        .path();
    for (path, mode) in [(instance.as_path(), 0o700), (&segment(&instance)?, 0o600)] {
        assert_eq!(
            fs::metadata(path)?.permissions().mode() & 0o777,
            mode,
            "{}",
            path.display()
        );
    }

    // Torn in the middle of its last event, or another's altogether. Behind that is how its writer has ended.
    const RECORD: usize = 24 + size_of::<twheel_common::event::Event>();
    let segment = segment(&instance)?;
    let bytes = fs::read(&segment)?;
    fs::write(&segment, &bytes[..bytes.len() - RECORD - 7])?;
    assert_eq!(objects(&pair.server, &expired)?, ended[..30]);
    fs::write(
        &segment,
        b"something else that is as long as a header of a history is",
    )?;
    refused(
        &pair.server.twheel_once(&expired)?,
        1,
        "is no history of twheel's: move it away",
    );
    let none = ["expired", "--iface", SERVER, "--history", "/nowhere"];
    refused(
        &pair.server.twheel_once(&none)?,
        6,
        "there is no history at /nowhere",
    );
    pair.server.check_clean(SERVER)
}

fn segment(instance: &Path) -> Result<std::path::PathBuf> {
    Ok(fs::read_dir(instance)?
        .next()
        .context("no segment")??
        .path())
}

/// A command that goes on.
struct Following(Child, BufReader<std::process::ChildStdout>);

impl Following {
    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.1.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("no JSON: {line}"))
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn follow(namespace: &Namespace, args: &[&str]) -> Result<Following> {
    let mut command = namespace.twheel(args)?;
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("no stdout")?;
    Ok(Following(child, BufReader::new(stdout)))
}

#[test]
fn counters_and_talkers_add_up() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--accounting"])?;
    let connections = connect(&pair, 30)?;
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
    // Rates, of what comes between two looks.
    let mut watch = follow(
        &pair.server,
        &["stats", "--json", "--watch", "--interval", "300ms"],
    )?;
    let mut rates = Vec::new();
    let mut more = Vec::new();
    for number in 0..4 * twheel_common::counter::COUNT {
        let line = watch.line()?;
        if line["counter"] == "created" {
            rates.push(line["per_second"].as_f64());
            if number < twheel_common::counter::COUNT {
                more = connect(&pair, 6)?;
            }
        }
    }
    assert_eq!(rates[0], None);
    let sum: f64 = rates[1..].iter().flatten().sum();
    assert!((10.0..=25.0).contains(&sum), "six in 300 ms: {rates:?}");

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

/// A counter: in all, and of each interface.
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
    let mut connections = connect(&pair, 5)?;
    let mut others = connect_other(9)?;
    check("created", 5, 9)?;
    // All packets, as the flows have counted them.
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

    // The data plane goes on counting, and so does the next run, whatever the order of its interfaces.
    twheel.kill()?;
    connections.extend(connect(&pair, 2)?);
    check("created", 7, 9)?;
    let args = ["--accounting", "--iface", OTHER, "--iface", SERVER];
    let twheel = Twheel::start(&pair.server, &args)?;
    twheel.await_stderr("adopted 16 flows")?;
    check("created", 7, 9)?;
    connections.extend(connect(&pair, 1)?);
    others.extend(connect_other(4)?);
    check("created", 8, 13)?;

    // What userspace deletes is of no interface.
    let filter = format!("dst == {ADDRESS}");
    lines(&pair.server, &["delete", "--iface", SERVER, &filter])?;
    let (deleted, apart) = counted(&pair.server, "deleted")?;
    assert_eq!((deleted, apart.values().sum::<u64>()), (13, 0));

    // One that is gone keeps its counters.
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

#[test]
fn a_flow_that_has_packets_is_not_deleted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--json"])?;
    let idle = connect(&pair, 40)?;
    let busy = connect(&pair, 4)?;
    let busy_names = names(&busy);
    let busy = Busy::start(busy, Duration::ZERO);
    thread::sleep(millis(100));

    let port = idle[0].name.port();
    let filter = format!("sport == {port} and src == {}", idle[0].name.ip());
    let ended = pair.server.twheel_once(&["delete", &filter, "--dry-run"])?;
    assert!(
        ended.stderr.contains("1 flows would be deleted"),
        "{}",
        ended.stderr
    );
    let ended = pair.server.twheel_once(&["delete", &filter])?;
    assert!(ended.stderr.contains("1 flows deleted"), "{}", ended.stderr);
    // Every flow is chosen, time and again.
    let mut deleted = 0;
    let mut stayed = 0;
    for _ in 0..20 {
        let ended = pair.server.twheel_once(&["delete", "proto == tcp"])?;
        let mut numbers = ended
            .stderr
            .split_ascii_whitespace()
            .filter_map(|it| it.parse::<u64>().ok());
        deleted += numbers.next().context("no number")?;
        stayed += numbers.next().unwrap_or(0);
    }
    busy.stop()?;
    assert!(stayed >= 20, "the others were chosen as well: {stayed}");
    // A flow that begins again with a packet of the server's has the server for its initiator.
    let client = |src: SocketAddr, dst: SocketAddr| if src.port() == PORT { dst } else { src };
    for flow in objects(&pair.server, &["flows", "--json"])? {
        let name = client(src(&flow)?, end(&flow, "dst", "dport")?);
        assert!(busy_names.contains(&name), "{flow}");
    }
    let mut expiries = twheel.expiries_until(Instant::now() + millis(300))?;
    assert_eq!(expiries.len() as u64, 1 + deleted);
    for expiry in &mut expiries {
        expiry.src = client(expiry.src, expiry.dst);
    }
    let mut gone = BTreeSet::new();
    for expiry in &expiries {
        assert_eq!(expiry.reason, "deleted");
        // One of these may stop for a moment, but is not deleted in the unit of the clock in which it had a packet.
        assert!(expiry.idle > Duration::ZERO, "{expiry:?}");
        assert!(gone.insert(expiry.src) || busy_names.contains(&expiry.src));
    }
    assert!(names(&idle).is_subset(&gone), "those that are idle, once");
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// More than the ring has room for.
const MANY: u32 = 9000;

#[test]
fn what_a_run_has_left_can_be_deleted_without_one() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("orphans")?;
    let args = ["--iface", SERVER, "--keep", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, MANY)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    let history = ["--history", directory.path()];
    let delete = [&["delete", "--json", "sport in 1024-1033"][..], &history].concat();
    let dry = objects(&pair.server, &[&delete[..], &["--dry-run"]].concat())?;
    assert_eq!(dry[0]["would_delete"], 10);
    let deleted = objects(&pair.server, &delete)?;
    assert_eq!(
        (&deleted[0]["deleted"], &deleted[0]["stayed"]),
        (&10.into(), &0.into())
    );
    let flush = [&["flush", "--json"][..], &history].concat();
    let flushed = objects(&pair.server, &flush)?;
    assert_eq!(flushed[0]["deleted"], MANY - 10);
    assert!(objects(&pair.server, &["flows", "--json"])?.is_empty());
    // Nobody but the history was told.
    let expired = [&["expired", "--json"][..], &history].concat();
    let ended = objects(&pair.server, &expired)?;
    assert_eq!(sources(&ended)?.len(), MANY as usize);
    assert_eq!(ended.len(), MANY as usize, "each once");
    let count = |reason: &str| ended.iter().filter(|it| it["reason"] == reason).count();
    assert_eq!(
        (count("deleted"), count("flushed")),
        (10, MANY as usize - 10)
    );

    let twheel = Twheel::start(&pair.server, &args)?;
    assert_eq!(
        twheel.expiries_until(Instant::now() + millis(300))?.len(),
        0
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    assert_eq!(
        pair.server
            .twheel_once(&["detach", "--iface", SERVER])?
            .code(),
        Some(0)
    );
    pair.server.check_clean(SERVER)
}

#[test]
fn unusable_requests_are_refused_in_a_sentence() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let once = |args: &[&str]| pair.server.twheel_once(args);
    for command in ["flows", "stats", "talkers", "flush", "expired"] {
        refused(&once(&[command])?, 6, "twheel is not running here");
        refused(
            &once(&[command, "--iface", "nonesuch"])?,
            6,
            match command {
                "expired" => "there is no history at",
                _ => "twheel is not running on nonesuch",
            },
        );
    }
    refused(
        &once(&["delete", "proto == tcp"])?,
        6,
        "twheel is not running here",
    );
    let small = ["run", "--iface", SERVER, "--history-size", "1KiB"];
    refused(&once(&small)?, 2, "--history-size 1.0 KiB");

    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    refused(
        &once(&["flows", "state == foo"])?,
        2,
        "filter, column 10: no state is called `foo`",
    );
    refused(&once(&["flows", "bytes > 1"])?, 2, "--accounting");
    refused(
        &once(&["delete"])?,
        2,
        "give a filter, such as `twheel delete",
    );
    refused(
        &once(&["talkers", "--state", "foo\" or proto == tcp or rule == \"x"])?,
        2,
        "possible values",
    );
    refused(&once(&["flows", "--reverse"])?, 2, "--sort");
    refused(&once(&["flows", "--sort", "colour"])?, 2, "possible values");
    for interval in ["0s", "99ms", "2days", "500000000000years"] {
        let watch = ["stats", "--watch", "--interval", interval];
        refused(&once(&watch)?, 2, "100ms to 1day");
    }
    // A pattern, and a name.
    for (name, code) in [("e\x1b[31mX", 2), ("e\x1bX", 5)] {
        refused(
            &once(&["run", "--iface", name])?,
            code,
            "control characters",
        );
    }

    // Two instances: one must be named; and no two may claim an interface.
    pair.server.ip("link add twh0 type veth peer name twh1")?;
    let other = Twheel::start(&pair.server, &["--iface", "twh0"])?;
    refused(
        &once(&["flows"])?,
        6,
        "there are several instances here: say which with --iface NAME",
    );
    assert_eq!(once(&["flows", "--iface", SERVER])?.code(), Some(0));
    let mut instances = pair.server.instances()?;
    instances.sort();
    let from = instances
        .iter()
        .find(|it| it.ends_with_name("-twh0"))
        .context("no instance")?;
    let to = instances
        .iter()
        .find(|it| !it.ends_with_name("-twh0"))
        .context("no instance")?;
    drop(once(&["detach", "--iface", "twh0"]));
    assert_eq!(other.stop()?.code(), Some(0));
    // Made by hand: a link with the other's name.
    let stray = from.clone();
    fs::create_dir_all(&stray)?;
    let link = to.join(format!("xdp@{SERVER}"));
    fs::rename(&link, stray.join(format!("xdp@{SERVER}")))?;
    let egress = format!("egress@{SERVER}");
    assert!(to.join(&egress).exists(), "it is the other's, too");
    refused(
        &once(&["flows", "--iface", SERVER])?,
        6,
        "belongs to two instances",
    );
    fs::rename(stray.join(format!("xdp@{SERVER}")), &link)?;
    fs::remove_dir(&stray)?;
    assert_eq!(once(&["flows", "--iface", SERVER])?.code(), Some(0));
    assert_eq!(twheel.stop()?.code(), Some(0));
    pair.server.check_clean(SERVER)
}

trait EndsWithName {
    fn ends_with_name(&self, end: &str) -> bool;
}

impl EndsWithName for std::path::PathBuf {
    fn ends_with_name(&self, end: &str) -> bool {
        self.file_name()
            .is_some_and(|name| name.to_string_lossy().ends_with(end))
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("pipe")?;
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--history",
            directory.path(),
            "--timeout",
            "300ms,established=1h",
        ],
    )?;
    let _connections = connect(&pair, 50)?;
    for args in [
        &["flows"][..],
        &["flows", "--json"],
        &["flows", "--sort", "idle"],
        &["stats", "--watch", "--interval", "100ms"],
        &["stats", "--json", "--watch", "--interval", "100ms"],
        &["talkers"],
        &["expired", "--history", directory.path()],
    ] {
        let mut command = pair.server.twheel(args)?;
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        drop(child.stdout.take());
        let Some(status) = wait_within(&mut child, millis(5000))? else {
            panic!("{args:?} goes on without a reader");
        };
        let mut stderr = String::new();
        child
            .stderr
            .take()
            .context("no stderr")?
            .read_to_string(&mut stderr)?;
        assert_eq!((status.code(), &*stderr), (Some(0), ""), "{args:?}");
    }
    assert_eq!(twheel.stop()?.code(), Some(0));
    let command = pair.server.twheel(&["flows"])?;
    assert_eq!(once(command)?.code(), Some(6));
    Ok(())
}
