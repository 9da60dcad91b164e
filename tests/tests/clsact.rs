//! Outgoing packets are seen by a filter of a clsact qdisc, as on kernels without TCX: alone, and
//! among other people's filters. The tests ask `tc` what is attached.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{CLIENT, Pair, SERVER},
    running::{Ended, Twheel, once, twheel_bin},
    tc::{Filter, drop_from, filters, has_qdisc, passes, tc},
    wire::Wire,
};

/// Tracks UDP flows, so each packet is counted, and no packets are sent but those of the test.
const RUN: [&str; 9] = [
    "--iface",
    SERVER,
    "--proto",
    "udp",
    "--accounting",
    "--timeout",
    "udp=10m,udp_stream=10m",
    "--json",
    "--egress",
];
/// The priority of a filter of twheel's that is alone.
const PRIORITY: u64 = 17;
/// Ports whose datagrams other people's filters drop: the filter before twheel's, and the one
/// behind it.
const BEFORE: u16 = 5001;
const BEHIND: u16 = 5002;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// twheel's only filter on the server.
fn ours(host: &Namespace) -> Result<Filter> {
    let mut found = filters(host, SERVER)?;
    found.retain(Filter::is_ours);
    ensure!(found.len() == 1, "not one filter: {found:?}");
    found.pop().context("one")
}

/// The names of the filter's and the qdisc's pins, without the interface's number.
fn notes(host: &Namespace) -> Result<Vec<String>> {
    let pins = host.pins()?;
    let names = pins.iter().filter_map(|it| it.file_name()?.to_str());
    let names = names.filter_map(|it| Some(it.split_once('-')?.0.to_owned()));
    Ok(names.collect())
}

/// Nothing of twheel's is left, not even the filter and the qdisc.
fn check_clean(host: &Namespace, interface: &str) -> Result<()> {
    await_links(host, interface)?;
    let found = filters(host, interface)?;
    ensure!(
        !found.iter().any(Filter::is_ours),
        "a filter of twheel's is left: {found:?}"
    );
    ensure!(!has_qdisc(host, interface)?, "the qdisc is left");
    Ok(())
}

/// Waits until the check succeeds; fails with its last error.
fn until(mut is: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match is() {
            Err(_) if Instant::now() < end => thread::sleep(millis(10)),
            result => return result,
        }
    }
}

/// Waits until there are no pins and no BPF links: the kernel removes links with a short delay.
fn await_links(host: &Namespace, interface: &str) -> Result<()> {
    until(|| host.check_clean(interface))
}

fn detach(host: &Namespace) -> Result<()> {
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

fn start(host: &Namespace, args: &[&str]) -> Result<Twheel> {
    Twheel::start(host, &[&RUN[..], args].concat())
}

/// A run that ends and leaves everything attached.
fn keep(host: &Namespace, egress: &str) -> Result<Ended> {
    let ended = start(host, &[egress, "--keep"])?.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(ended)
}

#[test]
fn both_directions_are_seen_and_each_packet_counts_once() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = start(&pair.server, &["clsact"])?;
    let attached = "attached, native XDP, both directions, outgoing by a clsact filter";
    ensure!(twheel.stderr().contains(attached), "{}", twheel.stderr());
    let filter = ours(&pair.server)?;
    ensure!(filter.priority == PRIORITY, "{filter:?}");
    ensure!(
        pair.server.attached(SERVER)? == ["xdp"],
        "TCX is attached as well"
    );
    let wire = Wire::new(&pair, 6000)?;
    wire.talk(7, 4)?;
    let flow = wire.counted(&pair.server)?;
    ensure!(flow == (7, 4), "{flow:?}");
    ensure!(twheel.stop()?.code() == Some(0));
    check_clean(&pair.server, SERVER)
}

#[test]
fn a_filter_outlives_its_run_and_the_next_one_replaces_it_in_place() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["clsact", "--keep"];
    let twheel = start(&pair.server, &args)?;
    let wire = Wire::new(&pair, 6000)?;
    wire.talk(3, 1)?;
    let mut before = ours(&pair.server)?;
    ensure!(twheel.kill()?.signal() == Some(9));
    ensure!(ours(&pair.server)? == before, "the filter was replaced");
    wire.talk(2, 2)?;

    // Packets go out all the time: none is missed, and none is counted twice.
    let mut out = 5;
    for _ in 0..2 {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let sent = thread::scope(|scope| -> Result<usize> {
            let sender = scope.spawn(|| -> Result<usize> {
                let mut sent = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    wire.talk(20, 0)?;
                    sent += 20;
                    thread::sleep(millis(1));
                }
                Ok(sent)
            });
            let started = start(&pair.server, &args);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let sent = sender.join().expect("the sender panicked")?;
            let stderr = started?.kill()?.stderr;
            ensure!(stderr.contains("attached, adopted XDP"), "{stderr}");
            Ok(sent)
        })?;
        ensure!(sent > 100, "only {sent} packets were sent meanwhile");
        out += sent;
        let after = ours(&pair.server)?;
        ensure!(after.place() == before.place(), "{after:?}");
        ensure!(
            after.program != before.program,
            "the filter still has the old program: {after:?}"
        );
        before = after;
    }
    let counted = wire.counted(&pair.server)?;
    ensure!(
        counted == (out as u64, 3),
        "{counted:?} packets counted, {out} sent"
    );

    detach(&pair.server)?;
    check_clean(&pair.server, SERVER)
}

