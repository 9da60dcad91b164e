//! What `twheel run` itself would refuse: pins, a port, a group, a hook.

use anyhow::Result;
use nix::net::if_::if_nametoindex;

use super::finding::{Finding, Intended, with_interfaces};
use crate::{
    attach::check_interface,
    clsact, data_plane,
    hooks::{Choice, Egress, HIDES_TAGS, Incoming, Outgoing, shows_tags},
    interfaces::Known,
    metrics::Listener,
    pins::Pins,
    privilege,
    tc::Way,
};

/// Checks what a run with these options would refuse before it loads anything.
///
/// `kept`: what is pinned for its interfaces.
pub(super) fn findings(intended: &Intended, kept: Result<Option<Pins>>) -> Vec<Finding> {
    let mut found = Vec::new();
    let directory = kept.as_ref().ok().and_then(Option::as_ref);
    let directory = directory.map(|pins| pins.path().to_owned());
    let runs = |pins: &Pins| pins.is_running().unwrap_or(false);
    let is_running = kept.as_ref().is_ok_and(|it| it.as_ref().is_some_and(runs));
    found.extend(instance(intended, kept));
    for name in &intended.interfaces {
        // Another check reports that this interface cannot be used.
        if check_interface(name).is_err() {
            continue;
        }
        let choice = Known::read()
            .and_then(|known| intended.hooks.choose(directory.as_deref(), name, &known));
        let by = choice.as_ref().ok().map(|choice| choice.by);
        found.push(hook(name, choice, is_running));
        if by == Some(Incoming::Clsact) {
            found.extend(clsact_filter(name, Way::In, intended));
        }
        let index = if_nametoindex(name.as_str()).unwrap_or_default();
        if intended.hooks.outgoing(index) == Some(Outgoing::Clsact) {
            found.extend(clsact_filter(name, Way::Out, intended));
        }
    }
    if let Some(address) = intended.metrics {
        found.push(match Listener::bind(address) {
            Ok(_) => Finding::ok("metrics", format!("{address} is free")),
            Err(error) => Finding::fail("metrics", error.to_string())
                .remedy("choose another address for --metrics"),
        });
    }
    if let Some(name) = &intended.group {
        found.push(match privilege::may_join(name) {
            Ok(()) => Finding::ok("group", name),
            Err(error) => {
                Finding::fail("group", error.to_string()).remedy("choose another group for --group")
            }
        });
    }
    found
}

/// Whether a run may take the instance of its interfaces, and can adopt what is pinned there.
fn instance(intended: &Intended, kept: Result<Option<Pins>>) -> Option<Finding> {
    const NAME: &str = "instance";
    let result = || {
        let Some(pins) = kept? else {
            return Ok(None);
        };
        if pins.is_running()? {
            return Ok(Some(
                Finding::fail(
                    NAME,
                    "twheel is already running there: a second run would be refused",
                )
                .remedy("stop the first one before you start another"),
            ));
        }
        data_plane::check_adoptable(&pins, &intended.config.0, intended.clock)?;
        Ok(None)
    };
    result().unwrap_or_else(|error: anyhow::Error| {
        let detach = with_interfaces("detach", &intended.interfaces);
        Some(
            Finding::fail(NAME, format!("{error:#}"))
                .remedy(format!("remove the pins with {detach}")),
        )
    })
}

/// The hook that would see an interface's incoming packets, and why. `is_running`: a twheel runs on
/// the interface.
fn hook(interface: &str, choice: Result<Choice>, is_running: bool) -> Finding {
    const NAME: &str = "hook";
    let finding = match choice {
        Err(error) => Finding::fail(NAME, format!("{error:#}"))
            .remedy("change or remove the options that it names"),
        Ok(choice) if choice.hides_tags => {
            Finding::warn(NAME, format!("{}: {HIDES_TAGS}", choice.by.name()))
                .remedy(shows_tags(interface))
        }
        Ok(choice) => {
            let by = match (choice.by, choice.goes_on) {
                // Native or generic.
                (Incoming::Xdp(_), true) => "XDP",
                (by, _) => by.name(),
            };
            let why = match (&choice.why, choice.goes_on) {
                (Some(why), _) => format!(": {why}"),
                (None, true) if is_running => ": the twheel that runs there uses it".to_owned(),
                (None, true) => ": an earlier run left its program attached".to_owned(),
                (None, false) => String::new(),
            };
            Finding::ok(NAME, format!("{by} would see incoming packets{why}"))
        }
    };
    finding.on(interface)
}

/// Whether an interface takes a clsact filter.
fn clsact_filter(interface: &str, way: Way, intended: &Intended) -> Option<Finding> {
    let error = clsact::check(interface, way).err()?;
    let what = format!("{error:#}");
    let (name, remedy) = match way {
        Way::In => ("hook", "remove that qdisc, or give --hook xdp"),
        Way::Out => ("egress", "remove that qdisc, or give --egress off"),
    };
    let finding = match (way, intended.hooks.egress) {
        (Way::Out, Egress::Auto) => {
            Finding::warn(name, format!("only incoming packets will be seen: {what}"))
        }
        _ => Finding::fail(name, what),
    };
    Some(finding.remedy(remedy).on(interface))
}
