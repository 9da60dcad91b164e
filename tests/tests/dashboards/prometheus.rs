//! The dashboard on Prometheus.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{CLIENT, Pair, SERVER},
    process::Process,
    running::Twheel,
    skipped,
};

use crate::grafana::{Dashboard, replaced};

/// `TWHEEL_PROMETHEUS`, which `cargo xtask test` sets, or the installed one.
fn prometheus() -> Option<PathBuf> {
    let given = std::env::var_os("TWHEEL_PROMETHEUS").map(PathBuf::from);
    let installed = || PathBuf::from("/usr/bin/prometheus");
    let path = given.unwrap_or_else(installed);
    path.exists().then_some(path)
}

/// A running Prometheus; killed when this is dropped.
struct Prometheus<'a> {
    process: Process,
    host: &'a Namespace,
    address: SocketAddr,
}

impl<'a> Prometheus<'a> {
    /// Starts one on a host, which reads these addresses five times a second.
    fn start(host: &'a Namespace, directory: &Directory, targets: &[SocketAddr]) -> Result<Self> {
        let path = prometheus().context("no prometheus")?;
        let targets: Vec<_> = targets.iter().map(|it| format!("\"{it}\"")).collect();
        let configuration = format!(
            "global: {{scrape_interval: 200ms}}\nscrape_configs:\n  - job_name: twheel\n    \
             static_configs:\n      - targets: [{}]\n",
            targets.join(", ")
        );
        fs::write(directory.0.join("prometheus.yml"), configuration)?;
        // The namespace is the test's own: a port that is free now stays so.
        let free = host.enter(|| Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?))?;
        let mut command = host.command(path)?;
        command
            .arg(format!(
                "--config.file={}",
                directory.file("prometheus.yml")
            ))
            .arg(format!("--storage.tsdb.path={}", directory.file("data")))
            .arg(format!("--web.listen-address={free}"))
            .arg("--enable-feature=exemplar-storage");
        let it = Self {
            process: Process::start(command, directory.0.join("log"))?,
            host,
            address: free,
        };
        let end = Instant::now() + PATIENCE;
        while it.get("/-/ready").is_err() {
            ensure!(
                Instant::now() < end,
                "prometheus is not ready: {}",
                it.process.log()
            );
            thread::sleep(Duration::from_millis(50));
        }
        Ok(it)
    }

    fn get(&self, path: &str) -> Result<String> {
        let mut socket = self.host.enter(|| Ok(TcpStream::connect(self.address)?))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        write!(
            socket,
            "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n",
            self.address
        )?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        ensure!(head.contains(" 200 "), "{answer}");
        Ok(body.to_owned())
    }

    /// The answer to a query over the last minute.
    fn ask(&self, how: &str, query: &str) -> Result<Value> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let now = now.as_secs_f64();
        let path = format!(
            "/api/v1/{how}?query={}&start={}&end={now}&step=5",
            encoded(query),
            now - 60.0
        );
        Ok(serde_json::from_str(&self.get(&path)?)?)
    }

    /// The series of a query over the last minute.
    fn series(&self, query: &str) -> Result<Vec<Value>> {
        let answer = self.ask("query_range", query)?;
        let series = answer["data"]["result"].as_array().context("no result")?;
        Ok(series.clone())
    }

    /// The exemplars of the series of a query over the last minute.
    fn exemplars(&self, query: &str) -> Result<Vec<Value>> {
        let answer = self.ask("query_exemplars", query)?;
        let series = answer["data"].as_array().context("no data")?.iter();
        let exemplars = series.filter_map(|it| it["exemplars"].as_array());
        Ok(exemplars.flatten().cloned().collect())
    }
}

/// A text as part of an address.
fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// The rules in `dist/prometheus`.
fn rules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/prometheus/twheel-fleet.rules.yml")
}

