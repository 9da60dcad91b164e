//! Loads the programs of a run.

use anyhow::Result;
use nix::net::if_::if_nametoindex;

use super::Setup;
use crate::{
    data_plane::{DataPlane, INCOMING, Load, OBJECT},
    interfaces::Known,
    output::several,
    pins::Instance,
    progress, stepping,
};

/// Loads the programs that the interfaces need, and a flow table.
pub(super) fn load(setup: &Setup, instance: &Instance, room: u32) -> Result<DataPlane> {
    let (known, mut needed) = (Known::read()?, Vec::new());
    for interface in setup.selection.names() {
        if if_nametoindex(interface).is_ok() {
            let choice = setup
                .hooks
                .choose(Some(instance.path()), interface, &known)?;
            needed.push(choice.program());
        }
    }
    let mut later = INCOMING.to_vec();
    // With a pattern every program is loaded now, so that a new interface can be attached at once.
    later.retain(|program| !setup.selection.has_pattern() && !needed.contains(program));
    let making = format!(
        "loading the programs and a table for {}",
        several(setup.config.0.max_flows.into(), "flow")
    );
    let plane = progress::told(&making, || {
        let load = Load {
            log_level: setup.log_level as u8,
            room,
            stepping: stepping::find(setup.stepping)?.way,
            later: &later,
            ..Load::new(OBJECT, setup.config, setup.clock)
        };
        DataPlane::load(&load, instance)
    })?;
    for (program, instructions) in plane.verified()? {
        log::debug!("{program}: {instructions} instructions verified");
    }
    Ok(plane)
}
