//! What `twheel run` would refuse on its own account: pins, a port, a group, a way to see packets.

use anyhow::Result;

use super::{Finding, Wanted, with_interfaces};
use crate::{
    attach::{Egress, check_interface, has_tcx},
    clsact, data_plane,
    metrics::Listener,
    pins::Pins,
    privilege,
};

/// What a run with these options would refuse before it loads anything.
///
/// `kept`: what is pinned for its interfaces.
pub(super) fn findings(wanted: &Wanted, kept: Result<Option<Pins>>) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(instance(wanted, kept));
    let adds_filters = match wanted.egress {
        Egress::Off | Egress::Tcx => false,
        Egress::Clsact => true,
        Egress::Auto | Egress::On => !has_tcx("lo"),
    };
    if adds_filters {
        let filters = wanted.interfaces.iter();
        found.extend(filters.filter_map(|name| clsact_filter(name, wanted.egress)));
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
fn instance(wanted: &Wanted, kept: Result<Option<Pins>>) -> Option<Finding> {
    const NAME: &str = "instance";
    let result = || {
        let Some(pins) = kept? else {
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
        let detach = with_interfaces("detach", &wanted.interfaces);
        Some(
            Finding::fail(NAME, format!("{error:#}"))
                .remedy(format!("{detach} removes what is pinned")),
        )
    })
}

/// Whether an interface takes a clsact filter.
fn clsact_filter(interface: &str, egress: Egress) -> Option<Finding> {
    // That there is no such interface is said elsewhere.
    if check_interface(interface).is_err() {
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