#[test]
fn each_alert_is_a_rule_over_metrics_that_are_served() -> Result<()> {
    let Some(prometheus) = prometheus() else {
        skipped("no prometheus: `cargo xtask test` gets it");
        return Ok(());
    };
    let promtool = prometheus.with_file_name("promtool");
    let mut check = Command::new(&promtool);
    let output = check.args(["check", "rules"]).arg(rules()).output()?;
    ensure!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout)?;
    ensure!(said.contains("5 rules found"), "{said}");
    // The tests of the metrics compare this document with what is served.
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let document = fs::read_to_string(document)?;
    let text = fs::read_to_string(rules())?;
    let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    let metrics: Vec<_> = words.filter(|it| it.starts_with("twheel_")).collect();
    ensure!(metrics.len() >= 7, "{metrics:?}");
    for metric in metrics {
        ensure!(document.contains(metric), "{metric} is not served");
    }
    // Two of three TCP connections leak, among many more ends of UDP.
    let test = format!(
        "rule_files: [{rules:?}]\n\
         tests:\n\
         - interval: 1m\n  \
         input_series:\n  \
         - {{series: 'twheel_ended_flows_total{{instance=\"a\",reason=\"idle\",state=\"established\"}}', values: '0+120x120'}}\n  \
         - {{series: 'twheel_ended_flows_total{{instance=\"a\",reason=\"closed\",state=\"time_wait\"}}', values: '0+60x120'}}\n  \
         - {{series: 'twheel_ended_flows_total{{instance=\"a\",reason=\"idle\",state=\"udp\"}}', values: '0+18000x120'}}\n  \
         - {{series: 'twheel_ended_flows_total{{instance=\"b\",reason=\"idle\",state=\"established\"}}', values: '0+120x120'}}\n  \
         - {{series: 'twheel_ended_flows_total{{instance=\"b\",reason=\"reset\",state=\"close\"}}', values: '0+600x120'}}\n  \
         promql_expr_test:\n  \
         - {{expr: 'count by (instance) (ALERTS{{alertname=\"TwheelLeak\",alertstate=\"firing\"}})', eval_time: 90m,\n     \
         exp_samples: [{{labels: '{{instance=\"a\"}}', value: 1}}]}}\n",
        rules = rules(),
    );
    let directory = Directory::new("rules")?;
    fs::write(directory.file("test.yml"), test)?;
    let mut check = Command::new(&promtool);
    let output = check
        .args(["test", "rules"])
        .arg(directory.file("test.yml"))
        .output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

/// Two hosts with a `twheel run` each, and a Prometheus that reads both.
struct Watched<'a> {
    prometheus: Prometheus<'a>,
    targets: Vec<SocketAddr>,
    _running: Vec<Twheel>,
}

impl<'a> Watched<'a> {
    fn start(pair: &'a Pair, directory: &Directory) -> Result<Self> {
        let (mut running, mut targets) = (Vec::new(), Vec::new());
        for (host, interface, address) in [
            (&pair.server, SERVER, "10.77.0.2:0"),
            (&pair.client, CLIENT, "10.77.0.1:0"),
        ] {
            let args = ["--iface", interface, "--metrics", address, "--json"];
            let more = ["--timeout", "300ms", "--reap", "socket", "--dry-run"];
            let twheel = Twheel::start(host, &[&args[..], &more].concat())?;
            let told = twheel.await_stderr("metrics and page: ")?;
            let at = told.lines().find_map(|line| {
                line.strip_prefix("metrics and page: http://")?
                    .strip_suffix('/')
            });
            targets.push(at.context("no address")?.parse()?);
            running.push(twheel);
        }
        let prometheus = Prometheus::start(&pair.server, directory, &targets)?;
        // Each metric must have been read before its first flow ends, or the end is no increase.
        let end = Instant::now() + PATIENCE;
        while prometheus.series("twheel_build_info")?.len() < targets.len() {
            ensure!(Instant::now() < end, "prometheus reads nothing");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(Self {
            prometheus,
            targets,
            _running: running,
        })
    }

    /// Makes traffic until nothing is missing.
    fn until_nothing_is(
        &self,
        pair: &Pair,
        missing: impl Fn(&Self) -> Result<Vec<String>>,
    ) -> Result<()> {
        let (end, mut kept) = (Instant::now() + PATIENCE, Vec::new());
        loop {
            // More of each, until there are two values of all.
            kept.extend(pair.connect_some(2)?);
            pair.connect_some(1)?
                .into_iter()
                .try_for_each(|it| it.close())?;
            pair.connect_some(1)?
                .into_iter()
                .try_for_each(|it| it.reset())?;
            thread::sleep(Duration::from_millis(900));
            let missing = missing(self)?;
            if missing.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "panels that show nothing, or not all: {missing:#?}"
            );
        }
    }
}

