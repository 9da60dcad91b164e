//! Where the sockets and entries of a flow are looked for.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use twheel_common::{event::Event, state::is_elsewhere};

use super::{scope::Scope, worker::Worker};
use crate::sockets::{FoundSocket, Protocol};

impl Worker {
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
                let only = self.pins.interfaces()?.into_iter().next();
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
