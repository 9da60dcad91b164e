//! A real table, filled by real sources.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use twheel::stepper::pin_to;
use twheel_tests::{
    netns::require_root,
    pair::{CLIENT, Family, Pair, SERVER},
    running::Twheel,
};

use crate::source;

/// Capacity of the table, in flows.
const ROOM: usize = 4096;
/// Quota of a source: a quarter.
const SHARE: usize = ROOM / 4;
/// Flows of other sources that begin before the greedy one's.
const EARLY: usize = 100;
/// Flows of other sources that begin later, more than fit.
const LATE: usize = ROOM - SHARE - EARLY + 40;

/// Real connections between two hosts; the server accepts them all and keeps them.
struct Hosts {
    pair: Pair,
    listen: SocketAddr,
    stop: Arc<AtomicBool>,
    accepting: Option<thread::JoinHandle<()>>,
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // The thread waits for one more connection before it ends.
        let _ = self
            .pair
            .client
            .enter(|| Ok(TcpStream::connect(self.listen)?));
        let _ = self.accepting.take().map(thread::JoinHandle::join);
    }
}

impl Hosts {
    fn new() -> Result<Self> {
        let pair = Pair::new()?;
        for number in 0..4 {
            pair.client
                .ip(&format!("addr add {}/24 dev {CLIENT}", source(number)))?;
        }
        let listener = pair.server.enter(|| {
            let address = (Family::V4.server(), 0);
            TcpListener::bind(address).context("cannot listen")
        })?;
        let listen = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let accepting = thread::spawn(move || {
            let mut accepted = Vec::new();
            while !stopped.load(Relaxed) {
                accepted.extend(listener.accept());
            }
        });
        Ok(Self {
            pair,
            listen,
            stop,
            accepting: Some(accepting),
        })
    }

    /// Opens connections, half of them on each of two CPUs, so that their flows are on both CPUs'
    /// wheels.
    fn open(&self, count: usize, from: impl Fn(usize) -> IpAddr + Sync) -> Result<Vec<TcpStream>> {
        let runtime = |cpu: usize| -> Result<Vec<TcpStream>> {
            pin_to(cpu as u32)?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let connect = async |number: usize| -> Result<TcpStream> {
                let socket = tokio::net::TcpSocket::new_v4()?;
                socket.bind(SocketAddr::new(from(number), 0))?;
                Ok(socket.connect(self.listen).await?.into_std()?)
            };
            runtime.block_on(async {
                let mut streams = Vec::new();
                for number in (cpu..count).step_by(2) {
                    streams.push(connect(number).await.context("cannot connect")?);
                }
                Ok(streams)
            })
        };
        thread::scope(|scope| {
            let threads = [0, 1].map(|cpu| {
                let (client, runtime) = (&self.pair.client, &runtime);
                scope.spawn(move || client.enter(|| runtime(cpu)))
            });
            let mut all = Vec::new();
            for thread in threads {
                all.extend(thread.join().unwrap()?);
            }
            Ok(all)
        })
    }

    /// How many flows are tracked: of the first address, and of all others.
    fn tracked(&self) -> Result<[usize; 2]> {
        let hog = Family::V4.client().to_string();
        let ended = self.pair.server.twheel_once(&["flows", "--json"])?;
        ensure!(ended.code() == Some(0), "flows: {}", ended.stderr);
        let mut tracked = [0, 0];
        for line in ended.lines {
            let line: serde_json::Value = serde_json::from_str(&line.text)?;
            // For a flow that was picked up, either end may be named as the initiator.
            let is_hog = ["src", "dst"].iter().any(|end| line[end] == hog.as_str());
            tracked[usize::from(!is_hog)] += 1;
        }
        Ok(tracked)
    }
}

/// Sends a byte on each connection, from the CPU on which it was opened.
fn talk(streams: &mut [TcpStream]) -> Result<()> {
    use std::io::Write;
    let (first, second) = streams.split_at_mut(streams.len().div_ceil(2));
    for (cpu, streams) in [(0, first), (1, second)] {
        pin_to(cpu)?;
        streams
            .iter_mut()
            .try_for_each(|it| it.write_all(b"!").context("cannot send"))?;
    }
    Ok(())
}

