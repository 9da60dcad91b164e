//! The programs for interfaces of other network namespaces.
//!
//! A program is told the number of its interface, and each network namespace counts its own
//! interfaces from 1. So an interface of another namespace gets a program of a few instructions, a
//! stub. It stores on its CPU what to add to the number ([`elsewhere`]) and then jumps to the data
//! plane's program. It jumps through a map of programs, in which a later run puts its own program,
//! so that no packet is missed.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use anyhow::{Context, Result};
use aya::{
    maps::MapData,
    programs::{SchedClassifier, Xdp},
};
use aya_obj::{
    generated::{bpf_attach_type, bpf_prog_type},
    programs::XdpAttachType,
};
use twheel_common::state::elsewhere;

use crate::{
    attach::ProgramSource,
    bpf::{self, Code, instruction},
    data_plane::{DataPlane, remove_pin, replace_pin},
    pins::{HOOK_PROGRAMS, Instance},
};

/// `XDP_PASS` and `TC_ACT_UNSPEC`: the packet passes if the data plane has no program, which can
/// only be during a start.
const XDP_PASS: i32 = 2;
const TC_ACT_UNSPEC: i32 = -1;
/// `BPF_F_XDP_HAS_FRAGS`, `include/uapi/linux/bpf.h`.
const HAS_FRAGS: u32 = 1 << 5;
/// The kernel's numbers of the helpers.
const MAP_LOOKUP_ELEM: i32 = 1;
const TAIL_CALL: i32 = 12;

/// An instance's maps of programs, and the map through which the data plane is told the namespace.
pub struct TailCalls {
    place: MapData,
    maps: Vec<OwnedFd>,
}

impl TailCalls {
    /// Of a data plane: from now on, packets meet its programs.
    ///
    /// # Errors
    ///
    /// A map cannot be made, pinned or written.
    pub fn open(plane: &mut DataPlane, instance: &Instance) -> Result<Self> {
        let maps = HOOK_PROGRAMS
            .iter()
            .map(|name| {
                let pin = instance.object(&map_name(name));
                let map = match bpf::open(&pin) {
                    Ok(map) => map,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        let map = bpf::make_program_array(&map_name(name))?;
                        bpf::pin(map.as_fd(), &pin)?;
                        map
                    }
                    Err(error) => return Err(error.into()),
                };
                let program = match *name {
                    "twheel_xdp" => plane.xdp(name)?.fd()?.try_clone()?,
                    _ => plane.classifier(name)?.fd()?.try_clone()?,
                };
                bpf::set_program(map.as_fd(), 0, program.as_fd())?;
                Ok(map)
            })
            .collect::<Result<_>>()
            .context("cannot create the maps for other network namespaces")?;
        Ok(Self {
            place: plane.open("PLACE")?,
            maps,
        })
    }

    /// Removes the pins of the maps, which are not needed if no other network namespace is watched.
    ///
    /// # Errors
    ///
    /// A pin cannot be removed.
    pub fn remove(instance: &Instance) -> Result<()> {
        for name in HOOK_PROGRAMS {
            remove_pin(&map_name(name), instance)?;
        }
        Ok(())
    }
}

/// The name of the map of programs.
fn map_name(program: &str) -> String {
    program.replacen("twheel", "next", 1)
}

/// The programs for the interfaces of one namespace.
pub struct Stubs {
    xdp: Xdp,
    ingress: SchedClassifier,
    egress: SchedClassifier,
}

impl Stubs {
    /// Loads and pins them. `namespace`: the namespace's number; `instance`: the instance's part
    /// for it.
    ///
    /// # Errors
    ///
    /// The kernel refuses a program.
    pub fn load(calls: &TailCalls, namespace: u32, instance: &Instance) -> Result<Self> {
        let place = calls.place.fd().as_fd().as_raw_fd();
        for (name, map) in HOOK_PROGRAMS.iter().zip(&calls.maps) {
            let (kind, attach, flags, verdict) = match *name {
                "twheel_xdp" => (
                    bpf_prog_type::BPF_PROG_TYPE_XDP,
                    bpf_attach_type::BPF_XDP as u32,
                    HAS_FRAGS,
                    XDP_PASS,
                ),
                _ => (bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, 0, 0, TC_ACT_UNSPEC),
            };
            let code = Code {
                kind,
                attach,
                flags,
                instructions: &code(place, map.as_raw_fd(), elsewhere(namespace), verdict),
            };
            let program = bpf::load(name, &code)
                .with_context(|| format!("the kernel refuses the stub that jumps to {name}"))?;
            replace_pin(name, instance, |path| Ok(bpf::pin(program.as_fd(), path)?))?;
        }
        Ok(Self {
            xdp: Xdp::from_pin(instance.object("twheel_xdp"), XdpAttachType::Interface)?,
            ingress: SchedClassifier::from_pin(instance.object("twheel_ingress"))?,
            egress: SchedClassifier::from_pin(instance.object("twheel_egress"))?,
        })
    }
}

impl ProgramSource for Stubs {
    fn demand(&mut self, _: &str, _: &Instance) -> Result<()> {
        Ok(())
    }

    fn xdp(&mut self, _: &str) -> Result<&mut Xdp> {
        Ok(&mut self.xdp)
    }

    fn classifier(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Ok(match name {
            "twheel_ingress" => &mut self.ingress,
            _ => &mut self.egress,
        })
    }
}

/// The instructions.
fn code(place: i32, programs: i32, added: u32, verdict: i32) -> [u64; 18] {
    [
        // r6 = context
        instruction(0xbf, 6, 1, 0, 0),
        // r0 = place[0]
        instruction(0x62, 10, 0, -4, 0),
        instruction(0x18, 1, 1, 0, place),
        0,
        instruction(0xbf, 2, 10, 0, 0),
        instruction(0x07, 2, 0, 0, -4),
        instruction(0x85, 0, 0, 0, MAP_LOOKUP_ELEM),
        instruction(0x15, 0, 0, 8, 0),
        // The second word of the pair: the number to add.
        instruction(0x62, 0, 0, 4, added as i32),
        instruction(0xbf, 7, 0, 0, 0),
        // Jump to the data plane's program, which does not return here.
        instruction(0xbf, 1, 6, 0, 0),
        instruction(0x18, 2, 1, 0, programs),
        0,
        instruction(0xb7, 3, 0, 0, 0),
        instruction(0x85, 0, 0, 0, TAIL_CALL),
        // There is no program: clear the number, as the next packet may be another interface's.
        instruction(0x62, 7, 0, 4, 0),
        instruction(0xb7, 0, 0, 0, verdict),
        instruction(0x95, 0, 0, 0, 0),
    ]
}
