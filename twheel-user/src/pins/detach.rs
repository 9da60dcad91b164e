//! Detaches interfaces, whichever run attached them.

use anyhow::Result;

use super::{
    access::check_ours,
    find::{all_interfaces_of, holding, there},
    instance::Instance,
    parts::parts,
};
use crate::{clsact, interfaces, patterns::Asked};

/// Detaches an interface, or those that a pattern stands for: removes its BPF links, the whole
/// instance if no BPF link is left, and filters whose pins were removed by hand. Works for pins of
/// any version. Returns the interfaces that stay attached, in the same instance; [`None`] if there
/// was nothing to detach.
///
/// # Errors
///
/// [`Kind::Pins`](crate::failure::Kind::Pins): a running twheel uses the interface.
pub fn detach(interface: &Asked) -> Result<Option<Vec<String>>> {
    let (mut found, mut stay) = (false, Vec::new());
    for directory in holding(interface.text())? {
        found = true;
        check_ours(&directory)?;
        let instance = Instance::lock(directory)?;
        let held = all_interfaces_of(instance.path())?;
        let is_going = |it: &String| interface.matches(it) || interface.matches(there(it));
        let (going, staying): (Vec<_>, Vec<_>) = held.into_iter().partition(is_going);
        if staying.is_empty() {
            instance.remove()?;
            continue;
        }
        stay.extend(staying);
        let (elsewhere, own): (Vec<_>, Vec<_>) = going.iter().partition(|it| it.contains('/'));
        for interface in own {
            instance.detach_from(interface)?;
        }
        for part in parts(instance.path())? {
            let its = instance.at(part.path.clone());
            for (namespace, interface) in elsewhere.iter().filter_map(|it| it.rsplit_once('/')) {
                if namespace == part.namespace {
                    part.within(|| its.detach_from(interface), || its.remove_pins(interface))?;
                }
            }
        }
    }
    if !interface.is_pattern() {
        found |= clsact::remove_stray(interface.text())?;
        return Ok(found.then_some(stay));
    }
    for it in interfaces::all()? {
        if interface.matches(&it.name) {
            found |= clsact::remove_stray(&it.name)?;
        }
    }
    Ok(found.then_some(stay))
}
