//! Recorded packets.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// All captures below a folder, sorted.
pub fn captures(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let extension = path.extension().unwrap_or_default();
        if path.is_dir() {
            found.extend(captures(&path)?);
        } else if ["pcap", "pcapng", "cap"].iter().any(|it| extension == *it) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
