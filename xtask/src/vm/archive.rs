//! Reads Debian's archive with an apt that has sources of its own: each release that has kernels,
//! for both architectures.
//!
//! The machine's own sources and packages do not change. The mirror is the one that the machine's
//! sources name.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use super::arch::Arch;
use crate::{
    apt,
    bounded::{self, Bounded},
    sh::{self, say},
};

/// Suites of the archive and of its security updates. The oldest has a kernel that twheel must
/// refuse.
const SUITES: [&str; 5] = ["bullseye", "bookworm", "trixie", "trixie-backports", "sid"];
const SECURITY: [&str; 2] = ["bookworm-security", "trixie-security"];
/// The keys that Debian signs its archive with.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// How long apt may take to fetch the lists, and packages.
const UPDATE: Duration = Duration::from_secs(300);
const DOWNLOAD: Duration = Duration::from_secs(900);
const ADVICE: &str = "check the network and the mirror in apt's sources";
/// How old the package lists may be.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// The package lists, and the apt options to fetch them.
pub struct Archive {
    dir: PathBuf,
    options: Vec<String>,
    log: PathBuf,
}

impl Archive {
    /// Writes the sources below `dir`, and fetches the lists if they are older than a day.
    pub fn new(dir: &Path) -> Result<Self> {
        let dir = dir.to_owned();
        for part in ["lists/partial", "cache/archives/partial"] {
            let part = dir.join(part);
            fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        }
        let [sources, status, fetched] =
            ["sources.list", "status", "fetched"].map(|it| dir.join(it));
        let at = |path: &str| dir.join(path).display().to_string();
        let options = [
            format!("Dir::Etc::sourcelist={}", sources.display()),
            "Dir::Etc::sourceparts=-".to_owned(),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", status.display()),
            format!("Dir::Cache={}", at("cache")),
            "Dir::Cache::pkgcache=pkgcache.bin".to_owned(),
            "Dir::Cache::srcpkgcache=srcpkgcache.bin".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "APT::Architectures=amd64,arm64".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::http::Timeout=30".to_owned(),
            "Acquire::https::Timeout=30".to_owned(),
            "Acquire::Retries=1".to_owned(),
            // The lock belongs to the machine, of which nothing is changed here.
            "Debug::NoLocking=true".to_owned(),
        ];
        let archive = Self {
            options: options.map(|it| format!("-o{it}")).to_vec(),
            log: bounded::log("setup-vm"),
            dir,
        };
        let _lock = archive.lock("lists")?;
        fs::write(&status, "").context("cannot write an empty list of installed packages")?;
        let lines = source_lines()?;
        let same = fs::read_to_string(&sources).is_ok_and(|it| it == lines);
        if !(same && is_fresh(&fetched)) {
            fs::write(&sources, lines)
                .with_context(|| format!("cannot write {}", sources.display()))?;
            say!("Fetching the lists of Debian's packages; this usually takes 30 s.");
            let bounded =
                Bounded::new("fetch all lists of Debian's packages", UPDATE, &archive.log);
            let bounded = bounded.advice(ADVICE).quiet();
            match bounded.run(archive.get().args(["-q", "update"])) {
                Ok(()) => fs::write(&fetched, "").context("cannot note when the lists came")?,
                // A suite may be gone from the mirror; the other lists were fetched.
                Err(error) => say!("{error:#}; going on with the lists that are there."),
            }
        }
        Ok(archive)
    }

    /// Other commands wait meanwhile.
    fn lock(&self, name: &str) -> Result<bounded::Lock> {
        let path = self.dir.join(format!("{name}.lock"));
        bounded::lock(&path, &format!("fetch {name} for virtual machines"))
    }

    /// Runs apt-get, which downloads packages.
    fn download(&self, what: &str, get: &Command) -> Result<()> {
        Bounded::new(format!("download {what}"), DOWNLOAD, &self.log)
            .advice(ADVICE)
            .run(get)
    }

    fn get(&self) -> Command {
        let mut get = Command::new("apt-get");
        get.env("DEBIAN_FRONTEND", "noninteractive")
            .args(&self.options);
        get
    }

