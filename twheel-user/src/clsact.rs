//! Outgoing packets without TCX, which came with Linux 6.6: a filter of a clsact qdisc.
//!
//! A filter is no link. It cannot be pinned, it outlives whoever added it, and it stands among those of other people.
//!
//! **Which one is twheel's.** The kernel keeps a name with each filter: `twheel:7@eth0`, where 7 is the id of the instance's
//! map `META` and `eth0` the interface as it was asked for. No two instances have a map in common, nor is an id given out again
//! before the next boot, so the name says whose the filter is whichever program it runs: also where the one of a dead run
//! is no longer the one that is pinned, and where another mount of bpffs has an instance of the same name.
//!
//! **Where it stands.** In a priority that nobody else uses, before all others if there is room: a filter that says "this
//! packet passes" ends the search, and those behind it do not see the packet. Alone it has [`PRIORITY`], because people
//! and programs mostly number theirs 1, 2, 3, and the kernel from 49152 downwards. The handle is always [`HANDLE`].
//!
//! **How it is found.** Two pins, both further names of `META`, which say it of the interface of that number:
//!
//! | pin | made | removed |
//! |---|---|---|
//! | `clsact-2@eth0`: may have a filter of ours | before the filter | after the filter |
//! | `qdisc-2@eth0`: its qdisc may be of our making | before the qdisc | after the qdisc |
//!
//! So wherever the process dies, what there may be is pinned, like a link, and all that looks for pins finds it: adoption,
//! `detach`, the end of a run. A number is not given to another interface, and an interface loses qdisc and filters
//! when it goes, to another network namespace too.
//!
//! **How it is replaced.** The kernel exchanges the program of the filter at its place: each packet meets the old one or
//! the new one. A run that takes the other way removes what is there first, or packets would be counted twice.
//!
//! **What becomes of the qdisc.** It is removed if it was of our making and no filter is left in it, of either direction.
//! One that others made stays, and so does one to which they have added filters. (Should somebody remove ours and make
//! another while the instance lives, that is taken for ours once it is empty.)

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context, Result, bail};
use aya::{maps::MapData, programs::SchedClassifier};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};

use crate::{
    failure::{Failure, Kind},
    links,
    pins::{Instance, entries, escape, name, unescape},
    tc::{self, CLSACT, Code, Filter, Place, Qdisc, Way},
};

/// The priority of a filter that is alone.
pub const PRIORITY: u16 = 17;
/// The handle of each filter of twheel's.
pub const HANDLE: u32 = 0x7477;
/// How the names of its filters begin.
const PREFIX: &str = "twheel:";
/// The loopback interface of a new network namespace.
const LOOPBACK: u32 = 1;

/// What a pin says that there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Filter,
    Qdisc,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Filter => "clsact",
            Self::Qdisc => "qdisc",
        }
    }
}

/// A pin that says that an interface may have something of ours.
struct Note {
    what: What,
    index: u32,
    /// As it was asked for.
    interface: String,
    path: PathBuf,
}

impl Note {
    fn new(directory: &Path, what: What, interface: &str, index: u32) -> Self {
        let file = format!("{}-{index}@{}", what.name(), escape(interface));
        Self {
            what,
            index,
            interface: interface.to_owned(),
            path: directory.join(file),
        }
    }

    /// `None`: a pin of something else.
    fn read(path: PathBuf) -> Option<Self> {
        let file = name(&path);
        let (what, interface) = file.split_once('@')?;
        let (what, index) = what.split_once('-')?;
        Some(Self {
            what: [What::Filter, What::Qdisc]
                .into_iter()
                .find(|it| it.name() == what)?,
            index: index.parse().ok()?,
            interface: unescape(interface),
            path,
        })
    }

