//! Interfaces that a pattern matches are attached, and detached when they disappear.

use std::{
    collections::BTreeSet,
    fs::File,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use twheel_common::config::Watched;
use twheel_holdup::Watch;
use twheel_tests::{
    is_long,
    netns::{Namespace, PATIENCE, require_root},
    running::{Expiry, Twheel},
};

use crate::{Lab, PORT, await_links, await_that, counted, millis, stop};

#[test]
fn what_is_there_and_what_comes_is_attached_in_time() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1", "other0"])?;
    let args = ["--iface", "veth*", "--timeout", "60s", "--json"];
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.await_attached(&["veth0", "veth1"])?;
    let mut latest = Duration::ZERO;
    for number in 2..12 {
        let interface = format!("veth{number}");
        let holdup = Watch::start();
        lab.add(&interface)?;
        let since = Instant::now();
        await_links(&lab.host, &interface)?;
        let taken = since.elapsed();
        let held_up = holdup.stop();
        ensure!(
            taken <= millis(100) + held_up,
            "attached after {taken:?}, the machine held up for {held_up:?}"
        );
        latest = latest.max(taken);
    }
    println!("attached {latest:?} after they came at the latest, of 10");

    // Each interface has its own counters.
    let listener = lab.listen()?;
    for (number, interface) in [(1, "veth1"), (2, "veth2"), (11, "veth11")] {
        lab.bring_up(interface, number)?;
        for _ in 0..number {
            lab.connect(&listener, number)?;
        }
    }
    let counted = counted(&lab.host, "veth*", "created")?;
    let of = |name: &str| counted.iter().find(|it| it.0 == name).map(|it| it.1);
    ensure!(counted.len() == 12, "{counted:?}");
    ensure!(
        of("veth0") == Some(0) && of("veth1") == Some(1),
        "{counted:?}"
    );
    ensure!(
        of("veth2") == Some(2) && of("veth11") == Some(11),
        "{counted:?}"
    );
    ensure!(lab.host.attached("other0")?.is_empty());
    let stderr = stop(twheel)?;
    ensure!(!stderr.contains("other0"), "{stderr}");
    lab.check_clean(&["veth0", "veth11"])
}

#[test]
fn a_pattern_that_matches_nothing_waits() -> Result<()> {
    require_root();
    let lab = Lab::new(&["other0"])?;
    let twheel = Twheel::start(&lab.host, &["--iface", "x?", "--iface", "veth*"])?;
    let stderr = twheel.await_stderr("--iface veth*: no interface matches")?;
    ensure!(
        stderr.contains("--iface x?: no interface matches"),
        "{stderr}"
    );
    lab.add("veth0")?;
    lab.await_attached(&["veth0"])?;
    // The instance is found by either pattern, even if the pattern matches no interface any more.
    for pattern in ["x?", "veth*"] {
        let ended = lab.host.twheel_once(&["flows", "--iface", pattern])?;
        ensure!(ended.code() == Some(0), "{pattern}: {ended:?}");
    }
    stop(twheel)?;
    lab.check_clean(&["veth0"])
}

