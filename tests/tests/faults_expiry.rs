//! No expiry is lost: all flows are due at once, the ring is small, and the reader stalls.
//!
//! In the long run (`TWHEEL_LONG`) the test of the whole program has a million flows, too.
#![allow(missing_docs)]

use std::{
    collections::HashSet,
    io::{BufRead, BufReader},
    net::IpAddr,
    process::{Child, Stdio},
    sync::{
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::programs::{TestRun, TestRunOptions, Xdp};
use twheel::{data_plane::STEP_BUDGET, stepper::pin_to};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    step::Outcome,
};
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{Pair, SERVER},
    plane::{PASS, SYN, Setup, frame},
    running::{Twheel, wait_within},
};

const CPUS: [u32; 2] = [0, 1];

/// Begins flows on the CPU of this thread: one SYN each from address 10.0.0.0 + the flow's number.
fn begin(program: &Xdp, flows: std::ops::Range<u32>) {
    let mut bytes = frame(0, false, SYN);
    for flow in flows {
        bytes[26..30].copy_from_slice(&(0x0a00_0000 + flow).to_be_bytes());
        let options = TestRunOptions {
            data_in: Some(&bytes),
            ..TestRunOptions::new()
        };
        assert_eq!(program.test_run(options).unwrap().return_value, PASS);
    }
}

/// The number of an ended flow.
fn number(event: &Event) -> usize {
    match event.key.sender(event.seen().initiator()).ip() {
        IpAddr::V4(source) => (source.to_bits() - 0x0a00_0000) as usize,
        IpAddr::V6(_) => panic!("not IPv4"),
    }
}

#[test]
fn a_million_flows_due_at_once_outlive_a_reader_that_stalls() {
    const FLOWS: u32 = 1_000_000;
    let setup = Setup {
        // If a table is filled to its limit, some flows find their window full: docs/design.md,
        // "Load".
        max_flows: FLOWS / 4 * 5,
        ring_bytes: 64 << 10,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut ended = Vec::with_capacity(FLOWS as usize);
    {
        let (plane, _) = plane.parts();
        let program = plane.xdp("twheel_xdp").unwrap();
        thread::scope(|scope| {
            for cpu in CPUS {
                let (program, half) = (&*program, FLOWS / 2);
                scope.spawn(move || {
                    pin_to(cpu).unwrap();
                    begin(program, cpu * half..(cpu + 1) * half);
                });
            }
        });
    }
    assert_eq!(plane.counters().live(), u64::from(FLOWS));
    plane.pass(60_100);

    // How often a stepper has found the ring full; the reader waits for that and not for a clock.
    let (refused, steppers) = (AtomicU64::new(0), AtomicU64::new(CPUS.len() as u64));
    let mut drains = 0;
    {
        let (plane, ring) = plane.parts();
        let plane = &*plane;
        let (refused, steppers) = (&refused, &steppers);
        thread::scope(|scope| {
            for cpu in CPUS {
                scope.spawn(move || {
                    pin_to(cpu).unwrap();
                    loop {
                        match Outcome::from_raw(plane.step(STEP_BUDGET).unwrap().outcome) {
                            Some(Outcome::Done) => break,
                            Some(Outcome::Budget) => {}
                            Some(Outcome::RingFull) => {
                                refused.fetch_add(1, Relaxed);
                                thread::yield_now();
                            }
                            None => panic!("the step has no valid outcome"),
                        }
                    }
                    steppers.fetch_sub(1, Relaxed);
                });
            }
            scope.spawn(|| {
                while steppers.load(Relaxed) > 0 {
                    // A long wait now and then.
                    let stall = if drains % 500 == 250 { 10_000 } else { 4 };
                    let end = refused.load(Relaxed) + stall;
                    while refused.load(Relaxed) < end && steppers.load(Relaxed) > 0 {
                        thread::yield_now();
                    }
                    ring.drain_ended(&mut ended);
                    drains += 1;
                }
            });
        });
        ring.drain_ended(&mut ended);
    }

    let mut seen = vec![false; FLOWS as usize];
    for event in &ended {
        let flow = number(event);
        assert!(
            !std::mem::replace(&mut seen[flow], true),
            "{flow} reported twice"
        );
        assert_eq!(event.reason, Reason::Idle as u32);
    }
    let counters = plane.counters();
    let count = |counter| counters.get(counter);
    println!(
        "{} flows ended, read in {drains} drains; the ring was full {} times",
        ended.len(),
        count(Counter::RingFull)
    );
    assert_eq!(ended.len(), FLOWS as usize, "some events were lost");
    assert_eq!(count(Counter::Expired), u64::from(FLOWS));
    assert_eq!(count(Counter::EventsLost), 0);
    assert_eq!(count(Counter::RingFull), refused.into_inner());
    assert!(
        count(Counter::RingFull) > 10_000,
        "the ring was seldom full"
    );
    assert_eq!(counters.live(), 0);
}

/// A `twheel run --json` whose output the test reads when it chooses.
struct Run {
    child: Child,
    lines: Receiver<String>,
    stderr: Option<thread::JoinHandle<String>>,
}

impl Run {
    fn start(namespace: &Namespace, args: &[&str]) -> Result<Self> {
        let mut child = namespace
            .twheel(&["run", "--json", "--iface", SERVER])?
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start twheel")?;
        let stdout = child.stdout.take().context("no stdout")?;
        let stderr = child.stderr.take().context("no stderr")?;
        // The thread reads the next line only when the test has taken the last one, so it stalls
        // with the test.
        let (to_lines, lines) = sync_channel(0);
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if to_lines.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            lines,
            stderr: Some(thread::spawn(|| {
                std::io::read_to_string(stderr).unwrap_or_default()
            })),
        })
    }

    /// Reads this many lines, each of an expired flow, and adds the flows to a set.
    fn read(&mut self, lines: usize, seen: &mut HashSet<u32>) -> Result<()> {
        for _ in 0..lines {
            let line = self.lines.recv_timeout(PATIENCE).context("no line")?;
            let value: serde_json::Value = serde_json::from_str(&line)?;
            ensure!(value["reason"] == "idle", "{line}");
            let source: IpAddr = value["src"].as_str().context("no src")?.parse()?;
            let IpAddr::V4(source) = source else {
                anyhow::bail!("not IPv4: {line}");
            };
            ensure!(
                seen.insert(source.to_bits() - 0x0a00_0000),
                "reported twice: {line}"
            );
        }
        Ok(())
    }

    fn stop(mut self) -> Result<String> {
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(self.child.id() as i32),
            nix::sys::signal::Signal::SIGINT,
        )?;
        let status = wait_within(&mut self.child, PATIENCE)?.context("twheel does not end")?;
        let rest = self.lines.iter().count();
        ensure!(rest == 0, "{rest} lines too many");
        let stderr = self.stderr.take().context("no stderr")?;
        let stderr = stderr
            .join()
            .expect("the reader of standard error panicked");
        ensure!(status.success(), "{stderr}");
        Ok(stderr)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a counter keeps its value, and returns the value.
