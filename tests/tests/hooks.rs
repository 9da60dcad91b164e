//! By which hook packets are seen, beside what others have attached: native XDP, TCX, clsact; and in which order.

use std::{
    fs,
    io::{Read, Write},
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya_obj::generated::bpf_attach_type::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use nix::net::if_::if_nametoindex;
use twheel::{
    interfaces::{LinkLayer, link_layer, strips_vlan_tags},
    tc::{Code, Place, Way, add_filter},
    tcx,
};
use twheel_tests::{
    netns::{Ended, Family, Namespace, PATIENCE, Pair, SERVER, Twheel, remove_pins, require_root},
    others::{DROPPED, FROM, Other, TO},
    tc::{filters_of, has_qdisc, tc},
    tcp_info::tcp_info,
    wire::Wire,
};

/// Flows of UDP, of which each packet is counted, and none are sent but those that are meant.
const RUN: [&str; 8] = [
    "--iface",
    SERVER,
    "--proto",
    "udp",
    "--accounting",
    "--timeout",
    "udp=10m,udp_stream=10m",
    "--json",
];
/// The name of a program of somebody else's.
const GUARD: &str = "guard";
/// What a run says of a program of an earlier run's that stands elsewhere than it is to stand.
const MOVED: &str = "moved, as --order says";
/// A port of the server's of which it lets no datagram in or out.
const GUARDED: u16 = 5001;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn start(host: &Namespace, args: &[&str]) -> Result<Twheel> {
    Twheel::start(host, &[&RUN[..], args].concat())
}

fn run_once(host: &Namespace, args: &[&str]) -> Result<Ended> {
    host.twheel_once(&[&["run"], &RUN[..], args].concat())
}

fn stop(twheel: Twheel) -> Result<()> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

fn detach(host: &Namespace) -> Result<()> {
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

/// Nothing of twheel's is left, filters and qdisc included.
fn check_clean(host: &Namespace) -> Result<()> {
    host.check_clean(SERVER)?;
    for way in ["ingress", "egress"] {
        let found = filters_of(host, SERVER, way)?;
        ensure!(found.is_empty(), "left: {way}: {found:?}");
    }
    ensure!(!has_qdisc(host, SERVER)?, "the qdisc is left");
    Ok(())
}

/// The programs at TCX of the server, in order.
fn programs(host: &Namespace, way: Way) -> Result<Vec<u32>> {
    host.enter(|| Ok(tcx::programs(if_nametoindex(SERVER)?, way)?))
}

/// What a run has pinned of this name.
fn has_pin(host: &Namespace, name: &str) -> Result<bool> {
    Ok(host.pins()?.iter().any(|it| it.ends_with(name)))
}

#[test]
fn auto_takes_native_xdp_where_it_is_free() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = start(&pair.server, &[])?;
    let attached = "attached, native XDP, both directions";
    ensure!(twheel.stderr().contains(attached), "{}", twheel.stderr());
    ensure!(pair.server.attached(SERVER)? == ["xdp", "egress"]);
    // What no interface needs is not loaded.
    ensure!(has_pin(&pair.server, "twheel_xdp")?);
    ensure!(!has_pin(&pair.server, "twheel_ingress")?);
    let wire = Wire::new(&pair, 6000)?;
    wire.talk(7, 4)?;
    ensure!(wire.counted(&pair.server)? == (7, 4));
    stop(twheel)?;
    check_clean(&pair.server)
}

#[test]
fn auto_takes_tcx_beside_the_xdp_program_of_somebody_else() -> Result<()> {
    require_root();
    let other = Other::xdp("theirs")?;
    for native in [true, false] {
        let pair = Pair::new()?;
        let host = &pair.server;
        let link = other.attach_xdp(host, SERVER, native)?;
        let drops = || -> Result<bool> {
            let wire = Wire::new(&pair, 0)?;
            wire.client.send(&[0; DROPPED])?;
            wire.client.send(b"!")?;
            Ok(wire.server.recv(&mut [0; DROPPED])? == 1)
        };
        ensure!(drops()?, "it does not work");
        let before = host.ip(&format!("-d link show dev {SERVER}"))?;

        let twheel = start(host, &[])?;
        let mode = if native { "native" } else { "generic" };
        let taken = format!(
            "XDP is taken: theirs (id {}), {mode}: incoming packets are seen by TCX",
            other.id
        );
        let stderr = twheel.stderr();
        ensure!(stderr.contains(&taken), "{stderr}");
        ensure!(
            stderr.contains("attached, TCX, both directions"),
            "{stderr}"
        );
        ensure!(host.attached(SERVER)? == ["xdp", "ingress", "egress"]);
        ensure!(!has_pin(host, "twheel_xdp")?);
        let wire = Wire::new(&pair, 6000)?;
        wire.talk(7, 4)?;
        ensure!(wire.counted(host)? == (7, 4), "{:?}", wire.counted(host));
        ensure!(drops()?, "it does not go on");
        stop(twheel)?;
        host.await_attached(SERVER, &["xdp"])?;
        let after = host.ip(&format!("-d link show dev {SERVER}"))?;
        ensure!(after == before, "{after}");
        ensure!(drops()?, "it does not go on");
        drop(link);
        check_clean(host)?;
    }
    Ok(())
}

#[test]
fn each_hook_sees_the_same() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for (hook, egress, attached, hooks) in [
        (
            "xdp",
            "tcx",
            "native XDP, both directions",
            &["xdp", "egress"][..],
        ),
        (
            "xdp",
            "clsact",
            "native XDP, both directions, outgoing by a clsact filter",
            &["xdp"],
        ),
        ("tcx", "tcx", "TCX, both directions", &["ingress", "egress"]),
        (
            "tcx",
            "clsact",
            "TCX, both directions, outgoing by a clsact filter",
            &["ingress"],
        ),
        ("clsact", "tcx", "clsact, both directions", &["egress"]),
        ("clsact", "clsact", "clsact, both directions", &[]),
        ("clsact", "off", "clsact, incoming only", &[]),
    ] {
        let what = format!("{hook}, {egress}");
        let twheel = start(host, &["--hook", hook, "--egress", egress])?;
        let said = format!(": attached, {attached}\n");
        ensure!(twheel.stderr().contains(&said), "{}", twheel.stderr());
        ensure!(host.attached(SERVER)? == hooks, "{what}");
        for (way, by) in [("ingress", hook), ("egress", egress)] {
            let found = filters_of(host, SERVER, way)?;
            ensure!(found.len() == usize::from(by == "clsact"), "{found:?}");
        }
        let wire = Wire::new(&pair, 6000)?;
        wire.talk(7, 4)?;
        let out = if egress == "off" { 0 } else { 7 };
        ensure!(wire.counted(host)? == (out, 4), "{what}");
        stop(twheel)?;
        check_clean(host).context(what)?;
    }
    Ok(())
}

