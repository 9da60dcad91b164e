//! Namespaces and interfaces that are added, moved and removed.

use std::{
    collections::{BTreeSet, VecDeque},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_holdup::Watch;
use twheel_tests::{
    is_long,
    netns::{Namespace, PATIENCE, require_root},
    pair::Connection,
    running::Twheel,
};

use crate::{Alias, Lab, POD, PORT, address, stop};

#[test]
fn namespaces_that_appear_are_watched_in_time_and_those_that_go_are_let_go_of() -> Result<()> {
    require_root();
    let mut lab = Lab::with(1, "host", "come")?;
    let pattern = format!("twl-{}-come*", std::process::id());
    let args = [
        "--iface",
        "eth*",
        "--netns",
        &pattern,
        "--json",
        "--timeout",
        "2s",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    twheel.await_stderr(&format!("{}: attached", lab.label(0)))?;
    for number in 1..6 {
        let held_up = Watch::start();
        lab.add()?;
        let since = Instant::now();
        twheel.await_stderr(&format!("{}: attached", lab.label(number)))?;
        let (taken, held_up) = (since.elapsed(), held_up.stop());
        ensure!(
            taken <= Duration::from_millis(100) + held_up,
            "attached after {taken:?}, the machine held up for {held_up:?}"
        );
    }
    let listener = lab.listen(5)?;
    let connection = Connection::open(&lab.host, &listener)?;
    // A process that is inside continues; the name is gone, and packets are not seen any more.
    let gone = lab.pods.remove(2);
    let (name, inode) = (gone.name().to_owned(), gone.inode()?);
    drop(gone);
    twheel.await_stderr(&format!("{name}: this network namespace disappeared"))?;
    ensure!(!is_held(&twheel, inode)?, "{name} is kept alive");
    let expiry = twheel
        .line(PATIENCE)?
        .context("nothing expires")?
        .expiry()?;
    ensure!(expiry.dst == listener.local_addr()?, "{expiry:?}");
    drop(connection);
    stop(twheel)?;
    lab.check_clean()
}

/// As long as programs see an interface's packets, they know it.
#[test]
fn packets_of_a_namespace_that_goes_are_looked_at_until_it_is_detached() -> Result<()> {
    require_root();
    const PODS: usize = 4;
    let mut lab = Lab::with(PODS, "host", "busy")?;
    let pattern = format!("twl-{}-busy*", std::process::id());
    let twheel = Twheel::start(&lab.host, &["--iface", POD, "--netns", &pattern])?;
    for pod in 0..PODS {
        twheel.await_stderr(&format!("{}: attached", lab.label(pod)))?;
    }
    let socket = lab
        .host
        .enter(|| UdpSocket::bind("0.0.0.0:0").context("no socket"))?;
    let ends = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        scope.spawn(|| {
            while !ends.load(Relaxed) {
                for pod in 0..PODS {
                    // Nothing listens there, and soon there is none.
                    let _ = socket.send_to(b"?", (address(pod, 2), PORT));
                }
            }
        });
        let mut run = || {
            for _ in 0..PODS {
                let gone = lab.pods.remove(0);
                let name = gone.name().to_owned();
                drop(gone);
                twheel.await_stderr(&format!("{name}: this network namespace disappeared"))?;
            }
            Ok(())
        };
        let done = run();
        ends.store(true, Relaxed);
        done
    })?;
    let seen = lab.host.counter("not_tracked")?;
    ensure!(seen > 0, "no packets are seen");
    let is = lab.host.counter("not_watched")?;
    ensure!(is == 0, "{is} of {seen} packets are not looked at");
    stop(twheel)?;
    lab.check_clean()
}

/// Whether a run has a file of a network namespace open.
fn is_held(twheel: &Twheel, inode: u64) -> Result<bool> {
    let wanted = PathBuf::from(format!("net:[{inode}]"));
    let files = std::fs::read_dir(format!("/proc/{}/fd", twheel.pid()))?;
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    Ok(links.into_iter().any(|link| link == wanted))
}

/// What a run holds once it is idle: when it reports what it waits for, it has not finished
/// starting.
fn settled(twheel: &Twheel) -> Result<[usize; 3]> {
    let until = Instant::now() + PATIENCE;
    let mut before = twheel.held()?;
    loop {
        thread::sleep(Duration::from_millis(500));
        let now = twheel.held()?;
        if now[1..] == before[1..] {
            return Ok(now);
        }
        ensure!(
            Instant::now() < until,
            "the number of threads and files keeps changing"
        );
        before = now;
    }
}

