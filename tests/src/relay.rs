//! Interfaces whose packets a program carries from one host to the other: tun, tap and PPP.

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    poll::{PollFd, PollFlags, poll},
    pty::openpty,
    sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr},
};

use crate::netns::Namespace;

/// Copies what it reads from either of two descriptors to the other, until it is dropped.
pub struct Relay {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Between the first descriptors of both lists; the others are only kept open.
    pub fn start(client: Vec<OwnedFd>, server: Vec<OwnedFd>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            let ends = [&client, &server].map(|it| it[0].as_fd());
            let mut buffer = vec![0; 1 << 16];
            while !told.load(Relaxed) {
                let mut polled = ends.map(|end| PollFd::new(end, PollFlags::POLLIN));
                let _ = poll(&mut polled, 50u8);
                for from in 0..2 {
                    // A device that is down accepts nothing: the packet counts as lost.
                    while let Ok(length @ 1..) = nix::unistd::read(ends[from], &mut buffer) {
                        let _ = nix::unistd::write(ends[1 - from], &buffer[..length]);
                    }
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A tun device.
pub fn tun(host: &Namespace, name: &str) -> Result<Vec<OwnedFd>> {
    open_tun(host, name, libc::IFF_TUN)
}

/// A tap device.
pub fn tap(host: &Namespace, name: &str) -> Result<Vec<OwnedFd>> {
    open_tun(host, name, libc::IFF_TAP)
}

/// A device of the host that passes its packets to this process.
fn open_tun(host: &Namespace, name: &str, mode: libc::c_int) -> Result<Vec<OwnedFd>> {
    host.enter(|| {
        let file = device("net/tun", 10, 200)?;
        let flags = mode | libc::IFF_NO_PI;
        // SAFETY: all-zero bytes are a valid request.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = flags as i16;
        control(&file, libc::TUNSETIFF, &mut request).context("cannot make the device")?;
        Ok(vec![file.into()])
    })
}

/// Opens a character device, and makes its node if there is none. The kernel loads the module.
fn device(name: &str, major: u64, minor: u64) -> Result<File> {
    let path = format!("/dev/{name}");
    if fs::metadata(&path).is_err() {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let _ = fs::create_dir("/dev/net");
        let mode = Mode::from_bits_truncate(0o600);
        mknod(path.as_str(), SFlag::S_IFCHR, mode, makedev(major, minor))?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let opened = options.custom_flags(libc::O_NONBLOCK).open(&path);
    opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO | libc::ENOENT) => {
            anyhow::anyhow!("{path}: not supported by this kernel")
        }
        _ => anyhow::Error::new(error).context(format!("cannot open {path}")),
    })
}

/// An `ioctl` that reads or writes a value.
fn control<T>(on: &impl AsRawFd, request: libc::Ioctl, value: &mut T) -> Result<()> {
    // SAFETY: each caller's request takes a pointer to a value of this type.
    let result = unsafe { libc::ioctl(on.as_raw_fd(), request, value as *mut T) };
    ensure!(result >= 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

/// A pseudo terminal as a serial line, with PPP on the host's side. What pppd would negotiate is
/// set directly: IPv4 and IPv6 pass.
pub fn ppp(host: &Namespace, name: &str) -> Result<Vec<OwnedFd>> {
    const N_PPP: libc::c_int = 3;
    // linux/ppp-ioctl.h.
    const PPPIOCGCHAN: libc::Ioctl = 0x8004_7437;
    const PPPIOCATTCHAN: libc::Ioctl = 0x4004_7438;
    const PPPIOCNEWUNIT: libc::Ioctl = 0xc004_743e;
    const PPPIOCCONNECT: libc::Ioctl = 0x4004_743a;
    const PPPIOCSNPMODE: libc::Ioctl = 0x4008_744b;
    const PROTOCOLS: [libc::c_int; 2] = [0x21, 0x57];
    host.enter(|| {
        let mut unit = -1;
        let ppp = device("ppp", 108, 0)?;
        control(&ppp, PPPIOCNEWUNIT, &mut unit).context("cannot make a unit")?;
        host.ip(&format!("link set ppp{unit} name {name}"))?;
        let line = openpty(None, None)?;
        let mut settings = tcgetattr(&line.slave)?;
        cfmakeraw(&mut settings);
        tcsetattr(&line.slave, SetArg::TCSANOW, &settings)?;
        let mut discipline = N_PPP;
        if let Err(error) = control(&line.slave, libc::TIOCSETD, &mut discipline) {
            bail!("lines with PPP are not supported by this kernel: {error:#}");
        }
        let mut number = 0;
        control(&line.slave, PPPIOCGCHAN, &mut number).context("no channel")?;
        let channel = device("ppp", 108, 0)?;
        control(&channel, PPPIOCATTCHAN, &mut number).context("cannot attach to the channel")?;
        control(&channel, PPPIOCCONNECT, &mut unit).context("cannot connect the channel")?;
        for protocol in PROTOCOLS {
            control(&ppp, PPPIOCSNPMODE, &mut [protocol, 0]).context("a protocol is refused")?;
        }
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&line.master, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(vec![line.master, line.slave, ppp.into(), channel.into()])
    })
}