/// A program of somebody else's in both directions, by TCX.
fn guard(host: &Namespace) -> Result<([Other; 2], [OwnedFd; 2])> {
    let guards = [
        Other::classifier(GUARD, TO, GUARDED)?,
        Other::classifier(GUARD, FROM, GUARDED)?,
    ];
    let links = [
        guards[0].tcx(host, SERVER, BPF_TCX_INGRESS)?,
        guards[1].tcx(host, SERVER, BPF_TCX_EGRESS)?,
    ];
    Ok((guards, links))
}

/// How many of three datagrams out and two in are counted that the guard drops.
fn seen_of_dropped(pair: &Pair) -> Result<(u64, u64)> {
    let wire = Wire::new(pair, GUARDED)?;
    let before = wire.counted(&pair.server)?;
    for _ in 0..3 {
        // The sender may be told that it is dropped.
        let _ = wire.server.send(b"!");
    }
    for _ in 0..2 {
        wire.client.send(b"!")?;
    }
    // Behind them, what nobody drops.
    Wire::new(pair, 6001)?.talk(1, 1)?;
    wire.client.set_nonblocking(true)?;
    wire.server.set_nonblocking(true)?;
    for socket in [&wire.client, &wire.server] {
        ensure!(socket.recv(&mut [0]).is_err(), "it was let through");
    }
    let after = wire.counted(&pair.server)?;
    Ok((after.0 - before.0, after.1 - before.1))
}

