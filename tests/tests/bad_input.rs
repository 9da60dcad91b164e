//! twheel refuses what it cannot do in one sentence, with the exit code for that kind of error, and
//! attaches nothing partially.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, setresgid, setresuid},
};
use twheel::failure::Kind;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PINS, remove_pins, require_root},
    pair::{Family, Pair, SERVER},
    running::{Ended, Twheel, once, twheel_bin},
};

/// Fails unless twheel has refused with this exit code, in one sentence that contains these words.
fn check_refused(ended: &Ended, kind: Kind, words: &[&str]) -> Result<()> {
    // A start that takes long reports so first.
    let lines = ended.stderr.lines();
    let lines: Vec<_> = lines
        .filter(|line| !line.starts_with("twheel: loading the programs"))
        .filter(|line| !line.starts_with("twheel: waiting for another twheel"))
        .collect();
    let stderr = &lines.join("\n");
    ensure!(
        ended.code() == Some(kind as i32),
        "wrong exit code, expected {kind:?}: {ended:?}"
    );
    ensure!(
        stderr.starts_with("twheel: "),
        "not a message of twheel: {stderr}"
    );
    ensure!(stderr.lines().count() == 1, "more than one line: {stderr}");
    for word in words {
        ensure!(stderr.contains(word), "no {word:?} in {stderr}");
    }
    ensure!(
        ended.lines.is_empty(),
        "standard output is not empty: {:?}",
        ended.lines
    );
    Ok(())
}

/// A host with the interface [`SERVER`]; there is no host at the other end.
fn host() -> Result<Namespace> {
    require_root();
    let host = Namespace::new("host")?;
    host.ip(&format!("link add {SERVER} type veth peer name other"))?;
    host.ip(&format!("link set {SERVER} up"))?;
    host.ip("link set other up")?;
    Ok(host)
}

/// Runs `twheel run --keep`, which leaves its pins. Returns their directory.
fn keep(host: &Namespace, more: &[&str]) -> Result<PathBuf> {
    let args = [&["--iface", SERVER, "--keep"], more].concat();
    let ended = Twheel::start(host, &args)?.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    host.instances()?.pop().context("the run left no pins")
}

/// Pins that were moved to a place where twheel does not look, or does not take them for its own;
/// removed when dropped.
struct Moved(PathBuf);

impl Moved {
    fn new(from: &Path, to: PathBuf) -> Result<Self> {
        let parent = to.parent().context("no directory")?;
        fs::create_dir_all(parent)?;
        fs::rename(from, &to).with_context(|| format!("cannot rename to {}", to.display()))?;
        Ok(Self(to))
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        remove_pins(&self.0);
    }
}

