//! `twheel idle`: the idle connections of processes that know nothing of twheel.

mod lab;
mod refused;
mod sockets;

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    process::Stdio,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use twheel_tests::{netns::PATIENCE, pair::SERVER, running::wait_within};

use self::lab::{
    Cgroup, LATE, Lab, PORT, await_reports, millis, pid_of, reports, reports_of, talk,
};

/// Not a test: the process whose connections the others watch.
#[test]
#[ignore = "it is what the other tests run"]
fn service() -> Result<()> {
    lab::serve()
}

#[test]
fn each_idle_connection_is_reported_once_until_it_is_active_again() -> Result<()> {
    let lab = Lab::new("once")?;
    let twheel = lab.twheel(&[])?;
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let (quiet, busy) = (lab.connect(0, PORT)?, lab.connect(1, PORT)?);
    talk(&quiet)?;
    let mut last = Instant::now();
    let pid = pid_of(&service);
    let mut idle = lab.idle(&["--pid", &pid, "--timeout", "700ms"])?;
    // Also one that is opened later.
    thread::sleep(millis(300));
    let later = lab.connect(0, PORT)?;
    let begun = Instant::now();
    while begun.elapsed() < millis(4_000) {
        talk(&busy)?;
        thread::sleep(millis(50));
        if reports_of(&idle, &quiet)? == 0 {
            ensure!(last.elapsed() < millis(700) + LATE, "{}", idle.log());
        } else {
            ensure!(last.elapsed() >= millis(700), "early");
        }
    }
    let found = reports(&idle)?;
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[&later.local_addr()?].len(), 1);
    let [report] = &found[&quiet.local_addr()?][..] else {
        anyhow::bail!("{found:?}");
    };
    assert_eq!(report["event"], "idle");
    assert_eq!(report["local"], quiet.peer_addr()?.to_string());
    assert_eq!(report["pid"].to_string(), pid);
    assert_eq!(report["action"], "notify");
    ensure!(
        report["idle_us"].as_u64().context("no idle_us")? >= 700_000,
        "{report}"
    );
    ensure!(
        humantime::parse_rfc3339(report["time"].as_str().context("no time")?).is_ok(),
        "{report}"
    );

    // What is active again is watched again, twice over.
    for count in 2..4 {
        talk(&quiet)?;
        last = Instant::now();
        await_reports(&mut idle, &quiet, count)?;
        ensure!(last.elapsed() >= millis(700), "early");
        ensure!(last.elapsed() < millis(700) + LATE, "late");
    }
    // Idle since the loop above.
    await_reports(&mut idle, &busy, 1)?;
    thread::sleep(millis(2_000));
    let counts = [&quiet, &busy, &later].map(|it| reports_of(&idle, it).unwrap_or(0));
    assert_eq!(counts, [3, 1, 1]);
    idle.check()?;
    twheel.stop().map(drop)
}

/// After a flush twheel cannot tell whether the connection is idle.
#[test]
fn an_idle_time_goes_on_when_a_flow_ends_and_its_connection_does_not() -> Result<()> {
    let lab = Lab::new("deleted")?;
    let twheel = lab.twheel(&[])?;
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let stream = lab.connect(0, PORT)?;
    let pid = pid_of(&service);
    let args = ["--pid", &pid, "--timeout", "6s", "--action", "shutdown"];
    let mut idle = lab.idle(&args)?;
    thread::sleep(millis(1_500));
    talk(&stream)?;
    let last = Instant::now();
    thread::sleep(millis(4_000));
    let flush = ["flush", "--iface", SERVER];
    let flushed = lab.pair.server.twheel(&flush)?.output()?;
    ensure!(flushed.status.success(), "{flushed:?}");
    await_reports(&mut idle, &stream, 1)?;
    let took = last.elapsed();
    let log = idle.log();
    ensure!(log.contains("cannot tell whether it is idle"), "{log}");
    ensure!(took >= millis(6_000), "early: {took:?}");
    ensure!(took < millis(6_000) + LATE, "late: {took:?}");
    assert_eq!((&stream).read(&mut [0])?, 0);
    twheel.stop().map(drop)
}

