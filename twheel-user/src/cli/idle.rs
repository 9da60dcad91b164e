//! `twheel idle`: the idle connections of a program that knows nothing of twheel.

mod processes;
mod watch;

use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use twheel_client::{
    channel::{Channel, DEFAULT_PATH},
    protocol,
};

use self::{processes::Processes, watch::Watch};
use crate::{
    failure::{Failure, Kind},
    given,
};

/// Report a program's idle TCP connections, or end them
///
/// The program needs no change, and does no work for it. Its sockets are looked up once a second, and each established
/// TCP connection is registered with a running twheel that was given --offload, in the same network namespace. If the
/// packets of a connection pass no interface that this twheel watches, the kernel is asked when it was last active.
///
/// The idle time of a connection counts from what --life names, and at the earliest from when the connection was found.
/// A connection is reported once when it has been idle for the timeout. With --action notify it stays open: it is
/// reported again only if it is active and then idle for the timeout once more.
///
/// This ends when all processes named by --pid have ended, unless --cgroup is given. If twheel ends, this waits until
/// twheel is back. Idle times go on.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel idle --pid 1234 --timeout 60s
  twheel idle --pid 1234 --timeout 10m --action shutdown
  twheel idle --cgroup /sys/fs/cgroup/system.slice/nginx.service --timeout 5m --life data-in --action destroy

To copy sockets of another process takes the rights of a debugger (ptrace(2)): be root, or the process's user, if \
kernel.yama.ptrace_scope is 0.")]
pub struct Idle {
    /// A process; may be repeated
    #[arg(long = "pid", value_name = "PID", required_unless_present = "cgroups")]
    pids: Vec<u32>,
    /// The directory of a cgroup (version 2): all processes in it and below, also later ones; may be repeated
    #[arg(long = "cgroup", value_name = "DIR")]
    cgroups: Vec<PathBuf>,
    /// How long a connection may be idle, from 1ms to 10d
    #[arg(long, value_name = "DURATION", value_parser = given::duration)]
    timeout: Duration,
    /// What counts as life
    #[arg(long, value_enum, default_value = "data")]
    life: Life,
    /// What is done with an idle connection
    #[arg(long, value_enum, default_value = "notify")]
    action: Action,
    /// The socket of the running twheel
    #[arg(long, value_name = "PATH", env = twheel_client::channel::PATH_VARIABLE, default_value = DEFAULT_PATH)]
    offload: PathBuf,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// What counts as life.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Life {
    /// New data, whoever sends it
    Data,
    /// New data that the program receives
    DataIn,
    /// New data that the program sends
    DataOut,
    /// Any packet, also an acknowledgement or a keepalive probe
    Any,
}

impl Life {
    fn bits(self) -> u8 {
        use protocol::life::{ANY, DATA_IN, DATA_OUT};
        match self {
            Self::Data => DATA_IN | DATA_OUT,
            Self::DataIn => DATA_IN,
            Self::DataOut => DATA_OUT,
            Self::Any => ANY,
        }
    }
}

/// What is done with an idle connection.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Action {
    /// A line is printed
    Notify,
    /// Also, the socket is shut down: the program reads end of file, the peer gets a FIN
    Shutdown,
    /// Also, the kernel aborts the connection: both sides get an error
    Destroy,
}

impl From<Action> for protocol::Action {
    fn from(action: Action) -> Self {
        match action {
            Action::Notify => Self::Notify,
            // This command shuts it down.
            Action::Shutdown => Self::Shutdown,
            Action::Destroy => Self::Destroy,
        }
    }
}

/// How often sockets are looked for, and a twheel that has ended.
const LOOK: Duration = Duration::from_secs(1);
/// How long a twheel may take to start.
const STARTING: Duration = Duration::from_secs(10);

impl Idle {
    pub(super) fn execute(self) -> Result<()> {
        let usage = |message: &str| Err(Failure::new(Kind::Usage, message).into());
        // A part of a millisecond more, so that nothing is reported early.
        let timeout = self.timeout.as_nanos().div_ceil(1_000_000);
        if timeout == 0 {
            return usage("--timeout: give at least 1ms");
        }
        let processes = Processes::new(&self.pids, self.cgroups.clone())?;
        let channel = connect(&self.offload).map_err(|error| refused(&self.offload, &error))?;
        let timeout = match u32::try_from(timeout) {
            Ok(timeout) if u64::from(timeout) <= channel.welcome().longest => timeout,
            _ => return usage("--timeout: this is longer than twheel's timers can be: give less"),
        };
        let mut next = Instant::now();
        let path = self.offload.clone();
        let mut watch = Watch::new(self, timeout, processes, channel);
        loop {
            if Instant::now() >= next {
                if watch.channel().is_none() {
                    watch.reconnect(&path)?;
                }
                watch.look()?;
                next = Instant::now() + LOOK;
            }
            if watch.is_over() {
                return Ok(());
            }
            match wait(watch.channel(), next)? {
                Woken::Unread => return Ok(()),
                Woken::Packet => watch.receive()?,
                Woken::Nothing => {}
            }
        }
    }
}

/// Connects to the running twheel. One that has just been started takes connections before it answers:
/// it loads its programs first.
fn connect(path: &Path) -> io::Result<Channel> {
    let until = Instant::now() + STARTING;
    loop {
        match Channel::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut && Instant::now() < until => {}
            connected => return connected,
        }
    }
}

/// Why a wait has ended.
enum Woken {
    /// The reader of standard output has closed it, as `head` does.
    Unread,
    /// twheel has sent something, or has ended.
    Packet,
    /// It is time to look again.
    Nothing,
}

fn wait(channel: Option<&Channel>, until: Instant) -> Result<Woken> {
    let stdout = io::stdout();
    // A millisecond more: it is to have passed.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
    // Errors alone: poll always returns these.
    let mut awaited = vec![PollFd::new(stdout.as_fd(), PollFlags::empty())];
    awaited.extend(channel.map(|channel| PollFd::new(channel.as_fd(), PollFlags::POLLIN)));
    match poll(&mut awaited, left) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is = |at: usize, wanted| {
        let found = awaited.get(at).and_then(PollFd::revents);
        found.is_some_and(|found| found.intersects(wanted))
    };
    Ok(if is(0, PollFlags::POLLERR) {
        Woken::Unread
    } else if is(1, PollFlags::all()) {
        Woken::Packet
    } else {
        Woken::Nothing
    })
}

fn refused(path: &Path, error: &io::Error) -> Failure {
    let (kind, hint) = match error.kind() {
        io::ErrorKind::PermissionDenied => (
            Kind::Permission,
            ": run this as root, or as a member of the --group of `twheel run`",
        ),
        // The error says what to do.
        io::ErrorKind::Unsupported => (Kind::Other, ""),
        _ => (
            Kind::Other,
            ": start `twheel run` with --offload PATH, and give the same path here",
        ),
    };
    let message = format!(
        "cannot connect to twheel at {}: {error}{hint}",
        path.display()
    );
    Failure::new(kind, message)
}
