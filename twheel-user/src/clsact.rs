//! Packets of either direction without TCX, which came with Linux 6.6: a filter of a clsact qdisc.
//!
//! A filter is no link. It cannot be pinned, it outlives whoever added it, and it stands among those of other people.
//!
//! **Which one is twheel's.** The kernel keeps a name with each filter: `twheel:7@eth0`, where 7 is the id of the instance's
//! map `META` and `eth0` the interface as it was asked for. No two instances have a map in common, nor is an id given out again
//! before the next boot, so the name says whose the filter is whichever program it runs: also where the one of a dead run
//! is no longer the one that is pinned, and where another mount of bpffs has an instance of the same name.
//!
//! **Where it stands.** In a priority that nobody else uses, before all others if there is room and `--order` says nothing
//! else: a filter that says "this packet passes" ends the search, and those behind it do not see the packet. Alone it has
//! [`PRIORITY`], because people and programs mostly number theirs 1, 2, 3, and the kernel from 49152 downwards. The handle
//! is always [`HANDLE`].
//!
//! **How it is found.** Pins, all further names of `META`, which say it of the interface of that number:
//!
//! | pin | made | removed |
//! |---|---|---|
//! | `clsact-2@eth0`: may have a filter of ours for outgoing packets | before the filter | after the filter |
//! | `clsact_in-2@eth0`: the same for incoming packets | before the filter | after the filter |
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
    order::{Order, Other, Position},
    pins::{Instance, entries, escape, name, unescape},
    tc::{self, CLSACT, Code, Filter, Place, Way},
    tcx,
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
            what: What::ALL.into_iter().find(|it| it.name() == what)?,
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

/// What is pinned of an interface, filters first.
fn notes(directory: &Path, interface: &str) -> Result<Vec<Note>> {
    let all = entries(directory)?.into_iter().filter_map(Note::read);
    let mut notes: Vec<_> = all.filter(|it| it.interface == interface).collect();
    notes.sort_by_key(|note| note.what == What::Qdisc);
    Ok(notes)
}

/// Whether a filter of ours may be what sees packets of an interface in this direction.
pub fn is_left(directory: &Path, interface: &str, index: u32, way: Way) -> bool {
    let note = Note::new(directory, What::Filter(way), interface, index);
    note.path.exists()
}

/// Puts a program where it sees the packets of an interface in one direction: in place of the one that an earlier run has
/// left there, or in a new filter. Returns whether there was one. Where this fails there is none.
///
/// `order`: where it is to stand; one that is there stays where it stands if nothing was said.
///
/// # Errors
///
/// [`Kind::Unsupported`]: the kernel has no such filters, or the interface has a qdisc that leaves no room for them.
pub fn attach(
    program: &SchedClassifier,
    instance: &Instance,
    interface: &str,
    way: Way,
    order: Option<&Order>,
) -> Result<bool> {
    let attached = try_attach(program, instance, interface, way, order).with_context(|| {
        let what = match way {
            Way::In => "come into",
            Way::Out => "go out of",
        };
        Failure::new(
            Kind::Unsupported,
            format!("packets that {what} {interface} cannot be seen by a clsact filter"),
        )
    });
    if attached.is_err() {
        let_go_of(instance.path(), interface, way)?;
    }
    attached
}

fn try_attach(
    program: &SchedClassifier,
    instance: &Instance,
    interface: &str,
    way: Way,
    order: Option<&Order>,
) -> Result<bool> {
    let (directory, index) = (instance.path(), if_nametoindex(interface)?);
    // Of one that had this name before.
    for note in notes(directory, interface)? {
        if note.index != index {
            note.undo()?;
        }
    }
    make_qdisc(directory, interface, index, way)?;
    let note = Note::new(directory, What::Filter(way), interface, index);
    note.write(directory)?;
    let name = note.filter()?;
    let found = tc::filters(index, way)?;
    let (ours, others): (Vec<_>, Vec<_>) = found
        .into_iter()
        .partition(|it| it.name.as_ref() == Some(&name));
    let code = Code::Program(program.fd()?.as_fd());
    if let Some(ours) = ours.first() {
        if order.is_none_or(|order| stands(order, ours.place.priority, &others)) {
            if is_replaced(tc::replace_filter(ours.place, &name, code))? {
                return Ok(true);
            }
        } else {
            log::warn!("{interface}: moved, as --order says; packets in between are not seen");
            remove(ours.place)?;
        }
    }
    let place = Place {
        index,
        way,
        priority: choose(order, &others)?,
        handle: HANDLE,
    };
    if order.is_none() {
        warn_of_earlier(interface, place, &others);
    }
    tc::add_filter(place, &name, code).with_context(|| {
        format!(
            "the kernel adds no filter at priority {} (has it CONFIG_NET_CLS_BPF?)",
            place.priority
        )
    })?;
    Ok(false)
}

/// The filters of others that packets of an interface meet, in order.
///
/// # Errors
///
/// The kernel does not list filters.
pub fn others(interface: &str, way: Way) -> Result<Vec<Other>> {
    let found = tc::filters(if_nametoindex(interface)?, way)?;
    let is_ours = |it: &Filter| {
        let name = it.name.as_deref();
        name.is_some_and(|it| it.starts_with(PREFIX))
    };
    Ok(described(&found)
        .filter(|(filter, _)| !is_ours(filter))
        .map(|(_, other)| other)
        .collect())
}

