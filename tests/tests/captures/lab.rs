//! Captures replayed to a running twheel.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::Map;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::{data_plane, delete::delete_all, inspect::Reader};
use twheel_common::{counter::Counter, event::Reason, policy::TimeoutName};
use twheel_tests::{
    netns::{Namespace, tool},
    pair::{CLIENT, SERVER},
    running::Twheel,
};

use crate::flows::{Key, Packets, add};

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two namespaces joined by a cable, whose hosts send nothing by themselves; twheel runs at one
/// end.
pub struct Lab {
    twheel: Twheel,
    reader: Reader,
    counters: Map,
    /// Flows that twheel has reported.
    reported: u64,
    sender: Namespace,
    receiver: Namespace,
}

/// The result of replaying a file.
pub struct Replayed {
    pub flows: Packets,
    pub sent: u64,
}

impl Lab {
    pub fn start() -> Result<Self> {
        let sender = Namespace::new("sender")?;
        let receiver = Namespace::new("receiver")?;
        for namespace in [&sender, &receiver] {
            namespace.enter(|| {
                ["all", "default"].iter().try_for_each(|of| {
                    let path = format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6");
                    fs::write(&path, "1").with_context(|| format!("cannot set {path}"))
                })
            })?;
        }
        // For jumbo frames, and for frames that segmentation offload leaves unsegmented.
        sender.ip(&format!(
            "link add {CLIENT} mtu 65535 type veth peer name {SERVER} mtu 65535 netns {}",
            receiver.name()
        ))?;
        sender.ip(&format!("link set {CLIENT} up"))?;
        receiver.ip(&format!("link set {SERVER} up"))?;
        // No flow expires by itself, and both directions are seen, though only by one hook.
        let twheel = Twheel::start(
            &receiver,
            &[
                "--iface",
                SERVER,
                "--mode",
                "native",
                "--egress",
                "on",
                "--proto",
                "tcp,udp,icmp",
                "--accounting",
                "--json",
                "--timeout",
                &TimeoutName::NAMES
                    .map(|name| format!("{name}=1h"))
                    .join(","),
            ],
        )?;
        let reader = receiver.enter(|| Reader::open(Some(SERVER)))?;
        let counters = Map::PerCpuArray(reader.pins().map("COUNTERS")?);
        Ok(Self {
            twheel,
            reader,
            counters,
            reported: 0,
            sender,
            receiver,
        })
    }

    pub fn end(self) -> Result<()> {
        let ended = self.twheel.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        self.receiver.check_clean(SERVER)
    }

    /// Packets that the data plane has finished with.
    fn seen(&self) -> Result<u64> {
        let counters = data_plane::counters(&self.counters)?;
        let verdicts = Counter::VERDICTS.into_iter();
        Ok(verdicts.map(|counter| counters.get(counter)).sum())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.twheel.pid() as i32), signal).context("cannot signal twheel")
    }

    /// Replays a file, and then takes all flows that it has begun out of the table. `None`:
    /// tcpreplay refuses the file.
    pub fn replay(&mut self, file: &Path) -> Result<Option<Replayed>> {
        let before = self.seen()?;
        // A flow that was reset or refused ends at the next tick, whatever the timeouts. Stopping
        // twheel keeps it until the file has ended. (The packet path works without the process.)
        self.signal(Signal::SIGSTOP)?;
        let sent = self.send(file);
        let end = Instant::now() + PATIENCE;
        let settled = sent.and_then(|sent| {
            let Some(sent) = sent else {
                // Nobody tells how many packets were sent.
                thread::sleep(Duration::from_millis(100));
                return Ok(None);
            };
            loop {
                let seen = self.seen()? - before;
                if seen == sent {
                    return Ok(Some(sent));
                }
                ensure!(
                    seen < sent && Instant::now() < end,
                    "{sent} packets were sent, {seen} seen"
                );
                thread::sleep(Duration::from_millis(1));
            }
        });
        self.signal(Signal::SIGCONT)?;
        let sent = settled?;
        self.delete_all()?;
        let counters = data_plane::counters(&self.counters)?;
        for counter in [
            Counter::EventsLost,
            Counter::Evicted,
            Counter::TableFull,
            Counter::WindowFull,
            Counter::Raced,
        ] {
            let count = counters.get(counter);
            ensure!(count == 0, "{}: {count}", counter.name());
        }
        let ended = counters.get(Counter::Created) + counters.get(Counter::Superseded);
        let mut flows = Packets::new();
        while self.reported < ended {
            let line = self
                .twheel
                .line(PATIENCE)?
                .context("a flow is not reported")?;
            self.reported += 1;
            report(&line.text, &mut flows).with_context(|| line.text.clone())?;
        }
        Ok(sent.map(|sent| Replayed { flows, sent }))
    }

    /// Sends a file and returns how many packets were sent, or `None` if tcpreplay refuses the
    /// file. Runs on one CPU, so that the packets arrive in order.
    pub fn send(&self, file: &Path) -> Result<Option<u64>> {
        let output = self
            .sender
            .command("taskset")?
            .args(["-c", "0"])
            .arg(tool("tcpreplay")?)
            .args(["--topspeed", "-q", "-i", CLIENT])
            .arg(file)
            .stdin(Stdio::null())
            .output()
            .context("cannot run `taskset`")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("Invalid packet length") {
            return Ok(None);
        }
        ensure!(output.status.success(), "tcpreplay: {}", stderr.trim());
        // tcpreplay prints no number if it sent nothing.
        let sent = String::from_utf8_lossy(&output.stdout)
            .lines()
            .find_map(|line| {
                line.trim()
                    .strip_prefix("Successful packets:")?
                    .trim()
                    .parse()
                    .ok()
            });
        Ok(Some(sent.unwrap_or(0)))
    }

    /// Deletes all flows.
    fn delete_all(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.reader.table().iter().next().is_some() {
            ensure!(Instant::now() < end, "deleted flows stay in the table");
            delete_all(&self.reader, |_, _| true, Reason::Deleted, None)?;
        }
        Ok(())
    }
}

/// Adds the flow of a line of `twheel run --json --accounting`.
fn report(line: &str, to: &mut Packets) -> Result<()> {
    let value: Value = serde_json::from_str(line)?;
    let end = |ip: &str, port: &str| -> Result<SocketAddr> {
        let ip = value[ip].as_str().context("no address")?.parse()?;
        let port = value[port].as_u64().context("no port")?;
        Ok(SocketAddr::new(ip, u16::try_from(port)?))
    };
    let (src, dst) = (end("src", "sport")?, end("dst", "dport")?);
    let proto = value["proto"].as_str();
    let proto = ["tcp", "udp", "icmp", "icmpv6"]
        .into_iter()
        .find(|name| Some(*name) == proto)
        .context("no protocol")?;
    // The field is missing if there is no VLAN.
    let vlan = |field: &str| value[field].as_u64().unwrap_or(0) as u16;
    let vlans = [vlan("vlan"), vlan("inner_vlan")];
    for ((key, side), field) in [
        (Key::new(proto, src, dst), "orig_packets"),
        (Key::new(proto, dst, src), "reply_packets"),
    ] {
        let packets = value[field].as_i64().context("no count")?;
        add(to, (key.in_vlans(vlans), side), packets);
    }
    Ok(())
}
