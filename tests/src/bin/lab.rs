//! `twheel-lab`: shows twheel at work on two hosts of its own, then checks what twheel reported.
//!
//! Arguments are passed on to `twheel run`. With `--json`, standard output is twheel's own and
//! everything else goes to standard error.

use std::{
    collections::HashMap,
    fmt::Write as _,
    io::Write as _,
    net::SocketAddr,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use twheel::timeouts::Timeouts;
use twheel_common::state::State;
use twheel_tests::{
    pair::{Busy, Connection, Family, Pair, SERVER},
    running::Twheel,
    signals::{self, Interrupted},
};

/// Connections of each kind of behaviour.
const EACH: usize = 5;
/// How long after its timeout an expiry may be shown.
const GRACE: Duration = Duration::from_secs(2);

/// How a connection behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    Busy,
    Idle,
    Closed,
    Reset,
    HalfOpen,
}

impl Habit {
    const ALL: [Self; 5] = [
        Self::Busy,
        Self::Idle,
        Self::Closed,
        Self::Reset,
        Self::HalfOpen,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Idle => "idle",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::HalfOpen => "half-open",
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Busy => "data all the time; falls silent in the end",
            Self::Idle => "opened, one byte, then silent",
            Self::Closed => "closed by both sides (FIN)",
            Self::Reset => "aborted (RST)",
            Self::HalfOpen => "a SYN that nobody answers",
        }
    }

    /// The state and reason with which its flow should end.
    fn expected(self) -> (&'static str, &'static str) {
        match self {
            Self::Busy | Self::Idle => ("established", "idle"),
            Self::Closed => ("time_wait", "closed"),
            Self::Reset => ("close", "reset"),
            Self::HalfOpen => ("syn_sent", "idle"),
        }
    }
}

/// A connection, and what twheel reported of it.
struct Flow {
    habit: Habit,
    /// State and reason of each reported end; there should be one.
    expiries: Vec<(String, String)>,
}

/// What the user asked for.
struct Options {
    args: Vec<String>,
    json: bool,
    timeout: Duration,
    close_timeout: Duration,
}

impl Options {
    /// Adds the lab's defaults to the user's arguments.
    fn new(user: Vec<String>) -> Self {
        let given = |name: &str| {
            user.iter().enumerate().find_map(|(i, arg)| {
                if arg == name {
                    return Some(user.get(i + 1).cloned().unwrap_or_default());
                }
                Some(arg.strip_prefix(name)?.strip_prefix('=')?.to_owned())
            })
        };
        let mut args = vec!["--iface".to_owned(), SERVER.to_owned()];
        let mut text = |name: &str, default: &str| {
            given(name).unwrap_or_else(|| {
                args.extend([name.to_owned(), default.to_owned()]);
                default.to_owned()
            })
        };
        let list = text("--timeout", "3s,time_wait=1s,close=1s");
        text("--tick", "100ms");
        // If the text is invalid, twheel will report it.
        let timeouts = Timeouts::parse(&list).unwrap_or_default();
        let of = |state: State| timeouts.of[state as usize];
        let json = user.iter().any(|arg| arg == "--json");
        if !json {
            args.push("--json".to_owned());
        }
        args.extend(user);
        Self {
            args,
            json,
            timeout: of(State::Established).max(of(State::SynSent)),
            close_timeout: of(State::TimeWait).max(of(State::Close)),
        }
    }
}

/// The demonstration.
struct Lab {
    options: Options,
    interrupted: Arc<AtomicBool>,
    begin: Instant,
    flows: HashMap<SocketAddr, Flow>,
    strangers: usize,
    expired_while_busy: usize,
    silent: bool,
}

impl Lab {
    /// Prints text for people.
    fn say(&self, text: &str) {
        // A reader that has closed the output must not keep the lab from cleaning up.
        let _ = if self.options.json {
            writeln!(std::io::stderr(), "{text}")
        } else {
            writeln!(std::io::stdout(), "{text}")
        };
    }

    fn check_interrupt(&self) -> Result<()> {
        signals::check(&self.interrupted)
    }

    fn track(&mut self, name: SocketAddr, habit: Habit) {
        let expiries = Vec::new();
        self.flows.insert(name, Flow { habit, expiries });
    }