#[test]
fn it_stands_where_it_is_told_to_among_others_at_tcx() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let (guards, _links) = guard(host)?;
    let (id, foreign) = (format!("id:{}", guards[0].id), [guards[0].id, guards[1].id]);
    let before_id = format!("before:{id}");
    for (order, is_first) in [
        (None, [true, true]),
        (Some("first"), [true, true]),
        (Some("last"), [false, false]),
        (Some("before:guard"), [true, true]),
        (Some("after:guard"), [false, false]),
        // That is at ingress alone.
        (Some(&*before_id), [true, true]),
        (Some(&*format!("after:{id}")), [false, true]),
    ] {
        let mut args = vec!["--hook", "tcx"];
        args.extend(order.iter().flat_map(|order| ["--order", order]));
        let twheel = start(host, &args)?;
        for (way, at) in [(Way::In, 0), (Way::Out, 1)] {
            let all = programs(host, way)?;
            ensure!(all.len() == 2, "{all:?}");
            let place = usize::from(is_first[at]);
            ensure!(all[place] == foreign[at], "{order:?}: {way:?}: {all:?}");
        }
        let [incoming, outgoing] = is_first;
        let expected = (if outgoing { 3 } else { 0 }, if incoming { 2 } else { 0 });
        let seen = seen_of_dropped(&pair)?;
        ensure!(seen == expected, "{order:?}: {seen:?}");
        if order.is_none() {
            let ended = host.twheel_once(&["doctor", "--iface", SERVER, "--json"])?;
            let own = format!("guard (id {})", foreign[0]);
            let line = ended.lines.iter().find(|it| it.text.contains("\"TCX\""));
            let line = &line.context("no line of TCX")?.text;
            ensure!(line.contains(&own), "{line}");
            ensure!(line.contains("twheel's own twheel_ingress (id"), "{line}");
        }
        stop(twheel)?;
    }
    ensure!(programs(host, Way::In)? == [foreign[0]]);
    ensure!(programs(host, Way::Out)? == [foreign[1]]);
    Ok(())
}

/// What somebody else's program sends elsewhere goes there, and is seen by whoever stands before that.
#[test]
fn what_is_redirected_is_seen_first_and_goes_on() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    host.ip("link add aside0 type veth peer name aside1")?;
    for end in ["aside0", "aside1"] {
        host.ip(&format!("link set {end} up"))?;
    }
    let received = || -> Result<u64> {
        host.enter(|| {
            let table = fs::read_to_string("/proc/thread-self/net/dev")?;
            let line = table
                .lines()
                .find_map(|it| it.trim().strip_prefix("aside1:"));
            let mut numbers = line.context("no aside1")?.split_ascii_whitespace();
            Ok(numbers.nth(1).context("no packets")?.parse()?)
        })
    };
    let index = host.enter(|| Ok(if_nametoindex("aside0")?))?;
    let guard = Other::redirect(GUARD, TO, GUARDED, index)?;
    let _link = guard.tcx(host, SERVER, BPF_TCX_INGRESS)?;
    for (order, seen) in [(None, 2), (Some("first"), 2), (Some("last"), 0)] {
        let mut args = vec!["--hook", "tcx"];
        args.extend(order.iter().flat_map(|order| ["--order", order]));
        let twheel = start(host, &args)?;
        let before = received()?;
        let wire = Wire::new(&pair, GUARDED)?;
        let counted = wire.counted(host)?;
        for _ in 0..2 {
            wire.client.send(b"!")?;
        }
        // Behind them, what is not redirected.
        Wire::new(&pair, 6001)?.talk(1, 1)?;
        ensure!(wire.counted(host)?.1 - counted.1 == seen, "{order:?}");
        ensure!(received()? >= before + 2, "{order:?}: not redirected");
        wire.server.set_nonblocking(true)?;
        ensure!(
            wire.server.recv(&mut [0]).is_err(),
            "{order:?}: let through"
        );
        stop(twheel)?;
    }
    ensure!(programs(host, Way::In)? == [guard.id]);
    Ok(())
}

