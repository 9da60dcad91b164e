//! Attaches the programs to an interface and pins every BPF link. Filters are not BPF links: see
//! [`clsact`].

use std::{io, os::fd::AsFd};

use anyhow::{Context, Result};
use aya::programs::{
    ProgramError, SchedClassifier, TcAttachType, Xdp, XdpMode,
    links::{FdLink, LinkError, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions},
    xdp::XdpLink,
};
use aya::sys::SyscallError;
use nix::{errno::Errno, net::if_::if_nametoindex};

use crate::{
    bpf, clsact,
    data_plane::{DataPlane, errno},
    failure::{Failure, Kind},
    hooks::{self, Choice, Egress, HIDES_TAGS, Hooks, Incoming, Mode, Outgoing, shows_tags},
    interfaces::{self, Interface, Known},
    order::Order,
    pins::{Hook, Instance},
    tc::Way,
    tcx,
};

/// How an interface was attached, for messages to users.
pub struct Attached {
    /// The hook that sees incoming packets.
    pub ingress: Incoming,
    /// An earlier run's attachment was taken over, and now runs this run's program.
    pub adopted: bool,
    /// Why native XDP, the first choice, was not used; `None` if it was used or was not the first
    /// choice.
    pub why: Option<String>,
    /// The hook that sees outgoing packets; `None` if they are not seen.
    pub egress: Option<Outgoing>,
}

impl Attached {
    /// The hook for incoming packets, as `--hook` has it.
    pub fn hook(&self) -> &'static str {
        match self.ingress {
            Incoming::Xdp(_) => "xdp",
            Incoming::Tcx => "tcx",
            Incoming::Clsact => "clsact",
        }
    }

    /// Names the hooks.
    pub fn describe(&self) -> String {
        let ingress = match (self.adopted, self.ingress) {
            // The kernel does not say in which mode a BPF link is attached.
            (true, Incoming::Xdp(_)) => "adopted XDP".to_owned(),
            (true, by) => format!("adopted {}", by.name()),
            (false, by) => by.name().to_owned(),
        };
        let egress = match (self.egress, self.ingress) {
            (Some(Outgoing::Clsact), Incoming::Xdp(_) | Incoming::Tcx) => {
                "both directions, outgoing by a clsact filter"
            }
            (Some(_), _) => "both directions",
            (None, _) => "incoming only",
        };
        format!("{ingress}, {egress}")
    }
}

/// Fails if the name contains control characters. The kernel allows them, but a terminal or a
/// program that reads the output would act on them.
pub fn check_name(interface: &str) -> Result<()> {
    if !interface.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Interface,
        format!(
            "{}: the interface's name has control characters: rename it",
            interface.escape_debug()
        ),
    )
    .into())
}

/// Fails unless the interface exists in this network namespace and its packets begin with an
/// Ethernet or IP header.
pub fn check_interface(interface: &str) -> Result<Interface> {
    check_name(interface)?;
    if_nametoindex(interface).map_err(|error| {
        Failure::new(
            Kind::Interface,
            format!(
                "there is no interface {interface}{}: `ip link` lists those that exist; `twheel \
                 run --wait-iface` waits for one",
                match error {
                    Errno::ENODEV => String::new(),
                    error => format!(" ({error})"),
                }
            ),
        )
    })?;
    let found = interfaces::one(interface)?;
    found.layer()?;
    Ok(found)
}

/// The programs to attach, by name.
pub trait ProgramSource {
    /// Makes sure that a program is loaded.
    ///
    /// # Errors
    ///
    /// The kernel refuses the program.
    fn demand(&mut self, name: &str, instance: &Instance) -> Result<()>;
    /// An XDP program.
    ///
    /// # Errors
    ///
    /// There is no XDP program of this name.
    fn xdp(&mut self, name: &str) -> Result<&mut Xdp>;
    /// A classifier.
    ///
    /// # Errors
    ///
    /// There is no classifier of this name.
    fn classifier(&mut self, name: &str) -> Result<&mut SchedClassifier>;
}

impl ProgramSource for DataPlane {
    fn demand(&mut self, name: &str, instance: &Instance) -> Result<()> {
        Self::demand(self, name, instance)
    }

    fn xdp(&mut self, name: &str) -> Result<&mut Xdp> {
        Self::xdp(self, name)
    }

    fn classifier(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Self::classifier(self, name)
    }
}