    fn open(&mut self, pair: &Pair, habit: Habit) -> Result<Vec<Connection>> {
        let mut connections = Vec::new();
        for i in 0..EACH {
            self.check_interrupt()?;
            let mut connection = pair.connect(Family::alternate(i))?;
            self.track(connection.name, habit);
            connection.talk()?;
            connections.push(connection);
        }
        Ok(connections)
    }

    /// Records and shows what twheel reports until this time, or until `done`.
    fn watch(
        &mut self,
        twheel: &Twheel,
        end: Instant,
        done: impl Fn(&HashMap<SocketAddr, Flow>) -> bool,
    ) -> Result<()> {
        while Instant::now() < end && !done(&self.flows) {
            self.check_interrupt()?;
            let wait = end.saturating_duration_since(Instant::now());
            let Some(line) = twheel.line(wait.min(Duration::from_millis(50)))? else {
                continue;
            };
            if self.options.json {
                let _ = writeln!(std::io::stdout(), "{}", line.text);
            }
            let expiry = line.expiry()?;
            let who = match self.flows.get_mut(&expiry.src) {
                Some(flow) => {
                    flow.expiries
                        .push((expiry.state.clone(), expiry.reason.clone()));
                    if flow.habit == Habit::Busy && !self.silent {
                        self.expired_while_busy += 1;
                    }
                    flow.habit.name()
                }
                None => {
                    self.strangers += 1;
                    "unknown"
                }
            };
            if !self.options.json {
                self.say(&format!(
                    "{:5.1} s  expired  {who:<9}  {:<16} -> {:<16}  {:<11}  idle {:.1} s  {}",
                    self.begin.elapsed().as_secs_f64(),
                    expiry.src.to_string(),
                    expiry.dst.to_string(),
                    expiry.state,
                    expiry.idle.as_secs_f64(),
                    expiry.reason,
                ));
            }
        }
        Ok(())
    }

    fn run(&mut self) -> Result<bool> {
        self.say("The lab: two hosts (network namespaces) joined by a veth pair.");
        let pair = Pair::new()?;
        self.check_interrupt()?;
        let args: Vec<&str> = self.options.args.iter().map(String::as_str).collect();
        self.say(&format!("On one of them: twheel run {}", args.join(" ")));
        // If it does not start, the error shows everything that it printed.
        let started = Arc::new(AtomicBool::new(false));
        let show = started.clone();
        let twheel = Twheel::start_with(&pair.server, &args, move |line| {
            if show.load(Ordering::Relaxed) {
                let _ = writeln!(std::io::stderr(), "twheel: {line}");
            }
        })?;
        started.store(true, Ordering::Relaxed);
        for line in twheel.stderr().lines() {
            self.say(&format!("twheel: {line}"));
        }
        let timeout = self.options.timeout;

        self.say(&format!(
            "\nReal TCP connections, {EACH} of each habit, IPv4 and IPv6:"
        ));
        for habit in Habit::ALL {
            self.say(&format!("  {:<9}  {}", habit.name(), habit.meaning()));
        }
        self.say(&format!(
            "\nA flow expires after {timeout:?} without a packet, or {:?} after FIN from both sides \
             or RST.\n",
            self.options.close_timeout
        ));
        self.begin = Instant::now();
        let busy = Busy::start(
            self.open(&pair, Habit::Busy)?,
            (timeout / 5).min(Duration::from_millis(200)),
        );
        let _idle = self.open(&pair, Habit::Idle)?;
        for connection in self.open(&pair, Habit::Closed)? {
            connection.close()?;
        }
        for connection in self.open(&pair, Habit::Reset)? {
            connection.reset()?;
        }
        for i in 0..EACH {
            self.check_interrupt()?;
            let name = pair.half_open(Family::alternate(i))?;
            self.track(name, Habit::HalfOpen);
        }

        let longest = timeout.max(self.options.close_timeout);
        self.watch(&twheel, Instant::now() + longest + GRACE, |flows| {
            let mut others = flows.values().filter(|flow| flow.habit != Habit::Busy);
            others.all(|flow| !flow.expiries.is_empty())
        })?;
        // Wait a while longer: the busy connections are now older than the timeout, and must not
        // expire.
        self.watch(
            &twheel,
            Instant::now() + (timeout / 2).min(Duration::from_secs(1)),
            |_| false,
        )?;
        let rest = busy.stop()?;
        let gap = rest.longest_gap;
        if gap >= timeout {
            self.say(&format!(
                "This machine was so slow that busy connections were silent for {gap:.1?}."
            ));
        }
        self.silent = true;
        self.say(&format!(
            "{:5.1} s  {EACH} busy flows are alive: {} expired. Now they fall silent too.",
            self.begin.elapsed().as_secs_f64(),
            self.expired_while_busy
        ));
        self.watch(&twheel, Instant::now() + timeout + GRACE, |flows| {
            flows.values().all(|flow| !flow.expiries.is_empty())
        })?;
        // In case an end is reported twice.
        self.watch(&twheel, Instant::now() + Duration::from_millis(200), |_| {
            false
        })?;

        let ended = twheel.stop()?;
        ensure!(ended.code() == Some(0), "twheel has failed");
        pair.server
            .check_clean(SERVER)
            .or_else(|error| if self.keeps() { Ok(()) } else { Err(error) })?;
        let wrong = self.summary();
        for wrong in &wrong {
            self.say(&format!("Not as it should be: {wrong}."));
        }
        if wrong.is_empty() {
            self.say("All as it should be. Nothing is left behind: hosts, programs, pins.");
        }
        Ok(wrong.is_empty())
    }