/// Packets that were joined, or are not cut yet, are as many as the kernel's socket counts.
#[test]
fn packets_that_are_joined_are_counted_as_segments() -> Result<()> {
    require_root();
    const BYTES: usize = 8 << 20;
    let pair = Pair::new()?;
    let host = &pair.server;
    let args = ["--iface", SERVER, "--hook", "tcx", "--accounting", "--json"];
    let twheel = Twheel::start(host, &args)?;
    let mut connection = pair.connect(Family::V4)?;
    let (client, server) = (&mut connection.client, &mut connection.server);
    thread::scope(|threads| -> Result<()> {
        let sent = threads.spawn(|| client.write_all(&vec![7; BYTES]));
        let mut rest = BYTES;
        let mut buffer = vec![0; 1 << 16];
        while rest > 0 {
            rest -= server.read(&mut buffer)?;
        }
        Ok(sent.join().expect("it does not panic")?)
    })?;
    let until = Instant::now() + PATIENCE;
    let [sent, _] = loop {
        let info = tcp_info(&connection.client)?;
        let kernels = [info.tcpi_segs_out, info.tcpi_segs_in].map(u64::from);
        let ended = host.twheel_once(&["flows", "--json"])?;
        let flow: serde_json::Value = serde_json::from_str(&ended.lines[0].text)?;
        let ours = ["orig_packets", "reply_packets"].map(|it| flow[it].as_u64().unwrap_or(0));
        if ours == kernels {
            break ours;
        }
        ensure!(Instant::now() < until, "{ours:?}, the kernel {kernels:?}");
        thread::sleep(millis(50));
    };
    ensure!(sent > BYTES as u64 / 1500, "{sent}");
    let touched = host.counter("touched")?;
    ensure!(
        touched < sent / 4,
        "{touched} of {sent}: nothing was joined"
    );
    drop(connection);
    stop(twheel)
}

#[test]
fn it_stands_where_it_is_told_to_among_other_peoples_filters() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    tc(host, &format!("qdisc add dev {SERVER} clsact"))?;
    let guards = [
        (Way::In, Other::classifier(GUARD, TO, GUARDED)?),
        (Way::Out, Other::classifier(GUARD, FROM, GUARDED)?),
    ];
    host.enter(|| {
        for (way, guard) in &guards {
            let place = Place {
                index: if_nametoindex(SERVER)?,
                way: *way,
                priority: 50,
                handle: 1,
            };
            add_filter(place, "their:guard", Code::Program(guard.fd()))?;
        }
        Ok(())
    })?;
    for (order, priority) in [
        ("first", 17),
        ("last", 51),
        ("before:their:guard", 49),
        ("after:their:guard", 51),
    ] {
        let args = ["--hook", "clsact", "--egress", "clsact", "--order", order];
        let twheel = start(host, &args)?;
        for way in ["ingress", "egress"] {
            let mut found = filters_of(host, SERVER, way)?;
            found.retain(|it| it.is_ours());
            let found: Vec<_> = found.iter().map(|it| it.priority).collect();
            ensure!(found == [priority], "{order}: {way}: {found:?}");
        }
        let seen = seen_of_dropped(&pair)?;
        let expected = if priority < 50 { (3, 2) } else { (0, 0) };
        ensure!(seen == expected, "{order}: {seen:?}");
        stop(twheel)?;
    }
    // What was left stays where it stands, unless something else is asked for.
    for (order, priority, moved) in [
        (&["--order", "last"][..], 51, false),
        (&[], 51, false),
        (&["--order", "after:their:guard"], 51, false),
        (&["--order", "first"], 17, true),
        (&["--order", "before:their:guard"], 17, false),
    ] {
        let args = ["--hook", "clsact", "--egress", "clsact", "--keep"];
        let twheel = start(host, &[&args[..], order].concat())?;
        let stderr = twheel.stop()?.stderr;
        ensure!(
            stderr.matches(MOVED).count() == 2 * usize::from(moved),
            "{stderr}"
        );
        for way in ["ingress", "egress"] {
            let found = filters_of(host, SERVER, way)?;
            let found: Vec<_> = found.iter().map(|it| it.priority).collect();
            ensure!(found.contains(&priority), "{order:?}: {way}: {found:?}");
        }
    }
    detach(host)
}

