//! What a run may do and what it can do without, who may use what it makes, and what it does about
//! obstacles that somebody else has put in its way.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use twheel::{failure::Kind, privilege::NEEDED};
use twheel_client::{
    Outcome,
    channel::{Channel, Packet},
    protocol::{Op, Request, life},
};
use twheel_tests::{
    netns::{Namespace, PINS, require_root},
    pair::{Family, Pair, SERVER},
    running::{Ended, Twheel, once, twheel_bin},
    unit::{Unit, is_installed},
};

/// User and group `nobody`.
const NOBODY: &str = "65534";
/// A group that has no name and no members.
const GROUP: u32 = 4242;
/// The capability's number (`linux/capability.h`).
const CAP_SYS_NICE: u32 = 23;

/// A directory that everybody may enter, with a `twheel` that everybody may execute; removed when
/// dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("twl-{}-{name}", std::process::id()));
        fs::create_dir(&path)?;
        let directory = Self(path);
        directory.mode(0o755)?;
        fs::copy(twheel_bin()?, directory.0.join("twheel"))?;
        Ok(directory)
    }

    fn mode(&self, mode: u32) -> Result<()> {
        Ok(fs::set_permissions(
            &self.0,
            fs::Permissions::from_mode(mode),
        )?)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("ASCII")
    }

    /// `setpriv` and its arguments: this user and group, these capabilities and no others.
    fn as_user(&self, user: &str, group: &str, capabilities: &[&str]) -> String {
        let set = capabilities
            .iter()
            .fold("-all".to_owned(), |set, it| set + ",+" + it);
        format!(
            "exec setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs --inh-caps {set} \
             --ambient-caps {set} --bounding-set {set} {}/twheel",
            self.path()
        )
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A shell on a host. If `bpffs` is given, the shell has its own mount namespace, with a BPF file
/// system mounted with these options.
fn shell(host: &Namespace, bpffs: Option<&str>, script: &str) -> Result<Command> {
    let mut command = match bpffs {
        Some(_) => host.command("unshare")?,
        None => host.command("sh")?,
    };
    let mount = bpffs.map(|options| format!("mount -t bpf -o {options} bpf /sys/fs/bpf && "));
    if bpffs.is_some() {
        command.args(["--mount", "--propagation", "private", "sh"]);
    }
    command
        .args(["-c", &(mount.unwrap_or_default() + script)])
        .env("TWHEEL_HISTORY", "off");
    Ok(command)
}

fn check_refused(ended: &Ended, kind: Kind, words: &[&str]) -> Result<()> {
    ensure!(
        ended.code() == Some(kind as i32),
        "the exit code is not {kind:?}: {ended:?}"
    );
    for word in words {
        ensure!(
            ended.stderr.contains(word),
            "no {word:?} in {}",
            ended.stderr
        );
    }
    ensure!(!ended.stderr.contains("attached"), "{}", ended.stderr);
    Ok(())
}

/// Checks the sets of capabilities of each thread of a process, and that no program may give it
/// more.
fn check_threads(pid: u32, least: usize, is_root: bool) -> Result<()> {
    let mut needed = NEEDED.iter().fold(0, |bits, it| bits | it.bitmask());
    // If the limit allows steppers no real-time priority, the capability does, provided it was
    // there: root's.
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max realtime priority"))
        .and_then(|limits| limits.split_whitespace().next())
        .context("no limit for real-time priority")?;
    if is_root && limit == "0" {
        needed |= 1 << CAP_SYS_NICE;
    }
    let mut threads = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        let fields: BTreeMap<_, _> = status
            .lines()
            .filter_map(|line| line.split_once(':'))
            .collect();
        let (name, set) = (fields["Name"].trim(), |set: &str| {
            u64::from_str_radix(fields[set].trim(), 16)
        });
        for held in ["CapPrm", "CapEff", "CapBnd"] {
            ensure!(set(held)? == needed, "{name}: {held} is {:x}", set(held)?);
        }
        for empty in ["CapInh", "CapAmb"] {
            ensure!(set(empty)? == 0, "{name}: {empty} is {:x}", set(empty)?);
        }
        ensure!(fields["NoNewPrivs"].trim() == "1", "{name} may get more");
        threads += 1;
    }
    ensure!(threads >= least, "only {threads} threads");
    Ok(())
}

