//! A real `twheel run` on its own interface, where only the packets of a benchmark come in.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::{self, File},
    io::Write,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::PathBuf,
    thread,
};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map},
    programs::{TestRun, TestRunOptions, Xdp},
};
use twheel::{
    data_plane,
    pins::{Instance, Pins},
    stepper::pin_to,
};
use twheel_common::counter::Counters;
use twheel_tests::{
    netns::Namespace,
    plane::{ACK, PASS, frame},
};

/// The watched interface.
pub const WATCHED: &str = "watched";
/// The other end of its veth pair.
const WIRE: &str = "wire";
/// How many CPUs flows begin on.
pub const CPUS: u32 = 2;
/// The offset of the source address in a frame.
const SOURCE: usize = 26;
/// The source address of flow 0.
const FIRST: u32 = 0x0a00_0000;

/// A network namespace with both ends of a veth pair.
pub struct Lab {
    namespace: Namespace,
}

impl Lab {
    /// Makes it, with a queue for each CPU, and without IPv6, so that the kernel itself sends
    /// nothing.
    pub fn new() -> Result<Self> {
        let namespace = Namespace::new("real")?;
        namespace.enter(|| {
            fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").context("no sysctl")
        })?;
        let queues = format!("numtxqueues {CPUS} numrxqueues {CPUS}");
        namespace.ip(&format!(
            "link add {WIRE} {queues} type veth peer name {WATCHED} {queues}"
        ))?;
        namespace.ip(&format!("link set {WIRE} up"))?;
        namespace.ip(&format!("link set {WATCHED} up"))?;
        Ok(Self { namespace })
    }

    /// The namespace to run commands in.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// What the running twheel has pinned.
    pub fn pins(&self) -> Result<Pins> {
        self.namespace.enter(|| Instance::with(WATCHED))
    }

    /// Opens a sender of frames to the watched interface.
    pub fn sender(&self) -> Result<Sender> {
        self.namespace.enter(Sender::open)
    }
}

/// A frame of a flow, whose number is below 2^24: TCP over IPv4 with only an ACK, from 10.0.0.0 +
/// `flow`.
pub fn segment(flow: u32) -> Vec<u8> {
    let mut segment = frame(0, false, ACK);
    address(&mut segment, flow);
    segment
}

/// Changes the flow of a segment.
fn address(segment: &mut [u8], flow: u32) {
    segment[SOURCE..SOURCE + 4].copy_from_slice(&(FIRST + flow).to_be_bytes());
}

/// The flow with this source address.
pub fn flow_of(source: std::net::IpAddr) -> Option<u32> {
    match source {
        std::net::IpAddr::V4(source) => u32::from(source).checked_sub(FIRST),
        std::net::IpAddr::V6(_) => None,
    }
}

/// A packet socket. What it sends goes through XDP at the other end of the veth pair, in a softirq
/// on the sender's CPU, before the call returns.
pub struct Sender(File);

impl Sender {
    fn open() -> Result<Self> {
        let name = CString::new(WIRE)?;
        // SAFETY: plain calls with local buffers; nothing else owns the descriptor.
        let fd = unsafe {
            let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            ensure!(fd >= 0, "no packet socket");
            let fd = OwnedFd::from_raw_fd(fd);
            let one = 1i32;
            // Bypasses the queueing discipline: straight to the queue of this CPU.
            let set = libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_QDISC_BYPASS,
                (&raw const one).cast(),
                size_of::<i32>() as libc::socklen_t,
            );
            ensure!(set == 0, "cannot pass the queueing discipline by");
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
            let bound = libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            );
            ensure!(bound == 0, "cannot bind to {WIRE}");
            fd
        };
        Ok(Self(fd.into()))
    }

    /// Sends a frame. If there is no room for it, it is lost, as on any wire.
    pub fn send(&mut self, frame: &[u8]) -> Result<()> {
        match self.0.write(frame) {
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
            result => result.map(drop).context("cannot send a frame"),
        }
    }
}

/// Begins flows with the running twheel: runs its pinned program on a packet of each, from a thread
/// on each CPU.
pub fn begin(pins: &Pins, flows: std::ops::Range<u32>) -> Result<()> {
    let share = flows.len().div_ceil(CPUS as usize);
    let all: Vec<u32> = flows.collect();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(all.chunks(share))
            .map(|(cpu, flows)| {
                let program = pins.xdp("twheel_xdp");
                scope.spawn(move || {
                    pin_to(cpu)?;
                    see(&program?, flows)
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

fn see(program: &Xdp, flows: &[u32]) -> Result<()> {
    let mut segment = segment(0);
    for flow in flows {
        address(&mut segment, *flow);
        let result = program
            .test_run(TestRunOptions {
                data_in: Some(&segment),
                ..TestRunOptions::new()
            })
            .context("cannot begin a flow")?;
        ensure!(result.return_value == PASS, "a packet does not pass");
    }
    Ok(())
}

/// Begins a flow with the running twheel and answers it, so that it is established.
pub fn establish(pins: &Pins) -> Result<()> {
    let program = pins.xdp("twheel_xdp")?;
    for back in [false, true, false] {
        program
            .test_run(TestRunOptions {
                data_in: Some(&frame(0, back, ACK)),
                ..TestRunOptions::new()
            })
            .context("cannot begin a flow")?;
    }
    Ok(())
}

/// The counters of the running twheel.
pub fn counters(pins: &Pins) -> Result<Counters> {
    data_plane::counters(&Map::PerCpuArray(pins.map("COUNTERS")?))
}

/// How many flows are in its table.
pub fn tracked(pins: &Pins) -> Result<u64> {
    let tracked = Array::<_, u64>::try_from(Map::Array(pins.map("TRACKED")?))?;
    tracked.get(&0, 0).context("cannot read TRACKED")
}

/// Memory of a process in bytes: a field of its `status`.
pub fn memory(pid: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = value.and_then(|value| value.trim().strip_suffix(" kB"));
    let kib: u64 = kib.with_context(|| format!("no {field}"))?.parse()?;
    Ok(kib << 10)
}

/// What the kernel charges for the maps that a process has open, in bytes.
pub fn memlock(pid: u32) -> Result<u64> {
    let mut maps = HashMap::new();
    for info in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let info = fs::read_to_string(info?.path())?;
        let field = |name| {
            let value = info.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse::<u64>().ok())
        };
        if let Some((id, bytes)) = field("map_id:").zip(field("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    ensure!(!maps.is_empty(), "no maps");
    Ok(maps.values().sum())
}

/// How many descriptors a process has open, and how many threads it has.
pub fn handles(pid: u32) -> Result<[usize; 2]> {
    let count = |what| fs::read_dir(format!("/proc/{pid}/{what}")).map(Iterator::count);
    Ok([count("fd")?, count("task")?])
}

/// A directory for a history, removed when this is dropped.
pub struct History(PathBuf);

impl History {
    /// With a name that no other benchmark uses.
    pub fn new(bench: &str) -> Self {
        let name = format!("twheel-{}-{bench}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// Its path.
    pub fn path(&self) -> &str {
        self.0.to_str().expect("a name of our own")
    }
}

impl Drop for History {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
