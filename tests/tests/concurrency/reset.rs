//! Flows that are reset on one CPU or the other.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use etherparse::TcpHeader;
use nix::time::{ClockId, clock_getres, clock_gettime};
use twheel::stepper::pin_to;
use twheel_holdup::Watch;
use twheel_tests::{
    forge::Forger,
    is_long,
    netns::require_root,
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

use crate::{CPUS, Random};

/// A flow that was reset.
struct Reset {
    client: SocketAddr,
    /// When the RST was sent.
    at: Instant,
    /// By how much jiffies lagged at that time. It is more than one jiffy if the CPU that counts
    /// them was held up.
    behind: Duration,
}

/// Sends a SYN on one CPU, and a RST of the same flow on another.
fn reset_elsewhere(forger: &Forger, flow: u32, cpus: [u32; 2]) -> Result<Reset> {
    let from = SocketAddr::new(Family::V4.client(), 1024 + flow as u16);
    let to = SocketAddr::new(Family::V4.server(), 9);
    let syn = TcpHeader {
        syn: true,
        sequence_number: 1000,
        ..TcpHeader::default()
    };
    let rst = TcpHeader {
        rst: true,
        sequence_number: 1001,
        ..TcpHeader::default()
    };
    pin_to(cpus[0])?;
    forger.send(from, to, syn)?;
    pin_to(cpus[1])?;
    let counted = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)?);
    let elapsed = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    let at = Instant::now();
    forger.send(from, to, rst)?;
    Ok(Reset {
        client: from,
        at,
        behind: elapsed.saturating_sub(counted),
    })
}

/// A run on the server that sees incoming packets only. It gives flows that were reset the timeout
/// `close`.
fn one_way(pair: &Pair, more: &[&str]) -> Result<Twheel> {
    let mut args = vec!["--iface", SERVER, "--json", "--egress", "off"];
    args.extend(more);
    Twheel::start(&pair.server, &args)
}

/// Flows that were reset on another CPU stay in the inbox of their wheel's CPU, since no timer is
/// due for an hour.
#[test]
fn quiet_flows_that_were_reset_on_either_cpu_are_deleted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let forger = Forger::new(&pair)?;
    let twheel = one_way(&pair, &["--timeout", "syn_sent=2h,close=1h"])?;
    for flow in 0..40 {
        reset_elsewhere(&forger, flow, [flow % 2, flow / 2 % 2])?;
    }
    let delete = |more: &[&str]| -> Result<String> {
        let mut args = vec!["delete", "state == close", "--iface", SERVER, "--json"];
        args.extend(more);
        let ended = pair.server.twheel_once(&args)?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        let line: String = ended.lines.iter().map(|line| &*line.text).collect();
        let (_, counts) = line.split_once("\",\"").context("no counts")?;
        let (_, counts) = counts.rsplit_once("\",").context("no counts")?;
        Ok(counts.to_owned())
    };
    assert_eq!(delete(&["--dry-run"])?, r#""would_delete":40}"#);
    assert_eq!(delete(&[])?, r#""deleted":40,"stayed":0}"#);
    assert_eq!(delete(&["--dry-run"])?, r#""would_delete":0}"#);
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0));
    assert_eq!(ended.lines.len(), 40);
    Ok(())
}

/// The steppers sleep, since no timer is due for an hour. Flows begin on one CPU and are reset on
/// the other, which brings their deadlines to 300 ms. Each is reported at most a tick plus
/// scheduling delays late, and none is lost.
#[test]
fn a_stepper_that_sleeps_is_called_in_time() -> Result<()> {
    require_root();
    const CLOSE: Duration = Duration::from_millis(300);
    const TICK: Duration = Duration::from_millis(20);
    const SCHEDULING: Duration = Duration::from_millis(100);
    let flows = if is_long() { 10_000 } else { 300 };
    let pair = Pair::new()?;
    let forger = Forger::new(&pair)?;
    let options = ["--tick", "20ms", "--timeout", "syn_sent=1h,close=300ms"];
    let twheel = one_way(&pair, &options)?;
    let watch = Watch::start();
    let send = |cpu: u32| -> Result<Vec<Reset>> {
        let mut random = Random(0x5eed + u64::from(cpu));
        let mut sent = Vec::new();
        for flow in 0..flows {
            sent.push(reset_elsewhere(&forger, flow * 2 + cpu, [cpu, 1 - cpu])?);
            // Also hits the moment when a stepper that has reported others goes to sleep.
            thread::sleep(Duration::from_micros(random.below(30_000).into()));
        }
        Ok(sent)
    };
    let sent: Vec<Vec<Reset>> = thread::scope(|scope| {
        let senders = CPUS.map(|cpu| scope.spawn(move || send(cpu)));
        let sent = senders.map(|sender| sender.join().expect("a sender panicked"));
        sent.into_iter().collect::<Result<_>>()
    })?;
    let sent: HashMap<_, _> = sent
        .into_iter()
        .flatten()
        .map(|it| (it.client, it))
        .collect();
    let within = Instant::now() + CLOSE + Duration::from_secs(2);
    let expiries = twheel.expiries_until(within)?;
    let jiffy = Duration::from(clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)?);
    let mut latest = Duration::ZERO;
    let mut ended = HashSet::new();
    for expiry in &expiries {
        assert!(ended.insert(expiry.src), "reported twice: {expiry:?}");
        let reset = &sent[&expiry.src];
        // Never early, measured in jiffies, which the flow's stamp counts.
        let late = expiry.at - reset.at + reset.behind.saturating_sub(jiffy);
        assert!(late >= CLOSE, "{late:?}, early: {expiry:?}");
        latest = latest.max(late - CLOSE);
    }
    assert_eq!(ended.len(), sent.len(), "some flows were not reported");
    println!("{} flows, the latest {latest:?} late", sent.len());
    // Both the packet's path and the stepper may have been held up.
    let held_up = 2 * watch.stop();
    assert!(
        latest <= TICK + 2 * jiffy + SCHEDULING + held_up,
        "{latest:?} late, of which the host may have caused {held_up:?}"
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}
