//! An exporter's position: how far it is behind, and where that cannot be kept.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use twheel_tests::{
    clickhouse_server::{ClickHouse, Setup},
    netns::{PATIENCE, require_root},
    sending::Sending,
};

use super::{export, has, parsed, until};

#[test]
fn an_exporter_that_has_caught_up_is_not_behind() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let mut sending = Sending::start("clickhouse-behind")?;
    sending.begin(100)?;
    let told = sending.end()?;
    // So old that it counts.
    thread::sleep(Duration::from_secs(2));
    let sql = "SELECT countIf(most > 2000000 AND last < 1000000) FROM (SELECT max(behind_us) AS most, \
               argMax(behind_us, time) AS last FROM twheel.exports GROUP BY exporter)";
    let caught_up = |exporters: u64| {
        let end = Instant::now() + PATIENCE;
        while server.number(sql)? < exporters {
            ensure!(Instant::now() < end, "{exporters}");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    };
    let exporter = export(&sending, "on", &server.url(), &[])?;
    caught_up(1)?;
    exporter.kill()?;
    let exporter = export(&sending, "once", &server.url(), &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    caught_up(2)?;
    until(&server, told.len())
}

#[test]
fn a_full_disk_of_the_position_does_not_stop_an_exporter() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let mut sending = Sending::start("clickhouse-position")?;
    let small = Mounted::small(&sending.history.file("small"))?;
    let exporter = export(&sending, "small/state", &server.url(), &[])?;
    sending.begin(50)?;
    sending.expire()?;
    until(&server, 50)?;
    let filler = small.fill()?;
    sending.begin(50)?;
    let said = |what: &str| {
        let end = Instant::now() + PATIENCE;
        loop {
            let said = exporter.said();
            if said.contains(what) {
                return Ok(said);
            }
            ensure!(Instant::now() < end, "{said}");
            thread::sleep(Duration::from_millis(50));
        }
    };
    said("the position of this export: No space left on device (os error 28): sending goes on")?;
    sending.expire()?;
    until(&server, 100)?;
    fs::remove_file(filler)?;
    // Then the position is kept.
    let told = sending.end()?;
    until(&server, told.len())?;
    thread::sleep(Duration::from_secs(2));
    let said = exporter.said();
    assert_eq!(said.lines().count(), 1, "{said}");
    exporter.kill()?;
    let rows = server.number("SELECT count() FROM twheel.events")?;
    let exporter = export(&sending, "small/state", &server.url(), &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    assert_eq!(server.number("SELECT count() FROM twheel.events")?, rows);
    has(&server, &parsed(told.values())?)
}

/// A file system in memory with room for a few files; unmounted when dropped.
struct Mounted(String);

impl Mounted {
    fn small(path: &str) -> Result<Self> {
        fs::create_dir(path)?;
        let mut mount = Command::new("mount");
        let status = mount
            .args(["-t", "tmpfs", "-o", "size=64k", "small", path])
            .status()?;
        ensure!(status.success(), "cannot mount {path}");
        Ok(Self(path.to_owned()))
    }

    /// Writes more than it holds, whatever else is there; the file's path.
    fn fill(&self) -> Result<String> {
        let path = format!("{}/filler", self.0);
        fs::write(&path, vec![0; 128 << 10]).expect_err("it is not full");
        Ok(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}
