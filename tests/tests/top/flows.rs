//! The table of flows: its order, its rates, its width, its details.

use std::{
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::require_root,
    pair::{CLIENT, Connection, Family, Pair, SERVER},
    running::Twheel,
};

use crate::terminal::{Terminal, below, flows, scaled, selected};

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
    // An error that does not fit behind a long filter stands below it.
    terminal.press(&["/", "C-u"])?;
    terminal.enter(&format!(
        "state in {{syn_sent, {}}} and bogus",
        "close, ".repeat(15)
    ))?;
    terminal.until("a message below", |screen| {
        let last = screen.lines().last().unwrap_or_default();
        last.contains("unknown field `bogus`")
    })?;
    terminal.press(&["C-u", "Enter"])?;
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
    // Selects rows. A selected flow stays selected in another order.
    let is_selected =
        |screen: &str, row: usize| selected(screen) == flows(screen).get(row).copied();
    terminal.until("the first row", |screen| is_selected(screen, 0))?;
    terminal.press(&["Down", "Down", "Up"])?;
    terminal.until("the second row", |screen| is_selected(screen, 1))?;
    terminal.press(&["End"])?;
    terminal.until("the last row", |screen| {
        is_selected(screen, 6) && selected(screen).is_some_and(|it| it.contains(&half_open))
    })?;
    terminal.press(&["r"])?;
    terminal.until("the same flow", |screen| {
        is_selected(screen, 0) && selected(screen).is_some_and(|it| it.contains(&half_open))
    })?;
    terminal.press(&["r", "Home"])?;
    terminal.until("the first row", |screen| is_selected(screen, 0))?;

    // A window that shows three flows scrolls.
    terminal.resize((90, 8))?;
    terminal.until("a smaller window", |screen| {
        let last = screen.lines().nth(7).unwrap_or_default();
        last.starts_with("q quit") && last.chars().count() <= 90 && flows(screen).len() == 2
    })?;
    terminal.press(&["PageDown", "PageDown"])?;
    terminal.until("the last flow", |screen| {
        is_selected(screen, 1) && selected(screen).is_some_and(|it| it.contains(&half_open))
    })?;
    // Whatever the size is, it does not end.
    for size in [(1, 1), (20, 3), (400, 100), (80, 24)] {
        terminal.resize(size)?;
        thread::sleep(Duration::from_millis(300));
    }
    terminal.until("all flows", |screen| flows(screen).len() == 7)?;
    Ok(())
}