#[test]
fn only_what_counts_as_life_keeps_a_connection_from_being_idle() -> Result<()> {
    let lab = Lab::new("life")?;
    let twheel = lab.twheel(&[])?;
    let mut watched = Vec::new();
    for (port, life) in (PORT..).zip(["data", "data-in", "data-out", "any"]) {
        // It only receives.
        let service = lab.serve(&lab.pair.server, port, "sink")?;
        let stream = lab.connect(port.into(), port)?;
        let args = ["--pid", &pid_of(&service), "--timeout", "800ms"];
        let idle = lab.idle(&[&args[..], &["--life", life]].concat())?;
        watched.push((life, service, stream, idle));
    }
    let begun = Instant::now();
    while begun.elapsed() < millis(4_000) {
        for (_, _, stream, _) in &watched {
            (&mut &*stream).write_all(b"!")?;
        }
        thread::sleep(millis(50));
    }
    for (life, _, stream, idle) in &watched {
        let expected = usize::from(*life == "data-out");
        assert_eq!(reports_of(idle, stream)?, expected, "{life}");
    }
    for (_, _, stream, idle) in &mut watched {
        await_reports(idle, stream, 1)?;
    }
    twheel.stop().map(drop)
}

#[test]
fn an_idle_connection_is_shut_down_or_destroyed() -> Result<()> {
    let lab = Lab::new("actions")?;
    let twheel = lab.twheel(&[])?;
    for (port, action) in [(PORT, "shutdown"), (PORT + 1, "destroy")] {
        let mut service = lab.serve(&lab.pair.server, port, "echo")?;
        let streams = [lab.connect(0, port)?, lab.connect(1, port)?];
        let mut names = Vec::new();
        for stream in &streams {
            names.push(format!(
                "{} -> {}",
                stream.peer_addr()?,
                stream.local_addr()?
            ));
        }
        let pid = pid_of(&service);
        let args = ["--pid", &pid, "--timeout", "600ms", "--action", action];
        let mut idle = lab.idle_by(lab.command(&args)?)?;
        for mut stream in &streams {
            match (action, stream.read(&mut [0])) {
                ("shutdown", Ok(0)) => {}
                ("destroy", Err(error)) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                }
                (_, other) => anyhow::bail!("{action}: {other:?}"),
            }
        }
        let (seen, done) = match action {
            "shutdown" => ("end of file", "shut down"),
            _ => ("ConnectionAborted", "destroyed"),
        };
        service.await_text(seen)?;
        // Another timeout changes nothing.
        thread::sleep(millis(2_000));
        let log = idle.log();
        for name in names {
            let begin = format!("idle     {name}  process {pid}  ");
            let lines: Vec<_> = log.lines().filter(|it| it.starts_with(&begin)).collect();
            let [line] = lines[..] else {
                anyhow::bail!("{begin}: {log}");
            };
            ensure!(line.ends_with(&format!("s  {done}")), "{line}");
        }
        assert_eq!(log.lines().count(), 2, "{log}");
        idle.check()?;
    }
    twheel.stop().map(drop)
}

#[test]
fn the_processes_of_a_cgroup_are_watched_also_later_ones() -> Result<()> {
    let lab = Lab::new("cgroup")?;
    let twheel = lab.twheel(&[])?;
    let cgroup = Cgroup::new("idle")?;
    let below = Cgroup::at(cgroup.0.join("below"))?;
    let path = cgroup.0.to_str().context("a path")?.to_owned();
    let mut idle = lab.idle(&["--cgroup", &path, "--timeout", "500ms"])?;
    thread::sleep(millis(300));
    let mut services = Vec::new();
    for (port, cgroup) in [(PORT, &cgroup), (PORT + 1, &below)] {
        let service = lab.serve(&lab.pair.server, port, "echo")?;
        cgroup.add(&service)?;
        let stream = lab.connect(0, port)?;
        await_reports(&mut idle, &stream, 1)?;
        let found = reports(&idle)?;
        assert_eq!(
            found[&stream.local_addr()?][0]["pid"].to_string(),
            pid_of(&service)
        );
        services.push((service, stream));
    }
    // As when a service is restarted: its cgroup is removed, and made again.
    services.clear();
    drop((below, cgroup));
    thread::sleep(millis(1_500));
    idle.check()?;
    let cgroup = Cgroup::at(path.into())?;
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    cgroup.add(&service)?;
    let stream = lab.connect(0, PORT)?;
    await_reports(&mut idle, &stream, 1)?;
    drop(service);
    twheel.stop().map(drop)
}

