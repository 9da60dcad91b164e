//! Hosts of a fleet: namespaces with names of their own, joined by a bridge in the hub, where the
//! servers run.

use std::{
    ffi::OsStr,
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    netns::{Namespace, PATIENCE, ip},
    running::{twheel_bin, wait_within},
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

/// A running program, whose messages go to a file. It is killed when this is dropped.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program. What it prints, to both outputs, is added to a file.
    ///
    /// # Errors
    ///
    /// It cannot be started, or the file cannot be written.
    pub fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it and those before it have printed to its file.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it has printed this text.
    ///
    /// # Errors
    ///
    /// It has ended, or does not print the text within a minute.
    pub fn await_text(&mut self, text: &str) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.log().contains(text) {
            if let Some(status) = self.child.try_wait()? {
                bail!("it has ended ({status}): {}", self.log().trim());
            }
            ensure!(
                Instant::now() < end,
                "no {text:?} in {}: {}",
                self.log.display(),
                self.log().trim()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// # Errors
    ///
    /// It has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("it has ended ({status}): {}", self.log().trim()),
            None => Ok(()),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    ///
    /// The signal cannot be sent.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        // The child has not been waited for yet, so the process id is still its own.
        kill(Pid::from_raw(self.child.id() as i32), signal).context("cannot send a signal")
    }

    /// Ends it with SIGINT, and waits until it has ended.
    ///
    /// # Errors
    ///
    /// It does not end within a minute, or has failed.
    pub fn stop(mut self) -> Result<()> {
        self.signal(Signal::SIGINT)?;
        let status = wait_within(&mut self.child, PATIENCE)?
            .with_context(|| format!("it does not end: {}", self.log().trim()))?;
        ensure!(status.success(), "{status}: {}", self.log().trim());
        Ok(())
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    ///
    /// It does not end within a minute, or has failed.
    pub fn wait(mut self) -> Result<()> {
        let status = wait_within(&mut self.child, PATIENCE)?
            .with_context(|| format!("it does not end: {}", self.log().trim()))?;
        ensure!(status.success(), "{status}: {}", self.log().trim());
        Ok(())
    }

    /// Ends it with SIGKILL.
    ///
    /// # Errors
    ///
    /// It cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
