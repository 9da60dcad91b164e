//! Which instances exist, and which one holds an interface.

use std::{
    collections::{HashMap, HashSet},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::net::if_::{if_indextoname, if_nametoindex};

use super::{
    access::is_held,
    parts::parts,
    path::{entries, escape, in_the_way, name, namespace, root, unescape, version},
};
use crate::{
    bpf,
    failure::{Kind, exit_code},
    patterns::Selection,
};

/// An instance that was found, of any version and network namespace.
#[derive(Clone, Debug)]
pub struct FoundInstance {
    /// Its directory.
    pub path: PathBuf,
    /// Its maps have the layout that this version reads.
    pub current: bool,
    /// Inode of its network namespace; `None` if the directory's name is not one that twheel gives.
    pub namespace: Option<u64>,
    /// The interfaces that its BPF links are attached to.
    pub interfaces: Vec<String>,
    /// A running twheel uses it.
    pub held: bool,
}

impl FoundInstance {
    /// The same interfaces by the names that they have now, if they are in this network namespace.
    pub fn present_interfaces(self) -> Vec<String> {
        match self.namespace.is_some() && self.namespace == namespace().ok() {
            true => present(&self.path, self.interfaces),
            false => self.interfaces,
        }
    }
}

/// All instances that exist.
///
/// # Errors
///
/// A directory cannot be read.
pub fn found() -> Result<Vec<FoundInstance>> {
    let mut found = Vec::new();
    for directory in entries(&root())? {
        for path in entries(&directory)? {
            let name = name(&path);
            let Some(held) = is_held(&path)? else {
                continue;
            };
            found.push(FoundInstance {
                current: directory == version(),
                namespace: name
                    .split_once('-')
                    .and_then(|(inode, _)| inode.parse().ok()),
                interfaces: all_interfaces_of(&path)?,
                held,
                path,
            });
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

/// The directory of the instance for these interfaces.
pub(super) fn choose(interfaces: &Selection) -> Result<PathBuf> {
    let mut found = Vec::new();
    for directory in everywhere()? {
        let mut held = interfaces_of(&directory)?.into_iter();
        let held = held.find(|it| interfaces.matches(it));
        let Some(held) = held.or(named_after(&directory, interfaces)?) else {
            continue;
        };
        if directory.parent() != Some(&version()) {
            return in_the_way(format!(
                "another version of twheel left pins for {held} at {}: remove them with \
                 `twheel detach --iface {}`",
                directory.display(),
                quoted(&held)
            ));
        }
        found.push(directory);
    }
    let path = match found.as_slice() {
        [] => {
            let given = interfaces.texts();
            let first = given.first().context("no interface")?;
            version().join(format!("{}-{}", namespace()?, escape(first)))
        }
        [one] => one.clone(),
        [one, two, ..] => {
            return in_the_way(format!(
                "the interfaces belong to two instances, {} and {}: remove one with \
                 `twheel detach`",
                one.display(),
                two.display()
            ));
        }
    };
    for held in interfaces_of(&path)? {
        if !interfaces.matches(&held) {
            return in_the_way(format!(
                "the instance at {} also has {held}: also give --iface {held}, or run \
                 `twheel detach --iface {held}`",
                path.display()
            ));
        }
    }
    Ok(path)
}

/// The instances, of any version, that match: those that hold this interface of this network
/// namespace, or one that the pattern stands for; those named after the pattern; and those whose
/// run died before it attached to the interface. If there are instances named after the pattern,
/// only those. If nothing in this network namespace matches, those that hold an interface of this
/// name in another network namespace.
pub(crate) fn holding(interface: &str) -> Result<Vec<PathBuf>> {
    let asked = Selection::new(&[interface.to_owned()], &[])?;
    let (mut named, mut found, mut elsewhere) = (Vec::new(), Vec::new(), Vec::new());
    for directory in everywhere()? {
        let held = all_interfaces_of(&directory)?;
        let own = |it: &&String| !it.contains('/') || interface.contains('/');
        let holds = held.iter().filter(own).any(|it| asked.matches(it));
        if held.iter().any(|it| asked.matches(there(it))) {
            elsewhere.push(directory.clone());
        }
        if named_after(&directory, &asked)?.is_some() && (asked.has_pattern() || held.is_empty()) {
            named.push(directory);
        } else if holds {
            found.push(directory);
        }
    }
    if asked.has_pattern() && !named.is_empty() {
        return Ok(named);
    }
    found.append(&mut named);
    match found.is_empty() {
        true => Ok(elsewhere),
        false => Ok(found),
    }
}

/// An instance of this network namespace that holds an interface of this name under an earlier one,
/// which the interface had when it was attached; and that name.
pub(crate) fn renamed(interface: &str) -> Result<Option<(PathBuf, String)>> {
    let Ok(index) = if_nametoindex(interface) else {
        return Ok(None);
    };
    for instance in all_here(&version())? {
        for entry in entries(&instance)? {
            let name = name(&entry);
            if let Some((_, earlier)) = name.split_once('@')
                && index_of(&entry) == Some(index)
            {
                return Ok(Some((instance, unescape(earlier))));
            }
        }
    }
    Ok(None)
}

/// The names that the interfaces of an instance of this network namespace have now. Pins keep those
/// that they had when they were attached.
pub(super) fn present(instance: &Path, interfaces: Vec<String>) -> Vec<String> {
    let mut indexes = HashMap::new();
    for pin in entries(instance).unwrap_or_default() {
        if let Some((_, earlier)) = name(&pin).split_once('@') {
            let index = indexes.entry(unescape(earlier)).or_insert(None);
            *index = index.or_else(|| index_of(&pin));
        }
    }
    let called = |earlier: String| {
        let index = indexes.get(&earlier).copied().flatten();
        let called = index.and_then(|index| if_indextoname(index).ok()?.into_string().ok());
        called.unwrap_or(earlier)
    };
    interfaces.into_iter().map(called).collect()
}

/// The index of the interface that a BPF link is attached to, or that the note of a filter names.
/// `None`: the pin is none of these, or may not be opened.
fn index_of(pin: &Path) -> Option<u32> {
    let name = name(pin);
    let (what, _) = name.split_once('@')?;
    if let Some((_, index)) = what.split_once('-') {
        return index.parse().ok();
    }
    let link = bpf::open(pin).ok()?;
    bpf::interface_of(link.as_fd()).ok()
}

/// An interface's name within its network namespace: `eth0` of `blue/eth0`.
pub(super) fn there(interface: &str) -> &str {
    interface.rsplit('/').next().unwrap_or(interface)
}

/// The instances of any version in this network namespace.
fn everywhere() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for version in entries(&root())? {
        found.extend(all_here(&version)?);
    }
    Ok(found)
}

/// The name or pattern that an instance is named after, if it is selected. The name of an interface
/// counts only if the instance holds no interface.
fn named_after(directory: &Path, interfaces: &Selection) -> Result<Option<String>> {
    let after = first_of(directory).filter(|first| interfaces.texts().contains(first));
    let Some(after) = after else {
        return Ok(None);
    };
    let is_pattern = interfaces.patterns().any(|it| it.text() == after);
    let names_it = is_pattern || interfaces_of(directory)?.is_empty();
    Ok(names_it.then_some(after))
}

/// Quoted for a shell.
pub(super) fn quoted(interface: &str) -> String {
    match interface.contains(['*', '?', '[']) {
        true => format!("'{interface}'"),
        false => interface.to_owned(),
    }
}

/// The entries of a directory that are instances in this network namespace.
pub(crate) fn all_here(directory: &Path) -> Result<Vec<PathBuf>> {
    let prefix = format!("{}-", namespace()?);
    let mut found = entries(directory)?;
    found.retain(|instance| name(instance).starts_with(&prefix));
    Ok(found)
}

/// The interface or pattern that an instance is named after.
pub(crate) fn first_of(instance: &Path) -> Option<String> {
    let name = name(instance);
    name.split_once('-').map(|(_, first)| unescape(first))
}

/// The interfaces that an instance's BPF links are attached to, each once, by name.
pub(super) fn interfaces_of(instance: &Path) -> Result<Vec<String>> {
    let entries = match entries(instance) {
        // A user who may not read the directory has only the instance's name to go by.
        Err(error) if exit_code(&error) == Kind::Permission as u8 => {
            return Ok(first_of(instance).into_iter().collect());
        }
        entries => entries?,
    };
    let (mut interfaces, mut seen) = (Vec::new(), HashSet::new());
    for entry in entries {
        let name = name(&entry);
        if let Some((_, interface)) = name.split_once('@')
            && seen.insert(interface.to_owned())
        {
            interfaces.push(unescape(interface));
        }
    }
    // A directory has no order.
    interfaces.sort();
    Ok(interfaces)
}

/// The same, with the interfaces of other network namespaces as `blue/eth0`.
pub(super) fn all_interfaces_of(instance: &Path) -> Result<Vec<String>> {
    let mut interfaces = interfaces_of(instance)?;
    for part in parts(instance).unwrap_or_default() {
        let there = interfaces_of(&part.path)?.into_iter();
        interfaces.extend(there.map(|interface| format!("{}/{interface}", part.namespace)));
    }
    Ok(interfaces)
}
