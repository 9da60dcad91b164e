//! By which hook an interface's packets are seen, chosen by what the interface is and what others have attached there.

use std::path::Path;

use anyhow::Result;
use aya::programs::links::{FdLink, PinnedLink};
use nix::net::if_::if_nametoindex;

use crate::{
    clsact,
    failure::{Failure, Kind},
    interfaces::{self, Interface, Known, LinkLayer},
    order::{Order, ProgramNames, list},
    pins::{Hook, link_name},
    tc::Way,
    tcx,
};

/// By what incoming packets are to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Ingress {
    /// Native XDP where the driver has it and nobody else's program is there, else as `tcx`; never generic XDP
    Auto,
    /// By XDP, where `--mode` says
    Xdp,
    /// By TCX, or a clsact filter where the kernel has no TCX (before 6.6): behind GRO, beside other programs
    Tcx,
    /// By a clsact filter
    Clsact,
}

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

/// What a run was told of hooks.
#[derive(Clone, Debug)]
pub struct Hooks {
    /// How incoming packets are to be seen.
    pub ingress: Ingress,
    /// Where XDP is to run, if that was said.
    pub mode: Option<Mode>,
    /// How outgoing packets are to be seen.
    pub egress: Egress,
    /// Where programs are to stand among those of others, if that was said.
    pub order: Option<Order>,
    /// Packets are to be answered with a RST.
    pub resets: bool,
    /// The programs that were loaded when the run began.
    pub names: ProgramNames,
}

/// By what incoming packets are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// XDP, in this mode.
    Xdp(Mode),
    /// A TCX link.
    Tcx,
    /// A filter of a clsact qdisc.
    Clsact,
}

impl Incoming {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xdp(Mode::Native) => "native XDP",
            Self::Xdp(Mode::Generic) => "generic XDP",
            Self::Xdp(Mode::Auto) => "XDP",
            Self::Tcx => "TCX",
            Self::Clsact => "clsact",
        }
    }
}

/// What was chosen for an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The hook.
    pub by: Incoming,
    /// Why it is not native XDP, where that would have been chosen first.
    pub why: Option<String>,
    /// If XDP cannot be had, TCX is taken, or a clsact filter.
    pub falls_back: bool,
    /// What an earlier run has left there goes on.
    pub goes_on: bool,
    /// XDP was asked for, and does not see the VLAN tags that there are.
    pub hides_tags: bool,
}

/// Why XDP does not see VLAN tags.
pub const HIDES_TAGS: &str = "the card takes VLAN tags out of frames, so XDP does not see them";

/// What to do about that.
pub fn shows_tags(interface: &str) -> String {
    format!("ethtool -K {interface} rxvlan off")
}

impl Choice {
    /// The program that sees incoming packets there.
    pub fn program(&self) -> &'static str {
        match self.by {
            Incoming::Xdp(_) => "twheel_xdp",
            Incoming::Tcx | Incoming::Clsact => "twheel_ingress",
        }
    }
}

/// What a choice depends on.
struct Facts<'a> {
    interface: &'a Interface,
    /// An interface above it that has an XDP program.
    above: Option<&'a Interface>,
    /// By what an earlier run sees its packets.
    left: Option<Incoming>,
    has_tcx: bool,
    /// XDP does not see the VLAN tags of its packets, and there are some.
    hides_tags: bool,
}

impl Hooks {
    /// What a run would see an interface's incoming packets by. `directory`: where an earlier run's links may be pinned.
    ///
    /// # Errors
    ///
    /// The interface will not do: see [`interfaces::link_layer`]. Or what was asked for cannot be done there: a RST without XDP, a
    /// place beside a program that is not there.
    pub fn choose(
        &self,
        directory: Option<&Path>,
        interface: &str,
        known: &Known,
    ) -> Result<Choice> {
        let found = interfaces::one(interface)?;
        found.layer()?;
        let others = known.above(&found);
        let facts = Facts {
            above: above(&found, &others),
            left: directory.and_then(|it| left(it, interface, found.index)),
            has_tcx: tcx::exists(found.index),
            hides_tags: hides_tags(&found, &others),
            interface: &found,
        };
        let choice = choose(self, &facts);
        if self.resets && !matches!(choice.by, Incoming::Xdp(_)) {
            return Err(self.no_resets(interface, &choice).into());
        }
        self.check_order(directory, interface, &choice)?;
        Ok(choice)
    }

