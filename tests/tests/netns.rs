//! Interfaces of several network namespaces in one run: those that are there, those that come and those that go.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use twheel_holdup::Watch;
use twheel_tests::{
    is_soak,
    netns::{Busy, Connection, Namespace, PATIENCE, Twheel, require_root},
};

const PORT: u16 = 7979;
/// A pod's interface, of the same name and index in each of them.
const POD: &str = "eth0";

/// A host, and pods that reach it and one another by it.
struct Lab {
    host: Namespace,
    pods: Vec<Namespace>,
    role: &'static str,
    /// Pods so far.
    made: usize,
}

impl Lab {
    fn new(pods: usize) -> Result<Self> {
        Self::of(pods, "host", "pod")
    }

    /// With names of their own, for a run whose pattern is not to match another test's.
    fn of(pods: usize, host: &str, pod: &'static str) -> Result<Self> {
        let mut lab = Self {
            host: Namespace::new(host)?,
            pods: Vec::new(),
            role: pod,
            made: 0,
        };
        lab.host
            .enter(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
        for _ in 0..pods {
            lab.add()?;
        }
        Ok(lab)
    }

    fn add(&mut self) -> Result<()> {
        let number = self.made;
        let pod = Namespace::new(self.role)?;
        let veth = format!("veth{number}");
        let peer = format!("type veth peer name {POD} netns {}", pod.name());
        let [gateway, own] = [1, 2].map(|last| address(number, last));
        self.host.batch(&format!(
            "link add {veth} {peer}\naddr add {gateway}/24 dev {veth}\nlink set {veth} up\n"
        ))?;
        pod.batch(&format!(
            "addr add {own}/24 dev {POD}\nlink set {POD} up\nroute add default via {gateway}\n"
        ))?;
        self.pods.push(pod);
        self.made += 1;
        Ok(())
    }

    /// Runs with its pods alone, whatever other namespaces there are.
    fn watch(&self, options: &[&str]) -> Result<Twheel> {
        let pods: Vec<_> = self.pods.iter().map(Namespace::name).collect();
        let pods = pods.join(",");
        let args = [&["--iface", POD, "--netns", &pods, "--json"], options].concat();
        let twheel = Twheel::start(&self.host, &args)?;
        for pod in 0..self.pods.len() {
            twheel.await_stderr(&format!("{}: attached", self.label(pod)))?;
        }
        Ok(twheel)
    }

    /// What a pod's interface is called.
    fn label(&self, pod: usize) -> String {
        format!("{}/{POD}", self.pods[pod].name())
    }

    fn listen(&self, pod: usize) -> Result<TcpListener> {
        let at = SocketAddr::from((address(pod, 2), PORT));
        self.pods[pod].enter(|| TcpListener::bind(at).context("cannot listen"))
    }

    fn flows(&self) -> Result<Vec<Value>> {
        let ended = self.host.twheel_once(&["flows", "--json"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let lines = ended.lines.iter();
        lines
            .map(|line| Ok(serde_json::from_str(&line.text)?))
            .collect()
    }

    fn check_clean(&self) -> Result<()> {
        for pod in &self.pods {
            pod.check_clean(POD)?;
        }
        self.host.check_clean("lo")
    }
}

/// Two pods that are watched, and a connection of the first to the second.
fn two_pods_that_talk() -> Result<(Lab, Twheel, Connection)> {
    let lab = Lab::new(2)?;
    let twheel = lab.watch(&["--timeout", "1h"])?;
    let listener = lab.listen(1)?;
    let mut connection = Connection::open(&lab.pods[0], &listener)?;
    connection.talk()?;
    Ok((lab, twheel, connection))
}

fn address(pod: usize, last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 81 + (pod / 256) as u8, pod as u8, last)
}

fn stop(twheel: Twheel) -> Result<String> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.stderr)
}

