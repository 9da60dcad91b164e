//! Chooses the hook that sees an interface's packets, by the kind of interface and by what other
//! programs have attached there.

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

/// The hook for incoming packets, as the user chose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Ingress {
    /// Native XDP if the driver has it and no other program uses it, else as `tcx`; never generic XDP
    Auto,
    /// XDP, in the mode of `--mode`
    Xdp,
    /// TCX, or a clsact filter if the kernel has no TCX (before 6.6): after GRO, beside other programs
    Tcx,
    /// A clsact filter
    Clsact,
}

/// Where in the receive path XDP runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Native; generic if the driver has no XDP
    Auto,
    /// In the driver
    Native,
    /// In the network stack, after the driver
    Generic,
}

/// The hook for outgoing packets, as the user chose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Egress {
    /// TCX if the kernel has it (6.6), else a clsact filter; if neither works, only incoming packets are seen
    Auto,
    /// The same, but fail if neither works
    On,
    /// TCX, or fail
    Tcx,
    /// A clsact filter, or fail
    Clsact,
    /// See incoming packets only
    Off,
}

/// The hook that sees outgoing packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A TCX link.
    Tcx,
    /// A filter of a clsact qdisc.
    Clsact,
}

/// The user's choice of hooks.
#[derive(Clone, Debug)]
pub struct Hooks {
    /// The hook for incoming packets.
    pub ingress: Ingress,
    /// Where XDP runs; `None` if the user did not choose.
    pub mode: Option<Mode>,
    /// The hook for outgoing packets.
    pub egress: Egress,
    /// The position of twheel's programs among those of others; `None` if the user did not choose.
    pub order: Option<Order>,
    /// Packets are answered with a RST.
    pub resets: bool,
    /// VLAN tags are part of a flow's key.
    pub vlans: bool,
    /// The programs that were loaded when the run began.
    pub names: ProgramNames,
}

/// The hook that sees incoming packets.
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
    /// Its name in messages.
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

/// The hook that was chosen for an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The hook.
    pub by: Incoming,
    /// Why native XDP, the first choice, was not used.
    pub why: Option<String>,
    /// If XDP is not available, use TCX, or a clsact filter.
    pub falls_back: bool,
    /// An earlier run's attachment stays in use.
    pub goes_on: bool,
    /// The user asked for XDP, which does not see the VLAN tags that the packets have.
    pub hides_tags: bool,
}

/// Why XDP does not see VLAN tags.
pub const HIDES_TAGS: &str =
    "the network card removes VLAN tags from frames, so XDP does not see them";

/// How to make the tags visible.
pub fn shows_tags(interface: &str) -> String {
    format!("ethtool -K {interface} rxvlan off")
}

impl Choice {
    /// The program that sees incoming packets with this hook.
    pub fn program(&self) -> &'static str {
        match self.by {
            Incoming::Xdp(_) => "twheel_xdp",
            Incoming::Tcx | Incoming::Clsact => "twheel_ingress",
        }
    }
}

/// What the choice depends on.
struct Facts<'a> {
    interface: &'a Interface,
    /// An interface above this one that has an XDP program.
    above: Option<&'a Interface>,
    /// The hook by which an earlier run sees its packets.
    left: Option<Incoming>,
    has_tcx: bool,
    /// Packets have VLAN tags, but XDP does not see them.
    hides_tags: bool,
}

impl Hooks {
    /// Chooses the hook for an interface's incoming packets. `directory`: where an earlier run's
    /// BPF links may be pinned.
    ///
    /// # Errors
    ///
    /// The interface cannot be used: see [`interfaces::link_layer`]. Or what the user asked for is
    /// not possible there: a RST without XDP, a position beside a program that is not attached.
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
            hides_tags: self.hides_tags(&found, known),
            interface: &found,
        };
        let choice = choose(self, &facts);
        if self.resets && !matches!(choice.by, Incoming::Xdp(_)) {
            return Err(self.no_resets(interface, &choice).into());
        }
        self.check_order(directory, interface, &choice)?;
        Ok(choice)
    }

    /// Whether VLAN tags are part of the key, but the card removes them from frames before XDP sees
    /// them.
    pub fn hides_tags(&self, interface: &Interface, known: &Known) -> bool {
        self.vlans && known.is_tagged(interface) && interfaces::strips_vlan_tags(&interface.name)
    }

    /// Whether the user asked for XDP, by its name or by a mode.
    pub fn takes_xdp(&self) -> bool {
        match self.ingress {
            Ingress::Auto => self.mode.is_some_and(|mode| mode != Mode::Auto),
            Ingress::Xdp => true,
            Ingress::Tcx | Ingress::Clsact => false,
        }
    }

    /// The failure that says why packets cannot be answered.
    pub fn no_resets(&self, interface: &str, choice: &Choice) -> Failure {
        let kind = match self.ingress {
            Ingress::Auto | Ingress::Xdp => Kind::Interface,
            Ingress::Tcx | Ingress::Clsact => Kind::Usage,
        };
        let why = choice.why.as_deref().unwrap_or("as --hook requests");
        Failure::new(
            kind,
            format!(
                "{interface}: enforce=reset needs XDP, but incoming packets would be seen by {} \
                 ({why}): give --hook xdp, or use enforce=drop",
                choice.by.name()
            ),
        )
    }

    /// The hook for outgoing packets of an interface.
    pub fn outgoing(&self, index: u32) -> Option<Outgoing> {
        match self.egress {
            Egress::Off => None,
            Egress::Tcx => Some(Outgoing::Tcx),
            Egress::Clsact => Some(Outgoing::Clsact),
            Egress::Auto | Egress::On if tcx::exists(index) => Some(Outgoing::Tcx),
            Egress::Auto | Egress::On => Some(Outgoing::Clsact),
        }
    }

    /// Fails if the program that `--order` names is on none of twheel's hooks.
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
            true => {
                " (without CAP_SYS_ADMIN at the start, twheel cannot read the names of programs: \
                 give id:N)"
            }
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

/// Chooses from the facts, without asking the kernel.
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
        // If that BPF link is gone, the program is attached anew, natively.
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

/// Says which program has XDP.
pub fn taken(interface: &Interface, names: &ProgramNames) -> String {
    let describe = |(mode, id): &(&str, u32)| format!("{}, {mode}", names.describe(*id));
    let all: Vec<_> = interface.xdp.iter().map(describe).collect();
    format!("XDP is taken: {}", all.join(", "))
}

/// The hook of an earlier run that left its pins.
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

/// The id of the program of a pinned BPF link.
pub fn program(pin: &Path) -> Option<u32> {
    let link = FdLink::from(PinnedLink::from_pin(pin).ok()?);
    Some(link.info().ok()?.program_id())
}

/// An interface above this one that has an XDP program. The kernel then attaches no XDP program
/// below it (`dev_xdp_attach`, `net/core/dev.c`).
pub fn above<'a>(interface: &Interface, interfaces: &'a [Interface]) -> Option<&'a Interface> {
    let has_xdp = |it: &&Interface| it.is_above(interface) && !it.xdp.is_empty();
    interfaces.iter().find(has_xdp)
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
            vlans: true,
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
            // What an earlier run left stays in use.
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
            // `Auto` names no particular mode.
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
