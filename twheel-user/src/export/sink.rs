//! Where an export goes: a file, or a stream socket. A socket's other end may end, or may not be
//! there yet; then it is tried again.

use std::{
    collections::VecDeque,
    fmt,
    fs::{File, OpenOptions},
    io::{self, Write},
    net::{TcpStream, ToSocketAddrs},
    os::{
        fd::AsRawFd,
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use crate::history::Position;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a write may wait for the other end.
const STALLED: Duration = Duration::from_secs(60);
/// What the other end may have received without having read it: more than Linux lets a socket hold
/// by default (`net.ipv4.tcp_rmem`, 6 MiB). So much is sent again after a connection has ended.
pub const UNREAD: u64 = 8 << 20;

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A file, to whose end it is written.
    File(PathBuf),
    /// A Unix stream socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return match text {
                "" => Err("give a file, unix:PATH or tcp:HOST:PORT".to_owned()),
                path => Ok(Self::File(path.into())),
            };
        };
        match address
            .rsplit_once(':')
            .map(|(_, port)| port.parse::<u16>())
        {
            Some(Ok(_)) => Ok(Self::Tcp(address.to_owned())),
            _ => Err(format!(
                "{text}: give a port, as in tcp:collector.example:5170"
            )),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

enum Open {
    File(File),
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// What is written to, and what of it may not have arrived.
pub struct Sink {
    open: Open,
    /// How many bytes were written.
    written: u64,
    /// Positions in the history, and how many bytes were written before each.
    pending: VecDeque<(u64, Position)>,
}

impl Sink {
    /// Opens a file, or connects. What is written first stands at `from` in the history.
    pub fn open(target: &Target, from: Position) -> io::Result<Self> {
        let open = match target {
            Target::File(path) => {
                let mut options = OpenOptions::new();
                let file = options.append(true).create(true).mode(0o640).open(path)?;
                Open::File(file)
            }
            Target::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_write_timeout(Some(STALLED))?;
                Open::Unix(stream)
            }
            Target::Tcp(address) => {
                let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
                let mut connected = None;
                for address in address.to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, CONNECT) {
                        Ok(stream) => {
                            connected = Some(stream);
                            break;
                        }
                        Err(error) => failed = error,
                    }
                }
                let stream = connected.ok_or(failed)?;
                stream.set_write_timeout(Some(STALLED))?;
                Open::Tcp(stream)
            }
        };
        Ok(Self {
            open,
            written: 0,
            pending: VecDeque::from([(0, from)]),
        })
    }

    /// Writes lines. `next` is the position behind them.
    pub fn write(&mut self, lines: &[u8], next: Position) -> io::Result<()> {
        match &mut self.open {
            Open::File(file) => file.write_all(lines)?,
            Open::Unix(stream) => stream.write_all(lines)?,
            Open::Tcp(stream) => stream.write_all(lines)?,
        }
        self.written += lines.len() as u64;
        self.pending.push_back((self.written, next));
        Ok(())
    }

    /// Everything before this position has arrived, whatever ends now: it is in the file and on the
    /// disk; or so much was sent after it that the other end must have read it.
    pub fn arrived(&mut self) -> io::Result<Position> {
        let safe = match &self.open {
            Open::File(file) => {
                file.sync_data()?;
                self.written
            }
            Open::Unix(stream) => self.written.saturating_sub(unsent(stream)? + UNREAD),
            Open::Tcp(stream) => self.written.saturating_sub(unsent(stream)? + UNREAD),
        };
        while self.pending.get(1).is_some_and(|(bytes, _)| *bytes <= safe) {
            self.pending.pop_front();
        }
        Ok(self.pending.front().map_or(Position::default(), |it| it.1))
    }

    /// Whether the other end has closed the connection.
    pub fn is_closed(&self) -> bool {
        match &self.open {
            Open::File(_) => false,
            Open::Unix(stream) => has_ended(stream),
            Open::Tcp(stream) => has_ended(stream),
        }
    }
}

/// Bytes that the other end's kernel does not have yet (`SIOCOUTQ`, `tcp(7)`, `unix(7)`).
fn unsent(socket: &impl AsRawFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open, and the kernel writes one `int` there.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match result {
        0 => Ok(bytes as u64),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the connection has ended. (A collector may close its own direction alone, and read on.)
fn has_ended(socket: &impl AsRawFd) -> bool {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one entry, and the descriptor is open.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_file_or_a_socket() {
        for (text, target) in [
            ("/tmp/a", Target::File("/tmp/a".into())),
            ("unix:/tmp/a", Target::Unix("/tmp/a".into())),
            ("tcp:[::1]:5170", Target::Tcp("[::1]:5170".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(target.clone()));
            assert_eq!(target.to_string(), text);
        }
        for text in ["", "tcp:host", "tcp:host:port", "tcp:host:65536"] {
            text.parse::<Target>().unwrap_err();
        }
    }

    #[test]
    fn what_a_file_has_has_arrived() {
        let directory = tempfile::tempdir().unwrap();
        let target = Target::File(directory.path().join("it"));
        let position = |record| Position { segment: 1, record };
        let mut sink = Sink::open(&target, position(0)).unwrap();
        assert_eq!(sink.arrived().unwrap(), position(0));
        sink.write(b"one\n", position(1)).unwrap();
        sink.write(b"two\n", position(2)).unwrap();
        assert_eq!(sink.arrived().unwrap(), position(2));
        assert!(!sink.is_closed());
    }
}
