//! Getting the programs onto an interface, and every link pinned.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::programs::{
    SchedClassifier, TcAttachType, Xdp, XdpMode,
    links::{FdLink, LinkError, PinnedLink},
    tc::SchedClassifierLink,
    xdp::XdpLink,
};
use aya::sys::SyscallError;
use nix::{ifaddrs::getifaddrs, net::if_::if_nametoindex};

use crate::{
    data_plane::{DataPlane, errno},
    failure::{Failure, Kind},
    pins::{Hook, Instance},
};

/// Where in the receive path XDP runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Native, generic where the driver has no XDP
    Auto,
    /// In the driver
    Native,
    /// Behind the driver, in the network stack
    Generic,
}

/// Whether packets that go out are seen too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Egress {
    /// Where the kernel has TCX (6.6)
    Auto,
    /// Fail where it has not
    On,
    /// See incoming packets alone
    Off,
}

/// How long the kernel may take to let go of a link that was unpinned.
const LET_GO: Duration = Duration::from_secs(1);

/// How an interface ended up attached, for people.
pub struct Attached {
    /// `native`, `generic`, or `adopted`.
    pub ingress: &'static str,
    /// Why `native` was not possible, where it was asked for first.
    pub refused: Option<String>,
    /// Whether egress is seen.
    pub egress: bool,
}

/// Fails unless the interface exists here and its packets have Ethernet headers.
pub fn check_interface(interface: &str) -> Result<()> {
    // The kernel allows them; terminals and those who read our output would do as they say.
    if interface.chars().any(char::is_control) {
        return Err(Failure::new(
            Kind::Interface,
            format!(
                "{}: an interface with control characters in its name: rename it",
                interface.escape_debug()
            ),
        )
        .into());
    }
    if_nametoindex(interface).map_err(|error| {
        Failure::new(
            Kind::Interface,
            format!("no interface {interface} here ({error}): `ip link` lists them"),
        )
    })?;
    let link_type = getifaddrs()
        .context("cannot list the interfaces")?
        .filter(|found| found.interface_name == interface)
        .find_map(|found| Some(found.address?.as_link_addr()?.hatype()));
    match link_type {
        Some(libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK) => Ok(()),
        _ => Err(Failure::new(
            Kind::Interface,
            format!(
                "packets of {interface} have no Ethernet header: give the interface that carries \
                 them on the wire"
            ),
        )
        .into()),
    }
}

/// Attaches to an interface. A link that an earlier loader left is taken over: the program behind
/// it is replaced atomically, and no packet is missed.
pub fn attach(
    plane: &mut DataPlane,
    instance: &Instance,
    interface: &str,
    mode: Mode,
    egress: Egress,
) -> Result<Attached> {
    let (ingress, refused) = attach_xdp(plane.xdp("twheel_xdp")?, instance, interface, mode)?;
    let egress = match egress {
        Egress::Off => {
            // An earlier loader may have seen it.
            if pinned(instance, Hook::Egress, interface)?.is_some() {
                unpin(instance, Hook::Egress, interface)?;
            }
            false
        }
        _ => {
            let program = plane.classifier("twheel_egress")?;
            match attach_egress(program, instance, interface) {
                Ok(()) => true,
                Err(error) if egress == Egress::On => return Err(error),
                Err(error) => {
                    log::warn!("{interface}: only incoming packets are seen: {error:#}");
                    false
                }
            }
        }
    };
    Ok(Attached {
        ingress,
        refused,
        egress,
    })
}

