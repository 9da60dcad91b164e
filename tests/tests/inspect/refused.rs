//! Requests that are refused, and readers that go away.

use std::{fs, io::Read, process::Stdio};

use anyhow::{Context, Result};
use twheel_tests::{
    directory::Directory,
    netns::require_root,
    pair::{Pair, SERVER},
    running::{Twheel, once, wait_within},
};

use crate::{millis, refused};

#[test]
fn unusable_requests_are_refused_in_a_sentence() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let once = |args: &[&str]| pair.server.twheel_once(args);
    for command in ["flows", "stats", "talkers", "flush", "expired"] {
        refused(&once(&[command])?, 6, "twheel is not running here");
        refused(
            &once(&[command, "--iface", "nonesuch"])?,
            6,
            match command {
                "expired" => "there is no history at",
                _ => "twheel is not running on nonesuch",
            },
        );
    }
    refused(
        &once(&["delete", "proto == tcp"])?,
        6,
        "twheel is not running here",
    );
    let small = ["run", "--iface", SERVER, "--history-size", "1KiB"];
    refused(&once(&small)?, 2, "--history-size 1.0 KiB");

    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    refused(
        &once(&["flows", "state == foo"])?,
        2,
        "filter, column 10: unknown state `foo`",
    );
    refused(&once(&["flows", "bytes > 1"])?, 2, "--accounting");
    refused(
        &once(&["delete"])?,
        2,
        "give a filter, such as `twheel delete",
    );
    refused(
        &once(&["talkers", "--state", "foo\" or proto == tcp or rule == \"x"])?,
        2,
        "possible values",
    );
    refused(&once(&["flows", "--reverse"])?, 2, "--sort");
    refused(&once(&["flows", "--sort", "colour"])?, 2, "possible values");
    for interval in ["0s", "99ms", "2days", "500000000000years"] {
        let watch = ["stats", "--watch", "--interval", interval];
        refused(&once(&watch)?, 2, "100ms to 1d");
    }
    // A pattern, and then a name.
    for (name, code) in [("e\x1b[31mX", 2), ("e\x1bX", 5)] {
        refused(
            &once(&["run", "--iface", name])?,
            code,
            "control characters",
        );
    }

    // There are two instances: one must be named, and no two may claim the same interface.
    pair.server.ip("link add twh0 type veth peer name twh1")?;
    let other = Twheel::start(&pair.server, &["--iface", "twh0"])?;
    refused(
        &once(&["flows"])?,
        6,
        "there are several instances here: choose one with --iface NAME",
    );
    assert_eq!(once(&["flows", "--iface", SERVER])?.code(), Some(0));
    let mut instances = pair.server.instances()?;
    instances.sort();
    let from = instances
        .iter()
        .find(|it| it.ends_with_name("-twh0"))
        .context("no instance")?;
    let to = instances
        .iter()
        .find(|it| !it.ends_with_name("-twh0"))
        .context("no instance")?;
    drop(once(&["detach", "--iface", "twh0"]));
    assert_eq!(other.stop()?.code(), Some(0));
    // Made by hand: a BPF link's pin with the name of the other instance.
    let stray = from.clone();
    fs::create_dir_all(&stray)?;
    let link = to.join(format!("xdp@{SERVER}"));
    fs::rename(&link, stray.join(format!("xdp@{SERVER}")))?;
    let egress = format!("egress@{SERVER}");
    assert!(to.join(&egress).exists(), "the other instance has it, too");
    refused(
        &once(&["flows", "--iface", SERVER])?,
        6,
        "belongs to two instances",
    );
    fs::rename(stray.join(format!("xdp@{SERVER}")), &link)?;
    fs::remove_dir(&stray)?;
    assert_eq!(once(&["flows", "--iface", SERVER])?.code(), Some(0));
    assert_eq!(twheel.stop()?.code(), Some(0));
    pair.server.check_clean(SERVER)
}

#[test]
fn a_reader_that_goes_away_is_no_failure() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("pipe")?;
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--history",
            directory.path(),
            "--timeout",
            "300ms,established=1h",
        ],
    )?;
    let _connections = pair.connect_some(50)?;
    for args in [
        &["flows"][..],
        &["flows", "--json"],
        &["flows", "--sort", "idle"],
        &["stats", "--watch", "--interval", "100ms"],
        &["stats", "--json", "--watch", "--interval", "100ms"],
        &["talkers"],
        &["expired", "--history", directory.path()],
    ] {
        let mut command = pair.server.twheel(args)?;
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        drop(child.stdout.take());
        let Some(status) = wait_within(&mut child, millis(5000))? else {
            panic!("{args:?} keeps running without a reader");
        };
        let mut stderr = String::new();
        child
            .stderr
            .take()
            .context("no stderr")?
            .read_to_string(&mut stderr)?;
        assert_eq!((status.code(), &*stderr), (Some(0), ""), "{args:?}");
    }
    assert_eq!(twheel.stop()?.code(), Some(0));
    let command = pair.server.twheel(&["flows"])?;
    assert_eq!(once(command)?.code(), Some(6));
    Ok(())
}

trait EndsWithName {
    fn ends_with_name(&self, end: &str) -> bool;
}

impl EndsWithName for std::path::PathBuf {
    fn ends_with_name(&self, end: &str) -> bool {
        self.file_name()
            .is_some_and(|name| name.to_string_lossy().ends_with(end))
    }
}
