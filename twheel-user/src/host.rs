//! Checks what this host offers before anything is loaded, so that what is missing is reported in a
//! sentence.

use std::{
    fs, io, mem,
    os::fd::{FromRawFd, OwnedFd},
    path::Path,
};

use anyhow::{Context, Result};
use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported, is_program_supported},
};
use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_prog_type};
use nix::sys::statfs::{FsType, statfs};

use crate::{
    bpf,
    failure::{Failure, Kind},
    privilege,
};

/// `BPF_FS_MAGIC`, `include/uapi/linux/magic.h`.
const BPF_FS_MAGIC: FsType = FsType(0xcafe_4a11);
/// Helpers that the programs call, and the Linux version that introduced each. The kernel is asked
/// for the helpers, not for its version: distributions backport newer BPF to older kernels.
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
/// The program types in use.
const TYPES: [(ProgramType, &str); 2] = [
    (ProgramType::Xdp, "XDP"),
    (ProgramType::SchedClassifier, "BPF programs of tc"),
];
/// A program that exchanges a register with a value in memory: `BPF_ATOMIC | BPF_XCHG`;
/// instructions of eight bytes.
const EXCHANGES: [[u8; 8]; 5] = [
    // r1 = 0
    [0xb7, 0x01, 0, 0, 0, 0, 0, 0],
    // *(u64 *)(r10 - 8) = r1
    [0x7b, 0x1a, 0xf8, 0xff, 0, 0, 0, 0],
    // r1 = xchg_64(r10 - 8, r1)
    [0xdb, 0x1a, 0xf8, 0xff, 0xe1, 0, 0, 0],
    // r0 = XDP_PASS
    [0xb7, 0x00, 0, 0, 2, 0, 0, 0],
    [0x95, 0, 0, 0, 0, 0, 0, 0],
];
/// The switch of the JIT. It is visible only in the host's own network namespace.
pub(crate) const JIT: &str = "/proc/sys/net/core/bpf_jit_enable";
/// The oldest kernel that is tested (`cargo xtask vm-test`).
const OLDEST_KERNEL: &str = "6.1";

/// Checks that the kernel has what the programs need, that the caller may load them, and that bpffs
/// is mounted.
///
/// # Errors
///
/// [`Kind::Unsupported`] or [`Kind::Permission`].
pub fn check() -> Result<()> {
    check_capabilities()?;
    check_kernel()?;
    check_jit(fs::read_to_string(JIT).ok().as_deref())?;
    check_pins()
}

/// The same for a process that only uses what is pinned. The modes of the pins say who may.
///
/// # Errors
///
/// [`Kind::Unsupported`].
pub fn check_pins() -> Result<()> {
    check_bpffs(Path::new(bpf::BPFFS))
}

/// The kernel's release, as it reports it.
pub fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Checks that the kernel has what the programs need. It asks the kernel, which takes the right to
/// load programs.
///
/// # Errors
///
/// [`Kind::Unsupported`]: something is missing; the message names it.
pub fn check_kernel() -> Result<()> {
    for (kind, name) in TYPES {
        let known = is_program_supported(kind)
            .with_context(|| format!("cannot find out whether the kernel has {name}"))?;
        if !known {
            return complain(&release(), &[format!("{name} (CONFIG_NET)")]);
        }
    }
    let mut missing = Vec::new();
    if !loads(&EXCHANGES).context("cannot find out whether the kernel has atomic operations")? {
        missing.push("atomic exchange (Linux 5.12)".to_owned());
    }
    for (helper, name, since) in HELPERS {
        let known = is_helper_supported(ProgramType::Xdp, helper)
            .with_context(|| format!("cannot find out whether the kernel has {name}"))?;
        if !known {
            missing.push(format!("{name} (Linux {since})"));
        }
    }
    complain(&release(), &missing)
}

/// Whether the JIT is switched off.
pub(crate) fn is_off(jit: Option<&str>) -> bool {
    jit.is_some_and(|setting| setting.trim() == "0")
}

fn check_jit(setting: Option<&str>) -> Result<()> {
    if is_off(setting) {
        let message = "the BPF JIT is off, and the kernel's interpreter cannot run twheel's \
                       programs: run `sysctl -w net.core.bpf_jit_enable=1`";
        return Err(Failure::new(Kind::Unsupported, message.to_owned()).into());
    }
    Ok(())
}

/// Whether the kernel's verifier accepts an XDP program, which is unloaded at once.
fn loads(instructions: &[[u8; 8]]) -> io::Result<bool> {
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    // SAFETY: this command's part of the union is plain data, of which all bytes are valid.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    load.prog_type = bpf_prog_type::BPF_PROG_TYPE_XDP as u32;
    load.insns = instructions.as_ptr() as u64;
    load.insn_cnt = instructions.len() as u32;
    load.license = c"GPL".as_ptr() as u64;
    // SAFETY: the attribute is filled for this command; what it points to outlives the call.
    match unsafe { bpf::call(bpf_cmd::BPF_PROG_LOAD, &mut attr) } {
        Ok(program) => {
            // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
            drop(unsafe { OwnedFd::from_raw_fd(program) });
            Ok(true)
        }
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

fn complain(release: &str, missing: &[String]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Unsupported,
        format!(
            "kernel {release} has no {}: twheel needs Linux {OLDEST_KERNEL}, or an older one with \
             all of this",
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
            "not permitted to load BPF programs: no {}: run as root, or with CAP_BPF, CAP_PERFMON \
             and CAP_NET_ADMIN",
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
    fn an_operation_that_the_kernel_lacks_is_found() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        assert!(loads(&EXCHANGES).unwrap());
        let mut unknown = EXCHANGES;
        unknown[2][4] = 0xd1;
        assert!(!loads(&unknown).unwrap());
    }

    #[test]
    fn a_jit_that_is_off_is_seen_where_it_can_be() {
        let error = check_jit(Some("0\n")).unwrap_err();
        assert_eq!(exit_code(&error), Kind::Unsupported as u8);
        check_jit(Some("1\n")).unwrap();
        check_jit(None).unwrap();
    }

    #[test]
    fn another_file_system_is_not_bpffs() {
        let error = check_bpffs(Path::new("/proc")).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
    }
}
