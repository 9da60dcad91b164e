//! What a run may do: three capabilities, whoever starts it.
//!
//! What takes more is opened first: a port below 1024 (`CAP_NET_BIND_SERVICE`), raw sockets (`CAP_NET_RAW`), sockets in
//! other network namespaces (`CAP_SYS_ADMIN`), the history's directory. Then the rest is given up, for good, while there is
//! one thread: capabilities are a thread's own, and those that it starts have what it has.

use std::io;

use anyhow::{Context, Result};
use caps::{CapSet, Capability, CapsHashSet};
use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::{Gid, Group, getegid, setresgid},
};

use crate::failure::{Failure, Kind};

/// What a run needs for as long as it lives: to load and verify programs, and to attach them and close sockets.
pub const NEEDED: [Capability; 3] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_PERFMON,
];

/// Those of [`NEEDED`] that this thread lacks. `CAP_SYS_ADMIN`, of which they were once part, is none of them: a run would have
/// to keep it.
pub fn missing() -> Result<Vec<Capability>> {
    let effective = read(CapSet::Effective)?;
    let is_missing = |it: &Capability| !effective.contains(it);
    Ok(NEEDED.into_iter().filter(is_missing).collect())
}

/// Gives up all capabilities but [`NEEDED`], and that any program could ever give this process more. (And but
/// `CAP_SYS_NICE`, where steppers have no other way to their priority; and `CAP_SYS_ADMIN`, if it `enters` other network
/// namespaces later.)
pub fn give_up(enters: bool) -> Result<()> {
    // For the steppers, which say so where they do not get it. A container's root may not raise the limit.
    let has_limit = setrlimit(Resource::RLIMIT_RTPRIO, 1, 1).is_ok();
    let give_up = || -> Result<()> {
        prctl::set_no_new_privs().map_err(io::Error::from)?;
        let permitted = read(CapSet::Permitted)?;
        let mut kept: CapsHashSet = NEEDED.into_iter().collect();
        if !has_limit {
            kept.insert(Capability::CAP_SYS_NICE);
        }
        if enters {
            kept.insert(Capability::CAP_SYS_ADMIN);
        }
        kept.retain(|it| permitted.contains(it));
        // Who may not do this gets no more by a program all the same: see above.
        if read(CapSet::Effective)?.contains(&Capability::CAP_SETPCAP) {
            for capability in read(CapSet::Bounding)?.difference(&kept) {
                caps::drop(None, CapSet::Bounding, *capability)?;
            }
        }
        caps::clear(None, CapSet::Ambient)?;
        caps::clear(None, CapSet::Inheritable)?;
        caps::set(None, CapSet::Effective, &kept)?;
        caps::set(None, CapSet::Permitted, &kept)?;
        Ok(())
    };
    give_up().context("cannot give up capabilities")
}

/// A group's number, by its name or number.
fn group(name: &str) -> Result<Gid> {
    let found = Group::from_name(name).map_err(io::Error::from)?;
    let number = || name.parse().ok().map(Gid::from_raw);
    let group = found.map(|group| group.gid).or_else(number);
    group.ok_or_else(|| {
        let message = format!("--group {name}: there is no such group: `getent group` lists them");
        Failure::new(Kind::Usage, message).into()
    })
}

/// Has what this process makes belong to a group, by name or number.
///
/// # Errors
///
/// [`Kind::Usage`]: there is none. [`Kind::Permission`]: `CAP_SETGID` is missing.
pub fn join(name: &str) -> Result<Gid> {
    let group = group(name)?;
    if group != getegid() {
        setresgid(group, group, group).map_err(|error| may_not_join(name, &error.into()))?;
    }
    Ok(group)
}

/// Fails where [`join`] would.
///
/// # Errors
///
/// As there.
pub fn may_join(name: &str) -> Result<()> {
    if group(name)? != getegid() && !has(Capability::CAP_SETGID) {
        return Err(may_not_join(name, &io::ErrorKind::PermissionDenied.into()).into());
    }
    Ok(())
}

fn may_not_join(name: &str, error: &io::Error) -> Failure {
    Failure::new(
        Kind::Permission,
        format!(
            "--group {name}: {}: run as root, or as a process of that group (`Group=` of a unit)",
            lacks(error, Capability::CAP_SETGID)
        ),
    )
}

/// What an error means where the capability decides: its name, if this thread lacks it.
pub fn lacks(error: &io::Error, capability: Capability) -> String {
    let permitted = !matches!(error.kind(), io::ErrorKind::PermissionDenied);
    match permitted || has(capability) {
        true => error.to_string(),
        false => format!("not permitted without {capability}"),
    }
}

/// Whether this thread has a capability; where that cannot be told it may.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(true)
}

fn read(set: CapSet) -> Result<CapsHashSet> {
    caps::read(None, set).context("cannot read own capabilities")
}
