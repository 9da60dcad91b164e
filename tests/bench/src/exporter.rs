//! Compares a flow exporter with twheel on the same packets.

use std::{
    array,
    fs::{self, File},
    io::{BufWriter, Write},
    mem::MaybeUninit,
    net::UdpSocket,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf,
    maps::Map,
    programs::{Xdp, xdp::XdpMode},
};
use serde_json::json;
use twheel::{data_plane, inspect::Reader, progress};
use twheel_common::counter::Counter;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, program, tool},
    pair::{CLIENT, SERVER},
    plane::{ACK, SYN, frame},
    running::Twheel,
};

use crate::{
    gateway::{cpu_time, softirq_thread, sysctl},
    inputs::{CPU, object},
    plane::Random,
    report::{Figure, Report, verdict},
    size,
};

/// Connections in the capture, all at once, and packets of each: a handshake, then acknowledgments
/// in turn.
const FLOWS: u32 = size(50_000, 20_000);
const EACH: u32 = 20;
const PACKETS: u64 = FLOWS as u64 * EACH as u64;
/// The flow capacity of both.
const MAX_FLOWS: &str = "65536";
/// The address that flows are exported to: a socket that nobody reads.
const COLLECTOR: &str = "127.0.0.1:9995";
/// The capture library's buffer: the default of 2 MiB loses packets.
const BUFFER: &str = "134217728";
const WATCHERS: [&str; 4] = ["nobody", "xdp", "softflowd", "twheel"];
const NOBODY: usize = 0;
const PASS: usize = 1;
const SOFTFLOWD: usize = 2;
const TWHEEL: usize = 3;

/// Writes a capture (pcap): turn after turn, each flow has a packet, each time in another order.
fn capture(path: &Path) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).context("cannot write a capture")?);
    // The file header: microseconds; version 2.4; longest frame; Ethernet.
    for word in [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 65_535, 1u32] {
        file.write_all(&word.to_le_bytes())?;
    }
    let mut random = Random::default();
    let mut flows: Vec<u32> = (0..FLOWS).collect();
    let mut micros = 0u32;
    for turn in 0..EACH {
        let (back, flags) = match turn {
            0 => (false, SYN),
            1 => (true, SYN | ACK),
            _ => (turn % 2 == 1, ACK),
        };
        random.shuffle(&mut flows);
        for flow in &flows {
            // Each flow has its own address and port.
            let frame = frame(flow * 50_001, back, flags);
            let length = frame.len() as u32;
            micros += 10;
            for word in [micros / 1_000_000, micros % 1_000_000, length, length] {
                file.write_all(&word.to_le_bytes())?;
            }
            file.write_all(&frame)?;
        }
    }
    file.flush().context("cannot write a capture")
}

/// A running softflowd; killed when this is dropped.
struct Softflowd {
    child: Child,
    control: String,
}

