//! What `twheel run --metrics` says of itself, asked over real sockets beside real connections; and the page, in a
//! browser.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use nix::fcntl::{FcntlArg, fcntl};
use prometheus_parse::{Scrape, Value};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    failure::Kind,
    metrics::{Listener, Metrics, Server},
    pins::Instance,
    settings::Wanted,
    stepper::Observer,
};
use twheel_common::config::NAME_BYTES;
use twheel_holdup::Watch;
use twheel_tests::netns::{
    Busy, CLIENT, Connection, Expiry, Family, Namespace, PORT, Pair, SERVER, Twheel, require_root,
};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn connect(pair: &Pair, count: usize) -> Result<Vec<Connection>> {
    (0..count)
        .map(|i| pair.connect(Family::alternate(i)))
        .collect()
}

/// The expiries that come first.
fn expiries(twheel: &Twheel, count: usize) -> Result<Vec<Expiry>> {
    (0..count)
        .map(|_| {
            let line = twheel.line(Duration::from_secs(10))?;
            line.context("a flow that does not end")?.expiry()
        })
        .collect()
}

/// `twheel run` on a host, and where it answers.
struct Watched<'a> {
    twheel: Twheel,
    host: &'a Namespace,
    address: SocketAddr,
}

/// An answer.
struct Reply {
    code: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl<'a> Watched<'a> {
    fn start(host: &'a Namespace, more: &[&str]) -> Result<Self> {
        Self::start_on(host, SERVER, more)
    }

    fn start_on(host: &'a Namespace, interface: &str, more: &[&str]) -> Result<Self> {
        let args = [&["--iface", interface, "--metrics", "0", "--json"], more].concat();
        let twheel = Twheel::start(host, &args)?;
        let address = address(&twheel.await_stderr("metrics and page: ")?)?;
        Ok(Self {
            twheel,
            host,
            address,
        })
    }

    fn connect(&self) -> Result<TcpStream> {
        connect_to(self.host, self.address)
    }

    /// The answer to whatever is sent.
    fn send(&self, request: &str) -> Result<Reply> {
        reply(self.connect()?, request)
    }

    fn get(&self, path: &str) -> Result<Reply> {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n",
            self.address
        ))
    }

    fn scrape(&self) -> Result<Numbers> {
        let reply = self.get("/metrics")?;
        ensure!(reply.code == 200, "{}", reply.body);
        Numbers::read(&reply.body)
    }
}

/// A socket of a host's.
fn connect_to(host: &Namespace, address: SocketAddr) -> Result<TcpStream> {
    host.enter(|| TcpStream::connect(address).context("nobody listens"))
}

/// Where a run says that it answers.
fn address(stderr: &str) -> Result<SocketAddr> {
    let address = stderr.lines().find_map(|line| {
        line.strip_prefix("metrics and page: http://")?
            .strip_suffix('/')
    });
    Ok(address
        .with_context(|| format!("no address: {stderr}"))?
        .parse()?)
}

fn reply(mut socket: TcpStream, request: &str) -> Result<Reply> {
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    socket.write_all(request.as_bytes())?;
    let mut text = String::new();
    socket.read_to_string(&mut text).context("no answer")?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the head")?;
    let mut lines = head.lines();
    let code = lines.next().and_then(|line| line.split(' ').nth(1));
    let header = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_owned()))
    };
    Ok(Reply {
        code: code.context("no status")?.parse()?,
        headers: lines.filter_map(header).collect(),
        body: body.to_owned(),
    })
}

/// A scrape, read: its samples, and the names of its families.
struct Numbers {
    scrape: Scrape,
    families: BTreeSet<String>,
}

