//! Pins that a run refuses.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData};
use twheel_common::config::{LAYOUT, Meta};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
};

use crate::accounts::{await_clean, detached, names, pinned};

#[test]
fn a_run_that_is_refused_takes_nothing_away() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--keep", "--history", "off"];
    Twheel::start(&pair.server, &args)?.stop()?;
    // As if its interface had disappeared.
    for hook in ["xdp", "egress"] {
        fs::remove_file(pinned(&pair.server)?.join(format!("{hook}@{SERVER}")))?;
    }
    let before = names(&pair.server)?;
    let other = [&["run"], &args[..], &["--max-flows", "4096"]].concat();
    let ended = pair.server.twheel_once(&other)?;
    assert_eq!(ended.code(), Some(6), "{}", ended.stderr);
    assert_eq!(names(&pair.server)?, before);
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(ended.stderr.contains("adopted 0 flows"), "{}", ended.stderr);
    detached(&pair.server)
}

/// Checks that a command refuses pins of another version and leaves them alone.
fn refuses(namespace: &Namespace, args: &[&str], attached: &[&str]) -> Result<()> {
    let ended = namespace.twheel_once(args)?;
    assert_eq!(ended.code(), Some(6), "{args:?}: {}", ended.stderr);
    assert!(
        ended.stderr.contains("another version of twheel"),
        "{args:?}: {}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("twheel detach"),
        "{args:?}: {}",
        ended.stderr
    );
    assert_eq!(namespace.attached(SERVER)?, attached, "{args:?}");
    Ok(())
}

#[test]
fn pins_of_another_layout_are_refused_and_never_misread() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let keep = || -> Result<PathBuf> {
        let ended = Twheel::start(&pair.server, &["--iface", SERVER, "--keep"])?.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        pinned(&pair.server)
    };
    let mut commands: Vec<Vec<&str>> = [
        "run", "flows", "talkers", "stats", "wheel", "flush", "expired",
    ]
    .map(|command| vec![command, "--iface", SERVER])
    .into();
    commands.push(vec!["delete", "--iface", SERVER, "idle > 10s"]);
    let both = ["xdp", "egress"];

    // Pins at the place of an earlier version, with BPF links that are alive.
    let path = keep()?;
    let version = path.parent().context("the path has no version")?;
    let earlier = version.with_file_name(format!("v{}", LAYOUT - 1));
    fs::create_dir_all(&earlier)?;
    fs::rename(
        &path,
        earlier.join(path.file_name().context("the path has no name")?),
    )?;
    let _ = fs::remove_dir(version);
    for command in &commands {
        refuses(&pair.server, command, &both)?;
    }
    let doctor = pair.server.twheel_once(&["doctor"])?;
    let text: String = doctor.lines.iter().map(|line| line.text.as_str()).collect();
    assert!(text.contains("by another version of twheel"), "{text}");
    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)?;

    // Pins at the place of this version, but with another number in META.
    let path = keep()?;
    let map = MapData::from_pin(path.join("META"))?;
    let mut map = Array::<_, Meta>::try_from(Map::Array(map))?;
    let meta = map.get(&0, 0)?;
    map.set(
        0,
        Meta {
            layout: LAYOUT - 1,
            ..meta
        },
        0,
    )?;
    for command in &commands {
        refuses(&pair.server, command, &both)?;
    }
    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)
}
