//! The unit of an exporter.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel_tests::{
    clickhouse_server::{ClickHouse, Setup},
    netns::{PATIENCE, require_root},
    pair::SERVER,
    running::{twheel_bin, wait_within},
    sending::Sending,
    unit::{Unit, is_installed},
};

use super::{has, parsed, until};

#[test]
fn the_unit_of_an_export_gives_what_it_needs() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let unit = Unit::read("twheel-export@.service")?;
    assert_eq!(unit.directive("CapabilityBoundingSet"), [""]);
    if !is_installed("systemd-analyze") || !is_installed("strace") {
        return Ok(());
    }
    let mut sending = Sending::start("clickhouse-unit")?;
    let binary = twheel_bin()?;
    let beside = binary.parent().context("no directory")?;
    unit.verify(&sending.history.0, beside)?;
    // What the unit's line starts, without capabilities, under strace, which is its parent.
    let line = unit.directive("ExecStart")[0];
    let (_, args) = line.split_once(' ').context("no arguments")?;
    let args = args
        .replace("%I", SERVER)
        .replace("$TWHEEL_EXPORT_OPTIONS", "");
    let (trace, state) = (sending.history.file("trace"), sending.history.file("state"));
    let mut strace = Command::new("setpriv")
        .args([
            "--inh-caps",
            "-all",
            "--bounding-set",
            "-all",
            "--no-new-privs",
        ])
        .args(["strace", "-f", "-qq", "-o", &trace])
        .arg(&binary)
        .args(args.split_ascii_whitespace())
        .args([
            "--history",
            &sending.history.file("outside"),
            "--state",
            &state,
        ])
        .env("TWHEEL_CLICKHOUSE_URL", server.url())
        .stdin(Stdio::null())
        .spawn()?;
    sending.begin(300)?;
    let told = sending.end()?;
    until(&server, told.len())?;
    let pid = strace.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    kill(Pid::from_raw(children.trim().parse()?), Signal::SIGTERM)?;
    let status = wait_within(&mut strace, PATIENCE)?.context("it does not end")?;
    // It has nothing to do at its end; for systemd this is one in order.
    ensure!(status.signal() == Some(Signal::SIGTERM as i32), "{status}");
    has(&server, &parsed(told.values())?)?;
    let called = unit.check_calls(Path::new(&trace), &binary)?;
    ensure!(called.contains("connect"), "{called:?}");
    Ok(())
}