#[test]
fn pods_come_and_go_under_traffic_and_nothing_is_left() -> Result<()> {
    require_root();
    let pods = if is_long() { 1000 } else { 40 };
    /// Pods that exist at a time.
    const ALIVE: usize = 8;
    let mut lab = Lab::with(0, "many", "many")?;
    let pattern = format!("twl-{}-many*", std::process::id());
    // Both ends of each cable: the host's and the pod's.
    let args = [
        "--iface",
        "eth*,veth*",
        "--netns",
        &pattern,
        "--json",
        "--timeout",
        "3s",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
    let listener = lab
        .host
        .enter(|| TcpListener::bind(any).context("cannot listen"))?;
    let idle = settled(&twheel)?;
    let begin = Instant::now();
    let (mut open, mut before) = (VecDeque::new(), None);
    let (mut wanted, mut ended) = (BTreeSet::new(), Vec::new());
    for number in 0..pods {
        lab.add()?;
        let pod = lab.pods.last().context("no pod")?;
        for interface in [format!("{}/{POD}", pod.name()), format!("/veth{number}")] {
            twheel.await_stderr(&format!("{interface}: attached"))?;
        }
        let to = SocketAddr::from((address(number, 1), PORT));
        let client =
            pod.enter(|| TcpStream::connect_timeout(&to, PATIENCE).context("cannot connect"))?;
        let (server, name) = listener.accept()?;
        wanted.insert(name);
        open.push_back((client, server));
        if open.len() == ALIVE {
            // Its connection is still open, and its veth pair is deleted with it.
            let pod = lab.pods.remove(0);
            pod.ip(&format!("link del {POD}"))?;
            drop(pod);
            open.pop_front();
        }
        ended.extend(twheel.expiries_until(Instant::now())?);
        if number == pods / 2 {
            before = Some(twheel.held()?);
        }
    }
    for pod in lab.pods.drain(..) {
        pod.ip(&format!("link del {POD}"))?;
    }
    let taken = begin.elapsed();
    ended.extend(twheel.expiries_until(Instant::now() + Duration::from_secs(5))?);
    let names: BTreeSet<_> = ended.iter().map(|it| it.src).collect();
    ensure!(
        names == wanted && ended.len() == wanted.len(),
        "{} flows of {} pods, {} ends",
        names.len(),
        wanted.len(),
        ended.len()
    );
    let (before, after) = (
        before.context("the numbers were not read before")?,
        settled(&twheel)?,
    );
    println!(
        "{pods} pods in {taken:?}; resident {} KiB, then {} KiB",
        before[0], after[0]
    );
    ensure!(
        after[0] <= before[0] + 2048,
        "memory grows: {before:?}, {after:?}"
    );
    ensure!(
        after[1..] == idle[1..],
        "threads or files: {idle:?}, {after:?}"
    );
    let parts: Vec<_> = lab.host.pins()?;
    let parts = parts.iter().filter(|it| it.is_dir()).count();
    ensure!(parts == 1, "{parts} parts, not the host's alone");
    stop(twheel)?;
    lab.check_clean()
}

/// The kernel reports the interface in its new namespace before it reports that it has left the old
/// one.
#[test]
fn an_interface_that_moves_is_watched_where_it_is() -> Result<()> {
    require_root();
    let lab = Lab::with(2, "host", "move")?;
    lab.host.ip(&format!(
        "link add cable0 type veth peer name mv0 netns {}",
        lab.pods[0].name()
    ))?;
    let pods = lab.pods.iter().map(Namespace::name);
    let pods: Vec<_> = pods.collect();
    for hook in ["xdp", "tcx"] {
        let list = pods.join(",");
        let args = ["--iface", "mv0", "--netns", &list, "--hook", hook];
        let twheel = Twheel::start(&lab.host, &args)?;
        for turn in 0..10 {
            let (here, there) = (turn % 2, 1 - turn % 2);
            let attached = format!("{}/mv0: attached", pods[here]);
            let until = Instant::now() + PATIENCE;
            while twheel.stderr().matches(&attached).count() <= turn / 2 {
                ensure!(Instant::now() < until, "{hook}: {}", twheel.stderr());
                thread::sleep(Duration::from_millis(2));
            }
            lab.pods[here].ip(&format!("link set mv0 netns {}", pods[there]))?;
        }
        let said = stop(twheel)?;
        ensure!(!said.contains("not attached"), "{said}");
    }
    lab.pods[0].check_clean("mv0")
}

#[test]
fn a_namespace_with_two_names_is_watched_once_for_as_long_as_it_has_one() -> Result<()> {
    require_root();
    let mut lab = Lab::with(1, "host", "alias")?;
    let first = lab.pods[0].name().to_owned();
    let pattern = format!("twl-{}-alias*", std::process::id());
    let args = ["--iface", POD, "--netns", &pattern, "--json"];
    let twheel = Twheel::start(&lab.host, &args)?;
    twheel.await_stderr(&format!("{first}/{POD}: attached"))?;
    let alias = Alias::new(&lab.pods[0])?;
    twheel.await_stderr(&format!(
        "{}: another name of the network namespace {first}",
        alias.0
    ))?;
    lab.pods[0].await_attached(POD, &["xdp", "egress"])?;
    let listener = lab.listen(0)?;
    let pod = lab.pods.remove(0);
    drop(pod);
    twheel.await_stderr(&format!("{first}: this network namespace disappeared"))?;
    twheel.await_stderr(&format!("{}/{POD}: attached", alias.0))?;
    let before = lab.flows()?.len();
    let mut connection = Connection::open(&lab.host, &listener)?;
    connection.talk()?;
    let flows = lab.flows()?;
    let wanted = format!("{}/{POD}", alias.0);
    ensure!(
        before == 0 && flows.len() == 1 && flows[0]["iface"] == wanted,
        "{flows:?}"
    );
    let name = alias.0.clone();
    drop(alias);
    twheel.await_stderr(&format!("{name}: this network namespace disappeared"))?;
    stop(twheel)?;
    lab.check_clean()
}