fn attach_xdp(
    program: &mut Xdp,
    instance: &Instance,
    interface: &str,
    mode: Mode,
) -> Result<(&'static str, Option<String>)> {
    let adopted = pinned(instance, Hook::Xdp, interface)?;
    let anew = adopted.is_some();
    if adopted.is_some() && mode != Mode::Auto {
        // The kernel does not say in which mode a link is, and cannot change it.
        log::warn!("{interface}: attached anew for --mode; packets in between are not seen");
        drop(adopted);
        unpin(instance, Hook::Xdp, interface)?;
    } else if let Some(link) = adopted {
        let link = XdpLink::try_from(link).context("the pinned link is not one of XDP")?;
        if let Ok(id) = program.attach_to_link(link) {
            // The pin holds the link; this handle may go.
            drop(program.take_link(id)?);
            return Ok(("adopted", None));
        }
        // The interface it belonged to is gone; one of the same name is here.
        unpin(instance, Hook::Xdp, interface)?;
    }
    // The kernel lets go of an unpinned link a moment later.
    let until = Instant::now() + if anew { LET_GO } else { Duration::ZERO };
    let mut attach = |mode: XdpMode| {
        loop {
            match program.attach(interface, mode) {
                Err(error) if is_taken(errno(&error)) && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(10));
                }
                result => return result,
            }
        }
    };
    let (id, name, refused) = match mode {
        Mode::Native => (attach(XdpMode::Driver), "native", None),
        Mode::Generic => (attach(XdpMode::Skb), "generic", None),
        Mode::Auto => match attach(XdpMode::Driver) {
            Err(error) if !is_taken(errno(&error)) => {
                let why = format!("{:#}", anyhow::Error::new(error));
                (attach(XdpMode::Skb), "generic", Some(why))
            }
            result => (result, "native", None),
        },
    };
    let id = id.map_err(|error| {
        let errno = errno(&error);
        let error = anyhow::Error::new(error);
        if is_taken(errno) {
            error.context(Failure::new(
                Kind::Interface,
                format!(
                    "{interface} already carries another XDP program: see `ip link show {interface}`, \
                     and detach that one first"
                ),
            ))
        } else {
            error.context(Failure::new(
                Kind::Interface,
                format!("cannot attach to {interface} in {name} mode: try --mode auto"),
            ))
        }
    })?;
    let link = FdLink::try_from(program.take_link(id)?)
        .map_err(anyhow::Error::new)
        .context("this kernel has no XDP links")?;
    pin(link, instance, Hook::Xdp, interface)?;
    Ok((name, refused))
}

fn attach_egress(
    program: &mut SchedClassifier,
    instance: &Instance,
    interface: &str,
) -> Result<()> {
    if let Some(link) = pinned(instance, Hook::Egress, interface)? {
        let link =
            SchedClassifierLink::try_from(link).context("the pinned link is not one of TCX")?;
        if let Ok(id) = program.attach_to_link(link) {
            drop(program.take_link(id)?);
            return Ok(());
        }
        unpin(instance, Hook::Egress, interface)?;
    }
    let id = program
        .attach(interface, TcAttachType::Egress)
        .context("cannot attach to outgoing packets: TCX needs kernel 6.6")?;
    let link = FdLink::try_from(program.take_link(id)?)
        .map_err(anyhow::Error::new)
        .context("this kernel has no TCX links")?;
    pin(link, instance, Hook::Egress, interface)
}

/// Another program has the hook: `EBUSY` for one in the same mode, `EEXIST` for one in another.
fn is_taken(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EBUSY | libc::EEXIST))
}

fn pin(link: FdLink, instance: &Instance, hook: Hook, interface: &str) -> Result<()> {
    let path = instance.link(hook, interface);
    // Where this fails the link is dropped, and with it the attachment.
    link.pin(&path)
        .with_context(|| format!("cannot pin the link at {}", path.display()))?;
    Ok(())
}

fn pinned(instance: &Instance, hook: Hook, interface: &str) -> Result<Option<FdLink>> {
    match PinnedLink::from_pin(instance.link(hook, interface)) {
        Ok(link) => Ok(Some(FdLink::from(link))),
        Err(LinkError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::NotFound =>
        {
            Ok(None)
        }
        Err(error) => Err(error).context("cannot open the pinned link"),
    }
}

fn unpin(instance: &Instance, hook: Hook, interface: &str) -> Result<()> {
    let path = instance.link(hook, interface);
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
}