fn modes(directory: &Path) -> Result<BTreeSet<(u32, u32, u32)>> {
    let of = |path: &Path| -> Result<_> {
        let it = fs::symlink_metadata(path)?;
        Ok((it.mode() & 0o7777, it.uid(), it.gid()))
    };
    let mut modes = BTreeSet::from([of(directory)?]);
    for entry in fs::read_dir(directory)? {
        modes.insert(of(&entry?.path())?);
    }
    Ok(modes)
}

fn until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    while !is()? {
        ensure!(Instant::now() < end, "{what}: not reached within 20 s");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Waits for the ends of this many connections, and for these actions on each.
fn expect_reaped(twheel: &Twheel, flows: usize, actions: &[&str]) -> Result<()> {
    let (mut expired, mut done) = (0, BTreeMap::new());
    while expired < flows || done.values().sum::<usize>() < flows * actions.len() {
        let line = twheel
            .line(Duration::from_secs(20))?
            .context("no more lines")?;
        let object: serde_json::Value = serde_json::from_str(&line.text)?;
        match object["event"].as_str() {
            Some("end") => expired += 1,
            Some("reap") => {
                let action = object["action"].as_str().context("no action")?;
                ensure!(actions.contains(&action), "{object}");
                ensure!(object["outcome"] != "failed", "{object}");
                *done.entry(action.to_owned()).or_insert(0) += 1;
            }
            _ => bail!("{object}"),
        }
    }
    Ok(())
}

/// A program hands over the timeout of a connection, and is told its end.
fn expect_offloaded(pair: &Pair, path: &Path) -> Result<()> {
    let channel = Channel::connect(path)?;
    let mut connection = pair.connect(Family::V6)?;
    connection.talk()?;
    let mut request = Request::new(Op::Start);
    (request.timeout, request.life) = (200, life::ANY);
    channel.send(1, &[request], &[connection.server.as_fd()])?;
    loop {
        match channel.receive()?.context("twheel has ended")? {
            Packet::Replies(_, replies) => ensure!(replies[0].error == 0, "{replies:?}"),
            Packet::Events(events) => {
                ensure!(events[0].what == Outcome::Expired as u32, "{events:?}");
                return Ok(());
            }
        }
    }
}

const RUN: &str = "run --iface server0 --timeout 1s --json --reap-max-share 100";

#[test]
fn three_capabilities_are_enough() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("three")?;
    let three = ["bpf", "net_admin", "perfmon"];
    let own = Some("uid=65534,gid=65534,mode=0700");
    let nobody = |capabilities: &[&str], args: &str| {
        let user = directory.as_user(NOBODY, NOBODY, capabilities);
        shell(&pair.server, own, &format!("{user} {args}"))
    };

    // An option that needs another capability names it.
    let other = format!("--reap-netns {}", pair.client.name());
    for (args, capability) in [
        ("--reap reset", "CAP_NET_RAW"),
        (other.as_str(), "CAP_SYS_ADMIN"),
        ("--metrics 80", "CAP_NET_BIND_SERVICE"),
        ("--group 0", "CAP_SETGID"),
    ] {
        let refused = once(nobody(&three, &format!("{RUN} {args}"))?)?;
        check_refused(&refused, Kind::Permission, &[capability])?;
    }
    for (missing, capability) in [(0, "CAP_BPF"), (1, "CAP_NET_ADMIN"), (2, "CAP_PERFMON")] {
        let mut two = three.to_vec();
        two.remove(missing);
        let refused = once(nobody(&two, RUN)?)?;
        check_refused(&refused, Kind::Permission, &[&format!("no {capability}:")])?;
    }
    // CAP_BPF and CAP_PERFMON were once part of CAP_SYS_ADMIN, which the run would have to keep.
    let refused = once(nobody(&["sys_admin", "net_admin"], RUN)?)?;
    check_refused(&refused, Kind::Permission, &["CAP_BPF", "CAP_PERFMON"])?;
    let doctor = once(nobody(&three, "doctor --iface server0 --json")?)?;
    let programs = doctor
        .lines
        .iter()
        .find(|line| line.text.contains("\"programs\""));
    let programs = &programs.context("no finding about programs")?.text;
    ensure!(
        programs.contains("\"warn\"") && programs.contains("CAP_SYS_ADMIN"),
        "{programs}"
    );

    // Everything else works.
    let run = format!("{RUN} --reap socket,conntrack --metrics 0");
    let twheel = Twheel::start_command(nobody(&three, &run)?, |_| {})?;
    twheel.await_stderr("metrics and page")?;
    check_threads_of_nobody(twheel.pid())?;
    let mut connections = (0..4)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect::<Result<Vec<_>>>()?;
    connections.iter_mut().try_for_each(|it| it.talk())?;
    expect_reaped(&twheel, 4, &["socket", "conntrack"])?;
    // The socket's owner sees that the socket was really closed.
    for connection in &mut connections {
        let told = connection.client.read(&mut [0]).map_err(|it| it.kind());
        ensure!(told == Err(io::ErrorKind::ConnectionReset), "{told:?}");
    }
    let pins = PathBuf::from(format!("/proc/{}/root{PINS}", twheel.pid()));
    ensure!(pins.exists(), "nothing is pinned");
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    pair.server.check_clean(SERVER)
}

