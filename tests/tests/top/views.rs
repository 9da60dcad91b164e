//! The views beside that of flows, the help, and names.

use std::{fs, net::TcpListener, time::Duration};

use anyhow::{Context, Result, ensure};
use twheel::{
    cost::{Cost, CostReading, Meter},
    pins::Instance,
};
use twheel_tests::{
    directory::Directory,
    netns::require_root,
    pair::{Busy, Connection, Family, Pair, SERVER},
    running::{PolicyFile, Twheel},
};

use crate::terminal::{Terminal, flows, scaled, selected};

/// The line that begins with this, without the mark of the selected one.
fn line<'a>(screen: &'a str, begin: &str) -> Option<&'a str> {
    let mut lines = screen
        .lines()
        .map(|line| line.trim_start_matches(['>', ' ']));
    lines.find(|line| line.starts_with(begin))
}

/// A field of such a line.
fn field<'a>(screen: &'a str, begin: &str, at: usize) -> Option<&'a str> {
    line(screen, begin)?.split_ascii_whitespace().nth(at)
}

#[test]
fn flows_are_counted_by_source_service_state_and_rule() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let policy = "[[rule]]\nname = \"web\"\ndport = 7777\nsrc = \"10.77.0.0/24\"\n";
    let policy = PolicyFile::new("top", policy)?;
    let args = ["--iface", SERVER, "--accounting", "--policy", policy.path()];
    let _run = Twheel::start(&pair.server, &args)?;
    // Three of IPv4 and two of IPv6.
    let _connections = pair.connect_some(5)?;
    let terminal = Terminal::open(&pair.server)?;
    terminal.top("", "")?;
    let (v4, v6) = (
        Family::V4.client().to_string(),
        Family::V6.client().to_string(),
    );
    terminal.press(&["2", "s", "s"])?;
    let screen = terminal.until("sources", |screen| {
        screen.contains("[2 sources]") && screen.contains("sort: flows")
    })?;
    assert_eq!(field(&screen, &v4, 1), Some("3"), "{screen}");
    assert_eq!(field(&screen, &v4, 2), Some("60.0%"), "{screen}");
    assert_eq!(field(&screen, &v6, 1), Some("2"), "{screen}");
    assert!(
        screen.contains("5 flows") && screen.contains(", 2 sources"),
        "{screen}"
    );
    // What the group holds: the flows of a source.
    terminal.press(&["Down", "Enter"])?;
    let screen = terminal.until("its flows", |screen| screen.contains("[1 flows]"))?;
    assert!(
        screen.contains(&format!("filter: src == {v6} ")),
        "{screen}"
    );
    assert_eq!(flows(&screen).len(), 2, "{screen}");
    // With a filter there is a filter for both.
    terminal.press(&["Tab", "Tab"])?;
    let screen = terminal.until("services", |screen| screen.contains("[3 services]"))?;
    assert_eq!(field(&screen, "tcp/7777", 1), Some("2"), "{screen}");
    terminal.press(&["Enter"])?;
    let both = format!("filter: (src == {v6}) and proto == tcp and dport == 7777 ");
    let screen = terminal.until("both filters", |screen| screen.contains(&both))?;
    assert_eq!(flows(&screen).len(), 2, "{screen}");
    terminal.press(&["/", "C-u", "Enter", "F4"])?;
    let screen = terminal.until("states", |screen| {
        screen.contains("[4 states]") && field(screen, "established", 1) == Some("5")
    })?;
    assert_eq!(selected(&screen), line(&screen, "established"), "{screen}");
    terminal.press(&["5"])?;
    let screen = terminal.until("rules", |screen| screen.contains("[5 rules]"))?;
    assert_eq!(field(&screen, "web", 1), Some("3"), "{screen}");
    assert_eq!(field(&screen, "-", 1), Some("2"), "{screen}");
    // Flows cannot be deleted where none is selected.
    terminal.press(&["d"])?;
    terminal.until("advice", |screen| {
        screen.contains("press 1, and select the flow")
    })?;
    // Backwards, and round.
    terminal.press(&["1", "BTab"])?;
    terminal.until("the last view", |screen| screen.contains("[7 cost]"))?;
    Ok(())
}

