//! Sees packets of either direction without TCX, which came with Linux 6.6: by a filter of a clsact
//! qdisc.
//!
//! A filter is not a BPF link. It cannot be pinned, it outlives the process that added it, and it
//! is one of a list with the filters of other programs.
//!
//! **Which filters are twheel's.** The kernel keeps a name with each filter: `twheel:7@eth0`, where
//! 7 is the id of the instance's map `META` and `eth0` the interface as the user named it. No two
//! instances share a map, and an id is not used again before the next boot. So the name identifies
//! the instance, whichever program the filter runs. That holds even if the filter runs a dead run's
//! program that is no longer the pinned one, or if an instance of the same name is pinned in
//! another bpffs.
//!
//! **The position of the filter.** It has a priority that no other filter has, and comes before all
//! others if such a priority is free and `--order` asks for nothing else. A filter that says "this
//! packet passes" ends the search, and the filters behind it do not see the packet. If there are no
//! other filters, the priority is [`PRIORITY`], because people and programs mostly number theirs 1,
//! 2, 3, and the kernel counts down from 49152. The handle is always [`HANDLE`].
//!
//! **How the filter is found.** By pins, which are further names of the map `META`. Each says
//! something of the interface with the number in its name:
//!
//! | pin | made | removed |
//! |---|---|---|
//! | `clsact-2@eth0`: may have twheel's filter for outgoing packets | before the filter | after it |
//! | `clsact_in-2@eth0`: the same for incoming packets | before the filter | after it |
//! | `qdisc-2@eth0`: its qdisc may have been made by twheel | before the qdisc | after it |
//!
//! So wherever the process dies, everything that may exist has a pin, as a BPF link has, and
//! everything that looks for pins finds it: adoption, `detach`, the end of a run. A number is never
//! given to another interface. An interface that disappears, or moves to another network namespace,
//! loses its qdisc and filters.
//!
//! **How the program is replaced.** The kernel exchanges the program of the existing filter: each
//! packet meets either the old program or the new one. A run that uses another hook first removes
//! the filter, or packets would be counted twice.
//!
//! **What becomes of the qdisc.** twheel removes it if twheel made it and no filter is left in it,
//! for either direction. A qdisc that others made stays, and so does one to which others have added
//! filters. (If someone removes twheel's qdisc and makes another while the instance lives, that one
//! is taken for twheel's once it is empty.)

mod notes;
mod priority;

use std::{
    collections::BTreeSet,
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
    tc::{self, CLSACT, Code, Filter, FilterId, Way},
    tcx,
};

/// The handle of every filter of twheel's.
pub const HANDLE: u32 = 0x7477;
/// The number of the loopback interface in a new network namespace.
const LOOPBACK: u32 = 1;

/// Whether an earlier run may have left a filter on an interface for this direction.
pub fn is_left(directory: &Path, interface: &str, index: u32, way: Way) -> bool {
    let note = Note::new(directory, What::Filter(way), interface, index);
    note.path.exists()
}

/// The names under which an earlier run may have left filters or qdiscs on interfaces that do not
/// have these names now.
///
/// # Errors
///
/// The directory cannot be read.
pub fn renamed(directory: &Path) -> Result<BTreeSet<String>> {
    let notes = entries(directory)?.into_iter().filter_map(Note::read);
    let others = notes.filter(|it| if_nametoindex(it.interface.as_str()) != Ok(it.index));
    Ok(others.map(|it| it.interface).collect())
}

/// Attaches a program for one direction of an interface: it replaces the program of the filter that
/// an earlier run left, or adds a new filter. Returns whether there was a filter. If this fails, no
/// filter is left.
///
/// `order`: the position of the filter. An existing filter keeps its position if this is `None`.
///
/// # Errors
///
/// [`Kind::Unsupported`]: the kernel has no such filters, or the interface has a qdisc that cannot
/// hold them.
pub fn attach(
    program: &SchedClassifier,
    directory: &Path,
    interface: &str,
    way: Way,
    order: Option<&Order>,
) -> Result<bool> {
    let attached = try_attach(program, directory, interface, way, order).with_context(|| {
        let what = match way {
            Way::In => "incoming",
            Way::Out => "outgoing",
        };
        Failure::new(
            Kind::Unsupported,
            format!("cannot see {what} packets of {interface} with a clsact filter"),
        )
    });
    if attached.is_err() {
        detach_way(directory, interface, way)?;
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
    // An interface that had this name before may have left them.
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
            log::warn!("{interface}: moved for --order; packets in between were not seen");
            remove(ours.place)?;
        }
    }
    let place = FilterId {
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
            "cannot add a filter at priority {} (has the kernel CONFIG_NET_CLS_BPF?)",
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

/// `false`: the filter to be replaced no longer exists.
fn is_replaced(result: io::Result<()>) -> Result<bool> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        result => result
            .map(|()| true)
            .context("cannot replace the program in the filter of an earlier run"),
    }
}

