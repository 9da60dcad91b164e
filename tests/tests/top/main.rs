//! `twheel top` in a real terminal, and `twheel wheel`.

mod deletion;
mod flows;
mod terminal;
mod views;
mod wheel;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use twheel::failure::Kind;
use twheel_tests::{
    is_long,
    netns::require_root,
    pair::{Pair, SERVER},
    running::{Twheel, twheel_bin},
};

use self::terminal::{Terminal, flows as lines, number};

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
    // Slots come nearer as time passes.
    let wheels = |screen: &str| -> Vec<String> {
        let lines = screen.lines().filter(|line| line.starts_with("cpu "));
        lines
            .filter_map(|line| Some(line.split('│').nth(1)?.to_owned()))
            .collect()
    };
    let before = wheels(&screen);
    ensure!(before.iter().any(|it| !it.trim().is_empty()), "{screen}");
    terminal.until("the slots elsewhere", |screen| wheels(screen) != before)?;
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
        ("--interval 1ms", "100ms to 1d"),
        (
            "--sort rate",
            "--sort rate: it is not counted: start twheel with",
        ),
        (
            "--sort rtt",
            "--sort rtt: it is not measured: start twheel with",
        ),
    ] {
        let said = terminal.shell(&format!("{top} {args}; echo code $?"))?;
        assert!(said.contains(text), "{args}: {said}");
        assert!(said.contains("code 2"), "{args}: {said}");
    }
    Ok(())
}

#[test]
fn a_million_flows_cost_little_to_watch() -> Result<()> {
    /// As a share of one CPU.
    const BOUND: f64 = 0.12;
    const FLOWS: u32 = 1_000_000;
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--max-flows", "1048576", "--accounting"];
    let _run = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let terminal = Terminal::open(&pair.server)?;
    // With no filter; with a filter that all flows pass, in an order that makes the list change
    // often; and by source.
    for (args, key) in [
        ("", "1"),
        ("--sort idle 'state == unreplied and dport == 80'", "1"),
        ("", "2"),
    ] {
        terminal.top("", args)?;
        terminal.press(&[key])?;
        terminal.until("rates", |screen| screen.contains("new 0/s"))?;
        let pid = terminal.pid()?;
        let (begun, before) = (Instant::now(), [cpu_time(pid)?, waiting_time(pid)?]);
        thread::sleep(Duration::from_secs(if is_long() { 30 } else { 10 }));
        let [used, waited] = [cpu_time(pid)? - before[0], waiting_time(pid)? - before[1]];
        // While it waits for a CPU that others use, it cannot use one.
        let could = begun.elapsed().saturating_sub(waited);
        let share = used.as_secs_f64() / could.as_secs_f64();
        let screen = terminal.screen()?;
        assert!(screen.contains("1000000 flows"), "{screen}");
        println!("top {args}, view {key}: {:.1} % of a CPU", 100.0 * share);
        assert!(share < BOUND, "top {args}, view {key}: {share}");
        terminal.press(&["q"])?;
        terminal.until("a prompt", |screen| screen.contains("code 0"))?;
    }
    Ok(())
}

/// For how long threads of a process have waited for a CPU (`Documentation/scheduler/sched-stats.rst`).
fn waiting_time(pid: i32) -> Result<Duration> {
    let mut waited = Duration::ZERO;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = fs::read_to_string(thread?.path().join("schedstat"))?;
        let field = stat.split_ascii_whitespace().nth(1).context("no times")?;
        waited += Duration::from_nanos(field.parse()?);
    }
    Ok(waited)
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
    let wanted = format!(" pid {} (", std::process::id());
    terminal.top("", "--owner")?;
    terminal.until("owners", |screen| {
        let flows = lines(screen);
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