    fn keeps(&self) -> bool {
        self.options.args.iter().any(|arg| arg == "--keep")
    }

    /// Prints the table. Returns what is not as it should be.
    fn summary(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut table = String::new();
        let _ = writeln!(
            table,
            "\n{:<9}  {:>11}  {:>7}  {:<19}  {:<7}  as expected",
            "habit", "connections", "expired", "in state", "reason"
        );
        for habit in Habit::ALL {
            let flows: Vec<_> = self.flows.values().filter(|it| it.habit == habit).collect();
            let expiries: Vec<_> = flows.iter().flat_map(|flow| &flow.expiries).collect();
            let distinct = |of: fn(&(String, String)) -> &String| {
                let mut all: Vec<&str> = expiries.iter().map(|it| of(it).as_str()).collect();
                all.sort_unstable();
                all.dedup();
                if all.is_empty() {
                    "-".to_owned()
                } else {
                    all.join(",")
                }
            };
            let (states, reasons) = (distinct(|it| &it.0), distinct(|it| &it.1));
            let (state, reason) = habit.expected();
            let before = wrong.len();
            if flows.len() != EACH {
                wrong.push(format!(
                    "{} {} connections, not {EACH}",
                    flows.len(),
                    habit.name()
                ));
            }
            if flows.iter().any(|flow| flow.expiries.len() != 1) {
                wrong.push(format!(
                    "{} connections are to expire once each, and {} expiries came",
                    habit.name(),
                    expiries.len()
                ));
            }
            if (&*states, &*reasons) != (state, reason) {
                wrong.push(format!(
                    "{} connections are to expire in state {state} with reason {reason}, not in \
                     {states} with {reasons}",
                    habit.name()
                ));
            }
            if habit == Habit::Busy && self.expired_while_busy > 0 {
                wrong.push(format!(
                    "{} busy connections expired while they were busy",
                    self.expired_while_busy
                ));
            }
            let note = match habit {
                Habit::Busy => format!(
                    " ({} while busy, {} once silent)",
                    self.expired_while_busy,
                    expiries.len() - self.expired_while_busy
                ),
                _ => String::new(),
            };
            let _ = writeln!(
                table,
                "{:<9}  {:>11}  {:>7}  {states:<19}  {reasons:<7}  {}{note}",
                habit.name(),
                flows.len(),
                expiries.len(),
                if wrong.len() == before { "yes" } else { "NO" },
            );
        }
        self.say(&table);
        if self.strangers > 0 {
            wrong.push(format!("{} flows expired that nobody made", self.strangers));
        }
        wrong
    }
}

fn lab() -> Result<bool> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the lab makes network namespaces and loads BPF programs: run it as root");
    }
    let interrupted = signals::on_signal()?;
    Lab {
        options: Options::new(std::env::args().skip(1).collect()),
        interrupted,
        begin: Instant::now(),
        flows: HashMap::new(),
        strangers: 0,
        expired_while_busy: 0,
        silent: false,
    }
    .run()
}

fn main() -> ExitCode {
    match lab() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<Interrupted>() => Interrupted::exit(),
        Err(error) => {
            eprintln!("twheel-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
