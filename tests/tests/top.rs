//! `twheel top` in a real terminal, and `twheel wheel`.

use std::{
    fs,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::failure::Kind;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Family, Pair, SERVER},
    running::{Twheel, twheel_bin},
};

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const WIDTH: &str = "120";
const HEIGHT: &str = "30";
/// Clears the screen, as a shell command: `clear` may not be installed.
const CLEAR: &str = r"printf '\033[H\033[2J'";

/// A terminal with a shell in a namespace, made by tmux; it ends when this is dropped.
struct Terminal<'a> {
    host: &'a Namespace,
    socket: String,
}

impl<'a> Terminal<'a> {
    fn open(host: &'a Namespace) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let socket = format!("twheel-test-{}-{count}", std::process::id());
        let terminal = Self { host, socket };
        let size = ["-x", WIDTH, "-y", HEIGHT];
        let shell = ["env", "-u", "NO_COLOR", "PS1=prompt> ", "sh"];
        let args = [&["-f", "/dev/null", "new-session", "-d"], &size[..], &shell];
        terminal.tmux(&args.concat())?;
        terminal.until("a prompt", |screen| screen.starts_with("prompt>"))?;
        Ok(terminal)
    }

    fn tmux(&self, args: &[&str]) -> Result<String> {
        let mut command = self.host.command("tmux")?;
        let output = command.args(["-L", &self.socket]).args(args).output();
        let output = output.context("cannot run `tmux`: is it installed?")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tmux {args:?}: {stderr}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Types text.
    fn enter(&self, text: &str) -> Result<()> {
        self.tmux(&["send-keys", "-l", text]).map(drop)
    }

    /// Presses keys, by tmux's names.
    fn press(&self, keys: &[&str]) -> Result<()> {
        self.tmux(&[&["send-keys"], keys].concat()).map(drop)
    }

    fn screen(&self) -> Result<String> {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen is as expected.
    fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen()?;
            if is(&screen) {
                return Ok(screen);
            }
            ensure!(Instant::now() < end, "did not see {what}:\n{screen}");
            thread::sleep(Duration::from_millis(30));
        }
    }

    /// Runs a shell command and returns its output.
    fn shell(&self, command: &str) -> Result<String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let end = format!("end-{}:", COUNT.fetch_add(1, Ordering::Relaxed));
        // Written in two parts, so that the typed command is not taken for its output.
        let (a, b) = end.split_at(2);
        self.enter(&format!("{CLEAR}; {command}; echo {a}''{b}"))?;
        self.press(&["Enter"])?;
        let screen = self.until(&end, |screen| screen.contains(&end))?;
        Ok(screen.split(&end).next().unwrap_or_default().to_owned())
    }

    /// Starts `twheel top` over some text, and waits until it has drawn.
    fn top(&self, environment: &str, args: &str) -> Result<String> {
        let bin = twheel_bin()?;
        self.enter(&format!(
            "{CLEAR}; echo earlier text; {environment} {} top {args}; echo code $?",
            bin.display()
        ))?;
        self.press(&["Enter"])?;
        self.until("top", |screen| screen.contains("PROTO"))
    }

    /// Whether the terminal shows the alternate screen, and whether the cursor is visible.
    fn modes(&self) -> Result<String> {
        let modes = "#{alternate_on} #{cursor_flag}";
        let modes = self.tmux(&["display-message", "-p", modes])?;
        Ok(modes.trim().to_owned())
    }

    /// The process of `twheel top`.
    fn pid(&self) -> Result<i32> {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"])?;
        let shell = shell.trim();
        let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"))?;
        Ok(children.trim().parse()?)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid()?), signal)?)
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

/// The lines of the screen that show flows.
fn flows(screen: &str) -> Vec<&str> {
    let lines = screen.lines();
    lines.filter(|line| line.starts_with("tcp ")).collect()
}

