//! The kernel's notifications of interfaces that appear, change and disappear, and of CPUs that go
//! on- and offline. Nothing polls.

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

/// The socket's buffer: notifications of a thousand interfaces that appear at once.
const ROOM: usize = 8 << 20;

/// Notifications of the interfaces of this network namespace.
pub struct InterfaceNotices(Notifications);

impl InterfaceNotices {
    /// Starts to receive them.
    pub fn listen() -> Result<Self> {
        let listener = Notifications::open(NETLINK_ROUTE, GROUP);
        let listener = listener.context("cannot receive notifications about interfaces")?;
        // With a smaller buffer, all interfaces are listed once notifications are lost.
        let _ = setsockopt(&listener, sockopt::RcvBufForce, &ROOM);
        Ok(Self(listener))
    }

    /// The changes, in order. If notifications were lost, all interfaces as they are now, and those
    /// of `known` that no longer exist as [`Change::Gone`].
    pub fn changes(&self, known: impl Iterator<Item = u32>) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        let mut datagram = Vec::new();
        loop {
            match self.0.receive(&mut datagram) {
                Ok(true) => {}
                Ok(false) => return Ok(changes),
                Err(error) if is_full(&error) => return all(known),
                Err(error) => {
                    return Err(error).context("cannot receive notifications about interfaces");
                }
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

/// All interfaces as they are now; known ones that no longer exist are reported as gone.
fn all(known: impl Iterator<Item = u32>) -> Result<Vec<Change>> {
    let there = interfaces::all()?;
    let indexes: HashSet<_> = there.iter().map(|it| it.index).collect();
    let gone = known.filter(|index| !indexes.contains(index));
    let mut changes: Vec<_> = gone.map(Change::Gone).collect();
    changes.extend(there.into_iter().map(|it| Change::Is(Box::new(it))));
    Ok(changes)
}

/// Whether notifications were lost because the buffer was full.
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

/// Notifications of CPUs.
pub struct CpuNotices(Notifications);

impl CpuNotices {
    /// Starts to receive them. (The kernel sends them only to network namespaces of the initial
    /// user namespace.)
    pub fn listen() -> Result<Self> {
        let listener = Notifications::open(NETLINK_KOBJECT_UEVENT, GROUP);
        Ok(Self(
            listener.context("cannot receive notifications about CPUs")?,
        ))
    }

    /// The CPUs that came online (`true`) or went offline (`false`), in order.
    pub fn changes(&self) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        let mut datagram = Vec::new();
        loop {
            match self.0.receive(&mut datagram) {
                Ok(true) => changes.extend(cpu(&datagram)),
                // If notifications were lost, the next one follows.
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

/// Reads `online@/devices/system/cpu/cpu1`. The rest of the message repeats this in other words.
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