impl Numbers {
    /// Reads the text format, and holds it to Prometheus' rules: each family stands together, after its HELP and its
    /// TYPE; counters, and they alone, are called `_total`; no sample comes twice; histograms are whole.
    fn read(text: &str) -> Result<Self> {
        ensure!(text.ends_with('\n'), "no end of the last line");
        let (mut families, mut samples) = (BTreeSet::new(), BTreeSet::new());
        let (mut help, mut family, mut kind) = ("", "", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, says) = rest.split_once(' ').context("HELP that says nothing")?;
                ensure!(!says.is_empty(), "{line}");
                help = name;
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                (family, kind) = rest.split_once(' ').context("no type")?;
                ensure!(help == family, "no HELP before {line}");
                ensure!(families.insert(family.to_owned()), "twice: {line}");
                ensure!((kind == "counter") == family.ends_with("_total"), "{line}");
                ensure!(
                    family.starts_with("twheel_") || family.starts_with("process_"),
                    "{line}"
                );
            } else {
                let (sample, value) = line.rsplit_once(' ').context("no value")?;
                let name = sample.split('{').next().unwrap_or_default();
                let of = match kind {
                    "histogram" => ["_bucket", "_sum", "_count"]
                        .iter()
                        .find_map(|suffix| name.strip_suffix(suffix))
                        .unwrap_or_default(),
                    _ => name,
                };
                ensure!(of == family, "{line} stands with {family}");
                ensure!(value.parse::<f64>()? >= 0.0, "{line}");
                ensure!(samples.insert(sample.to_owned()), "twice: {line}");
            }
        }
        let scrape = Scrape::parse(text.lines().map(|line| Ok(line.to_owned())))?;
        let numbers = Self { scrape, families };
        for sample in &numbers.scrape.samples {
            if let Value::Histogram(buckets) = &sample.value {
                let counts: Vec<_> = buckets.iter().map(|bucket| bucket.count).collect();
                ensure!(counts.is_sorted(), "{sample:?}");
                let all = numbers.value(&format!("{}_count", sample.metric), &[]);
                ensure!(counts.last() == Some(&all), "{sample:?}");
            }
        }
        Ok(numbers)
    }

    /// A sample's value; 0 where there is none.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let mut found = self.scrape.samples.iter().filter(|sample| {
            let given = |(name, value): &(&str, &str)| sample.labels.get(name) == Some(value);
            sample.metric == name && labels.iter().all(given)
        });
        let value = found.next().map_or(0.0, |sample| match sample.value {
            Value::Counter(value) | Value::Gauge(value) | Value::Untyped(value) => value,
            _ => f64::NAN,
        });
        assert!(found.next().is_none(), "several of {name} {labels:?}");
        value
    }

    /// The sum of a family's samples.
    fn sum(&self, name: &str) -> f64 {
        let samples = self.scrape.samples.iter().filter(|it| it.metric == name);
        samples
            .map(|sample| match sample.value {
                Value::Counter(value) | Value::Gauge(value) => value,
                _ => f64::NAN,
            })
            .sum()
    }
}

#[test]
fn the_numbers_are_those_of_what_was_reported() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "2s", "--tick", "50ms"])?;
    let before = watched.scrape()?;
    assert_eq!(before.value("twheel_flows", &[]), 0.0);
    assert_eq!(before.sum("twheel_expired_flows_total"), 0.0);

    let busy = Busy::start(connect(&pair, 4)?, millis(100));
    let _idle = connect(&pair, 3)?;
    for connection in connect(&pair, 3)? {
        connection.close()?;
    }
    for connection in connect(&pair, 2)? {
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
        let told = numbers.value("twheel_expired_flows_total", &labels);
        assert_eq!(told, *count, "{reason} in {state}");
    }
    assert_eq!(numbers.sum("twheel_expired_flows_total"), 10.0);
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
        numbers.value("twheel_interface_expired_flows_total", &labels)
    };
    assert_eq!([ended_by("in"), ended_by("out")], [10.0, 0.0]);
    assert_eq!(numbers.value("twheel_build_info", &[]), 1.0);
    let age = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_secs_f64()
        - numbers.value("process_start_time_seconds", &[]);
    assert!((0.0..60.0).contains(&age), "started {age} s ago");

    // All that have ended were due; none early, none later than a tick and what scheduling takes.
    assert_eq!(
        numbers.value("twheel_expiry_lateness_seconds_count", &[]),
        10.0
    );
    let late = numbers.value("twheel_expiry_lateness_seconds_sum", &[]);
    let idle: f64 = ended.iter().map(|it| it.idle.as_secs_f64() - 2.0).sum();
    // A timeout is rounded up to whole units of the clock, and has one more.
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
    assert!(watched.address.ip().is_loopback(), "unless told otherwise");
    for (path, kind, has) in [
        ("/", "text/html; charset=utf-8", "<title>twheel</title>"),
        ("/page.js", "text/javascript; charset=utf-8", "textContent"),
        (
            "/style.css",
            "text/css; charset=utf-8",
            "prefers-color-scheme",
        ),
        ("/metrics", "text/plain; version=0.0.4", "twheel_flows 0\n"),
        ("/healthz", "text/plain; charset=utf-8", "ok\n"),
        ("/api/status", "application/json", "\"flows\":0"),
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
    // Nobody on the network reaches it.
    let outside = SocketAddr::new(Family::V4.server(), watched.address.port());
    let refused = pair.client.enter(|| Ok(TcpStream::connect(outside)))?;
    assert!(refused.is_err());
    Ok(())
}

