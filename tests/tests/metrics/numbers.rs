//! The numbers that are served, and who may read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::Arc,
};

use anyhow::{Context, Result};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    failure::Kind,
    metrics::{Listener, Metrics, Server},
    pins::Instance,
    settings::Settings,
    stepper::Observer,
};
use twheel_tests::{
    directory::Directory,
    netns::require_root,
    pair::{Busy, Family, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::{Numbers, Watched, expiries, millis, reply};

/// Its series, its flows and its history have the name that it has now; the history is found by
/// each name that it had.
#[test]
fn a_renamed_interface_has_its_present_name() -> Result<()> {
    const NOW: &str = "renamed0";
    require_root();
    for others in [&[][..], &["--iface", "other0"]] {
        let pair = Pair::new()?;
        let other = "link add other0 type veth peer name other1";
        pair.server.ip(other)?;
        let history = Directory::new("renamed")?;
        let options = ["--history", history.path(), "--timeout", "10m,close=1s"];
        let watched = Watched::start(&pair.server, &[&options[..], others].concat())?;
        pair.connect(Family::V4)?.reset()?;
        expiries(&watched.twheel, 1)?;
        let series = |numbers: &Numbers, name: &str| -> BTreeSet<String> {
            let samples = numbers.scrape.samples.iter();
            let of = samples.filter(|it| it.labels.get("interface") == Some(name));
            of.map(|it| it.metric.clone()).collect()
        };
        let before = series(&watched.scrape()?, SERVER);
        assert!(before.contains("twheel_interface_bytes_total"));
        pair.server.batch(&format!(
            "link set {SERVER} down\nlink set {SERVER} name {NOW}\nlink set {NOW} up\n"
        ))?;
        watched
            .twheel
            .await_stderr("renamed to renamed0: still watched")?;
        let numbers = watched.scrape()?;
        assert_eq!(series(&numbers, NOW), before);
        assert_eq!(series(&numbers, SERVER), BTreeSet::new());

        let connection = pair.connect(Family::V4)?;
        let flows = pair.server.twheel_once(&["flows", "--json"])?;
        assert_eq!(flows.lines.len(), 1, "{flows:?}");
        let flow = &flows.lines[0].text;
        assert!(flow.contains("\"iface\":\"renamed0\""), "{flow}");
        connection.reset()?;
        let ended = watched.twheel.line(millis(10_000))?;
        let ended = ended.context("the flow does not end")?.text;
        assert!(ended.contains("\"iface\":\"renamed0\""), "{ended}");

        assert_eq!(watched.twheel.stop()?.code(), Some(0));
        for name in [SERVER, NOW] {
            let args = ["expired", "--history", history.path(), "--iface", name];
            let expired = pair.server.twheel_once(&args)?;
            assert_eq!(expired.code(), Some(0), "{name}: {}", expired.stderr);
            assert_eq!(expired.lines.len(), 2, "{name}: {expired:?}");
        }
        pair.server.check_clean(NOW)?;
    }
    Ok(())
}

#[test]
fn the_numbers_are_those_of_what_was_reported() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "2s", "--tick", "50ms"])?;
    let before = watched.scrape()?;
    assert_eq!(before.value("twheel_flows", &[]), 0.0);
    assert_eq!(before.sum("twheel_ended_flows_total"), 0.0);

    let busy = Busy::start(pair.connect_some(4)?, millis(100));
    let _idle = pair.connect_some(3)?;
    for connection in pair.connect_some(3)? {
        connection.close()?;
    }
    for connection in pair.connect_some(2)? {
        connection.reset()?;
    }
    pair.half_open(Family::V4)?;
    pair.half_open(Family::V6)?;
    let datagram = pair
        .client
        .enter(|| Ok(UdpSocket::bind((Family::V4.client(), 0))?))?;
    datagram.send_to(b"!", (Family::V4.server(), PORT))?;
    let numbers = watched.scrape()?;
    assert_eq!(numbers.value("twheel_flows", &[]), 14.0);

    let mut wanted = BTreeMap::new();
    let ended = expiries(&watched.twheel, 10)?;
    for expiry in &ended {
        let key = (expiry.reason.as_str(), expiry.state.as_str());
        *wanted.entry(key).or_insert(0.0) += 1.0;
    }
    assert_eq!(wanted.len(), 4, "{wanted:?}");
    let numbers = watched.scrape()?;
    for ((reason, state), count) in &wanted {
        let labels = [("reason", *reason), ("state", *state)];
        let told = numbers.value("twheel_ended_flows_total", &labels);
        assert_eq!(told, *count, "{reason} in {state}");
    }
    assert_eq!(numbers.sum("twheel_ended_flows_total"), 10.0);
    assert_eq!(numbers.value("twheel_expired_total", &[]), 10.0);
    assert_eq!(numbers.value("twheel_flows", &[]), 4.0);
    let packets = |verdict| numbers.value("twheel_packets_total", &[("verdict", verdict)]);
    assert_eq!(packets("created"), 14.0);
    assert!(packets("touched") > 14.0);
    assert!(
        packets("not_tracked")
            > before.value("twheel_packets_total", &[("verdict", "not_tracked")])
    );
    assert_eq!(numbers.value("twheel_events_lost_total", &[]), 0.0);
    assert_eq!(numbers.value("twheel_max_flows", &[]), 131_072.0);
    let interface = [("interface", SERVER)];
    assert_eq!(numbers.value("twheel_interface_info", &interface), 1.0);
    let of_interface = |verdict| {
        let labels = [("interface", SERVER), ("verdict", verdict)];
        numbers.value("twheel_interface_packets_total", &labels)
    };
    for verdict in ["created", "touched"] {
        assert_eq!(of_interface(verdict), packets(verdict), "{verdict}");
    }
    let ended_by = |direction| {
        let labels = [("interface", SERVER), ("direction", direction)];
        numbers.value("twheel_interface_ended_flows_total", &labels)
    };
    assert_eq!([ended_by("in"), ended_by("out")], [10.0, 0.0]);
    assert_eq!(numbers.value("twheel_build_info", &[]), 1.0);
    let age = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_secs_f64()
        - numbers.value("process_start_time_seconds", &[]);
    assert!((0.0..60.0).contains(&age), "started {age} s ago");

    // All ended flows were due: none ended early, and none later than a tick and scheduling delays.
    assert_eq!(
        numbers.value("twheel_expiry_lateness_seconds_count", &[]),
        10.0
    );
    let late = numbers.value("twheel_expiry_lateness_seconds_sum", &[]);
    let idle: f64 = ended.iter().map(|it| it.idle.as_secs_f64() - 2.0).sum();
    // A timeout is rounded up to whole clock units, plus one.
    assert!((0.0..=idle).contains(&late), "{late} s of {idle} s");
    assert!(idle - late < 10.0 * 0.021, "{late} s of {idle} s");
    assert!(late < 10.0 * 0.25, "{late} s");
    let steps = numbers.value("twheel_step_seconds_count", &[]);
    let time = numbers.value("twheel_step_seconds_sum", &[]);
    assert!(
        steps > 2.0 && time > 0.0 && time < steps * 0.1,
        "{steps} steps, {time} s"
    );

    drop(busy);
    assert_eq!(watched.twheel.stop()?.code(), Some(0));
    pair.server.check_clean(SERVER)
}

