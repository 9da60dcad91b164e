//! The largest number of flows.

use std::{
    fs::File,
    io::Read,
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    pty::openpty,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use twheel::{clock::Clock, progress};
use twheel_common::counter::Counter;
use twheel_tests::{netns::PATIENCE, order::PACKETS, running::wait_within};

use crate::{
    inputs::{Segment, hash_entries},
    peers::Peers,
    plane::{self, Bench},
    real::{self, CPUS, History, Lab, WATCHED},
    report::{Figure, Report, verdict},
    size,
    step::{self, Side},
};

/// Maximum loading time in seconds.
const LOAD: f64 = 4.0;
/// Maximum cost of a touch, relative to the floor.
const TOUCH: f64 = 0.50;
/// Maximum memory in total, in GiB.
const MEMORY: f64 = 1.6;
/// Number of loads, of which the first does not count.
const LOADS: usize = size(4, 2);
const TIMEOUT: Duration = Duration::from_secs(size(10, 2));
/// What twheel prints while it loads.
const LOADING: &str = "making a table";
/// Runs over random flows.
const TOUCHES: u32 = size(64, 2);

/// A `twheel run` whose standard error is a terminal.
struct OnTerminal {
    child: Child,
    /// The time from its start to `attached`.
    loading: Duration,
    /// How often it drew its progress until then.
    pictures: usize,
}

impl OnTerminal {
    fn start(lab: &Lab, history: &History, flows: u32) -> Result<Self> {
        let arguments = format!(
            "run --iface {WATCHED} --max-flows {flows} --timeout {}s --history {}",
            TIMEOUT.as_secs(),
            history.path()
        );
        let arguments: Vec<_> = arguments.split(' ').collect();
        let terminal = openpty(None, None).context("no terminal")?;
        let mut command = lab.namespace().twheel(&arguments)?;
        command
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(terminal.slave);
        let begun = Instant::now();
        let child = command.spawn().context("cannot start twheel")?;
        // The command holds the terminal's other end, which would keep the terminal open.
        drop(command);
        let pictures = Arc::new(AtomicUsize::new(0));
        let attached = watch(terminal.master.into(), pictures.clone());
        let mut program = Self {
            child,
            loading: Duration::ZERO,
            pictures: 0,
        };
        let at = attached.recv_timeout(PATIENCE);
        program.loading = at.context("twheel did not start")? - begun;
        program.pictures = pictures.load(Relaxed);
        Ok(program)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // The child has not been waited for yet, so the process id is still its own.
        kill(Pid::from_raw(self.child.id() as i32), signal).context("cannot signal twheel")
    }

    fn stop(mut self) -> Result<()> {
        self.signal(Signal::SIGINT)?;
        let status = wait_within(&mut self.child, PATIENCE)?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "twheel ended with {status:?}"
        );
        Ok(())
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a terminal until its other end is closed. Sends the time at which `attached` appeared.
fn watch(mut terminal: File, pictures: Arc<AtomicUsize>) -> Receiver<Instant> {
    let (tell, told) = channel();
    thread::spawn(move || {
        let (mut text, mut buffer) = (String::new(), [0; 4096]);
        while let Ok(length @ 1..) = terminal.read(&mut buffer) {
            text.push_str(&String::from_utf8_lossy(&buffer[..length]));
            pictures.store(text.matches(LOADING).count(), Relaxed);
            if text.contains(": attached") {
                let _ = tell.send(Instant::now());
            }
        }
    });
    told
}

/// Measures the real program, then the data plane alone.
pub fn bench(flows: u32, report: &mut Report) -> Result<()> {
    real(flows, report)?;
    alone(flows, report)
}

fn real(flows: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "A real `twheel run --max-flows {flows} --timeout {0}s`, else with default options, in a namespace of its own; standard \
         error\nis a terminal, output goes to /dev/null, the history to a disk. Load: from its start to `attached`, median of {1} \
         after the first,\nin which a virtual machine may wait for its host to give it memory. Begin: a packet of each \
         flow through\nits program from a thread on each of {CPUS} CPUs, a system call each, which is in the time. The program is \
         halted (SIGSTOP)\nuntil all have begun and are due, and then goes on: expire is the time until the table is empty, with output and history. \
         Memory: `memlock` of\nall its maps and the peak of its resident memory, after all that.\n",
        TIMEOUT.as_secs(),
        LOADS - 1
    ));
    let lab = Lab::new()?;
    let history = History::new("scale");
    let mut loads = Vec::new();
    let program = loop {
        let program = OnTerminal::start(&lab, &history, flows)?;
        loads.push(program.loading.as_secs_f64());
        if loads.len() == LOADS {
            break program;
        }
        program.stop()?;
        // The kernel frees maps in the background, and the next load should get the same memory.
        // But within two seconds, the memory goes back to the host.
        thread::sleep(Duration::from_millis(300));
    };
    let load = Figure::from_samples(&loads[1..]);
    let pins = lab.pins()?;
    let pid = program.child.id();

    program.signal(Signal::SIGSTOP)?;
    let begun = Instant::now();
    real::begin(&pins, 0..flows)?;
    let begin = begun.elapsed();
    let tracked = real::tracked(&pins)?;
    // If a window is full, a flow is evicted for the new one, or the new one is refused.
    let full = u64::from(flows) - tracked;
    ensure!(
        full <= u64::from(flows) / 100_000,
        "{tracked} flows in the table"
    );
    for _ in progress::over("until all are due", 0..TIMEOUT.as_secs() as u32 + 1) {
        thread::sleep(Duration::from_secs(1));
    }
    let due = Instant::now();
    program.signal(Signal::SIGCONT)?;
    while real::tracked(&pins)? > 0 {
        ensure!(due.elapsed() < 3 * PATIENCE, "flows do not expire");
        thread::sleep(Duration::from_millis(10));
    }
    let expire = due.elapsed();
    let (maps, peak) = (real::memlock(pid)?, real::memory(pid, "VmHWM")?);
    let counters = real::counters(&pins)?;
    let [created, expired, evicted, refused] = [
        Counter::Created,
        Counter::Expired,
        Counter::Evicted,
        Counter::WindowFull,
    ]
    .map(|counter| counters.get(counter));
    ensure!(
        created + refused == u64::from(flows) && expired + evicted == created,
        "{created} flows began, {refused} were refused, {expired} expired, {evicted} were evicted"
    );
    ensure!(counters.get(Counter::EventsLost) == 0, "events are lost");
    let pictures = program.pictures;
    program.stop()?;

    let rate = |time: Duration| tracked as f64 / time.as_secs_f64() / 1e6;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    report.say(&format!(
        "  load     {} s, the first {:.3}, progress {} on the terminal",
        verdict(&load, Some(LOAD)),
        loads[0],
        match pictures {
            0 => "NOT SHOWN".to_owned(),
            _ => format!("shown, {pictures} pictures"),
        }
    ));
    report.say(&format!(
        "  begin    {:.2} s, {:.2} million a second; {} found all records of their window taken\n  \
         expire   {:.2} s, {:.2} million a second\n  \
         memory   {} GiB: maps {:.3}, peak of the process {:.3}; {:.0} bytes a flow",
        begin.as_secs_f64(),
        rate(begin),
        full,
        expire.as_secs_f64(),
        rate(expire),
        verdict(&Figure::from_samples(&[gib(maps + peak)]), Some(MEMORY)),
        gib(maps),
        gib(peak),
        (maps + peak) as f64 / f64::from(flows)
    ));
    report.object(&json!({
        "bench": "scale", "n": flows, "load_s": load.median, "begin_s": begin.as_secs_f64(),
        "expire_s": expire.as_secs_f64(), "memlock": maps, "peak": peak, "window_full": full, "pictures": pictures,
    }));
    Ok(())
}

