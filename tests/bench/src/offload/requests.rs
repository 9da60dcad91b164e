//! How fast timers are started and stopped, and ends are told; and what a registration takes.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsFd,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use serde_json::json;
use twheel::pins::Instance;
use twheel_client::{
    channel::{Channel, Packet},
    cookie_of,
    protocol::{BATCH, Op, Reply, Request, SOCKETS, life},
};
use twheel_tests::{
    directory::Directory,
    netns::Namespace,
    offload::most_descriptors,
    pair::{Pair, SERVER},
    plane::{ACK, PASS, frame},
    running::Twheel,
};

use crate::{
    report::{Figure, Report, verdict},
    size,
};

const FLOWS: u32 = size(1_000_000, 5_000);
/// Connections whose sockets are passed.
const SOCKETS_PASSED: usize = size(8_000, 500);
const ROUNDS: usize = size(5, 1);
const INTERFACE: &str = "bench0";
/// A second, at least.
const BOUND: f64 = 500_000.0;
/// Bytes of a registration beside the flow's, at most.
const BYTES: f64 = 64.0;

pub fn bench(report: &mut Report) -> Result<()> {
    most_descriptors()?;
    report.say(&format!(
        "Requests a second of one program, in packets of {BATCH} (of {SOCKETS} where sockets are passed), the answers \
         read\nmeanwhile; {ROUNDS} rounds, median (least–most)."
    ));
    let host = Namespace::new("bench")?;
    host.ip(&format!("link add {INTERFACE} type veth peer name bench1"))?;
    for interface in [INTERFACE, "bench1"] {
        host.ip(&format!("link set {interface} up"))?;
    }
    let directory = Directory::new("bench-offload")?;
    let path = directory.0.join("offload");
    let flows = FLOWS.to_string();
    let offload = path.to_str().context("a path")?;
    let args = ["--iface", INTERFACE, "--max-flows", &flows];
    let own = ["--offload", offload, "--offload-limit", &flows];
    let twheel = Twheel::start_muted(&host, &[&args[..], &own].concat())?;
    establish(&host)?;
    let channel = Channel::connect(&path)?;
    let (mut starts, mut stops, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    let mut bytes = None;
    for _ in 0..ROUNDS {
        let before = anonymous(&twheel)?;
        let (took, started) = ask(&channel, (0..FLOWS).map(|flow| start(flow, 600_000)))?;
        starts.push(per_second(took));
        // Later it has the memory already.
        let more = anonymous(&twheel)?.saturating_sub(before);
        bytes.get_or_insert(more as f64 / f64::from(FLOWS));
        let stop = |reply: &Reply| {
            let mut stop = Request::new(Op::Stop);
            stop.id = reply.id;
            stop
        };
        stops.push(per_second(ask(&channel, started.iter().map(stop))?.0));
        ends.push(per_second(expire(&channel)?));
    }
    line(report, "START, endpoints named", &starts, Some(BOUND));
    line(report, "STOP", &stops, Some(BOUND));
    line(report, "EXPIRED", &ends, Some(BOUND));
    let bytes = bytes.context("no round")?;
    let map = host.enter(|| Instance::with(INTERFACE)?.map("OFFLOADS"))?;
    let info = map.info().context("no info of a map")?;
    let in_kernel = f64::from(info.max_entries()) * f64::from(info.value_size());
    let in_kernel = in_kernel / f64::from(FLOWS);
    let all = bytes + in_kernel;
    report.say(&format!(
        "\nA registration, of {FLOWS}: {bytes:.1} bytes of twheel's own memory (RssAnon) and {in_kernel:.1} in the \
         kernel\n(OFFLOADS, which has room for all flows of the table), {}\n",
        verdict(&Figure::from_samples(&[all]), Some(BYTES))
    ));
    report.object(&json!({ "bench": "offload", "variant": "bytes", "n": FLOWS, "bytes": all }));
    drop(channel);
    twheel.stop()?;
    passed(report, &path)
}

/// Begins flows that both sides have taken part in.
fn establish(host: &Namespace) -> Result<()> {
    let program = host.enter(|| Instance::with(INTERFACE)?.xdp("twheel_xdp"))?;
    for back in [false, true] {
        for flow in 0..FLOWS {
            let result = program
                .test_run(TestRunOptions {
                    data_in: Some(&frame(flow, back, ACK)),
                    ..TestRunOptions::new()
                })
                .context("cannot begin a flow")?;
            ensure!(result.return_value == PASS, "a packet does not pass");
        }
    }
    Ok(())
}

/// Starts the timer of a flow of [`frame`], as its server.
fn start(flow: u32, timeout: u32) -> Request {
    let mut start = Request::new(Op::Start);
    (start.timeout, start.tag) = (timeout, flow.into());
    start.life = life::DATA_IN | life::DATA_OUT;
    let client = Ipv4Addr::from(0x0a00_0000 + flow / 50_000);
    let port = 1024 + (flow % 50_000) as u16;
    let server = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 80));
    start.name(server, SocketAddr::from((client, port)));
    start
}

