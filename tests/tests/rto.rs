//! Retransmission timers compared with the kernel's own: `tcp:tcp_retransmit_skb` of the sending
//! host, with segments that are really dropped; and connections without loss.
#![allow(missing_docs)]

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::socket::{setsockopt, sockopt},
    time::{ClockId, clock_gettime},
};
use serde_json::Value;
use twheel_holdup::Watch;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{CLIENT, Family, Pair},
    path::{Manner, Path},
    running::Twheel,
    tcp_info::tcp_info,
    tracefs::Trace,
};

/// The port of the server, which echoes what it receives.
const ECHO: u16 = 9100;
/// How far twheel's expiries may be from the kernel's (the RTT is far less).
const APART: Duration = Duration::from_millis(25);
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves until the test ends.
fn echo(server: &Namespace) -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let address = SocketAddr::new(family.server(), ECHO);
        let listener = server.enter(|| TcpListener::bind(address).context("cannot listen"))?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || {
                    let _ = stream.set_nodelay(true);
                    let mut buffer = vec![0; 1 << 16];
                    let (mut from, mut to) = (&stream, &stream);
                    while let Ok(length @ 1..) = from.read(&mut buffer) {
                        if to.write_all(&buffer[..length]).is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }
    Ok(())
}

fn connect(client: &Namespace, family: Family) -> Result<TcpStream> {
    let address = SocketAddr::new(family.server(), ECHO);
    let stream = client
        .enter(|| TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends this many bytes and waits until they have come back.
fn exchange(stream: &mut TcpStream, length: usize) -> Result<()> {
    stream.write_all(&vec![1; length])?;
    stream.read_exact(&mut vec![0; length])?;
    Ok(())
}

/// An expiry that twheel has reported.
#[derive(Debug)]
struct Expired {
    at: Instant,
    value: Value,
}

/// Expiries, by the client's endpoint.
type Timers = BTreeMap<Name, Vec<Expired>>;
/// The ends of flows, likewise.
type Ends = BTreeMap<Name, Value>;
/// A client's endpoint: whether it is IPv6, and its port.
type Name = (bool, u16);

/// Everything that twheel reports until this time.
fn events(twheel: &Twheel, until: Instant) -> Result<(Timers, Ends)> {
    let (mut timers, mut ends) = (Timers::new(), Ends::new());
    while let Some(line) = twheel.line(until.saturating_duration_since(Instant::now()))? {
        let value: Value = serde_json::from_str(&line.text)?;
        let v6 = value["src"].as_str().context("no address")?.contains(':');
        let name = (v6, value["sport"].as_u64().context("no port")? as u16);
        if value["event"] == "rto" {
            timers
                .entry(name)
                .or_default()
                .push(Expired { at: line.at, value });
        } else {
            ends.insert(name, value);
        }
    }
    Ok((timers, ends))
}

fn start(client: &Namespace, more: &[&str]) -> Result<Twheel> {
    let arguments = ["--iface", CLIENT, "--rto", "on", "--json"];
    Twheel::start(client, &[&arguments[..], more].concat())
}

/// An instant on the clock of the trace.
fn monotonic(at: Instant) -> Result<Duration> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(now - at.elapsed())
}

/// How many retransmission timers of a host have expired, by its own count.
fn timeouts(host: &Namespace) -> Result<u32> {
    host.enter(|| {
        let text = fs::read_to_string("/proc/thread-self/net/netstat")?;
        let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
        let names = lines.next().context("no names")?;
        let values = lines.next().context("no values")?;
        let mut pairs = names.split(' ').zip(values.split(' '));
        let (_, value) = pairs
            .find(|(name, _)| *name == "TCPTimeouts")
            .context("no timeouts")?;
        Ok(value.parse()?)
    })
}

/// The results of all threads.
fn join<T>(threads: Vec<thread::ScopedJoinHandle<'_, Result<T>>>) -> Result<Vec<T>> {
    let joined = threads
        .into_iter()
        .map(|it| it.join().expect("a thread panicked"));
    joined.collect()
}

/// The outage of a connection.
struct Outage {
    name: Name,
    begin: Instant,
    end: Instant,
}

/// Drops everything that the client of a connection sends, for a while.
fn lose(
    pair: &Pair,
    family: Family,
    length: usize,
    span: Duration,
    ready: &Barrier,
) -> Result<Outage> {
    let mut stream = connect(&pair.client, family)?;
    let port = stream.local_addr()?.port();
    for _ in 0..20 {
        exchange(&mut stream, 100)?;
        thread::sleep(Duration::from_millis(3));
    }
    ready.wait();
    pair.server
        .nft(&format!("add element inet lab lost {{ {port} }}"))?;
    let begin = Instant::now();
    stream.write_all(&vec![2; length])?;
    thread::sleep(span);
    let end = Instant::now();
    pair.server
        .nft(&format!("delete element inet lab lost {{ {port} }}"))?;
    stream.read_exact(&mut vec![0; length])?;
    Ok(Outage {
        name: (family == Family::V6, port),
        begin,
        end,
    })
}

#[test]
fn timers_expire_when_the_kernels_do() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    echo(&pair.server)?;
    pair.server.nft(&format!(
        "table inet lab {{
                set lost {{ type inet_service; }}
                chain input {{
                    type filter hook prerouting priority raw;
                    tcp dport {ECHO} tcp sport @lost drop;
                }}
            }}"
    ))?;
    let twheel = start(&pair.client, &["--timeout", "20s"])?;
    let trace = Trace::retransmissions()?;
    let watch = Watch::start();
    let spans = [500, 1_000, 2_000, 4_000, 10_000].map(Duration::from_millis);
    let ready = Barrier::new(spans.len() * 8);
    let outages = thread::scope(|scope| {
        let threads = (0..spans.len() * 8)
            .map(|number| {
                let length = if number % 4 < 2 { 100 } else { 30_000 };
                let (family, span) = (Family::alternate(number), spans[number / 8]);
                let (pair, ready) = (&pair, &ready);
                scope.spawn(move || lose(pair, family, length, span, ready))
            })
            .collect();
        join(threads)
    })?;
    let theirs = trace.read()?;
    let (mut ours, _) = events(&twheel, Instant::now() + Duration::from_millis(500))?;
    let most = APART + watch.stop();
    let (mut all, mut matched, mut apart) = (0, 0, Vec::new());
    let mut lonely = 0;
    for outage in &outages {
        let (begin, end) = (monotonic(outage.begin)?, monotonic(outage.end)?);
        let mut ours = ours.remove(&outage.name).unwrap_or_default();
        ours.retain(|it| it.value["sender"] == "orig");
        let stalled = ours.iter().any(|it| it.value["stalled"] == true);
        // The fourth expiry, after at least 200, 400 and 800 ms, is of a stalled flow.
        let length = outage.end - outage.begin;
        ensure!(
            !stalled || length >= Duration::from_millis(1_400),
            "stalled after {length:?}: {ours:?}"
        );
        ensure!(
            stalled || length <= Duration::from_secs(3),
            "not stalled after {length:?}: {ours:?}"
        );
        let lost = theirs
            .iter()
            .filter(|it| it.sport == outage.name.1 && (begin..end).contains(&it.at));
        // The first is a tail loss probe, after which the timer starts.
        for retransmission in lost.skip(1) {
            all += 1;
            let mut nearest = None;
            for (index, it) in ours.iter().enumerate() {
                let distance = monotonic(it.at)?.abs_diff(retransmission.at);
                if nearest.is_none_or(|(_, least)| distance < least) {
                    nearest = Some((index, distance));
                }
            }
            if let Some((index, distance)) = nearest.filter(|(_, distance)| *distance <= most) {
                matched += 1;
                apart.push(distance);
                ours.remove(index);
            } else {
                eprintln!("not matched: {retransmission:?}, nearest {nearest:?}");
            }
        }
        // The expiries that are left came when the kernel sent nothing.
        for left in ours {
            if monotonic(left.at)? < end {
                lonely += 1;
                eprintln!("the kernel's timer did not expire: {left:?}");
            }
        }
    }
    apart.sort();
    println!(
        "{matched} of {all} expiries of the kernel's timers matched, {:?} apart at the median, {:?} at most; \
         {lonely} of ours alone",
        apart.get(apart.len() / 2),
        apart.last()
    );
    // The kernel's own count; the last expiry of each connection came after the outage.
    let timeouts = timeouts(&pair.client)? - outages.len() as u32;
    println!("{timeouts} timeouts by the kernel's count");
    ensure!(
        timeouts == all,
        "{timeouts} timeouts, and {all} in the trace"
    );
    ensure!(all >= 80, "the kernel's timers expired only {all} times");
    ensure!(matched == all, "only {matched} of {all} matched");
    ensure!(lonely == 0, "{lonely} expiries only by twheel");
    // When the connections progress, their flows are not stalled any more.
    let (_, ends) = events(&twheel, Instant::now() + Duration::from_secs(21))?;
    for outage in &outages {
        let end = ends.get(&outage.name);
        let end = end.with_context(|| format!("{:?} has not ended", outage.name))?;
        ensure!(end["stalled"] == false, "{end}");
        ensure!(end["orig_retransmissions"].as_u64() > Some(0), "{end}");
    }
    Ok(())
}

