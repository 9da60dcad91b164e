//! `twheel delete`.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use twheel_tests::{
    directory::Directory,
    netns::require_root,
    pair::{Busy, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::{end, millis, names, objects, sources, src};

#[test]
fn a_flow_that_has_packets_is_not_deleted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--json"])?;
    let idle = pair.connect_some(40)?;
    let busy = pair.connect_some(4)?;
    let busy_names = names(&busy);
    let busy = Busy::start(busy, Duration::ZERO);
    thread::sleep(millis(100));

    let port = idle[0].name.port();
    let filter = format!("sport == {port} and src == {}", idle[0].name.ip());
    let ended = pair.server.twheel_once(&["delete", &filter, "--dry-run"])?;
    assert!(
        ended.stderr.contains("1 flow would be deleted"),
        "{}",
        ended.stderr
    );
    let ended = pair.server.twheel_once(&["delete", &filter])?;
    assert!(ended.stderr.contains("1 flow deleted"), "{}", ended.stderr);
    // All flows are chosen again and again.
    let mut deleted = 0;
    let mut stayed = 0;
    for _ in 0..20 {
        let ended = pair.server.twheel_once(&["delete", "proto == tcp"])?;
        let mut numbers = ended
            .stderr
            .split_ascii_whitespace()
            .filter_map(|it| it.parse::<u64>().ok());
        deleted += numbers.next().context("no number")?;
        stayed += numbers.next().unwrap_or(0);
    }
    busy.stop()?;
    assert!(stayed >= 20, "the busy flows were chosen as well: {stayed}");
    // If a flow begins again with a packet of the server, the server is its initiator.
    let client = |src: SocketAddr, dst: SocketAddr| if src.port() == PORT { dst } else { src };
    for flow in objects(&pair.server, &["flows", "--json"])? {
        let name = client(src(&flow)?, end(&flow, "dst", "dport")?);
        assert!(busy_names.contains(&name), "{flow}");
    }
    let mut expiries = twheel.ends_within(millis(300), 1 + deleted as usize)?;
    assert_eq!(expiries.len() as u64, 1 + deleted);
    for expiry in &mut expiries {
        expiry.src = client(expiry.src, expiry.dst);
    }
    let mut gone = BTreeSet::new();
    for expiry in &expiries {
        assert_eq!(expiry.reason, "deleted");
        // A busy flow may pause for a moment, but it is not deleted in the clock unit of its latest
        // packet.
        assert!(expiry.idle > Duration::ZERO, "{expiry:?}");
        assert!(gone.insert(expiry.src) || busy_names.contains(&expiry.src));
    }
    assert!(
        names(&idle).is_subset(&gone),
        "not all idle flows were deleted"
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// More events than the ring holds.
const MANY: u32 = 9000;

#[test]
fn what_a_run_has_left_can_be_deleted_without_one() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("orphans")?;
    let args = ["--iface", SERVER, "--keep", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, MANY)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    let history = ["--history", directory.path()];
    let delete = [&["delete", "--json", "sport in 1024-1033"][..], &history].concat();
    let dry = objects(&pair.server, &[&delete[..], &["--dry-run"]].concat())?;
    assert_eq!(dry[0]["would_delete"], 10);
    let deleted = objects(&pair.server, &delete)?;
    assert_eq!(
        (&deleted[0]["deleted"], &deleted[0]["stayed"]),
        (&10.into(), &0.into())
    );
    let flush = [&["flush", "--json"][..], &history].concat();
    let flushed = objects(&pair.server, &flush)?;
    assert_eq!(flushed[0]["deleted"], MANY - 10);
    assert!(objects(&pair.server, &["flows", "--json"])?.is_empty());
    // Only the history got the events.
    let expired = [&["expired", "--json"][..], &history].concat();
    let ended = objects(&pair.server, &expired)?;
    assert_eq!(sources(&ended)?.len(), MANY as usize);
    assert_eq!(ended.len(), MANY as usize, "not each flow once");
    let count = |reason: &str| ended.iter().filter(|it| it["reason"] == reason).count();
    assert_eq!(
        (count("deleted"), count("flushed")),
        (10, MANY as usize - 10)
    );

    let twheel = Twheel::start(&pair.server, &args)?;
    assert_eq!(
        twheel.expiries_until(Instant::now() + millis(300))?.len(),
        0
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    assert_eq!(
        pair.server
            .twheel_once(&["detach", "--iface", SERVER])?
            .code(),
        Some(0)
    );
    pair.server.check_clean(SERVER)
}