    /// The names of all packages of both architectures.
    pub fn names(&self) -> Result<BTreeSet<String>> {
        let mut cache = Command::new("apt-cache");
        let names = sh::output(cache.args(&self.options).args(["pkgnames", "linux-"]))?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Fetches packages and unpacks them into a new directory, which exists only once all are
    /// unpacked and `finish` is done with them.
    pub fn unpack(
        &self,
        packages: &[String],
        arch: Arch,
        into: &Path,
        finish: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let fetch = |debs: &Path| {
            let names = packages.iter().map(|it| format!("{it}:{}", arch.debian()));
            let mut get = self.get();
            get.args(["-q", "download"]).args(names).current_dir(debs);
            self.download(&packages.join(" "), &get)
        };
        self.fill(into, fetch, finish)
    }

    /// As [`unpack`](Self::unpack), with all that the packages depend on, from one suite.
    pub fn unpack_all(
        &self,
        packages: &[&str],
        (arch, suite): (Arch, &str),
        into: &Path,
    ) -> Result<()> {
        let fetch = |debs: &Path| {
            fs::create_dir_all(debs.join("partial"))?;
            let debian = arch.debian();
            let mut get = self.get();
            get.arg(format!("-oAPT::Architecture={debian}"))
                .arg(format!("-oAPT::Architectures={debian}"))
                .arg(format!("-oDir::Cache::archives={}", debs.display()))
                // The caches that hold both architectures stay as they are.
                .args(["-oDir::Cache::pkgcache=", "-oDir::Cache::srcpkgcache="])
                .args(["-q", "install", "--download-only", "--yes"])
                .args(["--no-install-recommends", "-t", suite])
                .args(packages);
            self.download(&packages.join(" "), &get)
        };
        self.fill(into, fetch, |_| Ok(()))
    }

    fn fill(
        &self,
        into: &Path,
        fetch: impl Fn(&Path) -> Result<()>,
        finish: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let name = into.file_name().unwrap_or_default().to_string_lossy();
        let _lock = self.lock(&name)?;
        if into.exists() {
            return Ok(());
        }
        let [debs, partial] = ["debs", "root"].map(|it| self.dir.join(format!("{it}-{name}")));
        for dir in [&debs, &partial] {
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        fetch(&debs)?;
        let mut unpacked = 0;
        for entry in fs::read_dir(&debs)?.flatten() {
            let deb = entry.path();
            if deb.extension().is_some_and(|it| it == "deb") {
                sh::run(Command::new("dpkg-deb").arg("-x").args([&deb, &partial]))?;
                unpacked += 1;
            }
        }
        ensure!(unpacked > 0, "apt-get has fetched nothing for {name}");
        fs::remove_dir_all(&debs)?;
        finish(&partial)?;
        fs::rename(&partial, into).with_context(|| format!("cannot make {}", into.display()))
    }
}

fn is_fresh(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|it| it.modified());
    modified.is_ok_and(|it| it.elapsed().is_ok_and(|age| age < FRESH))
}

/// The Debian release of this machine: programs built here run with its libraries.
pub fn this_suite() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let name = name.context("/etc/os-release has no VERSION_CODENAME: this needs Debian")?;
    Ok(name.trim_matches('"').to_owned())
}

/// The lines of the sources list.
fn source_lines() -> Result<String> {
    let (archive, security) = fetched_mirrors()?;
    let signed = if Path::new(KEYRING).exists() {
        format!(" signed-by={KEYRING}")
    } else {
        String::new()
    };
    let this = this_suite()?;
    let mut suites = SUITES.to_vec();
    if !suites.contains(&this.as_str()) {
        suites.push(&this);
    }
    let line =
        |uri: &str, suite: &str| format!("deb [target=Packages{signed}] {uri} {suite} main\n");
    let mut lines: String = suites.iter().map(|suite| line(&archive, suite)).collect();
    if let Some(security) = security {
        lines.extend(SECURITY.iter().map(|suite| line(&security, suite)));
    }
    Ok(lines)
}

/// The mirror of Debian's archive that this machine uses.
pub fn mirror() -> Result<String> {
    Ok(fetched_mirrors()?.0)
}

/// The mirrors, after apt has fetched its lists if need be.
fn fetched_mirrors() -> Result<(String, Option<String>)> {
    let [archive, security] = match mirrors()? {
        [None, _] => {
            say!("apt does not know of Debian's archive yet: fetching its lists.");
            apt::update()?;
            mirrors()?
        }
        known => known,
    };
    let archive = archive.context(
        "apt's sources name no mirror of Debian's archive: add one to /etc/apt/sources.list",
    )?;
    Ok((archive, security))
}

/// The mirrors of the archive and of its security updates, from the machine's own sources.
fn mirrors() -> Result<[Option<String>; 2]> {
    let format = "$(ORIGIN)|$(LABEL)|$(REPO_URI)";
    let mut get = Command::new("apt-get");
    let targets =
        sh::output(get.args(["indextargets", "--format", format, "Created-By: Packages"]))?;
    Ok(["Debian|Debian|", "Debian|Debian-Security|"].map(|prefix| {
        let uri = targets.lines().find_map(|line| line.strip_prefix(prefix));
        uri.map(str::to_owned)
    }))
}