/// Sends this many bytes a second over a connection, until it is dropped.
struct Stream {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Stream {
    fn start(mut connection: Connection, bytes_a_second: usize) -> Self {
        const EVERY: Duration = Duration::from_millis(20);
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            let mut bytes = vec![0; bytes_a_second / 50];
            let mut due = Instant::now();
            while !told.load(Ordering::Relaxed) {
                connection.client.write_all(&bytes)?;
                connection.server.read_exact(&mut bytes)?;
                due += EVERY;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            Ok(())
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn the_rates_are_those_of_the_traffic() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER, "--accounting"])?;
    let (slow, fast) = (pair.connect(Family::V4)?, pair.connect(Family::V4)?);
    let _silent = pair.connect_some(3)?;
    let names = [fast.name.to_string(), slow.name.to_string()];
    // 50 packets a second each, of 1,052 and 10,052 bytes with their headers (the latter in several
    // segments); as many acknowledgments of 52 bytes, or less if the kernel delays some.
    let _fast = Stream::start(fast, 500_000);
    let _slow = Stream::start(slow, 50_000);
    let terminal = Terminal::open(&pair.server)?;
    terminal.top("", "--interval 2s")?;
    let in_order = |screen: &str| {
        let flows = flows(screen);
        flows.len() == 5 && (0..2).all(|at| flows[at].contains(&names[at]))
    };
    let rate = |screen: &str, name: &str, heading| -> Option<f64> {
        scaled(below(screen, heading, name)?)
    };
    // The rate of an interval in which a sender was held up is lower; a later one is not.
    let screen = terminal.until("the fast one first, with its rate", |screen| {
        let is = |name: &str, bits: f64| {
            rate(screen, name, "BIT/S>").is_some_and(|it| (0.95 * bits..1.15 * bits).contains(&it))
        };
        screen.contains("s sort: rate")
            && in_order(screen)
            && is(&names[0], 4e6)
            && is(&names[1], 0.42e6)
    })?;
    let back = rate(&screen, &names[1], "<BIT/S").context("no rate of acknowledgments")?;
    assert!((1e3..50e3).contains(&back), "{screen}");
    // What sends nothing has the rate 0.
    let silent = flows(&screen)[2];
    let silent = silent.split_ascii_whitespace().nth(4);
    assert_eq!(silent, Some("0"), "{screen}");
    // In sum, and of those that match.
    let sum = |screen: &str, before: &str| {
        let (text, _) = screen.split_once(before)?;
        scaled(text.rsplit(' ').next()?)
    };
    let all = sum(&screen, " bit/s").context("no sum")?;
    assert!((4.2e6..5.2e6).contains(&all), "{all}: {screen}");
    terminal.press(&["/"])?;
    terminal.enter(&format!(
        "sport == {}",
        names[1].rsplit(':').next().unwrap_or_default()
    ))?;
    terminal.press(&["Enter"])?;
    terminal.until("the sum of one flow", |screen| {
        let line = screen.lines().find(|line| line.starts_with("filter: "));
        let sum = line.and_then(|line| sum(line, " bit/s"));
        sum.is_some_and(|it| (0.35e6..0.5e6).contains(&it))
    })?;
    Ok(())
}

#[test]
fn without_accounting_the_last_packet_comes_first() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let mut first = pair.connect(Family::V4)?;
    thread::sleep(Duration::from_millis(50));
    let _second = pair.connect(Family::V4)?;
    let terminal = Terminal::open(&pair.server)?;
    let screen = terminal.top("", "")?;
    for text in ["accounting is off", "sort: last"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
    assert!(!screen.contains("BIT/S"), "{screen}");
    let name = first.name.to_string();
    assert!(flows(&screen)[1].contains(&name), "{screen}");
    thread::sleep(Duration::from_millis(50));
    first.talk()?;
    terminal.until("the other first", |screen| flows(screen)[0].contains(&name))?;
    Ok(())
}

#[test]
fn no_width_cuts_a_number() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--accounting", "--rto", "on"];
    let _run = Twheel::start(&pair.server, &args)?;
    // Addresses as long as they get.
    let long = "fd77:1111:2222:3333:4444:5555:6666:7777";
    pair.client.add_address(long.parse()?, 128, CLIENT)?;
    let to = Family::V6.server();
    pair.client.ip(&format!(
        "-6 route replace {to}/128 dev {CLIENT} src {long}"
    ))?;
    pair.server
        .ip(&format!("-6 route add {long}/128 dev {SERVER}"))?;
    let v6 = pair.connect(Family::V6)?;
    assert_eq!(v6.name.ip().to_string(), long);
    let _v4 = pair.connect(Family::V4)?;
    let terminal = Terminal::sized(&pair.server, (200, 30))?;
    terminal.top("", "")?;
    let whole = terminal.until("rates", |screen| {
        screen.contains(" bit/s") && flows(screen).len() == 2
    })?;
    for text in [long, "RTT", "IFACE", "server0 in", "EXPIRES", "BYTES"] {
        assert!(whole.contains(text), "{text}: {whole}");
    }
    for width in [200, 140, 120, 100, 80, 60] {
        terminal.resize((width, 30))?;
        // tmux cuts what was drawn for the width before; then it is drawn anew.
        let screen = terminal.until("this width", |screen| {
            let fits = screen.lines().all(|line| line.chars().count() <= width);
            let headings = screen.lines().find(|it| it.contains("PROTO"));
            let is_last = headings.is_some_and(|it| it.trim_end().ends_with('›'));
            fits && is_last == (width < 180) && flows(screen).len() == 2
        })?;
        let headings = screen
            .lines()
            .find(|it| it.contains("PROTO"))
            .context("no table")?;
        if width >= 80 {
            for heading in ["SRC", "DST", "STATE", "BIT/S>", "<BIT/S"] {
                assert!(headings.contains(heading), "{width}, {heading}: {screen}");
            }
            assert!(screen.contains("established"), "{screen}");
        }
        // Each number is whole: it ends where its heading ends.
        for heading in headings.split_ascii_whitespace() {
            let is_number = [
                "BIT/S>", "<BIT/S", "IDLE", "EXPIRES", "AGE", "PKT/S", "PACKETS", "BYTES", "RTT",
            ];
            if is_number.contains(&heading) {
                let text = below(&screen, heading, "10.77.0.1").context("nothing")?;
                let units = ['k', 'M', 'G', 's', 'm', 'h', 'd', 'u'];
                let digits = text.trim_end_matches(units);
                let is_whole = text == "-" || digits.ends_with(|it: char| it.is_ascii_digit());
                assert!(is_whole, "{width}, {heading}: {text:?}: {screen}");
            }
        }
    }
    // At 80 columns the address has no middle, and scrolling shows the other columns. The sort key
    // is always there.
    terminal.resize((80, 30))?;
    terminal.press(&["S"])?;
    terminal.until("the key before", |screen| screen.contains("sort: state"))?;
    terminal.press(&["s", "s", "s", "s", "s"])?;
    let screen = terminal.until("80 columns", |screen| {
        let headings = screen.lines().find(|it| it.contains("PROTO"));
        let has_key = headings.is_some_and(|it| it.contains("STATE            AGE BIT/S>"));
        screen.contains("sort: age ") && has_key
    })?;
    assert!(!screen.contains(long) && screen.contains('…'), "{screen}");
    assert!(!screen.contains("IFACE"), "{screen}");
    let mut seen = false;
    for _ in 0..20 {
        terminal.press(&["Right"])?;
        thread::sleep(Duration::from_millis(100));
        seen |= terminal.screen()?.contains("server0 in");
    }
    ensure!(seen, "{}", terminal.screen()?);
    let screen = terminal.until("the mark of columns to the left", |screen| {
        screen.contains('‹')
    })?;
    assert!(
        flows(&screen).iter().all(|line| line.starts_with("tcp ")),
        "{screen}"
    );
    Ok(())
}

