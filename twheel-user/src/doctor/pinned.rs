//! What is pinned, by which instances, and whether their interfaces still exist.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
};

use anyhow::Result;
use aya::programs::ProgramInfo;
use nix::net::if_::if_nametoindex;

use super::finding::{Finding, with_interfaces};
use crate::{
    hooks, netns,
    pins::{self, FoundInstance},
};

pub(super) fn pinned(instances: Result<Vec<FoundInstance>>) -> Vec<Finding> {
    match instances.and_then(|instances| Ok((instances, pins::namespace()?))) {
        Ok((instances, _)) if instances.is_empty() => vec![Finding::ok("pins", "none")],
        Ok((instances, here)) => {
            let exists = |name: &str| match name.rsplit_once('/') {
                // For interfaces of other namespaces, checks whether the namespace exists.
                Some((namespace, _)) => Path::new(netns::DIRECTORY).join(namespace).exists(),
                None => if_nametoindex(name).is_ok(),
            };
            let alive = namespaces();
            let describe = |it| instance(it, here, exists, &alive);
            instances.iter().map(describe).collect()
        }
        Err(error) => {
            vec![Finding::warn("pins", format!("{error:#}")).remedy("run `twheel doctor` as root")]
        }
    }
}

/// The ids of the programs that an instance attaches to interfaces.
pub(super) fn programs_of(instance: &Path) -> Vec<u32> {
    let seeing = ["twheel_xdp", "twheel_ingress", "twheel_egress"];
    let programs = seeing.map(|name| ProgramInfo::from_pin(instance.join(name)));
    // If a run was killed while it attached, a BPF link may have another program than the pinned
    // one.
    let links = pins::entries(instance).unwrap_or_default();
    let of_links = links.iter().filter_map(|it| hooks::program(it));
    let programs = programs.iter().flatten().map(ProgramInfo::id);
    programs.chain(of_links).collect()
}

/// The network namespaces that this user can see: those of processes, and those with a name.
fn namespaces() -> HashSet<u64> {
    let list = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
    let processes = list("/proc").map(|process| process.path().join("ns/net"));
    let named = list(netns::DIRECTORY).map(|name| name.path());
    processes
        .chain(named)
        .filter_map(|path| Some(fs::metadata(path).ok()?.ino()))
        .collect()
}

/// The `twheel run` for these interfaces. Interfaces of other network namespaces, as `blue/eth0`,
/// take two options.
fn run_for(interfaces: &[String]) -> String {
    let (mut namespaces, mut names) = (BTreeSet::new(), BTreeSet::new());
    for interface in interfaces {
        let (namespace, name) = interface.rsplit_once('/').unzip();
        names.insert(name.unwrap_or(interface).to_owned());
        namespaces.insert(namespace);
    }
    let names: Vec<_> = names.into_iter().collect();
    let given: Vec<_> = namespaces.iter().flatten().copied().collect();
    let command = match (given.is_empty(), namespaces.contains(&None)) {
        (true, _) => "run".to_owned(),
        (false, true) => "run --netns all".to_owned(),
        (false, false) => format!("run --netns {}", given.join(",")),
    };
    with_interfaces(&command, &names)
}

/// `here`: this network namespace, in which `exists` looks up interfaces; `alive`: the namespaces
/// that this user sees.
pub(super) fn instance(
    it: &FoundInstance,
    here: u64,
    exists: impl Fn(&str) -> bool,
    alive: &HashSet<u64>,
) -> Finding {
    let path = it.path.display();
    let names = it.interfaces.join(", ");
    let options = |command: &str| with_interfaces(command, &it.interfaces);
    let remove = format!("rm -r {path}");
    if it.namespace != Some(here) {
        let there = it.namespace.is_some_and(|inode| alive.contains(&inode));
        return match (it.held, there) {
            (true, _) => Finding::ok(
                "pins",
                format!("{path}: in use in another network namespace"),
            ),
            (false, true) => Finding::warn(
                "pins",
                format!("{path}: kept in another network namespace, where its flows do not expire"),
            )
            .remedy(format!(
                "in that network namespace, {} adopts it, {} removes it",
                run_for(&it.interfaces),
                options("detach")
            )),
            (false, false) => Finding::warn(
                "pins",
                format!(
                    "{path}: this user cannot see its network namespace, which may no longer exist"
                ),
            )
            .remedy(format!("if that namespace no longer exists: {remove}")),
        };
    }
    let gone = it.interfaces.iter().any(|name| !exists(name));
    match (it.held, it.current, it.interfaces.is_empty()) {
        (true, true, _) => Finding::ok("pins", format!("{path}: twheel is running on {names}")),
        (true, false, _) => Finding::warn(
            "pins",
            format!("{path}: another version of twheel is running on {names}"),
        )
        .remedy("stop it before you start this version there"),
        (false, _, true) => Finding::warn(
            "pins",
            format!("{path}: attached to no interface: a `twheel run` was killed"),
        )
        .remedy(remove),
        (false, false, false) => Finding::fail(
            "pins",
            format!("{path}: left on {names} by another version of twheel"),
        )
        .remedy(options("detach")),
        (false, true, false) if gone => Finding::warn(
            "pins",
            format!("{path}: for {names}, not all of which exist any more"),
        )
        .remedy(options("detach")),
        (false, true, false) => Finding::warn(
            "pins",
            format!(
                "{path}: flows on {names} are tracked, but do not expire, since no twheel runs"
            ),
        )
        .remedy(format!(
            "{} adopts them, {} removes them",
            run_for(&it.interfaces),
            options("detach")
        )),
    }
}