#[test]
fn only_what_is_there_is_answered_and_only_to_whom_it_is_for() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &[])?;
    assert!(
        watched.address.ip().is_loopback(),
        "the default address is not the loopback interface's"
    );
    for (path, kind, has) in [
        ("/", "text/html; charset=utf-8", "<title>twheel</title>"),
        ("/page.js", "text/javascript; charset=utf-8", "textContent"),
        (
            "/draw.js",
            "text/javascript; charset=utf-8",
            "createElementNS",
        ),
        (
            "/style.css",
            "text/css; charset=utf-8",
            "prefers-color-scheme",
        ),
        ("/metrics", "text/plain; version=0.0.4", "twheel_flows 0\n"),
        ("/healthz", "text/plain; charset=utf-8", "ok\n"),
        ("/api/status", "application/json", "\"flows\":0"),
        ("/api/history", "application/json", "\"points\":720"),
        ("/api/ended", "application/json", "\"flows\":[]"),
    ] {
        let reply = watched.get(path)?;
        assert_eq!(reply.code, 200, "{path}");
        assert!(reply.body.contains(has), "{path}: {}", reply.body);
        assert_eq!(reply.headers["content-type"], kind, "{path}");
        assert_eq!(reply.headers["x-content-type-options"], "nosniff");
        assert!(
            reply.headers["content-security-policy"]
                .starts_with("default-src 'none'; script-src 'self'")
        );
    }
    assert_eq!(watched.get("/../etc/passwd")?.code, 404);
    let host = format!("Host: {}\r\n", watched.address);
    let head = watched.send(&format!("HEAD /healthz HTTP/1.1\r\n{host}\r\n"))?;
    assert_eq!((head.code, &*head.body), (200, ""));
    for (request, code) in [
        (
            format!("POST /metrics HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n"),
            405,
        ),
        (format!("DELETE / HTTP/1.1\r\n{host}\r\n"), 405),
        (
            "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n".into(),
            403,
        ),
        ("GET /metrics HTTP/1.0\r\n\r\n".into(), 403),
        (
            "GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n".into(),
            200,
        ),
        ("nonsense\r\n\r\n".into(), 400),
        (
            format!("GET / HTTP/1.1\r\n{host}{}\r\n", "X: y\r\n".repeat(1000)),
            431,
        ),
    ] {
        let reply = watched.send(&request)?;
        assert_eq!(reply.code, code, "{}: {}", &request[..20], reply.body);
    }
    // It cannot be reached from the network.
    let outside = SocketAddr::new(Family::V4.server(), watched.address.port());
    let refused = pair.client.enter(|| Ok(TcpStream::connect(outside)))?;
    assert!(refused.is_err());
    Ok(())
}

