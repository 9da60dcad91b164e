//! Checks what is attached to an interface, and whether twheel has left anything behind.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType};

use crate::{netns::Namespace, tc};

/// How long the kernel may take to detach a program once nothing holds its BPF link.
const RELEASE: Duration = Duration::from_secs(5);

impl Namespace {
    /// The programs that are attached to an interface: `xdp`; `ingress` and `egress` by TCX.
    pub fn attached(&self, interface: &str) -> Result<Vec<&'static str>> {
        let mut attached = Vec::new();
        if self
            .ip(&format!("-d link show dev {interface}"))?
            .contains("xdp")
        {
            attached.push("xdp");
        }
        let query = |way| self.enter(move || Ok(SchedClassifier::query_tcx(interface, way)));
        if query(TcAttachType::Ingress)?.is_ok_and(|(_, programs)| !programs.is_empty()) {
            attached.push("ingress");
        }
        let queried = query(TcAttachType::Egress)?;
        let is_attached = match queried {
            Ok((_, programs)) => !programs.is_empty(),
            // A kernel without TCX.
            Err(_) if tc::has_qdisc(self, interface)? => tc::filters(self, interface)?
                .iter()
                .any(tc::Filter::is_ours),
            Err(_) => false,
        };
        if is_attached {
            attached.push("egress");
        }
        Ok(attached)
    }

    /// Waits until exactly these programs are attached to an interface. If a pin was the last
    /// reference to a BPF link, a kernel worker detaches the program after the pin is removed; on a
    /// busy machine, that may be after the process that removed it has ended.
    pub fn await_attached(&self, interface: &str, wanted: &[&str]) -> Result<()> {
        let end = Instant::now() + RELEASE;
        loop {
            let attached = self.attached(interface)?;
            if attached == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "attached: {attached:?}, not {wanted:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if twheel has left anything in this namespace.
    pub fn check_clean(&self, interface: &str) -> Result<()> {
        let instances = self.instances()?;
        ensure!(instances.is_empty(), "left pinned: {instances:?}");
        self.await_attached(interface, &[]).context("left attached")
    }
}
