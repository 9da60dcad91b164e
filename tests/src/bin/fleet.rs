//! `twheel-fleet-lab`: a fleet on one machine. Hosts with real traffic and a `twheel run` each send
//! their events to a broker and to ClickHouse's engine; the commands of `twheel fleet` are asked; and
//! each host's ends in ClickHouse are compared with its history.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use twheel_tests::{
    fleet::{
        carry::Carrier,
        hosts::Network,
        running::{Route, Sums, TOPIC, ends},
        servers::{Broker, Client, Database, Keep, tools},
        traffic::{Load, SERVICES, Traffic},
    },
    process::Process,
    signals::{self, Interrupted},
};

/// Longer than the longest timeout of the lab's flows, and a tick.
const SETTLE: Duration = Duration::from_secs(6);
/// The longest time until what is in the histories is in ClickHouse.
const ARRIVE: Duration = Duration::from_secs(120);
/// How often the lab says how far it is.
const PROGRESS: Duration = Duration::from_secs(5);
/// What is asked of the fleet.
const QUESTIONS: [&[&str]; 6] = [
    &["hosts"],
    &["reasons"],
    &["leaks"],
    &["leaks", "--by", "host"],
    &["talkers", "--limit", "5"],
    &[
        "expired",
        "dport == 8443 and reason == idle",
        "--host",
        "host-01",
        "--limit",
        "5",
    ],
];

/// What `cargo xtask fleet` asks for.
#[derive(Parser)]
#[command(name = "twheel-fleet-lab")]
struct Options {
    /// Hosts
    #[arg(long)]
    hosts: u16,
    /// Seconds of traffic
    #[arg(long)]
    seconds: u64,
    /// Connections that each host opens a second
    #[arg(long)]
    rate: u32,
}

/// The lab's output: standard output, and the page.
struct Lab {
    options: Options,
    page: String,
    directory: PathBuf,
    interrupted: Arc<AtomicBool>,
}

impl Lab {
    /// Prints a line. A reader that has closed the output must not keep the lab from cleaning up.
    fn say(&self, text: &str) {
        let _ = writeln!(std::io::stdout(), "{text}");
    }

    fn go_on(&self) -> Result<()> {
        signals::check(&self.interrupted)
    }

