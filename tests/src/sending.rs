//! A host whose flows end soon, and whose history exporters send.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    os::unix::fs::symlink,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    directory::Directory,
    netns::{Namespace, PATIENCE},
    pair::{Pair, SERVER},
    process::Process,
    running::{Twheel, twheel_bin},
};

/// A host, its running twheel and its history.
pub struct Sending {
    /// The host is the server of this pair.
    pub pair: Pair,
    /// The history, and files of the test.
    pub history: Directory,
    twheel: Option<Twheel>,
    begun: u32,
}

/// Which event: of which instance, and its number there.
pub type Which = (String, u64);

impl Sending {
    /// Starts a twheel with timeouts of 300 ms.
    pub fn start(name: &str) -> Result<Self> {
        Self::start_with(name, "1GiB")
    }

    /// The same, with a history of this size.
    pub fn start_with(name: &str, size: &str) -> Result<Self> {
        let history = Directory::new(name)?;
        let pair = Pair::new()?;
        let mut args = vec!["--iface", SERVER, "--timeout", "300ms", "--accounting"];
        args.extend(["--history", history.path(), "--history-size", size]);
        args.extend(["--max-flows", "400000"]);
        let twheel = Twheel::start_muted(&pair.server, &args)?;
        outside(&history, &pair.server)?;
        Ok(Self {
            pair,
            history,
            twheel: Some(twheel),
            begun: 0,
        })
    }

    /// Begins more flows.
    pub fn begin(&mut self, flows: u32) -> Result<()> {
        let these: Range<u32> = self.begun..self.begun + flows;
        self.begun += flows;
        self.pair.server.begin_these(SERVER, these)
    }

    /// Waits until all flows have ended, ends the run, and returns the lines of the history.
    pub fn end(&mut self) -> Result<BTreeMap<Which, String>> {
        let end = Instant::now() + PATIENCE;
        // The history may be long: it is read when it should have them all.
        self.pair.server.await_expired(self.begun.into(), end)?;
        let lines = loop {
            let lines = self.lines()?;
            let ends = lines.iter().filter(|it| it.contains("\"event\":\"end\""));
            let ends = ends.count();
            if ends == self.begun as usize {
                break lines;
            }
            ensure!(Instant::now() < end, "{ends} of {} flows ended", self.begun);
            thread::sleep(Duration::from_millis(100));
        };
        if let Some(twheel) = self.twheel.take() {
            twheel.kill()?;
        }
        by_number(lines)
    }

    /// Waits until all flows have ended, whatever the history still has of them.
    pub fn expire(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        self.pair.server.await_expired(self.begun.into(), end)?;
        // The history is written a moment later.
        thread::sleep(Duration::from_secs(1));
        Ok(())
    }

    /// What the history has: each event that an exporter sends.
    pub fn told(&self) -> Result<BTreeMap<Which, String>> {
        by_number(self.lines()?)
    }

    fn lines(&self) -> Result<Vec<String>> {
        let args = [
            "expired",
            "--json",
            "--events",
            "begin,update,end,rto,reap,run",
        ];
        let args = [
            &args[..],
            &["--iface", SERVER, "--history", self.history.path()],
        ]
        .concat();
        let ended = self.pair.server.twheel_once(&args)?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        Ok(ended.lines.into_iter().map(|line| line.text).collect())
    }

    /// An exporter, which keeps its position in a file of this name and says what is wrong in another
    /// one. It is outside of the host's network namespace.
    pub fn exporter(&self, name: &str, args: &[&str]) -> Result<Exporter> {
        let mut command = Command::new(twheel_bin()?);
        // Not in a directory of the position's own.
        let said = format!("{}.said", name.replace('/', "-"));
        let said = self.history.0.join(said);
        let state = self.history.file(name);
        command.arg("export").args(args);
        let history = self.history.file("outside");
        command.args(["--iface", SERVER, "--history", &history, "--state", &state]);
        Ok(Exporter(Process::start(command, said)?))
    }
}

/// Makes a directory in which a process outside of a host's network namespace, where servers are, finds
/// the history of this interface of the host. Returns its path.
pub fn outside(history: &Directory, host: &Namespace) -> Result<String> {
    let here = twheel::netns::lasting_name(twheel::pins::namespace()?);
    let outside = history.file("outside");
    std::fs::create_dir(&outside)?;
    symlink(
        history.0.join(host.history(SERVER)),
        format!("{outside}/{SERVER}@{here}"),
    )?;
    Ok(outside)
}

/// An exporter that runs; killed when this is dropped.
pub struct Exporter(Process);

impl Exporter {
    /// What it has said so far, and those before it with the same name.
    pub fn said(&self) -> String {
        self.0.log()
    }

    /// Waits until it has said this, and returns all that it has said.
    pub fn says(&mut self, what: &str) -> Result<String> {
        self.0.await_text(what)
    }

    /// Kills it.
    pub fn kill(mut self) -> Result<()> {
        self.0.kill()
    }

    /// Waits until it ends by itself, and returns its exit code.
    pub fn code(mut self) -> Result<Option<i32>> {
        Ok(self.0.ended(2 * PATIENCE)?.code())
    }

    /// The memory that it has touched and not given back, in bytes.
    pub fn memory(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.pid()))?;
        let line = status.lines().find_map(|it| it.strip_prefix("VmRSS:"));
        let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB");
        Ok(1024 * kib.parse::<u64>()?)
    }
}

/// An event's instance and number.
pub fn which(line: &str) -> Result<Which> {
    let event: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
    let instance = event["instance"].as_str().context("no instance")?;
    let number = event["seq"].as_u64().context("no seq")?;
    Ok((instance.to_owned(), number))
}

fn by_number(lines: Vec<String>) -> Result<BTreeMap<Which, String>> {
    lines
        .into_iter()
        .map(|line| Ok((which(&line)?, line)))
        .collect()
}

/// What exporters have sent.
#[derive(Debug, Default)]
pub struct Sorted {
    /// The events.
    pub events: BTreeMap<Which, String>,
    /// The lines that exporters write of themselves.
    pub exports: Vec<Value>,
    /// How many events came twice.
    pub twice: usize,
    lines: usize,
}

impl Sorted {
    /// Adds those of these lines that are new: the first ones are those of the last time.
    ///
    /// # Errors
    ///
    /// A line is no event, or another one than before with the same number.
    pub fn add_new<'a>(&mut self, lines: impl Iterator<Item = &'a str>) -> Result<()> {
        for line in lines.skip(self.lines) {
            self.lines += 1;
            if line.starts_with("{\"schema\":1,\"event\":\"export\"") {
                self.exports.push(serde_json::from_str(line)?);
            } else if let Some(before) = self.events.insert(which(line)?, line.to_owned()) {
                ensure!(
                    before == line,
                    "two events with one number: {before} {line}"
                );
                self.twice += 1;
            }
        }
        Ok(())
    }
}

/// The exporters of these lines.
pub fn exporters(exports: &[Value]) -> BTreeSet<String> {
    let name = |line: &Value| line["exporter"].as_str().map(str::to_owned);
    exports.iter().filter_map(name).collect()
}