impl Softflowd {
    fn start(host: &Namespace, directory: &Directory) -> Result<Self> {
        let control = directory.file("ctl");
        let child = exporter(host, directory)?
            .args(["-i", SERVER, "-B", BUFFER, "-c", &control])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run `softflowd`: is it installed?")?;
        let it = Self { child, control };
        let end = Instant::now() + PATIENCE;
        while it.statistics().is_err() {
            ensure!(Instant::now() < end, "softflowd does not answer");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(it)
    }

    /// How many packets it has seen, and how many flows.
    fn statistics(&self) -> Result<[u64; 2]> {
        let mut command = Command::new(program("softflowctl"));
        let output = command.args(["-c", &self.control, "statistics"]).output()?;
        ensure!(output.status.success(), "softflowctl does not answer");
        let text = String::from_utf8_lossy(&output.stdout);
        Ok([
            number(&text, "Packets processed: ")?,
            number(&text, "Number of active flows: ")?,
        ])
    }
}

impl Drop for Softflowd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The `softflowd` command, without what it captures from.
fn exporter(host: &Namespace, directory: &Directory) -> Result<Command> {
    let mut command = host.command(tool("softflowd")?)?;
    command
        .args(["-d", "-v", "9", "-m", MAX_FLOWS, "-n", COLLECTOR])
        .args(["-p", &directory.file("pid")])
        .stdin(Stdio::null());
    Ok(command)
}

/// The number that follows a label.
fn number(text: &str, label: &str) -> Result<u64> {
    let found = text.split_once(label).map(|(_, rest)| {
        let digits = rest.split(|it: char| !it.is_ascii_digit()).next();
        digits.unwrap_or_default().parse()
    });
    Ok(found.with_context(|| format!("no {label:?} in {text:?}"))??)
}

/// The cost of one replay.
struct Replay {
    /// The duration that tcpreplay reports.
    seconds: f64,
    /// CPU time of the sender, in whose softirqs packets arrive, and of the thread that takes over
    /// softirqs.
    sender: Duration,
    /// CPU time of the watcher.
    watcher: Duration,
    /// Packets that the watcher saw.
    seen: u64,
}

impl Replay {
    /// Nanoseconds of CPU time per packet sent, in total.
    fn each(&self) -> f64 {
        (self.sender + self.watcher).as_nanos() as f64 / PACKETS as f64
    }
}

/// Two hosts joined by a veth pair.
struct Lab {
    sender: Namespace,
    receiver: Namespace,
    directory: Directory,
    // The exports' destination.
    _collector: UdpSocket,
}

impl Lab {
    fn new() -> Result<Self> {
        let (sender, receiver) = (Namespace::new("sender")?, Namespace::new("receiver")?);
        for host in [&sender, &receiver] {
            for of in ["all", "default"] {
                sysctl(host, &format!("ipv6/conf/{of}/disable_ipv6"), "1")?;
            }
        }
        sender.ip(&format!(
            "link add {CLIENT} type veth peer name {SERVER} netns {}",
            receiver.name()
        ))?;
        sender.ip(&format!("link set {CLIENT} up"))?;
        receiver.ip(&format!("link set {SERVER} up"))?;
        let collector = receiver.enter(|| UdpSocket::bind(COLLECTOR).context("cannot bind"))?;
        let directory = Directory::new("bench")?;
        capture(&directory.0.join("capture"))?;
        Ok(Self {
            sender,
            receiver,
            directory,
            _collector: collector,
        })
    }

    /// Replays the capture once. `settled`: returns how many packets and flows the watcher has
    /// seen, once it has seen all.
    fn replay(
        &self,
        watcher: Option<u32>,
        settled: impl Fn() -> Result<[u64; 2]>,
    ) -> Result<Replay> {
        let softirq = softirq_thread()?;
        let watched = || watcher.map_or(Ok(Duration::ZERO), process_time);
        let before = (cpu_time(softirq)?, watched()?, children_time()?);
        let mut command = self.sender.command("taskset")?;
        command
            .args(["-c", &CPU.to_string()])
            .arg(tool("tcpreplay")?)
            .args(["--topspeed", "-K", "-q"])
            .args(["-i", CLIENT, &self.directory.file("capture")]);
        let output = run(command)?;
        let sender = children_time()? - before.2 + (cpu_time(softirq)? - before.0);
        let text = String::from_utf8_lossy(&output.stdout);
        let sent = number(&text.replace(' ', ""), "Successfulpackets:")?;
        ensure!(sent == PACKETS, "tcpreplay has sent {sent} packets");
        let seconds = text
            .split_once("sent in ")
            .and_then(|(_, rest)| rest.split_ascii_whitespace().next()?.parse().ok());
        let [seen, flows] = settled()?;
        // On a busy machine a packet in a hundred may be lost, but never all twenty of a flow.
        ensure!(
            watcher.is_none() || seen >= PACKETS / 100 * 99 && flows == u64::from(FLOWS),
            "of {PACKETS} packets of {FLOWS} flows {seen} of {flows} were seen"
        );
        Ok(Replay {
            seconds: seconds.with_context(|| format!("tcpreplay says {text:?}"))?,
            sender,
            watcher: watched()? - before.1,
            seen,
        })
    }

    fn nobody(&self) -> Result<Replay> {
        self.replay(None, || Ok([0; 2]))
    }

    /// With an XDP program that passes everything.
    fn pass(&self) -> Result<Replay> {
        let mut bpf =
            Ebpf::load(&object("TWHEEL_PEERS_OBJECT")?).context("cannot load the peers")?;
        let pass = bpf.program_mut("peer_pass").context("no peer_pass")?;
        let pass: &mut Xdp = pass.try_into()?;
        pass.load()?;
        self.receiver
            .enter(|| Ok(pass.attach(SERVER, XdpMode::Driver)?))?;
        self.nobody()
    }