/// The number on the screen after a word.
fn number(screen: &str, word: &str) -> Option<u64> {
    let (_, rest) = screen.split_once(word)?;
    let digits = rest.split(|it: char| !it.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[test]
fn flows_are_shown_filtered_and_sorted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER, "--accounting"])?;
    let _connections = pair.connect_some(6)?;
    // Younger by more than a clock unit.
    thread::sleep(Duration::from_millis(50));
    let half_open = pair.half_open(Family::V4)?.to_string();
    let terminal = Terminal::open(&pair.server)?;
    let screen = terminal.top("", "--sort age")?;
    assert_eq!(flows(&screen).len(), 7, "{screen}");
    assert!(
        screen.contains("twheel server0  7 flows of at most 131072"),
        "{screen}"
    );
    for text in ["cpu 0 ", "slots ", "next turn in", "sort: age"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }

    // The filter takes effect while it is typed.
    terminal.press(&["/"])?;
    terminal.enter("state == syn_sen")?;
    let screen = terminal.until("a message", |screen| {
        screen.contains("column 10: unknown state")
    })?;
    assert_eq!(
        flows(&screen).len(),
        7,
        "the last valid filter must stay: {screen}"
    );
    assert_eq!(terminal.modes()?, "1 1", "there is no cursor to type at");
    terminal.press(&["Enter"])?;
    terminal.enter("t")?;
    let screen = terminal.until("one flow", |screen| flows(screen).len() == 1)?;
    assert!(flows(&screen)[0].contains(&half_open), "{screen}");
    assert!(!screen.contains("column"), "{screen}");
    terminal.press(&["Enter"])?;
    terminal.until("the keys", |screen| screen.contains("q quit"))?;
    // The change is discarded.
    terminal.press(&["/", "BSpace", "BSpace"])?;
    terminal.until("a message", |screen| screen.contains("column 10"))?;
    terminal.press(&["Escape"])?;
    let screen = terminal.until("no message", |screen| !screen.contains("column"))?;
    assert!(screen.contains("filter: state == syn_sent "), "{screen}");
    assert_eq!(flows(&screen).len(), 1, "{screen}");
    terminal.press(&["/", "C-u", "Enter"])?;
    let screen = terminal.until("all flows", |screen| flows(screen).len() == 7)?;

    // The half-open flow is the youngest: the last one by age, and the first in reverse.
    assert!(flows(&screen)[6].contains(&half_open), "{screen}");
    terminal.press(&["r"])?;
    terminal.until("the other order", |screen| {
        screen.contains("reversed") && flows(screen)[0].contains(&half_open)
    })?;
    terminal.press(&["r", "S"])?;
    terminal.until("by the time left", |screen| {
        screen.contains("sort: expires ") && flows(screen)[0].contains(&half_open)
    })?;
    terminal.press(&["s", "s"])?;
    terminal.until("by packets", |screen| {
        screen.contains("sort: packets ") && flows(screen)[6].contains(&half_open)
    })?;
    // Scrolls down by one, and back.
    terminal.press(&["Down"])?;
    terminal.until("six flows", |screen| flows(screen).len() == 6)?;
    terminal.press(&["Home"])?;
    terminal.until("seven flows", |screen| flows(screen).len() == 7)?;

    terminal.tmux(&["resize-window", "-x", "90", "-y", "16"])?;
    terminal.until("a smaller window", |screen| {
        let last = screen.lines().nth(15).unwrap_or_default();
        last.starts_with("q quit") && last.chars().count() <= 90
    })?;
    Ok(())
}

#[test]
fn rates_and_the_hand_move() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "4s"];
    let run = Twheel::start(&pair.server, &args)?;
    let terminal = Terminal::open(&pair.server)?;
    terminal.top("", "--interval 500ms")?;
    terminal.until("rates", |screen| {
        screen.contains("new 0/s") && screen.contains("expired 0/s")
    })?;
    let _silent = pair.connect_some(40)?;
    let screen = terminal.until("new flows", |screen| {
        number(screen, "new ").is_some_and(|rate| rate > 0)
    })?;
    // 40 flows in half a second, or in a little less if the previous reading was late.
    assert!(number(&screen, "new ") <= Some(120), "{screen}");
    let hand = |screen: &str| screen.find('│');
    let before = hand(&screen);
    terminal.until("the hand elsewhere", |screen| hand(screen) != before)?;
    terminal.until("flows that expire", |screen| {
        number(screen, "expired ").is_some_and(|rate| rate > 0)
    })?;
    terminal.until("no flow", |screen| screen.contains("server0  0 flows"))?;

    terminal.press(&["p"])?;
    terminal.until("a pause", |screen| screen.contains("paused"))?;
    let _connections = pair.connect_some(3)?;
    thread::sleep(Duration::from_millis(1200));
    let screen = terminal.screen()?;
    assert!(screen.contains("server0  0 flows"), "{screen}");
    terminal.press(&["p"])?;
    terminal.until("three flows", |screen| screen.contains("server0  3 flows"))?;

    // The instance disappears, and comes back.
    run.stop()?;
    terminal.until("nobody", |screen| {
        screen.contains("waiting: twheel is not running")
    })?;
    let _run = Twheel::start(&pair.server, &args)?;
    terminal.until("the next", |screen| {
        screen.contains("server0  0 flows") && !screen.contains("waiting")
    })?;
    Ok(())
}

