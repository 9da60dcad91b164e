//! What the kernel tells unasked: of interfaces that come, change and go, and of CPUs that do. Nobody polls.

use std::{
    collections::HashSet,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use anyhow::{Context, Result};
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::constants::{NETLINK_KOBJECT_UEVENT, NETLINK_ROUTE};
use nix::sys::socket::{setsockopt, sockopt};

use crate::{
    interfaces::{self, Change, Interface},
    netlink::{Notifications, messages},
};

/// `RTMGRP_LINK`, and the kernel's group of uevents.
const GROUP: u32 = 1;

/// What the kernel may have to tell before it is read: a thousand interfaces that come at once.
const ROOM: usize = 8 << 20;

/// News of the interfaces of this network namespace.
pub struct InterfaceNotices(Notifications);

impl InterfaceNotices {
    /// From now on.
    pub fn listen() -> Result<Self> {
        let listener = Notifications::open(NETLINK_ROUTE, GROUP);
        let listener = listener.context("cannot hear of changes of interfaces")?;
        // Where there is less room, all interfaces are listed when it was not enough.
        let _ = setsockopt(&listener, sockopt::RcvBufForce, &ROOM);
        Ok(Self(listener))
    }

    /// What has changed, in order. Where the kernel had more to tell than there was room for: everything as it is, and
    /// `known` that are not there as gone.
    pub fn changes(&self, known: impl Iterator<Item = u32>) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        let mut datagram = Vec::new();
        loop {
            match self.0.receive(&mut datagram) {
                Ok(true) => {}
                Ok(false) => return Ok(changes),
                Err(error) if is_full(&error) => return all(known),
                Err(error) => return Err(error).context("cannot hear of changes of interfaces"),
            }
            for message in messages::<RouteNetlinkMessage>(&datagram) {
                match message?.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => {
                        changes.extend(
                            Interface::from_message(&link).map(|it| Change::Is(Box::new(it))),
                        );
                    }
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) => {
                        changes.extend(
                            Interface::from_message(&link).map(|it| Change::Gone(it.index)),
                        );
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Everything as it is, and what is not there as gone.
fn all(known: impl Iterator<Item = u32>) -> Result<Vec<Change>> {
    let there = interfaces::all()?;
    let indexes: HashSet<_> = there.iter().map(|it| it.index).collect();
    let gone = known.filter(|index| !indexes.contains(index));
    let mut changes: Vec<_> = gone.map(Change::Gone).collect();
    changes.extend(there.into_iter().map(|it| Change::Is(Box::new(it))));
    Ok(changes)
}

/// Whether the kernel had more to tell than there was room for.
fn is_full(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOBUFS)
}

impl AsFd for InterfaceNotices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for InterfaceNotices {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// News of CPUs.
pub struct CpuNotices(Notifications);

impl CpuNotices {
    /// From now on. (The kernel tells them in network namespaces of the first user namespace alone.)
    pub fn listen() -> Result<Self> {
        let listener = Notifications::open(NETLINK_KOBJECT_UEVENT, GROUP);
        Ok(Self(
            listener.context("cannot hear of CPUs that come and go")?,
        ))
    }

    /// Which have come (`true`) and gone since, in order.
    pub fn changes(&self) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        let mut datagram = Vec::new();
        loop {
            match self.0.receive(&mut datagram) {
                Ok(true) => changes.extend(cpu(&datagram)),
                // Of more than there was room for, something comes next.
                Err(error) if is_full(&error) => {}
                Ok(false) | Err(_) => return changes,
            }
        }
    }
}

impl AsRawFd for CpuNotices {
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