/// Filters that packets meet, each once. (A priority is also listed by itself, with the handle 0.)
fn described(filters: &[Filter]) -> impl Iterator<Item = (&Filter, Other)> {
    let met = filters
        .iter()
        .filter(|it| it.chain == 0 && it.place.handle != 0);
    met.map(|filter| {
        let other = Other {
            id: filter.program,
            name: filter.name.clone(),
        };
        (filter, other)
    })
}

/// Whether a filter of this priority stands where it is to stand.
fn stands(order: &Order, priority: u16, others: &[Filter]) -> bool {
    // Where there is no room before all others, it cannot stand better.
    if choose(Some(order), others).is_ok_and(|best| best == priority) {
        return true;
    }
    let (filters, others): (Vec<_>, Vec<_>) = described(others).unzip();
    let at = |index: usize| filters[index].place.priority;
    match order.position(&others) {
        Position::First => filters.iter().all(|it| it.place.priority > priority),
        Position::Last => filters.iter().all(|it| it.place.priority < priority),
        Position::Before(index) => priority < at(index),
        Position::After(index) => priority > at(index),
    }
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

/// Fails if an interface has a qdisc that leaves no room for filters of this direction.
///
/// # Errors
///
/// It has; or it is gone.
pub fn check(interface: &str, way: Way) -> Result<()> {
    has_qdisc(interface, if_nametoindex(interface)?, way).map(drop)
}

/// Whether there is a qdisc for filters of this direction.
fn has_qdisc(interface: &str, index: u32, way: Way) -> Result<bool> {
    let Some(qdisc) = tc::qdisc(index)? else {
        return Ok(false);
    };
    let (block, instead) = match way {
        Way::In => ("ingress_block", "--hook xdp"),
        Way::Out => ("egress_block", "--egress off"),
    };
    match &*qdisc.kind {
        // The kernel adds no filter for one interface then.
        kind if qdisc.shares(way) => bail!(
            "the {kind} qdisc of {interface} may share its filters with other interfaces (`{block}`): \
             give {instead}"
        ),
        CLSACT => Ok(true),
        // It filters incoming packets as well as clsact does.
        _ if way == Way::In => Ok(true),
        // It would take a filter of outgoing packets, and run it for those that come in.
        other => bail!(
            "{interface} has an {other} qdisc, where that of outgoing packets would be: \
             `tc qdisc del dev {interface} ingress` removes it, and its filters, or give --egress off"
        ),
    }
}

/// Sees that there is a qdisc for filters of this direction.
fn make_qdisc(directory: &Path, interface: &str, index: u32, way: Way) -> Result<()> {
    if has_qdisc(interface, index, way)? {
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

/// The priority for a filter beside these: where `--order` says, and by default the first of all; if there is no room, the
/// next one that is free.
fn choose(order: Option<&Order>, others: &[Filter]) -> Result<u16> {
    let taken: BTreeSet<_> = others
        .iter()
        .filter(|it| it.chain == 0)
        .map(|it| it.place.priority)
        .collect();
    let free_from = |from: u16| (from..=u16::MAX).find(|it| !taken.contains(it));
    let free_below = |below: u16| (1..below).rev().find(|it| !taken.contains(it));
    let (filters, others): (Vec<_>, Vec<_>) = described(others).unzip();
    let at = |index: usize| filters[index].place.priority;
    match order.map_or(Position::First, |order| order.position(&others)) {
        Position::First => match taken.first() {
            Some(&1) => free_from(2),
            Some(&first) => Some((first - 1).min(PRIORITY)),
            None => Some(PRIORITY),
        },
        Position::Last => match taken.last() {
            Some(&last) => last.checked_add(1).map(|next| next.max(PRIORITY)),
            None => Some(PRIORITY),
        },
        Position::Before(index) => free_below(at(index)),
        Position::After(index) => at(index).checked_add(1).and_then(free_from),
    }
    .context("other filters leave no priority free there")
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

/// Removes what an instance has of clsact's on all interfaces, be they still there or not.
///
/// # Errors
///
/// A pin, a filter or a qdisc cannot be removed.
pub fn let_go_of_all(directory: &Path) -> Result<()> {
    let mut notes: Vec<_> = entries(directory)?
        .into_iter()
        .filter_map(Note::read)
        .collect();
    notes.sort_by_key(|note| note.what == What::Qdisc);
    notes.iter().try_for_each(Note::undo)
}

/// What is pinned of an interface.
///
/// # Errors
///
/// The directory cannot be read.
pub fn pins(directory: &Path, interface: &str) -> Result<Vec<PathBuf>> {
    let notes = notes(directory, interface)?;
    Ok(notes.into_iter().map(|note| note.path).collect())
}

/// Removes what an instance has of clsact's on an interface, be that still there or not.
///
/// # Errors
///
/// A pin, a filter or the qdisc cannot be removed.
pub fn let_go(directory: &Path, interface: &str) -> Result<()> {
    notes(directory, interface)?.iter().try_for_each(Note::undo)
}

/// Removes what it has there of one direction; the qdisc, too, unless it is used for the other.
///
/// # Errors
///
/// As [`let_go`].
pub fn let_go_of(directory: &Path, interface: &str, way: Way) -> Result<()> {
    let (filters, others): (Vec<_>, Vec<_>) = notes(directory, interface)?
        .into_iter()
        .partition(|it| it.what == What::Filter(way));
    filters.iter().try_for_each(Note::undo)?;
    let is_used = |index: u32| {
        let mut others = others.iter();
        others.any(|it| it.index == index && it.what != What::Qdisc)
    };
    let qdiscs = others.iter().filter(|it| it.what == What::Qdisc);
    qdiscs
        .filter(|it| !is_used(it.index))
        .try_for_each(Note::undo)
}

fn remove(place: Place) -> Result<()> {
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

/// Removes filters of instances whose pins are gone, from an interface on which no other instance is alive.
///
/// # Errors
///
/// They cannot be listed, or removed.
pub fn remove_others(instance: &Instance, interface: &str) -> Result<()> {
    let index = if_nametoindex(interface)?;
    let notes = notes(instance.path(), interface)?;
    for way in [Way::In, Way::Out] {
        let own = notes.iter().find(|it| it.what == What::Filter(way));
        let own = own.map(Note::filter).transpose()?;
        remove_named(index, way, own.as_deref())?;
    }
    Ok(())
}

/// Removes filters of instances whose pins are gone, if no program of XDP or TCX sees what comes in: then none is alive there,
/// but one whose own filters these are in another bpffs. Returns whether there were any.
///
/// # Errors
///
/// They cannot be listed, or removed.
pub fn remove_stray(interface: &str) -> Result<bool> {
    let Ok(index) = if_nametoindex(interface) else {
        return Ok(false);
    };
    let seen = tcx::programs(index, Way::In).unwrap_or_default();
    if !links::one(interface)?.xdp.is_empty() || !seen.is_empty() {
        return Ok(false);
    }
    Ok(remove_named(index, Way::In, None)? | remove_named(index, Way::Out, None)?)
}

/// Removes all filters of any instance but one.
fn remove_named(index: u32, way: Way, but: Option<&str>) -> Result<bool> {
    let mut removed = false;
    for filter in tc::filters(index, way)? {
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
            way: Way::Out,
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

    #[test]
    fn a_filter_stands_where_it_is_to_stand_if_there_is_room() {
        let taken = |priorities: &[u16], chain| -> Vec<_> {
            let filter = |&priority: &u16| Filter {
                place: Place {
                    index: 2,
                    way: Way::In,
                    priority,
                    handle: 1,
                },
                chain,
                name: Some(format!("at {priority}")),
                program: Some(priority.into()),
            };
            priorities.iter().map(filter).collect()
        };
        let order = |text: &str| text.parse::<Order>().unwrap();
        for (wanted, others, chosen) in [
            ("first", &[][..], Some(PRIORITY)),
            ("first", &[49152], Some(PRIORITY)),
            ("first", &[PRIORITY + 1], Some(PRIORITY)),
            ("first", &[PRIORITY, 49152], Some(PRIORITY - 1)),
            ("first", &[2], Some(1)),
            ("first", &[1], Some(2)),
            ("first", &[1, 2, 3, 5], Some(4)),
            ("last", &[], Some(PRIORITY)),
            ("last", &[1, 2], Some(PRIORITY)),
            ("last", &[1, 49152], Some(49153)),
            ("last", &[u16::MAX], None),
            ("before:at 5", &[1, 5, 9], Some(4)),
            ("before:id:5", &[1, 4, 5, 9], Some(3)),
            ("before:at 1", &[1, 5], None),
            ("after:at 5", &[1, 5, 9], Some(6)),
            ("after:id:5", &[5, 6, 9], Some(7)),
            ("after:at 65535", &[1, u16::MAX], None),
            // It is none of this direction's.
            ("after:other", &[20], Some(PRIORITY)),
        ] {
            let (order, others) = (order(wanted), taken(others, 0));
            let found = choose(Some(&order), &others).ok();
            assert_eq!(found, chosen, "{wanted} {others:?}");
            if let Some(priority) = found {
                assert!(stands(&order, priority, &others), "{wanted} {others:?}");
            }
        }
        let others = taken(&[1, 17], 1);
        let found = choose(None, &others).unwrap();
        assert_eq!(found, PRIORITY, "another chain's");
        let all: Vec<u16> = (1..=u16::MAX).collect();
        assert!(choose(None, &taken(&all, 0)).is_err());
        for (wanted, priority, is) in [
            ("first", 10, false),
            ("first", 4, true),
            ("last", 30, true),
            ("last", 10, false),
            ("before:at 20", 19, true),
            ("before:at 20", 21, false),
            ("after:at 5", 6, true),
            ("after:at 5", 4, false),
        ] {
            let others = taken(&[5, 20], 0);
            assert_eq!(stands(&order(wanted), priority, &others), is, "{wanted}");
        }
    }
}
