//! Commands find an interface by its namespace; also limits, and what is refused.

use std::{
    fs::File,
    path::PathBuf,
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

use crate::{Alias, Lab, POD, stop, two_pods_that_talk};

/// A run with names has capacity for 16 interfaces, and so has a run that adopts it. One place was
/// the host's, and stays so. Places that one namespace frees are available to the others.
#[test]
fn room_is_shared_by_all_namespaces() -> Result<()> {
    require_root();
    let lab = Lab::with(2, "host", "room")?;
    let ended = Twheel::start(
        &lab.host,
        &["--iface", "veth0", "--zone", "veth0=7", "--keep"],
    )?;
    stop(ended)?;
    let pairs: String = (1..8)
        .map(|pair| format!("link add a{pair} type veth peer name b{pair}\n"))
        .collect();
    let pairs = format!("link add a0 type veth peer name other0\n{pairs}");
    lab.pods[0].batch(&pairs)?;
    let list = format!("{},{}", lab.pods[0].name(), lab.pods[1].name());
    let args = ["--iface", "veth0,a*,b*,c*", "--netns", &list];
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.host.await_attached("veth0", &[])?;
    let attached = |count: usize| -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while twheel.stderr().matches(": attached").count() != count {
            ensure!(Instant::now() < until, "not {count}: {}", twheel.stderr());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    };
    attached(15)?;
    lab.pods[1].ip("link add c1 type veth peer name c2")?;
    twheel.await_stderr("this run has reached its capacity of 16 interfaces")?;
    lab.pods[0].ip("link del a1")?;
    attached(17)?;
    lab.pods[1].await_attached("c1", &["xdp", "egress"])?;
    lab.pods[1].await_attached("c2", &["xdp", "egress"])?;
    // A place is freed and taken again; the run reports the limit again.
    lab.pods[0].ip("link del a2")?;
    twheel.await_stderr("b2: disappeared:")?;
    lab.pods[1]
        .batch("link add c3 type veth peer name c4\nlink add c5 type veth peer name c6\n")?;
    attached(19)?;
    let said = stop(twheel)?;
    ensure!(said.matches("its capacity of 16").count() == 2, "{said}");
    lab.check_clean()
}

#[test]
fn commands_know_an_interface_by_its_namespace() -> Result<()> {
    require_root();
    let (lab, twheel, _connection) = two_pods_that_talk()?;
    let labels = [lab.label(0), lab.label(1)];
    for label in &labels {
        for command in ["flows", "stats", "wheel"] {
            let ended = lab.host.twheel_once(&[command, "--iface", label])?;
            ensure!(ended.code() == Some(0), "{command}: {ended:?}");
        }
    }
    let ended = lab.host.twheel_once(&["run", "--iface", &labels[0]])?;
    ensure!(ended.code() == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("--netns"), "{ended:?}");
    twheel.kill()?;
    let detach = |label: &str| lab.host.twheel_once(&["detach", "--iface", label]);
    let ended = detach(&labels[0])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    lab.pods[0].await_attached(POD, &[])?;
    lab.pods[1].await_attached(POD, &["xdp", "egress"])?;
    let again = detach(&labels[0])?;
    ensure!(again.code() == Some(6), "{again:?}");
    let ended = detach(&labels[1])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    lab.check_clean()
}

/// A flow that is counted in a pod is never the host's to reap, even if a socket of the host has
/// its addresses.
#[test]
fn nothing_is_reaped_for_a_flow_of_another_namespace() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    let options = ["--timeout", "2s", "--reap", "socket,conntrack"];
    let twheel = lab.watch(&options)?;
    let listener = lab.listen(0)?;
    let mut connection = Connection::open(&lab.host, &listener)?;
    connection.talk()?;
    let mut outcomes = Vec::new();
    while outcomes.len() < 2 {
        let line = twheel.line(PATIENCE)?.context("no action is reported")?;
        let said: Value = serde_json::from_str(&line.text)?;
        if said["event"] == "reap" {
            outcomes.push(said["outcome"].as_str().unwrap_or_default().to_owned());
        }
    }
    ensure!(outcomes == ["other_zone"; 2], "{outcomes:?}");
    connection.talk().context("the connection is closed")?;
    stop(twheel)?;
    Ok(())
}

#[test]
fn what_cannot_be_is_said_in_one_sentence() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    for (netns, wanted) in [
        (
            "/proc/1/ns/net",
            "--netns /proc/1/ns/net: give a name in /run/netns",
        ),
        ("", "--netns has an empty name: give a name"),
        ("a[", "--netns a[: "),
        (
            "blue --zone bleu/eth0=7",
            "--zone bleu/eth0=7: the network namespace bleu is not watched",
        ),
        (
            "blue --exclude blue/eth0",
            "--exclude blue/eth0: no interface has such a name",
        ),
    ] {
        let mut args = vec!["run", "--iface", POD, "--netns"];
        args.extend(netns.split(' '));
        let ended = lab.host.twheel_once(&args)?;
        let said = ended.stderr.trim();
        ensure!(ended.code() == Some(2), "{netns}: {ended:?}");
        ensure!(
            said.contains(wanted) && said.lines().count() == 1,
            "{netns}: {said}"
        );
    }
    // A run waits for a namespace that does not exist yet; it may be mounted later than its name is
    // created.
    let name = format!("twl-{}-later", std::process::id());
    let twheel = Twheel::start(&lab.host, &["--iface", POD, "--netns", &name])?;
    let alias = Alias::after(&lab.pods[0], name.clone(), Duration::from_millis(300))?;
    twheel.await_stderr(&format!("{name}/{POD}: attached"))?;
    drop(alias);
    twheel.await_stderr(&format!("{name}: this network namespace disappeared"))?;
    // A file that is still no namespace after a while is reported.
    let file = PathBuf::from("/run/netns").join(&name);
    File::create(&file)?;
    let said = twheel.await_stderr(&format!(
        "{name}: not watched: it is not a network namespace"
    ));
    std::fs::remove_file(&file)?;
    said?;
    stop(twheel)?;
    let loopback = lab.pods[0].name().to_owned();
    // The loopback interface of each pod has the same index.
    let both = format!("lo,{POD}");
    let twheel = Twheel::start(&lab.host, &["--iface", &both, "--netns", &loopback])?;
    twheel.await_stderr("lo: not attached: ")?;
    stop(twheel)?;
    lab.check_clean()
}
