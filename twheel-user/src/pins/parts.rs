//! The parts of an instance for other network namespaces.

use std::{
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::path::{entries, name, unescape};
use crate::netns::{self, Namespace};

/// The prefix of the directory names of these parts.
pub(super) const NETNS: &str = "netns-";

/// The part of an instance for another network namespace.
pub(super) struct Part {
    /// The namespace's name.
    pub namespace: String,
    /// Its inode.
    pub inode: u64,
    /// The number that its programs add to the numbers of interfaces.
    pub number: u32,
    /// The directory.
    pub path: PathBuf,
}

/// An instance's parts for other network namespaces.
pub(super) fn parts(instance: &Path) -> Result<Vec<Part>> {
    let part = |path: PathBuf| {
        let name = name(&path);
        let (number, rest) = name.strip_prefix(NETNS)?.split_once('-')?;
        let (inode, namespace) = rest.split_once('-')?;
        path.is_dir().then_some(())?;
        Some(Part {
            namespace: unescape(namespace),
            inode: inode.parse().ok()?,
            number: number.parse().ok()?,
            path,
        })
    };
    Ok(entries(instance)?.into_iter().filter_map(part).collect())
}

impl Part {
    /// Opens the namespace by its name, or by another name that it has. `None`: it has no name.
    ///
    /// # Errors
    ///
    /// A namespace cannot be opened, or their names cannot be listed.
    pub fn open(&self) -> Result<Option<Namespace>> {
        let is_it = |it: &Namespace| it.inode().is_ok_and(|inode| inode == self.inode);
        match Namespace::open(&self.namespace) {
            Ok(Some(found)) if is_it(&found) => return Ok(Some(found)),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let context = || format!("cannot open the network namespace {}", self.namespace);
                return Err(error).with_context(context);
            }
            _ => {}
        }
        let others = netns::names()?.into_iter();
        let others = others.filter_map(|name| Namespace::open(&name).ok().flatten());
        Ok(others.into_iter().find(is_it))
    }

    /// Runs a closure in the namespace, or another one if the namespace no longer exists.
    pub fn within(
        &self,
        there: impl FnOnce() -> Result<()>,
        gone: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match self.open()? {
            Some(namespace) => namespace.enter(there),
            None => gone(),
        }
    }
}
