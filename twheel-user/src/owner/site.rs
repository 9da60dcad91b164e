//! The sockets of a network namespace.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use anyhow::{Context, Result, anyhow};

use crate::{
    reap::NamespacePath,
    sockets::{Holder, Listed, Protocol, Sockets},
};

/// How many sockets are looked up one by one before all are listed.
const FEW: u32 = 1 << 10;
/// Most sockets that a list holds; others are looked up one by one.
const SOCKETS: usize = 1 << 17;

/// A network namespace, and its sockets.
pub(super) struct Site {
    /// `None`: that of this process.
    namespace: Option<NamespacePath>,
    /// `None`: not opened yet, or in vain.
    sockets: Option<Sockets>,
    has_failed: bool,
    asked: u32,
    list: Option<List>,
}

impl Site {
    pub(super) fn new(namespace: Option<NamespacePath>) -> Self {
        Self {
            namespace,
            sockets: None,
            has_failed: false,
            asked: 0,
            list: None,
        }
    }

    /// Whose the socket with these endpoints is: its own, and its peer's. `lists`: all sockets may
    /// be listed once.
    ///
    /// # Errors
    ///
    /// The namespace cannot be entered (only the first time: after that it has no sockets), or
    /// sock_diag refuses.
    pub(super) fn find(
        &mut self,
        protocol: Protocol,
        (local, peer): (SocketAddr, SocketAddr),
        bound: u32,
        lists: bool,
    ) -> Result<Option<Holder>> {
        if self.has_failed {
            return Ok(None);
        }
        let sockets = match &mut self.sockets {
            Some(sockets) => sockets,
            None => {
                // Until it has succeeded.
                self.has_failed = true;
                let opened = match &self.namespace {
                    Some(namespace) => namespace.inside(Sockets::open)?,
                    None => Sockets::open()?,
                };
                self.has_failed = false;
                self.sockets.insert(opened)
            }
        };
        self.asked = self.asked.saturating_add(1);
        if lists && self.asked > FEW && self.list.is_none() {
            self.list = Some(List::read(sockets)?);
        }
        if let Some(list) = &self.list {
            let found = list.find(protocol, (local, peer), bound);
            if found.is_some() || list.is_whole {
                return Ok(found);
            }
        }
        let found = sockets.find(protocol, (local, peer), bound);
        let found = found.context("cannot look for the socket of a flow")?;
        Ok(found.map(|it| it.holder))
    }
}

#[derive(PartialEq, Eq, Hash)]
struct Ends {
    protocol: Protocol,
    local: SocketAddr,
    peer: Option<SocketAddr>,
    bound: u32,
}

/// All sockets at one moment.
struct List {
    sockets: HashMap<Ends, Holder>,
    is_whole: bool,
}

impl List {
    fn read(sockets: &mut Sockets) -> Result<Self> {
        let mut list = Self {
            sockets: HashMap::new(),
            is_whole: true,
        };
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let read = sockets.each(protocol, |listed| list.add(protocol, listed));
            read.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => anyhow!(
                    "this kernel cannot list the sockets of {protocol:?}: it has no CONFIG_INET_{}",
                    match protocol {
                        Protocol::Tcp => "TCP_DIAG",
                        Protocol::Udp => "UDP_DIAG",
                    }
                ),
                _ => anyhow!(error).context("cannot list the sockets"),
            })?;
        }
        Ok(list)
    }

    /// Of sockets that share their endpoints (`SO_REUSEPORT`), the one with the lowest inode
    /// counts.
    fn add(&mut self, protocol: Protocol, listed: Listed) {
        if self.sockets.len() >= SOCKETS {
            self.is_whole = false;
            return;
        }
        let ends = |local| Ends {
            protocol,
            local,
            peer: listed.peer,
            bound: listed.bound,
        };
        let holder = self
            .sockets
            .entry(ends(listed.local))
            .or_insert(listed.holder);
        if listed.holder.inode < holder.inode {
            *holder = listed.holder;
        }
        if listed.is_dual {
            // Sockets of IPv4 come first in the list, and go first.
            let all = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), listed.local.port());
            self.sockets.entry(ends(all)).or_insert(listed.holder);
        }
    }

    /// As the kernel finds the socket for a datagram (`__udp4_lib_lookup`): a connected one goes
    /// first, and then one with the address.
    fn find(
        &self,
        protocol: Protocol,
        (local, peer): (SocketAddr, SocketAddr),
        bound: u32,
    ) -> Option<Holder> {
        let find = |local, peer| {
            let ends = Ends {
                protocol,
                local,
                peer,
                bound,
            };
            self.sockets.get(&ends).copied()
        };
        let connected = find(local, Some(peer));
        if protocol == Protocol::Tcp || connected.is_some() {
            return connected;
        }
        let all: IpAddr = match local {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        find(local, None).or_else(|| find(SocketAddr::new(all, local.port()), None))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    /// The list finds what the kernel finds.
    #[test]
    fn the_list_agrees_with_lookups_of_single_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let udp = |address: &str| UdpSocket::bind(address).unwrap();
        let (one, all, dual) = (udp("127.0.0.1:0"), udp("0.0.0.0:0"), udp("[::]:0"));
        let connected = udp("127.0.0.1:0");
        connected.connect(one.local_addr().unwrap()).unwrap();
        let mut sockets = Sockets::open().unwrap();
        let list = List::read(&mut sockets).unwrap();
        assert!(list.is_whole);
        let here = |port: u16| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let here6 = |port: u16| SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port);
        let port = |socket: &UdpSocket| socket.local_addr().unwrap().port();
        let peer = connected.local_addr().unwrap();
        let mut seen = Vec::new();
        for (protocol, local, peer) in [
            (
                Protocol::Tcp,
                client.local_addr().unwrap(),
                client.peer_addr().unwrap(),
            ),
            (
                Protocol::Tcp,
                server.local_addr().unwrap(),
                server.peer_addr().unwrap(),
            ),
            (Protocol::Udp, here(port(&one)), peer),
            (Protocol::Udp, peer, here(port(&one))),
            (Protocol::Udp, here(port(&all)), peer),
            (Protocol::Udp, here(port(&dual)), peer),
            (Protocol::Udp, here6(port(&dual)), here6(9)),
        ] {
            let listed = list.find(protocol, (local, peer), 0);
            let found = sockets.find(protocol, (local, peer), 0).unwrap().unwrap();
            assert_eq!(listed, Some(found.holder), "{protocol:?} {local} {peer}");
            assert!(found.holder.inode.is_some());
            seen.push(found.holder.inode);
        }
        assert_eq!(seen[5], seen[6], "one socket for both families");
        seen.dedup();
        assert_eq!(seen.len(), 6);
        // Nobody has these.
        for (protocol, local) in [
            (Protocol::Tcp, listener.local_addr().unwrap()),
            (Protocol::Udp, here6(port(&one))),
        ] {
            assert_eq!(list.find(protocol, (local, here6(9)), 0), None);
        }
        drop(client);
    }
}
