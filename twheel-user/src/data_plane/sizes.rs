//! How many entries the maps have.

use anyhow::{Result, ensure};
use aya::util::nr_cpus;
use twheel_common::{
    counter::{FIRST_INTERFACE, MAX_INTERFACES},
    offload::COUNTS,
    pool::{CHAIN, SHELF},
};

use crate::failure::{Failure, Kind};

/// How many places the counters of this many interfaces need.
pub(super) fn places(room: u32) -> Result<u32> {
    ensure!(
        room <= MAX_INTERFACES,
        "{room} interfaces are too many: twheel can watch at most {MAX_INTERFACES}"
    );
    Ok(FIRST_INTERFACE + room)
}

/// How many CPUs a record of the flow table can name.
const MAX_CPUS: usize = 1 << 12;

/// How many details this many flows need, on whichever CPUs. It includes the free details on
/// shelves, which no other CPU can use. A multiple of a whole chain. Their indices leave room for
/// marks of the flow.
pub(super) fn details(max_flows: u32) -> Result<u32> {
    let most = u64::from(max_flows) + u64::from(cpus()?) * u64::from(SHELF);
    Ok(most.next_multiple_of(CHAIN.into()).min(COUNTS.into()) as u32)
}

/// The number of CPUs that this host may have.
pub(super) fn cpus() -> Result<u32> {
    let cpus = nr_cpus().map_err(|(path, error)| {
        anyhow::Error::new(error).context(format!("cannot read {path}"))
    })?;
    if cpus > MAX_CPUS {
        return Err(Failure::new(
            Kind::Unsupported,
            format!("this host may have {cpus} CPUs, but twheel supports at most {MAX_CPUS}"),
        )
        .into());
    }
    Ok(cpus as u32)
}

/// Size of the ring of wake-up calls: every CPU can call its stepper several times before anyone
/// reads the ring.
pub(super) fn wakes_bytes() -> Result<u32> {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?.unwrap_or(4096) as u32;
    Ok((cpus()? * 8 * 16).next_power_of_two().max(page))
}