#[test]
fn lists_patterns_and_names_are_merged_and_some_left_out() -> Result<()> {
    require_root();
    let lab = Lab::new(&["a0", "a1", "b0", "b1", "c0"])?;
    let args = [
        "--iface",
        "a*,b0",
        "--iface",
        "a?",
        "--iface",
        "all",
        "--exclude",
        "b1,d*",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.await_attached(&["a0", "a1", "b0", "c0"])?;
    lab.add("d0")?;
    lab.add("e0")?;
    lab.await_attached(&["a0", "a1", "b0", "c0", "e0"])?;
    let stderr = stop(twheel)?;
    for interface in ["a0", "a1", "b0", "c0", "e0"] {
        let line = format!("{interface}: attached");
        ensure!(stderr.matches(&line).count() == 1, "{interface}: {stderr}");
    }
    for interface in ["b1", "d0", "lo"] {
        ensure!(!stderr.contains(&format!("{interface}: ")), "{stderr}");
    }
    lab.check_clean(&["a0", "b1", "e0", "lo"])?;

    // A list that has no patterns is a list of names.
    let twheel = Twheel::start(&lab.host, &["--iface", "a0,b0"])?;
    lab.await_attached(&["a0", "b0"])?;
    lab.add("a2")?;
    lab.remove("b0")?;
    twheel.await_stderr("b0: disappeared:")?;
    lab.await_attached(&["a0"])?;
    stop(twheel)?;
    lab.check_clean(&["a0"])
}

#[test]
fn what_vanishes_is_let_go_of_and_what_is_renamed_is_not() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1", "other0"])?;
    let listener = lab.listen()?;
    let args = ["--iface", "veth*", "--timeout", "1s", "--json"];
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.await_attached(&["veth0", "veth1"])?;
    lab.bring_up("veth1", 1)?;
    let name = lab.connect(&listener, 1)?;
    lab.remove("veth1")?;
    lab.await_attached(&["veth0"])?;
    let watched = watched(&lab.host)?;
    ensure!(watched == 1, "{watched} interfaces are watched");
    // Its flow ends after its timeout.
    let expiries = twheel.ends_within(millis(2500), 1)?;
    ensure!(
        expiries.len() == 1 && expiries[0].src == name,
        "{expiries:?}"
    );

    // A new interface of the same name continues its counters.
    lab.add("veth1")?;
    lab.await_attached(&["veth0", "veth1"])?;
    lab.bring_up("veth1", 1)?;
    lab.connect(&listener, 1)?;
    let counted = counted(&lab.host, "veth1", "created")?;
    let wanted = [("veth0".to_owned(), 0), ("veth1".to_owned(), 2)];
    ensure!(counted == wanted, "{counted:?}");

    // An interface that no longer matches stays attached; one that matches now is attached.
    for (interface, name) in [("veth0", "mine0"), ("other0", "veth9")] {
        lab.host.ip(&format!("link set {interface} name {name}"))?;
    }
    twheel.await_stderr("veth0: renamed to mine0: still watched")?;
    lab.await_attached(&["veth0", "veth1", "veth9"])?;
    ensure!(lab.host.attached("mine0")? == ["xdp", "egress"]);
    // A new interface takes its old name.
    lab.host.ip("link add veth0 type veth peer name peer0")?;
    twheel.await_stderr("detached from the old one, now called mine0")?;
    lab.host.await_attached("mine0", &[])?;
    lab.host.await_attached("veth0", &["xdp", "egress"])?;
    stop(twheel)?;
    lab.check_clean(&["veth0", "veth1", "veth9", "mine0"])
}

/// An interface that has lost its name to another is attached by its new name, if a pattern matches
/// that.
#[test]
fn what_has_lost_its_name_is_attached_by_its_new_one() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "other0"])?;
    let twheel = Twheel::start(&lab.host, &["--iface", "veth*"])?;
    lab.await_attached(&["veth0"])?;
    for (interface, name) in [("veth0", "veth7"), ("other0", "veth0")] {
        lab.host.ip(&format!("link set {interface} name {name}"))?;
    }
    twheel.await_stderr("detached from the old one, now called veth7")?;
    lab.await_attached(&["veth0", "veth7"])?;
    for interface in ["veth0", "veth7"] {
        lab.host.await_attached(interface, &["xdp", "egress"])?;
    }
    stop(twheel)?;
    lab.check_clean(&["veth0", "veth7"])
}

/// How many interfaces the programs are told of.
fn watched(host: &Namespace) -> Result<usize> {
    let instance = host.instances()?.pop().context("no instance")?;
    let map = MapData::from_pin(instance.join("WATCHED"))?;
    let watched = HashMap::<_, u32, Watched>::try_from(Map::HashMap(map))?;
    Ok(watched.keys().filter_map(Result::ok).count())
}

