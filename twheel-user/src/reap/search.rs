//! Where the sockets and entries of a flow are looked for, and which cgroup a socket is in.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use twheel_common::{event::Event, state::is_elsewhere};

use super::{
    scope::Scope,
    worker::{Job, Worker},
};
use crate::{
    owner::{Cgroups, is_at},
    policy::cgroups::CgroupSet,
    sockets::{FoundSocket, Protocol},
    watched,
};

/// The cgroups that a rule's actions are limited to, for the present flow.
pub(super) struct Limit {
    /// Which set of the policy it is.
    set: CgroupSet,
    paths: Vec<String>,
    /// Whether a local socket of the flow is in one of them.
    is_met: bool,
}

impl Worker {
    /// Whether the rule's actions may be taken on the flow as far as its cgroup goes. It is found
    /// out before the first action, since the socket may be gone after it.
    pub(super) fn is_in_cgroup(&mut self, job: &Job) -> Result<bool> {
        let Some(set) = self.asked.cgroups(job.event.rule.into())? else {
            self.limit = None;
            return Ok(true);
        };
        if let Some(limit) = &self.limit
            && limit.set == set
        {
            return Ok(limit.is_met);
        }
        let paths = self.asked.paths(set)?;
        let mut limit = Limit {
            set,
            paths,
            is_met: false,
        };
        if let Some(protocol) = Protocol::of_flow(job.event.key.proto()) {
            let initiator = job.event.seen().initiator();
            let src = job.event.key.sender(initiator);
            let dst = job.event.key.sender(initiator.reverse());
            for at in 0..self.mandate.sites.0.len() {
                for ends in [(dst, src), (src, dst)] {
                    if let Some(socket) = self.find(at, protocol, ends)? {
                        limit.is_met |= self.is_within(&socket, &limit.paths)?;
                    }
                }
            }
        }
        let is_met = limit.is_met;
        self.limit = Some(limit);
        Ok(is_met)
    }

    /// Whether a socket may be closed as far as its cgroup goes.
    pub(super) fn may_close(&mut self, socket: &FoundSocket) -> Result<bool> {
        let Some(limit) = self.limit.take() else {
            return Ok(true);
        };
        let is_within = self.is_within(socket, &limit.paths);
        self.limit = Some(limit);
        is_within
    }

    /// Whether a socket is in one of these cgroups, or below one.
    fn is_within(&mut self, socket: &FoundSocket, paths: &[String]) -> Result<bool> {
        let Some(number) = socket.holder.cgroup else {
            return Ok(false);
        };
        let cgroups = match &mut self.cgroups {
            Some(cgroups) => cgroups,
            None => self.cgroups.insert(Cgroups::open()?),
        };
        if let Some(known) = cgroups.known(number) {
            return Ok(paths.iter().any(|path| is_at(known, path)));
        }
        for path in paths {
            if cgroups.find(number, path)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a flow's packets are counted in another network namespace.
    pub(super) fn is_elsewhere(&self, event: &Event) -> Result<bool> {
        let interface = self.names.interface(event.point.interface())?;
        Ok(is_elsewhere(interface))
    }

    /// Whether a flow with the same endpoints lives in another zone or VLAN.
    pub(super) fn has_namesake(&mut self, event: &Event) -> Result<bool> {
        let (reader, names) = (&self.reader, &self.names);
        self.namesakes.lives(reader, names, &event.key)
    }

    /// Whether a socket with a flow's endpoints, found in this network namespace, may be that of a
    /// connection in another zone or VLAN.
    pub(super) fn is_of_others(&mut self, event: &Event, at: usize, local: IpAddr) -> Result<bool> {
        if self.has_namesake(event)? {
            return Ok(true);
        }
        // The interfaces are those of the first namespace. For a flow in a VLAN or zone, the scope
        // has compared them already.
        Ok(at == 0 && !self.scope.is_apart() && self.namesakes.is_in_zone(local)?)
    }

    /// Where to look for a flow's sockets and entries.
    pub(super) fn scope_of(&self, event: &Event) -> Result<Scope> {
        if event.key.zone() == 0 && event.key.packed_vlans() == 0 {
            return Ok(Scope::default());
        }
        let zone = self.names.zone(event.key.zone())?;
        let interface = match event.point.interface() {
            0 => {
                let only = watched::only(&self.pins)?;
                only.and_then(|name| if_nametoindex(name.as_str()).ok())
            }
            place => {
                let interface = self.names.interface(place)?;
                (interface != 0).then_some(interface)
            }
        };
        Scope::of_flow(event.key.vlans(), zone, interface)
    }

    /// The socket with these endpoints, its own and its peer's, in a network namespace.
    pub(super) fn find(
        &mut self,
        at: usize,
        protocol: Protocol,
        (local, peer): (SocketAddr, SocketAddr),
    ) -> Result<Option<FoundSocket>> {
        // The scope's interfaces are those of the first namespace.
        if at > 0 && self.scope.is_apart() {
            return Ok(None);
        }
        for bound in self.scope.bound(local.ip())? {
            let sockets = self.mandate.sites.0[at].sockets()?;
            let found = sockets.find(protocol, (local, peer), bound);
            let found = found.context("cannot look for the socket")?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
}