#[test]
fn a_source_that_fills_a_real_table_gives_way_to_others() -> Result<()> {
    require_root();
    // About 17,000 descriptors: both ends of each connection.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let hosts = Hosts::new()?;
    let hog = Family::V4.client();
    let room = ROOM.to_string();
    let args = [
        "--iface",
        SERVER,
        "--max-flows",
        &room,
        "--history",
        "off",
        "--json",
    ];
    let twheel = Twheel::start(&hosts.pair.server, &args)?;
    let mut early = hosts.open(EARLY, source)?;
    let mut its = hosts.open(ROOM, |_| hog)?;
    assert_eq!(hosts.tracked()?, [ROOM - EARLY, EARLY]);

    // The greedy source continues while the others come.
    let stop = AtomicBool::new(false);
    let mut late = thread::scope(|scope| -> Result<Vec<TcpStream>> {
        let more = scope.spawn(|| {
            let mut more = Vec::new();
            while !stop.load(Relaxed) && more.len() < 1_000 {
                more.extend(hosts.open(100, |_| hog)?);
            }
            anyhow::Ok(more)
        });
        let begin = Instant::now();
        let late = (|| {
            let mut late = hosts.open(LATE, source)?;
            println!("{LATE} others connected after {:?}", begin.elapsed());
            loop {
                talk(&mut late)?;
                let tracked = hosts.tracked()?;
                println!("{tracked:?} after {:?}", begin.elapsed());
                ensure!(
                    tracked[0] >= SHARE,
                    "the greedy source was cut below its quota: {tracked:?}"
                );
                if tracked == [SHARE, ROOM - SHARE] {
                    return Ok(late);
                }
                ensure!(
                    begin.elapsed() < Duration::from_secs(30),
                    "the others got too few flows: {tracked:?}"
                );
                thread::sleep(Duration::from_millis(200));
            }
        })();
        stop.store(true, Relaxed);
        its.extend(more.join().unwrap()?);
        late
    })?;

    // The greedy source has its quota, and keeps it.
    thread::sleep(Duration::from_millis(1_100));
    for streams in [&mut late, &mut early, &mut its] {
        talk(streams)?;
    }
    assert_eq!(hosts.tracked()?, [SHARE, ROOM - SHARE]);
    let told = twheel.stderr();
    // By then, others may have taken the place of some.
    let line = format!("the table is full: {hog} has ");
    let (before, after) = told.split_once(&line).with_context(|| told.clone())?;
    let (number, _) = after.split_once(" flows, ").context("no number")?;
    let has: usize = number.parse()?;
    assert!((SHARE + 1..=ROOM - EARLY).contains(&has), "{told}");
    assert!(
        after.contains(&format!(" flows, its quota is {SHARE}:")),
        "{told}"
    );
    assert!(
        !before.contains("is full") && !after.contains("is full"),
        "{told}"
    );
    let mut ended = Vec::new();
    while let Some(line) = twheel.line(Duration::from_millis(500))? {
        ended.push(line.expiry()?);
    }
    // (Unfinished handshakes of any source may be evicted, too; their next packet begins the flow
    // again.)
    let mut gone = 0;
    for flow in ended {
        assert_eq!(flow.reason, "evicted");
        if flow.state == "established" {
            assert_eq!(flow.src.ip(), hog, "{flow:?}");
            gone += 1;
        }
    }
    assert!(
        gone >= ROOM - EARLY - SHARE,
        "only {gone} flows were evicted"
    );
    twheel.stop()?;

    // Without quotas, the first source keeps all.
    let twheel = Twheel::start(
        &hosts.pair.server,
        &[&args[..], &["--source-share", "off"]].concat(),
    )?;
    talk(&mut its)?;
    assert_eq!(hosts.tracked()?, [ROOM, 0]);
    for _ in 0..3 {
        talk(&mut late)?;
        thread::sleep(Duration::from_millis(500));
    }
    assert_eq!(hosts.tracked()?, [ROOM, 0]);
    twheel.stop()?;
    Ok(())
}
