//! What the kernel tells unasked: of interfaces that come, change and go, and of CPUs that do. Nobody polls.

use std::{
    collections::HashSet,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use anyhow::{Context, Result};
use netlink_packet_core::{NLMSG_ALIGNTO, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt,
    socket, sockopt,
};

use crate::links::{self, Link};

/// `RTMGRP_LINK`, and the kernel's group of uevents.
const GROUP: u32 = 1;
/// Larger than any datagram of netlink's.
const BUFFER: usize = 1 << 16;

/// What the kernel may have to tell before it is read: a thousand interfaces that come at once.
const ROOM: usize = 8 << 20;

/// A change of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is there, like this.
    Is(Box<Link>),
    /// It is there no more, or in another network namespace: its number.
    Gone(u32),
}

/// A socket on which the kernel tells, without waiting.
fn listen(protocol: SockProtocol) -> Result<OwnedFd> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        protocol,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUP))?;
    Ok(socket)
}

/// News of the interfaces of this network namespace.
pub struct Interfaces(OwnedFd);

impl Interfaces {
    /// From now on.
    pub fn listen() -> Result<Self> {
        let socket = listen(SockProtocol::NetlinkRoute);
        let socket = socket.context("cannot hear of changes of interfaces")?;
        // Where there is less room, all interfaces are listed when it was not enough.
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &ROOM);
        Ok(Self(socket))
    }

    /// What has changed, in order. Where the kernel had more to tell than there was room for: everything as it is, and
    /// `known` that are not there as gone.
    pub fn changes(&self, known: impl Iterator<Item = u32>) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) => length,
                Err(nix::Error::EAGAIN) => return Ok(changes),
                Err(nix::Error::EINTR) => continue,
                Err(nix::Error::ENOBUFS) => {
                    let there = links::all()?;
                    let indexes: HashSet<_> = there.iter().map(|it| it.index).collect();
                    let gone = known.filter(|index| !indexes.contains(index));
                    let mut changes: Vec<_> = gone.map(Change::Gone).collect();
                    changes.extend(there.into_iter().map(|it| Change::Is(Box::new(it))));
                    return Ok(changes);
                }
                Err(error) => return Err(error).context("cannot hear of changes of interfaces"),
            };
            let mut rest = &buffer[..length];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)?;
                match message.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => {
                        changes.extend(Link::of(&link).map(|it| Change::Is(Box::new(it))));
                    }
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) => {
                        changes.extend(Link::of(&link).map(|it| Change::Gone(it.index)));
                    }
                    _ => {}
                }
                let length = message.header.length as usize;
                rest = rest
                    .get(length.max(1).next_multiple_of(NLMSG_ALIGNTO.into())..)
                    .unwrap_or_default();
            }
        }
    }
}

impl AsFd for Interfaces {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Interfaces {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// News of CPUs.
pub struct Cpus(OwnedFd);

impl Cpus {
    /// From now on. (The kernel tells them in network namespaces of the first user namespace alone.)
    pub fn listen() -> Result<Self> {
        let socket = listen(SockProtocol::NetlinkKObjectUEvent);
        Ok(Self(
            socket.context("cannot hear of CPUs that come and go")?,
        ))
    }

    /// Which have come (`true`) and gone since, in order.
    pub fn changes(&self) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) => changes.extend(cpu(&buffer[..length])),
                // Of more than there was room for, something comes next.
                Err(nix::Error::EINTR | nix::Error::ENOBUFS) => {}
                Err(_) => return changes,
            }
        }
    }
}

impl AsRawFd for Cpus {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Reads `online@/devices/system/cpu/cpu1`, behind which come the same in other words.
fn cpu(message: &[u8]) -> Option<(u32, bool)> {
    let message = message.split(|byte| *byte == 0).next()?;
    let (action, path) = str::from_utf8(message).ok()?.split_once('@')?;
    let number = path.strip_prefix("/devices/system/cpu/cpu")?.parse().ok()?;
    match action {
        "online" => Some((number, true)),
        "offline" => Some((number, false)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_all_that_the_kernel_tells_cpus_are_heard() {
        let told = |text: &str| cpu(format!("{text}\0ACTION=x\0SEQNUM=1\0").as_bytes());
        assert_eq!(told("online@/devices/system/cpu/cpu17"), Some((17, true)));
        assert_eq!(told("offline@/devices/system/cpu/cpu1"), Some((1, false)));
        assert_eq!(told("add@/devices/system/cpu/cpu1"), None);
        assert_eq!(told("online@/devices/system/memory/memory1"), None);
        assert_eq!(told("online@/devices/system/cpu/cpu1/cache"), None);
        assert_eq!(cpu(b"libudev\0\xfe\xed\xca\xfe"), None);
        assert_eq!(cpu(&[]), None);
    }
}
