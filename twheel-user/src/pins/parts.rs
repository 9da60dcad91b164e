//! The parts of an instance that are of other network namespaces.

use std::{
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::path::{entries, name, unescape};
use crate::netns::{self, Namespace};

/// How the directory of another network namespace's part of an instance begins.
pub(super) const NETNS: &str = "netns-";

/// The part of an instance that is of another network namespace.
pub(super) struct Part {
    /// The namespace's name.
    pub namespace: String,
    /// Its inode.
    pub inode: u64,
    /// What its programs add to the indexes of interfaces.
    pub number: u32,
    /// The directory.
    pub path: PathBuf,
}

/// The parts of an instance that are of other network namespaces.
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
    /// The namespace, by its name, or by another that it has. `None`: it has none.
    ///
    /// # Errors
    ///
    /// It cannot be told.
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

    /// Does something there; or something else, if it is gone.
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
