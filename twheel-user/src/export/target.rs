//! A file or a socket that an export writes to. A socket's other end may end, or may not be there
//! yet; then it is tried again.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fmt,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs, UdpSocket},
    os::{
        fd::AsRawFd,
        unix::{
            fs::OpenOptionsExt,
            net::{UnixDatagram, UnixStream},
        },
    },
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use super::{Destination, Format, Sink, tls};
use crate::history::Position;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a write may wait for the other end.
const STALLED: Duration = Duration::from_secs(60);
/// A connection that lasts this long has worked.
const STEADY: Duration = Duration::from_secs(5);
/// What the other end may have received without having read it: more than Linux lets a socket hold
/// by default (`net.ipv4.tcp_rmem`, 6 MiB). So much is sent again after a connection has ended.
pub const UNREAD: u64 = 8 << 20;

/// A datagram has arrived, as far as can be known, if no answer has refused it for so long.
const SETTLED: Duration = Duration::from_secs(1);
/// How long to pause after datagrams that were sent at once: a receiver with Linux's default buffer
/// (`net.core.rmem_default`, 208 KiB) must have time to read them.
const PACE: Duration = Duration::from_millis(2);
/// How many these are at most. A datagram of some hundred bytes takes up to 2.25 KiB of the buffer.
const AT_ONCE: usize = 50;

/// A file or a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A file, to whose end it is written.
    File(PathBuf),
    /// A Unix stream socket.
    Unix(PathBuf),
    /// A Unix datagram socket, to which each message is sent as a datagram; or a stream socket, to
    /// which each is sent as a line.
    Log(PathBuf),
    /// A host and a port.
    Tcp(String),
    /// The same with TLS.
    Tls(String, tls::Client),
    /// A host and a port, to which each message is sent as a datagram.
    Udp(String),
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
        host_and_port(address, "tcp:collector.example:5170").map(Self::Tcp)
    }
}

/// Checks that this is a host and a port. An IPv6 address is in brackets. `example` is one that is
/// right.
///
/// # Errors
///
/// It is not: what to give instead, in a sentence.
pub fn host_and_port(address: &str, example: &str) -> Result<String, String> {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    if host.is_empty() || !port.parse::<u16>().is_ok_and(|port| port > 0) {
        return Err(format!("give a host and a port, as in {example}"));
    }
    if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
        return Err(format!(
            "give an IPv6 address in brackets, as in [2001:db8::1]:{port}"
        ));
    }
    Ok(address.to_owned())
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Unix(path) | Self::Log(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Tls(address, _) => write!(f, "tls:{address}"),
            Self::Udp(address) => write!(f, "udp:{address}"),
        }
    }
}

enum Open {
    /// A file on a disk.
    File(File),
    /// A pipe or a device: nothing of it can be synced.
    Special(File),
    Unix(UnixStream),
    /// The same, with a line for each message.
    Lines(UnixStream),
    Datagrams(UnixDatagram),
    Tcp(TcpStream),
    Tls(Box<tls::Stream>),
    Udp(UdpSocket),
}

/// A place in what was written.
struct Place {
    /// How many bytes were written before it.
    bytes: u64,
    /// When they were written.
    at: Instant,
    /// The position in the history.
    position: Position,
}

/// What is written to, and what of it may not have arrived.
struct Written {
    open: Open,
    opened: Instant,
    /// How many bytes were written.
    written: u64,
    /// The place before which everything has arrived, and all later ones.
    pending: VecDeque<Place>,
}

