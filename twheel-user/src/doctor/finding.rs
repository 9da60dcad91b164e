//! What a check finds, and the run that it is about.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use serde::Serialize;
use twheel_common::{config::Config, rule::Rule};

use crate::{clock::Clock, hooks::Hooks, stepping::Stepping};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing to do.
    Ok,
    /// `twheel run` works, but could work better; or this user cannot check it.
    Warn,
    /// `twheel run` will fail.
    Fail,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was checked.
    #[serde(rename = "check")]
    pub name: &'static str,
    /// The interface, if the check is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// How it went.
    pub status: Status,
    /// What was found.
    pub what: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// For the programs: how many instructions the verifier processed, by program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<BTreeMap<String, u32>>,
    /// For the programs: how long loading took, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_us: Option<u64>,
}

/// What `twheel run` would do.
pub struct Intended {
    /// The interfaces. If there are none, all interfaces of this network namespace except loopback
    /// are checked, and the programs are loaded as for one interface.
    pub interfaces: Vec<String>,
    /// Whether it would wait for interfaces that do not exist.
    pub waits: bool,
    /// How it would choose hooks.
    pub hooks: Hooks,
    /// Its configuration, and the timeouts of flows that match no rule.
    pub config: (Config, Rule),
    /// Its clock.
    pub clock: Clock,
    /// How it would step wheels, if the user chose that.
    pub stepping: Option<Stepping>,
    /// Its policy.
    pub policy: Option<PathBuf>,
    /// aya-log's level.
    pub log_level: u8,
    /// Where it would serve its metrics.
    pub metrics: Option<SocketAddr>,
    /// The group to which it would give access.
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
            load_us: None,
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

/// A twheel command line for these interfaces.
pub(super) fn with_interfaces(command: &str, interfaces: &[String]) -> String {
    let options = interfaces.iter().map(|name| format!(" --iface {name}"));
    format!("`twheel {command}{}`", options.collect::<String>())
}
