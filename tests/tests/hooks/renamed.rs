//! Interfaces that have exchanged their names between two runs.

use std::{collections::BTreeMap, thread, time::Instant};

use anyhow::{Context, Result, ensure};
use etherparse::PacketBuilder;
use serde_json::Value;
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    path,
    running::Twheel,
    tc::{filters_of, has_qdisc},
};

use crate::{millis, stop};

const LEGS: [&str; 2] = ["leg0", "leg1"];

/// A host with two interfaces, and a host with their other ends.
struct Lab {
    host: Namespace,
    peer: Namespace,
}

impl Lab {
    fn new() -> Result<Self> {
        let (host, peer) = (Namespace::new("host")?, Namespace::new("peer")?);
        for leg in LEGS {
            let far = format!("type veth peer name {leg} netns {}", peer.name());
            host.ip(&format!("link add {leg} {far}"))?;
            for end in [&host, &peer] {
                end.ip(&format!("link set {leg} up"))?;
            }
        }
        Ok(Self { host, peer })
    }

    fn start(&self, args: &[&str]) -> Result<Twheel> {
        let mut all = vec!["--iface", "leg0,leg1", "--proto", "udp", "--accounting"];
        all.extend(args);
        Twheel::start(&self.host, &all)
    }

    /// Exchanges the names on the host.
    fn swap(&self) -> Result<()> {
        let down = LEGS.map(|leg| format!("link set {leg} down\n")).concat();
        let up = LEGS.map(|leg| format!("link set {leg} up\n")).concat();
        let names = "link set leg0 name old0\nlink set leg1 name leg0\nlink set old0 name leg1\n";
        self.host.batch(&format!("{down}{names}{up}"))
    }

    /// Sends datagrams of a flow from the far end of an interface.
    fn send(&self, far: &str, port: u16, count: usize) -> Result<()> {
        let packet = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 99, 0, 2], [10, 99, 0, 1], 64)
            .udp(port, 53);
        let mut frame = Vec::new();
        packet.write(&mut frame, b"!")?;
        let socket = self.peer.enter(|| path::open(far, 0))?;
        (0..count).try_for_each(|_| path::send(&socket, &frame))
    }

    /// The interface and the packets of each flow, by source port.
    fn counted(&self) -> Result<BTreeMap<u64, (String, u64)>> {
        let args = ["flows", "--json", "--iface", "leg0", "dport == 53"];
        let ended = self.host.twheel_once(&args)?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        let lines = ended.lines.iter().map(|line| {
            let flow: Value = serde_json::from_str(&line.text)?;
            let iface = flow["iface"].as_str().context("no iface")?.to_owned();
            let number = |key: &str| flow[key].as_u64().with_context(|| format!("no {key}"));
            Ok((number("sport")?, (iface, number("orig_packets")?)))
        });
        lines.collect()
    }

    fn check_clean(&self) -> Result<()> {
        for leg in LEGS {
            self.host.check_clean(leg)?;
            for way in ["ingress", "egress"] {
                let found = filters_of(&self.host, leg, way)?;
                ensure!(found.is_empty(), "{leg}: filters are left: {found:?}");
            }
            ensure!(!has_qdisc(&self.host, leg)?, "{leg}: the qdisc is left");
        }
        Ok(())
    }
}

#[test]
fn interfaces_that_exchange_their_names_are_each_seen_once() -> Result<()> {
    require_root();
    // `hooks`: besides filters.
    for (first, second, hooks) in [
        (&["--keep"][..], &[][..], &["xdp", "egress"][..]),
        (&["--keep"], &["--hook", "xdp"], &["xdp", "egress"]),
        (
            &["--keep", "--hook", "tcx"],
            &["--hook", "tcx"],
            &["ingress", "egress"],
        ),
        (
            &["--keep", "--hook", "clsact", "--egress", "clsact"],
            &["--hook", "clsact", "--egress", "clsact"],
            &[],
        ),
        (
            &["--keep", "--hook", "clsact", "--egress", "clsact"],
            &[],
            &["xdp", "egress"],
        ),
    ] {
        let case = format!("{first:?} {second:?}");
        for killed in [true, false] {
            let lab = Lab::new()?;
            let twheel = lab.start(first)?;
            match killed {
                true => ensure!(twheel.kill()?.signal() == Some(9)),
                false => stop(twheel)?,
            }
            lab.swap()?;
            let twheel = lab.start(second)?;
            let stderr = twheel.stderr();
            ensure!(!stderr.contains("taken"), "{case}: {stderr}");
            for leg in LEGS {
                let found = lab.host.attached(leg)?;
                ensure!(found == hooks, "{case}: {leg}: {found:?}: {stderr}");
            }
            // The far ends have kept their names.
            lab.send("leg0", 1000, 5)?;
            lab.send("leg1", 1001, 7)?;
            let wanted = BTreeMap::from([
                (1000, ("leg1".to_owned(), 5)),
                (1001, ("leg0".to_owned(), 7)),
            ]);
            let until = Instant::now() + PATIENCE / 30;
            while lab.counted()? != wanted {
                let found = lab.counted()?;
                ensure!(Instant::now() < until, "{case}: {found:?}: {stderr}");
                thread::sleep(millis(50));
            }
            stop(twheel)?;
            lab.check_clean().context(case.clone())?;
        }
    }
    Ok(())
}