    /// Whether XDP was asked for, by name or by a mode.
    pub fn takes_xdp(&self) -> bool {
        match self.ingress {
            Ingress::Auto => self.mode.is_some_and(|mode| mode != Mode::Auto),
            Ingress::Xdp => true,
            Ingress::Tcx | Ingress::Clsact => false,
        }
    }

    /// Why packets cannot be answered.
    pub fn no_resets(&self, interface: &str, choice: &Choice) -> Failure {
        let kind = match self.ingress {
            Ingress::Auto | Ingress::Xdp => Kind::Interface,
            Ingress::Tcx | Ingress::Clsact => Kind::Usage,
        };
        let why = choice.why.as_deref().unwrap_or("as --hook says");
        Failure::new(
            kind,
            format!(
                "{interface}: enforce=reset takes XDP, and incoming packets would be seen by {} ({why}): give --hook xdp, or \
                 enforce=drop",
                choice.by.name()
            ),
        )
    }

    /// By what outgoing packets of an interface would be seen.
    pub fn outgoing(&self, index: u32) -> Option<Outgoing> {
        match self.egress {
            Egress::Off => None,
            Egress::Tcx => Some(Outgoing::Tcx),
            Egress::Clsact => Some(Outgoing::Clsact),
            Egress::Auto | Egress::On if tcx::exists(index) => Some(Outgoing::Tcx),
            Egress::Auto | Egress::On => Some(Outgoing::Clsact),
        }
    }

    /// Fails if a program beside which twheel's are to stand is at none of its hooks.
    fn check_order(
        &self,
        directory: Option<&Path>,
        interface: &str,
        choice: &Choice,
    ) -> Result<()> {
        let Some(order) = self.order.as_ref().filter(|it| it.anchor().is_some()) else {
            return Ok(());
        };
        let index = if_nametoindex(interface)?;
        let own = |hook| directory.and_then(|it| program(&it.join(link_name(hook, interface))));
        let mut seen = Vec::new();
        let (incoming, outgoing) = (choice.by, self.outgoing(index));
        match incoming {
            Incoming::Tcx => {
                let others = tcx::others(index, Way::In, own(Hook::Ingress), &self.names)?;
                seen.push(("TCX ingress", others));
            }
            Incoming::Clsact => {
                seen.push(("clsact ingress", clsact::others(interface, Way::In)?));
            }
            Incoming::Xdp(_) => {}
        }
        match outgoing {
            Some(Outgoing::Tcx) => {
                let others = tcx::others(index, Way::Out, own(Hook::Egress), &self.names)?;
                seen.push(("TCX egress", others));
            }
            Some(Outgoing::Clsact) => {
                seen.push(("clsact egress", clsact::others(interface, Way::Out)?));
            }
            None => {}
        }
        if seen.iter().any(|(_, others)| order.is_met(others)) {
            return Ok(());
        }
        let there = seen
            .iter()
            .map(|(hook, others)| format!("{hook}: {}", list(others)));
        let mut there: Vec<_> = there.collect();
        if matches!(incoming, Incoming::Xdp(_)) {
            there.push("XDP has no order".to_owned());
        }
        let unnamed = seen
            .iter()
            .flat_map(|(_, others)| others)
            .any(|it| it.name.is_none());
        let hint = match unnamed {
            true => " (names of programs take CAP_SYS_ADMIN at the start: give id:N)",
            false => "",
        };
        Err(Failure::new(
            Kind::Usage,
            format!(
                "--order {order}: there is no such program on {interface}; {}{hint}",
                there.join("; ")
            ),
        )
        .into())
    }
}

