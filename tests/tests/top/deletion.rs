//! `d`: deletes the selected flow, after a question.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::require_root,
    pair::{Busy, Pair, SERVER},
    running::Twheel,
};

use crate::terminal::{Terminal, flows, selected};

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn a_flow_is_deleted_after_a_question_and_no_other() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let run = Twheel::start(&pair.server, &["--iface", SERVER, "--json"])?;
    let connections = pair.connect_some(4)?;
    let terminal = Terminal::sized(&pair.server, (80, 30))?;
    terminal.top("", "--sort age")?;
    terminal.press(&["Down"])?;
    let screen = terminal.until("the second flow", |screen| {
        selected(screen) == flows(screen).get(1).copied() && flows(screen).len() == 4
    })?;
    let chosen = selected(&screen).context("no selection")?;
    let victim = connections
        .iter()
        .find(|it| chosen.contains(&format!(":{} ", it.name.port())));
    let victim = victim.context("no such connection")?.name;

    // It asks, about the whole flow; other keys are no answer.
    for keys in [["n"], ["Escape"]] {
        terminal.press(&["d"])?;
        terminal.until("a question", |screen| {
            screen.contains("delete this flow?") && screen.contains(&victim.to_string())
        })?;
        terminal.press(&["x", "Enter", "q", "d"])?;
        terminal.until("still a question", |screen| {
            screen.contains("delete this flow?")
        })?;
        terminal.press(&keys)?;
        terminal.until("the answer", |screen| screen.contains("not deleted"))?;
        assert_eq!(flows(&terminal.screen()?).len(), 4);
    }

    // The question stays about this flow, whatever comes first now.
    terminal.press(&["d"])?;
    terminal.until("a question", |screen| screen.contains("delete this flow?"))?;
    let more = pair.connect_some(3)?;
    let screen = terminal.until("seven flows", |screen| screen.contains("  7 flows"))?;
    assert!(screen.contains(&victim.to_string()), "{screen}");
    terminal.press(&["y"])?;
    terminal.until("the answer", |screen| {
        let footer = screen.lines().last().unwrap_or_default();
        footer.trim_end() == "deleted"
    })?;
    terminal.until("six flows", |screen| screen.contains("  6 flows"))?;

    let ended = run.ends_within(Duration::from_millis(500), 1)?;
    let ended: Vec<_> = ended
        .iter()
        .map(|it| (it.src, it.reason.as_str()))
        .collect();
    assert_eq!(ended, [(victim, "deleted")]);
    let left = pair.server.twheel_once(&["flows", "--json"])?;
    for connection in connections.iter().chain(&more) {
        let port = format!("\"sport\":{},", connection.name.port());
        let is_left = left.lines.iter().any(|line| line.text.contains(&port));
        assert_eq!(is_left, connection.name != victim, "{}", connection.name);
    }
    Ok(())
}

#[test]
fn a_flow_that_had_a_packet_stays() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let _run = Twheel::start(&pair.server, &["--iface", SERVER])?;
    // A packet in each jiffy: there is no moment at which it can be deleted.
    let busy = Busy::start(pair.connect_some(1)?, Duration::from_micros(200));
    let terminal = Terminal::open(&pair.server)?;
    terminal.top("", "")?;
    // If this machine was held up, the flow had no packet for a while, and may be deleted.
    let end = Instant::now() + PATIENCE;
    loop {
        terminal.press(&["d", "y"])?;
        let screen = terminal.until("an answer", |screen| {
            let footer = screen.lines().last().unwrap_or_default();
            footer.contains("deleted")
        })?;
        if screen.contains("not deleted: it had a packet") {
            assert_eq!(flows(&screen).len(), 1, "{screen}");
            break;
        }
        ensure!(Instant::now() < end, "{screen}");
        terminal.until("the flow again", |screen| flows(screen).len() == 1)?;
    }
    busy.stop()?;
    Ok(())
}

#[test]
fn without_a_run_the_history_has_the_deleted_flow() -> Result<()> {
    require_root();
    let history = twheel_tests::directory::Directory::new("top-delete")?;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--keep", "--history", history.path()];
    let run = Twheel::start(&pair.server, &args)?;
    let connections = pair.connect_some(1)?;
    run.stop()?;
    let terminal = Terminal::open(&pair.server)?;
    terminal.top("", &format!("--history {}", history.path()))?;
    terminal.press(&["d", "y"])?;
    terminal.until("no flow", |screen| screen.contains("server0  0 flows"))?;
    let args = [
        "expired",
        "--history",
        history.path(),
        "--iface",
        SERVER,
        "--json",
    ];
    let ended = pair.server.twheel_once(&args)?;
    let port = format!("\"sport\":{},", connections[0].name.port());
    let lines: Vec<_> = ended
        .lines
        .iter()
        .filter(|it| it.text.contains(&port))
        .collect();
    ensure!(
        lines.len() == 1 && lines[0].text.contains("\"reason\":\"deleted\""),
        "{ended:?}"
    );
    pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    Ok(())
}
