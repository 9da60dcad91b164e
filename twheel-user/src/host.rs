//! What this host offers: checked before anything is loaded, so that the answer is a sentence.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use nix::sys::statfs::{FsType, statfs};

use crate::{
    failure::{Failure, Kind},
    privilege,
};

/// `BPF_FS_MAGIC`, `include/uapi/linux/magic.h`.
const BPF_FS_MAGIC: FsType = FsType(0xcafe_4a11);
/// What the programs need of the kernel beside what was there in Linux 5.12, and since when it is there. Their names are
/// asked for, and no version: distributions take newer BPF into older kernels.
const HELPERS: [(BpfHelper, &str, &str); 3] = [
    (BpfHelper::BPF_FUNC_loop, "bpf_loop", "5.17"),
    (
        BpfHelper::BPF_FUNC_xdp_load_bytes,
        "XDP with fragments (bpf_xdp_load_bytes)",
        "5.18",
    ),
    (
        BpfHelper::BPF_FUNC_map_lookup_percpu_elem,
        "bpf_map_lookup_percpu_elem",
        "5.19",
    ),
];
/// The oldest that is tested (`cargo xtask vm-test`).
const OLDEST_KERNEL: &str = "6.1";

/// The kernel has what the programs need, the caller may load them, bpffs is there.
///
/// # Errors
///
/// [`Kind::Unsupported`] or [`Kind::Permission`].
pub fn check() -> Result<()> {
    check_capabilities()?;
    check_kernel()?;
    check_pins()
}

/// The same for whoever only uses what is pinned, of which the modes of its files say who may.
///
/// # Errors
///
/// [`Kind::Unsupported`].
pub fn check_pins() -> Result<()> {
    check_bpffs(Path::new(crate::pins::BPFFS))
}

/// The release of the kernel, as it says itself.
pub fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// The kernel has the helpers that the programs call. Asks it, which takes the right to load programs.
///
/// # Errors
///
/// [`Kind::Unsupported`], with what is missing.
pub fn check_kernel() -> Result<()> {
    let mut missing = Vec::new();
    for (helper, name, since) in HELPERS {
        let known = is_helper_supported(ProgramType::Xdp, helper)
            .with_context(|| format!("cannot ask the kernel for {name}"))?;
        if !known {
            missing.push(format!("{name} (Linux {since})"));
        }
    }
    complain(&release(), &missing)
}

fn complain(release: &str, missing: &[String]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Unsupported,
        format!(
            "kernel {release} is too old: it has no {}: twheel needs Linux {OLDEST_KERNEL} or newer",
            missing.join(", no ")
        ),
    )
    .into())
}

pub(crate) fn check_capabilities() -> Result<()> {
    let missing = privilege::missing()?;
    if missing.is_empty() {
        return Ok(());
    }
    let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
    Err(Failure::new(
        Kind::Permission,
        format!(
            "not permitted to load BPF programs: no {}: run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN",
            missing.join(", no ")
        ),
    )
    .into())
}

pub(crate) fn check_bpffs(path: &Path) -> Result<()> {
    match statfs(path) {
        Ok(stat) if stat.filesystem_type() == BPF_FS_MAGIC => Ok(()),
        _ => Err(Failure::new(
            Kind::Unsupported,
            format!(
                "no BPF file system at {0}: mount it with `mount -t bpf bpf {0}`",
                path.display()
            ),
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::exit_code;

    #[test]
    fn what_a_kernel_lacks_is_named() {
        complain("5.14.0-503.el9", &[]).unwrap();
        let missing = ["bpf_loop (Linux 5.17)".to_owned()];
        let error = complain("5.10.0-39-amd64", &missing).unwrap_err();
        assert_eq!(exit_code(&error), Kind::Unsupported as u8);
        let said = error.to_string();
        assert!(
            said.contains("5.10.0-39-amd64") && said.contains("no bpf_loop"),
            "{said}"
        );
    }

    #[test]
    fn another_file_system_is_not_bpffs() {
        let error = check_bpffs(Path::new("/proc")).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
    }
}