impl Target {
    /// Opens the file, or connects.
    fn connect(&self) -> io::Result<Open> {
        Ok(match self {
            Self::File(path) => {
                let mut options = OpenOptions::new();
                let file = options.append(true).create(true).mode(0o640).open(path)?;
                match file.metadata()?.is_file() {
                    true => {
                        cut_torn_line(path)?;
                        Open::File(file)
                    }
                    false => Open::Special(file),
                }
            }
            Self::Unix(path) => Open::Unix(stream(path)?),
            Self::Log(path) => {
                let socket = UnixDatagram::unbound()?;
                socket.set_write_timeout(Some(STALLED))?;
                match socket.connect(path) {
                    Ok(()) => Open::Datagrams(socket),
                    // The socket is of another type.
                    Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => {
                        Open::Lines(stream(path)?)
                    }
                    Err(error) => return Err(error),
                }
            }
            Self::Tcp(address) => Open::Tcp(connect(address)?),
            Self::Tls(address, client) => {
                let host = address.rsplit_once(':').map_or("", |(host, _)| host);
                let host = host.trim_matches(['[', ']']);
                let stream = client.connect(host, connect(address)?, CONNECT)?;
                Open::Tls(Box::new(stream))
            }
            Self::Udp(address) => Open::Udp(first(address, |address| {
                let any = match address {
                    SocketAddr::V4(_) => "0.0.0.0:0",
                    SocketAddr::V6(_) => "[::]:0",
                };
                let socket = UdpSocket::bind(any)?;
                socket.connect(address)?;
                Ok(socket)
            })?),
        })
    }
}

impl Destination for Target {
    fn open(&self, from: Position) -> io::Result<Box<dyn Sink>> {
        Ok(Box::new(Written {
            open: self.connect()?,
            opened: Instant::now(),
            written: 0,
            pending: VecDeque::from([Place {
                bytes: 0,
                at: Instant::now(),
                position: from,
            }]),
        }))
    }

    fn lasting_name(&self) -> io::Result<OsString> {
        match self {
            Self::File(path) => Ok(std::path::absolute(path)?.into()),
            other => Ok(other.to_string().into()),
        }
    }