#[test]
fn another_order_than_before_is_said_and_none_leaves_it_where_it_stands() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let (guards, _links) = guard(host)?;
    for (order, is_last, anew) in [
        (Some("last"), true, false),
        (None, true, false),
        (Some("after:guard"), true, false),
        (Some("first"), false, true),
        (Some("before:guard"), false, false),
        (None, false, false),
        (Some("last"), true, true),
    ] {
        let mut args = vec!["--hook", "tcx", "--keep"];
        args.extend(order.iter().flat_map(|order| ["--order", order]));
        let ended = start(host, &args)?.kill()?;
        let stderr = &ended.stderr;
        ensure!(stderr.contains(MOVED) == anew, "{order:?}: {stderr}");
        for (way, guard) in [(Way::In, &guards[0]), (Way::Out, &guards[1])] {
            let all = programs(host, way)?;
            ensure!(all.len() == 2, "{all:?}");
            ensure!(
                (all[0] == guard.id) == is_last,
                "{order:?}: {way:?}: {all:?}: {stderr}"
            );
        }
    }
    detach(host)?;
    ensure!(programs(host, Way::In)? == [guards[0].id]);
    ensure!(host.instances()?.is_empty());
    Ok(())
}

#[test]
fn a_run_that_was_killed_is_replaced_in_place_while_packets_come_and_go() -> Result<()> {
    require_root();
    for hook in ["tcx", "clsact"] {
        let pair = Pair::new()?;
        let host = &pair.server;
        let args = ["--hook", hook, "--egress", hook, "--keep"];
        let twheel = start(host, &args)?;
        let wire = Wire::new(&pair, 6000)?;
        wire.talk(1, 1)?;
        ensure!(twheel.kill()?.signal() == Some(9));
        wire.talk(1, 2)?;
        let (mut out, mut back) = (2, 3);
        // By name, and as what was left.
        for args in [&args[..], &["--egress", hook, "--keep"]] {
            let stop = AtomicBool::new(false);
            let sent = thread::scope(|scope| -> Result<usize> {
                let sender = scope.spawn(|| -> Result<usize> {
                    let mut sent = 0;
                    while !stop.load(Ordering::Relaxed) {
                        wire.talk(10, 10)?;
                        sent += 10;
                        thread::sleep(millis(1));
                    }
                    Ok(sent)
                });
                let started = start(host, args);
                stop.store(true, Ordering::Relaxed);
                let sent = sender.join().expect("no panic")?;
                let stderr = started?.kill()?.stderr;
                let adopted = match hook {
                    "tcx" => "attached, adopted TCX",
                    _ => "attached, adopted clsact",
                };
                ensure!(stderr.contains(adopted), "{stderr}");
                Ok(sent)
            })?;
            ensure!(sent > 100, "only {sent} were sent meanwhile");
            (out, back) = (out + sent, back + sent);
        }
        let counted = wire.counted(host)?;
        let expected = (out as u64, back as u64);
        ensure!(counted == expected, "{hook}: {counted:?}, not {expected:?}");
        detach(host)?;
        check_clean(host)?;
    }
    Ok(())
}