#[test]
fn an_instance_whose_stepper_has_failed_is_not_healthy() -> Result<()> {
    require_root();
    let clock = Clock::jiffies()?;
    let load = Load::new(OBJECT, Wanted::default().config(clock)?, clock);
    let name = format!("health-{}", std::process::id());
    let instance = Instance::open(&[name])?;
    let metrics = DataPlane::load(&load, &instance)
        .and_then(|plane| Metrics::new(&plane, &instance.pins(), &[]));
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
            "twheel: --metrics 127.0.0.1:9435: the port is in use: give another, or end the program that listens \
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

    // Others that it takes; and one that is told to is there for the network.
    for address in ["[::1]:9435", "0.0.0.0:9435"] {
        let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--metrics", address])?;
        twheel.await_stderr(&format!("metrics and page: http://{address}/"))?;
        assert_eq!(twheel.stop()?.code(), Some(0));
    }
    Ok(())
}

#[test]
fn nobody_asks_and_nobody_wakes() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms"])?;
    let _connections = connect(&pair, 2)?;
    expiries(&watched.twheel, 2)?;
    for path in ["/metrics", "/api/status", "/"] {
        assert_eq!(watched.get(path)?.code, 200);
    }
    // The thread that has read the table is kept for the next who asks, and goes home once.
    thread::sleep(Duration::from_secs(12));
    let before = watched.twheel.switches()?;
    thread::sleep(Duration::from_secs(3));
    assert_eq!(watched.twheel.switches()?, before, "a thread has run");
    assert_eq!(watched.get("/healthz")?.code, 200);
    assert_ne!(watched.twheel.switches()?, before, "this can tell");
    Ok(())
}

#[test]
fn a_blocked_output_keeps_nobody_from_asking() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--json",
        "--metrics",
        "0",
        "--timeout",
        "500ms",
    ];
    let mut child = pair
        .server
        .twheel(&args)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let result = (|| -> Result<()> {
        let unread = child.stdout.take().context("no stdout")?;
        fcntl(&unread, FcntlArg::F_SETPIPE_SZ(4096))?;
        let mut stderr = String::new();
        let mut errors = BufReader::new(child.stderr.take().context("no stderr")?);
        while !stderr.contains("page: ") {
            ensure!(errors.read_line(&mut stderr)? > 0, "it has ended: {stderr}");
        }
        let address = address(&stderr)?;
        // Some 20 kB, of which the pipe and the buffer before it hold 12.
        let _connections = connect(&pair, 100)?;
        thread::sleep(millis(1500));
        let ask = || {
            let socket = connect_to(&pair.server, address)?;
            reply(
                socket,
                &format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n"),
            )
        };
        let numbers = Numbers::read(&ask()?.body)?;
        let reported = numbers.sum("twheel_expired_flows_total");
        ensure!(
            numbers.value("twheel_expired_total", &[]) == 100.0 && reported < 100.0,
            "{reported} are reported: the output is not blocked"
        );
        drop(unread);
        Ok(())
    })();
    let _ = child.kill();
    let _ = child.wait();
    result
}