#[test]
fn other_peoples_filters_go_on_beside_it() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    tc(host, &format!("qdisc add dev {SERVER} clsact"))?;
    drop_from(host, SERVER, 1, BEFORE)?;
    drop_from(host, SERVER, 40_000, BEHIND)?;
    let theirs = filters(host, SERVER)?;
    let check = |is_there: bool| -> Result<()> {
        for (port, open) in [(BEFORE, false), (BEHIND, false), (6000, true)] {
            ensure!(passes(&pair, port)? == open, "port {port}");
        }
        let mut found = filters(host, SERVER)?;
        let priorities: Vec<_> = found.iter().map(|it| it.priority).collect();
        let expected: &[u64] = if is_there {
            &[1, 2, 40_000]
        } else {
            &[1, 40_000]
        };
        ensure!(priorities == expected, "{found:?}");
        found.retain(|it| !it.is_ours());
        ensure!(found == theirs, "{found:?}");
        Ok(())
    };
    check(false)?;
    let twheel = start(host, &["clsact", "--keep"])?;
    let stderr = twheel.await_stderr("another filter (priority 1) comes before twheel's")?;
    ensure!(stderr.contains("both directions"), "{stderr}");
    check(true)?;
    // twheel sees what the filter before it passes, and what the one behind it drops.
    let wire = Wire::new(&pair, 6001)?;
    wire.talk(2, 0)?;
    ensure!(wire.counted(host)? == (2, 0), "{:?}", wire.counted(host));
    for (port, seen) in [(BEFORE, 0), (BEHIND, 1)] {
        let wire = Wire::new(&pair, port)?;
        let earlier = wire.counted(host)?.0;
        let _ = wire.server.send(b"!");
        let counted = wire.counted(host)?.0 - earlier;
        ensure!(counted == seen, "port {port}: {counted}");
    }
    ensure!(twheel.kill()?.signal() == Some(9));
    check(true)?;
    keep(host, "clsact")?;
    check(true)?;
    detach(host)?;
    check(false)?;
    ensure!(has_qdisc(host, SERVER)?, "their qdisc is gone");
    await_links(host, SERVER)
}

#[test]
fn a_qdisc_of_our_making_stays_where_others_have_come_to_use_it() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for way in ["ingress", "egress"] {
        keep(host, "clsact")?;
        ensure!(notes(host)? == ["clsact", "qdisc"], "{:?}", notes(host));
        tc(
            host,
            &format!("filter add dev {SERVER} {way} prio 9 u32 match u32 0 0"),
        )?;
        detach(host)?;
        await_links(host, SERVER)?;
        let left = tc(host, &format!("filter show dev {SERVER} {way}"))?;
        ensure!(left.contains("pref 9"), "{way}: {left:?}");
        ensure!(filters(host, SERVER)?.iter().all(|it| !it.is_ours()));
        // A qdisc that was there before, even an empty one, belongs to somebody else.
        tc(host, &format!("filter del dev {SERVER} {way}"))?;
        keep(host, "clsact")?;
        ensure!(notes(host)? == ["clsact"], "{:?}", notes(host));
        detach(host)?;
        ensure!(has_qdisc(host, SERVER)?, "{way}: their qdisc is gone");
        tc(host, &format!("qdisc del dev {SERVER} clsact"))?;
    }
    check_clean(host, SERVER)
}

#[test]
fn one_way_takes_the_place_of_the_other() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let wire = Wire::new(&pair, 6000)?;
    let mut counted = (0, 0);
    for egress in [
        "clsact", "tcx", "clsact", "off", "tcx", "off", "clsact", "auto", "clsact", "on",
    ] {
        keep(host, egress)?;
        let (hooks, filter): (&[_], _) = match egress {
            "clsact" => (&["xdp"], 1),
            "off" => (&["xdp"], 0),
            // This kernel has TCX.
            _ => (&["xdp", "egress"], 0),
        };
        ensure!(host.attached(SERVER)? == hooks, "{egress}");
        let found = filters(host, SERVER)?;
        ensure!(found.len() == filter, "{egress}: {found:?}");
        ensure!(has_qdisc(host, SERVER)? == (filter == 1), "{egress}");
        ensure!(notes(host)?.len() == 2 * filter, "{:?}", notes(host));
        wire.talk(3, 2)?;
        counted.0 += if egress == "off" { 0 } else { 3 };
        counted.1 += 2;
        let found = wire.counted(host)?;
        ensure!(found == counted, "{egress}: {found:?}, not {counted:?}");
    }
    detach(host)?;
    check_clean(host, SERVER)
}

