//! What `twheel run` would refuse on its own account: pins, a port, a group, a way to see packets.

use super::{Finding, Wanted};
use crate::{
    attach::{Egress, check_interface, has_tcx},
    clsact, data_plane,
    metrics::Listener,
    pins::Instance,
    privilege,
};

/// What a run with these options would refuse before it loads anything.
pub(super) fn findings(wanted: &Wanted) -> Vec<Finding> {
    let mut found = Vec::new();
    if !wanted.interfaces.is_empty() {
        found.extend(instance(wanted));
    }
    for name in &wanted.interfaces {
        found.extend(clsact_filter(name, wanted.egress));
    }
    if let Some(address) = wanted.metrics {
        found.push(match Listener::bind(address) {
            Ok(_) => Finding::ok("metrics", format!("{address} is free")),
            Err(error) => Finding::fail("metrics", error.to_string())
                .remedy("choose another address for --metrics"),
        });
    }
    if let Some(name) = &wanted.group {
        found.push(match privilege::may_join(name) {
            Ok(()) => Finding::ok("group", name),
            Err(error) => {
                Finding::fail("group", error.to_string()).remedy("choose another group for --group")
            }
        });
    }
    found
}

/// Whether a run may have the instance of its interfaces, and can go on with what is pinned there.
fn instance(wanted: &Wanted) -> Option<Finding> {
    const NAME: &str = "instance";
    let result = || {
        let Some(pins) = Instance::find(&wanted.interfaces)? else {
            return Ok(None);
        };
        if pins.has_loader()? {
            return Ok(Some(
                Finding::fail(NAME, "twheel is running there: a second run is refused")
                    .remedy("stop the first one before you start another"),
            ));
        }
        data_plane::check_adoptable(&pins, &wanted.config.0, wanted.clock)?;
        Ok(None)
    };
    result().unwrap_or_else(|error: anyhow::Error| {
        let options = wanted.interfaces.iter().map(|it| format!(" --iface {it}"));
        let remedy = format!(
            "`twheel detach{}` removes what is pinned",
            options.collect::<String>()
        );
        Some(Finding::fail(NAME, format!("{error:#}")).remedy(remedy))
    })
}

/// Whether an interface takes a clsact filter, where that is what a run would add.
fn clsact_filter(interface: &str, egress: Egress) -> Option<Finding> {
    let takes = match egress {
        Egress::Off | Egress::Tcx => false,
        Egress::Clsact => true,
        Egress::Auto | Egress::On => !has_tcx("lo"),
    };
    // That there is no such interface is said elsewhere.
    if !takes || check_interface(interface).is_err() {
        return None;
    }
    let error = clsact::check(interface).err()?;
    let (what, remedy) = (
        format!("{error:#}"),
        "remove that qdisc, or give --egress off",
    );
    let finding = match egress {
        Egress::Auto => Finding::warn(
            "egress",
            format!("only incoming packets will be seen: {what}"),
        ),
        _ => Finding::fail("egress", what),
    };
    Some(finding.remedy(remedy).on(interface))
}
