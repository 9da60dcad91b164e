//! A running `twheel run`, and other twheel commands: what they print and how they end.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use aya::programs::{TestRun, TestRunOptions};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel::pins::Instance;

use crate::{
    netns::{Namespace, PATIENCE},
    plane::{ACK, PASS, frame},
    schema,
};

/// The path of the `twheel` executable: `TWHEEL_BIN`, or the one that was built beside this program.
pub fn twheel_bin() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("TWHEEL_BIN") {
        return Ok(path.into());
    }
    std::env::current_exe()
        .context("cannot tell where this program is")?
        .ancestors()
        .skip(1)
        .map(|directory| directory.join("twheel"))
        .find(|path| path.is_file())
        .context("no program twheel: build it with `cargo build -p twheel-user`")
}

impl Namespace {
    /// A `twheel` command with arguments, to run inside the namespace.
    pub fn twheel(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command(twheel_bin()?)?;
        // A test that wants a history says where.
        command.args(args).env("TWHEEL_HISTORY", "off");
        Ok(command)
    }

    /// Runs `twheel` until it ends.
    pub fn twheel_once(&self, args: &[&str]) -> Result<Ended> {
        once(self.twheel(args)?)
    }

    /// A counter, as `twheel stats` prints it.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let ended = self.twheel_once(&["stats", "--json"])?;
        for line in &ended.lines {
            let value: serde_json::Value = serde_json::from_str(&line.text)?;
            if value["counter"] == name {
                return value["total"].as_u64().context("no total");
            }
        }
        anyhow::bail!("no {name}: {}", ended.stderr)
    }

    /// Waits until this many flows have ended by their timeouts, at most until this time. The history
    /// has them a moment later.
    pub fn await_expired(&self, flows: u64, until: Instant) -> Result<()> {
        loop {
            let expired = self.counter("expired")?;
            if expired >= flows {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{expired} of {flows} flows expired");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Begins this many flows in the `twheel run` on an interface: runs its pinned program on a
    /// packet of each flow, as numbered by [`frame`].
    pub fn begin_flows(&self, interface: &str, flows: u32) -> Result<()> {
        self.begin_these(interface, 0..flows)
    }

    /// The same for the flows with these numbers.
    pub fn begin_these(&self, interface: &str, flows: std::ops::Range<u32>) -> Result<()> {
        let program = self.enter(|| Instance::with(interface)?.xdp("twheel_xdp"))?;
        for flow in flows {
            let result = program
                .test_run(TestRunOptions {
                    data_in: Some(&frame(flow, false, ACK)),
                    ..TestRunOptions::new()
                })
                .context("cannot begin a flow")?;
            ensure!(result.return_value == PASS, "a packet does not pass");
        }
        Ok(())
    }
}

/// A line of standard output.
#[derive(Clone, Debug)]
pub struct Printed {
    /// When it was read.
    pub at: Instant,
    /// Without the end of line.
    pub text: String,
}

/// A parsed line of `twheel run --json`.
#[derive(Clone, Debug)]
pub struct Expiry {
    /// When it was read.
    pub at: Instant,
    /// When it ended, by its own account.
    pub time: SystemTime,
    /// Its protocol.
    pub proto: String,
    /// The initiator's endpoint.
    pub src: SocketAddr,
    /// The responder's endpoint.
    pub dst: SocketAddr,
    /// Its state at the end.
    pub state: String,
    /// The flow was picked up: its beginning was not seen.
    pub picked_up: bool,
    /// Why it ended.
    pub reason: String,
    /// The rule that it matched.
    pub rule: Option<String>,
    /// From its first packet to its end.
    pub age: Duration,
    /// From its last packet to its end.
    pub idle: Duration,
}

impl Printed {
    /// Parses the line's JSON.
    pub fn expiry(&self) -> Result<Expiry> {
        let value: serde_json::Value = serde_json::from_str(&self.text)
            .with_context(|| format!("no JSON: {:?}", self.text))?;
        let text = |key: &str| {
            let text = value[key].as_str().map(str::to_owned);
            text.with_context(|| format!("no {key} in {}", self.text))
        };
        let number = |key: &str| {
            let number = value[key].as_u64();
            number.with_context(|| format!("no {key} in {}", self.text))
        };
        let end = |address: &str, port: &str| -> Result<SocketAddr> {
            let port = u16::try_from(number(port)?).context("a port out of range")?;
            Ok(SocketAddr::new(text(address)?.parse()?, port))
        };
        ensure!(text("event")? == "end", "another event: {}", self.text);
        Ok(Expiry {
            at: self.at,
            time: humantime::parse_rfc3339(&text("time")?)?,
            proto: text("proto")?,
            src: end("src", "sport")?,
            dst: end("dst", "dport")?,
            state: text("state")?,
            picked_up: value["picked_up"].as_bool().context("no picked_up")?,
            reason: text("reason")?,
            rule: value["rule"].as_str().map(str::to_owned),
            age: Duration::from_micros(number("age_us")?),
            idle: Duration::from_micros(number("idle_us")?),
        })
    }
}

/// How long an end may take from the kernel to the test that reads of it, on a busy machine.
const READ: Duration = Duration::from_secs(5);
/// How many of the lines of a process are compared with the schema.
const CHECKED: usize = 500;

type Lines = Arc<Mutex<Vec<String>>>;
type Refused = Arc<Mutex<Option<String>>>;

/// A running `twheel run`; killed when this is dropped.
pub struct Twheel {
    child: Child,
    lines: Receiver<Printed>,
    runs: Lines,
    refused: Refused,
    stderr: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it wrote to standard error.
    pub stderr: String,
    /// The lines of standard output that nothing had read.
    pub lines: Vec<Printed>,
    /// Its `run` events.
    pub runs: Vec<String>,
}

impl Ended {
    /// The exit code, unless a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Twheel {
    /// Starts `twheel run` in a namespace and waits until it is attached: to all interfaces that it
    /// names, unless it waits for some of them itself; and to at least one that matches a pattern,
    /// unless it waits for one.
    pub fn start(namespace: &Namespace, args: &[&str]) -> Result<Self> {
        Self::start_with(namespace, args, |_| {})
    }

    /// The same, with each line of standard error passed on as it appears.
    pub fn start_with(
        namespace: &Namespace,
        args: &[&str],
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        Self::attached(namespace, args, Stdio::piped(), on_stderr)
    }

    /// The same, with its output sent to /dev/null.
    pub fn start_muted(namespace: &Namespace, args: &[&str]) -> Result<Self> {
        Self::attached(namespace, args, Stdio::null(), |_| {})
    }

    fn attached(
        namespace: &Namespace,
        args: &[&str],
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let mut command = namespace.twheel(&["run"])?;
        command.args(args);
        let twheel = Self::attached_by(command, stdout, on_stderr)?;
        if !["--wait-iface", "--netns"]
            .iter()
            .any(|it| args.contains(it))
        {
            let given = args.windows(2).filter(|it| it[0] == "--iface");
            let names = given.flat_map(|it| it[1].split(','));
            let names = names.filter(|it| *it != "all");
            for name in names.filter(|it| !it.contains(['*', '?', '['])) {
                twheel.await_stderr(&format!("{name}: attached"))?;
            }
        }
        Ok(twheel)
    }

    /// The same for a command that starts `twheel run` through other programs.
    pub fn start_command(
        command: Command,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        Self::attached_by(command, Stdio::piped(), on_stderr)
    }

    fn attached_by(
        command: Command,
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let (twheel, attached) = Self::spawn(command, stdout, on_stderr)?;
        if attached.recv_timeout(PATIENCE).is_err() {
            let ended = twheel.kill()?;
            bail!("twheel did not start: {}", ended.stderr.trim());
        }
        Ok(twheel)
    }

    fn spawn(
        mut command: Command,
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<(Self, Receiver<()>)> {
        // Of `twheel run`; `twheel expired` lists them with the others.
        let has_runs = command.get_args().all(|it| it != "expired");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let stdout = child.stdout.take().map(BufReader::new);
        let errors = BufReader::new(child.stderr.take().context("no stderr")?);
        let (to_lines, lines) = channel();
        let (to_attached, attached) = channel();
        let stderr = Arc::new(Mutex::new(String::new()));
        let collected = stderr.clone();
        let (runs, refused_line) = (Arc::default(), Arc::default());
        let (told, refused): (Lines, Refused) = (Arc::clone(&runs), Arc::clone(&refused_line));
        let readers = vec![
            thread::spawn(move || {
                let lines = stdout.into_iter().flat_map(BufRead::lines);
                for (number, text) in lines.map_while(Result::ok).enumerate() {
                    let at = Instant::now();
                    if number < CHECKED
                        && let Err(error) = schema::check(&text)
                    {
                        lock(&refused).get_or_insert(error.to_string());
                    }
                    // The kind of event is the second field. Whole lines would take long to search.
                    match has_runs && text.split(',').nth(1) == Some("\"event\":\"run\"") {
                        true => lock(&told).push(text),
                        false => drop(to_lines.send(Printed { at, text })),
                    }
                }
            }),
            thread::spawn(move || {
                for line in errors.lines().map_while(Result::ok) {
                    {
                        let mut collected = lock(&collected);
                        collected.push_str(&line);
                        collected.push('\n');
                    }
                    on_stderr(&line);
                    // Or it waits for interfaces that match a pattern, or for namespaces.
                    if line.contains(": attached") || line.contains(" matches: waiting for one") {
                        let _ = to_attached.send(());
                    }
                }
            }),
        ];
        let twheel = Self {
            child,
            lines,
            runs,
            refused: refused_line,
            stderr,
            readers,
        };
        Ok((twheel, attached))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its resources: resident memory in KiB, threads, open files.
    pub fn held(&self) -> Result<[usize; 3]> {
        let process = PathBuf::from(format!("/proc/{}", self.pid()));
        let status = fs::read_to_string(process.join("status"))?;
        let field = |name: &str| -> Result<usize> {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            let value = value.and_then(|it| it.split_ascii_whitespace().next());
            Ok(value.context("no such field")?.parse()?)
        };
        let files = fs::read_dir(process.join("fd"))?.count();
        Ok([field("VmRSS:")?, field("Threads:")?, files])
    }

    /// The same, once threads and files are as many as 100 ms before: it opens some for a moment.
    pub fn held_at_rest(&self) -> Result<[usize; 3]> {
        let end = Instant::now() + PATIENCE;
        let mut held = self.held()?;
        loop {
            thread::sleep(Duration::from_millis(100));
            let now = self.held()?;
            if now[1..] == held[1..] {
                return Ok(now);
            }
            ensure!(Instant::now() < end, "it does not come to rest: {held:?}");
            held = now;
        }
    }

    /// How often each of its threads has waited for something. (How often one was interrupted depends
    /// on what else runs.)
    pub fn switches(&self) -> Result<BTreeMap<String, u64>> {
        let mut switches = BTreeMap::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let field = |name: &str| {
                let value = status.lines().find_map(|line| line.strip_prefix(name));
                value.map(str::trim).with_context(|| format!("no {name}"))
            };
            let count = |name| -> Result<u64> { Ok(field(name)?.parse()?) };
            switches.insert(
                format!("{} {}", field("Pid:")?, field("Name:")?),
                count("voluntary_ctxt_switches:")?,
            );
        }
        Ok(switches)
    }

    /// Its standard error so far.
    pub fn stderr(&self) -> String {
        lock(&self.stderr).clone()
    }

    /// What it has told of itself so far: its `run` events, which are not among its lines.
    pub fn runs(&self) -> Vec<String> {
        lock(&self.runs).clone()
    }

    /// # Errors
    ///
    /// It has printed a line that is not as the schema has it.
    fn check(&self) -> Result<()> {
        match &*lock(&self.refused) {
            Some(why) => bail!("{why}"),
            None => Ok(()),
        }
    }

    /// The next line of its output; `None` if none came within this time.
    ///
    /// # Errors
    ///
    /// The process has ended.
    pub fn line(&self, within: Duration) -> Result<Option<Printed>> {
        self.check()?;
        match self.lines.recv_timeout(within) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("twheel has ended: {}", self.stderr().trim())
            }
        }
    }

    /// All ends of flows that it reports until this time.
    pub fn expiries_until(&self, end: Instant) -> Result<Vec<Expiry>> {
        let mut expiries = Vec::new();
        while let Some(line) = self.line(end.saturating_duration_since(Instant::now()))? {
            expiries.push(line.expiry()?);
        }
        Ok(expiries)
    }

    /// The ends of so many flows, as soon as they are reported.
    pub fn ends(&self, count: usize) -> Result<Vec<Expiry>> {
        let end = Instant::now() + PATIENCE;
        let mut expiries = Vec::new();
        while expiries.len() < count {
            let line = self.line(end.saturating_duration_since(Instant::now()))?;
            let line = line.with_context(|| format!("not {count} ends: {expiries:?}"))?;
            expiries.push(line.expiry()?);
        }
        Ok(expiries)
    }

    /// All ends of flows that come within this time, and at least so many. On a busy machine this test
    /// may read some of these later: then they have ended within this time by their own account.
    pub fn ends_within(&self, within: Duration, count: usize) -> Result<Vec<Expiry>> {
        let by = SystemTime::now() + within;
        let mut expiries = self.expiries_until(Instant::now() + within)?;
        let late = self.ends(count.saturating_sub(expiries.len()))?;
        let read = SystemTime::now();
        ensure!(
            late.is_empty() || read <= by + READ,
            "read later than {READ:?} after that: {late:?}"
        );
        for expiry in &late {
            ensure!(expiry.time <= by, "later than {within:?}: {expiry:?}");
        }
        expiries.extend(late);
        Ok(expiries)
    }

    /// Waits until its standard error contains this text, which may come later than `attached`.
    pub fn await_stderr(&self, text: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let stderr = self.stderr();
            if stderr.contains(text) {
                return Ok(stderr);
            }
            ensure!(Instant::now() < end, "no {text:?} in {stderr:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it as Ctrl-C does, with SIGINT.
    pub fn stop(self) -> Result<Ended> {
        self.signal(Signal::SIGINT)?;
        self.wait()
    }

    /// Ends it with SIGKILL.
    pub fn kill(self) -> Result<Ended> {
        self.signal(Signal::SIGKILL)?;
        self.wait()
    }

    /// Waits until it ends. If it does not end, it is killed, which is an error.
    pub fn wait(mut self) -> Result<Ended> {
        let Some(status) = wait_within(&mut self.child, PATIENCE)? else {
            bail!("twheel does not end: {}", self.stderr().trim());
        };
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        self.check()?;
        Ok(Ended {
            status,
            runs: self.runs(),
            stderr: self.stderr(),
            lines: self.lines.try_iter().collect(),
        })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // The child has not been waited for yet, so the process id is still its own.
        kill(Pid::from_raw(self.child.id() as i32), signal).context("cannot signal twheel")
    }
}

impl Drop for Twheel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a program ends. If it does not end within this time, it is killed: `None`.
pub fn wait_within(child: &mut Child, within: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A policy file, removed when this is dropped.
pub struct PolicyFile(PathBuf);

impl PolicyFile {
    /// With this text, and a file name that no other test uses.
    pub fn new(name: &str, text: &str) -> Result<Self> {
        let file = format!("twheel-{}-{name}.toml", std::process::id());
        let file = Self(std::env::temp_dir().join(file));
        file.write(text)?;
        Ok(file)
    }

    /// Replaces the text.
    pub fn write(&self, text: &str) -> Result<()> {
        fs::write(&self.0, text).with_context(|| format!("cannot write {}", self.0.display()))
    }

    /// Its path.
    pub fn path(&self) -> &str {
        self.0.to_str().expect("a name of our own")
    }
}

impl Drop for PolicyFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Runs a command until it ends.
pub fn once(command: Command) -> Result<Ended> {
    Twheel::spawn(command, Stdio::piped(), |_| {})?.0.wait()
}