/// Checks that the process runs as `nobody` in every respect.
fn check_threads_of_nobody(pid: u32) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    ensure!(
        status.contains("Uid:\t65534\t65534\t65534\t65534"),
        "{status}"
    );
    // Two steppers, or just one; the reaper; the metrics; and the main thread.
    check_threads(pid, 4, false)
}

#[test]
fn root_gives_up_the_rest_and_shares_with_a_group_alone() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("rest")?;
    let history = directory.0.join("history");
    let all = format!(
        "{}/twheel {RUN} --history {} --reap reset,socket --reap-netns {} --metrics 80 --group {GROUP}",
        directory.path(),
        history.display(),
        pair.client.name()
    );
    let twheel = Twheel::start_command(shell(&pair.server, None, &format!("exec {all}"))?, |_| {})?;
    twheel.await_stderr("metrics and page")?;
    let own = pair.server.instances()?.pop().context("no instance")?;
    until("shared", || Ok(modes(&own)?.contains(&(0o750, 0, GROUP))))?;
    until("history", || Ok(fs::read_dir(&history)?.count() == 1))?;
    // What proves whose a handed-over timeout is, is not for the group.
    let pinned = BTreeSet::from([(0o750, 0, GROUP), (0o660, 0, GROUP), (0o600, 0, GROUP)]);
    ensure!(modes(&own)? == pinned, "{:?}", modes(&own)?);
    let kept = history.join(pair.server.history(SERVER));
    until("a segment, and the interfaces", || {
        Ok(kept.join("interfaces").exists() && fs::read_dir(&kept)?.count() == 2)
    })?;
    let files = BTreeSet::from([(0o750, 0, GROUP), (0o640, 0, GROUP)]);
    ensure!(modes(&kept)? == files, "{:?}", modes(&kept)?);
    check_threads(twheel.pid(), 5, true)?;

    let mut connections = [pair.connect(Family::V4)?, pair.connect(Family::V6)?];
    connections.iter_mut().try_for_each(|it| it.talk())?;
    // Also in the other namespace, for which no capability is left.
    expect_reaped(&twheel, 2, &["reset", "socket"])?;

    // A member of the group needs no capability; anybody else is refused.
    let history = history.display().to_string();
    let asked = [
        "flows".to_owned(),
        "stats".to_owned(),
        "delete 'dport == 1'".to_owned(),
        format!("expired --iface {SERVER} --history {history}"),
    ];
    for command in &asked {
        let member = directory.as_user(NOBODY, &GROUP.to_string(), &[]);
        let ended = once(shell(&pair.server, None, &format!("{member} {command}"))?)?;
        ensure!(ended.code() == Some(0), "{command}: {ended:?}");
        if command.starts_with("expired") {
            ensure!(ended.lines.len() == 2, "{ended:?}");
        }
        let stranger = directory.as_user(NOBODY, NOBODY, &["bpf"]);
        let ended = once(shell(&pair.server, None, &format!("{stranger} {command}"))?)?;
        ensure!(
            ended.code() != Some(0) && ended.lines.is_empty(),
            "{command}: {ended:?}"
        );
        check_refused(&ended, Kind::Permission, &["--group"])?;
    }

    // Killed, and adopted by a run without a group: the pins are for its user alone again.
    twheel.kill()?;
    let twheel = Twheel::start(
        &pair.server,
        &["--iface", SERVER, "--timeout", "1s", "--reap", "socket"],
    )?;
    let alone = BTreeSet::from([(0o700, 0, GROUP), (0o600, 0, GROUP), (0o600, 0, 0)]);
    until("alone", || Ok(modes(&own)?.contains(&(0o700, 0, GROUP))))?;
    ensure!(modes(&own)?.is_subset(&alone), "{:?}", modes(&own)?);
    check_threads(twheel.pid(), 3, true)?;
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    pair.server.check_clean(SERVER)
}

