//! How directories and pins are named, and how they are listed.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use twheel_common::config::LAYOUT;

use crate::{
    bpf,
    failure::{Failure, Kind},
    netns,
};

/// The directory of all instances, of any layout.
pub(super) fn root() -> PathBuf {
    Path::new(bpf::BPFFS).join("twheel")
}

/// The directory of all instances of this layout.
pub(super) fn version() -> PathBuf {
    root().join(format!("v{LAYOUT}"))
}

/// The hook of a BPF link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP: incoming packets.
    Xdp,
    /// TCX: incoming packets.
    Ingress,
    /// TCX: outgoing packets.
    Egress,
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// The entries of a directory; none if it does not exist.
pub(crate) fn entries(path: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", path.display());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => check_real(path, &found.with_context(context)?)?,
    }
    match fs::read_dir(path) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.with_context(context)?.path()))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(refused(error.into(), path)),
    }
}

pub(crate) fn name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// An instance's name for what outlives its network namespace's inode, such as its history: the first
/// interface, and the namespace's [lasting name](netns::lasting_name), as `eth0@host`.
pub fn lasting_name(instance: &Path) -> String {
    let name = name(instance);
    let (inode, first) = name.split_once('-').unwrap_or(("", &name));
    let namespace = match inode.parse() {
        Ok(inode) => netns::lasting_name(inode),
        Err(_) => inode.to_owned(),
    };
    format!("{first}@{namespace}")
}

pub(crate) fn link_name(hook: Hook, interface: &str) -> String {
    format!("{}@{}", hook.name(), escape(interface))
}

/// Characters that names of interfaces and patterns may have but names of pins do not, and their
/// replacements. bpffs reserves the dot, which names of VLAN interfaces have; and a shell would
/// expand a pattern's characters.
const ESCAPED: [(char, &str); 6] = [
    ('.', "%2E"),
    ('@', "%40"),
    ('*', "%2A"),
    ('?', "%3F"),
    ('[', "%5B"),
    (']', "%5D"),
];

pub(crate) fn escape(interface: &str) -> String {
    let percent = interface.replace('%', "%25");
    let escape = |name: String, (it, escaped): &(char, &str)| name.replace(*it, escaped);
    ESCAPED.iter().fold(percent, escape)
}

pub(crate) fn unescape(name: &str) -> String {
    let unescape = |name: String, (it, escaped): &(char, &str)| {
        name.replace(escaped, it.encode_utf8(&mut [0; 4]))
    };
    let unescaped = ESCAPED.iter().fold(name.to_owned(), unescape);
    unescaped.replace("%25", "%")
}

/// The inode of this network namespace. It is part of an instance's name because interfaces in
/// other namespaces may have the same names.
pub fn namespace() -> Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net")
        .context("cannot determine the current network namespace")?
        .ino())
}

/// Explains why a pin cannot be opened.
pub(crate) fn refused(error: anyhow::Error, path: &Path) -> anyhow::Error {
    let is_refusal = |it: &io::Error| it.kind() == io::ErrorKind::PermissionDenied;
    let causes = || {
        error
            .chain()
            .filter_map(|it| it.downcast_ref::<io::Error>())
    };
    let path = path.display();
    if !causes().any(is_refusal) {
        return error.context(format!("cannot open {path}"));
    }
    error.context(Failure::new(
        Kind::Permission,
        format!(
            "not permitted to open {path}: use the account of `twheel run`, or start that with \
             --group and a group that you are in"
        ),
    ))
}

/// Fails unless this is a directory; a symbolic link does not count.
pub(super) fn check_real(path: &Path, found: &fs::Metadata) -> Result<()> {
    if found.is_dir() {
        return Ok(());
    }
    let what = match found.is_symlink() {
        true => "a symbolic link, which twheel does not follow",
        false => "not a directory",
    };
    in_the_way(format!(
        "{} is {what}: twheel did not create it: find out who did, and remove it",
        path.display()
    ))
}

/// The error for pins that are in the way, or that do not exist.
pub(super) fn in_the_way<T>(message: String) -> Result<T> {
    Err(Failure::new(Kind::Pins, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_escaping() {
        for name in [
            "eth0",
            "eth0.100",
            "a@b",
            "a%2Eb",
            "a%.b",
            "veth[0-9]?*",
            "a%2A*",
        ] {
            assert!(!escape(name).contains(['.', '@', '*', '?', '[', ']']));
            assert_eq!(unescape(&escape(name)), name);
        }
    }

    #[test]
    fn documents_name_the_directory_of_this_layout() {
        let directory = format!("{}/", version().display());
        for document in [
            include_str!("../../../docs/design.md"),
            include_str!("../../../docs/install.md"),
            include_str!("../../../docs/privilege.md"),
            include_str!("../../../docs/usage.md"),
        ] {
            let named = document.match_indices("/sys/fs/bpf/twheel/v");
            let named: Vec<_> = named.map(|(at, _)| &document[at..]).collect();
            assert!(!named.is_empty());
            assert!(named.iter().all(|it| it.starts_with(&directory)));
        }
    }
}
