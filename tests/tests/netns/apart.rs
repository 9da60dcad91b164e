//! Interfaces and addresses of several namespaces are told apart.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::{PATIENCE, require_root},
    pair::Connection,
    running::Twheel,
};

use crate::{Lab, POD, PORT, address, stop};

/// Interfaces of two namespaces have the same index, but each is known by its own name and has its
/// own counters.
#[test]
fn interfaces_with_one_index_are_told_apart() -> Result<()> {
    require_root();
    for options in [
        &["--hook", "xdp"][..],
        &["--hook", "tcx"],
        &["--hook", "clsact", "--egress", "clsact"],
    ] {
        let lab = Lab::new(2)?;
        let twheel = lab.watch(&[options, &["--accounting"]].concat())?;
        let listeners = [lab.listen(0)?, lab.listen(1)?];
        // A connection from each pod to the other, and one from the host, which only its server's
        // pod sees.
        let mut open = [
            Connection::open(&lab.pods[0], &listeners[1])?,
            Connection::open(&lab.pods[1], &listeners[0])?,
            Connection::open(&lab.host, &listeners[1])?,
        ];
        for connection in &mut open {
            connection.talk()?;
        }
        let wanted = [
            (address(0, 2), lab.label(0), "out"),
            (address(1, 2), lab.label(1), "out"),
            (address(1, 1), lab.label(1), "in"),
        ];
        let until = Instant::now() + PATIENCE;
        loop {
            let flows = lab.flows()?;
            let found: BTreeSet<_> = flows
                .iter()
                .map(|flow| {
                    let text = |name: &str| flow[name].as_str().unwrap_or_default().to_owned();
                    (text("src"), text("iface"), text("direction"), text("state"))
                })
                .collect();
            let wanted: BTreeSet<_> = wanted
                .iter()
                .map(|(src, iface, direction)| {
                    let state = "established".to_owned();
                    (
                        src.to_string(),
                        iface.clone(),
                        (*direction).to_owned(),
                        state,
                    )
                })
                .collect();
            if found == wanted {
                break;
            }
            ensure!(
                Instant::now() < until,
                "{options:?}: {found:?}, not {wanted:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        for counter in ["ignored", "same_way", "moved"] {
            ensure!(lab.host.counter(counter)? == 0, "{options:?}: {counter}");
        }
        stop(twheel)?;
        lab.check_clean()?;
    }
    Ok(())
}

#[test]
fn zones_of_two_namespaces_keep_one_address_apart() -> Result<()> {
    require_root();
    // Two hosts that know nothing of each other have the same addresses behind them.
    let labs = [Lab::new(1)?, Lab::new(1)?];
    let names = labs.each_ref().map(|lab| lab.pods[0].name().to_owned());
    let zone = format!("{}={}", labs[1].label(0), 7);
    let args = [
        "--iface",
        POD,
        "--netns",
        &names.join(","),
        "--zone",
        &zone,
        "--json",
    ];
    let twheel = Twheel::start(&labs[0].host, &args)?;
    let mut open = Vec::new();
    for lab in &labs {
        twheel.await_stderr(&format!("{}: attached", lab.label(0)))?;
        let listener = lab.listen(0)?;
        // Both connect from the same port.
        let from = SocketAddr::from((address(0, 1), 20_000));
        let client = lab.host.enter(|| {
            let socket = nix::sys::socket::socket(
                nix::sys::socket::AddressFamily::Inet,
                nix::sys::socket::SockType::Stream,
                nix::sys::socket::SockFlag::SOCK_CLOEXEC,
                None,
            )?;
            let addr = |at: SocketAddr| nix::sys::socket::SockaddrStorage::from(at);
            nix::sys::socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &addr(from))?;
            let to = listener.local_addr()?;
            nix::sys::socket::connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &addr(to))?;
            Ok(socket)
        })?;
        open.push((client, listener.accept()?));
    }
    let flows = labs[0].flows()?;
    let found: BTreeSet<_> = flows
        .iter()
        .map(|flow| {
            (
                flow["zone"].as_u64(),
                flow["iface"].as_str().unwrap_or_default(),
            )
        })
        .collect();
    let labels = labs.each_ref().map(|lab| lab.label(0));
    let wanted = BTreeSet::from([(None, labels[0].as_str()), (Some(7), labels[1].as_str())]);
    ensure!(found == wanted && flows.len() == 2, "{flows:?}");
    stop(twheel)?;
    Ok(())
}

/// The namespace that comes next gets the number of the one that has gone, and its interface has
/// the same index.
#[test]
fn a_pod_that_comes_after_another_has_counters_of_its_own() -> Result<()> {
    require_root();
    let mut lab = Lab::with(1, "host", "turn")?;
    let pattern = format!("twl-{}-turn*", std::process::id());
    let args = [
        "--iface",
        POD,
        "--netns",
        &pattern,
        "--json",
        "--timeout",
        "3s",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    let (mut names, mut open) = (Vec::new(), Vec::new());
    for turn in 0..3 {
        twheel.await_stderr(&format!("{}: attached", lab.label(0)))?;
        names.push(lab.label(0));
        let at = SocketAddr::from((address(turn, 2), PORT));
        let listener = lab.pods[0].enter(|| TcpListener::bind(at).context("cannot listen"))?;
        for _ in 0..=turn {
            open.push(Connection::open(&lab.host, &listener)?);
        }
        let pod = lab.pods.remove(0);
        let gone = pod.name().to_owned();
        drop(pod);
        twheel.await_stderr(&format!("{gone}: this network namespace disappeared"))?;
        lab.add()?;
    }
    let ended = lab.host.twheel_once(&["stats", "--json"])?;
    let lines = ended.lines.iter();
    let counters: Vec<Value> = lines
        .map(|line| Ok(serde_json::from_str(&line.text)?))
        .collect::<Result<_>>()?;
    let created = counters.iter().find(|it| it["counter"] == "created");
    let created = &created.context("no counter")?["interfaces"];
    for (turn, name) in (1..).zip(&names) {
        ensure!(created[name] == turn, "{name}: {created}");
    }
    let mut ends = [0; 3];
    for _ in 0..6 {
        let line = twheel.line(PATIENCE)?.context("nothing expires")?;
        let said: Value = serde_json::from_str(&line.text)?;
        let pod = names.iter().position(|name| said["iface"] == **name);
        ends[pod.with_context(|| format!("not of a pod: {said}"))?] += 1;
    }
    ensure!(ends == [1, 2, 3], "{ends:?}");
    drop(open);
    stop(twheel)?;
    lab.check_clean()
}
