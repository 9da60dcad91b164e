//! The options of a run.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use nix::{net::if_::if_nametoindex, unistd::Gid};
use twheel_common::{config::Config, rule::Rule, state::Way};

use crate::{
    clock::Clock,
    data_plane::DataPlane,
    history,
    hooks::Hooks,
    interfaces::{LinkLayer, link_layer},
    model::EventKind,
    netns::NamespaceSelection,
    offload::{self, Offloads},
    patterns::{self, Selection},
    pins::Pins,
    stepping::Stepping,
    zones::Zone,
};

/// The options of a run.
pub struct Setup {
    /// The interfaces.
    pub selection: Selection,
    /// The network namespaces in which they are.
    pub namespaces: NamespaceSelection,
    /// The hooks to attach to.
    pub hooks: Hooks,
    /// The data plane's configuration, and the timeouts of flows that match no rule.
    pub config: (Config, Rule),
    /// The data plane's clock.
    pub clock: Clock,
    /// Wait for interfaces that do not exist.
    pub wait: bool,
    /// The zones of interfaces.
    pub zones: Vec<Zone>,
    /// A policy file.
    pub policy: Option<PathBuf>,
    /// What one source may hold of a full table, in percent; `None`: no quota.
    pub quota: Option<u8>,
    /// Where the history is kept; `None`: no history.
    pub history: Option<PathBuf>,
    /// The history's maximum size, in bytes.
    pub history_bytes: u64,
    /// Print objects, not lines for people.
    pub json: bool,
    /// The kinds of events that are printed.
    pub events: Vec<EventKind>,
    /// The owners of sockets are looked up.
    pub owner: bool,
    /// Translations are looked up in conntrack.
    pub nat: bool,
    /// Flows that are in the table when the run ends are reported.
    pub final_records: bool,
    /// The address where metrics and the page are served.
    pub metrics: Option<SocketAddr>,
    /// Everything stays attached and pinned at the end.
    pub keep: bool,
    /// The group that may list and delete flows, and change the policy.
    pub group: Option<String>,
    /// Where programs are awaited that hand over timeouts; `None`: nowhere.
    pub offload: Option<PathBuf>,
    /// Most registrations of a user; `None`: half of what the table holds.
    pub offload_limit: Option<u32>,
    /// Most registrations of a program; `None`: as many as its user.
    pub offload_program_limit: Option<u32>,
    /// The log level of the programs.
    pub log_level: log::LevelFilter,
    /// How the stepper program is run, if the user chose it.
    pub stepping: Option<Stepping>,
}

impl Setup {
    /// Whether there are actions for expired flows that match no rule.
    pub(super) fn reaps(&self) -> bool {
        self.config.1.actions != 0
    }

    /// The capacity for interfaces; 0: there is a single one, and the programs need to know nothing
    /// of it.
    pub(super) fn room(&self) -> Result<u32> {
        if self.selection.has_pattern() {
            return Ok((self.selection.names().count() + patterns::ROOM) as u32);
        }
        let interfaces = self.selection.texts();
        let is_plain = match &interfaces[..] {
            // An interface that is waited for may be of any kind.
            [_] if self.wait || !self.zones.is_empty() => false,
            // One-armed: outgoing packets come in by the same interface.
            [_] if self.config.0.one_armed != 0 => false,
            [only] if if_nametoindex(only.as_str()).ok() == Some(Way::LOOPBACK.0) => false,
            [only] => link_layer(only)? == LinkLayer::Ethernet,
            _ => false,
        };
        match is_plain {
            true => Ok(0),
            false => Ok(interfaces.len() as u32),
        }
    }

    /// Makes the history's directory, unless there is to be no history. If the disk has no space
    /// for it, the run continues without one: flows are watched anyway.
    pub(super) fn history_directory(
        &self,
        pins: &Pins,
        group: Option<Gid>,
    ) -> Option<history::Directory> {
        history::Directory::make(self.history.as_deref()?, pins)
            .and_then(|directory| directory.permit(group).map(|()| directory))
            .inspect_err(|error| say!("twheel: keeping no history: {error:#}"))
            .ok()
    }

    /// Listens for programs that hand over timeouts, if that is asked for.
    pub(super) fn listen_for_programs(
        &self,
        group: Option<Gid>,
    ) -> Result<Option<offload::Listener>> {
        let path = self.offload.as_deref();
        path.map(|path| offload::Listener::bind(path, group))
            .transpose()
    }

    /// Serves them.
    pub(super) fn offload(
        &self,
        listener: Option<offload::Listener>,
        plane: &DataPlane,
        pins: &Pins,
    ) -> Result<Option<Offloads>> {
        let Some(listener) = listener else {
            return Ok(None);
        };
        say!("timeouts of programs: {}", listener.path().display());
        let plane = offload::Plane {
            config: *plane.config(),
            clock: plane.clock(),
            limit: self.offload_limit,
            program_limit: self.offload_program_limit,
        };
        Offloads::start(listener, pins, &plane).map(Some)
    }
}