#[test]
fn the_details_of_the_selected_flow_are_complete() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--accounting", "--rto", "on"];
    let _run = Twheel::start(&pair.server, &args)?;
    let mut connections = pair.connect_some(2)?;
    for connection in &mut connections {
        connection.talk()?;
    }
    let listed = pair
        .server
        .twheel_once(&["flows", "--json", "proto == tcp"])?;
    let name = connections[1].name;
    let line = listed
        .lines
        .iter()
        .map(|line| serde_json::from_str::<serde_json::Value>(&line.text));
    let flows = line.collect::<Result<Vec<_>, _>>()?;
    let flow = flows
        .iter()
        .find(|it| it["sport"] == name.port())
        .context("no flow")?;
    let terminal = Terminal::sized(&pair.server, (80, 40))?;
    terminal.top("", &format!("--owner sport == {}", name.port()))?;
    terminal.press(&["Enter"])?;
    let screen = terminal.until("details", |screen| {
        screen.contains("selected flow") && screen.contains("bit/s ->")
    })?;
    let id = flow["flow_id"].as_str().context("no flow_id")?;
    let server = format!("[{}]:7777", Family::V6.server());
    let bytes = format!("bytes -> {} <- {}", flow["orig_bytes"], flow["reply_bytes"]);
    let pid = format!("pid {}", std::process::id());
    for text in [
        id,
        &name.to_string(),
        &server,
        "established",
        "expires in ",
        &bytes,
        "rtt -> ",
        "interface server0 in",
        "wheel of CPU ",
        &pid,
    ] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
    terminal.press(&["Enter"])?;
    terminal.until("no details", |screen| !screen.contains("selected flow"))?;
    Ok(())
}
