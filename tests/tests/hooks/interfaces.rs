//! Interfaces of other kinds, and interfaces that disappear.

use std::{thread, time::Instant};

use anyhow::{Result, ensure};
use twheel::interfaces::{LinkLayer, link_layer, strips_vlan_tags};
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
    tc::filters_of,
};

use crate::{check_clean, millis, start, stop};

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
    // 280 is the type of CAN interfaces.
    let _can = host.tun("can0", Some(280))?;
    let ended = host.twheel_once(&["run", "--iface", "can0"])?;
    ensure!(ended.code() == Some(5), "{ended:?}");
    let words = "can0 has type Can (280), which twheel does not support";
    ensure!(ended.stderr.contains(words), "{ended:?}");
    host.check_clean("can0")
}

#[test]
fn whether_a_card_takes_out_vlan_tags_is_known() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // As veth interfaces do; the loopback interface does not.
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
        twheel.await_stderr("disappeared:")?;
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