/// Interfaces of two namespaces have the same index; each is told by its own name, and has counters of its own.
#[test]
fn interfaces_with_one_index_are_told_apart() -> Result<()> {
    require_root();
    for options in [
        &["--hook", "xdp"][..],
        &["--hook", "tcx"],
        &["--hook", "clsact", "--egress", "clsact"],
    ] {
        let lab = Lab::new(2)?;
        let twheel = lab.watch(&[options, &["--accounting"]].concat())?;
        let listeners = [lab.listen(0)?, lab.listen(1)?];
        // A connection of each pod to the other, and one of the host's, which only its server's pod sees.
        let mut open = [
            Connection::open(&lab.pods[0], &listeners[1])?,
            Connection::open(&lab.pods[1], &listeners[0])?,
            Connection::open(&lab.host, &listeners[1])?,
        ];
        for connection in &mut open {
            connection.talk()?;
        }
        let wanted = [
            (address(0, 2), lab.label(0), "out"),
            (address(1, 2), lab.label(1), "out"),
            (address(1, 1), lab.label(1), "in"),
        ];
        let until = Instant::now() + PATIENCE;
        loop {
            let flows = lab.flows()?;
            let found: BTreeSet<_> = flows
                .iter()
                .map(|flow| {
                    let text = |name: &str| flow[name].as_str().unwrap_or_default().to_owned();
                    (text("src"), text("iface"), text("direction"), text("state"))
                })
                .collect();
            let wanted: BTreeSet<_> = wanted
                .iter()
                .map(|(src, iface, direction)| {
                    let state = "established".to_owned();
                    (
                        src.to_string(),
                        iface.clone(),
                        (*direction).to_owned(),
                        state,
                    )
                })
                .collect();
            if found == wanted {
                break;
            }
            ensure!(
                Instant::now() < until,
                "{options:?}: {found:?}, not {wanted:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        for counter in ["ignored", "same_way", "moved"] {
            ensure!(lab.host.counter(counter)? == 0, "{options:?}: {counter}");
        }
        stop(twheel)?;
        lab.check_clean()?;
    }
    Ok(())
}

#[test]
fn zones_of_two_namespaces_keep_one_address_apart() -> Result<()> {
    require_root();
    // The same addresses behind each of two hosts that know nothing of one another.
    let labs = [Lab::new(1)?, Lab::new(1)?];
    let names = labs.each_ref().map(|lab| lab.pods[0].name().to_owned());
    let zone = format!("{}={}", labs[1].label(0), 7);
    let args = [
        "--iface",
        POD,
        "--netns",
        &names.join(","),
        "--zone",
        &zone,
        "--json",
    ];
    let twheel = Twheel::start(&labs[0].host, &args)?;
    let mut open = Vec::new();
    for lab in &labs {
        twheel.await_stderr(&format!("{}: attached", lab.label(0)))?;
        let listener = lab.listen(0)?;
        // From the same port.
        let from = SocketAddr::from((address(0, 1), 20_000));
        let client = lab.host.enter(|| {
            let socket = nix::sys::socket::socket(
                nix::sys::socket::AddressFamily::Inet,
                nix::sys::socket::SockType::Stream,
                nix::sys::socket::SockFlag::SOCK_CLOEXEC,
                None,
            )?;
            let addr = |at: SocketAddr| nix::sys::socket::SockaddrStorage::from(at);
            nix::sys::socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &addr(from))?;
            let to = listener.local_addr()?;
            nix::sys::socket::connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &addr(to))?;
            Ok(socket)
        })?;
        open.push((client, listener.accept()?));
    }
    let flows = labs[0].flows()?;
    let found: BTreeSet<_> = flows
        .iter()
        .map(|flow| {
            (
                flow["zone"].as_u64(),
                flow["iface"].as_str().unwrap_or_default(),
            )
        })
        .collect();
    let labels = labs.each_ref().map(|lab| lab.label(0));
    let wanted = BTreeSet::from([(None, labels[0].as_str()), (Some(7), labels[1].as_str())]);
    ensure!(found == wanted && flows.len() == 2, "{flows:?}");
    stop(twheel)?;
    Ok(())
}