/// Idle times go on over a restart of twheel, with `--keep` and without.
#[test]
fn a_twheel_that_comes_back_goes_on() -> Result<()> {
    for keep in [&["--keep"][..], &[]] {
        let lab = Lab::new(&format!("back-{}", keep.len()))?;
        let twheel = lab.twheel(keep)?;
        let service = lab.serve(&lab.pair.server, PORT, "echo")?;
        let (stream, reported) = (lab.connect(0, PORT)?, lab.connect(1, PORT)?);
        let args = ["--pid", &pid_of(&service), "--timeout", "4s"];
        let mut idle = lab.idle(&args)?;
        while reports_of(&idle, &reported)? == 0 {
            talk(&stream)?;
            thread::sleep(millis(100));
        }
        talk(&stream)?;
        let talked = Instant::now();
        thread::sleep(millis(1_500));
        match keep.is_empty() {
            false => twheel.kill()?,
            true => twheel.stop()?,
        };
        idle.await_text("has ended: waiting until it is back")?;
        let twheel = lab.twheel(keep)?;
        idle.await_text("is back")?;
        // On a busy machine it may be back only after that.
        let due = talked.elapsed().max(millis(4_000));
        await_reports(&mut idle, &stream, 1)?;
        let took = talked.elapsed();
        ensure!(
            took >= millis(4_000) && took < due + LATE,
            "{keep:?}: {took:?}: {}",
            idle.log()
        );
        // One that was reported before stays so.
        thread::sleep(millis(5_000));
        assert_eq!(reports_of(&idle, &reported)?, 1);
        talk(&reported)?;
        await_reports(&mut idle, &reported, 2)?;
        twheel.stop()?;
        if !keep.is_empty() {
            lab.pair
                .server
                .twheel_once(&["detach", "--iface", SERVER])?;
        }
        lab.pair.server.check_clean(SERVER)?;
    }
    Ok(())
}

#[test]
fn it_ends_with_its_process_its_reader_or_ctrl_c() -> Result<()> {
    let lab = Lab::new("ends")?;
    let twheel = lab.twheel(&["--offload-limit", "1"])?;
    let mut service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let stream = lab.connect(0, PORT)?;
    let pid = pid_of(&service);
    let args = ["--pid", &pid, "--timeout", "600ms"];

    // As `| head -1`: no other line comes, on which the write would fail.
    let mut command = lab.command(&args)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let line = lines.next().context("no line")??;
    ensure!(line.contains(&stream.local_addr()?.to_string()), "{line}");
    drop(lines);
    let status = wait_within(&mut child, millis(5_000))?.context("it does not end")?;
    assert_eq!(status.code(), Some(0));
    let stderr = io::read_to_string(child.stderr.take().context("no stderr")?)?;
    assert_eq!(stderr, "");

    // Ctrl-C ends it as it ends any program, and its timers with it: the next one has room.
    for _ in 0..2 {
        let mut idle = lab.idle(&args)?;
        talk(&stream)?;
        await_reports(&mut idle, &stream, 1)?;
        talk(&stream)?;
        thread::sleep(millis(100));
        let interrupted = Instant::now();
        idle.signal(Signal::SIGINT)?;
        let status = idle.ended(PATIENCE)?;
        ensure!(!status.success(), "{status}");
        ensure!(interrupted.elapsed() < millis(1_000), "slow");
    }

    let mut idle = lab.idle(&args)?;
    talk(&stream)?;
    await_reports(&mut idle, &stream, 1)?;
    service.kill()?;
    assert_eq!(idle.ended(millis(5_000))?.code(), Some(0));
    ensure!(
        idle.log().contains(&format!("process {pid} has ended")),
        "{}",
        idle.log()
    );
    twheel.stop().map(drop)
}