    /// Pins it.
    fn write(&self, directory: &Path) -> Result<()> {
        match fs::hard_link(directory.join("META"), &self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(error).with_context(|| format!("cannot make the pin {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path)
            .with_context(|| format!("cannot remove {}", self.path.display()))
    }

    /// The name of the filter, which holds for as long as the map does.
    fn filter(&self) -> Result<String> {
        let map = MapData::from_pin(&self.path);
        let id = map.and_then(|map| Ok(map.info()?.id()));
        let id =
            id.with_context(|| format!("cannot tell what is pinned at {}", self.path.display()))?;
        Ok(format!("{PREFIX}{id}@{}", self.interface))
    }

    /// Removes what it says, and then the pin.
    fn undo(&self) -> Result<()> {
        match self.what {
            What::Filter => {
                let name = self.filter()?;
                for filter in tc::filters(self.index, Way::Out)? {
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

/// What is pinned of an interface, filters first.
fn notes(directory: &Path, interface: &str) -> Result<Vec<Note>> {
    let all = entries(directory)?.into_iter().filter_map(Note::read);
    let mut notes: Vec<_> = all.filter(|it| it.interface == interface).collect();
    notes.sort_by_key(|note| note.what == What::Qdisc);
    Ok(notes)
}

/// Puts a program where it sees the packets that go out of an interface: in place of the one that an earlier run has left
/// there, or in a new filter. Where this fails there is none.
///
/// # Errors
///
/// [`Kind::Unsupported`]: the kernel has no such filters, or the interface has a qdisc that leaves no room for them.
pub fn attach(program: &SchedClassifier, instance: &Instance, interface: &str) -> Result<()> {
    let attached = try_attach(program, instance, interface).with_context(|| {
        Failure::new(
            Kind::Unsupported,
            format!("packets that go out of {interface} cannot be seen by a clsact filter"),
        )
    });
    if attached.is_err() {
        let_go(instance.path(), interface)?;
    }
    attached
}

fn try_attach(program: &SchedClassifier, instance: &Instance, interface: &str) -> Result<()> {
    let (directory, index) = (instance.path(), if_nametoindex(interface)?);
    // Of one that had this name before.
    for note in notes(directory, interface)? {
        if note.index != index {
            note.undo()?;
        }
    }
    make_qdisc(directory, interface, index)?;
    let note = Note::new(directory, What::Filter, interface, index);
    note.write(directory)?;
    let name = note.filter()?;
    let found = tc::filters(index, Way::Out)?;
    let (ours, others): (Vec<_>, Vec<_>) = found
        .into_iter()
        .partition(|it| it.name.as_ref() == Some(&name));
    let code = Code::Program(program.fd()?.as_fd());
    if let Some(ours) = ours.first()
        && is_replaced(tc::replace_filter(ours.place, &name, code))?
    {
        return Ok(());
    }
    let place = Place {
        index,
        priority: choose(&others)?,
        handle: HANDLE,
    };
    warn_of_earlier(interface, place, &others);
    tc::add_filter(place, &name, code).with_context(|| {
        format!(
            "the kernel adds no filter at priority {} (has it CONFIG_NET_CLS_BPF?)",
            place.priority
        )
    })
}

/// `false`: there is nothing to replace any more.
fn is_replaced(result: io::Result<()>) -> Result<bool> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        result => result
            .map(|()| true)
            .context("the kernel does not replace the filter of an earlier run"),
    }
}

/// Fails if an interface has a qdisc that leaves no room for filters of outgoing packets.
///
/// # Errors
///
/// It has; or it is gone.
pub fn check(interface: &str) -> Result<()> {
    has_qdisc(interface, if_nametoindex(interface)?).map(drop)
}

/// Whether there is a clsact qdisc.
fn has_qdisc(interface: &str, index: u32) -> Result<bool> {
    let Some(Qdisc { kind, shares }) = tc::qdisc(index)? else {
        return Ok(false);
    };
    match &*kind {
        // The kernel adds no filter for one interface then.
        CLSACT if shares => bail!(
            "the clsact qdisc of {interface} may share its filters with other interfaces (`egress_block`): \
             give --egress off"
        ),
        CLSACT => Ok(true),
        // It would take a filter of outgoing packets, and run it for those that come in.
        other => bail!(
            "{interface} has an {other} qdisc, where that of outgoing packets would be: \
             `tc qdisc del dev {interface} ingress` removes it, and its filters, or give --egress off"
        ),
    }
}

/// Sees that there is a clsact qdisc.
fn make_qdisc(directory: &Path, interface: &str, index: u32) -> Result<()> {
    if has_qdisc(interface, index)? {
        return Ok(());
    }
    let note = Note::new(directory, What::Qdisc, interface, index);
    note.write(directory)?;
    let Err(error) = tc::add_clsact(index) else {
        return Ok(());
    };
    note.remove()?;
    match error.raw_os_error() {
        // Somebody else was faster: theirs.
        Some(libc::EEXIST) if tc::qdisc(index)?.is_some_and(|it| it.kind == CLSACT) => Ok(()),
        _ => Err(error).context(
            "the kernel adds no clsact qdisc (has it CONFIG_NET_SCH_INGRESS, or the module sch_ingress?)",
        ),
    }
}

/// The priority for a filter beside these: the first of all, if there is room, else the first that is free.
fn choose(others: &[Filter]) -> Result<u16> {
    let taken: BTreeSet<_> = others
        .iter()
        .filter(|it| it.chain == 0)
        .map(|it| it.place.priority)
        .collect();
    match taken.first() {
        Some(&1) => (2..=u16::MAX).find(|it| !taken.contains(it)),
        Some(&first) => Some((first - 1).min(PRIORITY)),
        None => Some(PRIORITY),
    }
    .context("all priorities are taken by other filters")
}

fn warn_of_earlier(interface: &str, place: Place, others: &[Filter]) {
    let is_earlier = |it: &&Filter| it.chain == 0 && it.place.priority < place.priority;
    if let Some(first) = others.iter().find(is_earlier) {
        log::warn!(
            "{interface}: a filter stands before twheel's (priority {}): packets of which it says that they pass or are \
             dropped are not seen",
            first.place.priority
        );
    }
}

/// Removes what an instance has of clsact's on an interface, be that still there or not.
///
/// # Errors
///
/// A pin, a filter or the qdisc cannot be removed.
pub fn let_go(directory: &Path, interface: &str) -> Result<()> {
    notes(directory, interface)?.iter().try_for_each(Note::undo)
}

fn remove(place: Place) -> Result<()> {
    is_gone(tc::remove_filter(place)).with_context(|| {
        format!(
            "cannot remove the filter of outgoing packets at priority {}",
            place.priority
        )
    })
}

/// Whoever adds a filter between the two steps loses it: the kernel has no "remove if empty". Filters are looked for in the
/// very microseconds before.
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

/// Nothing to remove is as good as removed.
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

/// Removes filters of instances whose pins are gone, from an interface whose incoming packets are this instance's: no other
/// one is alive there.
///
/// # Errors
///
/// They cannot be listed, or removed.
pub fn remove_others(instance: &Instance, interface: &str) -> Result<()> {
    let index = if_nametoindex(interface)?;
    let notes = notes(instance.path(), interface)?;
    let own = notes.iter().find(|it| it.what == What::Filter);
    let own = own.map(Note::filter).transpose()?;
    remove_named(index, own.as_deref()).map(drop)
}

/// Removes filters of instances whose pins are gone, if no program sees what comes in: then none is alive there. Returns
/// whether there were any.
///
/// # Errors
///
/// They cannot be listed, or removed.
pub fn remove_stray(interface: &str) -> Result<bool> {
    let links = links::all()?;
    let is_free = |it: &links::Link| it.name == interface && it.xdp.is_empty();
    match if_nametoindex(interface) {
        Ok(index) if links.iter().any(is_free) => remove_named(index, None),
        _ => Ok(false),
    }
}

/// Removes all filters of any instance but one.
fn remove_named(index: u32, but: Option<&str>) -> Result<bool> {
    let mut removed = false;
    for filter in tc::filters(index, Way::Out)? {
        let name = filter.name.as_deref();
        if name != but && name.is_some_and(|it| it.starts_with(PREFIX)) {
            remove(filter.place)?;
            removed = true;
        }
    }
    Ok(removed)
}

/// Whether the kernel has clsact qdiscs and their filters: tried on the loopback interface of a network namespace that
/// nobody else sees, and that is gone with this thread.
///
/// # Errors
///
/// It has not; or no network namespace can be made, which takes `CAP_SYS_ADMIN`.
pub fn probe() -> Result<()> {
    let trial = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(io::Error::from)
            .context("cannot make a network namespace to try it in")?;
        tc::add_clsact(LOOPBACK).context("no clsact qdisc (CONFIG_NET_SCH_INGRESS)")?;
        let place = Place {
            index: LOOPBACK,
            priority: PRIORITY,
            handle: HANDLE,
        };
        tc::add_filter(place, PREFIX, Code::Trial).context("no filters of BPF (CONFIG_NET_CLS_BPF)")
    };
    thread::scope(|scope| {
        scope
            .spawn(trial)
            .join()
            .unwrap_or_else(|_| bail!("the trial panicked"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_say_what_there_may_be() {
        let directory = Path::new("/nowhere");
        for (what, interface) in [(What::Filter, "eth0"), (What::Qdisc, "eth0.100%")] {
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

    #[test]
    fn a_filter_is_the_first_if_there_is_room() {
        let taken = |priorities: &[u16], chain| -> Vec<_> {
            let filter = |&priority| Filter {
                place: Place {
                    index: 2,
                    priority,
                    handle: 1,
                },
                chain,
                name: None,
            };
            priorities.iter().map(filter).collect()
        };
        for (others, chosen) in [
            (&[][..], PRIORITY),
            (&[49152], PRIORITY),
            (&[PRIORITY + 1], PRIORITY),
            (&[PRIORITY, 49152], PRIORITY - 1),
            (&[2], 1),
            (&[1], 2),
            (&[1, 2, 3, 5], 4),
        ] {
            assert_eq!(choose(&taken(others, 0)).unwrap(), chosen, "{others:?}");
        }
        assert_eq!(
            choose(&taken(&[1, 17], 1)).unwrap(),
            PRIORITY,
            "another chain's"
        );
        let all: Vec<u16> = (1..=u16::MAX).collect();
        assert!(choose(&taken(&all, 0)).is_err());
    }
}
