//! Interfaces by pattern: those that are there, those that come and those that go.
//!
//! With `TWHEEL_SOAK` set, a thousand of them come and go.

use std::{
    collections::BTreeSet,
    fs::File,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use twheel_common::config::Watched;
use twheel_holdup::Watch;
use twheel_tests::{
    directory::Directory,
    is_soak,
    netns::{Expiry, Namespace, PATIENCE, Twheel, require_root},
};

const PORT: u16 = 7878;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// Hosts with interfaces whose other ends are elsewhere.
struct Lab {
    host: Namespace,
    elsewhere: Namespace,
}

impl Lab {
    fn new(interfaces: &[&str]) -> Result<Self> {
        let lab = Self {
            host: Namespace::new("host")?,
            elsewhere: Namespace::new("else")?,
        };
        for interface in interfaces {
            lab.add(interface)?;
        }
        Ok(lab)
    }

    fn add(&self, interface: &str) -> Result<()> {
        let elsewhere = self.elsewhere.name();
        let peer = format!("type veth peer name {interface} netns {elsewhere}");
        self.host.ip(&format!("link add {interface} {peer}"))?;
        Ok(())
    }

    fn remove(&self, interface: &str) -> Result<()> {
        self.host.ip(&format!("link del {interface}"))?;
        Ok(())
    }

    /// Addresses at both ends, by a number of this interface's own.
    fn bring_up(&self, interface: &str, number: u8) -> Result<()> {
        for (end, last) in [(&self.host, 1), (&self.elsewhere, 2)] {
            let address = Ipv4Addr::new(10, 79, number, last);
            end.add_address(address.into(), 24, interface)?;
            end.ip(&format!("link set {interface} up"))?;
        }
        Ok(())
    }

    /// Connects from the other end, and says something. Returns the end of the client.
    fn connect(&self, listener: &TcpListener, number: u8) -> Result<SocketAddr> {
        let address = SocketAddr::from(([10, 79, number, 1], PORT));
        let client = self
            .elsewhere
            .enter(|| TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect"))?;
        let (_server, name) = listener.accept()?;
        drop(client);
        Ok(name)
    }

    fn listen(&self) -> Result<TcpListener> {
        self.host
            .enter(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("cannot listen"))
    }

    /// The interfaces that have links or filters.
    fn attached(&self) -> Result<BTreeSet<String>> {
        attached(&self.host)
    }

    fn await_attached(&self, wanted: &[&str]) -> Result<()> {
        let wanted: BTreeSet<_> = wanted.iter().map(|it| (*it).to_owned()).collect();
        await_that(|| {
            let attached = self.attached()?;
            Ok((attached == wanted, format!("{attached:?}, not {wanted:?}")))
        })
    }

    fn check_clean(&self, interfaces: &[&str]) -> Result<()> {
        for interface in interfaces {
            self.host.check_clean(interface)?;
        }
        Ok(())
    }
}

fn attached(host: &Namespace) -> Result<BTreeSet<String>> {
    let pins = host.pins()?;
    let names = pins.iter().filter_map(|pin| pin.file_name()?.to_str());
    let links = names.filter_map(|name| name.split_once('@'));
    Ok(links.map(|(_, name)| name.replace("%2E", ".")).collect())
}

/// Waits until it is so.
fn await_that(is_so: impl Fn() -> Result<(bool, String)>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let (is, what) = is_so()?;
        if is {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{what}");
        thread::sleep(millis(5));
    }
}

fn stop(twheel: Twheel) -> Result<String> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.stderr)
}

/// A counter of each interface.
fn counted(host: &Namespace, iface: &str, counter: &str) -> Result<Vec<(String, u64)>> {
    let ended = host.twheel_once(&["stats", "--json", "--iface", iface])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    for line in &ended.lines {
        let value: serde_json::Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            let interfaces = value["interfaces"].as_object().context("no interfaces")?;
            let number = |value: &serde_json::Value| value.as_u64().unwrap_or_default();
            return Ok(interfaces
                .iter()
                .map(|(name, value)| (name.clone(), number(value)))
                .collect());
        }
    }
    anyhow::bail!("no {counter}")
}

