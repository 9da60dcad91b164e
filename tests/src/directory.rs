//! Directories that are removed with their test.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

/// A directory that is removed, with its contents, when this is dropped.
pub struct Directory(pub PathBuf);

impl Directory {
    /// Makes it in the directory for temporary files, with a name from this one and the process id.
    pub fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("twheel-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    /// Its path.
    pub fn path(&self) -> &str {
        self.0.to_str().expect("ASCII")
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
