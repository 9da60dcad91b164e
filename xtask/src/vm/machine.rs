//! The virtual machine: QEMU, and an initramfs with the kernel's modules, the programs, and the
//! libraries that they need.
//!
//! It has no disk and no network. Its processors are emulated (TCG), so that neither KVM nor
//! particular processor features are needed, and its clock counts their instructions: the load of
//! the host changes no timing in the machine, and while all of its processors sleep, its time
//! passes at once.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use super::{arch::Arch, kernels::Kernel, qemu::Qemu, script};
use crate::sh;

/// Programs that the script and the tests call, besides those that are built.
const PROGRAMS: [&str; 8] = [
    "busybox", "kmod", "ip", "tc", "nft", "bpftool", "wg", "teamd",
];
/// Modules that the kernel loads on demand, with their dependencies: devices, filters, socket
/// diagnosis, ciphers.
const MODULES: [&str; 26] = [
    "kernel/drivers/net/veth.ko",
    "kernel/drivers/net/dummy.ko",
    "kernel/drivers/net/tun.ko",
    "kernel/drivers/net/bonding/",
    "kernel/drivers/net/geneve.ko",
    "kernel/drivers/net/ipvlan/",
    "kernel/drivers/net/macvlan.ko",
    "kernel/drivers/net/ppp/ppp_async.ko",
    "kernel/drivers/net/team/",
    "kernel/drivers/net/vrf.ko",
    "kernel/drivers/net/vxlan",
    "kernel/drivers/net/wireguard/",
    "kernel/net/8021q/",
    "kernel/net/802/",
    "kernel/net/bridge/bridge.ko",
    "kernel/net/llc/",
    "kernel/net/xfrm/",
    "kernel/crypto/",
    "kernel/lib/crypto/",
    "kernel/arch/x86/crypto/",
    "kernel/arch/arm64/crypto/",
    "kernel/net/core/",
    "kernel/net/ipv4/",
    "kernel/net/ipv6/",
    "kernel/net/netfilter/",
    "kernel/net/sched/",
];
/// Most seconds that a machine may run.
const LIMIT: &str = "3600";

/// What machines of an architecture run.
pub struct Programs {
    /// The architecture.
    pub arch: Arch,
    /// QEMU, which emulates it.
    pub qemu: Qemu,
    /// The directory with `ip` and libraries: `/`, or unpacked packages.
    pub userland: PathBuf,
    /// The command `twheel`.
    pub twheel: PathBuf,
    /// Its eBPF object.
    pub object: PathBuf,
    /// Test binaries, by name.
    pub tests: Vec<(&'static str, PathBuf)>,
}

impl Programs {
    /// Copies everything into the root directory of a machine.
    fn install(&self, root: &Path) -> Result<()> {
        for program in PROGRAMS {
            let from = self.find(&["bin", "sbin", "usr/bin", "usr/sbin"], program);
            let from = from.with_context(|| format!("there is no {program}"))?;
            self.copy(&from, root, program)?;
        }
        self.copy(&self.twheel, root, "twheel")?;
        self.strip(&root.join("bin/twheel"))?;
        for (name, path) in &self.tests {
            self.copy(path, root, name)?;
            self.strip(&root.join("bin").join(name))?;
        }
        symlink("busybox", root.join("bin/sh")).context("cannot make a link")?;
        symlink("kmod", root.join("bin/modprobe")).context("cannot make a link")?;
        fs::copy(&self.object, root.join("twheel.bpf.o")).context("cannot copy the object")?;
        Ok(())
    }

    fn find(&self, directories: &[&str], name: &str) -> Option<PathBuf> {
        let paths = directories
            .iter()
            .map(|it| self.userland.join(it).join(name));
        paths.into_iter().find(|path| path.exists())
    }

    /// Copies a program, its loader and the libraries it needs.
    fn copy(&self, from: &Path, root: &Path, name: &str) -> Result<()> {
        put(from, &root.join("bin").join(name))?;
        let triplet = self.arch.triplet();
        let [lib, usr] = ["lib", "usr/lib"].map(|it| format!("{it}/{triplet}"));
        let mut todo = vec![from.to_owned()];
        let mut done = BTreeSet::new();
        while let Some(file) = todo.pop() {
            for needed in needed(&file)? {
                if !done.insert(needed.clone()) {
                    continue;
                }
                // The loader is named with its path.
                let (path, to) = match needed.strip_prefix('/') {
                    Some(loader) => (self.find(&[""], loader), root.join(loader)),
                    None => (
                        self.find(&[&lib, &usr], &needed),
                        root.join(&lib).join(&needed),
                    ),
                };
                let path =
                    path.with_context(|| format!("{name} needs {needed}, which is not here"))?;
                put(&path, &to)?;
                todo.push(path);
            }
        }
        Ok(())
    }