/// When all links of an interface are pinned.
fn await_links(host: &Namespace, interface: &str) -> Result<()> {
    let instance = host.instances()?.pop().context("no instance")?;
    let end = Instant::now() + PATIENCE;
    for hook in ["egress", "xdp"] {
        let pin = instance.join(format!("{hook}@{interface}"));
        while !pin.exists() {
            ensure!(Instant::now() < end, "no {}", pin.display());
            thread::sleep(millis(1));
        }
    }
    Ok(())
}

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

    // Each has counters of its own.
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
    // By either, also if nothing matches.
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

    // A list of names alone is one of names.
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
    // Its flow ends when its time is over.
    let expiries = twheel.expiries_until(Instant::now() + millis(2500))?;
    ensure!(
        expiries.len() == 1 && expiries[0].src == name,
        "{expiries:?}"
    );

    // Another of its name counts on.
    lab.add("veth1")?;
    lab.await_attached(&["veth0", "veth1"])?;
    lab.bring_up("veth1", 1)?;
    lab.connect(&listener, 1)?;
    let counted = counted(&lab.host, "veth1", "created")?;
    let wanted = [("veth0".to_owned(), 0), ("veth1".to_owned(), 2)];
    ensure!(counted == wanted, "{counted:?}");

    // One that no longer matches stays; one that matches now comes.
    for (interface, name) in [("veth0", "mine0"), ("other0", "veth9")] {
        lab.host.ip(&format!("link set {interface} name {name}"))?;
    }
    twheel.await_stderr("veth0: renamed to mine0: still watched")?;
    lab.await_attached(&["veth0", "veth1", "veth9"])?;
    ensure!(lab.host.attached("mine0")? == ["xdp", "egress"]);
    // Its old name comes again.
    lab.host.ip("link add veth0 type veth peer name peer0")?;
    twheel.await_stderr("detached from the old one, now called mine0")?;
    lab.host.await_attached("mine0", &[])?;
    lab.host.await_attached("veth0", &["xdp", "egress"])?;
    stop(twheel)?;
    lab.check_clean(&["veth0", "veth1", "veth9", "mine0"])
}

/// Interfaces that programs are told of.
fn watched(host: &Namespace) -> Result<usize> {
    let instance = host.instances()?.pop().context("no instance")?;
    let map = MapData::from_pin(instance.join("WATCHED"))?;
    let watched = HashMap::<_, u32, Watched>::try_from(Map::HashMap(map))?;
    Ok(watched.keys().filter_map(Result::ok).count())
}

