//! What this host offers: checked before anything is loaded, so that the answer is a sentence.

use std::{fs, path::Path};

use anyhow::Result;
use nix::sys::statfs::{FsType, statfs};

use crate::{
    failure::{Failure, Kind},
    privilege,
};

/// `BPF_FS_MAGIC`, `include/uapi/linux/magic.h`.
const BPF_FS_MAGIC: FsType = FsType(0xcafe_4a11);
/// The oldest that is tested (`cargo xtask vm-test`). What is needed was there in 6.6: `bpf_loop` came with 5.17, XDP
/// programs that accept multi-buffer packets with 5.18, TCX with 6.6. And no lock is needed only where a test run has
/// bottom halves off (`bpf_test_run` in `net/bpf/test_run.c`), as it has in 6.6.
const OLDEST_KERNEL: (u32, u32) = (6, 12);

/// The kernel is new enough, the caller may load programs, bpffs is there.
///
/// # Errors
///
/// [`Kind::Unsupported`] or [`Kind::Permission`].
pub fn check() -> Result<()> {
    check_capabilities()?;
    check_pins()
}

/// The same for whoever only uses what is pinned, of which the modes of its files say who may.
///
/// # Errors
///
/// [`Kind::Unsupported`].
pub fn check_pins() -> Result<()> {
    check_kernel(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default())?;
    check_bpffs(Path::new(crate::pins::BPFFS))
}

pub(crate) fn check_kernel(release: &str) -> Result<()> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < OLDEST_KERNEL {
        let (major, minor) = OLDEST_KERNEL;
        return Err(Failure::new(
            Kind::Unsupported,
            format!(
                "kernel {} is too old: twheel needs {major}.{minor} or newer",
                release.trim()
            ),
        )
        .into());
    }
    Ok(())
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
    fn kernels_are_told_apart_by_number() {
        for release in ["6.12.0", "6.12.0-44-amd64", "6.18.44+\n", "10.0"] {
            check_kernel(release).unwrap();
        }
        for release in ["6.11.9", "6.6.0", "6.1.0-44-amd64", "5.15", ""] {
            let error = check_kernel(release).unwrap_err();
            assert_eq!(exit_code(&error), Kind::Unsupported as u8, "{release}");
        }
    }

    #[test]
    fn another_file_system_is_not_bpffs() {
        let error = check_bpffs(Path::new("/proc")).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
    }
}
