//! Gateways side by side, the frames that pass them, and the trackers that run there.

use std::{fs, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Ebpf,
    maps::{Array, Map, MapData, PerCpuArray},
    programs::{
        LinkOrder, Program, SchedClassifier, TcAttachType, TestRun, TestRunAttrs, TestRunOptions,
        Xdp, tc::TcAttachOptions, xdp::XdpMode,
    },
};
use nix::net::if_::if_nametoindex;
use twheel::{data_plane, delete::delete_all, inspect::Reader, stepper::pin_to};
use twheel_common::{
    counter::Counter,
    event::Reason,
    packet::tcp::{ACK, SYN},
};
use twheel_tests::{
    netns::{self, Namespace},
    path::offload,
    running::{Twheel, once},
};

use crate::{
    inputs::{self, CPU},
    report::Report,
    size,
};

/// Minimum number of frames in a run.
pub const FRAMES: u32 = size(1 << 18, 1 << 13);
/// The gateways, by what tracks packets there.
pub const LANES: [&str; 5] = ["base", "xdp", "conntrack", "twheel", "tcx"];
pub const BASE: usize = 0;
pub const PASS: usize = 1;
pub const CONNTRACK: usize = 2;
pub const TWHEEL: usize = 3;
pub const TCX: usize = 4;
/// A gateway's interfaces: the one on the flows' side, which twheel watches, and the other.
pub const INTERFACES: [&str; 2] = ["in0", "out0"];
/// twheel's table is never smaller than this, as nobody would make it smaller.
const SMALLEST_TABLE: u32 = 1 << 16;
/// Frames that the kernel makes at a time: one poll of a driver.
const BATCH: u32 = 64;
/// `ETHTOOL_SGRO`: with it, a veth polls and accepts frames.
pub const GRO: u32 = 0x2c;
/// Maximum fraction of a run's time that may be other work of the softirq thread; a debug build's times
/// mean nothing.
const MAX_THREAD: f64 = size(0.1, 1.0);
/// Rounds before those that count.
pub const WARM_UP: u32 = 1;

/// IPv4 and TCP without options: an acknowledgment to the server, without the fields that
/// `twheel-ebpf/src/bench/path.rs` fills in.
const SEGMENT: [u8; 54] = [
    0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
    0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 0, 0, 0, 0, 192, 0, 2, 1, // IPv4
    0, 0, 1, 187, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 4, 0, 0, 0, 0, 0, // TCP
];

/// The packet that each flow has in a run.
#[derive(Clone, Copy)]
pub enum Packet {
    Syn,
    SynAck,
    Ack,
    /// An acknowledgment of the server's.
    BackAck,
}

impl Packet {
    pub fn is_back(self) -> bool {
        matches!(self, Self::SynAck | Self::BackAck)
    }

    fn bytes(self) -> [u8; SEGMENT.len()] {
        let mut segment = SEGMENT;
        let (flags, seq, ack) = match self {
            Self::Syn => (SYN, 0, 0),
            Self::SynAck => (SYN | ACK, 0, 1),
            Self::Ack | Self::BackAck => (ACK, 1, 1),
        };
        (segment[41], segment[45], segment[47]) = (seq, ack, flags);
        if self.is_back() {
            segment[26..34].rotate_left(4);
            segment[34..38].rotate_left(2);
        }
        segment
    }
}

/// The flows of a run's frames.
#[derive(Clone, Copy)]
pub struct Flows {
    /// Number of the first flow.
    pub first: u32,
    /// There are two to the power of this many flows.
    pub bits: u32,
    /// `None`: each flow once, in order. Otherwise in another order, which begins at this position,
    /// and as often as frames are wanted.
    pub from: Option<u32>,
}

/// How many buckets conntrack's hash has.
#[derive(Clone, Copy)]
pub enum Buckets {
    /// One for each of a flow's two entries.
    Enough,
    /// What the kernel chose for this machine's memory, as if only `nf_conntrack_max` had been
    /// raised.
    Default,
}

