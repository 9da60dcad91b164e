//! `cargo xtask vm-test --system`: a Debian system, with systemd as process 1, in which twheel's package
//! is installed, run as a unit, restarted, upgraded and purged, while connections talk.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use anyhow::{Context, Result, ensure};

use super::{
    arch::Arch,
    archive::Archive,
    kernels::{self, Kernel, Selection},
    machine,
    qemu::Qemu,
};
use crate::{
    package, setup,
    sh::{self, say},
    toolchain,
};

/// Debian's releases, each with a kernel of its own: one without TCX, one with it.
const SYSTEMS: [(&str, &str); 2] = [("bookworm", "6.1."), ("trixie", "6.12.")];
/// What the machine runs once it is up.
const SCRIPT: &str = include_str!("system.sh");
const UNIT: &str = "\
[Unit]
After=multi-user.target

[Service]
Type=oneshot
ExecStart=/system.sh
";
/// Starts systemd in a mount of its own: in the initramfs itself no unit could have another root, as
/// `ProtectSystem=` and others give it.
const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox mount --bind / /newroot
cd /newroot
/bin/busybox mount --move . /
exec /bin/busybox chroot . /usr/lib/systemd/systemd
";
/// Modules that are loaded at the start: the system has no modprobe.
const MODULES: &str = "veth\nsch_ingress\ncls_bpf\n";
/// What the script tells, in order.
const PASSES: [&str; 11] = [
    "starts",
    "confined",
    "offloads first",
    "tracks",
    "restart",
    "upgrade",
    "stepped",
    "kill",
    "offloads again",
    "reload",
    "purge",
];

/// Boots each system.
pub fn test() -> Result<()> {
    setup::vm()?;
    let packages = package::both_releases()?;
    let cache = toolchain::cache()?.join("vm");
    let archive = Archive::new(&cache)?;
    let names = archive.names()?;
    let qemu = Qemu::new(&archive, Arch::Amd64, &cache)?;
    for (suite, series) in SYSTEMS {
        let releases = kernels::choose(&names, &Selection::Named(series));
        let release = releases
            .into_iter()
            .find(|it| it.arch == Arch::Amd64 && !it.realtime)
            .with_context(|| format!("the mirror has no kernel {series}"))?;
        let kernel = Kernel::fetch(&archive, &names, release, &cache)?;
        let base = package::root_of(suite)?;
        boot(&kernel, &qemu, (suite, &base), &packages)
            .with_context(|| format!("Debian {suite} with {}", kernel.release.name))?;
    }
    Ok(())
}

fn boot(
    kernel: &Kernel,
    qemu: &Qemu,
    (suite, base): (&str, &Path),
    [first, later]: &[std::path::PathBuf; 2],
) -> Result<()> {
    let dir = sh::target("vm").join(format!("system-{suite}"));
    let root = dir.join("root");
    let remove = || {
        sh::run(
            sh::as_root("rm", [])?
                .args(["-rf", "--one-file-system"])
                .arg(&root),
        )
    };
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    remove()?;
    sh::run(sh::as_root("cp", [])?.arg("-a").args([base, &root]))?;
    let put = |file: &str, text: &str, mode: u32| {
        let path = root.join(file);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot write {}", path.display()))
    };
    fs::create_dir_all(root.join("newroot"))?;
    put("init", INIT, 0o755)?;
    put("system.sh", SCRIPT, 0o755)?;
    put("etc/systemd/system/system.service", UNIT, 0o644)?;
    put("etc/modules-load.d/system.conf", MODULES, 0o644)?;
    put("etc/hostname", "system\n", 0o644)?;
    let links = [
        (
            "/usr/lib/systemd/system/multi-user.target",
            "etc/systemd/system/default.target",
        ),
        (
            "/etc/systemd/system/system.service",
            "etc/systemd/system/multi-user.target.wants/system.service",
        ),
        ("/dev/null", "etc/systemd/system/getty.target"),
        ("/dev/null", "etc/systemd/system/timers.target"),
    ];
    for (to, link) in links {
        let link = root.join(link);
        let _ = fs::remove_file(&link);
        symlink(to, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    machine::install_modules(kernel, &root)?;
    fs::create_dir_all(root.join("packages"))?;
    for (deb, name) in [(first, "first.deb"), (later, "later.deb")] {
        fs::copy(deb, root.join("packages").join(name)).context("cannot copy a package")?;
    }
    let archive = machine::archive(&root, &dir)?;
    remove()?;

    say!(
        "Booting Debian {suite} with {}; this usually takes 4 min.",
        kernel.release.name
    );
    let mut passed = Vec::new();
    let mut ended = false;
    let log = machine::emulate((kernel, qemu), &archive, &dir, |line| {
        let Some(told) = line.split_once("vm: ").map(|(_, told)| told) else {
            return;
        };
        say!("{suite}: {told}");
        passed.extend(told.strip_prefix("pass ").map(str::to_owned));
        ended |= told == "ended 0";
    })?;
    ensure!(
        ended && passed == PASSES,
        "not all is well there: {} has what was printed",
        log.display()
    );
    Ok(())
}