#[test]
fn what_somebody_has_put_in_the_way_is_not_followed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("way")?;
    let target = directory.0.join("target");
    fs::create_dir(&target)?;
    fs::write(target.join("precious"), "it")?;
    let untouched = || -> Result<()> {
        let names: Vec<_> = fs::read_dir(&target)?
            .flatten()
            .map(|it| it.file_name())
            .collect();
        ensure!(names == ["precious"], "{names:?}");
        Ok(())
    };
    let name = format!("{}-{SERVER}", pair.server.inode()?);
    let layout = format!("{PINS}/v{}", twheel_common::config::LAYOUT);
    let twheel = format!("{}/twheel", directory.path());
    let target_path = target.display();
    let plants = [
        format!("ln -s {target_path} {PINS}"),
        format!("mkdir -p {PINS} && ln -s {target_path} {layout}"),
        format!("mkdir -p {layout} && ln -s {target_path} {layout}/{name}"),
        format!("mkdir -p {layout}/{name} && chown {NOBODY} {layout}/{name}"),
        format!("mkdir -p {layout} && chown {NOBODY} {PINS}"),
        format!("mkdir -p {layout}/{name} && chmod 777 {layout}/{name}"),
    ];
    for (number, plant) in plants.iter().enumerate() {
        let why = if number < 3 {
            "symbolic link"
        } else {
            "who could put anything there"
        };
        for command in ["run", "detach"] {
            let script = format!("{plant} && exec {twheel} {command} --iface {SERVER}");
            let ended = once(shell(&pair.server, Some("mode=1777"), &script)?)?;
            // If there is nothing under its name, there is nothing to detach.
            if number != 4 || command == "run" {
                check_refused(&ended, Kind::Pins, &[why]).with_context(|| plant.clone())?;
            }
            untouched()?;
        }
    }

    // A history in a directory that everybody may write to, in which something with the history's
    // name already exists.
    let history = directory.0.join("all");
    fs::create_dir(&history)?;
    fs::set_permissions(&history, fs::Permissions::from_mode(0o1777))?;
    let kept = history.join(pair.server.history(SERVER));
    symlink(&target, &kept)?;
    let path = history.to_str().context("no name")?;
    let args = ["--iface", SERVER, "--keep", "--history", path];
    let run = Twheel::start(&pair.server, &args)?;
    run.await_stderr("keeping no history")?;
    run.await_stderr("a symbolic link of user 0")?;
    let ended = run.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    untouched()?;
    // The same for a command that writes a history, and for a directory of somebody else's.
    for plant in ["link", "directory"] {
        if plant == "directory" {
            fs::remove_file(&kept)?;
            fs::create_dir(&kept)?;
            chown(&kept, Some(65534), None)?;
        }
        let ended = pair.server.twheel_once(&["flush", "--history", path])?;
        check_refused(
            &ended,
            Kind::Other,
            &[plant, "who could put anything there"],
        )?;
    }
    untouched()?;
    ensure!(fs::read_dir(&kept)?.count() == 0);
    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    pair.server.check_clean(SERVER)
}