    fn ends_with(&self, error: &io::Error, was_open: bool) -> bool {
        // The reader of a pipe has closed it, or the file cannot be opened.
        matches!(self, Self::File(_)) && (!was_open || error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl Sink for Written {
    fn write(&mut self, bytes: &[u8], next: Position, format: &dyn Format) -> io::Result<()> {
        match &mut self.open {
            Open::File(file) | Open::Special(file) => file.write_all(bytes)?,
            Open::Unix(stream) => stream.write_all(bytes)?,
            Open::Lines(stream) => {
                let messages: Vec<_> = format.messages(bytes).collect();
                stream.write_all(&[&messages.join(&b'\n')[..], b"\n"].concat())?;
            }
            Open::Datagrams(socket) => {
                for message in format.messages(bytes) {
                    socket.send(message)?;
                }
            }
            Open::Tcp(stream) => stream.write_all(bytes)?,
            Open::Tls(stream) => stream.write_all(bytes)?,
            Open::Udp(socket) => {
                for (number, message) in format.messages(bytes).enumerate() {
                    if number > 0 && number % AT_ONCE == 0 {
                        thread::sleep(PACE);
                    }
                    socket.send(message)?;
                }
                thread::sleep(PACE);
            }
        }
        self.written += bytes.len() as u64;
        self.pending.push_back(Place {
            bytes: self.written,
            at: Instant::now(),
            position: next,
        });
        Ok(())
    }

    /// It is in the file and on the disk; or so much was sent after it that the other end must have
    /// read it; or no answer has refused the datagram; or the datagram is no longer in the Unix socket
    /// that it was sent to.
    fn arrived(&mut self) -> io::Result<Position> {
        let has_arrived: Box<dyn Fn(&Place) -> bool> = match &mut self.open {
            Open::File(file) => {
                file.sync_data()?;
                Box::new(|_| true)
            }
            Open::Special(_) => Box::new(|_| true),
            Open::Unix(stream) | Open::Lines(stream) => was_read(self.written, unsent(stream)?),
            Open::Tcp(stream) => was_read(self.written, unsent(stream)?),
            Open::Tls(stream) => {
                stream.heed()?;
                was_read(self.written, unsent(&stream.socket)?)
            }
            Open::Datagrams(socket) => {
                // What the other end has not read counts with the kernel's overhead, so this is
                // never too much. If the other end is gone, that shows with the next datagram.
                let read = self.written.saturating_sub(unsent(socket)?);
                Box::new(move |place| place.bytes <= read && place.at.elapsed() >= SETTLED)
            }
            Open::Udp(socket) => {
                if let Some(refused) = socket.take_error()? {
                    return Err(refused);
                }
                Box::new(|place| place.at.elapsed() >= SETTLED)
            }
        };
        while self.pending.get(1).is_some_and(&has_arrived) {
            self.pending.pop_front();
        }
        let first = self.pending.front();
        Ok(first.map_or(Position::default(), |place| place.position))
    }

    fn is_settled(&self) -> bool {
        !matches!(self.open, Open::Udp(_) | Open::Datagrams(_)) || self.pending.len() == 1
    }

    fn is_closed(&self) -> bool {
        match &self.open {
            Open::File(_) | Open::Special(_) | Open::Datagrams(_) | Open::Udp(_) => false,
            Open::Unix(stream) | Open::Lines(stream) => has_ended(stream),
            Open::Tcp(stream) => has_ended(stream),
            Open::Tls(stream) => has_ended(&stream.socket),
        }
    }

    fn has_worked(&self) -> bool {
        self.opened.elapsed() >= STEADY
    }
}

/// Connects to a Unix stream socket.
fn stream(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    stream.set_write_timeout(Some(STALLED))?;
    Ok(stream)
}

/// Connects to a host and a port.
fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = first(address, |address| {
        TcpStream::connect_timeout(&address, CONNECT)
    })?;
    stream.set_write_timeout(Some(STALLED))?;
    Ok(stream)
}

/// The first of a host's addresses with which this succeeds.
fn first<T>(address: &str, open: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        match open(address) {
            Ok(opened) => return Ok(opened),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Whether the other end must have read what was written before a place, of so many bytes of which
/// its kernel lacks some.
fn was_read(written: u64, unsent: u64) -> Box<dyn Fn(&Place) -> bool> {
    let read = written.saturating_sub(unsent + UNREAD);
    Box::new(move |place| place.bytes <= read)
}

/// Cuts off the beginning of a line that an export which was killed, or whose disk was full, has left
/// at a file's end.
fn cut_torn_line(path: &Path) -> io::Result<()> {
    const LONGEST: u64 = 64 << 10;
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(LONGEST);
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.read_to_end(&mut end)?;
    let line = end
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    let torn = &end[line..];
    // Whatever else is there is left as it is.
    let is_ours = torn.starts_with(BEGINS) || BEGINS.starts_with(torn);
    match is_ours && !torn.is_empty() {
        true => file.set_len(from + line as u64),
        false => Ok(()),
    }
}

/// How each line of an export begins.
const BEGINS: &[u8] = b"{\"schema\":";

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
    use crate::export::json::Lines;

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
        for text in [
            "",
            "tcp:host",
            "tcp::1",
            "tcp:host:port",
            "tcp:host:65536",
            "tcp:::1:514",
        ] {
            text.parse::<Target>().unwrap_err();
        }
    }

    #[test]
    fn a_torn_line_is_cut_off_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("it");
        for (held, left) in [
            ("{\"schema\":1}\n{\"schema\":1,\"ev", "{\"schema\":1}\n"),
            ("{\"schema\":1}\n{\"sc", "{\"schema\":1}\n"),
            ("{\"sc", ""),
            ("{\"schema\":1}\n", "{\"schema\":1}\n"),
            ("some text without an end", "some text without an end"),
            ("", ""),
        ] {
            std::fs::write(&path, held).unwrap();
            cut_torn_line(&path).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), left);
        }
    }

    #[test]
    fn what_a_file_has_has_arrived() {
        let directory = tempfile::tempdir().unwrap();
        let target = Target::File(directory.path().join("it"));
        let position = |record| Position {
            segment: 1,
            record,
            checksum: 0,
        };
        let mut sink = target.open(position(0)).unwrap();
        assert_eq!(sink.arrived().unwrap(), position(0));
        let format = Lines::new(Vec::new());
        sink.write(b"one\n", position(1), &format).unwrap();
        sink.write(b"two\n", position(2), &format).unwrap();
        assert_eq!(sink.arrived().unwrap(), position(2));
        assert!(!sink.is_closed());
    }
}