#[test]
fn unusable_arguments() -> Result<()> {
    let host = host()?;
    for (option, value) in [
        ("--tick", "0s"),
        ("--tick", "2h"),
        ("--tick", "61s"),
        ("--timeout", "0s"),
        ("--timeout", "1000days"),
        ("--timeout", "close=0s"),
        ("--timeout", "closed=2s"),
        ("--timeout", "soon"),
    ] {
        let ended = host.twheel_once(&["run", "--iface", SERVER, option, value])?;
        check_refused(&ended, Kind::Usage, &[option, "give"]).context(value)?;
        host.check_clean(SERVER)?;
    }
    // These are refused while the arguments are read.
    for (args, says) in [
        (&["run", "--max-flows", "0"][..], "give 1 to 67108864"),
        (&["run", "--max-flows", "1e6"], "give 1 to 67108864"),
        (&["run", "--max-flows", "-1"], "give 1 to 67108864"),
        (&["run", "--max-flows", "99999999999"], "give 1 to 67108864"),
        (&["run", "--slots", "0"], "give 2 to 4096"),
        (&["run", "--slots", "4097"], "give 2 to 4096"),
        (&["run", "--slots", "7777777777"], "give 2 to 4096"),
        (&["run", "--levels", "0"], "give 1 to 4"),
        (&["run", "--levels", "5"], "give 1 to 4"),
        (&["run", "--max-retrans", "256"], "give 1 to 255"),
        (&["run", "--reap-rate", "0"], "give 1 to 1000000"),
        (&["run", "--enforce-rate", "0"], "give 1 to 1000"),
        (&["run", "--reap-max-share", "0"], "give 1 to 100"),
        (
            &["run", "--log-level", "loud"],
            "off, error, warn, info, debug, trace",
        ),
        (&["run", "--reap", "none,reset"], "`none` stands alone"),
        (&["run", "--tick", "-5m"], "give a duration with its unit"),
        (
            &["policy", "check", "x", "--zone", "70000"],
            "give 0 to 65535",
        ),
        (&["plan", "--flows", "x"], "give 1 to 67108864"),
        (&["flows", "--limit", "x"], "give a whole number"),
        (&["expired", "--limit", "abc"], "give a whole number"),
        (&["talkers", "--limit", "-1"], "give a whole number"),
        (
            &["expired", "--since", "-5m"],
            "give a duration with its unit",
        ),
        (
            &["export", "ipfix", "--to", "a:1", "--message-size", "9"],
            "give 640 to 65000",
        ),
    ] {
        let args = match args {
            ["run", options @ ..] => [&["run", "--iface", SERVER], options].concat(),
            args => args.to_vec(),
        };
        let ended = host.twheel_once(&args)?;
        ensure!(
            ended.code() == Some(Kind::Usage as i32) && ended.stderr.contains(says),
            "{args:?}: {says}: {ended:?}"
        );
        host.check_clean(SERVER)?;
    }
    // These messages are clap's.
    for args in [
        &["run", "--iface", SERVER, "--nonsense"][..],
        &["run", "--iface", SERVER, "--tick", "soon"],
        &["run", "--iface", SERVER, "--mode", "fast"],
        &["run"],
        &["detach"],
        &["jump"],
    ] {
        let ended = host.twheel_once(args)?;
        ensure!(
            ended.code() == Some(Kind::Usage as i32),
            "{args:?}: {ended:?}"
        );
        ensure!(ended.stderr.starts_with("error: "), "{args:?}: {ended:?}");
        host.check_clean(SERVER)?;
    }
    Ok(())
}

#[test]
fn configuration_files() -> Result<()> {
    let host = host()?;
    let directory = Directory::new("config")?;
    let file = &directory.file("run.toml");
    let refused = |text: &str, more: &[&str], words: &[&str]| {
        fs::write(file, text)?;
        let ended = host.twheel_once(&[&["run", "--config", file], more].concat())?;
        check_refused(&ended, Kind::Usage, words).with_context(|| text.to_owned())?;
        host.check_clean(SERVER)
    };
    let unknown = [&format!("{file}:2:1: "), "`max_flows`", "write max-flows"];
    refused("keep = true\nmax_flows = 1\n", &[], &unknown)?;
    refused("keep = true\n", &[], &["no interface", "--iface"])?;
    let iface = format!("iface = \"{SERVER}\"\n");
    refused(&iface, &["--tick", "61s"], &["--tick", "give"])?;

    // The command line wins.
    fs::write(file, format!("{iface}tick = \"61s\"\njson = true\n"))?;
    let ended = Twheel::start(&host, &["--config", file, "--tick", "50ms"])?.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    host.check_clean(SERVER)
}

#[test]
fn unknown_interface() -> Result<()> {
    let host = host()?;
    let ended = host.twheel_once(&["run", "--iface", "nowhere0"])?;
    check_refused(&ended, Kind::Interface, &["nowhere0", "ip link"])?;
    ensure!(!ended.stderr.contains("ENODEV"), "{ended:?}");
    // A name that no interface can have is not waited for.
    for name in ["", ",", "0123456789abcdef", "a b", "a:0"] {
        let ended = host.twheel_once(&["run", "--iface", name, "--wait-iface"])?;
        check_refused(&ended, Kind::Usage, &["--iface", "name"])?;
    }
    let ended = host.twheel_once(&["run", "--iface", &format!("{SERVER}, nowhere0")])?;
    check_refused(&ended, Kind::Interface, &["no interface nowhere0:"])?;
    // If one interface cannot be attached, none is.
    let ended = host.twheel_once(&["run", "--iface", SERVER, "--iface", "nowhere0"])?;
    check_refused(&ended, Kind::Interface, &["nowhere0"])?;
    host.check_clean(SERVER)
}