#[test]
fn what_cannot_be_attached_is_said_once() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0"])?;
    let host = &lab.host;
    let can = host.tun("can0", Some(280))?;
    let twheel = Twheel::start(host, &["--iface", "all"])?;
    lab.await_attached(&["veth0"])?;
    let more: File = host.tun("can1", None)?;
    // The new interface is attached before its type changes, and then disappears.
    drop(more);
    for mtu in [1400, 1300] {
        host.ip(&format!("link set can0 mtu {mtu}"))?;
        host.ip(&format!("link set veth0 mtu {mtu}"))?;
        twheel.await_stderr(&format!("veth0: MTU changed to {mtu}:"))?;
    }
    let stderr = twheel.stderr();
    let line = "can0: not attached: can0 has type Can (280), which twheel does not support";
    ensure!(stderr.matches(line).count() == 1, "{stderr}");
    drop(can);
    stop(twheel)?;
    lab.check_clean(&["veth0"])
}

#[test]
fn when_there_is_no_more_room_the_others_go_on() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0"])?;
    // A run with names has capacity for 16 interfaces, and so has a run that adopts it.
    stop(Twheel::start(
        &lab.host,
        &["--iface", "veth0", "--zone", "veth0=7", "--keep"],
    )?)?;
    for number in 1..20 {
        lab.add(&format!("veth{number}"))?;
    }
    let twheel = Twheel::start(&lab.host, &["--iface", "veth*"])?;
    let stderr = twheel.await_stderr("this run has reached its capacity of 16 interfaces")?;
    await_that(|| Ok((lab.attached()?.len() == 16, stderr.clone())))?;
    // One disappears, and another is attached in its place.
    lab.remove("veth3")?;
    twheel.await_stderr("veth3: disappeared:")?;
    await_that(|| {
        let attached = lab.attached()?;
        let is_so = attached.len() == 16 && !attached.contains("veth3");
        Ok((is_so, format!("{attached:?}")))
    })?;
    let stderr = stop(twheel)?;
    ensure!(stderr.matches("its capacity of").count() == 1, "{stderr}");
    ensure!(stderr.matches(": attached").count() == 17, "{stderr}");
    lab.check_clean(&["veth0", "veth19"])
}

/// Almost as many interfaces as the capacity allows, all at once: in one table, each with its own
/// counters.
#[test]
fn many_interfaces_are_watched_at_once() -> Result<()> {
    require_root();
    let interfaces: usize = if is_long() { 1000 } else { 100 };
    let lab = Lab::new(&[])?;
    let commands: String = (0..interfaces)
        .map(|number| format!("link add many{number} type veth peer name other{number}\n"))
        .collect();
    lab.host.batch(&commands)?;
    let begin = Instant::now();
    let twheel = Twheel::start(&lab.host, &["--iface", "many*", "--timeout", "3s"])?;
    await_that(|| {
        let said = twheel.stderr().matches(": attached").count();
        Ok((said == interfaces, format!("{said} are attached")))
    })?;
    println!(
        "{interfaces} interfaces are attached in {:?}",
        begin.elapsed()
    );
    let stats = lab.host.twheel_once(&["stats", "--json"])?;
    ensure!(stats.code() == Some(0), "{stats:?}");
    let one = stats
        .lines
        .iter()
        .find(|it| it.text.contains("\"touched\""));
    let one: serde_json::Value = serde_json::from_str(&one.context("no counter")?.text)?;
    let named = one["interfaces"].as_object().context("no interfaces")?;
    ensure!(named.len() == interfaces, "{} have counters", named.len());
    stop(twheel)?;
    lab.check_clean(&["many0"])
}

