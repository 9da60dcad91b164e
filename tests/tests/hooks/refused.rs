//! What a run refuses, and what a policy needs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use twheel::tc::Way;
use twheel_tests::{
    netns::{PATIENCE, require_root},
    others::Other,
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

use crate::{check_clean, has_pin, order::guard, programs, run_once, start, stop};

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
        (&["--order", "after:id:x"], 2, "is not the id of a program"),
        (&["--hook", "tcx", "--mode", "native"], 2, "--mode sets"),
        (&["--hook", "clsact", "--mode", "auto"], 2, "--mode sets"),
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
    // The second interface cannot be attached, so the first is not attached, either.
    let both = [&["--iface", "lo"], &reset[..]].concat();
    let ended = run_once(host, &both)?;
    ensure!(ended.code() == Some(5), "{ended:?}");
    let words =
        "lo: enforce=reset needs XDP, but incoming packets would be seen by TCX (the driver";
    ensure!(ended.stderr.contains(words), "{ended:?}");
    // Nor if another program has XDP.
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
    let policy = twheel_tests::running::PolicyFile::new("resets", text)?;
    let args = ["--i-know-this-drops-traffic", "--policy", policy.path()];
    let ended = run_once(&pair.server, &[&args[..], &["--hook", "tcx"]].concat())?;
    ensure!(ended.code() == Some(2), "{ended:?}");
    ensure!(
        ended.stderr.contains("enforce=reset needs XDP"),
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
        let line = twheel.line(PATIENCE)?.context("no flow has expired")?;
        ensure!(line.expiry()?.src == connection.name, "{}", line.text);
        let line = twheel.line(PATIENCE)?.context("no action was reported")?;
        ensure!(line.text.contains(r#""outcome":"done""#), "{}", line.text);
        ensure!(
            connection.unacknowledged(Duration::from_secs(1))? > 0,
            "acknowledged"
        );
        ensure!(
            pair.server.counter("enforced_dropped")? >= 1,
            "the drops were not counted"
        );
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
    // A bridge has no native XDP. By now the run has only three capabilities.
    host.ip("link add later0 type bridge")?;
    twheel.await_stderr("later0: attached, TCX, both directions")?;
    ensure!(has_pin(host, "twheel_ingress")?);
    ensure!(host.attached("later0")? == ["ingress", "egress"]);
    host.ip("link del later0")?;
    twheel.await_stderr("later0: disappeared:")?;
    stop(twheel)?;
    check_clean(host)
}