/// Chooses by the facts alone.
fn choose(hooks: &Hooks, facts: &Facts<'_>) -> Choice {
    let by = |by| Choice {
        by,
        why: None,
        falls_back: false,
        goes_on: false,
        hides_tags: facts.hides_tags && matches!(by, Incoming::Xdp(_)),
    };
    let tc = match facts.has_tcx {
        true => Incoming::Tcx,
        false => Incoming::Clsact,
    };
    let because = |why: String| Choice {
        why: Some(why),
        ..by(tc)
    };
    let interface = facts.interface;
    let mode = hooks.mode.filter(|mode| *mode != Mode::Auto);
    match (hooks.ingress, mode) {
        (Ingress::Tcx, _) => return by(tc),
        (Ingress::Clsact, _) => return by(Incoming::Clsact),
        (Ingress::Auto, None) => {}
        (Ingress::Auto | Ingress::Xdp, Some(mode)) => return by(Incoming::Xdp(mode)),
        (Ingress::Xdp, None) if interface.layer == Some(LinkLayer::Ip) => {
            return by(Incoming::Xdp(Mode::Generic));
        }
        (Ingress::Xdp, None) => return by(Incoming::Xdp(Mode::Auto)),
    }
    if facts.hides_tags {
        return because(HIDES_TAGS.to_owned());
    }
    if let Some(left) = facts.left {
        // If that is gone, it is attached anew, natively.
        let falls_back = matches!(left, Incoming::Xdp(_));
        return Choice {
            falls_back,
            goes_on: true,
            ..by(left)
        };
    }
    if interface.layer == Some(LinkLayer::Ip) {
        return because("packets have no Ethernet header".to_owned());
    }
    if !interface.xdp.is_empty() {
        return because(taken(interface, &hooks.names));
    }
    if let Some(above) = facts.above {
        return because(format!("{} above it has an XDP program", above.name));
    }
    if interface.native == Some(false) {
        return because("the driver has no native XDP".to_owned());
    }
    Choice {
        falls_back: true,
        ..by(Incoming::Xdp(Mode::Native))
    }
}

/// Who has XDP.
pub fn taken(interface: &Interface, names: &ProgramNames) -> String {
    let describe = |(mode, id): &(&str, u32)| format!("{}, {mode}", names.describe(*id));
    let all: Vec<_> = interface.xdp.iter().map(describe).collect();
    format!("XDP is taken: {}", all.join(", "))
}

/// By what an earlier run that has pinned its links sees incoming packets.
fn left(directory: &Path, interface: &str, index: u32) -> Option<Incoming> {
    let is_pinned = |hook| directory.join(link_name(hook, interface)).exists();
    if is_pinned(Hook::Xdp) {
        return Some(Incoming::Xdp(Mode::Native));
    }
    if is_pinned(Hook::Ingress) {
        return Some(Incoming::Tcx);
    }
    clsact::is_left(directory, interface, index, Way::In).then_some(Incoming::Clsact)
}

/// The id of the program of a link that is pinned.
pub fn program(pin: &Path) -> Option<u32> {
    let link = FdLink::from(PinnedLink::from_pin(pin).ok()?);
    Some(link.info().ok()?.program_id())
}

/// An interface above this one that has an XDP program: the kernel attaches none below it (`dev_xdp_attach`,
/// `net/core/dev.c`).
pub fn above<'a>(interface: &Interface, interfaces: &'a [Interface]) -> Option<&'a Interface> {
    let has_xdp = |it: &&Interface| it.is_above(interface) && !it.xdp.is_empty();
    interfaces.iter().find(has_xdp)
}

