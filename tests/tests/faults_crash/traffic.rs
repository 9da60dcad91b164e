//! A sender of packets, and a run that can be killed.

use std::{
    fs,
    io::PipeWriter,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    net::if_::if_nametoindex,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel_tests::{
    netns::{Namespace, PATIENCE},
    pair::{CLIENT, Pair, SERVER},
    plane::{ACK, frame},
};

use crate::millis;

/// Sends packets over the cable until it is stopped. Each is of another flow; incoming and outgoing
/// packets alternate.
pub struct Sender {
    pub stop: Arc<AtomicBool>,
    pub pause: Arc<AtomicBool>,
    pub sent: Arc<AtomicU32>,
    pub thread: Option<thread::JoinHandle<Result<()>>>,
}

impl Sender {
    /// Sends bursts of this many packets, a millisecond apart.
    pub fn start(pair: &Pair, burst: u32) -> Result<Self> {
        let sockets = [
            open_on(&pair.client, CLIENT)?,
            open_on(&pair.server, SERVER)?,
        ];
        let (stop, pause) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let sent = Arc::<AtomicU32>::default();
        let (told, paused, counted) = (stop.clone(), pause.clone(), sent.clone());
        let thread = thread::spawn(move || {
            while !told.load(Relaxed) {
                for _ in 0..burst {
                    if paused.load(Relaxed) {
                        break;
                    }
                    let number = counted.load(Relaxed);
                    let bytes = frame(number, false, ACK);
                    let socket = sockets[number as usize % 2].as_raw_fd();
                    // SAFETY: the buffer has the length that is given.
                    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), 0) };
                    ensure!(
                        sent == bytes.len() as isize,
                        "{}",
                        std::io::Error::last_os_error()
                    );
                    counted.fetch_add(1, Relaxed);
                }
                thread::sleep(millis(1));
            }
            Ok(())
        });
        Ok(Self {
            stop,
            pause,
            sent,
            thread: Some(thread),
        })
    }

    /// Pauses or resumes. When it returns after a pause, all packets on the cable have arrived.
    pub fn pause(&self, pause: bool) {
        self.pause.store(pause, Relaxed);
        thread::sleep(millis(20));
    }

    pub fn stop(mut self) -> Result<u32> {
        self.stop.store(true, Relaxed);
        let thread = self
            .thread
            .take()
            .context("the sender was stopped before")?;
        thread.join().expect("the sender panicked")?;
        Ok(self.sent.load(Relaxed))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// A packet socket on an interface.
fn open_on(namespace: &Namespace, interface: &str) -> Result<OwnedFd> {
    namespace.enter(|| {
        // SAFETY: plain calls with buffers of their own; no one else uses the descriptor.
        unsafe {
            let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
            let socket = libc::socket(libc::AF_PACKET, flags, 0);
            ensure!(socket >= 0, "cannot open a packet socket");
            let socket = OwnedFd::from_raw_fd(socket);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_ifindex = if_nametoindex(interface)? as i32;
            let address = (&raw const address).cast();
            let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            ensure!(
                libc::bind(socket.as_raw_fd(), address, length) == 0,
                "cannot bind the packet socket"
            );
            Ok(socket)
        }
    })
}

/// A `twheel run` whose standard output is a pipe that outlives it; killed when this is dropped.
pub struct Run(pub Child);

impl Run {
    pub fn start(namespace: &Namespace, args: &[&str], out: &PipeWriter) -> Result<Self> {
        let child = namespace
            .twheel(args)?
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id() as i32), signal)?)
    }

    /// Whether it has attached and is stepping, which the names of its threads show.
    pub fn steps(&self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0.id()));
        let mut threads = threads.into_iter().flatten().filter_map(Result::ok);
        threads.any(|thread| {
            let name = fs::read_to_string(thread.path().join("comm"));
            name.is_ok_and(|name| name.starts_with("twheel-step"))
        })
    }

    pub fn await_steps(&mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.steps() {
            let status = self.0.try_wait()?;
            ensure!(status.is_none(), "the run has ended: {status:?}");
            ensure!(Instant::now() < end, "the run does not begin to step");
            thread::sleep(millis(2));
        }
        Ok(())
    }

    /// Kills it. Returns whether it was alive: a run that was told to end may have ended before.
    pub fn kill(mut self) -> Result<bool> {
        self.signal(Signal::SIGKILL)?;
        let status = self.0.wait()?;
        let was_alive = status.signal() == Some(Signal::SIGKILL as i32);
        ensure!(was_alive || status.success(), "{status}");
        Ok(was_alive)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