/// Sends requests, of which none may be refused. How long it took, and the answers.
fn ask(
    channel: &Channel,
    requests: impl Iterator<Item = Request>,
) -> Result<(Duration, Vec<Reply>)> {
    let requests: Vec<_> = requests.collect();
    let begun = Instant::now();
    let replies = thread::scope(|scope| -> Result<_> {
        let sender = scope.spawn(|| {
            let mut packets = requests.chunks(BATCH);
            packets.try_for_each(|packet| channel.send(1, packet, &[]))
        });
        let replies = receive(channel, requests.len());
        sender.join().expect("the sender panicked")?;
        replies
    })?;
    Ok((begun.elapsed(), replies))
}

/// So many answers.
fn receive(channel: &Channel, number: usize) -> Result<Vec<Reply>> {
    let mut all = Vec::with_capacity(number);
    while all.len() < number {
        match channel.receive()?.context("twheel has ended")? {
            Packet::Replies(_, replies) => all.extend(replies),
            Packet::Events(events) => anyhow::bail!("{} events", events.len()),
        }
    }
    let refused = all.iter().find(|reply| reply.error != 0);
    ensure!(refused.is_none(), "refused: {refused:?}");
    Ok(all)
}

/// Starts the timers of all flows so that they end at one time. How long it takes to tell all ends.
fn expire(channel: &Channel) -> Result<Duration> {
    let due = Instant::now() + Duration::from_secs(size(8, 1));
    let left = || due.saturating_duration_since(Instant::now()).as_millis() as u32;
    for first in (0..FLOWS).step_by(BATCH) {
        let flows = first..FLOWS.min(first + BATCH as u32);
        let timeout = left();
        ensure!(timeout > 0, "this machine is too slow for this");
        ask(channel, flows.map(|flow| start(flow, timeout)))?;
    }
    let (mut first, mut told) = (None, 0);
    while told < FLOWS {
        match channel.receive()?.context("twheel has ended")? {
            Packet::Events(events) => told += events.len() as u32,
            packet @ Packet::Replies(..) => anyhow::bail!("{packet:?}"),
        }
        first.get_or_insert_with(Instant::now);
    }
    Ok(first.map_or(Duration::ZERO, |first| first.elapsed()))
}

/// The same with sockets of real connections.
fn passed(report: &mut Report, path: &Path) -> Result<()> {
    let pair = Pair::new()?;
    let offload = path.to_str().context("a path")?;
    let twheel = Twheel::start_muted(&pair.server, &["--iface", SERVER, "--offload", offload])?;
    let connections = pair.connect_some(SOCKETS_PASSED)?;
    let sockets: Vec<_> = connections.iter().map(|it| it.server.as_fd()).collect();
    let channel = Channel::connect(path)?;
    let mut starts = Vec::new();
    // There are few: more rounds.
    for _ in 0..10 * ROUNDS {
        let mut request = Request::new(Op::Start);
        (request.timeout, request.life) = (600_000, life::DATA_IN);
        let begun = Instant::now();
        let replies = thread::scope(|scope| -> Result<_> {
            let sender = scope.spawn(|| {
                let mut packets = sockets.chunks(SOCKETS);
                packets.try_for_each(|some| {
                    // As the client library does, to know a socket again.
                    some.iter().try_for_each(|it| cookie_of(*it).map(drop))?;
                    channel.send(1, &vec![request; some.len()], some)
                })
            });
            let replies = receive(&channel, sockets.len());
            sender.join().expect("the sender panicked")?;
            replies
        })?;
        starts.push(sockets.len() as f64 / begun.elapsed().as_secs_f64());
        let stop = |reply: &Reply| {
            let mut stop = Request::new(Op::Stop);
            stop.id = reply.id;
            stop
        };
        ask(&channel, replies.iter().map(stop))?;
    }
    line(report, "START, sockets passed", &starts, Some(BOUND));
    drop(channel);
    twheel.stop().map(drop)
}

fn per_second(took: Duration) -> f64 {
    f64::from(FLOWS) / took.as_secs_f64()
}

fn line(report: &mut Report, what: &str, samples: &[f64], bound: Option<f64>) {
    let figure = Figure::from_samples(samples);
    let verdict = match bound {
        Some(bound) if figure.median < bound => format!(" BELOW {bound}"),
        Some(bound) => format!(" at least {bound}"),
        None => String::new(),
    };
    report.say(&format!(
        "{what:<24} {:>10.0} ({:.0}–{:.0}) a second{verdict}",
        figure.median, figure.min, figure.max
    ));
    report.object(&json!({
        "bench": "offload", "variant": what, "rounds": figure.rounds,
        "median_per_s": figure.median, "min_per_s": figure.min, "max_per_s": figure.max,
    }));
}

/// Memory that twheel alone has, bytes.
fn anonymous(twheel: &Twheel) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", twheel.pid()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kibibytes = line.and_then(|it| it.trim().strip_suffix(" kB"));
    Ok(kibibytes.context("no RssAnon")?.trim().parse::<u64>()? << 10)
}
