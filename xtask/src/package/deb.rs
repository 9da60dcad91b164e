//! Debian's packages.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{DESCRIPTION, MAINTAINER, Package, SUMMARY, tree::Tree, tree::dist_text, version};
use crate::{
    sh::{self, say},
    statics,
};

/// Makes a package, and returns its path.
pub fn make(package: &Package<'_>) -> Result<PathBuf> {
    let tree = Tree::new(package, "deb", "usr/share/zsh/vendor-completions")?;
    let version = format!("{}-{}", version(), package.release);
    let doc = "usr/share/doc/twheel";
    tree.put_compressed(
        &format!("{doc}/changelog"),
        &fs::read_to_string(sh::workspace().join("CHANGELOG.md"))?,
    )?;
    let mut date = Command::new("date");
    let date = sh::output(date.args(["-u", "-R", "-d", &format!("@{}", statics::epoch()?)]))?;
    tree.put_compressed(
        &format!("{doc}/changelog.Debian"),
        &format!(
            "twheel ({version}) unstable; urgency=medium\n\n  * Release of twheel; changelog.gz says \
             what has changed.\n\n -- {MAINTAINER}  {date}"
        ),
    )?;
    tree.copy("debian/copyright", &format!("{doc}/copyright"))?;
    tree.copy(
        "debian/lintian-overrides",
        "usr/share/lintian/overrides/twheel",
    )?;

    let files = tree.files()?;
    let mut md5sum = Command::new("md5sum");
    let sums = sh::output(md5sum.args(&files).current_dir(&tree.root))?;
    let mut bytes = 0;
    for file in &files {
        bytes += fs::metadata(tree.root.join(file))?.len();
    }
    let conffiles: String = files
        .iter()
        .filter(|file| file.starts_with("etc/"))
        .map(|file| format!("/{file}\n"))
        .collect();
    let control = format!(
        "Package: twheel\nVersion: {version}\nArchitecture: {}\nMaintainer: {MAINTAINER}\n\
         Installed-Size: {}\nRecommends: procps, systemd\nSection: net\nPriority: optional\n\
         Description: {SUMMARY}\n {}\n",
        package.arch.debian(),
        bytes.div_ceil(1024),
        DESCRIPTION.join("\n ")
    );
    tree.put("DEBIAN/control", control.as_bytes(), 0o644)?;
    tree.put("DEBIAN/md5sums", sums.as_bytes(), 0o644)?;
    tree.put("DEBIAN/conffiles", conffiles.as_bytes(), 0o644)?;
    for script in ["postinst", "prerm", "postrm"] {
        let text = dist_text(&format!("debian/{script}"))?;
        tree.put(&format!("DEBIAN/{script}"), text.as_bytes(), 0o755)?;
    }
    tree.open()?;

    let name = format!("twheel_{version}_{}.deb", package.arch.debian());
    let deb = package.directory.join(name);
    let mut build = Command::new("dpkg-deb");
    build
        // The number of threads decides how xz divides what it compresses.
        .args(["--root-owner-group", "-Zxz", "--threads-max=1", "--build"])
        .args([&tree.root, &deb])
        .env("SOURCE_DATE_EPOCH", statics::epoch()?);
    sh::output(&mut build)?;
    fs::remove_dir_all(&tree.root).context("cannot remove what the package is made of")?;
    Ok(deb)
}

/// Lets lintian check a package.
pub fn lint(deb: &Path) -> Result<()> {
    say!("lintian {}", deb.display());
    let mut lintian = Command::new("lintian");
    // Warnings are shown, errors count.
    sh::run(
        lintian
            .args(["--allow-root", "--fail-on", "error"])
            .arg(deb),
    )
}
