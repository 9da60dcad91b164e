//! The paths of cgroups (version 2), from the numbers that the kernel gives for sockets.
//!
//! A cgroup's number is the inode of its directory (`kernfs_ino`, `include/linux/kernfs.h`). No
//! other cgroup gets it later, and a cgroup cannot be renamed; so a path that was found stays right.

use std::{
    fs, io,
    num::NonZeroUsize,
    os::unix::fs::{DirEntryExt, MetadataExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use lru::LruCache;

/// Most directories that are looked at for one cgroup, and most paths that are kept: 2 MiB.
const MOST: NonZeroUsize = NonZeroUsize::new(1 << 14).unwrap();

/// The cgroups of this host, as this process's cgroup namespace has them.
pub struct Cgroups {
    root: PathBuf,
    paths: LruCache<u64, String>,
}

impl Cgroups {
    /// Finds where they are mounted.
    ///
    /// # Errors
    ///
    /// No cgroup file system of version 2 is mounted.
    pub fn open() -> Result<Self> {
        let file = "/proc/self/mountinfo";
        let mounts = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
        let root = mount(&mounts).context("no cgroup file system of version 2 is mounted")?;
        Ok(Self {
            root: root.into(),
            paths: LruCache::new(MOST),
        })
    }

    /// The path of a cgroup that was found before.
    pub fn known(&mut self, number: u64) -> Option<&str> {
        self.paths.get(&number).map(String::as_str)
    }

    /// The path of a cgroup, as `/proc/PID/cgroup` has it. `None`: there is no such cgroup at
    /// `below` or below it.
    ///
    /// # Errors
    ///
    /// A directory cannot be read, or there are too many.
    pub fn find(&mut self, number: u64, below: &str) -> Result<Option<String>> {
        if let Some(known) = self.known(number) {
            return Ok(is_at(known, below).then(|| known.to_owned()));
        }
        let top = self.root.join(below.trim_start_matches('/'));
        let own = match fs::metadata(&top) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            own => own.with_context(|| format!("cannot read {}", top.display()))?,
        };
        let mut waiting = vec![(top, own.ino())];
        let mut found = None;
        for _ in 0..MOST.get() {
            // All are looked at, so that the next ones are known.
            let Some((directory, inode)) = waiting.pop() else {
                return Ok(found);
            };
            let path = Path::new("/").join(directory.strip_prefix(&self.root)?);
            let path = path.to_string_lossy().into_owned();
            children(&directory, &mut waiting)?;
            if inode == number {
                found = Some(path.clone());
            }
            self.paths.put(inode, path);
        }
        if found.is_some() {
            return Ok(found);
        }
        bail!("there are more than {MOST} cgroups at {below} and below it")
    }
}

/// Adds the directories in a directory; nothing if it has been removed.
fn children(directory: &Path, into: &mut Vec<(PathBuf, u64)>) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("cannot read {}", directory.display()))?,
    };
    for entry in entries.map_while(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            into.push((entry.path(), entry.ino()));
        }
    }
    Ok(())
}

/// Whether a cgroup is this one, or below it.
pub fn is_at(path: &str, top: &str) -> bool {
    let rest = path.strip_prefix(top.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The first mount of a cgroup file system of version 2, the one with the root of the cgroup
/// namespace if there are several; from `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
fn mount(mounts: &str) -> Option<&str> {
    let mut found = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        kind.starts_with("cgroup2 ").then_some((root, point))
    });
    let first = found.next()?;
    let whole = std::iter::once(first).chain(found).find(|it| it.0 == "/");
    Some(whole.unwrap_or(first).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_at_itself_and_at_what_it_is_below() {
        for (path, top, is) in [
            ("/a/b", "/a/b", true),
            ("/a/b", "/a", true),
            ("/a/b", "/", true),
            ("/", "/", true),
            ("/a/bc", "/a/b", false),
            ("/a", "/a/b", false),
        ] {
            assert_eq!(is_at(path, top), is, "{path} {top}");
        }
    }

    #[test]
    fn the_mount_of_version_2_is_found() {
        let v1 = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let part = "40 31 0:38 /a /mnt rw - cgroup2 cgroup2 rw\n";
        let whole = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:7 - cgroup2 none rw\n";
        assert_eq!(mount(v1), None);
        assert_eq!(mount(&[v1, part].concat()), Some("/mnt"));
        let all = [v1, part, whole].concat();
        assert_eq!(mount(&all), Some("/sys/fs/cgroup/unified"));
    }

    #[test]
    fn directories_are_searched_from_the_given_one_on() {
        let root = tempfile::tempdir().unwrap();
        for path in ["a/b/c", "a/d", "e"] {
            fs::create_dir_all(root.path().join(path)).unwrap();
        }
        let mut cgroups = Cgroups {
            root: root.path().to_owned(),
            paths: LruCache::new(MOST),
        };
        let inode = |path: &str| fs::metadata(root.path().join(path)).unwrap().ino();
        let mut find = |number, below| cgroups.find(number, below).unwrap();
        assert_eq!(find(inode("a/b/c"), "/e"), None);
        assert_eq!(find(inode("a/b/c"), "/f"), None, "no such directory");
        for below in ["/a/b/c", "/a/b", "/a", "/"] {
            assert_eq!(find(inode("a/b/c"), below).as_deref(), Some("/a/b/c"));
        }
        assert_eq!(find(inode("a/b/c"), "/e"), None, "known by now");
        assert_eq!(find(inode(""), "/").as_deref(), Some("/"));
        assert_eq!(find(0, "/"), None);
    }
}
