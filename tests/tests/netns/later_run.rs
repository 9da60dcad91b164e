//! A later run adopts what an earlier one has left, or removes it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use twheel_tests::{
    netns::require_root,
    pair::{Busy, Connection},
    running::Twheel,
};

use crate::{Lab, POD, stop, two_pods_that_talk};

#[test]
fn a_run_that_was_killed_is_replaced_in_place() -> Result<()> {
    require_root();
    let (lab, twheel, mut connection) = two_pods_that_talk()?;
    let seen = |lab: &Lab| {
        Ok::<_, anyhow::Error>(lab.host.counter("touched")? + lab.host.counter("seen_again")?)
    };
    let before = seen(&lab)?;
    let ended = twheel.kill()?;
    ensure!(ended.signal() == Some(Signal::SIGKILL as i32), "{ended:?}");
    // The programs continue without it.
    connection.talk()?;
    let between = seen(&lab)?;
    ensure!(between > before, "{between} packets");
    let twheel = lab.watch(&["--timeout", "1h"])?;
    // Reported after the last interface is attached.
    twheel.await_stderr("adopted 1 flow")?;
    let said = twheel.stderr();
    for pod in 0..2 {
        let wanted = format!("{}: attached, adopted XDP", lab.label(pod));
        ensure!(said.contains(&wanted), "{said}");
    }
    connection.talk()?;
    ensure!(seen(&lab)? > between, "no packets are seen");
    stop(twheel)?;
    lab.check_clean()
}

/// Until each is replaced, the programs of the previous run continue with what that run told them.
#[test]
fn a_restart_under_traffic_mixes_no_zones_and_counts_nothing_twice() -> Result<()> {
    require_root();
    const CONNECTIONS: usize = 8;
    let mut lab = Lab::with(4, "host", "again")?;
    let pattern = format!("twl-{}-again*", std::process::id());
    let labels: Vec<_> = (0..4).map(|pod| lab.label(pod)).collect();
    let zones: Vec<_> = (1..4).map(|pod| format!("{}={pod}", labels[pod])).collect();
    let zones = zones.join(",");
    let args = [
        "--iface",
        POD,
        "--netns",
        &pattern,
        "--zone",
        &zones,
        "--timeout",
        "1h",
    ];
    let start = || -> Result<Twheel> {
        let twheel = Twheel::start(&lab.host, &args)?;
        for label in &labels[1..] {
            twheel.await_stderr(&format!("{label}: attached"))?;
        }
        Ok(twheel)
    };
    let mut twheel = start()?;
    // From now on, the lowest number is free: the next run would give it to another interface.
    let listeners: Vec<_> = (1..4).map(|pod| lab.listen(pod)).collect::<Result<_>>()?;
    let mut open = Vec::new();
    for listener in &listeners {
        for _ in 0..CONNECTIONS {
            let mut connection = Connection::open(&lab.host, listener)?;
            connection.talk()?;
            open.push(connection);
        }
    }
    let busy = Busy::start(open, Duration::from_millis(1));
    let gone = lab.pods[0].name().to_owned();
    drop(lab.pods.remove(0));
    twheel.await_stderr(&format!("{gone}: this network namespace disappeared"))?;
    for _ in 0..4 {
        twheel.kill()?;
        twheel = start()?;
        let mut found = BTreeMap::<_, usize>::new();
        for flow in lab.flows()? {
            let iface = flow["iface"].as_str().unwrap_or_default().to_owned();
            *found.entry((flow["zone"].as_u64(), iface)).or_default() += 1;
        }
        let wanted = (1..4).map(|pod| ((Some(pod as u64), labels[pod].clone()), CONNECTIONS));
        let wanted: BTreeMap<_, _> = wanted.collect();
        ensure!(found == wanted, "{found:?}, not {wanted:?}");
        for (counter, count) in [
            ("created", 3 * CONNECTIONS as u64),
            ("not_watched", 0),
            ("moved", 0),
        ] {
            let is = lab.host.counter(counter)?;
            ensure!(is == count, "{counter}: {is}, not {count}");
        }
    }
    busy.stop()?;
    stop(twheel)?;
    lab.check_clean()
}

/// A later run removes everything that the previous run watched and it does not: here and in other
/// namespaces.
#[test]
fn a_later_run_lets_go_of_what_it_leaves_out() -> Result<()> {
    require_root();
    let lab = Lab::with(1, "host", "less")?;
    let pod = &lab.pods[0];
    pod.ip("link add net0 type veth peer name net1")?;
    let both = ["xdp", "egress"];
    let run = |interfaces: &str, more: &[&str]| {
        let args = [&["--iface", interfaces, "--netns", pod.name()], more].concat();
        Twheel::start(&lab.host, &args)
    };
    let twheel = run("eth*,net*", &[])?;
    for interface in ["net0", "net1"] {
        pod.await_attached(interface, &both)?;
    }
    twheel.kill()?;
    let twheel = run("eth*,net*", &["--exclude", "net1"])?;
    pod.await_attached("net1", &[])?;
    pod.await_attached("net0", &both)?;
    twheel.kill()?;
    let twheel = run("eth*", &[])?;
    pod.await_attached("net0", &[])?;
    pod.await_attached(POD, &both)?;
    stop(twheel)?;
    Twheel::start(&lab.host, &["--iface", "veth0", "--zone", "veth0=7"])?.kill()?;
    lab.host.await_attached("veth0", &both)?;
    let twheel = run("veth0,eth0", &[])?;
    lab.host.await_attached("veth0", &[])?;
    twheel.await_stderr("veth0: detached: --netns does not include this network namespace")?;
    stop(twheel)?;
    lab.check_clean()
}

#[test]
fn a_later_run_without_them_lets_go_of_other_namespaces() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    lab.watch(&["--hook", "clsact", "--egress", "clsact"])?
        .kill()?;
    // The host has an interface of this name, too.
    lab.host
        .ip(&format!("link add {POD} type veth peer name peer0"))?;
    let twheel = Twheel::start(&lab.host, &["--iface", POD])?;
    lab.pods[0].await_attached(POD, &[])?;
    let parts = lab.host.pins()?;
    ensure!(!parts.iter().any(|it| it.is_dir()), "{parts:?}");
    stop(twheel)?;
    lab.check_clean()
}

#[test]
fn what_a_killed_run_has_left_is_detached_whatever_the_hook() -> Result<()> {
    require_root();
    for options in [
        &["--hook", "tcx"][..],
        &["--hook", "clsact", "--egress", "clsact"],
    ] {
        let mut lab = Lab::new(3)?;
        lab.watch(options)?.kill()?;
        // One pod is removed meanwhile.
        lab.pods.pop();
        let ended = lab.host.twheel_once(&["detach", "--iface", POD])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        lab.check_clean()?;
        for pod in &lab.pods {
            ensure!(!pod.ip("-d link show")?.contains("xdp"));
            let qdiscs = pod.command("tc")?.args(["qdisc", "show"]).output()?;
            let qdiscs = String::from_utf8_lossy(&qdiscs.stdout).into_owned();
            ensure!(!qdiscs.contains("clsact"), "{qdiscs}");
        }
    }
    Ok(())
}
