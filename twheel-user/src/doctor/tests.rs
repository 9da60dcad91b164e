//! Findings from given inputs.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use super::{
    finding::{Finding, Status},
    host::{bpffs, btf, clock, conntrack, jit, kernel},
    interfaces::{driver, xdp},
    pinned::instance,
    programs::{Tried, egress, programs, stepping},
};
use crate::{
    clock::Clock,
    hooks::{Egress, Hooks, Ingress, Mode},
    interfaces::{Interface, LinkLayer},
    order::ProgramNames,
    pins::FoundInstance,
    stepping::{self as ways, Stepping, Why},
};

/// Checks the status of a finding, and that every finding that is not `ok` says what to do.
fn is(finding: &Finding, status: Status) {
    assert_eq!(finding.status, status, "{finding:?}");
    assert_eq!(
        finding.remedy.is_some(),
        status != Status::Ok,
        "{finding:?}"
    );
}

#[test]
fn what_a_host_has() {
    is(&kernel("6.12.0", Some(&Ok(()))), Status::Ok);
    is(&kernel("5.10.0", Some(&Err("no".to_owned()))), Status::Fail);
    is(&kernel("6.12.0", None), Status::Warn);
    for (way, why, status) in [
        (Stepping::TestRuns, Why::Safe, Status::Ok),
        (Stepping::LiveFrames, Why::Unsafe, Status::Ok),
        (Stepping::LiveFrames, Why::Asked, Status::Ok),
        (Stepping::LiveFrames, Why::Untold, Status::Warn),
    ] {
        is(&stepping(Some(&Ok(ways::Found { way, why }))), status);
    }
    is(&stepping(Some(&Err("no".to_owned()))), Status::Fail);
    is(&stepping(None), Status::Warn);
    is(&btf(true), Status::Ok);
    is(&btf(false), Status::Warn);
    is(&bpffs(false), Status::Fail);
    let tried = Tried {
        verified: BTreeMap::from([("twheel_xdp".to_owned(), 31_000)]),
        took: Duration::from_millis(300),
    };
    is(&programs(Some(&Ok(tried))), Status::Ok);
    let refused = programs(Some(&Err("the kernel refuses\nand why".to_owned())));
    is(&refused, Status::Fail);
    assert_eq!(refused.what, "the kernel refuses");
    is(&programs(None), Status::Warn);
    for (setting, loads, status) in [
        (Some("1\n"), false, Status::Ok),
        (Some("0\n"), false, Status::Fail),
        (None, true, Status::Ok),
        (None, false, Status::Warn),
    ] {
        is(&jit(setting, loads), status);
    }
    let never = || panic!("nothing to try");
    let none = || Some(Err(anyhow::anyhow!("no such qdisc")));
    use Egress::{Auto, Clsact, Off, On, Tcx};
    for (finding, status, words) in [
        (egress(Auto, Some(true), never), Status::Ok, "TCX: "),
        (egress(Auto, None, never), Status::Warn, "this user"),
        (
            egress(Auto, Some(false), || Some(Ok(()))),
            Status::Ok,
            "clsact: ",
        ),
        (
            egress(Auto, Some(false), none),
            Status::Warn,
            "no such qdisc",
        ),
        (
            egress(Auto, Some(false), || None),
            Status::Warn,
            "not tried",
        ),
        (egress(On, Some(true), never), Status::Ok, "TCX: "),
        (egress(On, Some(false), none), Status::Fail, "no such qdisc"),
        (egress(Tcx, Some(false), never), Status::Fail, "no TCX"),
        (
            egress(Clsact, Some(true), || Some(Ok(()))),
            Status::Ok,
            "clsact: ",
        ),
        (
            egress(Clsact, Some(true), none),
            Status::Fail,
            "no such qdisc",
        ),
        (egress(Off, Some(false), never), Status::Ok, "not seen"),
    ] {
        is(&finding, status);
        assert!(finding.what.contains(words), "{finding:?}");
    }
    is(&clock(Clock::jiffies()), Status::Ok);
}

#[test]
fn conntrack_is_full_above_nine_tenths() {
    for (count, most, status) in [
        (Some("90\n"), Some("100\n"), Status::Ok),
        (Some("91\n"), Some("100\n"), Status::Warn),
        (Some("0"), Some("0"), Status::Ok),
        (None, None, Status::Ok),
    ] {
        is(&conntrack(count, most), status);
    }
}