/// Attaches to an interface, completely or not at all. If an earlier run left a BPF link, it is
/// taken over: its program is replaced atomically, so no packet is missed.
pub fn attach(
    programs: &mut dyn ProgramSource,
    instance: &Instance,
    interface: &str,
    hooks: &Hooks,
    known: &Known,
) -> Result<Attached> {
    detach_other(instance, interface)?;
    let choice = hooks.choose(Some(instance.path()), interface, known)?;
    if choice.hides_tags {
        log::warn!("{interface}: {HIDES_TAGS}: `{}`", shows_tags(interface));
    }
    // Egress comes first: if it fails, the driver has not been disturbed.
    let egress = see_egress(programs, instance, interface, hooks)?;
    let ingress = see_ingress(programs, instance, interface, hooks, choice);
    let attached = ingress.and_then(|(ingress, adopted, why)| {
        if !has_others(interface, instance)? {
            clsact::remove_others(instance.path(), interface)?;
        }
        Ok(Attached {
            ingress,
            adopted,
            why,
            egress,
        })
    });
    match attached {
        Ok(attached) => Ok(attached),
        Err(error) => {
            instance.detach_from(interface)?;
            Err(error)
        }
    }
}

/// Whether the interface has an XDP program that is not this instance's. It may be another
/// instance's.
fn has_others(interface: &str, instance: &Instance) -> Result<bool> {
    let own = hooks::program(&instance.link(Hook::Xdp, interface));
    let found = interfaces::one(interface)?;
    Ok(found.xdp.iter().any(|(_, id)| Some(*id) != own))
}

/// Attaches for incoming packets. Returns the hook, whether an earlier run's attachment was taken
/// over, and why the first choice was not used.
fn see_ingress(
    programs: &mut dyn ProgramSource,
    instance: &Instance,
    interface: &str,
    hooks: &Hooks,
    mut choice: Choice,
) -> Result<(Incoming, bool, Option<String>)> {
    if let Incoming::Xdp(mode) = choice.by {
        match see_xdp(programs, instance, interface, hooks, mode)? {
            Ok((by, adopted, why)) => return Ok((by, adopted, why)),
            Err(error) if !choice.falls_back => return Err(explain(interface, mode, error)),
            Err(error) => {
                choice.why = Some(why_not_native(interface, hooks, error));
                choice.by = match tcx::exists(if_nametoindex(interface)?) {
                    true => Incoming::Tcx,
                    false => Incoming::Clsact,
                };
            }
        }
        if hooks.resets {
            return Err(hooks.no_resets(interface, &choice).into());
        }
    }
    programs.demand("twheel_ingress", instance)?;
    // First remove the other attachment, or packets would be counted twice.
    instance.unpin(Hook::Xdp, interface)?;
    let program = programs.classifier("twheel_ingress")?;
    let adopted = if choice.by == Incoming::Tcx {
        clsact::detach_way(instance.path(), interface, Way::In)?;
        attach_tcx(program, instance, interface, Way::In, hooks)?
    } else {
        instance.unpin(Hook::Ingress, interface)?;
        clsact::attach(
            program,
            instance.path(),
            interface,
            Way::In,
            hooks.order.as_ref(),
        )?
    };
    Ok((choice.by, adopted, choice.why))
}

type Seen = (Incoming, bool, Option<String>);

/// Attaches XDP for incoming packets, if the kernel allows it.
fn see_xdp(
    programs: &mut dyn ProgramSource,
    instance: &Instance,
    interface: &str,
    hooks: &Hooks,
    mode: Mode,
) -> Result<Result<Seen, ProgramError>> {
    programs.demand("twheel_xdp", instance)?;
    instance.unpin(Hook::Ingress, interface)?;
    clsact::detach_way(instance.path(), interface, Way::In)?;
    let program = programs.xdp("twheel_xdp")?;
    let asked = hooks.mode.is_some_and(|mode| mode != Mode::Auto);
    if asked && pinned(instance, Hook::Xdp, interface)?.is_some() {
        // The kernel does not say in which mode a BPF link is attached, and cannot change the mode.
        log::warn!("{interface}: attached again for --mode; packets in between were not seen");
        instance.unpin(Hook::Xdp, interface)?;
    }
    if adopt_xdp(program, instance, interface)? {
        return Ok(Ok((Incoming::Xdp(mode), true, None)));
    }
    let attached = attach_xdp(program, instance, interface, mode)?;
    Ok(attached.map(|(mode, why)| (Incoming::Xdp(mode), false, why)))
}