/// The kernel's smoothed RTT of a socket, and its retransmissions.
fn kernels(stream: &TcpStream) -> Result<(Duration, u32)> {
    let info = tcp_info(stream)?;
    Ok((
        Duration::from_micros(info.tcpi_rtt.into()),
        info.tcpi_total_retrans,
    ))
}

/// Checks that twheel's RTT is within 10 % or a millisecond of the kernel's.
fn check_rtt(end: &Value, kernels: Duration) -> Result<()> {
    let ours = end["orig_rtt_us"].as_f64().context("no round trip")? / 1e3;
    let kernels = kernels.as_secs_f64() * 1e3;
    let apart = (ours - kernels).abs();
    ensure!(
        apart <= 1.0 || apart <= kernels / 10.0,
        "RTT {ours} ms, and the kernel's {kernels} ms: {end}"
    );
    Ok(())
}

#[test]
fn connections_that_lose_nothing_have_no_expiries() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    echo(&pair.server)?;
    let twheel = start(&pair.client, &["--timeout", "4s,time_wait=1s,close=1s"])?;
    let mut rtts = BTreeMap::new();
    // A thousand requests and responses.
    for number in 0..1_000 {
        let mut stream = connect(&pair.client, Family::alternate(number))?;
        for _ in 0..3 {
            exchange(&mut stream, 200)?;
        }
        if number % 100 == 0 {
            let end = stream.local_addr()?;
            rtts.insert((end.is_ipv6(), end.port()), kernels(&stream)?.0);
        }
    }
    let mut open = Vec::new();
    for number in 0..20 {
        // Bulk data.
        let mut stream = connect(&pair.client, Family::alternate(number))?;
        let mut reader = stream.try_clone()?;
        let reading = thread::spawn(move || reader.read_exact(&mut vec![0; 4 << 20]));
        stream.write_all(&vec![3; 4 << 20])?;
        reading.join().expect("the reader panicked")?;
        // Keepalives.
        let idle = connect(&pair.client, Family::alternate(number))?;
        setsockopt(&idle, sockopt::KeepAlive, &true)?;
        setsockopt(&idle, sockopt::TcpKeepIdle, &1)?;
        setsockopt(&idle, sockopt::TcpKeepInterval, &1)?;
        // A window that closes, since the client does not read what comes back.
        let mut full = connect(&pair.client, Family::alternate(number))?;
        full.set_write_timeout(Some(Duration::from_millis(200)))?;
        let _ = full.write_all(&vec![4; 64 << 20]);
        open.extend([stream, idle, full]);
    }
    thread::sleep(Duration::from_secs(3));
    drop(open);
    let (timers, ends) = events(&twheel, Instant::now() + Duration::from_secs(6))?;
    let expiries: usize = timers.values().map(Vec::len).sum();
    println!(
        "{expiries} expiries of {} connections that lost nothing",
        ends.len()
    );
    ensure!(ends.len() >= 1_000, "only {} ends", ends.len());
    // On a busy machine, the kernel's own timers may expire.
    let theirs = timeouts(&pair.client)? + timeouts(&pair.server)?;
    ensure!(
        expiries <= 1 + theirs as usize,
        "{theirs} timeouts, and {timers:?}"
    );
    for (name, kernels) in rtts {
        check_rtt(ends.get(&name).context("no end")?, kernels)?;
    }
    Ok(())
}