#[test]
fn each_panel_on_prometheus_shows_something() -> Result<()> {
    require_root();
    if prometheus().is_none() {
        skipped("no prometheus: `cargo xtask test` gets it");
        return Ok(());
    }
    let dashboard = Dashboard::read("twheel-fleet-prometheus", "prometheus")?;
    let interval = dashboard.interval()?;
    let queries = dashboard.queries()?;
    ensure!(queries.len() >= 15, "{} queries", queries.len());
    let labels = dashboard.variable("host")?;
    ensure!(labels["query"]["query"] == "label_values(twheel_build_info, instance)");
    let directory = Directory::new("prometheus")?;
    let pair = Pair::new()?;
    let watched = Watched::start(&pair, &directory)?;
    watched.until_nothing_is(&pair, |watched| {
        let mut empty = Vec::new();
        for chosen in [".*".to_owned(), watched.targets[0].to_string()] {
            for query in &queries {
                let text = query.text.replace("${interval}", interval);
                let text = text.replace("$__range", "3600s").replace("$host", &chosen);
                let series = watched.prometheus.series(&replaced(text)?)?;
                let hosts = series
                    .iter()
                    .filter_map(|it| it["metric"]["instance"].as_str());
                let hosts: Vec<_> = hosts.collect();
                let wanted: Vec<_> = watched.targets.iter().map(ToString::to_string).collect();
                let wanted = if chosen == ".*" {
                    &wanted[..]
                } else {
                    &wanted[..1]
                };
                let is_by_host = query.text.contains("by (instance)")
                    || query.panel.contains("by host")
                    || query.panel.contains("Occupancy");
                let covers = wanted.iter().all(|it| hosts.contains(&&**it));
                if series.is_empty() || is_by_host && !covers {
                    empty.push(format!("{} ({chosen}): {series:?}", query.panel));
                }
            }
        }
        Ok(empty)
    })
}

#[test]
fn each_panel_of_the_dashboard_of_a_host_shows_something() -> Result<()> {
    require_root();
    if prometheus().is_none() {
        skipped("no prometheus: `cargo xtask test` gets it");
        return Ok(());
    }
    let file = "docs/grafana-dashboard.json";
    let dashboard = Dashboard::read_file(file, "twheel", "prometheus")?;
    let queries = dashboard.queries()?;
    ensure!(queries.len() >= 25, "{} queries", queries.len());
    let labels = dashboard.variable("instance")?;
    ensure!(labels["query"]["query"] == "label_values(twheel_build_info, instance)");
    let directory = Directory::new("prometheus-of-a-host")?;
    let pair = Pair::new()?;
    let watched = Watched::start(&pair, &directory)?;
    watched.until_nothing_is(&pair, |watched| {
        let mut empty = Vec::new();
        for chosen in [".*".to_owned(), watched.targets[1].to_string()] {
            for query in &queries {
                let text = query.text.replace("$__rate_interval", "60s");
                let text = text.replace("$__range", "3600s");
                let text = text.replace("$instance", &chosen);
                let series = watched.prometheus.series(&replaced(text)?)?;
                let interfaces = series
                    .iter()
                    .filter_map(|it| it["metric"]["interface"].as_str());
                let interfaces: Vec<_> = interfaces.collect();
                let wanted = match chosen.as_str() {
                    ".*" => &[CLIENT, SERVER][..],
                    _ => &[CLIENT],
                };
                let is_by_interface = query.panel.contains("by interface");
                let covers = wanted.iter().all(|it| interfaces.contains(it));
                let is_a_number = series.iter().any(|it| {
                    let values = it["values"].as_array().into_iter().flatten();
                    let mut last = values.filter_map(|it| it[1].as_str());
                    last.next_back().is_some_and(|it| it != "NaN")
                });
                if !is_a_number || is_by_interface && !covers {
                    empty.push(format!("{} ({chosen}): {series:?}", query.panel));
                }
            }
        }
        // Prometheus asks for OpenMetrics, and so gets exemplars.
        for metric in [
            "twheel_expiry_lateness_seconds_bucket",
            "twheel_ended_flows_total",
        ] {
            let exemplars = watched.prometheus.exemplars(metric)?;
            let has = |it: &Value| {
                it["labels"]["flow_id"]
                    .as_str()
                    .is_some_and(|it| it.len() == 36)
            };
            if exemplars.is_empty() || !exemplars.iter().all(has) {
                empty.push(format!("exemplars of {metric}: {exemplars:?}"));
            }
        }
        Ok(empty)
    })
}
