//! Packages for rpm.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    DESCRIPTION, MAINTAINER, Package, SUMMARY,
    tree::{Tree, dist, dist_text},
    version,
};
use crate::{
    sh::{self, say},
    statics,
};

/// Makes a package, and returns its path.
pub fn make(package: &Package<'_>) -> Result<PathBuf> {
    let tree = Tree::new(package, "rpm", "usr/share/zsh/site-functions")?;
    let changes = fs::read_to_string(sh::workspace().join("CHANGELOG.md"))?;
    tree.put_compressed("usr/share/doc/twheel/CHANGELOG.md", &changes)?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let text = fs::read(sh::workspace().join(licence))?;
        tree.put(
            &format!("usr/share/licenses/twheel/{licence}"),
            &text,
            0o644,
        )?;
    }
    tree.open()?;

    let epoch = statics::epoch()?;
    let mut date = Command::new("date");
    date.env("LC_ALL", "C")
        .args(["-u", "-d", &format!("@{epoch}"), "+%a %b %d %Y"]);
    let mut spec = dist_text("rpm/twheel.spec")?;
    for (name, value) in [
        ("VERSION", version()),
        ("RELEASE", &package.release.to_string()),
        ("SUMMARY", SUMMARY),
        ("DESCRIPTION", &DESCRIPTION.join("\n")),
        ("TREE", &tree.root.display().to_string()),
        ("DATE", sh::output(&mut date)?.trim()),
        ("MAINTAINER", MAINTAINER),
    ] {
        spec = spec.replace(&format!("@{name}@"), value);
    }
    let top = package
        .directory
        .join(format!("rpmbuild-{}", package.arch.name()));
    fs::create_dir_all(&top).with_context(|| format!("cannot make {}", top.display()))?;
    let file = top.join("twheel.spec");
    fs::write(&file, spec).with_context(|| format!("cannot write {}", file.display()))?;
    let mut build = Command::new("rpmbuild");
    build
        .args([
            "-bb",
            "--quiet",
            "--target",
            package.arch.name(),
            "--define",
        ])
        .arg(format!("_topdir {}", top.display()))
        .arg("--define")
        .arg(format!("_rpmdir {}", top.display()))
        .arg(&file)
        .env("SOURCE_DATE_EPOCH", &epoch);
    sh::run(&mut build)?;
    let arch = package.arch.name();
    let name = format!("twheel-{}-{}.{arch}.rpm", version(), package.release);
    let rpm = package.directory.join(&name);
    fs::rename(top.join(arch).join(&name), &rpm)
        .with_context(|| format!("rpmbuild has made no {name}"))?;
    for made_of in [&top, &tree.root] {
        fs::remove_dir_all(made_of).context("cannot remove what the package is made of")?;
    }
    Ok(rpm)
}

/// Lets rpmlint check a package.
pub fn lint(rpm: &Path) -> Result<()> {
    say!("rpmlint {}", rpm.display());
    let mut rpmlint = Command::new("rpmlint");
    sh::run(
        rpmlint
            .arg("--config")
            .arg(dist("rpm/rpmlint.toml"))
            .arg(rpm),
    )
}