#[test]
fn the_terminal_is_as_it_was() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let terminal = Terminal::open(&pair.server)?;
    let before = terminal.shell("stty -a")?;
    type End = fn(&Terminal<'_>) -> Result<()>;
    let ends: [(&str, End); 6] = [
        ("q", |it| it.press(&["q"])),
        ("Esc", |it| it.press(&["Escape"])),
        ("Ctrl-C", |it| it.press(&["C-c"])),
        ("Ctrl-C while typing", |it| it.press(&["/", "x", "C-c"])),
        ("SIGTERM", |it| it.signal(Signal::SIGTERM)),
        ("SIGHUP", |it| it.signal(Signal::SIGHUP)),
    ];
    for (how, end) in ends {
        let screen = terminal.top("", "")?;
        assert!(!screen.contains("earlier text"), "{how}: {screen}");
        assert_eq!(terminal.modes()?, "1 0", "{how}");
        end(&terminal)?;
        let screen = terminal.until("a prompt", |screen| {
            screen.contains("code 0") && screen.contains("prompt>")
        })?;
        let lines: Vec<_> = screen.lines().take(3).collect();
        assert_eq!(lines, ["earlier text", "code 0", "prompt>"], "{how}");
        assert_eq!(terminal.modes()?, "0 1", "{how}");
        assert_eq!(terminal.shell("stty -a")?, before, "{how}");
    }

    // Colours, if they are requested.
    let colours = |terminal: &Terminal<'_>| -> Result<bool> {
        let screen = terminal.tmux(&["capture-pane", "-p", "-e"])?;
        terminal.press(&["q"])?;
        terminal.until("a prompt", |screen| screen.contains("code 0"))?;
        // Of the terminal's eight colours, or of more.
        Ok((30..=38).any(|colour| {
            ["m", ";"]
                .iter()
                .any(|end| screen.contains(&format!("[{colour}{end}")))
        }))
    };
    terminal.top("", "")?;
    assert!(colours(&terminal)?);
    terminal.top("NO_COLOR=1", "")?;
    assert!(!colours(&terminal)?);
    Ok(())
}

#[test]
fn what_cannot_be_shown_is_refused() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    for command in ["wheel", "top"] {
        let ended = pair.server.twheel_once(&[command])?;
        let (kind, text) = match command {
            "top" => (Kind::Usage, "top needs a terminal"),
            _ => (Kind::Pins, "twheel is not running here"),
        };
        assert_eq!(ended.code(), Some(kind as i32), "{ended:?}");
        assert!(ended.stderr.contains(text), "{ended:?}");
    }
    let terminal = Terminal::open(&pair.server)?;
    let top = format!("{} top", twheel_bin()?.display());
    let said = terminal.shell(&format!("{top}; echo code $?"))?;
    assert!(said.contains("twheel is not running here"), "{said}");
    assert!(said.contains("code 6"), "{said}");
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    for (args, text) in [
        ("state", "filter, column 6: expected a comparison"),
        ("bytes", "column 1: bytes"),
        ("--interval 1ms", "100ms to 1day"),
    ] {
        let said = terminal.shell(&format!("{top} {args}; echo code $?"))?;
        assert!(said.contains(text), "{args}: {said}");
        assert!(said.contains("code 2"), "{args}: {said}");
    }
    Ok(())
}

/// The output of `twheel wheel --json`.
fn wheel(host: &Namespace) -> Result<Vec<Value>> {
    let ended = host.twheel_once(&["wheel", "--json"])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    let lines = ended.lines.iter();
    lines
        .map(|line| serde_json::from_str(&line.text).with_context(|| line.text.clone()))
        .collect()
}

/// The numbers in a field of its lines of one kind.
fn numbers(lines: &[Value], kind: &str, field: &str) -> Vec<i64> {
    let lines = lines.iter().filter(|line| line["event"] == kind);
    lines.filter_map(|line| line[field].as_i64()).collect()
}

