//! `cargo xtask release`: all that is published of a version, with what it is made of, checksums and
//! notes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    dependencies, image, package,
    sh::{self, say},
    statics::Arch,
};

/// Builds everything into `target/release-VERSION`. A draft may be made of sources that were changed
/// since the commit, before the changelog has the version, and is built once only.
pub fn release(draft: bool) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let changelog = fs::read_to_string(sh::workspace().join("CHANGELOG.md"))
        .context("cannot read CHANGELOG.md")?;
    let section = if draft { "Unreleased" } else { version };
    let notes = notes(&changelog, section)?;
    let changed = sh::output(sh::git().args(["status", "--porcelain"]))?;
    ensure!(
        draft || changed.is_empty(),
        "these files are not committed: commit or remove them, or make a --draft:\n{changed}"
    );

    let out = sh::target(&format!("release-{version}"));
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let (mut files, mut programs) = (Vec::new(), Vec::new());
    for (arch, made) in package::build(&Arch::ALL, !draft)? {
        let program = format!("twheel-{version}-{}", arch.name());
        put(&made.program, &out.join(&program))?;
        programs.push(image::Program::new(arch, made.program));
        let sbom = format!("{program}.cdx.json");
        dependencies::sbom(arch, &out.join(&sbom))?;
        files.extend([program, sbom]);
        for package in &made.packages {
            let name = package.file_name().unwrap_or_default();
            put(package, &out.join(name))?;
            files.push(name.to_string_lossy().into_owned());
        }
    }
    let image = image::file_name();
    image::make(&programs, &out.join(&image))?;
    files.push(image);
    let sources = format!("twheel-{version}.tar.gz");
    let mut archive = sh::git();
    archive
        .args(["archive", "--format=tar.gz", "HEAD"])
        .arg(format!("--prefix=twheel-{version}/"))
        .arg("--output")
        .arg(out.join(&sources));
    sh::run(&mut archive)?;
    files.push(sources);
    files.sort();
    let mut sums = Command::new("sha256sum");
    let sums = sh::output(sums.args(&files).current_dir(&out))?;
    for (name, text) in [("SHA256SUMS", sums), ("NOTES.md", notes)] {
        fs::write(out.join(name), text).with_context(|| format!("cannot write {name}"))?;
    }
    say!(
        "{} has {} files, their checksums and notes.",
        out.display(),
        files.len()
    );
    println!("{}", out.display());
    Ok(())
}

fn put(from: &Path, to: &PathBuf) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// The text of a version's section of the changelog, without its heading.
fn notes(changelog: &str, section: &str) -> Result<String> {
    let heading = format!("## [{section}]");
    let mut lines = changelog
        .lines()
        .skip_while(|line| !line.starts_with(&heading));
    if lines.next().is_none() {
        bail!("CHANGELOG.md has no section {heading}: give the version one, or make a --draft");
    }
    let lines: Vec<_> = lines.take_while(|line| !line.starts_with("## ")).collect();
    let text = lines.join("\n");
    ensure!(
        !text.trim().is_empty(),
        "the section {heading} of CHANGELOG.md is empty"
    );
    Ok(format!("{}\n", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::notes;

    #[test]
    fn notes_are_the_section_of_the_version() {
        let changelog = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A\n\n## [0.1.0]\n\n- B\n";
        assert_eq!(notes(changelog, "0.2.0").unwrap(), "### Added\n\n- A\n");
        assert_eq!(notes(changelog, "0.1.0").unwrap(), "- B\n");
        let missing = notes(changelog, "0.3.0").unwrap_err().to_string();
        assert!(missing.contains("no section ## [0.3.0]"), "{missing}");
        let empty = notes(changelog, "Unreleased").unwrap_err().to_string();
        assert!(empty.contains("is empty"), "{empty}");
    }
}
