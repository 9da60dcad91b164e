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

mod notes;
mod priority;

use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context, Result, bail};
use aya::programs::SchedClassifier;
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};

pub use self::priority::PRIORITY;
use self::{
    notes::{Note, PREFIX, What, notes, remove},
    priority::{choose, described, stands},
};
use crate::{
    failure::{Failure, Kind},
    interfaces,
    order::{Order, Other},
    pins::path::entries,
    tc::{self, CLSACT, Code, Filter, Place, Way},
    tcx,
};

/// The handle of each filter of twheel's.
pub const HANDLE: u32 = 0x7477;
/// The loopback interface of a new network namespace.
const LOOPBACK: u32 = 1;

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
    directory: &Path,
    interface: &str,
    way: Way,
    order: Option<&Order>,
) -> Result<bool> {
    let attached = try_attach(program, directory, interface, way, order).with_context(|| {
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
        let_go_of(directory, interface, way)?;
    }
    attached
}

fn try_attach(
    program: &SchedClassifier,
    directory: &Path,
    interface: &str,
    way: Way,
    order: Option<&Order>,
) -> Result<bool> {
    let index = if_nametoindex(interface)?;
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

/// Removes filters of instances whose pins are gone, from an interface on which no other instance is alive.
///
/// # Errors
///
/// They cannot be listed, or removed.
pub fn remove_others(directory: &Path, interface: &str) -> Result<()> {
    let index = if_nametoindex(interface)?;
    let notes = notes(directory, interface)?;
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
    if !interfaces::one(interface)?.xdp.is_empty() || !seen.is_empty() {
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
