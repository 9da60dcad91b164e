//! Hosts of a fleet: namespaces with names of their own, joined by a bridge in the hub, where the
//! servers run.

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};

use crate::{
    netns::{Namespace, ip},
    process::Process,
    running::twheel_bin,
};

/// The interface of each host, which `twheel run` watches.
pub const IFACE: &str = "eth0";
/// Most hosts of a fleet.
pub const MOST: usize = 200;
/// The link-layer address of the hub's bridge.
const BRIDGE: &str = "02:00:00:00:00:63";

/// The hub's address, where the broker and the database listen.
pub const HUB: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// An address that packets can be sent to and that never answers.
pub const SILENT: Ipv4Addr = Ipv4Addr::new(10, 99, 9, 9);

/// Hosts that reach one another and the hub.
pub struct Network {
    // Dropped before the hub.
    /// The hosts.
    pub hosts: Vec<Host>,
    /// Where the servers run.
    pub hub: Namespace,
}

/// A host with a name and a network namespace of its own.
pub struct Host {
    /// Its name, which its events have.
    pub name: String,
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address.
    pub v6: Ipv6Addr,
    /// Its namespace.
    pub namespace: Namespace,
    /// The directory of its files.
    pub directory: PathBuf,
}

impl Network {
    /// Makes this many hosts, `host-01` and so on, whose files are in subdirectories of `directory`.
    /// Between hosts `go_on` is asked.
    ///
    /// # Errors
    ///
    /// A namespace or an interface cannot be made, or `go_on` has failed.
    pub fn new(count: usize, directory: &Path, go_on: &dyn Fn() -> Result<()>) -> Result<Self> {
        ensure!(count <= MOST, "at most {MOST} hosts");
        let hub = Namespace::new("hub")?;
        // The hub drops what comes for SILENT, instead of passing it on to all hosts.
        hub.ip(&format!("link add bridge0 address {BRIDGE} type bridge"))?;
        hub.add_address(HUB.into(), 16, "bridge0")?;
        hub.ip("link set bridge0 up")?;
        let mut hosts = Vec::new();
        for number in 1..=count {
            go_on()?;
            hosts.push(Host::new(&hub, number, directory)?);
        }
        Ok(Self { hosts, hub })
    }

    /// A command that will run on the hub.
    ///
    /// # Errors
    ///
    /// A descriptor cannot be copied.
    pub fn on_hub(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        self.hub.command(program)
    }
}

impl Host {
    fn new(hub: &Namespace, number: usize, directory: &Path) -> Result<Self> {
        let name = format!("host-{number:02}");
        let namespace = Namespace::new("host")?;
        ip(&format!(
            "link add {IFACE} netns {} type veth peer name port{number} netns {}",
            namespace.name(),
            hub.name()
        ))?;
        hub.ip(&format!("link set port{number} master bridge0 up"))?;
        namespace.ip(&format!("link set {IFACE} up"))?;
        let number = u8::try_from(number).context("too many hosts")?;
        let v4 = Ipv4Addr::new(10, 99, 1, number);
        let v6 = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 1, u16::from(number));
        namespace.add_address(v4.into(), 16, IFACE)?;
        namespace.add_address(v6.into(), 64, IFACE)?;
        // A SYN is sent as if someone had answered ARP.
        namespace.ip(&format!(
            "neigh add {SILENT} lladdr {BRIDGE} dev {IFACE} nud permanent"
        ))?;
        let directory = directory.join(&name);
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Self {
            name,
            v4,
            v6,
            namespace,
            directory,
        })
    }

    /// Its address of a family: IPv4 for even numbers, IPv6 for odd ones.
    pub fn address(&self, number: usize) -> IpAddr {
        match number.is_multiple_of(2) {
            true => self.v4.into(),
            false => self.v6.into(),
        }
    }

    /// The path of one of its files.
    pub fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// A `twheel` command on this host, with the host's name and history.
    ///
    /// # Errors
    ///
    /// There is no program, or a descriptor cannot be copied.
    pub fn twheel(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.namespace.command(twheel_bin()?)?;
        command
            .args(args)
            .env("TWHEEL_HISTORY", self.directory.join("history"));
        let name = self.name.clone();
        // SAFETY: between fork and exec the closure makes two system calls, with a name of its own, and
        // allocates nothing.
        unsafe {
            command.pre_exec(move || {
                unshare(CloneFlags::CLONE_NEWUTS)?;
                match libc::sethostname(name.as_ptr().cast(), name.len()) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        Ok(command)
    }

    /// Starts a `twheel` command on this host whose messages go to a file of this name, and whose
    /// output goes nowhere.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(&self, name: &str, args: &[&str]) -> Result<Process> {
        Process::start(self.twheel(args)?, self.directory.join(name))
    }

    /// The lines that a `twheel` command on this host prints.
    ///
    /// # Errors
    ///
    /// It fails.
    pub fn lines(&self, args: &[&str]) -> Result<Vec<String>> {
        let output = self.twheel(args)?.stdin(Stdio::null()).output()?;
        ensure!(
            output.status.success(),
            "twheel {} failed on {}: {}",
            args.join(" "),
            self.name,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let text = String::from_utf8(output.stdout)?;
        Ok(text.lines().map(str::to_owned).collect())
    }
}