    /// Waits, unless it is interrupted.
    fn wait(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.go_on()?;
            thread::sleep(Duration::from_millis(50));
        }
        self.go_on()
    }

    fn run(&mut self) -> Result<()> {
        let tools = tools().context("no tools: run `cargo xtask fleet`")?;
        let hosts = usize::from(self.options.hosts);
        self.say(&format!(
            "The fleet: {hosts} hosts (network namespaces) and a hub, joined by a bridge."
        ));
        let network = Network::new(hosts, &self.directory.join("hosts"), &|| self.go_on())?;
        let log = self.directory.join("broker.log");
        let _broker = Broker::start(&network, &tools, log, Keep::Memory)?;
        self.say(&format!(
            "On the hub: a broker that speaks Kafka's protocol ({}), with the topic {TOPIC}.",
            Broker::address()
        ));
        let database = Database::start(&network, &tools, self.directory.join("tables"))?;
        let client = Client::new(&network);
        client.set_up_with_topic()?;
        self.say(&format!(
            "On the hub: ClickHouse's engine ({}), with the tables of `twheel fleet schema`.",
            Database::url()
        ));
        let carrier = Carrier::start(&network, TOPIC)?;
        let (mut runs, mut exporters) = (Vec::new(), Vec::new());
        for (number, host) in network.hosts.iter().enumerate() {
            self.go_on()?;
            runs.push(host.run()?);
            let route = route(number);
            exporters.push(host.export(route, "state", &[])?);
        }
        self.say(
            "On each host: `twheel run`, and an exporter: of each ten, seven to Kafka and three straight to \
             ClickHouse.\n\nEach host offers these services and uses those of the others:",
        );
        for service in SERVICES {
            self.say(&format!(
                "  {:<7} port {:<5} {:?}",
                service.name, service.port, service.habit
            ));
        }
        self.say("");
        let opened = self.traffic(&network, &client, &mut runs, &mut exporters)?;
        self.say("\nThe traffic has ended. What is still in the tables expires.");
        self.wait(SETTLE)?;
        for run in runs {
            run.stop()?;
        }
        let wanted = ends(&network.hosts)?;
        let arrived = client.await_ends(&wanted, ARRIVE);
        self.report(&client, opened)?;
        self.compare(&wanted, &client)?;
        arrived?;
        for exporter in &mut exporters {
            exporter.kill()?;
        }
        carrier.stop()?;
        database.stop()
    }

    /// Runs the traffic, and says how far it is. Returns how many connections were opened.
    fn traffic(
        &self,
        network: &Network,
        client: &Client,
        runs: &mut [Process],
        exporters: &mut [Process],
    ) -> Result<u64> {
        let load = Load {
            pause: Duration::from_secs(1) / self.options.rate,
            connections: None,
        };
        let begun = Instant::now();
        let mut traffic = Traffic::start(&network.hosts, load)?;
        let all = Duration::from_secs(self.options.seconds);
        while begun.elapsed() < all {
            self.wait(PROGRESS.min(all.saturating_sub(begun.elapsed())))?;
            traffic.check()?;
            for process in runs.iter_mut().chain(exporters.iter_mut()) {
                process.check()?;
            }
            let rows = client.rows(
                "SELECT uniqExact(host, instance, seq) AS n FROM events WHERE event = 'end'",
            )?;
            self.say(&format!(
                "{:5.0} s  {:>7} connections opened  {:>7} ends in ClickHouse",
                begun.elapsed().as_secs_f64(),
                traffic.opened.load(Relaxed),
                rows[0]["n"]
            ));
        }
        traffic.stop()
    }

    /// Asks the fleet, and shows what it answers.
    fn report(&mut self, client: &Client, opened: u64) -> Result<()> {
        let Options {
            hosts,
            seconds,
            rate,
        } = self.options;
        let _ = writeln!(
            self.page,
            "# A fleet of {hosts} hosts\n\n{opened} connections in {seconds} s, {rate} a second from each host. \
             Each is seen by two hosts.\n"
        );
        for question in QUESTIONS {
            self.go_on()?;
            let text = client.twheel(question)?;
            let shown = question.iter().map(|word| match word.contains(' ') {
                true => format!("'{word}'"),
                false => (*word).to_owned(),
            });
            let shown = shown.collect::<Vec<_>>().join(" ");
            ensure!(
                text.lines().count() > 1,
                "`twheel fleet {shown}` shows nothing"
            );
            self.say(&format!("\n$ twheel fleet {shown}\n{}", text.trim_end()));
            let _ = writeln!(self.page, "```console\n$ twheel fleet {shown}\n{text}```\n");
        }
        Ok(())
    }

    /// Compares each host's history with ClickHouse, and shows both.
    fn compare(&mut self, wanted: &Sums, client: &Client) -> Result<()> {
        let [table, view] = client.ends()?;
        let mut text = format!(
            "{:<9} {:<11} {:>9} {:>9} {:>15}\n",
            "HOST", "EXPORTER", "HISTORY", "EVENTS", "ENDS_BY_MINUTE"
        );
        for (number, (key, sum)) in wanted.iter().enumerate() {
            let is = [&table, &view].map(|it| it.get(key).copied().unwrap_or_default());
            let same = is.iter().all(|it| it == sum);
            let _ = writeln!(
                text,
                "{:<9} {:<11} {:>9} {:>9} {:>15} {}",
                key.0,
                route(number).name(),
                sum.count,
                is[0].count,
                is[1].count,
                if same { "" } else { " DIFFERS" }
            );
        }
        let text: Vec<_> = text.lines().map(str::trim_end).collect();
        let text = text.join("\n");
        self.say(&format!(
            "\nEnds in the histories and in ClickHouse:\n{text}"
        ));
        let _ = writeln!(
            self.page,
            "## Ends in the histories and in ClickHouse\n\n```text\n{text}\n```"
        );
        let page = self.directory.join("results.md");
        fs::write(&page, &self.page).with_context(|| format!("cannot write {}", page.display()))?;
        ensure!(
            wanted.len() == usize::from(self.options.hosts),
            "{} instances have ends, not {}",
            wanted.len(),
            self.options.hosts
        );
        Ok(())
    }
}

/// Where a host sends its events.
fn route(number: usize) -> Route {
    match number % 10 {
        0..=6 => Route::Kafka,
        _ => Route::ClickHouse,
    }
}

fn lab(options: Options) -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the lab makes network namespaces and loads BPF programs: run it as root"
    );
    let directory =
        std::env::var_os("TWHEEL_FLEET_DIR").map_or_else(|| "target/fleet".into(), PathBuf::from);
    let directory = std::path::absolute(directory)?;
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut lab = Lab {
        options,
        page: String::new(),
        directory: directory.clone(),
        interrupted: signals::on_signal()?,
    };
    let ended = lab.run();
    // Of a run that has failed, the logs tell why.
    if ended
        .as_ref()
        .err()
        .is_none_or(|error| error.is::<Interrupted>())
    {
        for name in ["hosts", "tables", "broker.log"] {
            let path = directory.join(name);
            let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
        }
    }
    ended.with_context(|| format!("logs: {}", directory.display()))?;
    lab.say(&format!(
        "\nAll as it should be: each host's ends are in ClickHouse, once. Nothing is left behind: hosts, programs, \
         pins.\nA page of these results: {}",
        directory.join("results.md").display()
    ));
    Ok(())
}

fn main() -> ExitCode {
    match lab(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => Interrupted::exit(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
