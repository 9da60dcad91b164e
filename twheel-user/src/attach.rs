//! Getting the programs onto an interface, and every link pinned. Filters, which are no links: [`clsact`].

use std::{
    fs, io, mem,
    os::fd::{AsRawFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::programs::{
    LinkOrder, MultiProgLink, SchedClassifier, TcAttachType, Xdp, XdpMode,
    links::{FdLink, LinkError, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions},
    xdp::XdpLink,
};
use aya::sys::SyscallError;
use aya_obj::generated::{bpf_attr, bpf_cmd};
use nix::{ifaddrs::getifaddrs, net::if_::if_nametoindex};

use crate::{
    bpf, clsact,
    data_plane::{DataPlane, errno},
    failure::{Failure, Kind},
    links,
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
    /// By TCX where the kernel has it (6.6), else by a clsact filter; if neither can be had, only incoming packets are seen
    Auto,
    /// The same, or fail
    On,
    /// By TCX, or fail
    Tcx,
    /// By a clsact filter, or fail
    Clsact,
    /// See incoming packets alone
    Off,
}

/// By what packets that go out are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A TCX link.
    Tcx,
    /// A filter of a clsact qdisc.
    Clsact,
}

/// How long the kernel may take to let go of a link that was unpinned.
const LET_GO: Duration = Duration::from_secs(1);

/// How an interface ended up attached, for people.
pub struct Attached {
    /// `native`, `generic`, or `adopted`.
    pub ingress: &'static str,
    /// Why `native` was not possible, where it was asked for first.
    pub refused: Option<String>,
    /// By what egress is seen; `None` where it is not.
    pub egress: Option<Outgoing>,
}

/// Fails if there are control characters in the name. The kernel allows them; terminals and those who read our output
/// would do as they say.
pub fn check_name(interface: &str) -> Result<()> {
    if !interface.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Interface,
        format!(
            "{}: an interface with control characters in its name: rename it",
            interface.escape_debug()
        ),
    )
    .into())
}

