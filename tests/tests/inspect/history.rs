//! `twheel expired`: flows that have ended.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
    running::{Twheel, once, twheel_bin},
};

use crate::{lines, millis, objects, refused, src};

#[test]
fn what_has_ended_is_in_the_history_after_any_end_of_the_loader() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("history")?;
    let run = [
        "--iface",
        SERVER,
        "--timeout",
        "500ms",
        "--json",
        "--history",
        directory.path(),
    ];
    let expired = [
        "expired",
        "--json",
        "--iface",
        SERVER,
        "--history",
        directory.path(),
    ];
    let mut told = Vec::new();
    // These stay open: closing a connection after its flow has ended begins another flow.
    let mut open = Vec::new();

    // Three runs: one is killed, one is stopped, and one is still running.
    for round in 0..3 {
        let twheel = Twheel::start(&pair.server, &run)?;
        open.extend(pair.connect_some(10)?);
        let expiries = twheel.ends_within(millis(900), 10)?;
        assert_eq!(expiries.len(), 10);
        told.extend(expiries);
        let mut history = objects(&pair.server, &expired)?;
        // What was read late may be written later still.
        let end = Instant::now() + PATIENCE;
        while history.len() < told.len() && Instant::now() < end {
            thread::sleep(millis(50));
            history = objects(&pair.server, &expired)?;
        }
        assert_eq!(history.len(), told.len(), "round {round}");
        for (line, expiry) in history.iter_mut().zip(&told) {
            assert_eq!(src(line)?, expiry.src);
            assert_eq!(line["reason"], expiry.reason.as_str());
            assert_eq!(line["idle_us"], expiry.idle.as_micros() as u64);
            assert!(
                line["time"]
                    .as_str()
                    .is_some_and(|time| time.ends_with('Z')),
                "{line}"
            );
        }
        match round {
            0 => drop(twheel.kill()?),
            1 => assert_eq!(twheel.stop()?.code(), Some(0)),
            _ => {
                // Follows from before the flows end.
                let mut follow = follow(
                    &pair.server,
                    &[
                        &expired[..],
                        &["-f", "--since", "1h", "--limit", "1", "reason == idle"],
                    ]
                    .concat(),
                )?;
                let first = follow.line()?;
                assert_eq!(src(&first)?, told.last().context("none")?.src);
                let connection = pair.connect(Family::V4)?;
                assert_eq!(src(&follow.line()?)?, connection.name);
                twheel.stop()?;
            }
        }
    }
    // The pins are gone, and the history is still there.
    let ended = objects(&pair.server, &[&expired[..], &["--since", "1h"]].concat())?;
    assert_eq!(ended.len(), 31);
    assert_eq!(
        objects(&pair.server, &[&expired[..], &["--since", "1ms"]].concat())?.len(),
        0
    );
    assert_eq!(
        objects(&pair.server, &[&expired[..], &["--limit", "3"]].concat())?,
        ended[28..]
    );
    assert_eq!(
        objects(
            &pair.server,
            &[&expired[..], &["src in 10.0.0.0/8 and idle < 1m"]].concat()
        )?
        .len(),
        16
    );
    let text = lines(&pair.server, &["expired", "--history", directory.path()])?;
    assert_eq!(text.len(), 31, "not the only history here");
    assert!(text[0].contains("end      tcp"), "{}", text[0]);
    // Only its owner may read it.
    let instance = fs::read_dir(&directory.0)?
        .next()
        .context("no directory")??
        .path();
    for (path, mode) in [(instance.as_path(), 0o700), (&segment(&instance)?, 0o600)] {
        assert_eq!(
            fs::metadata(path)?.permissions().mode() & 0o777,
            mode,
            "{}",
            path.display()
        );
    }

    // The file is truncated within the end of the last flow, and then replaced by something else.
    // Behind that there are the run's summary and a record of how the writer ended.
    const RECORD: usize = 28 + size_of::<twheel_common::event::Event>();
    let segment = segment(&instance)?;
    let bytes = fs::read(&segment)?;
    fs::write(&segment, &bytes[..bytes.len() - 2 * RECORD - 7])?;
    assert_eq!(objects(&pair.server, &expired)?, ended[..30]);
    fs::write(
        &segment,
        b"something else that is as long as a header of a history is",
    )?;
    refused(
        &pair.server.twheel_once(&expired)?,
        1,
        "is not a history of twheel: move the file away",
    );
    let none = ["expired", "--iface", SERVER, "--history", "/nowhere"];
    refused(
        &pair.server.twheel_once(&none)?,
        6,
        "there is no history at /nowhere",
    );
    pair.server.check_clean(SERVER)
}

fn segment(instance: &Path) -> Result<std::path::PathBuf> {
    Ok(fs::read_dir(instance)?
        .next()
        .context("no segment")??
        .path())
}

/// A command that keeps running.
pub struct Following(Child, BufReader<std::process::ChildStdout>);

impl Following {
    pub fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.1.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("no JSON: {line}"))
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn follow(namespace: &Namespace, args: &[&str]) -> Result<Following> {
    let mut command = namespace.twheel(args)?;
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("no stdout")?;
    Ok(Following(child, BufReader::new(stdout)))
}

/// The kernel soon gives the inode of a namespace that is gone to another one.
#[test]
fn a_namespace_without_a_name_does_not_find_the_history_of_an_earlier_one() -> Result<()> {
    require_root();
    let directory = Directory::new("unnamed")?;
    let run = "ip link set lo up && exec \"$0\" run --iface lo --timeout 1s --history \"$1\"";
    let mut names = Vec::new();
    for _ in 0..3 {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", run]);
        command.arg(twheel_bin()?).arg(directory.path());
        let twheel = Twheel::start_command(command, |_| {})?;
        twheel.await_stderr("lo: attached")?;
        // Another one lists it with its history.
        let mut list = Command::new(twheel_bin()?);
        list.args(["list", "--json", "--history", directory.path()]);
        let listed = once(list)?;
        ensure!(listed.code() == Some(0), "{listed:?}");
        let entries = fs::read_dir(&directory.0)?.map(|it| Ok(it?.file_name()));
        let mut now: Vec<_> = entries.collect::<Result<_>>()?;
        now.retain(|it| !names.contains(it));
        let [name] = now.as_slice() else {
            anyhow::bail!("not one new history: {now:?}, {names:?}");
        };
        let text = name.to_str().context("no text")?;
        ensure!(text.starts_with("lo@cookie-"), "{text}");
        let of = listed.lines.iter().filter(|it| it.text.contains(text));
        assert_eq!(of.count(), 1, "{listed:?}");
        names.push(name.clone());
        ensure!(twheel.stop()?.code() == Some(0));
    }
    Ok(())
}
