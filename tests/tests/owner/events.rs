//! The owners in the events of a run.

use std::{
    io::Write,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

use crate::{COMMAND, Cgroup, NOBODY, PORT, Service, assert_nobodys, assert_owner, user};

/// The next events of a run: updates, until one of this kind has come.
fn events(twheel: &Twheel, kind: &str) -> Result<Vec<(String, Value)>> {
    let end = Instant::now() + PATIENCE;
    let mut told: Vec<(String, Value)> = Vec::new();
    while told.last().is_none_or(|(_, event)| event["event"] != kind) {
        if let Some(line) = twheel.line(Duration::from_millis(100))? {
            let event: Value = serde_json::from_str(&line.text)?;
            let is_expected = [kind, "update"].iter().any(|it| event["event"] == *it);
            ensure!(is_expected, "no {kind}: {event}");
            told.push((line.text, event));
        }
        ensure!(Instant::now() < end, "{told:?}");
    }
    Ok(told)
}

#[test]
fn events_tell_whose_a_socket_was_also_when_it_is_closed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let history = Directory::new("owner-events")?;
    let cgroup = Cgroup::new("events")?;
    let at = SocketAddr::new(Family::V4.server(), PORT);
    let service = Service::start(&pair.server, &cgroup, &format!("late {at}"))?;
    let pid = service.pid();
    let run = |more: &[&str]| {
        let mut args = vec!["--iface", SERVER, "--json", "--events", "update,end"];
        args.extend(["--active-timeout", "800ms"]);
        args.extend(["--timeout", "established=1h,close=300ms,time_wait=300ms"]);
        args.extend(["--history", history.path()]);
        args.extend(more);
        Twheel::start(&pair.server, &args)
    };
    let twheel = run(&["--owner"])?;
    let connect = || {
        pair.client
            .enter(|| TcpStream::connect(service.address).context("cannot connect"))
    };
    let stream = connect()?;
    // A connection has a process once the service has accepted it.
    let mut told = events(&twheel, "update")?;
    while told
        .last()
        .is_some_and(|(_, event)| event["owner_pid"].is_null())
    {
        ensure!(told.len() < 10, "no process: {told:?}");
        (&stream).write_all(b"an update has something new to tell")?;
        told.append(&mut events(&twheel, "update")?);
    }
    let accepted = told.len() - 1;
    // The process is gone by the time at which the flow ends.
    drop(service);
    drop(stream);
    told.append(&mut events(&twheel, "end")?);
    let owned =
        |event: &Value| assert_owner(event, pid, COMMAND, &user(NOBODY).unwrap(), &cgroup.path);
    told[accepted..].iter().for_each(|(_, event)| owned(event));

    // A flow that has no local socket has no owner.
    pair.server.begin_flows(SERVER, 1)?;
    let nobodys = events(&twheel, "update")?;
    nobodys.iter().for_each(|(_, event)| assert_nobodys(event));
    told.extend(nobodys);
    ensure!(twheel.stop()?.code() == Some(0));

    let args = [
        "expired",
        "--json",
        "--events",
        "update,end",
        "--iface",
        SERVER,
    ];
    let args = [&args[..], &["--history", history.path()]].concat();
    let past = pair.server.twheel_once(&args)?.lines;
    let past: Vec<_> = past.into_iter().map(|it| it.text).collect();
    let told: Vec<_> = told.into_iter().map(|it| it.0).collect();
    assert_eq!(past, told, "the history says the same");
    Ok(())
}
