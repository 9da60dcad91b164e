//! The kernel's own report of retransmissions: the trace event `tcp:tcp_retransmit_skb`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

const TRACING: &str = "/sys/kernel/tracing";

/// A separate buffer of trace events, removed when this is dropped.
pub struct Trace(PathBuf);

/// A retransmitted segment.
#[derive(Clone, Copy, Debug)]
pub struct Retransmission {
    /// In the time of `CLOCK_MONOTONIC`.
    pub at: Duration,
    /// The sender's port.
    pub sport: u16,
    /// The receiver's port.
    pub dport: u16,
}

impl Trace {
    /// Starts to record the retransmissions of the whole machine.
    pub fn retransmissions() -> Result<Self> {
        if !Path::new(TRACING).join("instances").exists() {
            let mounted = Command::new("mount")
                .args(["-t", "tracefs", "none", TRACING])
                .status()
                .context("cannot run `mount`")?;
            ensure!(mounted.success(), "cannot mount tracefs at {TRACING}");
        }
        let name = format!("twheel-{}", std::process::id());
        let trace = Self(Path::new(TRACING).join("instances").join(name));
        fs::create_dir(&trace.0).with_context(|| format!("cannot create {}", trace.0.display()))?;
        trace.set("trace_clock", "mono")?;
        trace.set("buffer_size_kb", "8192")?;
        trace.set("events/tcp/tcp_retransmit_skb/enable", "1")?;
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    /// All retransmissions recorded so far.
    pub fn read(&self) -> Result<Vec<Retransmission>> {
        let text = fs::read_to_string(self.0.join("trace")).context("cannot read the trace")?;
        let events = text
            .lines()
            .filter(|line| line.contains("tcp_retransmit_skb:"));
        events
            .map(|line| {
                let parse = || {
                    let (head, fields) = line.split_once(": tcp_retransmit_skb: ")?;
                    let seconds: f64 = head.rsplit(' ').next()?.parse().ok()?;
                    let port = |name: &str| {
                        let value = fields.split(name).nth(1)?.split(' ').next()?;
                        value.parse().ok()
                    };
                    Some(Retransmission {
                        at: Duration::try_from_secs_f64(seconds).ok()?,
                        sport: port(" sport=")?,
                        dport: port(" dport=")?,
                    })
                };
                parse().with_context(|| format!("no retransmission: {line}"))
            })
            .collect()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.set("events/tcp/tcp_retransmit_skb/enable", "0");
        let _ = fs::remove_dir(&self.0);
    }
}