/// Whether a card takes VLAN tags out of frames before XDP, and a VLAN stands on it.
pub fn hides_tags(interface: &Interface, interfaces: &[Interface]) -> bool {
    let has_vlan = |it: &Interface| it.lower == Some(interface.index) && it.is_vlan();
    interfaces.iter().any(has_vlan) && interfaces::strips_vlan_tags(&interface.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NATIVE: Incoming = Incoming::Xdp(Mode::Native);

    fn hooks(ingress: Ingress, mode: Option<Mode>) -> Hooks {
        Hooks {
            ingress,
            mode,
            egress: Egress::Auto,
            order: None,
            resets: false,
            names: ProgramNames::default(),
        }
    }

    #[test]
    fn a_hook_is_chosen_by_what_the_interface_has() {
        let interface = |layer, native, xdp: &[(&'static str, u32)]| Interface {
            name: "eth0".to_owned(),
            layer: Some(layer),
            native,
            xdp: xdp.to_vec(),
            ..Interface::default()
        };
        use LinkLayer::{Ethernet, Ip};
        let able = interface(Ethernet, Some(true), &[]);
        let unable = interface(Ethernet, Some(false), &[]);
        let untold = interface(Ethernet, None, &[]);
        let taken = interface(Ethernet, Some(true), &[("native", 42)]);
        let tunnel = interface(Ip, Some(false), &[]);
        let free = |interface| Facts {
            interface,
            above: None,
            left: None,
            has_tcx: true,
            hides_tags: false,
        };
        let auto = hooks(Ingress::Auto, None);
        for (facts, by, why) in [
            (free(&able), NATIVE, None),
            (free(&untold), NATIVE, None),
            (free(&unable), Incoming::Tcx, Some("no native XDP")),
            (free(&taken), Incoming::Tcx, Some("taken: id 42, native")),
            (free(&tunnel), Incoming::Tcx, Some("no Ethernet header")),
            (
                Facts {
                    has_tcx: false,
                    ..free(&taken)
                },
                Incoming::Clsact,
                Some("taken"),
            ),
            (
                Facts {
                    above: Some(&taken),
                    ..free(&able)
                },
                Incoming::Tcx,
                Some("eth0 above it"),
            ),
            (
                Facts {
                    hides_tags: true,
                    left: Some(NATIVE),
                    ..free(&able)
                },
                Incoming::Tcx,
                Some("VLAN tags"),
            ),
            // What an earlier run has left goes on.
            (
                Facts {
                    left: Some(NATIVE),
                    ..free(&unable)
                },
                NATIVE,
                None,
            ),
            (
                Facts {
                    left: Some(Incoming::Tcx),
                    ..free(&able)
                },
                Incoming::Tcx,
                None,
            ),
        ] {
            let choice = choose(&auto, &facts);
            assert_eq!(choice.by, by, "{choice:?}");
            assert_eq!(choice.why.is_some(), why.is_some(), "{choice:?}");
            let said = choice.why.unwrap_or_default();
            assert!(said.contains(why.unwrap_or("")), "{said}");
        }
    }

    #[test]
    fn a_hook_that_was_asked_for_is_taken() {
        let interface = |layer| Interface {
            layer: Some(layer),
            native: Some(true),
            xdp: vec![("native", 42)],
            ..Interface::default()
        };
        let (card, tunnel) = (interface(LinkLayer::Ethernet), interface(LinkLayer::Ip));
        use Ingress::{Auto, Clsact, Tcx, Xdp};
        for (ingress, mode, interface, has_tcx, by) in [
            (Xdp, None, &card, true, Incoming::Xdp(Mode::Auto)),
            (
                Xdp,
                Some(Mode::Auto),
                &card,
                true,
                Incoming::Xdp(Mode::Auto),
            ),
            (Xdp, None, &tunnel, true, Incoming::Xdp(Mode::Generic)),
            (Xdp, Some(Mode::Native), &tunnel, true, NATIVE),
            (Auto, Some(Mode::Native), &card, true, NATIVE),
            (
                Auto,
                Some(Mode::Generic),
                &card,
                true,
                Incoming::Xdp(Mode::Generic),
            ),
            // No mode.
            (Auto, Some(Mode::Auto), &card, true, Incoming::Tcx),
            (Tcx, None, &card, true, Incoming::Tcx),
            (Tcx, None, &card, false, Incoming::Clsact),
            (Clsact, None, &card, true, Incoming::Clsact),
        ] {
            let facts = Facts {
                interface,
                above: None,
                left: None,
                has_tcx,
                hides_tags: false,
            };
            let choice = choose(&hooks(ingress, mode), &facts);
            assert_eq!(choice.by, by, "{ingress:?} {mode:?}");
            assert!(!choice.falls_back, "{choice:?}");
        }
    }
}
