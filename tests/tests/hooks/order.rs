//! twheel's place among the programs of others.

use std::{fs, os::fd::OwnedFd};

use anyhow::{Context, Result, ensure};
use aya_obj::generated::bpf_attach_type::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use nix::net::if_::if_nametoindex;
use twheel::tc::{Code, FilterId, Way, add_filter};
use twheel_tests::{
    netns::{Namespace, require_root},
    others::{FROM, Other, TO},
    pair::{Pair, SERVER},
    tc::{filters_of, tc},
    wire::Wire,
};

use crate::{detach, programs, start, stop};

/// The name of somebody else's program.
const GUARD: &str = "guard";
/// What a run reports about an earlier run's program that is not in its place.
const MOVED: &str = "moved for --order";
/// A port of the server; the guard drops its datagrams in both directions.
const GUARDED: u16 = 5001;

/// Attaches somebody else's TCX program in both directions.
pub fn guard(host: &Namespace) -> Result<([Other; 2], [OwnedFd; 2])> {
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

/// Sends three datagrams out and two in that the guard drops. Returns how many of them were
/// counted.
fn seen_of_dropped(pair: &Pair) -> Result<(u64, u64)> {
    let wire = Wire::new(pair, GUARDED)?;
    let before = wire.counted(&pair.server)?;
    for _ in 0..3 {
        // The sender may get an error, since the packet is dropped.
        let _ = wire.server.send(b"!");
    }
    for _ in 0..2 {
        wire.client.send(b"!")?;
    }
    // Datagrams behind them that no program drops.
    Wire::new(pair, 6001)?.talk(1, 1)?;
    wire.client.set_nonblocking(true)?;
    wire.server.set_nonblocking(true)?;
    for socket in [&wire.client, &wire.server] {
        ensure!(
            socket.recv(&mut [0]).is_err(),
            "the datagram was not dropped"
        );
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
        // This program is at ingress only.
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
            let line = &line.context("no finding about TCX")?.text;
            ensure!(line.contains(&own), "{line}");
            ensure!(line.contains("twheel's own twheel_ingress (id"), "{line}");
        }
        stop(twheel)?;
    }
    ensure!(programs(host, Way::In)? == [foreign[0]]);
    ensure!(programs(host, Way::Out)? == [foreign[1]]);
    Ok(())
}

/// Packets that another program redirects still go where it sends them, and twheel sees them if it
/// is in front.
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
        // A datagram behind them that is not redirected.
        Wire::new(&pair, 6001)?.talk(1, 1)?;
        ensure!(wire.counted(host)?.1 - counted.1 == seen, "{order:?}");
        ensure!(
            received()? >= before + 2,
            "{order:?}: the packets were not redirected"
        );
        wire.server.set_nonblocking(true)?;
        ensure!(
            wire.server.recv(&mut [0]).is_err(),
            "{order:?}: the packets were not dropped"
        );
        stop(twheel)?;
    }
    ensure!(programs(host, Way::In)? == [guard.id]);
    Ok(())
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
            let place = FilterId {
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
    // Programs of an earlier run stay in their places, unless another order is given.
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