#[test]
fn the_unit_gives_what_a_run_needs() -> Result<()> {
    require_root();
    let unit = Unit::read("twheel@.service")?;
    let directory = Directory::new("unit")?;
    let given: BTreeSet<_> = unit
        .directive("CapabilityBoundingSet")
        .into_iter()
        .flat_map(str::split_ascii_whitespace)
        .map(str::to_owned)
        .collect();
    ensure!(
        given == NEEDED.iter().map(ToString::to_string).collect(),
        "{given:?}"
    );
    let has_systemd = is_installed("systemd-analyze");
    if has_systemd {
        unit.verify(&directory.0, &directory.0)?;
    }

    // systemd is not used, because it must be process 1. The test gives the process the unit's
    // capabilities, its read-only file systems and no new privileges, and records every system
    // call.
    let pair = Pair::new()?;
    let state = directory.0.join("state");
    let trace = state.join("trace");
    fs::create_dir(&state)?;
    let strace = match is_installed("strace") {
        true => format!("strace -f -qq -o {} ", trace.display()),
        false => String::new(),
    };
    let root = directory.as_user("0", "0", &[]).replace(
        "--inh-caps -all --ambient-caps -all --bounding-set -all",
        "--bounding-set -all,+bpf,+net_admin,+perfmon",
    );
    let script = format!(
        "mount --bind {0} {0} && mount --bind /sys/fs/bpf /sys/fs/bpf && mount -o bind,remount,ro / && \
         mount -o bind,remount,ro /sys && exec {strace}{1} {RUN} --keep --reap socket --metrics 0 --history {0} --group root --offload {0}/offload",
        state.display(),
        root.trim_start_matches("exec "),
    );
    let mut command = pair.server.command("unshare")?;
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let twheel = Twheel::start_command(command, |_| {})?;
    twheel.await_stderr("metrics and page")?;
    let mut connection = pair.connect(Family::V4)?;
    connection.talk()?;
    expect_reaped(&twheel, 1, &["socket"])?;
    expect_offloaded(&pair, &state.join("offload"))?;
    // strace is its parent.
    let children = format!("/proc/{0}/task/{0}/children", twheel.pid());
    let child = fs::read_to_string(children)?
        .trim()
        .parse()
        .unwrap_or(twheel.pid());
    check_threads(child, 5, false)?;
    kill(Pid::from_raw(child as i32), Signal::SIGTERM)?;
    let ended = twheel.wait()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    ensure!(!ended.stderr.contains("no history"), "{}", ended.stderr);
    let detached = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(detached.code() == Some(0), "{detached:?}");
    if has_systemd && !strace.is_empty() {
        let called = unit.check_calls(&trace, &directory.0.join("twheel"))?;
        ensure!(called.contains("bpf"), "{called:?}");
    }
    pair.server.check_clean(SERVER)
}