/// Fails if an interface has a qdisc that cannot hold filters for this direction.
///
/// # Errors
///
/// It has such a qdisc, or the interface no longer exists.
pub fn check(interface: &str, way: Way) -> Result<()> {
    has_qdisc(interface, if_nametoindex(interface)?, way).map(drop)
}

/// Whether the interface has a qdisc for filters of this direction.
fn has_qdisc(interface: &str, index: u32, way: Way) -> Result<bool> {
    let Some(qdisc) = tc::qdisc(index)? else {
        return Ok(false);
    };
    let (block, instead) = match way {
        Way::In => ("ingress_block", "--hook xdp"),
        Way::Out => ("egress_block", "--egress off"),
    };
    match &*qdisc.kind {
        // The kernel then adds no filter to a single interface.
        kind if qdisc.shares(way) => bail!(
            "the {kind} qdisc of {interface} may share its filters with other interfaces \
             (`{block}`): give {instead}"
        ),
        CLSACT => Ok(true),
        // It filters incoming packets as clsact does.
        _ if way == Way::In => Ok(true),
        // It would accept a filter for outgoing packets, but run it on incoming ones.
        other => bail!(
            "{interface} has an {other} qdisc, so it can have none for outgoing packets: remove \
             it, with its filters, by `tc qdisc del dev {interface} ingress`, or give --egress \
             off"
        ),
    }
}

/// Makes a qdisc for filters of this direction, unless there is one.
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
        // Someone else has just made the qdisc: it is theirs.
        Some(libc::EEXIST) if tc::qdisc(index)?.is_some_and(|it| it.kind == CLSACT) => Ok(()),
        _ => Err(error).context(
            "cannot add a clsact qdisc (has the kernel CONFIG_NET_SCH_INGRESS, or the module \
             sch_ingress?)",
        ),
    }
}

fn warn_of_earlier(interface: &str, place: FilterId, others: &[Filter]) {
    let is_earlier = |it: &&Filter| it.chain == 0 && it.place.priority < place.priority;
    if let Some(first) = others.iter().find(is_earlier) {
        log::warn!(
            "{interface}: another filter (priority {}) comes before twheel's: packets that it \
             accepts or drops are not seen",
            first.place.priority
        );
    }
}

/// Removes an instance's filters and qdiscs from all interfaces, whether they still exist or not.
///
/// # Errors
///
/// A pin, a filter or a qdisc cannot be removed.
pub fn detach_all(directory: &Path) -> Result<()> {
    let mut notes: Vec<_> = entries(directory)?
        .into_iter()
        .filter_map(Note::read)
        .collect();
    notes.sort_by_key(|note| note.what == What::Qdisc);
    notes.iter().try_for_each(Note::undo)
}

/// The pins of an interface's filters and qdisc.
///
/// # Errors
///
/// The directory cannot be read.
pub fn pins(directory: &Path, interface: &str) -> Result<Vec<PathBuf>> {
    let notes = notes(directory, interface)?;
    Ok(notes.into_iter().map(|note| note.path).collect())
}

/// Removes an instance's filters and qdisc from an interface, whether it still exists or not.
///
/// # Errors
///
/// A pin, a filter or the qdisc cannot be removed.
pub fn detach(directory: &Path, interface: &str) -> Result<()> {
    notes(directory, interface)?.iter().try_for_each(Note::undo)
}

/// Removes an instance's filter of one direction from an interface; also the qdisc, unless the
/// other direction uses it.
///
/// # Errors
///
/// As [`detach`].
pub fn detach_way(directory: &Path, interface: &str, way: Way) -> Result<()> {
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

/// Removes filters of instances whose pins are gone, from an interface on which no other instance
/// runs.
///
/// # Errors
///
/// The filters cannot be listed, or not removed.
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

/// Removes filters of instances whose pins are gone, if no XDP or TCX program sees incoming
/// packets. In that case no instance runs there, except one that is pinned in another bpffs and
/// owns these filters itself. Returns whether there were any.
///
/// # Errors
///
/// The filters cannot be listed, or not removed.
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

/// Removes the filters of all instances but one.
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

/// Whether the kernel has clsact qdiscs and their filters. Tries it on the loopback interface of a
/// private network namespace, which disappears with this thread.
///
/// # Errors
///
/// The kernel has none; or a network namespace cannot be made, which takes `CAP_SYS_ADMIN`.
pub fn probe() -> Result<()> {
    let trial = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(io::Error::from)
            .context("cannot create a private network namespace for the trial")?;
        tc::add_clsact(LOOPBACK).context("no clsact qdisc (CONFIG_NET_SCH_INGRESS)")?;
        let place = FilterId {
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