#[test]
fn reasons_are_those_of_the_history() -> Result<()> {
    require_root();
    let history = Directory::new("top-reasons")?;
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "1s",
        "--history",
        history.path(),
    ];
    let _run = Twheel::start(&pair.server, &args)?;
    for connection in pair.connect_some(2)? {
        connection.reset()?;
    }
    let _silent = pair.connect_some(3)?;
    let terminal = Terminal::sized(&pair.server, (80, 24))?;
    terminal.top("", &format!("--history {}", history.path()))?;
    terminal.press(&["6"])?;
    let screen = terminal.until("the ends", |screen| {
        field(screen, "idle", 1) == Some("3") && field(screen, "reset", 1) == Some("2")
    })?;
    for text in ["from the history", "no packet for the whole timeout", "RST"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
    // Others are seen as they come, with their rate.
    let _more = pair.connect_some(4)?;
    terminal.until("a rate", |screen| {
        let rate = field(screen, "idle", 2).and_then(|it| it.parse::<f64>().ok());
        rate.is_some_and(|it| it > 0.0)
    })?;
    terminal.until("seven", |screen| field(screen, "idle", 1) == Some("7"))?;
    terminal.press(&["q"])?;
    terminal.until("a prompt", |screen| screen.contains("code 0"))?;

    // Without a history, the counters tell less.
    terminal.top("", "--history off")?;
    terminal.press(&["6"])?;
    terminal.until("the counters", |screen| {
        screen.contains("without the history") && field(screen, "expired", 1) == Some("9")
    })?;
    Ok(())
}

#[test]
fn what_the_programs_cost_is_measured_while_it_is_shown() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let _busy = Busy::start(pair.connect_some(4)?, Duration::from_millis(1));
    let terminal = Terminal::sized(&pair.server, (80, 24))?;
    terminal.top("", "")?;
    let is_measuring = || -> Result<bool> {
        let open = fs::read_dir(format!("/proc/{}/fd", terminal.pid()?))?;
        let names = open.filter_map(|it| fs::read_link(it.ok()?.path()).ok());
        let mut names = names.map(|it| it.display().to_string());
        Ok(names.any(|it| it.contains("bpf-stats")))
    };
    assert!(!is_measuring()?);
    terminal.press(&["7"])?;
    let screen = terminal.until("numbers", |screen| {
        let nanos = field(screen, "all packets", 3).and_then(|it| it.parse::<f64>().ok());
        nanos.is_some_and(|it| it > 0.0)
    })?;
    assert!(is_measuring()?);
    for program in ["twheel_egress", "all packets"] {
        let at = program.split(' ').count();
        let runs = field(&screen, program, at).and_then(scaled);
        assert!(runs.is_some_and(|it| it > 100.0), "{program}: {screen}");
        let nanos = field(&screen, program, at + 1).and_then(|it| it.parse::<f64>().ok());
        assert!(
            nanos.is_some_and(|it| (10.0..100_000.0).contains(&it)),
            "{program}: {screen}"
        );
        let share = field(&screen, program, at + 2).context("no share")?;
        assert!(
            share.ends_with('%') && share != "0.00%",
            "{program}: {screen}"
        );
    }
    terminal.press(&["1"])?;
    terminal.until("flows", |screen| screen.contains("PROTO"))?;
    ensure!(!is_measuring()?, "it still measures");
    Ok(())
}