/// Turns what a run has kept into a state in which a run may have died.
fn leave(host: &Namespace, what: &str) -> Result<()> {
    let pin = |name: &str| -> Result<PathBuf> {
        let pins = host.pins()?;
        let found = pins.iter().find(|it| {
            let file = it.file_name().unwrap_or_default().to_string_lossy();
            file.starts_with(name) && file.contains('@')
        });
        found.cloned().with_context(|| format!("no pin {name}"))
    };
    match what {
        "neither filter nor qdisc" => drop(tc(host, &format!("qdisc del dev {SERVER} clsact"))?),
        "a qdisc without a filter" => {
            tc(host, &format!("filter del dev {SERVER} egress"))?;
            fs::remove_file(pin("clsact")?)?;
        }
        "a filter to be added" => drop(tc(host, &format!("filter del dev {SERVER} egress"))?),
        "a filter and no XDP" => fs::remove_file(pin("xdp")?)?,
        "a qdisc to be removed" => {
            tc(host, &format!("qdisc del dev {SERVER} clsact"))?;
            fs::remove_file(pin("clsact")?)?;
        }
        // A run cannot leave this state: somebody has removed all pins.
        "no pins" => host
            .instances()?
            .iter()
            .for_each(|it| twheel_tests::netns::remove_pins(it)),
        other => anyhow::bail!("no state {other}"),
    }
    // The kernel removes a BPF link with a short delay.
    thread::sleep(millis(100));
    Ok(())
}

#[test]
fn wherever_a_run_dies_the_next_command_clears_up() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for what in [
        "neither filter nor qdisc",
        "a qdisc without a filter",
        "a filter to be added",
        "a filter and no XDP",
        "a qdisc to be removed",
        "no pins",
    ] {
        for next in ["detach", "clsact", "off"] {
            keep(host, "clsact")?;
            leave(host, what).context(what)?;
            if next == "detach" {
                detach(host).context(what)?;
            } else {
                let twheel = start(host, &[next])?;
                let found = filters(host, SERVER)?;
                let expected = usize::from(next == "clsact");
                ensure!(found.len() == expected, "{what}, {next}: {found:?}");
                let wire = Wire::new(&pair, 6000)?;
                let earlier = wire.counted(host)?;
                wire.talk(2, 1)?;
                let later = wire.counted(host)?;
                let seen = (later.0 - earlier.0, later.1 - earlier.1);
                ensure!(seen == (2 * expected as u64, 1), "{what}, {next}: {seen:?}");
                ensure!(twheel.stop()?.code() == Some(0));
            }
            if what == "no pins" {
                // Nobody can tell any more who made the qdisc.
                ensure!(filters(host, SERVER)?.is_empty(), "{next}");
                tc(host, &format!("qdisc del dev {SERVER} clsact"))?;
            }
            check_clean(host, SERVER).with_context(|| format!("{what}, {next}"))?;
        }
    }
    Ok(())
}

#[test]
fn an_interface_that_goes_takes_its_filter_along() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let create = || -> Result<()> {
        host.ip(&format!("link add {SERVER} type veth peer name peer0"))?;
        host.ip(&format!("link set {SERVER} up"))?;
        drop(host.ip("link set peer0 up")?);
        Ok(())
    };
    let twheel = start(host, &["clsact", "--wait-iface"])?;
    host.ip(&format!("link del {SERVER}"))?;
    twheel.await_stderr("disappeared:")?;
    until(|| {
        ensure!(notes(host)?.is_empty(), "{:?}", notes(host));
        Ok(())
    })?;
    create()?;
    let told = |words: &str, times: usize| {
        until(|| {
            let stderr = twheel.stderr();
            ensure!(stderr.matches(words).count() >= times, "{stderr}");
            Ok(())
        })
    };
    told("by a clsact filter", 2)?;
    drop(ours(host)?);
    // Moves it to another network namespace, where nothing of twheel's is left.
    host.ip(&format!("link set {SERVER} netns {}", pair.client.name()))?;
    told("disappeared:", 2)?;
    check_clean_interface(&pair.client)?;
    host.ip("link del peer0")?;
    create()?;
    told("by a clsact filter", 3)?;
    drop(ours(host)?);
    // Under another name it still belongs to this run.
    host.ip(&format!("link set {SERVER} down"))?;
    host.ip(&format!("link set {SERVER} name other0"))?;
    ensure!(filters(host, "other0")?.len() == 1);
    ensure!(twheel.stop()?.code() == Some(0));
    check_clean(host, "other0")
}