fn alone(flows: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "\nThe data plane alone, as in the other benches: the kernel's `duration` of runs over {PACKETS} packets on one CPU, \
         virtual time.\nTouch: of flows at random, median (least–most) of {TOUCHES} runs; in turn with it, over the same flows, floor and lru \
         as in\n`touch`, made for a quarter more. Expire: calls of the stepper; reading the ring is not in it."
    ));
    let clock = Clock::virtual_ms();
    let mut bench = Bench::load(plane::config(clock, TIMEOUT, flows)?, clock)?;
    let start = 1_000_000;
    let all = bench.fresh(flows as usize);
    let mut begin = Duration::ZERO;
    for (turn, flows) in progress::over("flows begin", all.chunks(PACKETS).enumerate()) {
        bench.plane.set_clock(start + turn as u64)?;
        begin += bench.run("touch", Segment::Ack, flows)?;
    }
    bench.check(Counter::Created, flows.into())?;
    let mut lru = Peers::load(&["peer_lru"], &[("LRU", hash_entries(flows))])?;
    for flows in progress::over("peers' flows begin", all.chunks(PACKETS)) {
        bench.run("floor_insert", Segment::Ack, flows)?;
        lru.run("peer_lru", Segment::Ack, flows)?;
    }
    let inserts = lru.inserts()?;
    let mut samples = plane::no_samples::<3>();
    let before = bench.plane.counters()?.get(Counter::Touched);
    for round in progress::over("packets", 0..TOUCHES) {
        let order: Vec<_> = (0..PACKETS)
            .map(|_| all[bench.random.below(flows) as usize])
            .collect();
        for turn in 0..3 {
            let number = (turn + round as usize) % 3;
            let took = match number {
                0 => bench.run("touch", Segment::Ack, &order)?,
                1 => bench.run("floor", Segment::Ack, &order)?,
                _ => lru.run("peer_lru", Segment::Ack, &order)?,
            };
            samples[number].push(took.as_nanos() as f64 / PACKETS as f64);
        }
    }
    ensure!(lru.inserts()? == inserts, "the LRU hash lost flows");
    drop(lru);
    let touched = bench.plane.counters()?.get(Counter::Touched) - before;
    let packets = u64::from(TOUCHES) * PACKETS as u64;
    ensure!(
        packets - touched <= packets / 10_000,
        "{touched} of {packets} packets were of a flow in the table"
    );
    let [floor, lru] = [1, 2].map(|other| plane::ratio(&samples, 0, other));
    let figures = samples.map(|samples| Figure::from_samples(&samples));
    // If windows were full, flows may have been evicted for others.
    let mut gone = Vec::new();
    bench.events.drain_ended(&mut gone);
    let counters = bench.plane.counters()?;
    let left = counters.get(Counter::Evicted) + counters.get(Counter::Expired);
    ensure!(
        gone.len() as u64 == left,
        "{left} flows left, {} events",
        gone.len()
    );
    let tracked = bench.plane.tracked()?;
    bench
        .plane
        .set_clock(start + 10 * TIMEOUT.as_millis() as u64)?;
    let turn = progress::spin("flows expire", || step::turn(&mut bench, Side::Twheel))?;
    ensure!(
        turn.expired == turn.visits && turn.expired == tracked,
        "{} of {tracked} flows expired, in {} visits",
        turn.expired,
        turn.visits
    );
    ensure!(bench.plane.tracked()? == 0, "flows are left");
    bench.check(Counter::EventsLost, 0)?;
    let each = |time: Duration, count: u64| time.as_nanos() as f64 / count as f64;
    let (begin, expire) = (
        each(begin, flows.into()),
        each(turn.in_kernel, turn.expired),
    );
    report.say(&format!(
        "  begin    {begin:.0} ns a flow\n           {:>20}  {:>20}  {:>20}  {:<30}  touch/lru\n  touch    {}  {:<30}  {} ns a \
         packet\n  expire   {expire:.0} ns a flow with its event, {:.2} million a second",
        "touch",
        "floor",
        "lru",
        "touch/floor",
        Figure::row(&figures),
        verdict(&floor, Some(TOUCH)),
        verdict(&lru, None),
        1e3 / expire
    ));
    for (variant, figure) in ["touch", "floor", "lru"].iter().zip(&figures) {
        report.nanoseconds("scale", variant, flows.into(), figure);
    }
    report.nanoseconds(
        "scale",
        "begin",
        flows.into(),
        &Figure::from_samples(&[begin]),
    );
    report.nanoseconds(
        "scale",
        "expire",
        flows.into(),
        &Figure::from_samples(&[expire]),
    );
    Ok(())
}
