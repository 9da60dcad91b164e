//! What commands report of several interfaces, and what is refused.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    running::Twheel,
};

use crate::{Lab, stop};

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
        // A run finds what is left, adopts it, and removes it where the interface is gone.
        lab.remove("veth1")?;
        let twheel = Twheel::start(&lab.host, &args)?;
        lab.await_attached(&["veth0", "eth.7"])?;
        ensure!(
            twheel
                .await_stderr("veth0: attached, adopted")?
                .contains("eth.7: attached, adopted")
        );
        ensure!(twheel.kill()?.signal() == Some(9));
        // This pattern does not cover the whole instance.
        let ended = lab.host.twheel_once(&["run", "--iface", "veth*"])?;
        ensure!(
            ended.code() == Some(6) && ended.stderr.contains("also has eth.7"),
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
    // Also if they exist at the start.
    let twheel = Twheel::start(&lab.host, &["--iface", "all"])?;
    twheel.await_stderr("seen twice")?;
    stop(twheel)?;
    // Without a pattern, the user wanted it so.
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
        (&["--iface", "veth\n*"], 2, "no interface has such a name"),
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
        (&zones.concat(), 2, "is too many: a run has a capacity of"),
        (
            &["--iface", "veth*,nothing0"],
            5,
            "there is no interface nothing0",
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
        // With few interfaces, these are the rows of the table above, of what the kernel has passed.
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
    twheel.line(PATIENCE)?.context("no flow expires")?;
    stop(twheel)?;
    // The interface need not exist any more.
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
