//! Other network namespaces, to open sockets in.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context, Result, anyhow};
use caps::Capability;
use nix::sched::{CloneFlags, setns};

use crate::{
    failure::{Failure, Kind},
    netns,
    privilege::lacks,
};

/// A network namespace, by its name in `ip netns` or by a path.
#[derive(Clone, Debug)]
pub struct NamespacePath(PathBuf);

impl NamespacePath {
    /// By its name in `ip netns`, or by a path; it need not exist.
    pub fn of_name(name: &str) -> Self {
        Self(match name.contains('/') {
            true => PathBuf::from(name),
            false => Path::new(netns::DIRECTORY).join(name),
        })
    }

    /// As the value of a command's option.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: there is no namespace of that name.
    pub fn named(option: &str, name: &str) -> Result<Self> {
        let namespace = Self::of_name(name);
        namespace.inside(|| Ok(())).map_err(|error| {
            let cause = error.downcast_ref::<io::Error>();
            if cause.is_some_and(|it| it.kind() == io::ErrorKind::PermissionDenied) {
                return Failure::new(
                    Kind::Permission,
                    format!("{option} {name}: {error:#}: run as root"),
                );
            }
            Failure::new(
                Kind::Usage,
                format!(
                    "{option} {name}: not a network namespace ({error:#}): `ip netns` lists \
                     them"
                ),
            )
        })?;
        Ok(namespace)
    }

    /// Runs `what` inside the namespace, on a thread that ends afterwards. A socket that is opened
    /// there stays in that namespace.
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