#[test]
fn a_policy_is_read_before_anything_is_loaded() -> Result<()> {
    let host = host()?;
    let ended = host.twheel_once(&["run", "--iface", SERVER, "--policy", "nosuch.toml"])?;
    check_refused(&ended, Kind::Usage, &["nosuch.toml: cannot be read"])?;
    ensure!(!ended.stderr.contains("loading"), "{ended:?}");
    host.check_clean(SERVER)
}

#[test]
fn the_xdp_program_of_somebody_else() -> Result<()> {
    for mode in ["native", "generic"] {
        let host = host()?;
        // Pinned in another place, it is no instance of twheel's.
        let pins = keep(&host, &["--mode", mode, "--egress", "off"])?;
        let elsewhere = format!("/sys/fs/bpf/twl-{}-{mode}/v0/pins", process::id());
        let foreign = Moved::new(&pins, elsewhere.into())?;
        let link = || host.ip(&format!("-d link show dev {SERVER}"));
        let before = link()?;
        ensure!(before.contains("xdp"), "{before}");

        for wanted in [["--hook", "xdp"], ["--mode", mode]] {
            let ended = host.twheel_once(&[&["run", "--iface", SERVER], &wanted[..]].concat())?;
            check_refused(
                &ended,
                Kind::Interface,
                &[SERVER, "already has another XDP program", "detach"],
            )
            .with_context(|| format!("{mode}, then {wanted:?}"))?;
            ensure!(
                host.instances()?.is_empty(),
                "instances are left: {:?}",
                host.instances()
            );
            host.await_attached(SERVER, &["xdp"])?;
            ensure!(link()? == before, "the link was replaced: {}", link()?);
        }
        drop(foreign);
        host.check_clean(SERVER)?;
    }
    Ok(())
}

#[test]
fn of_two_interfaces_neither_is_attached_if_the_second_is_taken() -> Result<()> {
    let host = host()?;
    let pins = keep(&host, &["--egress", "off"])?;
    let elsewhere = format!("/sys/fs/bpf/twl-{}-second/v0/pins", process::id());
    let foreign = Moved::new(&pins, elsewhere.into())?;
    let both = ["run", "--iface", "other", "--iface", SERVER];
    let ended = host.twheel_once(&[&both[..], &["--hook", "xdp"]].concat())?;
    ensure!(ended.code() == Some(Kind::Interface as i32), "{ended:?}");
    ensure!(
        ended.stderr.contains(&format!("{SERVER} already has")),
        "{ended:?}"
    );
    host.check_clean("other")?;
    ensure!(host.attached(SERVER)? == ["xdp"]);
    drop(foreign);
    Ok(())
}

#[test]
fn no_root() -> Result<()> {
    let host = host()?;
    // A directory where everybody may execute the program.
    let directory = std::env::temp_dir().join(format!("twl-{}", process::id()));
    fs::create_dir(&directory)?;
    let program = directory.join("twheel");
    let nobody = || -> Result<()> {
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
        fs::copy(twheel_bin()?, &program)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        for args in [["run", "--iface", SERVER], ["detach", "--iface", SERVER]] {
            let mut command = host.command(&program)?;
            command.args(args);
            // SAFETY: between fork and exec the closure makes two system calls and allocates no
            // memory.
            unsafe {
                command.pre_exec(|| {
                    let (user, group) = (Uid::from_raw(65534), Gid::from_raw(65534));
                    setresgid(group, group, group)?;
                    Ok(setresuid(user, user, user)?)
                });
            }
            check_refused(&once(command)?, Kind::Permission, &["root", "CAP_BPF"])?;
        }
        Ok(())
    };
    let result = nobody();
    fs::remove_dir_all(&directory)?;
    result?;
    host.check_clean(SERVER)
}

