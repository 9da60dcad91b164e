//! The Unix socket on which programs are awaited.

use std::{
    fs, io,
    os::{
        fd::{AsFd as _, AsRawFd, OwnedFd},
        unix::fs::{FileTypeExt, PermissionsExt, lchown},
    },
    path::{Path, PathBuf},
};

use anyhow::Result;
use nix::{
    sys::{
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
        },
        stat::{Mode, umask},
    },
    unistd::Gid,
};

use super::rights;
use crate::failure::{Failure, Kind};

/// The Unix socket on which programs are awaited. It is removed when this is dropped.
pub struct Listener {
    pub(super) socket: OwnedFd,
    /// The kernel refuses descriptors from a program that has not been welcomed.
    pub(super) is_strict: bool,
    path: PathBuf,
}

impl Listener {
    /// Listens at this path. The group may connect, too.
    ///
    /// # Errors
    ///
    /// Another twheel listens there, or the socket cannot be made.
    pub fn bind(path: &Path, group: Option<Gid>) -> Result<Self> {
        let refused = |error: io::Error| {
            let message = format!(
                "cannot listen for programs at {}: {error}: give another path with --offload",
                path.display()
            );
            anyhow::Error::new(Failure::new(Kind::Other, message))
        };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(refused(io::Error::other("a file of another kind is there")));
            }
            Ok(_) if is_served(path)? => {
                return Err(refused(io::Error::other("another process listens there")));
            }
            _ => {}
        }
        let make = || -> io::Result<(OwnedFd, bool)> {
            if let Some(directory) = path.parent() {
                fs::create_dir_all(directory)?;
            }
            // Left by a process that was killed.
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
            // Nobody else may connect before the mode is set. No thread has been started yet.
            let before = umask(Mode::from_bits_truncate(0o177));
            let bound = bind(socket.as_raw_fd(), &UnixAddr::new(path)?);
            umask(before);
            bound?;
            if let Some(group) = group {
                // The unit allows this system call alone of its kind.
                lchown(path, None, Some(group.as_raw()))?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
            }
            let is_strict = rights::accept_descriptors(socket.as_fd(), false);
            listen(&socket, Backlog::MAXCONN)?;
            Ok((socket, is_strict))
        };
        let (socket, is_strict) = make().map_err(refused)?;
        Ok(Self {
            socket,
            is_strict,
            path: path.to_owned(),
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether somebody listens at a path.
fn is_served(path: &Path) -> Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    let connected = connect(socket.as_raw_fd(), &UnixAddr::new(path)?);
    Ok(connected != Err(nix::Error::ECONNREFUSED))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have removed it, or this process may no longer be allowed to: the next
        // twheel replaces it.
        let _ = fs::remove_file(&self.path);
    }
}
