//! The findings of `twheel doctor`.

use std::{fs, net::TcpListener, os::unix::process::CommandExt, path::PathBuf, process};

use anyhow::{Context, Result, ensure};
use nix::unistd::{Gid, Uid, setresgid, setresuid};
use serde_json::Value;
use twheel::failure::Kind;
use twheel_tests::{
    netns::{Namespace, PINS, remove_pins, require_root},
    pair::SERVER,
    running::{Twheel, once, twheel_bin},
    tc::tc,
};

use crate::{check, examine, findings, host};

#[test]
fn a_host_as_it_should_be() -> Result<()> {
    let host = host()?;
    let (found, code) = examine(&host, &[])?;
    ensure!(code == Some(0), "{code:?}: {found:#?}");
    for (name, what) in [
        ("kernel", "."),
        ("capabilities", "may load"),
        ("bpffs", "/sys/fs/bpf"),
        ("programs", "accepts"),
        // A network namespace does not show the setting.
        ("JIT", "on: the programs load"),
        ("egress", "TCX: outgoing"),
        ("clock", "--tick"),
    ] {
        check(&found, name, "ok", what, None)?;
    }
    // Both ends of the pair, but not the loopback interface.
    let of = |name: &str| found.iter().filter(|it| it["check"] == name).count();
    ensure!(of("driver") == 2 && of("XDP") == 2, "{found:#?}");
    let (found, _) = examine(&host, &["--iface", SERVER])?;
    check(&found, "driver", "ok", "veth: native XDP", None)?;
    check(&found, "XDP", "ok", "no program", None)?;
    check(&found, "TCX", "ok", "incoming: none", None)?;
    check(&found, "hook", "ok", "native XDP would see", None)?;
    ensure!(host.instances()?.is_empty(), "{:?}", host.instances());
    host.check_clean(SERVER)
}

#[test]
fn twheel_itself_running_and_gone() -> Result<()> {
    let host = host()?;
    let directory = format!("-{SERVER}:");
    for (mode, args) in [
        ("native", &["--keep"][..]),
        ("generic", &["--mode", "generic"]),
    ] {
        let twheel = Twheel::start(&host, &[&["--iface", SERVER], args].concat())?;
        let found = refused(&host, &["--iface", SERVER])?;
        check(&found, "instance", "fail", "second run", Some("stop"))?;
        check(&found, "XDP", "ok", "twheel's own: twheel_xdp (id", None)?;
        check(&found, "XDP", "ok", mode, None)?;
        check(&found, "pins", "ok", "twheel is running on server0", None)?;
        // The run that it has examined continues undisturbed.
        let ended = twheel.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        if mode == "native" {
            let (found, code) = examine(&host, &["--iface", SERVER])?;
            ensure!(code == Some(0), "{code:?}: {found:#?}");
            let detach = format!("`twheel detach --iface {SERVER}`");
            check(
                &found,
                "pins",
                "warn",
                &format!("{directory} flows on"),
                Some(&detach),
            )?;
            let there = Namespace::new("elsewhere")?;
            let (found, _) = examine(&there, &[])?;
            let path = host.instances()?.pop().context("the run left no pins")?;
            let kept = format!("{}: kept in another network namespace", path.display());
            check(&found, "pins", "warn", &kept, Some(&detach))?;
            host.ip(&format!("link del {SERVER}"))?;
            let (found, _) = examine(&host, &[])?;
            check(
                &found,
                "pins",
                "warn",
                "not all of which exist any more",
                Some(&detach),
            )?;
            host.twheel_once(&["detach", "--iface", SERVER])?;
            host.ip(&format!("link add {SERVER} type veth peer name other"))?;
        }
    }
    host.check_clean(SERVER)
}

/// Pins that were renamed; removed when dropped.
struct Moved(PathBuf);

impl Moved {
    fn new(host: &Namespace, to: PathBuf) -> Result<Self> {
        let args = ["--iface", SERVER, "--keep", "--egress", "off"];
        let ended = Twheel::start(host, &args)?.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let from = host.instances()?.pop().context("the run left no pins")?;
        let to = match to.is_absolute() {
            true => to,
            false => PathBuf::from(PINS)
                .join(to)
                .join(from.file_name().context("no name")?),
        };
        fs::create_dir_all(to.parent().context("no directory")?)?;
        fs::rename(from, &to)?;
        Ok(Self(to))
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        remove_pins(&self.0);
    }
}

#[test]
fn the_xdp_program_of_somebody_else() -> Result<()> {
    let host = host()?;
    // Pinned in another place, it is no instance of twheel's.
    let elsewhere = format!("/sys/fs/bpf/twl-{}-doctor/v0/pins", process::id());
    let foreign = Moved::new(&host, elsewhere.into())?;
    let whose = "another program is attached: twheel_xdp (id";
    let found = refused(&host, &["--iface", SERVER, "--hook", "xdp"])?;
    check(&found, "XDP", "fail", whose, Some("xdp off"))?;
    let (found, code) = examine(&host, &["--iface", SERVER])?;
    ensure!(code == Some(0), "{code:?}: {found:#?}");
    check(&found, "XDP", "ok", whose, None)?;
    let why = "TCX would see incoming packets: XDP is taken: twheel_xdp (id";
    check(&found, "hook", "ok", why, None)?;
    drop(foreign);
    host.check_clean(SERVER)
}

