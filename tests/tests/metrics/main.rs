//! What `twheel run --metrics` serves, requested over real sockets beside real connections; and the
//! page in a browser.

mod browser;
mod documents;
mod formats;
mod numbers;
mod offload;
mod page;
mod status;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use prometheus_parse::{Scrape, Value};
use twheel_tests::{
    netns::Namespace,
    pair::SERVER,
    running::{Expiry, Twheel},
};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// The first expiries that are reported.
fn expiries(twheel: &Twheel, count: usize) -> Result<Vec<Expiry>> {
    (0..count)
        .map(|_| {
            let line = twheel.line(Duration::from_secs(10))?;
            line.context("a flow does not end")?.expiry()
        })
        .collect()
}

/// `twheel run` on a host, and the address where it serves.
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

    /// Sends a request and returns the answer.
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

/// A socket of a host, connected to this address.
fn connect_to(host: &Namespace, address: SocketAddr) -> Result<TcpStream> {
    host.enter(|| TcpStream::connect(address).context("nothing listens there"))
}

/// The address where a run reports that it serves.
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

/// A parsed scrape: its samples, and the names of its families.
struct Numbers {
    scrape: Scrape,
    families: BTreeSet<String>,
}

impl Numbers {
    /// Parses the text format and checks Prometheus' rules: the samples of each family are
    /// together, behind its HELP and its TYPE; only counters are called `_total`, and all of them
    /// are; no sample occurs twice; histograms are complete.
    fn read(text: &str) -> Result<Self> {
        ensure!(text.ends_with('\n'), "no end of the last line");
        let (mut families, mut samples) = (BTreeSet::new(), BTreeSet::new());
        let (mut help, mut family, mut kind) = ("", "", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, says) = rest.split_once(' ').context("HELP without text")?;
                ensure!(!says.is_empty(), "{line}");
                help = name;
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                (family, kind) = rest.split_once(' ').context("no type")?;
                ensure!(help == family, "no HELP before {line}");
                ensure!(
                    families.insert(family.to_owned()),
                    "a family occurs twice: {line}"
                );
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
                ensure!(of == family, "{line} is among the samples of {family}");
                ensure!(value.parse::<f64>()? >= 0.0, "{line}");
                ensure!(
                    samples.insert(sample.to_owned()),
                    "a sample occurs twice: {line}"
                );
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

    /// A sample's value; 0 if there is no such sample.
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