#[test]
fn callers_who_say_nothing_are_sent_away() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms"])?;
    let begun = Instant::now();
    // More than are let in at once.
    let mut silent: Vec<_> = (0..100).map(|_| watched.connect()).collect::<Result<_>>()?;
    write!(silent[0], "GET /metrics HTTP/1.1\r\nHost")?;
    let _connections = connect(&pair, 3)?;
    assert_eq!(
        expiries(&watched.twheel, 3)?.len(),
        3,
        "the output does not wait"
    );
    drop(silent.split_off(64));
    assert_eq!(watched.get("/healthz")?.code, 200);
    let waited = begun.elapsed();
    assert!((millis(900)..millis(6_000)).contains(&waited), "{waited:?}");
    Ok(())
}

/// What a scrape takes: docs/metrics.md.
const SCRAPE: Duration = Duration::from_micros(1_500);

/// How long a scrape takes, and what it says.
fn timed(watched: &Watched<'_>) -> Result<(Duration, Numbers)> {
    let socket = watched.connect()?;
    let asked = Instant::now();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", watched.address);
    let body = reply(socket, &request)?.body;
    Ok((asked.elapsed(), Numbers::read(&body)?))
}

#[test]
fn a_million_flows_are_no_more_to_scrape_than_none() -> Result<()> {
    require_root();
    const FLOWS: u32 = 1_000_000;
    let pair = Pair::new()?;
    let options = ["--max-flows", "1100000", "--timeout", "1h"];
    let watched = Watched::start(&pair.server, &options)?;
    let empty = Watched::start_on(&pair.client, CLIENT, &options)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let (mut times, mut of_none) = (Vec::new(), Vec::new());
    let watch = Watch::start();
    // In turn: what disturbs the one disturbs the other, too.
    for _ in 0..51 {
        let (time, numbers) = timed(&watched)?;
        times.push(time);
        let live = numbers.value("twheel_flows", &[]);
        assert!(
            (f64::from(FLOWS) * 0.999..=f64::from(FLOWS)).contains(&live),
            "{live} flows"
        );
        let (time, numbers) = timed(&empty)?;
        of_none.push(time);
        assert_eq!(numbers.value("twheel_flows", &[]), 0.0);
    }
    let held_up = watch.stop();
    times.sort();
    of_none.sort();
    let begun = Instant::now();
    let status = watched.get("/api/status")?;
    let page = begun.elapsed();
    println!(
        "A scrape at {FLOWS} flows: {:?} ({:?}–{:?}), with none {:?} ({:?}–{:?}); what the page asks for, which reads the \
         table: {page:?}, {} bytes",
        times[25],
        times[0],
        times[50],
        of_none[25],
        of_none[0],
        of_none[50],
        status.body.len()
    );
    assert!(times[25] < SCRAPE + held_up, "{times:?}, {held_up:?}");
    assert!(
        2 * times[25] <= 3 * of_none[25] + held_up,
        "with a million {times:?}, with none {of_none:?}"
    );
    let status: serde_json::Value = serde_json::from_str(&status.body)?;
    let states = status["states"]["unreplied"].as_f64().unwrap_or_default();
    assert!(states >= f64::from(FLOWS) * 0.999, "{}", status["states"]);
    Ok(())
}

/// A file of the project's documentation.
fn document(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// All words that begin like a metric of ours, as families.
fn families(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("twheel_") || word.starts_with("process_"))
        .map(|word| {
            let mut suffixes = ["_bucket", "_sum", "_count"].iter();
            suffixes
                .find_map(|it| word.strip_suffix(it))
                .unwrap_or(word)
        })
        .map(str::to_owned)
        .collect()
}

/// The queries of a dashboard.
fn queries(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if ["expr", "query", "definition"].contains(&name.as_str()) => {
                        found.push(text.to_owned());
                    }
                    _ => queries(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|it| queries(it, found)),
        _ => {}
    }
}