#[test]
fn a_filter_on_what_had_this_name_before_is_removed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for what in ["all", "a filter and no XDP"] {
        keep(host, "clsact")?;
        if what != "all" {
            leave(host, what)?;
        }
        host.ip(&format!("link set {SERVER} down"))?;
        host.ip(&format!("link set {SERVER} name other0"))?;
        host.ip(&format!("link add {SERVER} type veth peer name peer0"))?;
        let twheel = start(host, &["clsact"])?;
        ensure!(filters(host, "other0")?.is_empty(), "{what}");
        ensure!(!has_qdisc(host, "other0")?, "{what}");
        drop(ours(host)?);
        ensure!(twheel.stop()?.code() == Some(0));
        check_clean(host, SERVER)?;
        host.ip(&format!("link del {SERVER}"))?;
        host.ip(&format!("link set other0 name {SERVER} up"))?;
    }
    Ok(())
}

fn check_clean_interface(host: &Namespace) -> Result<()> {
    // The kernel removes a BPF link shortly after its pin.
    until(|| {
        let attached = host.attached(SERVER)?;
        ensure!(attached.is_empty(), "{attached:?}");
        ensure!(filters(host, SERVER)?.is_empty() && !has_qdisc(host, SERVER)?);
        Ok(())
    })
}

#[test]
fn an_interface_without_room_for_it_is_told_and_left_as_it_was() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for (qdisc, words) in [
        ("ingress", "has an ingress qdisc"),
        ("egress_block 7 clsact", "share its filters"),
    ] {
        tc(host, &format!("qdisc add dev {SERVER} {qdisc}"))?;
        let before = tc(host, &format!("qdisc show dev {SERVER}"))?;
        let ended = host.twheel_once(&[&["run"], &RUN[..], &["clsact"]].concat())?;
        ensure!(ended.code() == Some(4), "{qdisc}: {}", ended.stderr);
        ensure!(ended.stderr.contains(words), "{}", ended.stderr);
        let after = tc(host, &format!("qdisc show dev {SERVER}"))?;
        ensure!(after == before, "{after}");
        await_links(host, SERVER)?;
        tc(
            host,
            &format!(
                "qdisc del dev {SERVER} {}",
                qdisc.rsplit(' ').next().unwrap_or("")
            ),
        )?;
    }
    Ok(())
}

/// A mount namespace in which a user has a bpffs of his own; removed with the test.
struct Mounted(Child);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn three_capabilities_adopt_and_remove_it() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let directory = Directory::new("clsact")?;
    let binary = directory.0.join("twheel");
    fs::copy(twheel_bin()?, &binary)?;
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.path(), open)?;
    let mut mount = Command::new("unshare");
    let script =
        "mount -t bpf -o uid=65534,gid=65534,mode=0700 bpf /sys/fs/bpf && echo && exec sleep 3600";
    mount.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    let mut mounted = Mounted(mount.stdout(std::process::Stdio::piped()).spawn()?);
    let mut ready = mounted.0.stdout.take().context("it is piped")?;
    std::io::Read::read_exact(&mut ready, &mut [0])?;
    let nobody = |args: &[&str]| -> Result<Command> {
        let mut command = host.command("nsenter")?;
        let three = "-all,+bpf,+net_admin,+perfmon";
        let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
        command
            .arg(format!("--mount=/proc/{}/ns/mnt", mounted.0.id()))
            .arg("setpriv")
            .args(user)
            .args([
                "--no-new-privs",
                "--inh-caps",
                three,
                "--ambient-caps",
                three,
            ])
            .args(["--bounding-set", three])
            .arg(&binary)
            .args(args)
            .env("TWHEEL_HISTORY", "off");
        Ok(command)
    };
    let run = [&["run"], &RUN[..], &["clsact", "--keep"]].concat();
    let twheel = Twheel::start_command(nobody(&run)?, |_| {})?;
    let before = ours(host)?;
    ensure!(twheel.kill()?.signal() == Some(9));
    let twheel = Twheel::start_command(nobody(&run)?, |_| {})?;
    let after = ours(host)?;
    ensure!(after.place() == before.place() && after.program != before.program);
    ensure!(twheel.kill()?.signal() == Some(9));
    let ended = once(nobody(&["detach", "--iface", SERVER])?)?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    check_clean(host, SERVER)
}

#[test]
fn the_trial_of_doctor_changes_nothing() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    pair.client.enter(twheel::clsact::probe)?;
    for interface in ["lo", CLIENT] {
        ensure!(!has_qdisc(&pair.client, interface)?, "{interface}");
    }
    Ok(())
}