/// Attaches for outgoing packets, if they are to be seen. Returns the hook.
fn see_egress(
    programs: &mut dyn ProgramSource,
    instance: &Instance,
    interface: &str,
    hooks: &Hooks,
) -> Result<Option<Outgoing>> {
    let Some(way) = hooks.outgoing(if_nametoindex(interface)?) else {
        // An earlier run may have attached there.
        detach_egress(instance, interface)?;
        return Ok(None);
    };
    let program = programs.classifier("twheel_egress")?;
    // First remove the other attachment, or packets would be counted twice.
    let attached = match way {
        Outgoing::Tcx => clsact::detach_way(instance.path(), interface, Way::Out)
            .and_then(|()| attach_tcx(program, instance, interface, Way::Out, hooks)),
        Outgoing::Clsact => instance.unpin(Hook::Egress, interface).and_then(|()| {
            clsact::attach(
                program,
                instance.path(),
                interface,
                Way::Out,
                hooks.order.as_ref(),
            )
        }),
    };
    match attached {
        Ok(_) => Ok(Some(way)),
        Err(error) if hooks.egress != Egress::Auto => Err(error),
        Err(error) => {
            log::warn!("{interface}: only incoming packets are seen: {error:#}");
            // An earlier run's program must not see outgoing packets either.
            detach_egress(instance, interface)?;
            Ok(None)
        }
    }
}

/// Detaches from outgoing packets.
fn detach_egress(instance: &Instance, interface: &str) -> Result<()> {
    instance.unpin(Hook::Egress, interface)?;
    clsact::detach_way(instance.path(), interface, Way::Out)
}

/// Detaches from interfaces that an earlier run attached to under names that they no longer have.
/// Call it before anything is attached: each would be in the way under its present name.
pub fn detach_renamed(instance: &Instance) -> Result<()> {
    for interface in instance.pins().interfaces()? {
        detach_other(instance, &interface)?;
    }
    for interface in clsact::renamed(instance.path())? {
        instance.detach_from(&interface)?;
    }
    Ok(())
}

/// Removes pinned BPF links that bear this interface's name but are attached to another interface.
/// That interface was renamed, or moved to another network namespace, where it may have the same
/// number.
fn detach_other(instance: &Instance, interface: &str) -> Result<()> {
    let index = if_nametoindex(interface).ok();
    for hook in [Hook::Xdp, Hook::Ingress, Hook::Egress] {
        let at = interface_of(instance, hook, interface)?;
        if at.is_some() && at != index {
            return instance.detach_from(interface);
        }
    }
    // All interfaces of an instance have the same program, so this alone does not tell.
    if let Some(link) = pinned(instance, Hook::Xdp, interface)?
        && !carries(interface, link.info()?.program_id())?
    {
        instance.detach_from(interface)?;
    }
    Ok(())
}

/// Takes over the pinned XDP link. Returns whether there was one.
fn adopt_xdp(program: &mut Xdp, instance: &Instance, interface: &str) -> Result<bool> {
    let Some(link) = pinned(instance, Hook::Xdp, interface)? else {
        return Ok(false);
    };
    let link = XdpLink::try_from(link).context("the pinned BPF link is not an XDP link")?;
    if let Ok(id) = program.attach_to_link(link) {
        // The pin keeps the BPF link alive, so this handle may be dropped.
        drop(program.take_link(id)?);
        return Ok(true);
    }
    // The interface that the BPF link was attached to no longer exists.
    instance.unpin(Hook::Xdp, interface)?;
    Ok(false)
}

/// Returns the mode, and, if native mode was tried first, why it failed. The error says why the
/// kernel attaches in no mode.
fn attach_xdp(
    program: &mut Xdp,
    instance: &Instance,
    interface: &str,
    mode: Mode,
) -> Result<Result<(Mode, Option<String>), ProgramError>> {
    let (id, mode, refused) = match mode {
        Mode::Native => (program.attach(interface, XdpMode::Driver), mode, None),
        Mode::Generic => (program.attach(interface, XdpMode::Skb), mode, None),
        Mode::Auto => match program.attach(interface, XdpMode::Driver) {
            Err(error) if !is_taken(errno(&error)) => (
                program.attach(interface, XdpMode::Skb),
                Mode::Generic,
                Some(driver_refuses(error)),
            ),
            result => (result, Mode::Native, None),
        },
    };
    let id = match id {
        Ok(id) => id,
        Err(error) => return Ok(Err(error)),
    };
    let link = FdLink::try_from(program.take_link(id)?)
        .map_err(anyhow::Error::new)
        .context("this kernel has no XDP links")?;
    pin(link, instance, Hook::Xdp, interface)?;
    Ok(Ok((mode, refused)))
}

fn driver_refuses(error: ProgramError) -> String {
    // What most drivers without native XDP say: no failure, but what they are.
    if errno(&error) == Some(libc::EOPNOTSUPP) {
        return "the driver has no native XDP".to_owned();
    }
    format!(
        "the driver refuses native XDP: {:#}",
        anyhow::Error::new(error)
    )
}

/// Why TCX is used instead of native XDP.
fn why_not_native(interface: &str, hooks: &Hooks, error: ProgramError) -> String {
    if !is_taken(errno(&error)) {
        return driver_refuses(error);
    }
    match interfaces::one(interface) {
        Ok(found) if !found.xdp.is_empty() => hooks::taken(&found, &hooks.names),
        _ => format!("XDP is taken: {:#}", anyhow::Error::new(error)),
    }
}

