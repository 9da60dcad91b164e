//! Netlink, and sockets in other network namespaces.

use std::{
    fs::File,
    io, mem,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use caps::Capability;
use netlink_packet_core::{
    NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};
use nix::sched::{CloneFlags, setns};
use socket2::SockRef;

use crate::{
    failure::{Failure, Kind},
    privilege::lacks,
};

/// The kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// A network namespace, by the name that `ip netns` gives it, or by a path.
#[derive(Clone, Debug)]
pub struct Namespace(PathBuf);

impl Namespace {
    /// # Errors
    ///
    /// [`Kind::Usage`]: there is none of that name.
    pub fn named(name: &str) -> Result<Self> {
        let path = match name.contains('/') {
            true => PathBuf::from(name),
            false => Path::new("/run/netns").join(name),
        };
        let namespace = Self(path);
        namespace.inside(|| Ok(())).map_err(|error| {
            let cause = error.downcast_ref::<io::Error>();
            if cause.is_some_and(|it| it.kind() == io::ErrorKind::PermissionDenied) {
                return Failure::new(
                    Kind::Permission,
                    format!("--reap-netns {name}: {error:#}: run as root"),
                );
            }
            Failure::new(
                Kind::Usage,
                format!(
                    "--reap-netns {name}: no network namespace there ({error:#}): `ip netns` lists them"
                ),
            )
        })?;
        Ok(namespace)
    }

    /// Does something inside, on a thread that ends with it: a socket that is opened there stays there.
    pub fn inside<T: Send>(&self, what: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let enter = || {
            let path = self.0.display();
            let file = File::open(&self.0).with_context(|| format!("cannot open {path}"))?;
            setns(file, CloneFlags::CLONE_NEWNET)
                .map_err(io::Error::from)
                .map_err(|error| {
                    let why = lacks(&error, Capability::CAP_SYS_ADMIN);
                    anyhow!(error).context(format!("cannot enter {path}: {why}"))
                })?;
            what()
        };
        thread::scope(|scope| {
            let thread = scope.spawn(enter);
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        })
    }
}

/// A netlink socket that asks one thing at a time.
pub struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
    sequence: u32,
}

impl Netlink {
    /// Of a netlink protocol, in this thread's network namespace.
    pub fn open(protocol: isize) -> Result<Self> {
        let open = || {
            let mut socket = Socket::new(protocol)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            SockRef::from(&socket).set_read_timeout(Some(PATIENCE))?;
            io::Result::Ok(socket)
        };
        Ok(Self {
            socket: open().context("cannot open a netlink socket")?,
            buffer: Vec::new(),
            sequence: 0,
        })
    }

    /// Asks for something, and takes the one answer: a message, or nothing if it was done without. `kind`: the message's
    /// type, where the payload does not tell.
    ///
    /// # Errors
    ///
    /// The kernel's, as they are; others as [`io::ErrorKind::InvalidData`].
    pub fn ask<T: NetlinkSerializable + NetlinkDeserializable>(
        &mut self,
        mut request: NetlinkMessage<T>,
        kind: Option<u16>,
    ) -> io::Result<Option<T>> {
        self.sequence = self.sequence.wrapping_add(1);
        request.header.sequence_number = self.sequence;
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        if let Some(kind) = kind {
            // `nlmsg_type`, behind the length.
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        }
        self.socket.send(&bytes, 0)?;
        loop {
            self.buffer.clear();
            self.buffer.reserve(1 << 13);
            self.socket.recv(&mut self.buffer, 0)?;
            let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
            let answer = NetlinkMessage::<T>::deserialize(&self.buffer)
                .map_err(|error| invalid(error.to_string()))?;
            if answer.header.sequence_number != self.sequence {
                // Of one that was given up.
                continue;
            }
            return match mem::replace(&mut { answer.payload }, NetlinkPayload::Noop) {
                NetlinkPayload::InnerMessage(message) => Ok(Some(message)),
                NetlinkPayload::Error(error) => match error.code {
                    None => Ok(None),
                    Some(_) => Err(error.to_io()),
                },
                NetlinkPayload::Done(_) => Ok(None),
                _ => Err(invalid("an answer of another kind".to_owned())),
            };
        }
    }
}