#[test]
fn a_long_path_that_overtakes_has_no_expiries_and_the_kernels_round_trip() -> Result<()> {
    require_root();
    let path = Path::new(Manner {
        delay: Duration::from_millis(20),
        overtaken: 20,
        longer: Duration::from_millis(3),
    })?;
    echo(&path.server)?;
    let twheel = start(&path.client, &["--timeout", "3s,time_wait=1s,close=1s"])?;
    let sockets = thread::scope(|scope| {
        let threads = (0..24)
            .map(|number| {
                let client = &path.client;
                scope.spawn(move || {
                    let mut stream = connect(client, Family::alternate(number))?;
                    let mut reader = stream.try_clone()?;
                    let length = if number < 4 { 300_000 } else { 200 };
                    for _ in 0..30 {
                        let reading = scope.spawn({
                            let mut reader = reader.try_clone()?;
                            move || reader.read_exact(&mut vec![0; length])
                        });
                        stream.write_all(&vec![1; length])?;
                        reading.join().expect("the reader panicked")?;
                    }
                    reader.flush()?;
                    // The kernel samples the RTT at each acknowledgment, twheel once per round
                    // trip: while data queues, they average over different times. Both must
                    // converge to the RTT of the path itself.
                    for _ in 0..30 {
                        exchange(&mut stream, 200)?;
                    }
                    anyhow::Ok((stream.local_addr()?, length, kernels(&stream)?, stream))
                })
            })
            .collect();
        join(threads)
    })?;
    let (timers, ends) = events(&twheel, Instant::now() + Duration::from_secs(4))?;
    for (client, length, (rtt, retransmissions), _) in &sockets {
        let end = ends
            .get(&(client.is_ipv6(), client.port()))
            .context("no end")?;
        println!(
            "{length} bytes at a time: round trip {} µs, the kernel's {rtt:?}; retransmissions {} and {retransmissions}",
            end["orig_rtt_us"], end["orig_retransmissions"]
        );
        check_rtt(end, *rtt)?;
        // Exactly the segments that the kernel takes for lost and sends again are seen. The kernel
        // counts segments, and one packet may carry several of them (GSO).
        let (seen, sent) = (
            end["orig_retransmissions"].as_u64().context("no count")?,
            u64::from(*retransmissions),
        );
        ensure!(
            seen <= sent && (seen > 0) == (sent > 0),
            "{seen} retransmissions seen, {sent} sent: {end}"
        );
    }
    let theirs = timeouts(&path.client)? + timeouts(&path.server)?;
    let expiries: usize = timers.values().map(Vec::len).sum();
    ensure!(
        expiries <= theirs as usize,
        "{theirs} timeouts, and {timers:?}"
    );
    Ok(())
}
