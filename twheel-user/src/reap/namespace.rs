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
    privilege::lacks,
};

/// A network namespace, by its name in `ip netns` or by a path.
#[derive(Clone, Debug)]
pub struct NamespacePath(PathBuf);

impl NamespacePath {
    /// # Errors
    ///
    /// [`Kind::Usage`]: there is no namespace of that name.
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
                    "--reap-netns {name}: not a network namespace ({error:#}): `ip netns` lists \
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
