//! One run replaces another, and what is left over is removed.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{remove_pins, require_root},
    pair::{Pair, SERVER},
    tc::{filters_of, has_qdisc, tc},
    wire::Wire,
};

use crate::{check_clean, detach, has_pin, millis, start, stop};

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
        // Once with the hook by name, and once with the one of the earlier run.
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
                let sent = sender.join().expect("the sender panicked")?;
                let stderr = started?.kill()?.stderr;
                let adopted = match hook {
                    "tcx" => "attached, adopted TCX",
                    _ => "attached, adopted clsact",
                };
                ensure!(stderr.contains(adopted), "{stderr}");
                Ok(sent)
            })?;
            ensure!(sent > 100, "only {sent} packets were sent meanwhile");
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
        // The hooks of the earlier run stay in use.
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
    // Programs of an earlier run that this run does not need are removed.
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
        // Nobody can tell any more who made the qdisc.
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
        // For the new interface, the hook is chosen anew.
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
