//! Drops privileges: twheel keeps three capabilities, whatever user starts it.
//!
//! What takes more is opened first: a port below 1024 (`CAP_NET_BIND_SERVICE`), raw sockets
//! (`CAP_NET_RAW`), sockets in other network namespaces (`CAP_SYS_ADMIN`), the history's directory.
//! Then the other capabilities are dropped for good, while the process still has a single thread:
//! capabilities belong to a thread, and the threads that it starts inherit them.

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

/// What the running twheel needs all its life: to load and verify programs, to attach them, and to
/// close sockets.
pub const NEEDED: [Capability; 3] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_PERFMON,
];

/// The capabilities of [`NEEDED`] that this thread lacks. `CAP_SYS_ADMIN`, which once included
/// them, does not count in their place: twheel would have to keep it.
pub fn missing() -> Result<Vec<Capability>> {
    let effective = read(CapSet::Effective)?;
    let is_missing = |it: &Capability| !effective.contains(it);
    Ok(NEEDED.into_iter().filter(is_missing).collect())
}

/// What a run is to do later that needs more than [`NEEDED`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Kept {
    /// It enters other network namespaces: `CAP_SYS_ADMIN`.
    pub enters: bool,
    /// It looks at the descriptors of processes: `CAP_SYS_PTRACE` and `CAP_DAC_READ_SEARCH`.
    pub traces: bool,
}

/// Drops all capabilities except [`NEEDED`] and what is to be kept, and ensures that no program that
/// this process executes can gain others. (It also keeps `CAP_SYS_NICE` if steppers have no other
/// way to get their priority.)
pub fn give_up(keep: Kept) -> Result<()> {
    // For the steppers, which report it if they do not get their priority. Root in a container may
    // not raise the limit.
    let has_limit = setrlimit(Resource::RLIMIT_RTPRIO, 1, 1).is_ok();
    let give_up = || -> Result<()> {
        prctl::set_no_new_privs().map_err(io::Error::from)?;
        let permitted = read(CapSet::Permitted)?;
        let mut kept: CapsHashSet = NEEDED.into_iter().collect();
        if !has_limit {
            kept.insert(Capability::CAP_SYS_NICE);
        }
        if keep.enters {
            kept.insert(Capability::CAP_SYS_ADMIN);
        }
        if keep.traces {
            kept.extend([Capability::CAP_SYS_PTRACE, Capability::CAP_DAC_READ_SEARCH]);
        }
        kept.retain(|it| permitted.contains(it));
        // Without `CAP_SETPCAP` the bounding set stays, but `no_new_privs` above still keeps
        // executed programs from gaining capabilities.
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
    give_up().context("cannot drop capabilities")
}

/// Drops all capabilities.
pub fn give_up_all() -> Result<()> {
    let give_up = || -> Result<()> {
        prctl::set_no_new_privs().map_err(io::Error::from)?;
        for set in [
            CapSet::Ambient,
            CapSet::Inheritable,
            CapSet::Effective,
            CapSet::Permitted,
        ] {
            caps::clear(None, set)?;
        }
        Ok(())
    };
    give_up().context("cannot drop capabilities")
}

/// The number of a group, given by name or number.
fn group(name: &str) -> Result<Gid> {
    let found = Group::from_name(name).map_err(io::Error::from)?;
    let number = || name.parse().ok().map(Gid::from_raw);
    let group = found.map(|group| group.gid).or_else(number);
    group.ok_or_else(|| {
        let message = format!("--group {name}: there is no such group: `getent group` lists them");
        Failure::new(Kind::Usage, message).into()
    })
}

/// Makes a group, given by name or number, the group of everything that this process creates.
///
/// # Errors
///
/// [`Kind::Usage`]: the group does not exist. [`Kind::Permission`]: `CAP_SETGID` is missing.
pub fn join(name: &str) -> Result<Gid> {
    let group = group(name)?;
    if group != getegid() {
        setresgid(group, group, group).map_err(|error| may_not_join(name, &error.into()))?;
    }
    Ok(group)
}

/// Fails if [`join`] would.
///
/// # Errors
///
/// As for [`join`].
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

/// Explains an error that a missing capability may cause: names the capability if this thread lacks
/// it.
pub fn lacks(error: &io::Error, capability: Capability) -> String {
    let permitted = !matches!(error.kind(), io::ErrorKind::PermissionDenied);
    match permitted || has(capability) {
        true => error.to_string(),
        false => format!("not permitted without {capability}"),
    }
}

/// Whether this thread has a capability; `true` if that is unknown.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(true)
}

fn read(set: CapSet) -> Result<CapsHashSet> {
    caps::read(None, set).context("cannot read own capabilities")
}