#[test]
fn one_hook_takes_the_place_of_another_from_run_to_run() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let wire = Wire::new(&pair, 6000)?;
    let mut counted = (0, 0);
    for (hook, hooks, filters) in [
        ("xdp", &["xdp", "egress"][..], 0),
        ("tcx", &["ingress", "egress"], 0),
        ("clsact", &["egress"], 1),
        ("xdp", &["xdp", "egress"], 0),
        ("clsact", &["egress"], 1),
        // What was left goes on.
        ("auto", &["egress"], 1),
        ("tcx", &["ingress", "egress"], 0),
        ("auto", &["ingress", "egress"], 0),
        ("xdp", &["xdp", "egress"], 0),
        ("auto", &["xdp", "egress"], 0),
    ] {
        let twheel = start(host, &["--hook", hook, "--keep"])?;
        ensure!(twheel.kill()?.signal() == Some(9));
        ensure!(
            host.attached(SERVER)? == hooks,
            "{hook}: {:?}",
            host.attached(SERVER)
        );
        let found = filters_of(host, SERVER, "ingress")?;
        ensure!(found.len() == filters, "{hook}: {found:?}");
        ensure!(has_qdisc(host, SERVER)? == (filters == 1), "{hook}");
        wire.talk(3, 2)?;
        counted = (counted.0 + 3, counted.1 + 2);
        let found = wire.counted(host)?;
        ensure!(found == counted, "{hook}: {found:?}, not {counted:?}");
    }
    // No program of an earlier run is kept that this one does not need.
    stop(start(host, &["--hook", "tcx", "--keep"])?)?;
    ensure!(has_pin(host, "twheel_ingress")? && !has_pin(host, "twheel_xdp")?);
    detach(host)?;
    check_clean(host)
}

#[test]
fn filters_whose_pins_somebody_has_removed_are_cleared_up() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for next in ["detach", "clsact", "xdp"] {
        let args = ["--hook", "clsact", "--egress", "clsact", "--keep"];
        ensure!(start(host, &args)?.kill()?.signal() == Some(9));
        for instance in host.instances()? {
            remove_pins(&instance);
        }
        if next == "detach" {
            detach(host)?;
        } else {
            let twheel = start(host, &["--hook", next])?;
            let found = filters_of(host, SERVER, "ingress")?;
            ensure!(found.len() == usize::from(next == "clsact"), "{found:?}");
            ensure!(filters_of(host, SERVER, "egress")?.is_empty(), "{next}");
            let wire = Wire::new(&pair, 6000)?;
            wire.talk(2, 3)?;
            ensure!(wire.counted(host)? == (2, 3), "{next}");
            stop(twheel)?;
        }
        // Nobody can tell any more whose the qdisc is.
        tc(host, &format!("qdisc del dev {SERVER} clsact"))?;
        check_clean(host).context(next)?;
    }
    Ok(())
}