fn settled(namespace: &Namespace, name: &str) -> Result<u64> {
    let end = Instant::now() + PATIENCE;
    let mut before = namespace.counter(name)?;
    loop {
        thread::sleep(Duration::from_secs(1));
        let now = namespace.counter(name)?;
        if now == before && now > 0 {
            return Ok(now);
        }
        ensure!(
            Instant::now() < end,
            "{name} still changes: {before}, {now}"
        );
        before = now;
    }
}

#[test]
fn nothing_is_lost_between_the_ring_and_an_output_that_nobody_reads() -> Result<()> {
    require_root();
    let flows: u32 = match twheel_tests::is_long() {
        true => 1_000_000,
        false => 150_000,
    };
    let pair = Pair::new()?;
    let server = &pair.server;
    // Twice the capacity: a full table would evict.
    let size = (2 * flows).to_string();
    let common = [
        "--max-flows",
        &size,
        "--timeout",
        "1s",
        "--egress",
        "off",
        "--events",
        "end",
    ];
    // The flows begin while no run is stepping, so all are due when one starts.
    let args = [&["--iface", SERVER, "--keep"], &common[..]].concat();
    Twheel::start_muted(server, &args)?.stop()?;
    let program = server.enter(|| twheel::pins::Instance::with(SERVER)?.xdp("twheel_xdp"))?;
    begin(&program, 0..flows);
    ensure!(server.counter("created")? == u64::from(flows));
    thread::sleep(Duration::from_millis(1_100));

    let mut run = Run::start(server, &common)?;
    // The output is not read: flows whose events fit neither into the pipe nor into the ring stay
    // in the table.
    let stalled = settled(server, "expired")?;
    ensure!(
        stalled < 40_000,
        "{stalled} flows expired while the output was not read"
    );
    ensure!(server.counter("events_lost")? == 0);
    let mut seen = HashSet::new();
    // The test reads slowly.
    for _ in 0..20 {
        run.read(50, &mut seen)?;
        thread::sleep(Duration::from_millis(20));
    }
    run.read(flows as usize / 2 - 1_000, &mut seen)?;
    // And then not at all for a while.
    let again = settled(server, "expired")?;
    ensure!(
        (flows / 2..flows).contains(&(again as u32)),
        "{again} flows expired when half of them were read"
    );
    run.read(flows as usize - seen.len(), &mut seen)?;
    ensure!(seen.len() == flows as usize);
    for (counter, wanted) in [
        ("expired", flows.into()),
        ("evicted", 0),
        ("events_lost", 0),
        ("orphans", 0),
    ] {
        let count = server.counter(counter)?;
        ensure!(count == wanted, "{counter}: {count}");
    }
    let said = run.stop()?;
    ensure!(
        said.contains(&format!("{flows} flows ended, 0 live")),
        "{said}"
    );
    println!("{stalled} expired with nothing read, {again} with half");
    pair.server.check_clean(SERVER)
}