#[test]
fn an_instance_whose_stepper_has_failed_is_not_healthy() -> Result<()> {
    require_root();
    let clock = Clock::jiffies()?;
    let load = Load::new(OBJECT, Settings::default().config(clock)?, clock);
    let name = format!("health-{}", std::process::id());
    let instance = Instance::open(&[name])?;
    let metrics = DataPlane::load(&load, &instance).and_then(|mut plane| {
        // The page's thread reads the clock by one of them.
        plane.pin_programs(&instance)?;
        Metrics::new(&plane, &instance.pins(), Arc::default(), &[])
    });
    let asked = metrics.and_then(|metrics| {
        let metrics = Arc::new(metrics);
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = listener.address();
        let _server = Server::start(listener, metrics.clone())?;
        let ask = |path: &str| {
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            reply(TcpStream::connect(address)?, &request)
        };
        let before = (ask("/healthz")?, ask("/api/status")?);
        metrics.failed();
        Ok([before, (ask("/healthz")?, ask("/api/status")?)])
    });
    instance.remove()?;
    let [before, after] = asked?;
    assert_eq!((before.0.code, &*before.0.body), (200, "ok\n"));
    assert!(before.1.body.contains("\"healthy\":true"));
    assert_eq!(after.0.code, 503);
    assert!(after.0.body.contains("a stepper has failed"));
    assert!(after.1.body.contains("\"healthy\":false"));
    Ok(())
}

#[test]
fn a_port_in_use_and_what_is_no_address() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let run = |address: &str| {
        pair.server
            .twheel_once(&["run", "--iface", SERVER, "--metrics", address])
    };
    let taken = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:9435")?))?;
    for address in ["127.0.0.1:9435", "9435"] {
        let ended = run(address)?;
        assert_eq!(ended.code(), Some(Kind::Other as i32), "{ended:?}");
        assert_eq!(
            ended.stderr,
            "twheel: --metrics 127.0.0.1:9435: the port is in use: give another, or stop the program that listens \
             there\n"
        );
        pair.server.check_clean(SERVER)?;
    }
    drop(taken);
    let ended = run("192.0.2.1:9435")?;
    assert_eq!(ended.code(), Some(Kind::Other as i32), "{ended:?}");
    assert!(ended.stderr.contains("no such address"), "{ended:?}");
    for address in [
        "",
        "localhost:9435",
        "127.0.0.1",
        "65536",
        "[::1]",
        "http://127.0.0.1:9435/",
    ] {
        let ended = run(address)?;
        assert_eq!(
            ended.code(),
            Some(Kind::Usage as i32),
            "{address}: {ended:?}"
        );
        assert!(
            ended.stderr.contains("127.0.0.1:9435 or [::1]:9435"),
            "{ended:?}"
        );
    }
    pair.server.check_clean(SERVER)?;

    // Other addresses that it accepts; the last one can be reached from the network.
    for address in ["[::1]:9435", "0.0.0.0:9435"] {
        let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--metrics", address])?;
        twheel.await_stderr(&format!("metrics and page: http://{address}/"))?;
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}