#[test]
fn a_filter_of_each_direction_keeps_the_qdisc_for_the_other() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for (first, second) in [
        (["clsact", "clsact"], ["clsact", "off"]),
        (["clsact", "clsact"], ["xdp", "clsact"]),
        (["clsact", "off"], ["clsact", "clsact"]),
    ] {
        for [hook, egress] in [first, second] {
            let twheel = start(host, &["--hook", hook, "--egress", egress, "--keep"])?;
            ensure!(twheel.kill()?.signal() == Some(9));
            for (way, by) in [("ingress", hook), ("egress", egress)] {
                let found = filters_of(host, SERVER, way)?;
                ensure!(found.len() == usize::from(by == "clsact"), "{found:?}");
            }
        }
        detach(host)?;
        check_clean(host)?;
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_said_in_one_sentence_and_nothing_is_attached() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let (guards, links) = guard(host)?;
    let listed = format!(
        "there is no such program on {SERVER}; TCX ingress: guard (id {}); TCX egress: guard (id {})",
        guards[0].id, guards[1].id
    );
    let reset = ["--reap", "enforce=reset", "--i-know-this-drops-traffic"];
    for (args, code, words) in [
        (&["--hook", "tc"][..], 2, "possible values"),
        (&["--order", "sideways"], 2, "give first, last, before:NAME"),
        (&["--order", "before:"], 2, "give the name of a program"),
        (&["--order", "after:id:x"], 2, "no id of a program"),
        (&["--hook", "tcx", "--mode", "native"], 2, "--mode says"),
        (&["--hook", "clsact", "--mode", "auto"], 2, "--mode says"),
        (&["--hook", "tcx", "--order", "before:nobody"], 2, &listed),
        (&["--hook", "tcx", "--order", "after:id:1"], 2, &listed),
        (
            &["--egress", "off", "--order", "after:guard"],
            2,
            "XDP has no order",
        ),
        (
            &[&["--hook", "tcx"], &reset[..]].concat(),
            2,
            "give --hook xdp",
        ),
    ] {
        let ended = run_once(host, args)?;
        ensure!(ended.code() == Some(code), "{args:?}: {ended:?}");
        ensure!(ended.stderr.contains(words), "{args:?}: {ended:?}");
        ensure!(host.instances()?.is_empty(), "{args:?}");
        ensure!(programs(host, Way::In)? == [guards[0].id], "{args:?}");
        ensure!(programs(host, Way::Out)? == [guards[1].id], "{args:?}");
    }
    drop(links);
    // The second cannot be, so the first is not attached.
    let both = [&["--iface", "lo"], &reset[..]].concat();
    let ended = run_once(host, &both)?;
    ensure!(ended.code() == Some(5), "{ended:?}");
    let words =
        "lo: enforce=reset takes XDP, and incoming packets would be seen by TCX (the driver";
    ensure!(ended.stderr.contains(words), "{ended:?}");
    // Nor if XDP is taken.
    let other = Other::xdp("theirs")?;
    let _link = other.attach_xdp(host, SERVER, true)?;
    let ended = run_once(host, &reset)?;
    ensure!(ended.code() == Some(5), "{ended:?}");
    ensure!(ended.stderr.contains("XDP is taken: theirs"), "{ended:?}");
    host.await_attached(SERVER, &["xdp"])?;
    ensure!(host.instances()?.is_empty());
    Ok(())
}

#[test]
fn a_policy_that_asks_for_resets_takes_xdp() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let text = "[[rule]]\nname = \"r\"\ndport = 1\nreap = [\"enforce=reset\"]\n";
    let policy = twheel_tests::netns::PolicyFile::new("resets", text)?;
    let args = ["--i-know-this-drops-traffic", "--policy", policy.path()];
    let ended = run_once(&pair.server, &[&args[..], &["--hook", "tcx"]].concat())?;
    ensure!(ended.code() == Some(2), "{ended:?}");
    ensure!(
        ended.stderr.contains("enforce=reset takes XDP"),
        "{ended:?}"
    );
    check_clean(&pair.server)?;
    stop(start(&pair.server, &args)?)?;
    check_clean(&pair.server)
}