#[test]
fn pins_of_another_version() -> Result<()> {
    let host = host()?;
    let _old = Moved::new(&host, "v0".into())?;
    let (found, code) = examine(&host, &["--iface", SERVER])?;
    ensure!(
        code == Some(Kind::Unsupported as i32),
        "{code:?}: {found:#?}"
    );
    let detach = format!("`twheel detach --iface {SERVER}`");
    check(&found, "pins", "fail", "another version", Some(&detach))?;
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    let (_, code) = examine(&host, &["--iface", SERVER])?;
    ensure!(code == Some(0), "{code:?}");
    host.check_clean(SERVER)
}

/// Checks that `doctor` reports a failure and that a run with the same arguments fails. Returns the
/// findings.
fn refused(host: &Namespace, args: &[&str]) -> Result<Vec<Value>> {
    let (found, code) = examine(host, args)?;
    ensure!(
        code == Some(Kind::Unsupported as i32),
        "{args:?}: {code:?}: {found:#?}"
    );
    let ended = host.twheel_once(&[&["run"], args].concat())?;
    ensure!(
        !matches!(ended.code(), Some(0) | None),
        "{args:?}: {ended:?}"
    );
    Ok(found)
}

#[test]
fn what_a_run_refuses_is_said_before() -> Result<()> {
    let host = host()?;
    let iface = ["--iface", SERVER];
    let with = |more: &[&'static str]| [&iface[..], more].concat();

    let found = refused(&host, &["--iface", "lo", "--mode", "native"])?;
    check(
        &found,
        "driver",
        "fail",
        "no native XDP",
        Some("--hook auto"),
    )?;
    let found = refused(&host, &with(&["--group", "no-such-group"]))?;
    check(&found, "group", "fail", "no such group", Some("--group"))?;

    host.ip("link set lo up")?;
    let taken = host.enter(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let port = taken.local_addr()?.port().to_string();
    let found = refused(&host, &[&iface[..], &["--metrics", &port]].concat())?;
    check(&found, "metrics", "fail", "in use", Some("--metrics"))?;
    drop(taken);
    let (found, code) = examine(&host, &[&iface[..], &["--metrics", &port]].concat())?;
    ensure!(code == Some(0), "{found:#?}");
    check(&found, "metrics", "ok", &port, None)?;

    for qdisc in ["ingress", "egress_block 7 clsact"] {
        tc(&host, &format!("qdisc add dev {SERVER} {qdisc}"))?;
        let found = refused(&host, &with(&["--egress", "clsact"]))?;
        let words = format!("qdisc{}", if qdisc == "ingress" { ", so" } else { " of" });
        check(&found, "egress", "fail", &words, Some("--egress off"))?;
        // TCX needs no qdisc.
        let (found, code) = examine(&host, &iface)?;
        ensure!(code == Some(0), "{found:#?}");
        let kind = qdisc.rsplit(' ').next().unwrap_or_default();
        tc(&host, &format!("qdisc del dev {SERVER} {kind}"))?;
    }

    // An interface that is given twice counts once, as it does for a run.
    let (found, code) = examine(&host, &with(&iface))?;
    ensure!(code == Some(0), "{found:#?}");
    let waits = ["--iface", "later0", "--wait-iface"];
    let (found, code) = examine(&host, &waits)?;
    ensure!(code == Some(0), "{found:#?}");
    check(&found, "interface", "ok", "waits for it", None)?;
    host.check_clean(SERVER)
}

#[test]
fn pins_that_a_run_refuses() -> Result<()> {
    let host = host()?;
    let detach = format!("`twheel detach --iface {SERVER}`");
    let keep = [
        "--iface", SERVER, "--iface", "other", "--keep", "--egress", "off",
    ];
    let twheel = Twheel::start(&host, &keep)?;
    let (found, _) = examine(&host, &["--iface", SERVER])?;
    check(&found, "instance", "fail", "also has other", Some(&detach))?;
    let both = &keep[..4];
    let (found, _) = examine(&host, both)?;
    check(&found, "instance", "fail", "second run", Some("stop"))?;
    twheel.stop()?;
    let found = refused(&host, &["--iface", SERVER])?;
    check(&found, "instance", "fail", "also has other", Some(&detach))?;
    let found = refused(&host, &[both, &["--max-flows", "5000"]].concat())?;
    let words = "were made with --max-flows 131072";
    check(&found, "instance", "fail", words, Some("twheel detach"))?;
    // A run with the same options would adopt the instance.
    let (found, code) = examine(&host, both)?;
    ensure!(code == Some(0), "{found:#?}");
    host.twheel_once(&[&["detach"], both].concat())?;
    host.check_clean(SERVER)
}

/// Programs of an instance that a run with these options would not replace: under another name, and
/// above.
#[test]
fn programs_of_its_own_that_a_run_does_not_replace() -> Result<()> {
    let host = host()?;
    Twheel::start(&host, &["--iface", SERVER, "--keep", "--egress", "off"])?.stop()?;
    host.ip(&format!("link set {SERVER} name renamed0"))?;
    let found = refused(&host, &["--iface", "renamed0", "--hook", "xdp"])?;
    check(
        &found,
        "XDP",
        "fail",
        "another program is attached: twheel_xdp",
        Some("detach"),
    )?;
    host.ip(&format!("link set renamed0 name {SERVER}"))?;
    host.twheel_once(&["detach", "--iface", SERVER])?;

    host.ip("link add above0 type bridge")?;
    host.ip(&format!("link set {SERVER} master above0"))?;
    let xdp = ["--egress", "off", "--hook", "xdp", "--iface"];
    let twheel = Twheel::start(&host, &[&xdp[..], &["above0"]].concat())?;
    let found = refused(&host, &[&xdp[..], &[SERVER]].concat())?;
    check(&found, "XDP", "fail", "above0 above it", Some("detach"))?;
    let (found, code) = examine(&host, &["--iface", SERVER])?;
    ensure!(code == Some(0), "{found:#?}");
    check(
        &found,
        "hook",
        "ok",
        "TCX would see incoming packets: above0 above it",
        None,
    )?;
    twheel.stop()?;
    let (found, code) = examine(&host, &["--iface", SERVER])?;
    ensure!(code == Some(0), "{found:#?}");
    host.check_clean(SERVER)
}

/// The kernel allows control characters in names.
#[test]
fn a_name_with_control_characters() -> Result<()> {
    let host = host()?;
    let name = "bell\u{7}0";
    host.ip(&format!("link set {SERVER} name {name}"))?;
    let found = refused(&host, &["--iface", name])?;
    check(
        &found,
        "interface",
        "fail",
        "control characters",
        Some("rename it"),
    )
}

#[test]
fn pins_of_a_namespace_that_is_gone() -> Result<()> {
    require_root();
    let host = Namespace::new("doctor")?;
    // No namespace has this inode number.
    let path = PathBuf::from(PINS).join(format!("v0/1-gone{}", process::id()));
    fs::create_dir_all(&path)?;
    let result = examine(&host, &[]);
    remove_pins(&path);
    let (found, code) = result?;
    ensure!(code == Some(0), "{code:?}: {found:#?}");
    let path = path.display();
    check(
        &found,
        "pins",
        "warn",
        &format!("{path}: this user cannot see its network namespace"),
        Some(&format!("rm -r {path}")),
    )
}

#[test]
fn interfaces_that_will_not_do() -> Result<()> {
    require_root();
    let host = Namespace::new("doctor")?;
    let (found, code) = examine(&host, &["--iface", "nowhere0"])?;
    ensure!(
        code == Some(Kind::Unsupported as i32),
        "{code:?}: {found:#?}"
    );
    check(
        &found,
        "interface",
        "fail",
        "does not exist",
        Some("ip link"),
    )?;
    // 280 is the type of CAN interfaces.
    let _tun = host.tun("tun0", Some(280))?;
    for (args, status, wanted) in [
        (&[][..], "warn", 0),
        (&["--iface", "tun0"], "fail", Kind::Unsupported as i32),
    ] {
        let (found, code) = examine(&host, args)?;
        ensure!(code == Some(wanted), "{code:?}: {found:#?}");
        check(
            &found,
            "packets",
            status,
            "has type Can (280)",
            Some("Ethernet or IP header"),
        )?;
    }
    let (found, _) = examine(&host, &["--iface", "lo"])?;
    check(&found, "hook", "ok", "TCX would see", None)?;
    let (found, _) = examine(&host, &["--iface", "lo", "--hook", "xdp"])?;
    check(&found, "driver", "warn", "generic", Some("--hook auto"))
}

#[test]
fn nobody_sees_less_and_is_told() -> Result<()> {
    let host = host()?;
    let twheel = Twheel::start(&host, &["--iface", SERVER])?;
    // A directory where everybody may execute it.
    let program = std::env::temp_dir().join(format!("twl-{}-doctor", process::id()));
    fs::copy(twheel_bin()?, &program)?;
    let mut command = host.command(&program)?;
    command.args(["doctor", "--json", "--iface", SERVER]);
    // SAFETY: between fork and exec the closure makes two system calls and allocates no memory.
    unsafe {
        command.pre_exec(|| {
            let (user, group) = (Uid::from_raw(65534), Gid::from_raw(65534));
            setresgid(group, group, group)?;
            Ok(setresuid(user, user, user)?)
        });
    }
    let ended = once(command);
    fs::remove_file(&program)?;
    let ended = ended?;
    let found = findings(&ended)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    for name in ["capabilities", "programs", "egress", "JIT"] {
        check(&found, name, "warn", "", Some("root"))?;
    }
    check(&found, "XDP", "warn", "cannot see whose", Some("root"))?;
    check(
        &found,
        "pins",
        "warn",
        "cannot open the pin directory",
        Some("root"),
    )?;
    twheel.stop()?;
    host.check_clean(SERVER)
}