#[test]
fn what_an_interface_carries() {
    let interface = |native, xdp: &[(&'static str, u32)]| Interface {
        name: "eth0".to_owned(),
        layer: Some(LinkLayer::Ethernet),
        native,
        xdp: xdp.to_vec(),
        ..Interface::default()
    };
    let hooks = |ingress, mode| Hooks {
        ingress,
        mode,
        egress: Egress::Auto,
        order: None,
        resets: false,
        vlans: true,
        names: ProgramNames::default(),
    };
    use Ingress::{Auto, Tcx, Xdp};
    for (ingress, mode, native, status) in [
        (Auto, None, Some(true), Status::Ok),
        (Auto, None, Some(false), Status::Ok),
        (Auto, None, None, Status::Ok),
        (Tcx, None, Some(false), Status::Ok),
        (Xdp, None, Some(false), Status::Warn),
        (Xdp, None, None, Status::Warn),
        (Xdp, Some(Mode::Native), Some(true), Status::Ok),
        (Auto, Some(Mode::Native), Some(false), Status::Fail),
        (Auto, Some(Mode::Generic), Some(false), Status::Ok),
    ] {
        is(
            &driver(&interface(native, &[]), &hooks(ingress, mode)),
            status,
        );
    }
    let hook = hooks(Xdp, None);
    let named = |_| Some("other".to_owned());
    let own = [7];
    is(&xdp(&interface(None, &[]), &hook, &own, &named), Status::Ok);
    is(
        &xdp(&interface(None, &[("native", 7)]), &hook, &own, &named),
        Status::Ok,
    );
    for programs in [&[("native", 8)][..], &[("native", 7), ("hardware", 8)]] {
        let interface = interface(None, programs);
        is(&xdp(&interface, &hook, &own, &named), Status::Fail);
        is(&xdp(&interface, &hook, &own, &|_| None), Status::Warn);
        let auto = xdp(&interface, &hooks(Auto, None), &own, &named);
        is(&auto, Status::Ok);
        assert!(auto.what.contains("other (id 8, "), "{auto:?}");
    }
}

#[test]
fn what_is_pinned() {
    let found = |namespace, current, held, interfaces: &[&str]| FoundInstance {
        path: "/sys/fs/bpf/twheel/v5/1-eth0".into(),
        current,
        namespace: Some(namespace),
        interfaces: interfaces.iter().map(|&name| name.to_owned()).collect(),
        held,
    };
    let alive = HashSet::from([1, 2]);
    for (found, status, words) in [
        (found(1, true, true, &["eth0"]), Status::Ok, ""),
        (found(1, false, true, &["eth0"]), Status::Warn, "stop"),
        (
            found(1, true, false, &["eth0"]),
            Status::Warn,
            "`twheel run --iface eth0`",
        ),
        (
            found(1, true, false, &["eth0", "gone"]),
            Status::Warn,
            "`twheel detach --iface eth0 --iface gone`",
        ),
        (
            found(1, false, false, &["eth0"]),
            Status::Fail,
            "`twheel detach --iface eth0`",
        ),
        (
            found(1, true, false, &["blue/eth0", "green/eth0", "blue/eth1"]),
            Status::Warn,
            "`twheel run --netns blue,green --iface eth0 --iface eth1`",
        ),
        (
            found(1, true, false, &["eth0", "blue/eth0"]),
            Status::Warn,
            "`twheel run --netns all --iface eth0`",
        ),
        (
            found(1, true, false, &["blue/eth0", "gone/eth0"]),
            Status::Warn,
            "`twheel detach --iface blue/eth0 --iface gone/eth0`",
        ),
        (found(1, true, false, &[]), Status::Warn, "rm -r"),
        (found(2, true, true, &["eth0"]), Status::Ok, ""),
        (
            found(2, true, false, &["eth0"]),
            Status::Warn,
            "in that network namespace, ",
        ),
        (found(3, true, false, &["eth0"]), Status::Warn, "rm -r"),
    ] {
        let finding = instance(&found, 1, |name| !name.contains("gone"), &alive);
        is(&finding, status);
        assert!(
            finding.remedy.unwrap_or_default().contains(words),
            "{found:?}"
        );
    }
}