#[test]
fn each_run_of_a_program_is_counted_while_a_meter_is_on() -> Result<()> {
    const PACKETS: u32 = 1000;
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let pins = pair.server.enter(|| Instance::with(SERVER))?;
    let meter = Meter::start()?;
    let before = CostReading::new(&pins)?;
    pair.server.begin_flows(SERVER, PACKETS)?;
    let costs = CostReading::new(&pins)?.since(&before);
    drop(meter);
    let cost = |name: &str| {
        costs
            .iter()
            .find(|it| it.program == name)
            .context("no program")
    };
    let xdp = cost("twheel_xdp")?;
    // A packet of the host itself may come in meanwhile.
    ensure!(
        (u64::from(PACKETS)..u64::from(PACKETS) + 50).contains(&xdp.runs),
        "{costs:?}"
    );
    ensure!(
        xdp.is_for_packets() && !cost("twheel_step")?.is_for_packets(),
        "{costs:?}"
    );
    let nanos = xdp.nanos_a_run().context("no runs")?;
    ensure!((10.0..1e6).contains(&nanos), "{costs:?}");
    ensure!(xdp.cpu_share() > 0.0 && xdp.cpu_share() <= 1.0, "{costs:?}");
    let sum = Cost::sum("packets", costs.iter().filter(|it| it.is_for_packets()));
    ensure!(sum.runs >= xdp.runs && sum.time >= xdp.time, "{sum:?}");
    Ok(())
}

#[test]
fn the_help_explains_the_keys_and_columns() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let _connection = pair.connect(Family::V4)?;
    let terminal = Terminal::sized(&pair.server, (80, 24))?;
    terminal.top("", "")?;
    terminal.press(&["?"])?;
    let screen = terminal.until("the help", |screen| {
        screen.contains("delete the selected flow")
    })?;
    assert!(
        screen.lines().all(|line| line.chars().count() <= 80),
        "{screen}"
    );
    assert!(!screen.contains("PROTO"), "{screen}");
    terminal.press(&["NPage", "NPage"])?;
    terminal.until("the columns", |screen| {
        screen.contains("EXPIRES") && screen.contains("until it expires if no packet comes")
    })?;
    terminal.press(&["x"])?;
    terminal.until("the flows", |screen| flows(screen).len() == 1)?;
    Ok(())
}

#[test]
fn hosts_and_services_have_names_on_request() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", "lo"])?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:8080")?))?;
    let _connection = Connection::open(&pair.server, &listener)?;
    let terminal = Terminal::open(&pair.server)?;
    let screen = terminal.top("", "")?;
    assert!(screen.contains("127.0.0.1:8080"), "{screen}");
    terminal.press(&["n"])?;
    // A machine may have no list of services.
    let services = fs::read_to_string("/etc/services").unwrap_or_default();
    let service = services.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        (words.next() == Some("8080/tcp")).then(|| name.to_owned())
    });
    let service = service.unwrap_or("8080".to_owned());
    let name = format!("localhost:{service} ");
    terminal.until("names", |screen| {
        flows(screen).iter().any(|line| line.contains(&name)) && !screen.contains("127.0.0.1")
    })?;
    terminal.press(&["2"])?;
    terminal.until("the name of a source", |screen| {
        field(screen, "localhost", 1) == Some("1")
    })?;
    terminal.press(&["n"])?;
    terminal.until("addresses", |screen| {
        field(screen, "127.0.0.1", 1) == Some("1")
    })?;
    Ok(())
}

#[test]
fn owners_are_shown_on_request() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let _connections = pair.connect_some(2)?;
    let terminal = Terminal::open(&pair.server)?;
    let screen = terminal.top("", "")?;
    let wanted = format!("pid {} (", std::process::id());
    assert!(!screen.contains(&wanted), "{screen}");
    terminal.press(&["o"])?;
    terminal.until("owners", |screen| {
        let flows = flows(screen);
        flows.len() == 2 && flows.iter().all(|line| line.contains(&wanted))
    })?;
    terminal.press(&["o", "w"])?;
    let screen = terminal.until("neither owners nor wheels", |screen| {
        !screen.contains(&wanted) && !screen.contains("next turn")
    })?;
    assert!(!screen.contains("now"), "{screen}");
    terminal.press(&["w"])?;
    let screen = terminal.until("wheels", |screen| screen.contains("next turn"))?;
    // With a time axis and a legend.
    for text in ["now", "10s", "1h", "slots by the time until their turn"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
    Ok(())
}