#[test]
fn no_bpffs() -> Result<()> {
    let host = host()?;
    for args in [["run", "--iface", SERVER], ["detach", "--iface", SERVER]] {
        let mut command = host.twheel(&args)?;
        // SAFETY: between fork and exec the closure makes system calls; paths this short are copied
        // to the stack, so it allocates no memory.
        unsafe {
            command.pre_exec(|| {
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none = None::<&str>;
                mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
                // One file system may be mounted over another.
                while umount2("/sys/fs/bpf", MntFlags::MNT_DETACH).is_ok() {}
                Ok(())
            });
        }
        check_refused(&once(command)?, Kind::Unsupported, &["mount -t bpf"])?;
        host.check_clean(SERVER)?;
    }
    Ok(())
}

#[test]
fn pins_of_another_layout() -> Result<()> {
    let host = host()?;
    let pins = keep(&host, &[])?;
    let name = pins.file_name().context("no name")?;
    let old = Moved::new(&pins, Path::new(PINS).join("v0").join(name))?;
    let before = host.pins()?;
    let path = old.0.to_string_lossy();
    for more in [&[][..], &["--keep"]] {
        let args = [&["run", "--iface", SERVER], more].concat();
        let ended = host.twheel_once(&args)?;
        let remedy = format!("twheel detach --iface {SERVER}");
        check_refused(&ended, Kind::Pins, &["another version", &path, &remedy])?;
        ensure!(host.pins()? == before, "{:?}", host.pins());
        ensure!(host.attached(SERVER)? == ["xdp", "egress"]);
    }
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    host.check_clean(SERVER)
}

#[test]
fn an_interface_in_use() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let twheel = Twheel::start(host, &["--iface", SERVER, "--timeout", "300ms", "--json"])?;
    let before = host.pins()?;
    for args in [["run", "--iface", SERVER], ["detach", "--iface", SERVER]] {
        let ended = host.twheel_once(&args)?;
        check_refused(&ended, Kind::Pins, &["another twheel is using"])?;
        ensure!(host.pins()? == before, "{:?}", host.pins());
    }
    // The first run is undisturbed.
    let connection = pair.connect(Family::V4)?;
    let line = twheel.line(std::time::Duration::from_secs(2))?;
    ensure!(line.context("no expiry")?.expiry()?.src == connection.name);
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    host.check_clean(SERVER)
}

#[test]
fn pins_made_with_other_settings() -> Result<()> {
    let host = host()?;
    let made = ["--max-flows", "1000", "--tick", "100ms"];
    keep(&host, &made)?;
    let before = host.pins()?;
    for other in [
        ["--max-flows", "1001", "--tick", "100ms"],
        ["--max-flows", "1000", "--tick", "200ms"],
    ] {
        for keep in [&[][..], &["--keep"]] {
            let args = [&["run", "--iface", SERVER], &other[..], keep].concat();
            let ended = host.twheel_once(&args)?;
            check_refused(
                &ended,
                Kind::Pins,
                &["--max-flows 1000", "--tick 100ms", "detach"],
            )?;
            ensure!(host.pins()? == before, "{:?}", host.pins());
            ensure!(host.attached(SERVER)? == ["xdp", "egress"]);
        }
    }
    // A run with the original options still adopts the pins.
    let twheel = Twheel::start(&host, &[&["--iface", SERVER], &made[..]].concat())?;
    twheel.await_stderr("adopted 0 flows")?;
    twheel.stop()?;
    host.check_clean(SERVER)
}

#[test]
fn nothing_to_detach() -> Result<()> {
    let host = host()?;
    for interface in [SERVER, "nowhere0"] {
        let ended = host.twheel_once(&["detach", "--iface", interface])?;
        check_refused(&ended, Kind::Pins, &[interface, "not attached"])?;
    }
    host.check_clean(SERVER)
}