/// Why the XDP that the user asked for is not available.
fn explain(interface: &str, mode: Mode, error: ProgramError) -> anyhow::Error {
    let message = if is_taken(errno(&error)) {
        format!(
            "{interface} already has another XDP program: detach it first \
             (`ip link show {interface}` shows it), or use --hook tcx, which works beside it"
        )
    } else {
        let by = Incoming::Xdp(mode).name();
        format!("cannot attach to {interface} with {by}: try --hook auto")
    };
    anyhow::Error::new(error).context(Failure::new(Kind::Interface, message))
}

/// Whether the interface of this name has this XDP program.
fn carries(interface: &str, program: u32) -> Result<bool> {
    let found = interfaces::one(interface).ok();
    Ok(found.is_some_and(|found| found.xdp.iter().any(|(_, id)| *id == program)))
}

/// The number of the interface that a pinned BPF link is attached to; 0: that interface no longer
/// exists. `None`: there is no pin.
fn interface_of(instance: &Instance, hook: Hook, interface: &str) -> Result<Option<u32>> {
    let pin = instance.link(hook, interface);
    let link = match bpf::open(&pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        link => link.context("cannot open the pinned BPF link")?,
    };
    let index = bpf::interface_of(link.as_fd()).with_context(|| {
        let pin = pin.display();
        format!("{pin} is attached to no interface: remove it with `twheel detach`")
    })?;
    Ok(Some(index))
}

/// Attaches TCX for one direction. Returns whether an earlier run's BPF link was taken over.
fn attach_tcx(
    program: &mut SchedClassifier,
    instance: &Instance,
    interface: &str,
    way: Way,
    hooks: &Hooks,
) -> Result<bool> {
    let (hook, direction, what, instead) = match way {
        Way::In => (
            Hook::Ingress,
            TcAttachType::Ingress,
            "incoming",
            "--hook clsact",
        ),
        Way::Out => (
            Hook::Egress,
            TcAttachType::Egress,
            "outgoing",
            "--egress clsact",
        ),
    };
    let index = if_nametoindex(interface)?;
    if let Some(link) = pinned(instance, hook, interface)? {
        // The pinned BPF link may be on an interface that has been renamed since.
        let is_here = interface_of(instance, hook, interface)? == Some(index);
        let own = link.info()?.program_id();
        let link =
            SchedClassifierLink::try_from(link).context("the pinned BPF link is not a TCX link")?;
        let stands = match &hooks.order {
            Some(order) if is_here => {
                let all = tcx::others(index, way, None, &hooks.names)?;
                tcx::stands(order, own, &all)
            }
            // It keeps its position.
            _ => true,
        };
        if !stands {
            log::warn!("{interface}: moved for --order; packets in between were not seen");
        } else if is_here && let Ok(id) = program.attach_to_link(link) {
            drop(program.take_link(id)?);
            return Ok(true);
        }
        instance.unpin(hook, interface)?;
    }
    let order = hooks.order.as_ref().unwrap_or(&Order::First);
    let attach = |program: &mut SchedClassifier| {
        // A kernel without TCX reports that when the program is attached.
        let others = tcx::others(index, way, None, &hooks.names).unwrap_or_default();
        // Given explicitly: otherwise aya would use a clsact filter on older kernels.
        let order = TcAttachOptions::TcxOrder(tcx::link_order(order, &others));
        program.attach_with_options(interface, direction, order)
    };
    // The program that `--order` names may just have been detached.
    let attached = match attach(program) {
        Err(error) if errno(&error) == Some(libc::ENOENT) => attach(program),
        result => result,
    };
    let id = attached.context(Failure::new(
        Kind::Unsupported,
        format!(
            "cannot see {what} packets of {interface} with TCX (has this kernel \
             CONFIG_NET_XGRESS?): `{instead}` works without it"
        ),
    ))?;
    let link = FdLink::try_from(program.take_link(id)?)
        .map_err(anyhow::Error::new)
        .context("this kernel has no TCX links")?;
    pin(link, instance, hook, interface)?;
    Ok(false)
}

/// Another program has the hook: the kernel says `EBUSY` if it is in the same mode, `EEXIST` if in
/// another.
fn is_taken(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EBUSY | libc::EEXIST))
}

fn pin(link: FdLink, instance: &Instance, hook: Hook, interface: &str) -> Result<()> {
    let path = instance.link(hook, interface);
    // If pinning fails, the BPF link is dropped, which detaches the program.
    link.pin(&path)
        .with_context(|| format!("cannot pin the BPF link at {}", path.display()))?;
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
        Err(error) => Err(error).context("cannot open the pinned BPF link"),
    }
}