/// Fails unless the interface exists here and its packets have Ethernet headers.
pub fn check_interface(interface: &str) -> Result<()> {
    check_name(interface)?;
    if_nametoindex(interface).map_err(|error| {
        Failure::new(
            Kind::Interface,
            format!(
                "no interface {interface} here ({error}): `ip link` lists them, and `twheel run --wait-iface` waits"
            ),
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

/// Attaches to an interface, wholly or not at all. A link that an earlier loader left is taken over: the program behind
/// it is replaced atomically, and no packet is missed.
pub fn attach(
    plane: &mut DataPlane,
    instance: &Instance,
    interface: &str,
    mode: Mode,
    egress: Egress,
) -> Result<Attached> {
    let_go_of_others(instance, interface)?;
    // First: where it fails, the driver was not disturbed.
    let egress = see_egress(plane, instance, interface, egress)?;
    let attached = see_ingress(plane, instance, interface, mode).and_then(|(ingress, refused)| {
        clsact::remove_others(instance, interface)?;
        Ok(Attached {
            ingress,
            refused,
            egress,
        })
    });
    match attached {
        Ok(attached) => Ok(attached),
        Err(error) => {
            instance.let_go(interface)?;
            Err(error)
        }
    }
}

/// Sees incoming packets. Returns how, and why not otherwise, if that was tried first.
fn see_ingress(
    plane: &mut DataPlane,
    instance: &Instance,
    interface: &str,
    mode: Mode,
) -> Result<(&'static str, Option<String>)> {
    let program = plane.xdp("twheel_xdp")?;
    let anew = pinned(instance, Hook::Xdp, interface)?.is_some();
    if anew && mode != Mode::Auto {
        // The kernel does not say in which mode a link is, and cannot change it.
        log::warn!("{interface}: attached anew for --mode; packets in between are not seen");
        instance.unpin(Hook::Xdp, interface)?;
    }
    match adopt_xdp(program, instance, interface)? {
        true => Ok(("adopted", None)),
        false => attach_xdp(program, instance, interface, mode, anew),
    }
}

/// Sees outgoing packets, if they are to be seen. Returns by what.
fn see_egress(
    plane: &mut DataPlane,
    instance: &Instance,
    interface: &str,
    egress: Egress,
) -> Result<Option<Outgoing>> {
    let way = match egress {
        Egress::Off => {
            // An earlier loader may have seen it.
            let_go_of_egress(instance, interface)?;
            return Ok(None);
        }
        Egress::Tcx => Outgoing::Tcx,
        Egress::Clsact => Outgoing::Clsact,
        Egress::Auto | Egress::On if has_tcx(interface) => Outgoing::Tcx,
        Egress::Auto | Egress::On => Outgoing::Clsact,
    };
    let program = plane.classifier("twheel_egress")?;
    // What sees it the other way goes first: one packet is not to be counted twice.
    let attached = match way {
        Outgoing::Tcx => clsact::let_go(instance.path(), interface)
            .and_then(|()| attach_egress(program, instance, interface)),
        Outgoing::Clsact => let_go_of_tcx(instance, interface)
            .and_then(|()| clsact::attach(program, instance, interface)),
    };
    match attached {
        Ok(()) => Ok(Some(way)),
        Err(error) if egress != Egress::Auto => Err(error),
        Err(error) => {
            log::warn!("{interface}: only incoming packets are seen: {error:#}");
            // Nor by the program of an earlier loader.
            let_go_of_egress(instance, interface)?;
            Ok(None)
        }
    }
}

/// Whether the kernel has TCX. It is asked for the programs of an interface: a kernel without TCX does not know the question.
/// (One with TCX may refuse to describe what it finds to a user who may not see all programs.)
pub fn has_tcx(interface: &str) -> bool {
    let answer = SchedClassifier::query_tcx(interface, TcAttachType::Egress);
    answer.map_or_else(|error| errno(&error) != Some(libc::EINVAL), |_| true)
}

/// Sees no outgoing packets any more.
fn let_go_of_egress(instance: &Instance, interface: &str) -> Result<()> {
    instance.unpin(Hook::Egress, interface)?;
    clsact::let_go(instance.path(), interface)
}

/// Removes the TCX link, and is back when it sees no packet any more: of one that is merely unpinned, the kernel lets go a
/// moment later.
fn let_go_of_tcx(instance: &Instance, interface: &str) -> Result<()> {
    let link = pinned(instance, Hook::Egress, interface);
    // What is pinned there and no link of TCX sees no packet.
    if let Some(link) = link.ok().flatten()
        && let Ok(link) = SchedClassifierLink::try_from(link)
    {
        detach(link.fd()?).context("cannot detach what an earlier run has left of TCX")?;
    }
    instance.unpin(Hook::Egress, interface)
}

fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.link_detach.link_fd = link.as_raw_fd().unsigned_abs();
    // SAFETY: the attribute is one of this command, and has no pointers.
    unsafe { bpf::call(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// Removes links that are pinned for an interface of this name, and on another: that was renamed, or moved away, and may have
/// the same number there.
fn let_go_of_others(instance: &Instance, interface: &str) -> Result<()> {
    if let Some(link) = pinned(instance, Hook::Xdp, interface)?
        && !carries(interface, link.info()?.program_id())?
    {
        instance.let_go(interface)?;
    }
    Ok(())
}

/// Takes over the XDP link that is pinned. Returns whether there is one.
fn adopt_xdp(program: &mut Xdp, instance: &Instance, interface: &str) -> Result<bool> {
    let Some(link) = pinned(instance, Hook::Xdp, interface)? else {
        return Ok(false);
    };
    let link = XdpLink::try_from(link).context("the pinned link is not one of XDP")?;
    if let Ok(id) = program.attach_to_link(link) {
        // The pin holds the link; this handle may go.
        drop(program.take_link(id)?);
        return Ok(true);
    }
    // The interface it belonged to is gone.
    instance.unpin(Hook::Xdp, interface)?;
    Ok(false)
}

/// `anew`: a link of ours was there just before.
fn attach_xdp(
    program: &mut Xdp,
    instance: &Instance,
    interface: &str,
    mode: Mode,
    anew: bool,
) -> Result<(&'static str, Option<String>)> {
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

/// Whether an interface of this name carries an XDP program.
fn carries(interface: &str, program: u32) -> Result<bool> {
    let links = links::all()?;
    let link = links.iter().find(|link| link.name == interface);
    Ok(link.is_some_and(|link| link.xdp.iter().any(|(_, id)| *id == program)))
}

/// The number of the interface that a link is on; 0 of one that is gone. From what the kernel says of an open file: asking it
/// for the programs of an interface takes `CAP_SYS_ADMIN`, which a run has given up.
fn interface_of(link: &FdLink) -> Result<u32> {
    const FILES: &str = "/proc/self/fdinfo";
    let id = link.info()?.id();
    for file in fs::read_dir(FILES).with_context(|| format!("cannot list {FILES}"))? {
        // Other threads close theirs meanwhile.
        let Ok(text) = fs::read_to_string(file?.path()) else {
            continue;
        };
        let field = |name: &str| -> Option<u32> {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse().ok()
        };
        if field("link_id:") == Some(id)
            && let Some(interface) = field("ifindex:")
        {
            return Ok(interface);
        }
    }
    bail!("what is pinned as a link is on no interface: `twheel detach` removes it")
}

fn attach_egress(
    program: &mut SchedClassifier,
    instance: &Instance,
    interface: &str,
) -> Result<()> {
    if let Some(link) = pinned(instance, Hook::Egress, interface)? {
        // It may be on what has another name by now.
        let is_here = interface_of(&link)? == if_nametoindex(interface)?;
        let link =
            SchedClassifierLink::try_from(link).context("the pinned link is not one of TCX")?;
        if is_here && let Ok(id) = program.attach_to_link(link) {
            drop(program.take_link(id)?);
            return Ok(());
        }
        instance.unpin(Hook::Egress, interface)?;
    }
    // Said, or aya would take a clsact filter in older kernels.
    let order = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program
        .attach_with_options(interface, TcAttachType::Egress, order)
        .context(Failure::new(
            Kind::Unsupported,
            format!(
                "packets that go out of {interface} cannot be seen by TCX: has this kernel CONFIG_NET_XGRESS? \
                 `--egress clsact` does without"
            ),
        ))?;
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