#[test]
fn an_instance_is_found_by_its_pattern_and_its_interfaces() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1", "eth.7"])?;
    for (hook, egress) in [("xdp", "tcx"), ("tcx", "tcx"), ("clsact", "clsact")] {
        let args = ["--hook", hook, "--egress", egress, "--keep"];
        let args = [&["--iface", "[ev]*", "--iface", "eth.7"], &args[..]].concat();
        let twheel = Twheel::start(&lab.host, &args)?;
        lab.await_attached(&["veth0", "veth1", "eth.7"])?;
        let instances = lab.host.instances()?;
        ensure!(
            instances.len() == 1
                && instances[0].ends_with(format!("{}-%5Bev%5D%2A", lab.host.inode()?)),
            "{instances:?}"
        );
        let look = |iface: &str, code| -> Result<()> {
            let ended = lab
                .host
                .twheel_once(&["flows", "--json", "--iface", iface])?;
            ensure!(ended.code() == Some(code), "{hook} {iface}: {ended:?}");
            Ok(())
        };
        for iface in ["veth0", "veth1", "eth.7", "[ev]*", "veth*"] {
            look(iface, 0)?;
        }
        look("nothing0", 6)?;
        look("x*", 6)?;
        stop(twheel)?;
        // What is left is found, adopted, and let go of where it is gone.
        lab.remove("veth1")?;
        let twheel = Twheel::start(&lab.host, &args)?;
        lab.await_attached(&["veth0", "eth.7"])?;
        ensure!(
            twheel
                .await_stderr("veth0: attached, adopted")?
                .contains("eth.7: attached, adopted")
        );
        ensure!(twheel.kill()?.signal() == Some(9));
        // Not all of it is asked for.
        let ended = lab.host.twheel_once(&["run", "--iface", "veth*"])?;
        ensure!(
            ended.code() == Some(6) && ended.stderr.contains("holds eth.7 as well"),
            "{ended:?}"
        );
        let ended = lab.host.twheel_once(&["detach", "--iface", "veth*"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        lab.await_attached(&["eth.7"])?;
        let ended = lab.host.twheel_once(&["detach", "--iface", "[ev]*"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        lab.check_clean(&["veth0", "eth.7"])?;
        let ended = lab.host.twheel_once(&["detach", "--iface", "[ev]*"])?;
        ensure!(ended.code() == Some(6), "{ended:?}");
        lab.add("veth1")?;
    }
    Ok(())
}

#[test]
fn a_pattern_gives_a_zone() -> Result<()> {
    require_root();
    let lab = Lab::new(&["vrf0", "vrf1", "veth0"])?;
    let listener = lab.listen()?;
    let zones = ["--zone", "vrf1=9", "--zone", "vrf*=7"];
    let args = [&["--iface", "v*"], &zones[..]].concat();
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.await_attached(&["vrf0", "vrf1", "veth0"])?;
    lab.add("vrf2")?;
    lab.await_attached(&["vrf0", "vrf1", "vrf2", "veth0"])?;
    let mut wanted = BTreeSet::new();
    for (number, interface, zone) in [
        (1, "vrf0", 7),
        (2, "vrf1", 9),
        (3, "vrf2", 7),
        (4, "veth0", 0),
    ] {
        lab.bring_up(interface, number)?;
        wanted.insert((lab.connect(&listener, number)?.to_string(), zone));
    }
    let ended = lab.host.twheel_once(&["flows", "--json"])?;
    let flows = ended.lines.iter().map(|line| {
        let value: serde_json::Value = serde_json::from_str(&line.text)?;
        let src = value["src"].as_str().context("no src")?;
        let end = format!("{src}:{}", value["sport"]);
        Ok((end, value["zone"].as_u64().unwrap_or_default()))
    });
    let flows = flows.collect::<Result<BTreeSet<_>>>()?;
    ensure!(flows == wanted, "{flows:?}, not {wanted:?}");
    stop(twheel)?;
    lab.check_clean(&["vrf0"])
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
    // It is attached before it is of another type, and then goes.
    drop(more);
    for mtu in [1400, 1300] {
        host.ip(&format!("link set can0 mtu {mtu}"))?;
        host.ip(&format!("link set veth0 mtu {mtu}"))?;
        twheel.await_stderr(&format!("veth0: MTU changed to {mtu}:"))?;
    }
    let stderr = twheel.stderr();
    let line = "can0: not attached: can0 is of type Can (280), which twheel does not read";
    ensure!(stderr.matches(line).count() == 1, "{stderr}");
    drop(can);
    stop(twheel)?;
    lab.check_clean(&["veth0"])
}

#[test]
fn when_there_is_no_more_room_the_others_go_on() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0"])?;
    // A run by names has room for 16, and so has who adopts it.
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
    // One goes, and another is attached for it.
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

#[test]
fn a_bridge_and_its_ports_are_said_to_see_packets_twice() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1"])?;
    lab.host.ip("link add br0 type bridge")?;
    let twheel = Twheel::start(&lab.host, &["--iface", "all"])?;
    lab.await_attached(&["veth0", "veth1", "br0"])?;
    ensure!(!twheel.stderr().contains("seen twice"));
    for port in ["veth0", "veth1"] {
        lab.host.ip(&format!("link set {port} master br0"))?;
    }
    twheel.await_stderr(
        "br0 is on top of veth0, and both are watched: the same packets are seen twice",
    )?;
    let stderr = stop(twheel)?;
    ensure!(stderr.matches("seen twice").count() == 1, "{stderr}");
    // As they are at the start.
    let twheel = Twheel::start(&lab.host, &["--iface", "all"])?;
    twheel.await_stderr("seen twice")?;
    stop(twheel)?;
    // Without a pattern they were wanted so.
    let twheel = Twheel::start(&lab.host, &["--iface", "br0,veth0"])?;
    lab.await_attached(&["veth0", "br0"])?;
    let stderr = stop(twheel)?;
    ensure!(!stderr.contains("seen twice"), "{stderr}");
    lab.check_clean(&["veth0", "br0"])
}

#[test]
fn what_makes_no_sense_is_refused_in_a_sentence() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0"])?;
    let zones: Vec<_> = (1..=300)
        .map(|it| format!("--zone=veth{it}={it}"))
        .collect();
    let zones = [
        &["--iface", "veth*"],
        &zones.iter().map(String::as_str).collect::<Vec<_>>()[..],
    ];
    for (args, code, words) in [
        (&["--iface", "veth["][..], 2, "--iface veth["),
        (&["--iface", "veth0,,veth1"], 2, "empty name"),
        (&["--iface", "veth*/x"], 2, "no interface has such a name"),
        (&["--iface", "veth*\n"], 2, "no interface has such a name"),
        (&["--iface", &"?".repeat(65)], 2, "at most 64 characters"),
        (&["--iface", "veth*", "--exclude", "["], 2, "--exclude ["),
        (
            &["--iface", "veth0", "--exclude", "v*"],
            2,
            "leaves nothing of --iface veth0",
        ),
        (
            &["--iface", "all", "--exclude", "all"],
            2,
            "leaves nothing of --iface all",
        ),
        (
            &["--iface", "veth*", "--zone", "vrf*=7"],
            2,
            "vrf* is not watched",
        ),
        (
            &["--iface", "veth*", "--zone", "eth0=7"],
            2,
            "eth0 is not watched",
        ),
        (
            &["--iface", "veth*", "--zone", "veth[=7"],
            2,
            "--zone veth[",
        ),
        (
            &["--iface", "veth*", "--zone", "v*=7", "--zone", "v*=8"],
            2,
            "already has a zone",
        ),
        (&zones.concat(), 2, "one zone too many"),
        (
            &["--iface", "veth*,nothing0"],
            5,
            "no interface nothing0 here",
        ),
    ] {
        let ended = lab.host.twheel_once(&[&["run"], args].concat())?;
        ensure!(ended.code() == Some(code), "{args:?}: {ended:?}");
        ensure!(ended.stderr.contains(words), "{args:?}: {ended:?}");
        ensure!(ended.stderr.lines().count() == 1, "{args:?}: {ended:?}");
        lab.check_clean(&["veth0"])?;
    }
    Ok(())
}

#[test]
fn doctor_looks_at_what_a_pattern_matches() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1", "other0"])?;
    let args = ["doctor", "--json", "--iface", "veth*", "--exclude", "veth0"];
    let ended = lab.host.twheel_once(&args)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    let mut interfaces = BTreeSet::new();
    for line in &ended.lines {
        let value: serde_json::Value = serde_json::from_str(&line.text)?;
        interfaces.extend(value["interface"].as_str().map(str::to_owned));
    }
    ensure!(
        interfaces == BTreeSet::from(["veth1".to_owned()]),
        "{ended:?}"
    );
    lab.check_clean(&["veth1"])
}

