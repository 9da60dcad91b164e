//! The position of an export in a history, kept on disk.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use serde::{Deserialize, Serialize};

use crate::{
    failure::{Failure, Kind},
    history::Position,
};

/// The last event that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// Its instance.
    pub instance: String,
    /// The highest number of that instance that has arrived.
    pub number: u64,
}

/// What the file holds. An earlier twheel wrote the position alone, and reads it alone.
#[derive(Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    position: Position,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<Last>,
}

/// The file that keeps a position.
pub struct Kept {
    path: PathBuf,
    /// While it is held, no other export uses the file.
    _lock: Flock<File>,
    /// Everything before it has arrived.
    pub position: Position,
    /// The last event before it; `None` if it is not known.
    pub last: Option<Last>,
    /// The file does not have them yet.
    is_unwritten: bool,
}

impl Kept {
    /// Opens the file, or takes the beginning if there is none. Creates its directory.
    ///
    /// # Errors
    ///
    /// It cannot be read or does not hold a position; another export uses it; or the directory cannot
    /// be created.
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(|error| cannot_create(directory, error))?;
        }
        let lock = lock(path)?;
        let Stored { position, last } = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                Failure::new(
                    Kind::Other,
                    format!(
                        "{} is not the position of an export ({error}): give another file with \
                         --state, or remove it to send the whole history",
                        path.display()
                    ),
                )
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Stored {
                position: Position::default(),
                last: None,
            },
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            position,
            last,
            is_unwritten: false,
        })
    }

    /// Keeps another position, if it is another one, and the last event before it.
    ///
    /// # Errors
    ///
    /// It cannot be written. Then it is kept in memory, and the next call tries again.
    pub fn keep(&mut self, position: Position, last: Option<Last>) -> Result<()> {
        if position != self.position {
            (self.position, self.last, self.is_unwritten) = (position, last, true);
        }
        if !self.is_unwritten {
            return Ok(());
        }
        let new = beside(&self.path, "new");
        let stored = Stored {
            position: self.position,
            last: self.last.clone(),
        };
        let write = || -> io::Result<()> {
            let mut file = File::create(&new)?;
            serde_json::to_writer(&mut file, &stored)?;
            file.write_all(b"\n")?;
            file.sync_data()?;
            fs::rename(&new, &self.path)
        };
        write().with_context(|| {
            format!(
                "cannot write {}, the position of this export",
                self.path.display()
            )
        })?;
        self.is_unwritten = false;
        Ok(())
    }
}

/// A file beside the one that keeps a position.
fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(".");
    name.push(what);
    name.into()
}

/// What cannot be created, why, and what to do.
fn cannot_create(path: &Path, error: io::Error) -> anyhow::Error {
    let what = format!("cannot create {}", path.display());
    if error.kind() != io::ErrorKind::PermissionDenied {
        return anyhow::Error::from(error).context(what);
    }
    let message = format!(
        "{what}: {error}: make the directory for this user (`install -d -o USER DIRECTORY`), or give \
         a file for the position elsewhere with --state"
    );
    Failure::new(Kind::Other, message).into()
}

/// Takes the lock of a file that keeps a position.
fn lock(path: &Path) -> Result<Flock<File>> {
    let at = beside(path, "lock");
    let file = File::create(&at).map_err(|error| cannot_create(&at, error))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| match error {
        Errno::EWOULDBLOCK => Failure::new(
            Kind::Other,
            format!(
                "another export uses {}: give this one another file with --state",
                path.display()
            ),
        )
        .into(),
        error => anyhow::Error::from(io::Error::from(error))
            .context(format!("cannot lock {}", at.display())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/json");
        let mut kept = Kept::open(&path).unwrap();
        assert_eq!(kept.position, Position::default());
        let position = Position {
            segment: 3,
            record: 17,
            checksum: 5,
        };
        let last = Some(Last {
            instance: "eth0@host.5".to_owned(),
            number: 17,
        });
        kept.keep(position, last.clone()).unwrap();
        let other = Kept::open(&path).err().unwrap().to_string();
        assert!(other.contains("another export uses"), "{other}");
        drop(kept);
        let kept = Kept::open(&path).unwrap();
        assert_eq!((kept.position, &kept.last), (position, &last));
        drop(kept);
        // As an earlier twheel has written it, and as it reads this one.
        let earlier: Position = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(earlier, position);
        fs::write(&path, serde_json::to_vec(&position).unwrap()).unwrap();
        let kept = Kept::open(&path).unwrap();
        assert_eq!((kept.position, &kept.last), (position, &None));
        drop(kept);
        fs::write(&path, "17").unwrap();
        let error = Kept::open(&path).err().unwrap().to_string();
        assert!(
            error.contains("is not the position of an export"),
            "{error}"
        );
    }

    #[test]
    fn a_directory_of_another_user_is_told_with_what_to_do() {
        let denied = io::Error::from(Errno::EACCES);
        let error = cannot_create(Path::new("/a/b.lock"), denied).to_string();
        assert!(error.starts_with("cannot create /a/b.lock: "), "{error}");
        assert!(error.contains("--state"), "{error}");
        let full = io::Error::from(Errno::ENOSPC);
        let error = format!("{:#}", cannot_create(Path::new("/a"), full));
        assert!(!error.contains("--state"), "{error}");
    }
}