/// Two global settings of conntrack, which are restored at the end.
struct Limits(Vec<(&'static str, String)>);

impl Limits {
    /// Sets the capacity for this many entries. The module is loaded, because a namespace has rules
    /// that need it.
    fn raise(entries: u32, buckets: Buckets) -> Result<Self> {
        let mut before = Self(Vec::new());
        // Each flow has two entries in the hash.
        let wanted = [
            ("nf_conntrack_max", 2 * entries),
            ("nf_conntrack_buckets", 2 * entries),
        ];
        let count = match buckets {
            Buckets::Enough => 2,
            Buckets::Default => 1,
        };
        for (name, value) in wanted.into_iter().take(count) {
            let path = format!("/proc/sys/net/netfilter/{name}");
            let old = fs::read_to_string(&path).with_context(|| format!("no {path}"))?;
            fs::write(&path, value.to_string()).with_context(|| format!("cannot set {path}"))?;
            before.0.push((name, old));
        }
        Ok(before)
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            if let Err(error) = fs::write(format!("/proc/sys/net/netfilter/{name}"), value.trim()) {
                eprintln!("{name} was {}, and is not again: {error}", value.trim());
            }
        }
    }
}

/// Sets a value below `/proc/sys/net` in a namespace.
pub fn sysctl(namespace: &Namespace, name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    namespace.enter(|| fs::write(&path, value).with_context(|| format!("cannot set {path}")))
}

/// A namespace that forwards or sends only IPv4.
pub fn namespace(role: &str) -> Result<Namespace> {
    let namespace = Namespace::new(role)?;
    for (name, value) in [
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
    ] {
        sysctl(&namespace, name, value)?;
    }
    Ok(namespace)
}

/// A gateway, and the source's interfaces before and behind it.
struct Gateway {
    gateway: Namespace,
    ends: [u32; 2],
}

impl Gateway {
    fn new(source: &Namespace, name: &str) -> Result<Self> {
        let gateway = namespace(name)?;
        let mut ends = [0; 2];
        let networks = ["10.0.0.0/8", "192.0.2.0/24"];
        for ((interface, network), end) in INTERFACES.iter().zip(networks).zip(&mut ends) {
            let peer = format!("{interface}-{name}");
            gateway.ip(&format!(
                "link add {interface} address 02:00:00:00:00:02 type veth peer name {peer} netns {}",
                source.name()
            ))?;
            source.ip(&format!("link set {peer} up"))?;
            gateway.ip(&format!("link set {interface} up"))?;
            gateway.ip(&format!(
                "route add {network} via 198.18.0.1 dev {interface} onlink"
            ))?;
            gateway.ip(&format!(
                "neigh add 198.18.0.1 lladdr 02:00:00:00:00:01 dev {interface} nud permanent"
            ))?;
            gateway.enter(|| offload(interface, GRO, true))?;
            *end = source.enter(|| Ok(if_nametoindex(peer.as_str())?))?;
        }
        Ok(Self { gateway, ends })
    }

    /// How many entries conntrack has here.
    fn entries(&self) -> Result<u64> {
        let path = "/proc/sys/net/netfilter/nf_conntrack_count";
        let count = self.gateway.enter(|| Ok(fs::read_to_string(path)?))?;
        Ok(count.trim().parse()?)
    }
}

/// All gateways side by side, so that no setup interrupts a round.
pub struct Lab {
    bpf: Ebpf,
    frames: Array<MapData, [u32; 16]>,
    sunk: PerCpuArray<MapData, u64>,
    thread: u32,
    /// How much of the time of all runs belonged to the softirq thread.
    in_thread: Duration,
    in_all: Duration,
    // Dropped before their namespaces.
    watchers: [Watcher; 2],
    _limits: Limits,
    lanes: Vec<Gateway>,
    source: Namespace,
}

/// A running twheel on a gateway.
struct Watcher {
    lane: usize,
    reader: Reader,
    counters: Map,
    twheel: Twheel,
}

impl Watcher {
    /// With this hook, and a table for this many flows.
    fn start(lanes: &[Gateway], lane: usize, hook: &str, flows: u32) -> Result<Self> {
        let gateway = &lanes[lane].gateway;
        let max_flows = flows.max(SMALLEST_TABLE).to_string();
        let mut args = vec![
            "--iface",
            INTERFACES[0],
            "--hook",
            hook,
            "--max-flows",
            &max_flows,
        ];
        if lane == TWHEEL {
            args.extend(["--mode", "native"]);
        }
        let twheel = Twheel::start(gateway, &args)?;
        if lane == TWHEEL {
            let attached = gateway.attached(INTERFACES[0])?;
            ensure!(attached == ["xdp", "egress"], "attached: {attached:?}");
        }
        let reader = gateway.enter(|| Reader::open(Some(INTERFACES[0])))?;
        Ok(Self {
            lane,
            counters: Map::PerCpuArray(reader.pins().map("COUNTERS")?),
            reader,
            twheel,
        })
    }

    fn count(&self, counter: Counter) -> Result<u64> {
        Ok(data_plane::counters(&self.counters)?.get(counter))
    }
}

impl Lab {
    /// With tables for this many flows.
    pub fn new(flows: u32, buckets: Buckets) -> Result<Self> {
        let source = namespace("source")?;
        let lanes = LANES
            .iter()
            .map(|name| Gateway::new(&source, name))
            .collect::<Result<Vec<_>>>()?;
        let conntrack = &lanes[CONNTRACK].gateway;
        // Makes conntrack register its hooks. No forwarded packet reaches the rule, so none pays
        // for it.
        conntrack.nft(
            "table ip bench { chain in { type filter hook input priority 0; ct state invalid drop; }; }",
        )?;
        sysctl(conntrack, "netfilter/nf_conntrack_checksum", "0")?;
        sysctl(conntrack, "netfilter/nf_conntrack_tcp_loose", "1")?;
        let limits = Limits::raise(flows, buckets)?;
        let watchers = [
            Watcher::start(&lanes, TWHEEL, "xdp", flows)?,
            Watcher::start(&lanes, TCX, "tcx", flows)?,
        ];
        let object = inputs::object("TWHEEL_PEERS_OBJECT")?;
        let mut bpf = Ebpf::load(&object).context("cannot load the peers")?;
        for name in ["peer_source", "peer_pass"] {
            let program: &mut Xdp = program(&mut bpf, name)?.try_into()?;
            program
                .load()
                .with_context(|| format!("cannot load {name}"))?;
        }
        let pass: &mut Xdp = program(&mut bpf, "peer_pass")?.try_into()?;
        lanes[PASS]
            .gateway
            .enter(|| Ok(pass.attach(INTERFACES[0], XdpMode::Driver)?))?;
        let sink: &mut SchedClassifier = program(&mut bpf, "peer_sink")?.try_into()?;
        sink.load().context("cannot load the sink")?;
        for lane in &lanes {
            for interface in INTERFACES {
                lane.gateway.enter(|| {
                    let order = TcAttachOptions::TcxOrder(LinkOrder::last());
                    Ok(sink.attach_with_options(interface, TcAttachType::Egress, order)?)
                })?;
            }
        }
        let mut map = |name: &str| {
            let map = bpf.take_map(name);
            map.with_context(|| format!("the object has no map {name}"))
        };
        Ok(Self {
            frames: map("FRAMES")?.try_into()?,
            sunk: map("SUNK")?.try_into()?,
            bpf,
            thread: softirq_thread()?,
            in_thread: Duration::ZERO,
            in_all: Duration::ZERO,
            watchers,
            _limits: limits,
            lanes,
            source,
        })
    }

    /// Sends frames of these flows through a gateway. Returns nanoseconds per frame.
    pub fn run(&mut self, lane: usize, packet: Packet, flows: Flows) -> Result<f64> {
        let frames = match flows.from {
            None => 1 << flows.bits,
            Some(_) => FRAMES.max(1 << flows.bits),
        };
        let segment = packet.bytes();
        let back = packet.is_back();
        let mut entry = [0; 16];
        entry[0] = self.lanes[lane].ends[usize::from(back)];
        entry[1] = flows.from.unwrap_or(0);
        entry[2] = flows.first;
        entry[3] = flows.from.map_or(0, |_| flows.bits);
        entry[4] = back.into();
        entry[5] = sum(&segment[14..34]);
        // And the pseudo header: addresses, protocol, length.
        entry[6] = sum(&segment[34..]) + sum(&segment[26..34]) + sum(&[0, 6, 0, 20]);
        self.frames.set(0, entry, 0)?;
        let sunk = |it: &Self| anyhow::Ok(it.sunk.get(&0, 0)?.iter().sum::<u64>());
        let (before, touched) = (sunk(self)?, self.touched()?);
        let thread = cpu_time(self.thread)?;
        let source: &mut Xdp = program(&mut self.bpf, "peer_source")?.try_into()?;
        let in_kernel = self.source.enter(|| {
            pin_to(CPU)?;
            let result = source.test_run(TestRunOptions {
                data_in: Some(&segment),
                repeat: frames,
                attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
                ..TestRunOptions::new()
            });
            Ok(result.context("cannot make live frames")?.duration * frames)
        })?;
        let in_thread = cpu_time(self.thread)? - thread;
        let came = sunk(self)? - before;
        ensure!(
            came == u64::from(frames),
            "{}: of {frames} frames {came} have come",
            LANES[lane]
        );
        // One packet in 100,000 may have found no free record.
        for ((watcher, now), before) in self.watchers.iter().zip(self.touched()?).zip(touched) {
            let wanted = match packet {
                Packet::SynAck | Packet::Ack | Packet::BackAck if lane == watcher.lane => {
                    u64::from(frames)
                }
                _ => 0,
            };
            let touched = now - before;
            ensure!(
                touched.abs_diff(wanted) <= wanted / 100_000,
                "{}: {} has touched {touched} flows, not {wanted}",
                LANES[lane],
                LANES[watcher.lane]
            );
        }
        self.in_thread += in_thread;
        self.in_all += in_kernel + in_thread;
        Ok((in_kernel + in_thread).as_nanos() as f64 / f64::from(frames))
    }

    /// Finishes the measurement.
    pub fn end(self, report: &mut Report) -> Result<()> {
        let share = self.in_thread.as_secs_f64() / self.in_all.as_secs_f64();
        report.say(&format!(
            "With room for {} flows, {:.2} % of the time was ksoftirqd's.",
            self.watchers[0].reader.meta().max_flows,
            share * 100.0
        ));
        ensure!(share <= MAX_THREAD, "this machine is too busy for this");
        for watcher in self.watchers {
            ensure!(watcher.count(Counter::EventsLost)? == 0, "events were lost");
            let ended = watcher.twheel.stop()?;
            ensure!(ended.code() == Some(0), "{}", ended.stderr);
        }
        Ok(())
    }

    fn touched(&self) -> Result<[u64; 2]> {
        let [xdp, tcx] = self
            .watchers
            .each_ref()
            .map(|it| it.count(Counter::Touched));
        Ok([xdp?, tcx?])
    }

    /// Checks that both trackers have exactly this many flows, and that the other gateways have
    /// none.
    pub fn check(&self, flows: u32) -> Result<()> {
        let entries = self.lanes[CONNTRACK].entries()?;
        ensure!(
            entries == u64::from(flows),
            "conntrack has {entries} flows of {flows}"
        );
        for Watcher { lane, reader, .. } in &self.watchers {
            let tracked = reader.table().iter().count() as u32;
            ensure!(
                tracked.abs_diff(flows) <= flows / 100_000,
                "{} has {tracked} flows of {flows}",
                LANES[*lane]
            );
        }
        for lane in [BASE, PASS, TWHEEL, TCX] {
            ensure!(
                self.lanes[lane].entries()? == 0,
                "conntrack watches {}",
                LANES[lane]
            );
        }
        Ok(())
    }

    /// Empties both tables.
    pub fn flush(&self) -> Result<()> {
        let mut command = self.lanes[CONNTRACK]
            .gateway
            .command(netns::tool("conntrack")?)?;
        command.arg("-F");
        let ended = once(command)?;
        ensure!(ended.code() == Some(0), "conntrack -F: {}", ended.stderr);
        for Watcher { reader, twheel, .. } in &self.watchers {
            while reader.table().iter().next().is_some() {
                delete_all(reader, |_, _| true, Reason::Flushed, None)?;
            }
            // Until all events have been printed.
            while twheel.line(Duration::from_millis(300))?.is_some() {}
        }
        self.check(0)
    }
}

/// The sum of 16-bit words in memory order.
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks_exact(2);
    words
        .map(|word| u32::from(u16::from_ne_bytes([word[0], word[1]])))
        .sum()
}

/// A program of an object.
pub fn program<'a>(bpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Program> {
    let program = bpf.program_mut(name);
    program.with_context(|| format!("the object has no program {name}"))
}

/// The thread that takes over the softirqs of [`CPU`] if there are too many.
pub fn softirq_thread() -> Result<u32> {
    let name = format!("ksoftirqd/{CPU}\n");
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        if fs::read_to_string(path.join("comm")).is_ok_and(|it| it == name) {
            let id = path.file_name().and_then(|name| name.to_str());
            return Ok(id.context("no number")?.parse()?);
        }
    }
    bail!("there is no {}", name.trim());
}

/// CPU time of a thread.
pub fn cpu_time(thread: u32) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat"))?;
    let nanoseconds = text
        .split_ascii_whitespace()
        .next()
        .context("no schedstat")?;
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}
