//! `twheel wheel`.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
};

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
