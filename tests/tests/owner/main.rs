//! Whose the sockets of flows are: real processes of other users, in cgroups of their own.
#![allow(missing_docs)]

mod events;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid, User, setuid},
};
use serde_json::Value;
use twheel_tests::{
    netns::{Namespace, PATIENCE, ip, require_root},
    pair::{CLIENT, Family, Pair, SERVER},
    running::{PolicyFile, Twheel, once},
};

/// Tells this program to be a service.
const SERVICE: &str = "TWHEEL_TEST_SERVICE";
/// The name that services give themselves.
const COMMAND: &str = "some (service)";
const NOBODY: u32 = 65534;
const PORT: u16 = 8080;

/// A cgroup of version 2, below that of this process; removed when dropped.
struct Cgroup {
    directory: PathBuf,
    /// As `/proc/PID/cgroup` has it.
    path: String,
}

impl Cgroup {
    fn new(name: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("twheel-test-{}-{count}-{name}", std::process::id());
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let mount = mount.context("this machine has no cgroups of version 2: mount them")?;
        let mount = mount.split(' ').nth(4).context("no mount point")?;
        let own = own_cgroup()?;
        let path = format!("{}/{name}", own.trim_end_matches('/'));
        let directory = Path::new(mount).join(path.trim_start_matches('/'));
        fs::create_dir(&directory).context("cannot create a cgroup")?;
        Ok(Self { directory, path })
    }

