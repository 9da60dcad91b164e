//! What a run was told to do.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use nix::{net::if_::if_nametoindex, unistd::Gid};
use twheel_common::{config::Config, rule::Rule, state::Way};

use crate::{
    clock::Clock,
    history,
    hooks::Hooks,
    interfaces::{LinkLayer, link_layer},
    netns::NamespaceSelection,
    patterns::{self, Selection},
    pins::Pins,
    stepping::Stepping,
    zones::Zone,
};

/// What a run was told.
pub struct Setup {
    /// The interfaces.
    pub selection: Selection,
    /// The network namespaces in which they are.
    pub namespaces: NamespaceSelection,
    /// By what packets are seen.
    pub hooks: Hooks,
    /// The data plane's configuration, with the timeouts of flows of no rule.
    pub config: (Config, Rule),
    /// Its clock.
    pub clock: Clock,
    /// Interfaces that are not there are waited for.
    pub wait: bool,
    /// The zones of interfaces.
    pub zones: Vec<Zone>,
    /// A policy file.
    pub policy: Option<PathBuf>,
    /// What one source may hold of a full table, percent; `None`: all of it.
    pub quota: Option<u8>,
    /// Where the history is kept, if it is.
    pub history: Option<PathBuf>,
    /// Room for it, bytes.
    pub history_bytes: u64,
    /// Objects are printed, not lines for people.
    pub json: bool,
    /// Where numbers and the page are served.
    pub metrics: Option<SocketAddr>,
    /// Everything stays attached and pinned at the end.
    pub keep: bool,
    /// The group that may look, delete and change the policy.
    pub group: Option<String>,
    /// What the programs say.
    pub log_level: log::LevelFilter,
    /// How wheels are stepped, where that was asked for.
    pub stepping: Option<Stepping>,
}

impl Setup {
    /// Whether anything is done to expired flows that meet no rule.
    pub(super) fn reaps(&self) -> bool {
        self.config.1.actions != 0
    }

    /// Interfaces for which there is to be room; 0: there is one, of which programs need not be told anything.
    pub(super) fn room(&self) -> Result<u32> {
        if self.selection.has_pattern() {
            return Ok((self.selection.names().count() + patterns::ROOM) as u32);
        }
        let interfaces = self.selection.texts();
        let is_plain = match &interfaces[..] {
            // One that is waited for may be of any kind.
            [_] if self.wait || !self.zones.is_empty() => false,
            // What goes out comes in by the same one.
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

    /// Where the history is written, unless that is off. A disk that has no room for one is no reason to leave flows
    /// unwatched.
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
}