    fn softflowd(&self) -> Result<Replay> {
        let softflowd = Softflowd::start(&self.receiver, &self.directory)?;
        self.replay(Some(softflowd.child.id()), || {
            // Until nothing more arrives: not every lost packet is counted.
            let mut before = None;
            loop {
                let now = softflowd.statistics()?;
                if before == Some(now) {
                    return Ok(now);
                }
                before = Some(now);
                thread::sleep(Duration::from_millis(200));
            }
        })
    }

    fn twheel(&self) -> Result<Replay> {
        let args = [
            "--iface",
            SERVER,
            "--mode",
            "native",
            "--max-flows",
            MAX_FLOWS,
            "--accounting",
        ];
        let twheel = Twheel::start(&self.receiver, &args)?;
        let reader = self.receiver.enter(|| Reader::open(Some(SERVER)))?;
        let counters = Map::PerCpuArray(reader.pins().map("COUNTERS")?);
        let replay = self.replay(Some(twheel.pid()), || {
            let counters = data_plane::counters(&counters)?;
            let seen = [Counter::Touched, Counter::Created].map(|it| counters.get(it));
            Ok([seen.iter().sum(), reader.table().iter().count() as u64])
        })?;
        let ended = twheel.stop()?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        Ok(replay)
    }

    /// softflowd reads the capture file. Returns its duration and its CPU time, in nanoseconds per
    /// packet.
    fn offline(&self) -> Result<[f64; 2]> {
        let mut command = exporter(&self.receiver, &self.directory)?;
        // With a control socket, it would wait for a client.
        command.args(["-c", "none", "-r", &self.directory.file("capture")]);
        let (begun, before) = (Instant::now(), children_time()?);
        let output = run(command)?;
        let times = [begun.elapsed(), children_time()? - before];
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let counted = [
            number(&text, "Packets processed: ")?,
            number(&text, "Flows expired: ")?,
        ];
        ensure!(
            counted == [PACKETS, FLOWS.into()],
            "softflowd has read packets of flows: {counted:?}"
        );
        Ok(times.map(|time| time.as_nanos() as f64 / PACKETS as f64))
    }
}

/// Measures replays, in turn, and reading the file.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "A capture of {FLOWS} TCP connections, {PACKETS} packets in random order, is replayed (tcpreplay --topspeed, \
         from memory)\nover a veth into a namespace where in turn nobody watches, an XDP program passes all, \
         `softflowd -i` (NetFlow 9, room for\n{MAX_FLOWS} flows, buffer 128 MiB) or `twheel run --accounting --iface` with as much \
         room: {rounds} rounds, median (least–most). Nanoseconds a\npacket: `wall` as tcpreplay says; `sender` is the \
         CPU time of its process, on CPU {CPU}, in whose softirqs packets arrive, and of\nksoftirqd; `watcher` that of \
         the process that watches, until it has come to the end; to report what flows end is not in it.\n`adds`: both, \
         less nobody's. A veth copies each of these packets for XDP, for want of headroom, which a driver would not: \
         `xdp`.\nBoth have seen every flow. Not seen: packets, in all rounds (softflowd's capture library keeps the last \
         ones until there are more).\n"
    ));
    let lab = Lab::new()?;
    let mut replays: [Vec<Replay>; WATCHERS.len()] = array::from_fn(|_| Vec::new());
    let mut offline = [Vec::new(), Vec::new()];
    for round in progress::over("replays", 0..rounds as usize) {
        for turn in 0..WATCHERS.len() {
            let watcher = (turn + round) % WATCHERS.len();
            replays[watcher].push(match watcher {
                NOBODY => lab.nobody()?,
                PASS => lab.pass()?,
                SOFTFLOWD => lab.softflowd()?,
                _ => lab.twheel()?,
            });
        }
        for (samples, value) in offline.iter_mut().zip(lab.offline()?) {
            samples.push(value);
        }
    }
    let figures = |of: &dyn Fn(&Replay) -> f64| {
        let figure = |replays: &Vec<Replay>| {
            Figure::from_samples(&replays.iter().map(of).collect::<Vec<_>>())
        };
        replays.each_ref().map(figure)
    };
    // Over all rounds.
    let lost = |replays: &Vec<Replay>| replays.iter().map(|it| PACKETS - it.seen).sum::<u64>();
    let nanoseconds = |time: Duration| time.as_nanos() as f64 / PACKETS as f64;
    let columns = [
        figures(&|it| it.seconds * 1e9 / PACKETS as f64),
        figures(&|it| nanoseconds(it.sender)),
        figures(&|it| nanoseconds(it.watcher)),
    ];
    let added = |watcher: usize| -> Vec<f64> {
        let pairs = replays[watcher].iter().zip(&replays[NOBODY]);
        pairs
            .map(|(with, without)| with.each() - without.each())
            .collect()
    };
    report.say(&format!(
        "{:>9}  {:>20}  {:>20}  {:>20}  {:>20}  not seen",
        "", "wall", "sender", "watcher", "adds"
    ));
    for (number, watcher) in WATCHERS.iter().enumerate() {
        let mut cells = columns.map(|figures| figures[number]).to_vec();
        let mut rest = String::new();
        if number != NOBODY {
            cells.push(Figure::from_samples(&added(number)));
            if number != PASS {
                rest = format!("  {:>8}", lost(&replays[number]));
            }
            report.nanoseconds("exporter", watcher, FLOWS.into(), &cells[3]);
        }
        report.say(&format!("{watcher:>9}  {}{rest}", Figure::row(&cells)));
    }
    let over = |ours: Vec<f64>, theirs: &[f64]| {
        let ratios = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs);
        Figure::from_samples(&ratios.collect::<Vec<_>>())
    };
    // Without the cost that any XDP program has on a veth.
    let alone = added(TWHEEL)
        .iter()
        .zip(added(PASS))
        .map(|(twheel, pass)| twheel - pass)
        .collect();
    let live = added(SOFTFLOWD);
    let [wall, cpu] = offline
        .each_ref()
        .map(|samples| Figure::from_samples(samples));
    let file = over(added(TWHEEL), &offline[1]);
    let (alone, live) = (over(alone, &live), over(added(TWHEEL), &live));
    let walls = |watcher: usize| {
        replays[watcher]
            .iter()
            .map(|it| it.seconds)
            .collect::<Vec<_>>()
    };
    let slower = over(walls(TWHEEL), &walls(SOFTFLOWD));
    let text = |it: Figure| verdict(&it, None);
    report.say(&format!(
        "\nCPU time: what twheel adds over what softflowd does: {}; without what `xdp` does on a veth: {}\n\
         Wall time of the replay, the sender's CPU being where XDP runs: with twheel over with softflowd: {}\n\
         `softflowd -r` of the same file, its best: {} wall, {} CPU. What twheel adds over that CPU time: {}",
        text(live),
        text(alone),
        text(slower),
        Figure::row(&[wall]).trim(),
        Figure::row(&[cpu]).trim(),
        text(file)
    ));
    report.nanoseconds("exporter", "softflowd_file", FLOWS.into(), &cpu);
    report.object(&json!({
        "bench": "exporter", "variant": "ratio", "n": FLOWS, "rounds": rounds,
        "live": live.median, "without_xdp": alone.median, "file": file.median, "wall": slower.median,
        "softflowd_not_seen": lost(&replays[SOFTFLOWD]), "twheel_not_seen": lost(&replays[TWHEEL]),
    }));
    Ok(())
}

/// Runs a command to its end; fails if the command does.
fn run(mut command: Command) -> Result<Output> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {:?}: is it installed?", command.get_program()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{:?}: {}",
        command.get_program(),
        stderr.trim()
    );
    Ok(output)
}

/// CPU time of all threads of a process.
fn process_time(process: u32) -> Result<Duration> {
    let mut time = Duration::ZERO;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let id = task?.file_name();
        time += cpu_time(id.to_str().context("no number")?.parse()?)?;
    }
    Ok(time)
}

/// CPU time of all children that have been waited for.
fn children_time() -> Result<Duration> {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for writes.
    let result = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) };
    ensure!(result == 0, "no usage of children");
    // SAFETY: the kernel has filled it in, and all-zero bytes are valid anyway.
    let usage = unsafe { usage.assume_init() };
    let times = [usage.ru_utime, usage.ru_stime].map(|time| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    });
    Ok(times.iter().sum())
}
