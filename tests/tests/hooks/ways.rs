//! Each hook sees the same packets.

use std::{
    io::{Read, Write},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{PATIENCE, require_root},
    others::{DROPPED, Other},
    pair::{Family, Pair, SERVER},
    running::Twheel,
    tc::filters_of,
    tcp_info::tcp_info,
    wire::Wire,
};

use crate::{check_clean, has_pin, millis, start, stop};

#[test]
fn auto_takes_native_xdp_where_it_is_free() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = start(&pair.server, &[])?;
    let attached = "attached, native XDP, both directions";
    ensure!(twheel.stderr().contains(attached), "{}", twheel.stderr());
    ensure!(pair.server.attached(SERVER)? == ["xdp", "egress"]);
    // Programs that no interface needs are not loaded.
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
        ensure!(drops()?, "the other program does not drop packets");
        let before = host.ip(&format!("-d link show dev {SERVER}"))?;

        let twheel = start(host, &[])?;
        let mode = if native { "native" } else { "generic" };
        let taken = format!(
            "XDP is taken: theirs (id {}), {mode}: using TCX for incoming packets",
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
        ensure!(drops()?, "the other program no longer drops packets");
        stop(twheel)?;
        host.await_attached(SERVER, &["xdp"])?;
        let after = host.ip(&format!("-d link show dev {SERVER}"))?;
        ensure!(after == before, "{after}");
        ensure!(drops()?, "the other program no longer drops packets");
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

/// Joined packets, and packets that are not segmented yet, count as many as the kernel's socket
/// counts.
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
        Ok(sent.join().expect("the sender panicked")?)
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
        "{touched} of {sent}: no packets were joined"
    );
    drop(connection);
    stop(twheel)
}
