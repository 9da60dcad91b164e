//! Network namespaces as hosts of a lab, and what twheel has pinned for them.

use std::{
    fs::{self, File},
    io::Write,
    net::IpAddr,
    os::{
        fd::AsRawFd,
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::Signal,
};

use crate::skipped;

/// The directory of twheel's pins.
pub const PINS: &str = "/sys/fs/bpf/twheel";
/// Longer than anything here takes, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Panics unless the caller is root: a test that cannot run has failed.
pub fn require_root() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "these tests make network namespaces and load BPF programs: run them as root, or with \
         `cargo xtask test`"
    );
}

/// The path of a system program, even if a user's PATH lacks sbin.
pub fn program(name: &str) -> PathBuf {
    let sbin = Path::new("/usr/sbin").join(name);
    if sbin.exists() { sbin } else { name.into() }
}

/// The path of a program that only some tests need.
///
/// # Errors
///
/// It is not there. `cargo xtask test` counts a test that ends with this as skipped.
pub fn tool(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    let found = directories.map(|it| it.join(name)).find(|it| it.is_file());
    if found.is_none() {
        skipped(format_args!("there is no {name}"));
    }
    found.with_context(|| format!("there is no {name}: `cargo xtask setup` installs it"))
}

/// Runs `ip`.
pub fn ip(args: &str) -> Result<String> {
    let output = Command::new(program("ip"))
        .args(args.split_ascii_whitespace())
        .output()
        .context("cannot run `ip`: is iproute2 installed?")?;
    ensure!(
        output.status.success(),
        "`ip {args}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A network namespace. When this is dropped, it is removed, with the pins that twheel made in it.
pub struct Namespace {
    name: String,
    file: File,
}

impl Namespace {
    /// Makes a namespace with `lo` up.
    pub fn new(role: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("twl-{}-{role}{count}", std::process::id());
        ip(&format!("netns add {name}"))?;
        let namespace = match File::open(format!("/var/run/netns/{name}")) {
            Ok(file) => Self { name, file },
            Err(error) => {
                let _ = ip(&format!("netns del {name}"));
                return Err(error).context("cannot open the namespace");
            }
        };
        namespace.ip("link set lo up")?;
        // Makes IPv6 usable at once: no other host can have an address here, so duplicate address
        // detection, which takes a second (RFC 4862, section 5.4), is not needed.
        namespace.enter(|| {
            for interfaces in ["all", "default"] {
                let accept = format!("/proc/sys/net/ipv6/conf/{interfaces}/accept_dad");
                fs::write(&accept, "0").with_context(|| format!("cannot write {accept}"))?;
            }
            Ok(())
        })?;
        Ok(namespace)
    }

    /// Gives an interface an address that can be used at once. (Without `nodad`, an IPv6 address
    /// can be used only after a kernel thread has processed it, whatever `accept_dad` says.)
    pub fn add_address(&self, address: IpAddr, length: u8, interface: &str) -> Result<()> {
        let nodad = if address.is_ipv6() { " nodad" } else { "" };
        self.ip(&format!(
            "addr add {address}/{length} dev {interface}{nodad}"
        ))?;
        Ok(())
    }

    /// Its name, for `ip -n`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` in the namespace.
    pub fn ip(&self, args: &str) -> Result<String> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Runs several `ip` commands, one per line, in the namespace by one process.
    pub fn batch(&self, commands: &str) -> Result<()> {
        self.feed(&program("ip"), &["-batch", "-"], commands)
    }

    /// Makes a tun device, which exists as long as the file is open; with another link type
    /// (`ARPHRD_*`), if one is given.
    pub fn tun(&self, name: &str, link_type: Option<u16>) -> Result<File> {
        // `TUNSETIFF`, `TUNSETLINK`, `include/uapi/linux/if_tun.h`.
        const SET_INTERFACE: libc::c_ulong = 0x4004_54ca;
        const SET_LINK: libc::c_ulong = 0x4004_54cd;
        self.enter(|| {
            let file = File::options()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .context("cannot open /dev/net/tun")?;
            // SAFETY: all-zero bytes are a valid request.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
            // SAFETY: the request is the one that this call takes.
            let made = unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE, &raw mut request) };
            ensure!(made == 0, "{}", std::io::Error::last_os_error());
            if let Some(link_type) = link_type {
                let link_type = libc::c_int::from(link_type);
                // SAFETY: the call takes a number.
                let set = unsafe { libc::ioctl(file.as_raw_fd(), SET_LINK, link_type) };
                ensure!(set == 0, "{}", std::io::Error::last_os_error());
            }
            Ok(file)
        })
    }

    /// Runs a closure inside the namespace, on a thread of its own. Sockets that it opens belong to
    /// the namespace, wherever they are used.
    pub fn enter<T: Send>(&self, inside: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&self.file, CloneFlags::CLONE_NEWNET).context("cannot enter")?;
                    inside()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Starts a thread inside the namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        inside: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<JoinHandle<Result<T>>> {
        let file = self.file.try_clone().context("cannot copy a descriptor")?;
        Ok(thread::spawn(move || {
            setns(&file, CloneFlags::CLONE_NEWNET).context("cannot enter")?;
            inside()
        }))
    }

    /// Loads rules for its packet filter, in nft's language.
    pub fn nft(&self, rules: &str) -> Result<()> {
        self.feed(&tool("nft")?, &["-f", "-"], rules)
    }

    /// Runs a program inside, with this as its standard input.
    fn feed(&self, program: &Path, args: &[&str], input: &str) -> Result<()> {
        let name = program.display();
        let mut child = self
            .command(program)?
            .args(args)
            .stdin(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run `{name}`: is it installed?"))?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        stdin.write_all(input.as_bytes())?;
        drop(stdin);
        ensure!(child.wait()?.success(), "`{name}` refuses {input}");
        Ok(())
    }

    /// A command that will run inside. It sees the file systems unchanged, unlike with `ip netns
    /// exec`, which mounts a new `/sys` and so hides bpffs. It gets SIGTERM if the thread that
    /// starts it ends first, and does not get the terminal's Ctrl-C.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let file = self.file.try_clone().context("cannot copy a descriptor")?;
        let mut command = Command::new(program);
        command.process_group(0);
        // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
                Ok(setns(&file, CloneFlags::CLONE_NEWNET)?)
            });
        }
        Ok(command)
    }

    /// The instances that a twheel of any version has pinned in this namespace.
    pub fn instances(&self) -> Result<Vec<PathBuf>> {
        let prefix = format!("{}-", self.inode()?);
        let mut found = Vec::new();
        for version in entries(Path::new(PINS)) {
            found.extend(entries(&version).into_iter().filter(|instance| {
                instance
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            }));
        }
        Ok(found)
    }

    /// The entries of the instances' directories, sorted.
    pub fn pins(&self) -> Result<Vec<PathBuf>> {
        let mut pins: Vec<_> = self
            .instances()?
            .iter()
            .flat_map(|it| entries(it))
            .collect();
        pins.sort();
        Ok(pins)
    }

    /// The name of the history of an instance whose first interface has this name.
    pub fn history(&self, interface: &str) -> String {
        format!("{interface}@netns-{}", self.name)
    }

    /// Its inode, by which twheel names its instances.
    pub fn inode(&self) -> Result<u64> {
        Ok(self.file.metadata().context("cannot stat")?.ino())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        for instance in self.instances().unwrap_or_default() {
            remove_pins(&instance);
        }
        if let Err(error) = ip(&format!("netns del {}", self.name)) {
            eprintln!("{error:#}");
        }
    }
}

/// Removes an instance's directory, BPF links first, and those of its parents that are then empty.
pub fn remove_pins(instance: &Path) {
    let mut pins = entries(instance);
    pins.sort_by_key(|pin| !pin.to_string_lossy().contains('@'));
    for pin in pins {
        if pin.is_dir() {
            // A part for another network namespace.
            entries(&pin)
                .into_iter()
                .for_each(|pin| drop(fs::remove_file(pin)));
            let _ = fs::remove_dir(&pin);
        }
        let _ = fs::remove_file(pin);
    }
    for directory in instance.ancestors().take(3) {
        // The first directory that is not empty; bpffs itself is busy.
        if fs::remove_dir(directory).is_err() {
            break;
        }
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory)
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default()
}