    fn file(&self) -> Result<File> {
        let procs = self.directory.join("cgroup.procs");
        Ok(File::options().write(true).open(procs)?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was killed leaves it a moment later.
        let end = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.directory).is_err() && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn own_cgroup() -> Result<String> {
    let all = fs::read_to_string("/proc/self/cgroup")?;
    let own = all.lines().find_map(|line| line.strip_prefix("0::"));
    Ok(own.context("no cgroup of version 2")?.to_owned())
}

/// A process that has a socket; killed when dropped.
struct Service {
    child: Child,
    /// The service ends when this is closed.
    _stdin: ChildStdin,
    address: SocketAddr,
}

impl Service {
    /// Starts one in a namespace and a cgroup. `what`: `tcp`, `udp`, `shared` (TCP; a child has the
    /// accepted socket, too) or `late` (TCP; accepts a second after its start); and the address.
    fn start(namespace: &Namespace, cgroup: &Cgroup, what: &str) -> Result<Self> {
        let mut command = namespace.command(std::env::current_exe()?)?;
        let file = cgroup.file()?;
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || Ok(nix::unistd::write(&file, b"0").map(drop)?));
        }
        command
            .args(["--exact", "service", "--ignored", "--nocapture"])
            .env(SERVICE, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a service")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        let said = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("ready ")?.1.to_owned()));
        let said = said.context("the service has failed")?;
        Ok(Self {
            child,
            _stdin: stdin,
            address: said.parse()?,
        })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service: this program, started by [`Service::start`].
#[test]
#[ignore = "a process of the other tests"]
fn service() -> Result<()> {
    let Some(what) = std::env::var_os(SERVICE) else {
        return Ok(());
    };
    let what = what.into_string().ok().context("no text")?;
    let words: Vec<_> = what.split(' ').collect();
    fs::write("/proc/self/comm", COMMAND)?;
    setuid(Uid::from_raw(NOBODY))?;
    let (tcp, udp) = match words[0] {
        "udp" => (None, Some(UdpSocket::bind(words[1])?)),
        _ => (Some(TcpListener::bind(words[1])?), None),
    };
    let address = match (&tcp, &udp) {
        (Some(tcp), _) => tcp.local_addr()?,
        (None, Some(udp)) => udp.local_addr()?,
        _ => unreachable!(),
    };
    if words[0] == "shared" {
        // The child gets the accepted socket.
        println!("ready {address}");
        let accepted = tcp.context("only TCP is shared")?.accept()?.0;
        fcntl(accepted.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut sharer = Command::new("sleep").arg("60").spawn()?;
        std::io::stdin().read_to_end(&mut Vec::new())?;
        drop(accepted);
        sharer.kill()?;
        sharer.wait()?;
        return Ok(());
    }
    println!("ready {address}");
    let wait = Duration::from_secs(u64::from(words[0] == "late"));
    if let Some(tcp) = tcp {
        thread::spawn(move || {
            thread::sleep(wait);
            let accepted: Vec<_> = tcp.incoming().collect();
            drop(accepted);
        });
    }
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(udp);
    Ok(())
}

/// A flow's protocol and the endpoint of its initiator: no two flows of a test share both.
type Name = (&'static str, SocketAddr);

/// The listed flows, by their names.
fn flows(namespace: &Namespace, options: &[&str]) -> Result<BTreeMap<Name, Value>> {
    let args = [&["flows", "--json"], options].concat();
    let ended = namespace.twheel_once(&args)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    ensure!(ended.stderr.is_empty(), "{}", ended.stderr);
    let mut flows = BTreeMap::new();
    for line in &ended.lines {
        let flow: Value = serde_json::from_str(&line.text)?;
        let proto = if flow["proto"] == "tcp" { "tcp" } else { "udp" };
        let port = flow["sport"].as_u64().context("no sport")?;
        let address = flow["src"].as_str().context("no src")?.parse()?;
        let name = (proto, SocketAddr::new(address, u16::try_from(port)?));
        let double = flows.insert(name, flow);
        ensure!(double.is_none(), "listed twice: {double:?}");
    }
    Ok(flows)
}

/// Checks that a flow has this owner and no other fields of one.
#[track_caller]
fn assert_owner(flow: &Value, pid: u32, command: &str, user: &str, cgroup: &str) {
    assert_eq!(flow["owner_pid"], pid, "{flow}");
    assert_eq!(flow["owner_command"], command, "{flow}");
    assert_eq!(flow["owner_user"], user, "{flow}");
    assert_eq!(flow["owner_cgroup"], cgroup, "{flow}");
}

#[track_caller]
fn assert_nobodys(flow: &Value) {
    let fields = flow.as_object().expect("an object").keys();
    let of_owner: Vec<_> = fields.filter(|key| key.starts_with("owner")).collect();
    assert!(of_owner.is_empty(), "{flow}");
}

/// A datagram of a client, and its endpoint.
fn datagram(namespace: &Namespace, from: IpAddr, to: SocketAddr) -> Result<UdpSocket> {
    namespace.enter(|| {
        let socket = UdpSocket::bind(SocketAddr::new(from, 0))?;
        socket.connect(to)?;
        socket.send(b"!")?;
        Ok(socket)
    })
}

fn user(number: u32) -> Result<String> {
    let user = User::from_uid(Uid::from_raw(number))?;
    Ok(user.map_or_else(|| number.to_string(), |user| user.name))
}

#[test]
fn flows_tell_the_process_user_and_cgroup_of_their_sockets() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(
        &pair.server,
        &["--iface", SERVER, "--proto", "tcp,udp", "--timeout", "60s"],
    )?;
    let nobody = user(NOBODY)?;
    let (mut services, mut expected) = (Vec::new(), Vec::new());
    let (mut streams, mut sockets) = (Vec::new(), Vec::new());
    for family in [Family::V4, Family::V6] {
        let cgroup = Cgroup::new("tcp")?;
        let at = SocketAddr::new(family.server(), PORT);
        let tcp = Service::start(&pair.server, &cgroup, &format!("tcp {at}"))?;
        let stream = pair.client.enter(|| Ok(TcpStream::connect(tcp.address)?))?;
        let name = ("tcp", stream.local_addr()?);
        expected.push((name, tcp.pid(), cgroup.path.clone()));
        streams.push(stream);
        services.push((tcp, cgroup));
    }
    // A socket with one address, and one with all of both families.
    for (bind, to) in [
        (
            SocketAddr::new(Family::V6.server(), PORT),
            &[Family::V6] as &[_],
        ),
        ("[::]:8081".parse()?, &[Family::V4, Family::V6]),
    ] {
        let cgroup = Cgroup::new("udp")?;
        let udp = Service::start(&pair.server, &cgroup, &format!("udp {bind}"))?;
        for family in to {
            let to = SocketAddr::new(family.server(), bind.port());
            let socket = datagram(&pair.client, family.client(), to)?;
            let name = ("udp", socket.local_addr()?);
            expected.push((name, udp.pid(), cgroup.path.clone()));
            sockets.push(socket);
        }
        services.push((udp, cgroup));
    }
    // Initiated here, by this process; and what this host has no socket of.
    let listener = pair
        .client
        .enter(|| Ok(TcpListener::bind((Family::V4.client(), PORT))?))?;
    let to = listener.local_addr()?;
    let own = pair.server.enter(|| Ok(TcpStream::connect(to)?))?;
    let silent = pair.half_open(Family::V4)?;
    let refused = SocketAddr::new(Family::V4.server(), 9);
    let nowhere = datagram(&pair.client, Family::V4.client(), refused)?;

    let check = |flows: &BTreeMap<Name, Value>| -> Result<()> {
        for (name, pid, cgroup) in &expected {
            assert_owner(&flows[name], *pid, COMMAND, &nobody, cgroup);
        }
        let command = fs::read_to_string("/proc/self/comm")?;
        let mine = &flows[&("tcp", own.local_addr()?)];
        let pid = std::process::id();
        assert_owner(mine, pid, command.trim_end(), &user(0)?, &own_cgroup()?);
        assert_nobodys(&flows[&("tcp", silent)]);
        assert_nobodys(&flows[&("udp", nowhere.local_addr()?)]);
        Ok(())
    };
    let mut listed = flows(&pair.server, &["--owner"])?;
    check(&listed)?;
    assert_eq!(listed.len(), expected.len() + 3);
    flows(&pair.server, &[])?.values().for_each(assert_nobodys);

    // As text.
    let ended = pair.server.twheel_once(&["flows", "--owner"])?;
    let ((_, endpoint), pid, cgroup) = &expected[0];
    let wanted = format!("  pid {pid} ({COMMAND})  user {nobody}  cgroup {cgroup}");
    let endpoint = format!("{endpoint} ");
    let line = ended
        .lines
        .iter()
        .find(|line| line.text.contains(&endpoint));
    let line = &line.context("no such line")?.text;
    assert!(line.ends_with(&wanted), "{line}");

    // Very many flows: the sockets are listed once, and the answers are the same.
    pair.server.begin_flows(SERVER, 3000)?;
    listed = flows(&pair.server, &["--owner"])?;
    assert!(listed.len() > 1024);
    check(&listed)?;

    for (by, name, count) in [
        ("command", COMMAND, expected.len()),
        ("cgroup", expected[0].2.as_str(), 1),
        ("cgroup", "-", 3000 + 2),
    ] {
        let ended = pair
            .server
            .twheel_once(&["talkers", "--json", "--by", by])?;
        let lines = ended.lines.iter();
        let lines = lines.map(|line| Ok(serde_json::from_str(&line.text)?));
        let lines: Vec<Value> = lines.collect::<Result<_>>()?;
        let found = lines.iter().find(|line| line["talker"] == name);
        assert_eq!(found.context("no line")?["flows"], count, "{lines:?}");
    }

    // The sockets are gone, and so are the owners.
    drop(services);
    listed = flows(&pair.server, &["--owner"])?;
    assert_nobodys(&listed[&("udp", sockets[0].local_addr()?)]);
    twheel.stop()?;
    drop(streams);
    Ok(())
}

#[test]
fn a_shared_socket_is_that_of_the_lowest_process() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let cgroup = Cgroup::new("shared")?;
    let at = SocketAddr::new(Family::V4.server(), PORT);
    let service = Service::start(&pair.server, &cgroup, &format!("shared {at}"))?;
    let stream = pair
        .client
        .enter(|| Ok(TcpStream::connect(service.address)?))?;
    let name = ("tcp", stream.local_addr()?);
    // The child has begun once the cgroup has two processes.
    let procs = || -> Result<Vec<u32>> {
        let text = fs::read_to_string(cgroup.directory.join("cgroup.procs"))?;
        Ok(text.lines().map(str::parse).collect::<Result<_, _>>()?)
    };
    let end = Instant::now() + PATIENCE;
    while procs()?.len() < 2 {
        ensure!(Instant::now() < end, "no child");
        thread::sleep(Duration::from_millis(5));
    }
    let mut pids = procs()?;
    pids.sort_unstable();
    let found = flows(&pair.server, &["--owner"])?;
    assert_eq!(found[&name]["owner_pid"], pids[0]);
    // Without the first, it is that of the other one.
    drop(service);
    let left = procs()?;
    assert_eq!(left.len(), 1, "{left:?}");
    let found = flows(&pair.server, &["--owner"])?;
    assert_eq!(found[&name]["owner_pid"], left[0]);
    assert_eq!(found[&name]["owner_command"], "sleep");
    assert_eq!(found[&name]["owner_cgroup"], *cgroup.path);
    kill(Pid::from_raw(i32::try_from(left[0])?), Signal::SIGKILL)?;
    twheel.stop()?;
    Ok(())
}

/// A host that forwards between two pods.
#[test]
fn sockets_in_other_network_namespaces_are_found() -> Result<()> {
    require_root();
    let host = Namespace::new("host")?;
    host.enter(|| Ok(fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
    let mut pods = Vec::new();
    let address = |link: u8, last: u8| Ipv4Addr::new(10, 79, link, last);
    for link in [0, 1] {
        let pod = Namespace::new("pod")?;
        let (leg, name) = (format!("leg{link}"), pod.name().to_owned());
        ip(&format!(
            "link add {leg} netns {} type veth peer name eth0 netns {name}",
            host.name()
        ))?;
        host.add_address(address(link, 1).into(), 24, &leg)?;
        host.ip(&format!("link set {leg} up"))?;
        pod.add_address(address(link, 2).into(), 24, "eth0")?;
        pod.ip("link set eth0 up")?;
        pod.ip(&format!("route add default via {}", address(link, 1)))?;
        pods.push(pod);
    }
    let cgroup = Cgroup::new("pod")?;
    let at = SocketAddr::new(address(1, 2).into(), PORT);
    let service = Service::start(&pods[1], &cgroup, &format!("tcp {at}"))?;
    let stream = |pods: &[Namespace]| pods[0].enter(|| Ok(TcpStream::connect(at)?));
    let nobody = user(NOBODY)?;

    // Counted on the host, between the two.
    let twheel = Twheel::start(&host, &["--iface", "leg1"])?;
    let forwarded = stream(&pods)?;
    let name = ("tcp", forwarded.local_addr()?);
    assert_nobodys(&flows(&host, &["--owner"])?[&name]);
    let options = ["--owner", "--owner-netns", pods[1].name()];
    let found = flows(&host, &options)?;
    assert_owner(&found[&name], service.pid(), COMMAND, &nobody, &cgroup.path);
    let ended = host.twheel_once(&["flows", "--owner", "--owner-netns", "no-such"])?;
    assert_eq!(ended.code(), Some(2));
    assert!(
        ended
            .stderr
            .contains("--owner-netns no-such: not a network namespace")
    );
    twheel.stop()?;

    // Counted in the pod: the sockets are looked for there.
    let twheel = Twheel::start(&host, &["--iface", "eth0", "--netns", pods[1].name()])?;
    twheel.await_stderr("eth0: attached")?;
    let there = stream(&pods)?;
    let name = ("tcp", there.local_addr()?);
    let found = flows(&host, &["--owner"])?;
    assert_owner(&found[&name], service.pid(), COMMAND, &nobody, &cgroup.path);
    twheel.stop()?;
    Ok(())
}

/// What takes capabilities that are missing is said in one sentence.
#[test]
fn what_cannot_be_found_out_is_said() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let cgroup = Cgroup::new("hidden")?;
    let at = SocketAddr::new(Family::V4.server(), PORT);
    let service = Service::start(&pair.server, &cgroup, &format!("tcp {at}"))?;
    let stream = pair
        .client
        .enter(|| Ok(TcpStream::connect(service.address)?))?;
    let port = stream.local_addr()?.port();
    let mut command = pair.server.command("setpriv")?;
    command
        .args(["--inh-caps", "-all", "--bounding-set", "-all"])
        .arg(twheel_tests::running::twheel_bin()?)
        .args(["flows", "--owner", "--json"]);
    let ended = once(command)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(
        ended.stderr,
        "twheel: --owner: processes of other users are not shown: not permitted without \
         CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH\n"
    );
    let flows = ended.lines.iter();
    let flows = flows.map(|line| Ok(serde_json::from_str(&line.text)?));
    let flows: Vec<Value> = flows.collect::<Result<_>>()?;
    let flow = flows.iter().find(|flow| flow["sport"] == port);
    let flow = flow.context("no such flow")?;
    // These the kernel tells everybody.
    assert_eq!(flow["owner_user"], user(NOBODY)?);
    assert_eq!(flow["owner_cgroup"], *cgroup.path);
    assert!(flow.get("owner_pid").is_none(), "{flow}");
    assert!(flow.get("owner_command").is_none(), "{flow}");
    twheel.stop()?;
    Ok(())
}

/// Waits for this many `reap` events: their outcomes by the port of the initiator.
fn outcomes(twheel: &Twheel, count: usize) -> Result<BTreeMap<u16, String>> {
    let mut outcomes = BTreeMap::new();
    let end = Instant::now() + PATIENCE;
    while outcomes.len() < count {
        let line = twheel.line(end.saturating_duration_since(Instant::now()))?;
        let event: Value = serde_json::from_str(&line.context("no event")?.text)?;
        if event["event"] == "reap" {
            let port = event["sport"].as_u64().context("no sport")?;
            let outcome = event["outcome"].as_str().context("no outcome")?;
            outcomes.insert(u16::try_from(port)?, outcome.to_owned());
        }
    }
    Ok(outcomes)
}

fn is_open(stream: &TcpStream) -> Result<bool> {
    stream.set_nonblocking(true)?;
    let read = (&*stream).read(&mut [0]);
    stream.set_nonblocking(false)?;
    Ok(read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock))
}

/// Two services have idle connections. The policy reaps those of one.
#[test]
fn a_policy_reaps_one_service_and_not_the_other() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let [parent, other] = ["parent", "other"].map(Cgroup::new);
    let (parent, other) = (parent?, other?);
    // What is below a cgroup belongs to it; one whose name begins like it does not.
    let below = Cgroup {
        directory: parent.directory.join("below"),
        path: format!("{}/below", parent.path),
    };
    let longer = Cgroup {
        directory: PathBuf::from(format!("{}-longer", parent.directory.display())),
        path: format!("{}-longer", parent.path),
    };
    fs::create_dir(&below.directory)?;
    fs::create_dir(&longer.directory)?;
    let mut services = Vec::new();
    for (number, cgroup) in [&parent, &below, &longer, &other].into_iter().enumerate() {
        let family = Family::alternate(number);
        let at = SocketAddr::new(family.server(), PORT + number as u16);
        services.push(Service::start(&pair.server, cgroup, &format!("tcp {at}"))?);
    }
    let connect = || -> Result<Vec<TcpStream>> {
        let connect = |it: &Service| pair.client.enter(|| Ok(TcpStream::connect(it.address)?));
        services.iter().map(connect).collect()
    };
    let text = |cgroup: &str| {
        format!(
            "[[rule]]\nname = \"services\"\ndport = \"8080-8083\"\n\
             timeouts = {{ established = \"500ms\" }}\n\
             reap = {{ actions = [\"socket\"], cgroup = \"{cgroup}\" }}\n"
        )
    };
    let policy = PolicyFile::new("owner", &text(&parent.path))?;
    let args = [
        "--iface",
        SERVER,
        "--json",
        "--policy",
        policy.path(),
        "--reap-max-share",
        "100",
    ];
    let twheel = Twheel::start(&pair.server, &args)?;
    let check = |streams: &[TcpStream], reaped: [bool; 4]| -> Result<()> {
        let outcomes = outcomes(&twheel, 4)?;
        for (stream, is_reaped) in streams.iter().zip(reaped) {
            let outcome = &outcomes[&stream.local_addr()?.port()];
            let wanted = if is_reaped { "done" } else { "other_cgroup" };
            assert_eq!(outcome, wanted, "{outcomes:?}");
            // The peer has the RST by the time that the event is read.
            assert_eq!(is_open(stream)?, !is_reaped, "{outcomes:?}");
        }
        Ok(())
    };
    check(&connect()?, [true, true, false, false])?;

    // Another process loads a policy for the other service.
    let second = PolicyFile::new("owner-2", &text(&other.path))?;
    let load = ["policy", "load", second.path(), "--iface", SERVER];
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    check(&connect()?, [false, false, false, true])?;

    // One that limits nothing.
    second
        .write(&text("x").replace("{ actions = [\"socket\"], cgroup = \"x\" }", "[\"socket\"]"))?;
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    check(&connect()?, [true; 4])?;
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("it has no local socket in a cgroup"),
        "{}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)?;
    drop(services);
    Ok(())
}

/// A policy limits what is done to forwarded flows, too: they have no local socket.
#[test]
fn a_flow_without_a_local_socket_is_in_no_cgroup() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let text =
        "[timeouts]\nsyn_sent = \"300ms\"\n[reap]\nactions = [\"conntrack\"]\ncgroup = \"/\"";
    let policy = PolicyFile::new("owner-none", text)?;
    let args = ["--iface", CLIENT, "--json", "--policy", policy.path()];
    let twheel = Twheel::start(&pair.client, &args)?;
    let silent = pair.half_open(Family::V6)?;
    let outcomes = outcomes(&twheel, 1)?;
    assert_eq!(outcomes[&silent.port()], "other_cgroup");
    twheel.stop()?;
    Ok(())
}