#[test]
fn the_documents_name_what_is_served() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "300ms"])?;
    let _connection = connect(&pair, 1)?;
    expiries(&watched.twheel, 1)?;
    let served = watched.scrape()?.families;
    assert_eq!(
        families(&document("metrics.md")?),
        served,
        "docs/metrics.md"
    );

    let dashboard: serde_json::Value = serde_json::from_str(&document("grafana-dashboard.json")?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    ensure!(panels.len() >= 6, "{} panels", panels.len());
    let ids: BTreeSet<_> = panels.iter().filter_map(|it| it["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    for panel in panels {
        for key in ["title", "type", "gridPos", "targets", "datasource"] {
            assert!(!panel[key].is_null(), "no {key}: {panel}");
        }
    }
    let mut asked = Vec::new();
    queries(&dashboard, &mut asked);
    let asked = families(&asked.join(" "));
    assert!(asked.len() >= 8, "{asked:?}");
    let unknown: Vec<_> = asked.difference(&served).collect();
    assert!(unknown.is_empty(), "not served: {unknown:?}");
    Ok(())
}

/// What a browser shows of an address, after so many of the page's seconds: its document, as markup. With a picture, if
/// `TWHEEL_SCREENSHOT` says where to.
fn browse(host: &Namespace, address: SocketAddr, seconds: u32, picture: &str) -> Result<String> {
    let profile = std::env::temp_dir().join(format!("twheel-chromium-{}", std::process::id()));
    let run = |how: &str| -> Result<String> {
        let output = host
            .command("chromium")?
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--window-size=1200,1300",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("--virtual-time-budget={}", seconds * 1000))
            .arg(how)
            .arg(format!("http://{address}/"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .context("cannot run `chromium`: `cargo xtask setup` installs it")?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let shown = run("--dump-dom").and_then(|shown| {
        if let Some(to) = std::env::var_os("TWHEEL_SCREENSHOT") {
            let file = PathBuf::from(to).join(picture);
            run(&format!("--screenshot={}", file.display()))?;
        }
        Ok(shown)
    });
    let _ = fs::remove_dir_all(profile);
    shown
}

/// The text between two others, each time.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    let parts = text.split(from).skip(1);
    parts.filter_map(|part| part.split(to).next()).collect()
}

#[test]
fn a_browser_draws_the_page() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(
        &pair.server,
        &["--timeout", "60s,close=1s", "--slots", "64"],
    )?;
    let busy = Busy::start(connect(&pair, 5)?, millis(50));
    pair.half_open(Family::V4)?;
    for connection in connect(&pair, 3)? {
        connection.reset()?;
    }
    let ended = expiries(&watched.twheel, 3)?;
    let shown = browse(&pair.server, watched.address, 6, "page.png")?;
    let has = |what: &str| {
        ensure!(shown.contains(what), "no {what} in {shown}");
        Ok(())
    };
    has(">live</p>")?;
    has(&format!("<span id=\"interfaces\">{SERVER}</span>"))?;
    has("established 5</li>")?;
    has("syn_sent 1</li>")?;
    has("<polygon class=\"c0\"")?;
    // The wheels: who is on them is in their slots, and the hands have moved.
    let slots = between(&shown, "data-slots=\"", "\"");
    let slots: Vec<u32> = slots
        .iter()
        .map(|it| it.parse())
        .collect::<Result<_, _>>()?;
    assert_eq!(slots.len() % 3, 0, "three levels of each CPU: {slots:?}");
    let held: u32 = slots.iter().sum();
    assert!((1..=6).contains(&held), "{slots:?}");
    assert_eq!(
        between(&shown, "class=\"lit\" d=\"M", "\"").len(),
        slots.iter().filter(|it| **it > 0).count()
    );
    let hands = between(&shown, "transform=\"rotate(", ")");
    assert_eq!(hands.len(), slots.len());
    let moved = hands
        .iter()
        .filter(|it| it.parse::<f64>().is_ok_and(|it| it > 0.0));
    assert!(moved.count() > 0, "{hands:?}");
    // Latest first.
    let rows = between(&shown, "<tr><td>", "</tr>");
    assert_eq!(rows.len(), 3, "{rows:?}");
    for (row, expiry) in rows.iter().zip(ended.iter().rev()) {
        let cells = format!(
            "<td>tcp</td><td>{}</td><td>{}</td><td>close</td><td>reset</td><td></td>",
            expiry.src, expiry.dst
        );
        assert!(row.contains(&cells), "no {cells} in {row}");
    }
    drop(busy);
    Ok(())
}

#[test]
fn what_strangers_say_is_no_markup() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let policy = std::env::temp_dir().join(format!("twheel-markup-{}.toml", std::process::id()));
    fs::write(
        &policy,
        format!(
            "[[rule]]\nname = \"markup\"\ndport = {PORT}\ntimeouts = {{ established = \"1s\" }}\n"
        ),
    )?;
    let file = policy.to_str().context("a strange path")?;
    let watched = Watched::start(&pair.server, &["--policy", file]);
    fs::remove_file(&policy)?;
    let watched = watched?;
    // No policy has such a name: somebody has written it into the map.
    let instance = pair.server.instances()?.pop().context("no instance")?;
    let map = Map::Array(MapData::from_pin(instance.join("NAMES"))?);
    let mut names = Array::<_, [u8; NAME_BYTES]>::try_from(map)?;
    let markup = "<img src=x onerror=\"document.title=1\"><script>alert(1)</script>";
    let mut name = [0; NAME_BYTES];
    name[..markup.len()].copy_from_slice(markup.as_bytes());
    let number = (0..100).find(|number| {
        names
            .get(number, 0)
            .is_ok_and(|it| it.starts_with(b"markup"))
    });
    names.set(number.context("no rule")?, name, 0)?;
    let _connection = connect(&pair, 1)?;
    let ended = expiries(&watched.twheel, 1)?;
    assert_eq!(ended[0].rule.as_deref(), Some(markup));
    let shown = browse(&pair.server, watched.address, 3, "markup.png")?;
    ensure!(shown.contains("<td>&lt;img src=x onerror="), "{shown}");
    ensure!(!shown.contains("<img"), "{shown}");
    ensure!(!shown.contains("<script>"), "{shown}");
    ensure!(
        shown.contains(&format!("<title>twheel {SERVER}</title>")),
        "{shown}"
    );
    Ok(())
}

/// Passes a request on, and its answer back; not if it asks for the status, which somebody did before.
fn pass_on(
    mut caller: TcpStream,
    host: &Namespace,
    to: SocketAddr,
    asked: &AtomicU32,
) -> Result<()> {
    let mut request = [0; 4096];
    let length = caller.read(&mut request)?;
    let request = std::str::from_utf8(&request[..length])?;
    if request.starts_with("GET /api/status") && asked.fetch_add(1, Ordering::Relaxed) > 0 {
        return Ok(());
    }
    let mut answer = Vec::new();
    let mut answers = connect_to(host, to)?;
    answers.write_all(request.as_bytes())?;
    answers.read_to_end(&mut answer)?;
    Ok(caller.write_all(&answer)?)
}

#[test]
fn the_page_says_when_the_connection_is_lost() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &[])?;
    let _connections = connect(&pair, 2)?;
    let bind = || Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
    let listener = pair.server.enter(bind)?;
    let address = listener.local_addr()?;
    let (listener, host, to) = (&listener, &pair.server, watched.address);
    let (asked, over) = (AtomicU32::new(0), AtomicBool::new(false));
    let (asked, over) = (&asked, &over);
    let shown = thread::scope(|scope| {
        scope.spawn(move || {
            // A browser opens connections that it may never use.
            while let Ok((caller, _)) = listener.accept() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                scope.spawn(move || pass_on(caller, host, to, asked));
            }
        });
        let shown = browse(host, address, 5, "lost.png");
        over.store(true, Ordering::Relaxed);
        let _ = connect_to(host, address);
        shown
    })?;
    ensure!(shown.contains("<body class=\"lost\">"), "{shown}");
    ensure!(
        shown.contains(">connection lost: what you see is old; trying again</p>"),
        "{shown}"
    );
    ensure!(
        shown.contains("established 2</li>"),
        "what was drawn stays: {shown}"
    );
    Ok(())
}
