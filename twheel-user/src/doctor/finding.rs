//! What a check finds, and what it is asked about.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use serde::Serialize;
use twheel_common::{config::Config, rule::Rule};

use crate::{clock::Clock, hooks::Hooks, stepping::Stepping};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Worse than it could be, or not to be seen from here.
    Warn,
    /// `twheel run` will fail.
    Fail,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    #[serde(rename = "check")]
    pub name: &'static str,
    /// The interface, where it is one's.
    pub interface: Option<String>,
    /// How it went.
    pub status: Status,
    /// What is the case.
    pub what: String,
    /// What to do.
    pub remedy: Option<String>,
    /// Of the programs: instructions that the verifier went through, by program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<BTreeMap<String, u32>>,
    /// Of the programs: milliseconds until they were loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_ms: Option<u64>,
}

/// What `twheel run` would do.
pub struct Intended {
    /// The interfaces; none: of this network namespace all but loopback are looked at, and one is loaded for.
    pub interfaces: Vec<String>,
    /// Whether it would wait for interfaces that do not exist.
    pub waits: bool,
    /// By what it would see packets.
    pub hooks: Hooks,
    /// Its configuration, with what flows of no rule are given.
    pub config: (Config, Rule),
    /// Its clock.
    pub clock: Clock,
    /// How wheels are stepped, where that was asked for.
    pub stepping: Option<Stepping>,
    /// Its policy.
    pub policy: Option<PathBuf>,
    /// aya-log's level.
    pub log_level: u8,
    /// Where it would serve its metrics.
    pub metrics: Option<SocketAddr>,
    /// The group that it would let in.
    pub group: Option<String>,
}

impl Finding {
    pub(super) fn new(name: &'static str, status: Status, what: impl Into<String>) -> Self {
        Self {
            name,
            interface: None,
            status,
            what: what.into(),
            remedy: None,
            instructions: None,
            load_ms: None,
        }
    }

    pub(super) fn ok(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Ok, what)
    }

    pub(super) fn warn(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Warn, what)
    }

    pub(super) fn fail(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Fail, what)
    }

    pub(super) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    pub(super) fn on(mut self, interface: &str) -> Self {
        self.interface = Some(interface.to_owned());
        self
    }
}

/// A command of twheel for these interfaces.
pub(super) fn with_interfaces(command: &str, interfaces: &[String]) -> String {
    let options = interfaces.iter().map(|name| format!(" --iface {name}"));
    format!("`twheel {command}{}`", options.collect::<String>())
}