#[test]
fn a_flow_that_has_expired_is_refused_at_tcx_and_clsact() -> Result<()> {
    require_root();
    for (family, hook) in [(Family::V4, "tcx"), (Family::V6, "clsact")] {
        let pair = Pair::new()?;
        let args = ["--iface", SERVER, "--hook", hook, "--timeout", "2s"];
        let reap = ["--reap", "enforce=drop", "--i-know-this-drops-traffic"];
        let twheel = Twheel::start(&pair.server, &[&args[..], &reap, &["--json"]].concat())?;
        let mut connection = pair.connect(family)?;
        connection.talk()?;
        let line = twheel.line(PATIENCE)?.context("nothing has expired")?;
        ensure!(line.expiry()?.src == connection.name, "{}", line.text);
        let line = twheel.line(PATIENCE)?.context("nothing was done")?;
        ensure!(line.text.contains(r#""outcome":"done""#), "{}", line.text);
        ensure!(
            connection.unacknowledged(Duration::from_secs(1))? > 0,
            "acknowledged"
        );
        ensure!(pair.server.counter("enforced_dropped")? >= 1, "not counted");
        stop(twheel)?;
        check_clean(&pair.server)?;
    }
    Ok(())
}

#[test]
fn a_program_that_is_needed_later_is_loaded_then() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let args = ["--iface", "later0", "--wait-iface"];
    let twheel = start(host, &args)?;
    ensure!(!has_pin(host, "twheel_ingress")?);
    // A bridge has no native XDP. The run has three capabilities by now.
    host.ip("link add later0 type bridge")?;
    twheel.await_stderr("later0: attached, TCX, both directions")?;
    ensure!(has_pin(host, "twheel_ingress")?);
    ensure!(host.attached("later0")? == ["ingress", "egress"]);
    host.ip("link del later0")?;
    twheel.await_stderr("later0: gone")?;
    stop(twheel)?;
    check_clean(host)
}

#[test]
fn links_left_on_what_has_another_name_by_now_are_let_go_of() -> Result<()> {
    require_root();
    for hook in ["tcx", "clsact"] {
        let pair = Pair::new()?;
        let host = &pair.server;
        let args = ["--hook", hook, "--egress", hook, "--keep"];
        ensure!(start(host, &args)?.kill()?.signal() == Some(9));
        host.ip(&format!("link set {SERVER} down"))?;
        host.ip(&format!("link set {SERVER} name other0"))?;
        host.ip(&format!("link add {SERVER} type veth peer name peer0"))?;
        // The new one is chosen for anew.
        let twheel = start(host, &[])?;
        let stderr = twheel.stderr();
        ensure!(stderr.contains("attached, native XDP"), "{hook}: {stderr}");
        host.await_attached("other0", &[])?;
        ensure!(!has_qdisc(host, "other0")?);
        stop(twheel)?;
        check_clean(host)?;
    }
    Ok(())
}

#[test]
fn interfaces_without_a_link_layer_header_are_attached_by_tcx() -> Result<()> {
    require_root();
    let host = Namespace::new("raw")?;
    let _tun = host.tun("tun0", None)?;
    host.ip("link set tun0 up")?;
    let layer = host.enter(|| link_layer("tun0"))?;
    ensure!(layer == LinkLayer::Ip, "{layer:?}");
    for (args, attached, hooks) in [
        (
            &[][..],
            "tun0: attached, TCX, both directions",
            ["ingress", "egress"],
        ),
        (
            &["--hook", "xdp"],
            "tun0: attached, generic XDP, both directions",
            ["xdp", "egress"],
        ),
    ] {
        let twheel = Twheel::start(&host, &[&["--iface", "tun0"], args].concat())?;
        ensure!(twheel.stderr().contains(attached), "{}", twheel.stderr());
        ensure!(host.attached("tun0")? == hooks);
        stop(twheel)?;
        host.check_clean("tun0")?;
    }
    // Of CAN.
    let _can = host.tun("can0", Some(280))?;
    let ended = host.twheel_once(&["run", "--iface", "can0"])?;
    ensure!(ended.code() == Some(5), "{ended:?}");
    let words = "can0 is of type Can (280), which twheel does not read";
    ensure!(ended.stderr.contains(words), "{ended:?}");
    host.check_clean("can0")
}

#[test]
fn whether_a_card_takes_out_vlan_tags_is_known() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // As veth does, and loopback does not.
    pair.server.enter(|| {
        ensure!(strips_vlan_tags(SERVER));
        ensure!(!strips_vlan_tags("lo"));
        Ok(())
    })
}

#[test]
fn an_interface_that_goes_is_attached_by_the_same_hook_when_it_is_back() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    for hook in ["tcx", "clsact"] {
        let args = ["--hook", hook, "--egress", hook, "--wait-iface"];
        let twheel = start(host, &args)?;
        host.ip(&format!("link del {SERVER}"))?;
        twheel.await_stderr("gone:")?;
        host.ip(&format!("link add {SERVER} type veth peer name peer0"))?;
        let end = Instant::now() + PATIENCE;
        while twheel.stderr().matches(": attached").count() < 2 {
            ensure!(Instant::now() < end, "{}", twheel.stderr());
            thread::sleep(millis(10));
        }
        let filters = filters_of(host, SERVER, "ingress")?.len();
        ensure!(filters == usize::from(hook == "clsact"));
        ensure!(host.attached(SERVER)?.contains(&"ingress") == (hook == "tcx"));
        stop(twheel)?;
        check_clean(host)?;
    }
    Ok(())
}