#[test]
fn many_interfaces_have_a_row_each_and_few_a_column() -> Result<()> {
    require_root();
    let names: Vec<_> = (0..7).map(|number| format!("veth{number}")).collect();
    let lab = Lab::new(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
    for (few, args) in [
        (true, ["--iface", "veth[0-5]"]),
        (false, ["--iface", "veth*"]),
    ] {
        let twheel = Twheel::start(&lab.host, &args)?;
        twheel.await_stderr("veth5: attached")?;
        if !few {
            twheel.await_stderr("veth6: attached")?;
        }
        let ended = lab.host.twheel_once(&["stats"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let lines: Vec<_> = ended.lines.iter().map(|it| it.text.as_str()).collect();
        let heads = |word: &str| lines.iter().any(|it| it.starts_with(word));
        let has_column = lines
            .iter()
            .any(|it| it.starts_with("COUNTER") && it.contains("veth5"));
        ensure!(
            has_column == few && heads("INTERFACE ") != few,
            "{lines:#?}"
        );
        let rows = lines.iter().filter(|it| it.starts_with("veth")).count();
        // Few have what the kernel has passed, above.
        ensure!(rows == if few { 6 } else { 7 }, "{lines:#?}");
        stop(twheel)?;
    }
    Ok(())
}

#[test]
fn the_history_of_a_run_that_is_over_is_found_by_its_pattern_and_its_interfaces() -> Result<()> {
    require_root();
    let lab = Lab::new(&["veth0", "veth1"])?;
    lab.bring_up("veth1", 1)?;
    let history = Directory::new("patterns")?;
    let path = history.path();
    let args = [
        "--iface",
        "veth*",
        "--timeout",
        "1s",
        "--history",
        path,
        "--json",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    // With all of its programs.
    twheel.await_stderr("veth1: attached")?;
    let name = lab.connect(&lab.listen()?, 1)?;
    twheel.line(PATIENCE)?.context("nothing expires")?;
    stop(twheel)?;
    // It need not be there any more.
    lab.remove("veth1")?;
    for (iface, found) in [("veth1", 1), ("veth*", 1), ("other0", 0)] {
        let args = ["expired", "--json", "--history", path, "--iface", iface];
        let ended = lab.host.twheel_once(&args)?;
        ensure!(ended.lines.len() == found, "{iface}: {ended:?}");
        for line in &ended.lines {
            ensure!(line.expiry()?.src == name, "{iface}: {ended:?}");
        }
    }
    Ok(())
}

/// As many as the room is for, but for a few, all there at once: in one table, each with counters of its own.
#[test]
fn many_interfaces_are_watched_at_once() -> Result<()> {
    require_root();
    let interfaces: usize = if is_soak() { 1000 } else { 100 };
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
    let pods: u32 = if is_soak() { 1000 } else { 60 };
    /// At a time.
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
            // Its connection is open: of a pod that is killed comes no FIN.
            let pod = alive.remove(0);
            lab.remove(&pod.0)?;
        }
        expiries.extend(twheel.expiries_until(Instant::now())?);
        if number == pods / 2 {
            before = Some(twheel.held()?);
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

    let before = before.context("nobody looked")?;
    let after = twheel.held()?;
    println!(
        "{pods} pods in {taken:?}: attached within {latest:?}, {late} of them later than 100 ms; resident {} KiB, then {} KiB",
        before[0], after[0]
    );
    ensure!(
        !is_soak() || taken <= Duration::from_secs(60) && late == 0,
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