    /// Removes what only debuggers read.
    fn strip(&self, path: &Path) -> Result<()> {
        let strip = match self.arch {
            Arch::Amd64 => "strip".to_owned(),
            Arch::Arm64 => format!("{}-strip", self.arch.triplet()),
        };
        sh::run(Command::new(strip).arg(path))
    }
}

fn put(from: &Path, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// The loader and the libraries that a program or a library is linked to.
fn needed(file: &Path) -> Result<Vec<String>> {
    let mut readelf = Command::new("readelf");
    let text = sh::output(readelf.env("LC_ALL", "C").arg("-ldW").arg(file))?;
    let between = |line: &str, start: &str, end: char| {
        let (_, rest) = line.split_once(start)?;
        Some(rest.split_once(end)?.0.to_owned())
    };
    let name = |line| {
        between(line, "Shared library: [", ']')
            .or_else(|| between(line, "program interpreter: ", ']'))
    };
    Ok(text.lines().filter_map(name).collect())
}

/// Copies modules and their dependencies, and writes their lists anew.
pub fn install_modules(kernel: &Kernel, root: &Path) -> Result<()> {
    let from = kernel.modules();
    let release = &kernel.release.name;
    let to = root.join("lib/modules").join(release);
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    for list in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        if from.join(list).exists() {
            put(&from.join(list), &to.join(list))?;
        }
    }
    if kernel.has_modules {
        let list = from.join("modules.dep");
        let list =
            fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        for module in wanted_modules(&list) {
            put(&from.join(module), &to.join(module))?;
        }
    }
    sh::run(
        Command::new("/sbin/depmod")
            .arg("-b")
            .arg(root)
            .arg(release),
    )
}

/// The modules that a machine needs, by the lines of modules.dep (`module: dependencies`).
fn wanted_modules(list: &str) -> BTreeSet<&str> {
    let lines = list.lines().filter_map(|line| line.split_once(':'));
    lines
        .filter(|(module, _)| MODULES.iter().any(|it| module.starts_with(it)))
        .flat_map(|(module, depends)| depends.split_whitespace().chain([module]))
        .collect()
}

/// Packs the root directory of a machine, and returns the archive. It is not compressed, because
/// the machine would decompress it under emulation.
fn pack(kernel: &Kernel, programs: &Programs, script: &str, dir: &Path) -> Result<PathBuf> {
    let root = dir.join("root");
    let _ = fs::remove_dir_all(dir);
    for directory in [
        "proc", "sys", "dev", "tmp", "run", "etc", "bin", "lib", "usr", "var/lib",
    ] {
        fs::create_dir_all(root.join(directory)).context("cannot make the machine's root")?;
    }
    for (link, to) in [("sbin", "bin"), ("usr/bin", "/bin"), ("var/run", "/run")] {
        symlink(to, root.join(link)).context("cannot make a link")?;
    }
    programs.install(&root)?;
    install_modules(kernel, &root)?;
    fs::write(root.join("policy.toml"), script::POLICY).context("cannot write a policy")?;
    let init = root.join("init");
    fs::write(&init, script).context("cannot write the script")?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).context("cannot chmod")?;
    let archive = archive(&root, dir)?;
    fs::remove_dir_all(&root).context("cannot remove what was packed")?;
    Ok(archive)
}

/// Packs a root directory into an initramfs in another directory.
pub fn archive(root: &Path, into: &Path) -> Result<PathBuf> {
    let archive = into.join("initramfs");
    let file = fs::File::create(&archive).context("cannot make the initramfs")?;
    sh::run(
        Command::new("sh")
            .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"])
            .current_dir(root)
            .stdout(file),
    )?;
    Ok(archive)
}

/// Boots a kernel with a script. Each line that the machine prints is written to a log beside the
/// archive and passed to `line`.
pub fn boot(
    kernel: &Kernel,
    programs: &Programs,
    script: &str,
    line: impl FnMut(&str),
) -> Result<PathBuf> {
    let dir = sh::target("vm").join(&kernel.release.name);
    let archive = pack(kernel, programs, script, &dir)?;
    emulate((kernel, &programs.qemu), &archive, &dir, line)
}

/// Boots a kernel with an initramfs. Each line that the machine prints is written to a log in `dir` and
/// passed to `line`.
pub fn emulate(
    (kernel, qemu): (&Kernel, &Qemu),
    archive: &Path,
    dir: &Path,
    mut line: impl FnMut(&str),
) -> Result<PathBuf> {
    // Without cmpxchg16b, which the kernel's allocator would use: after it, QEMU 7.2 leaves flags
    // that no processor has, and an interrupt that saves them there ends in a double fault.
    let (cpu, console) = match kernel.release.arch {
        Arch::Amd64 => ("-cpu max,la57=off,cx16=off", "ttyS0"),
        Arch::Arm64 => ("-M virt -cpu max,pauth-impdef=on", "ttyAMA0"),
    };
    let mut command = Command::new("timeout");
    command.arg(LIMIT);
    qemu.append_to(&mut command, kernel.release.arch);
    // Kernels before 6.5 start the other processors in a loop that never yields. With a clock that
    // counts instructions, those processors then never run: so the script starts them later, when
    // timers work.
    command
        .args(cpu.split(' '))
        .args("-accel tcg -icount shift=0,sleep=off -rtc clock=vm".split(' '))
        .args("-smp 2 -m 2G -nographic -no-reboot -nic none".split(' '))
        .arg("-append")
        .arg(format!("console={console} quiet panic=-1 maxcpus=1"))
        .arg("-kernel")
        .arg(kernel.image()?)
        .arg("-initrd")
        .arg(archive)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let path = dir.join("log");
    let mut log = fs::File::create(&path).context("cannot make a log")?;
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", kernel.release.arch.qemu()))?;
    let serial = BufReader::new(child.stdout.take().context("QEMU has no output")?);
    for text in serial.split(b'\n') {
        let text = text.context("cannot read the machine's output")?;
        let text = String::from_utf8_lossy(&text);
        let text = text.trim_end();
        writeln!(log, "{text}").context("cannot write the log")?;
        line(text);
    }
    child.wait().context("cannot wait for QEMU")?;
    Ok(path)
}