#[test]
fn pods_come_and_go_under_traffic_and_nothing_is_left() -> Result<()> {
    require_root();
    let pods: u32 = if is_long() { 1000 } else { 60 };
    /// Pods that exist at a time.
    const ALIVE: usize = 8;
    const TIMEOUT: Duration = Duration::from_secs(3);
    let lab = Lab::new(&[])?;
    let listener = lab.listen()?;
    let args = ["--iface", "pod*", "--timeout", "3s", "--json"];
    let twheel = Twheel::start(&lab.host, &args)?;
    let objects = lab.host.pins()?;
    let begin = Instant::now();
    let (mut alive, mut wanted) = (Vec::new(), BTreeSet::new());
    let (mut before, mut expiries) = (None, Vec::<Expiry>::new());
    let (mut latest, mut late) = (Duration::ZERO, 0);
    for number in 0..pods {
        let name = format!("pod{number}");
        lab.add(&name)?;
        let since = Instant::now();
        await_links(&lab.host, &name)?;
        let taken = since.elapsed();
        latest = latest.max(taken);
        late += u32::from(taken > millis(100));
        let subnet = u32::from(Ipv4Addr::new(10, 80, 0, 0)) + 4 * number;
        for (end, last) in [(&lab.host, 1), (&lab.elsewhere, 2)] {
            let address = Ipv4Addr::from(subnet + last);
            end.batch(&format!(
                "addr add {address}/30 dev {name}\nlink set {name} up\n"
            ))?;
        }
        let address = SocketAddr::from((Ipv4Addr::from(subnet + 1), PORT));
        let client = lab
            .elsewhere
            .enter(|| TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect"))?;
        let (server, end) = listener.accept()?;
        wanted.insert(end);
        alive.push((name, client, server));
        if alive.len() == ALIVE {
            // Its connection is still open: a pod that is killed sends no FIN.
            let pod = alive.remove(0);
            lab.remove(&pod.0)?;
        }
        expiries.extend(twheel.expiries_until(Instant::now())?);
        if number == pods / 2 {
            before = Some(twheel.held_at_rest()?);
        }
    }
    for (name, ..) in &alive {
        lab.remove(name)?;
    }
    let taken = begin.elapsed();
    lab.await_attached(&[])?;
    expiries.extend(twheel.expiries_until(Instant::now() + TIMEOUT + millis(1000))?);
    let ends: BTreeSet<_> = expiries.iter().map(|it| it.src).collect();
    let missing: Vec<_> = wanted.difference(&ends).collect();
    ensure!(
        missing.is_empty() && ends.len() == wanted.len(),
        "{missing:?}"
    );
    let mut seen = BTreeSet::new();
    let again: Vec<_> = expiries.iter().filter(|it| !seen.insert(it.src)).collect();
    ensure!(
        again.is_empty(),
        "{} ends are reported twice: {again:?}",
        again.len()
    );
    ensure!(expiries.iter().all(|it| it.idle >= TIMEOUT), "{expiries:?}");

    let before = before.context("the numbers were not read before")?;
    let after = twheel.held_at_rest()?;
    println!(
        "{pods} pods in {taken:?}: attached within {latest:?}, {late} of them later than 100 ms; resident {} KiB, then {} KiB",
        before[0], after[0]
    );
    ensure!(
        !is_long() || taken <= Duration::from_secs(60) && late == 0,
        "{pods} pods took {taken:?}, {late} were attached late"
    );
    ensure!(
        after[0] <= before[0] + 2048,
        "memory grows: {before:?}, {after:?}"
    );
    ensure!(
        after[1..] == before[1..],
        "threads or files: {before:?}, {after:?}"
    );
    ensure!(watched(&lab.host)? == 0);
    ensure!(lab.host.pins()? == objects, "pins are left");
    let stderr = stop(twheel)?;
    let ended = format!("{pods} flows ended, 0 live");
    ensure!(stderr.contains(&ended), "{stderr}");
    lab.host.check_clean("lo")
}
