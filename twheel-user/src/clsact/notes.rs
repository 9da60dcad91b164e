//! Pins that say that an interface may have a filter or a qdisc of twheel's, and how those are
//! removed.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use aya::maps::MapData;

use crate::{
    pins::path::{entries, escape, name, unescape},
    tc::{self, CLSACT, FilterId, Way},
};

/// The prefix of the names of twheel's filters.
pub(super) const PREFIX: &str = "twheel:";

/// What a pin says that the interface may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Filter(Way),
    Qdisc,
}

impl What {
    const ALL: [Self; 3] = [Self::Filter(Way::In), Self::Filter(Way::Out), Self::Qdisc];

    fn name(self) -> &'static str {
        match self {
            Self::Filter(Way::Out) => "clsact",
            Self::Filter(Way::In) => "clsact_in",
            Self::Qdisc => "qdisc",
        }
    }
}

/// A pin that says that an interface may have a filter or a qdisc of twheel's.
pub(super) struct Note {
    pub(super) what: What,
    /// The number of the interface.
    pub(super) index: u32,
    /// The interface's name, as the user gave it.
    pub(super) interface: String,
    /// The path of the pin.
    pub(super) path: PathBuf,
}

impl Note {
    pub(super) fn new(directory: &Path, what: What, interface: &str, index: u32) -> Self {
        let file = format!("{}-{index}@{}", what.name(), escape(interface));
        Self {
            what,
            index,
            interface: interface.to_owned(),
            path: directory.join(file),
        }
    }

    /// `None`: the pin is for something else.
    pub(super) fn read(path: PathBuf) -> Option<Self> {
        let file = name(&path);
        let (what, interface) = file.split_once('@')?;
        let (what, index) = what.split_once('-')?;
        Some(Self {
            what: What::ALL.into_iter().find(|it| it.name() == what)?,
            index: index.parse().ok()?,
            interface: unescape(interface),
            path,
        })
    }

    /// Makes the pin.
    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        match fs::hard_link(directory.join("META"), &self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(error).with_context(|| format!("cannot create the pin {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path)
            .with_context(|| format!("cannot remove {}", self.path.display()))
    }

    /// The name of the filter, valid as long as the map exists.
    pub(super) fn filter(&self) -> Result<String> {
        let map = MapData::from_pin(&self.path);
        let id = map.and_then(|map| Ok(map.info()?.id()));
        let id =
            id.with_context(|| format!("cannot read what is pinned at {}", self.path.display()))?;
        Ok(format!("{PREFIX}{id}@{}", self.interface))
    }

    /// Removes what the pin stands for, then the pin.
    pub(super) fn undo(&self) -> Result<()> {
        match self.what {
            What::Filter(way) => {
                let name = self.filter()?;
                for filter in tc::filters(self.index, way)? {
                    if filter.name.as_ref() == Some(&name) {
                        remove(filter.place)?;
                    }
                }
            }
            What::Qdisc => remove_qdisc(self.index)?,
        }
        self.remove()
    }
}

/// The notes of an interface, filters first.
pub(super) fn notes(directory: &Path, interface: &str) -> Result<Vec<Note>> {
    let all = entries(directory)?.into_iter().filter_map(Note::read);
    let mut notes: Vec<_> = all.filter(|it| it.interface == interface).collect();
    notes.sort_by_key(|note| note.what == What::Qdisc);
    Ok(notes)
}

/// Removes a filter.
pub(super) fn remove(place: FilterId) -> Result<()> {
    is_gone(tc::remove_filter(place)).with_context(|| {
        format!(
            "cannot remove the filter of {} packets at priority {}",
            match place.way {
                Way::In => "incoming",
                Way::Out => "outgoing",
            },
            place.priority
        )
    })
}

/// If another program adds a filter between the two steps, that filter is lost: the kernel has no
/// "remove if empty". The check for filters comes only microseconds before the removal.
fn remove_qdisc(index: u32) -> Result<()> {
    if tc::qdisc(index)?.is_none_or(|it| it.kind != CLSACT) {
        return Ok(());
    }
    for way in [Way::In, Way::Out] {
        if !tc::filters(index, way)?.is_empty() {
            return Ok(());
        }
    }
    is_gone(tc::remove_clsact(index)).context("cannot remove the clsact qdisc")
}

/// If there is nothing to remove, that counts as success.
fn is_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::ENODEV | libc::EINVAL)
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_say_what_there_may_be() {
        let directory = Path::new("/nowhere");
        for (what, interface) in [
            (What::Filter(Way::Out), "eth0"),
            (What::Filter(Way::In), "eth0"),
            (What::Qdisc, "eth0.100%"),
        ] {
            let note = Note::new(directory, what, interface, 4_000_000_000);
            let read = Note::read(note.path.clone()).unwrap();
            assert_eq!((read.what, read.index), (what, 4_000_000_000));
            assert_eq!(read.interface, interface);
        }
        for other in [
            "xdp@eth0",
            "egress@eth0",
            "META",
            "clsact-@eth0",
            "qdisc-x@e",
            "tcx-1@eth0",
        ] {
            assert!(Note::read(directory.join(other)).is_none(), "{other}");
        }
    }
}