#[test]
fn namespaces_that_appear_are_watched_in_time_and_those_that_go_are_let_go_of() -> Result<()> {
    require_root();
    let mut lab = Lab::of(1, "host", "come")?;
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
    // Whoever is inside goes on; the name is gone, and no packet is seen any more.
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

/// Whether a run has a file of a network namespace open.
fn is_held(twheel: &Twheel, inode: u64) -> Result<bool> {
    let wanted = PathBuf::from(format!("net:[{inode}]"));
    let files = std::fs::read_dir(format!("/proc/{}/fd", twheel.pid()))?;
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    Ok(links.into_iter().any(|link| link == wanted))
}

/// The number of the namespace that has gone is the next one's, and the index of its interface is the same.
#[test]
fn a_pod_that_comes_after_another_has_counters_of_its_own() -> Result<()> {
    require_root();
    let mut lab = Lab::of(1, "host", "turn")?;
    let pattern = format!("twl-{}-turn*", std::process::id());
    let args = [
        "--iface",
        POD,
        "--netns",
        &pattern,
        "--json",
        "--timeout",
        "3s",
    ];
    let twheel = Twheel::start(&lab.host, &args)?;
    let (mut names, mut open) = (Vec::new(), Vec::new());
    for turn in 0..3 {
        twheel.await_stderr(&format!("{}: attached", lab.label(0)))?;
        names.push(lab.label(0));
        let at = SocketAddr::from((address(turn, 2), PORT));
        let listener = lab.pods[0].enter(|| TcpListener::bind(at).context("cannot listen"))?;
        for _ in 0..=turn {
            open.push(Connection::open(&lab.host, &listener)?);
        }
        let pod = lab.pods.remove(0);
        let gone = pod.name().to_owned();
        drop(pod);
        twheel.await_stderr(&format!("{gone}: this network namespace disappeared"))?;
        lab.add()?;
    }
    let ended = lab.host.twheel_once(&["stats", "--json"])?;
    let lines = ended.lines.iter();
    let counters: Vec<Value> = lines
        .map(|line| Ok(serde_json::from_str(&line.text)?))
        .collect::<Result<_>>()?;
    let created = counters.iter().find(|it| it["counter"] == "created");
    let created = &created.context("no counter")?["interfaces"];
    for (turn, name) in (1..).zip(&names) {
        ensure!(created[name] == turn, "{name}: {created}");
    }
    let mut ends = [0; 3];
    for _ in 0..6 {
        let line = twheel.line(PATIENCE)?.context("nothing expires")?;
        let said: Value = serde_json::from_str(&line.text)?;
        let pod = names.iter().position(|name| said["iface"] == **name);
        ends[pod.with_context(|| format!("of no pod: {said}"))?] += 1;
    }
    ensure!(ends == [1, 2, 3], "{ends:?}");
    drop(open);
    stop(twheel)?;
    lab.check_clean()
}

/// What a run holds once it has nothing to do: it is not at the end of its start when it says what it waits for.
fn settled(twheel: &Twheel) -> Result<[usize; 3]> {
    let until = Instant::now() + PATIENCE;
    let mut before = twheel.held()?;
    loop {
        thread::sleep(Duration::from_millis(500));
        let now = twheel.held()?;
        if now[1..] == before[1..] {
            return Ok(now);
        }
        ensure!(Instant::now() < until, "threads and files come and go");
        before = now;
    }
}

#[test]
fn pods_come_and_go_under_traffic_and_nothing_is_left() -> Result<()> {
    require_root();
    let pods = if is_soak() { 1000 } else { 40 };
    /// At a time.
    const ALIVE: usize = 8;
    let mut lab = Lab::of(0, "many", "many")?;
    let pattern = format!("twl-{}-many*", std::process::id());
    // Both ends of each cable: in the host, and in the pod.
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
            // Its connection is open, and its veth pair goes with it.
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
    let (before, after) = (before.context("nobody looked")?, settled(&twheel)?);
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

#[test]
fn a_run_that_was_killed_is_replaced_in_place() -> Result<()> {
    require_root();
    let (lab, twheel, mut connection) = two_pods_that_talk()?;
    let seen = |lab: &Lab| {
        Ok::<_, anyhow::Error>(lab.host.counter("touched")? + lab.host.counter("seen_again")?)
    };
    let before = seen(&lab)?;
    let ended = twheel.kill()?;
    ensure!(ended.signal() == Some(Signal::SIGKILL as i32), "{ended:?}");
    // The programs go on without it.
    connection.talk()?;
    let between = seen(&lab)?;
    ensure!(between > before, "{between} packets");
    let twheel = lab.watch(&["--timeout", "1h"])?;
    // After the last of them is attached.
    twheel.await_stderr("adopted 1 flows")?;
    let said = twheel.stderr();
    for pod in 0..2 {
        let wanted = format!("{}: attached, adopted XDP", lab.label(pod));
        ensure!(said.contains(&wanted), "{said}");
    }
    connection.talk()?;
    ensure!(seen(&lab)? > between, "nothing is seen");
    stop(twheel)?;
    lab.check_clean()
}

/// It comes where it goes to before it is told where it has gone from.
#[test]
fn an_interface_that_moves_is_watched_where_it_is() -> Result<()> {
    require_root();
    let lab = Lab::of(2, "host", "move")?;
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

/// Another name of a network namespace, until it goes.
struct Alias(String);

impl Alias {
    fn new(of: &Namespace) -> Result<Self> {
        Self::after(of, format!("{}-too", of.name()), Duration::ZERO)
    }

    /// The name is there for a while before the namespace is.
    fn after(of: &Namespace, alias: String, pause: Duration) -> Result<Self> {
        let [from, to] = [of.name(), &alias].map(|name| PathBuf::from("/run/netns").join(name));
        File::create(&to)?;
        let alias = Self(alias);
        thread::sleep(pause);
        nix::mount::mount(
            Some(&from),
            &to,
            None::<&str>,
            nix::mount::MsFlags::MS_BIND,
            None::<&str>,
        )?;
        Ok(alias)
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        let path = PathBuf::from("/run/netns").join(&self.0);
        let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn a_namespace_with_two_names_is_watched_once_for_as_long_as_it_has_one() -> Result<()> {
    require_root();
    let mut lab = Lab::of(1, "host", "alias")?;
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

/// A run by names has room for 16, and so has who adopts it; one place was the host's, and stays so. What one namespace leaves is
/// another's.
#[test]
fn room_is_shared_by_all_namespaces() -> Result<()> {
    require_root();
    let lab = Lab::of(2, "host", "room")?;
    let ended = Twheel::start(
        &lab.host,
        &["--iface", "veth0", "--zone", "veth0=7", "--keep"],
    )?;
    stop(ended)?;
    let pairs: String = (1..8)
        .map(|pair| format!("link add a{pair} type veth peer name b{pair}\n"))
        .collect();
    let pairs = format!("link add a0 type veth peer name other0\n{pairs}");
    lab.pods[0].batch(&pairs)?;
    let list = format!("{},{}", lab.pods[0].name(), lab.pods[1].name());
    let args = ["--iface", "veth0,a*,b*,c*", "--netns", &list];
    let twheel = Twheel::start(&lab.host, &args)?;
    lab.host.await_attached("veth0", &[])?;
    let attached = |count: usize| -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while twheel.stderr().matches(": attached").count() != count {
            ensure!(Instant::now() < until, "not {count}: {}", twheel.stderr());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    };
    attached(15)?;
    lab.pods[1].ip("link add c1 type veth peer name c2")?;
    twheel.await_stderr("this run has reached its capacity of 16 interfaces")?;
    lab.pods[0].ip("link del a1")?;
    attached(17)?;
    lab.pods[1].await_attached("c1", &["xdp", "egress"])?;
    lab.pods[1].await_attached("c2", &["xdp", "egress"])?;
    // Room is made for whoever comes, and is taken: that is said anew.
    lab.pods[0].ip("link del a2")?;
    twheel.await_stderr("b2: disappeared:")?;
    lab.pods[1]
        .batch("link add c3 type veth peer name c4\nlink add c5 type veth peer name c6\n")?;
    attached(19)?;
    let said = stop(twheel)?;
    ensure!(said.matches("its capacity of 16").count() == 2, "{said}");
    lab.check_clean()
}

#[test]
fn commands_know_an_interface_by_its_namespace() -> Result<()> {
    require_root();
    let (lab, twheel, _connection) = two_pods_that_talk()?;
    let labels = [lab.label(0), lab.label(1)];
    for label in &labels {
        for command in ["flows", "stats", "wheel"] {
            let ended = lab.host.twheel_once(&[command, "--iface", label])?;
            ensure!(ended.code() == Some(0), "{command}: {ended:?}");
        }
    }
    let ended = lab.host.twheel_once(&["run", "--iface", &labels[0]])?;
    ensure!(ended.code() == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("--netns"), "{ended:?}");
    twheel.kill()?;
    let detach = |label: &str| lab.host.twheel_once(&["detach", "--iface", label]);
    let ended = detach(&labels[0])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    lab.pods[0].await_attached(POD, &[])?;
    lab.pods[1].await_attached(POD, &["xdp", "egress"])?;
    let again = detach(&labels[0])?;
    ensure!(again.code() == Some(6), "{again:?}");
    let ended = detach(&labels[1])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    lab.check_clean()
}

/// The programs of the run before go on by what that told them, until each is replaced.
#[test]
fn a_restart_under_traffic_mixes_no_zones_and_counts_nothing_twice() -> Result<()> {
    require_root();
    const CONNECTIONS: usize = 8;
    let mut lab = Lab::of(4, "host", "again")?;
    let pattern = format!("twl-{}-again*", std::process::id());
    let labels: Vec<_> = (0..4).map(|pod| lab.label(pod)).collect();
    let zones: Vec<_> = (1..4).map(|pod| format!("{}={pod}", labels[pod])).collect();
    let zones = zones.join(",");
    let args = [
        "--iface",
        POD,
        "--netns",
        &pattern,
        "--zone",
        &zones,
        "--timeout",
        "1h",
    ];
    let start = || -> Result<Twheel> {
        let twheel = Twheel::start(&lab.host, &args)?;
        for label in &labels[1..] {
            twheel.await_stderr(&format!("{label}: attached"))?;
        }
        Ok(twheel)
    };
    let mut twheel = start()?;
    // The lowest number is free from now on, and the next run would give it to another.
    let listeners: Vec<_> = (1..4).map(|pod| lab.listen(pod)).collect::<Result<_>>()?;
    let mut open = Vec::new();
    for listener in &listeners {
        for _ in 0..CONNECTIONS {
            let mut connection = Connection::open(&lab.host, listener)?;
            connection.talk()?;
            open.push(connection);
        }
    }
    let busy = Busy::start(open, Duration::from_millis(1));
    let gone = lab.pods[0].name().to_owned();
    drop(lab.pods.remove(0));
    twheel.await_stderr(&format!("{gone}: this network namespace disappeared"))?;
    for _ in 0..4 {
        twheel.kill()?;
        twheel = start()?;
        let mut found = BTreeMap::<_, usize>::new();
        for flow in lab.flows()? {
            let iface = flow["iface"].as_str().unwrap_or_default().to_owned();
            *found.entry((flow["zone"].as_u64(), iface)).or_default() += 1;
        }
        let wanted = (1..4).map(|pod| ((Some(pod as u64), labels[pod].clone()), CONNECTIONS));
        let wanted: BTreeMap<_, _> = wanted.collect();
        ensure!(found == wanted, "{found:?}, not {wanted:?}");
        for (counter, count) in [
            ("created", 3 * CONNECTIONS as u64),
            ("not_watched", 0),
            ("moved", 0),
        ] {
            let is = lab.host.counter(counter)?;
            ensure!(is == count, "{counter}: {is}, not {count}");
        }
    }
    busy.stop()?;
    stop(twheel)?;
    lab.check_clean()
}

/// Neither here nor in another namespace does anything stay that the run before has watched and this one does not.
#[test]
fn a_later_run_lets_go_of_what_it_leaves_out() -> Result<()> {
    require_root();
    let lab = Lab::of(1, "host", "less")?;
    let pod = &lab.pods[0];
    pod.ip("link add net0 type veth peer name net1")?;
    let both = ["xdp", "egress"];
    let run = |interfaces: &str, more: &[&str]| {
        let args = [&["--iface", interfaces, "--netns", pod.name()], more].concat();
        Twheel::start(&lab.host, &args)
    };
    let twheel = run("eth*,net*", &[])?;
    for interface in ["net0", "net1"] {
        pod.await_attached(interface, &both)?;
    }
    twheel.kill()?;
    let twheel = run("eth*,net*", &["--exclude", "net1"])?;
    pod.await_attached("net1", &[])?;
    pod.await_attached("net0", &both)?;
    twheel.kill()?;
    let twheel = run("eth*", &[])?;
    pod.await_attached("net0", &[])?;
    pod.await_attached(POD, &both)?;
    stop(twheel)?;
    Twheel::start(&lab.host, &["--iface", "veth0", "--zone", "veth0=7"])?.kill()?;
    lab.host.await_attached("veth0", &both)?;
    let twheel = run("veth0,eth0", &[])?;
    lab.host.await_attached("veth0", &[])?;
    twheel.await_stderr("veth0: detached: --netns does not include this network namespace")?;
    stop(twheel)?;
    lab.check_clean()
}

#[test]
fn a_later_run_without_them_lets_go_of_other_namespaces() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    lab.watch(&["--hook", "clsact", "--egress", "clsact"])?
        .kill()?;
    // The host has an interface of this name, too.
    lab.host
        .ip(&format!("link add {POD} type veth peer name peer0"))?;
    let twheel = Twheel::start(&lab.host, &["--iface", POD])?;
    lab.pods[0].await_attached(POD, &[])?;
    let parts = lab.host.pins()?;
    ensure!(!parts.iter().any(|it| it.is_dir()), "{parts:?}");
    stop(twheel)?;
    lab.check_clean()
}

#[test]
fn what_a_killed_run_has_left_is_detached_whatever_the_hook() -> Result<()> {
    require_root();
    for options in [
        &["--hook", "tcx"][..],
        &["--hook", "clsact", "--egress", "clsact"],
    ] {
        let mut lab = Lab::new(3)?;
        lab.watch(options)?.kill()?;
        // One goes meanwhile.
        lab.pods.pop();
        let ended = lab.host.twheel_once(&["detach", "--iface", POD])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        lab.check_clean()?;
        for pod in &lab.pods {
            ensure!(!pod.ip("-d link show")?.contains("xdp"));
            let qdiscs = pod.command("tc")?.args(["qdisc", "show"]).output()?;
            let qdiscs = String::from_utf8_lossy(&qdiscs.stdout).into_owned();
            ensure!(!qdiscs.contains("clsact"), "{qdiscs}");
        }
    }
    Ok(())
}

/// A flow that is counted in a pod is none of the host's to reap, though a socket of the host has its addresses.
#[test]
fn nothing_is_reaped_for_a_flow_of_another_namespace() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    let options = ["--timeout", "2s", "--reap", "socket,conntrack"];
    let twheel = lab.watch(&options)?;
    let listener = lab.listen(0)?;
    let mut connection = Connection::open(&lab.host, &listener)?;
    connection.talk()?;
    let mut outcomes = Vec::new();
    while outcomes.len() < 2 {
        let line = twheel.line(PATIENCE)?.context("nothing is reaped")?;
        let said: Value = serde_json::from_str(&line.text)?;
        if said["event"] == "reap" {
            outcomes.push(said["outcome"].as_str().unwrap_or_default().to_owned());
        }
    }
    ensure!(outcomes == ["other_zone"; 2], "{outcomes:?}");
    connection.talk().context("the connection is closed")?;
    stop(twheel)?;
    Ok(())
}

#[test]
fn what_cannot_be_is_said_in_one_sentence() -> Result<()> {
    require_root();
    let lab = Lab::new(1)?;
    for (netns, wanted) in [
        (
            "/proc/1/ns/net",
            "--netns /proc/1/ns/net: give a name in /run/netns",
        ),
        ("", "--netns : give a name in /run/netns"),
        ("a[", "--netns a[: "),
        (
            "blue --zone bleu/eth0=7",
            "--zone bleu/eth0=7: the network namespace bleu is not watched",
        ),
        (
            "blue --exclude blue/eth0",
            "--exclude blue/eth0: no interface has such a name",
        ),
    ] {
        let mut args = vec!["run", "--iface", POD, "--netns"];
        args.extend(netns.split(' '));
        let ended = lab.host.twheel_once(&args)?;
        let said = ended.stderr.trim();
        ensure!(ended.code() == Some(2), "{netns}: {ended:?}");
        ensure!(
            said.contains(wanted) && said.lines().count() == 1,
            "{netns}: {said}"
        );
    }
    // One that is not there is waited for, and may be mounted later than its name is made.
    let name = format!("twl-{}-later", std::process::id());
    let twheel = Twheel::start(&lab.host, &["--iface", POD, "--netns", &name])?;
    let alias = Alias::after(&lab.pods[0], name.clone(), Duration::from_millis(300))?;
    twheel.await_stderr(&format!("{name}/{POD}: attached"))?;
    drop(alias);
    twheel.await_stderr(&format!("{name}: this network namespace disappeared"))?;
    // What is none after a while is said to be none.
    let file = PathBuf::from("/run/netns").join(&name);
    File::create(&file)?;
    let said = twheel.await_stderr(&format!("{name}: not watched: it is no network namespace"));
    std::fs::remove_file(&file)?;
    said?;
    stop(twheel)?;
    let loopback = lab.pods[0].name().to_owned();
    // The loopback interface of a pod has the index of every other.
    let both = format!("lo,{POD}");
    let twheel = Twheel::start(&lab.host, &["--iface", &both, "--netns", &loopback])?;
    twheel.await_stderr("lo: not attached: ")?;
    stop(twheel)?;
    lab.check_clean()
}