#[test]
fn the_wheel_shows_what_stands_on_it() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "30s", "--keep"];
    let run = Twheel::start(&pair.server, &args)?;
    let empty = wheel(&pair.server)?;
    assert_eq!(numbers(&empty, "slot", "flows"), [0; 0]);
    assert!(numbers(&empty, "wheel", "next_in_us").is_empty());
    assert!(!numbers(&empty, "wheel", "elapsed").is_empty());

    let begun = Instant::now();
    let _connections = pair.connect_some(20)?;
    let check = |lines: &[Value], loader: bool| {
        assert_eq!(numbers(lines, "slot", "flows").iter().sum::<i64>(), 20);
        assert_eq!(numbers(lines, "wheel", "flows").iter().sum::<i64>(), 20);
        assert_eq!(numbers(lines, "due", "flows"), [0, 0, 20, 0, 0, 0, 0]);
        // Whichever slots the flows are in, these do not begin after the flows are due, except by a
        // tick and a jiffy.
        let left = 30_000 - begun.elapsed().as_millis() as i64;
        let mut starts = numbers(lines, "slot", "starts_in_us");
        starts.sort_unstable();
        assert!(starts.iter().all(|it| *it <= 30_300_000), "{starts:?}");
        let mut next = numbers(lines, "wheel", "next_in_us");
        next.sort_unstable();
        assert_eq!(next.first(), starts.first());
        if loader {
            assert!(starts[0] > -200_000, "{starts:?}");
        }
        let at_level_0: Vec<_> = lines
            .iter()
            .filter(|line| line["event"] == "slot" && line["level"] == 0)
            .filter_map(|line| line["starts_in_us"].as_i64())
            .collect();
        assert!(
            at_level_0.iter().all(|it| *it >= (left - 1) * 1000),
            "{at_level_0:?}"
        );
    };
    let lines = wheel(&pair.server)?;
    check(&lines, true);
    let ended = run.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    check(&wheel(&pair.server)?, false);

    let text = pair.server.twheel_once(&["wheel", "--iface", SERVER])?;
    let text: Vec<_> = text.lines.iter().map(|line| &*line.text).collect();
    assert!(
        text[0].starts_with("20 flows on ")
            && text[0].ends_with("twheel run is not running: the wheels stand still"),
        "{text:#?}"
    );
    let level = text.iter().position(|line| line.starts_with("level 0: "));
    let level = level.context("no level 0")?;
    assert!(
        text[level].ends_with("a slot is 100ms, a round 1m42s"),
        "{text:#?}"
    );
    assert_eq!(text[level + 2].trim(), "^", "{text:#?}");
    assert!(text[level + 2].len() <= 128, "{text:#?}");
    let drawn = text.iter().any(|line| line.contains('█'));
    assert!(drawn, "{text:#?}");
    pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    Ok(())
}

#[test]
fn a_million_flows_cost_little_to_watch() -> Result<()> {
    /// As a share of one CPU.
    const BOUND: f64 = 0.15;
    const FLOWS: u32 = 1_000_000;
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--max-flows", "1048576"];
    let _run = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let terminal = Terminal::open(&pair.server)?;
    // Once with no filter, and once with a filter that all flows pass, in an order that makes the
    // list change often.
    for args in ["", "--sort idle 'state == unreplied and dport == 80'"] {
        terminal.top("", args)?;
        terminal.until("rates", |screen| screen.contains("new 0/s"))?;
        let pid = terminal.pid()?;
        let (begun, before) = (Instant::now(), cpu_time(pid)?);
        thread::sleep(Duration::from_secs(20));
        let share = (cpu_time(pid)? - before).as_secs_f64() / begun.elapsed().as_secs_f64();
        let screen = terminal.screen()?;
        assert!(screen.contains("1000000 flows"), "{screen}");
        println!("top {args}: {:.1} % of a CPU", 100.0 * share);
        assert!(share < BOUND, "top {args}: {share}");
        terminal.press(&["q"])?;
        terminal.until("a prompt", |screen| screen.contains("code 0"))?;
    }
    Ok(())
}

/// The CPU time of a process.
fn cpu_time(pid: i32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, after) = stat.rsplit_once(')').context("no name")?;
    let fields: Vec<_> = after.split_ascii_whitespace().collect();
    // The 14th and 15th of all fields: user and system time, in hundredths of a second.
    let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    Ok(Duration::from_millis(10 * ticks))
}

#[test]
fn top_shows_the_owners_of_the_flows_on_the_screen() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let connections = pair.connect_some(2)?;
    let terminal = Terminal::open(&pair.server)?;
    let wanted = format!("  pid {} (", std::process::id());
    terminal.top("", "--owner")?;
    terminal.until("owners", |screen| {
        let flows = flows(screen);
        flows.len() == 2 && flows.iter().all(|line| line.contains(&wanted))
    })?;
    terminal.press(&["q"])?;
    terminal.until("the end", |screen| screen.contains("code 0"))?;
    terminal.top("", "")?;
    ensure!(!terminal.screen()?.contains(&wanted));
    drop(connections);
    twheel.stop()?;
    Ok(())
}
