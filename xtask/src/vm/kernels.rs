//! Which kernels Debian has, which of them are tested, and what is expected of each.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{arch::Arch, archive::Archive};
use crate::sh::{self, say};

/// The oldest kernel that twheel supports.
pub const OLDEST: [u32; 2] = [6, 1];
/// Real-time kernels of Debian's releases, which are tested besides the newest one.
const REALTIME: [[u32; 2]; 2] = [[6, 1], [6, 12]];
/// The kernels that each CI run boots, besides the newest.
const CI: [[u32; 2]; 2] = [[6, 12], OLDEST];
/// The first real-time kernel that may interleave two softirq sections on one CPU, unless its
/// configuration keeps the lock that prevents it.
const INTERLEAVING: [u32; 2] = [6, 18];
/// A module that the tests need.
const VETH: &str = "kernel/drivers/net/veth.ko";

/// A kernel in Debian's lists. Kernels are ordered by version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// All numbers of its version.
    numbers: Vec<u32>,
    /// Its architecture.
    pub arch: Arch,
    /// Whether it is a PREEMPT_RT kernel.
    pub realtime: bool,
    /// Its name, as `uname -r` prints it.
    pub name: String,
}

impl Release {
    /// Reads the name of a kernel package; `None` for packages that are no kernel, and for kernels
    /// that are not tested.
    pub(super) fn of_package(package: &str) -> Option<Self> {
        let name = package.strip_prefix("linux-image-")?;
        let (version, arch) = [Arch::Amd64, Arch::Arm64].into_iter().find_map(|arch| {
            let version = name.strip_suffix(arch.debian())?.strip_suffix('-')?;
            Some((version, arch))
        })?;
        let (version, flavour) = version.rsplit_once('-')?;
        let realtime = match flavour {
            "rt" => true,
            "cloud" => false,
            _ => return None,
        };
        let numbers: Vec<u32> = version
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse().ok())
            .collect();
        // `linux-image-6.12-rt-amd64` is a name for the latest kernel.
        (numbers.len() > 2).then(|| Self {
            numbers,
            arch,
            realtime,
            name: name.to_owned(),
        })
    }

    /// Major and minor version.
    pub fn series(&self) -> [u32; 2] {
        [self.numbers[0], self.numbers[1]]
    }

    /// Its packages. Newer kernels are split, and the mirror may no longer have the modules of a
    /// superseded kernel.
    fn packages(&self, names: &BTreeSet<String>) -> Vec<String> {
        let split = [self.package("binary"), self.package("modules")];
        let mut packages = if names.contains(&split[0]) {
            split.to_vec()
        } else {
            vec![self.package("image")]
        };
        packages.push(self.package("base"));
        packages.retain(|it| names.contains(it));
        packages
    }

    fn package(&self, part: &str) -> String {
        format!("linux-{part}-{}", self.name)
    }

    fn is_whole(&self, names: &BTreeSet<String>) -> bool {
        !names.contains(&self.package("binary")) || names.contains(&self.package("modules"))
    }
}

/// The latest kernel of each series, the newest first; a complete one if there is any.
fn latest(names: &BTreeSet<String>) -> Vec<Release> {
    let mut latest = BTreeMap::<_, Release>::new();
    for release in names.iter().filter_map(|it| Release::of_package(it)) {
        let key = (release.series(), release.arch, release.realtime);
        let rank = |it: &Release| (it.is_whole(names), it.clone());
        if latest
            .get(&key)
            .is_none_or(|known| rank(known) < rank(&release))
        {
            latest.insert(key, release);
        }
    }
    latest.into_values().rev().collect()
}

/// Which kernels to test.
pub enum Selection<'a> {
    /// The whole matrix.
    All,
    /// The kernels that CI boots.
    Ci,
    /// The latest kernel of each series whose name begins with this, in the matrix or not.
    Named(&'a str),
}

/// The kernels to boot, by architecture, the newest first, PREEMPT_RT kernels after the others.
pub fn choose(names: &BTreeSet<String>, wanted: &Selection<'_>) -> Vec<Release> {
    let latest = latest(names);
    let is =
        |release: &Release, arch, realtime| (release.arch, release.realtime) == (arch, realtime);
    let newest = |arch, realtime| {
        let first = latest.iter().find(|it| is(it, arch, realtime));
        first.map(Release::series)
    };
    let too_old = latest
        .iter()
        .find(|it| is(it, Arch::Amd64, false) && it.series() < OLDEST);
    let in_matrix = |release: &Release| {
        let series = release.series();
        match (release.arch, release.realtime) {
            (Arch::Amd64, false) => series >= OLDEST || Some(release) == too_old,
            (Arch::Amd64, true) => {
                REALTIME.contains(&series) || newest(Arch::Amd64, true) == Some(series)
            }
            (Arch::Arm64, false) => series == OLDEST || newest(Arch::Arm64, false) == Some(series),
            (Arch::Arm64, true) => false,
        }
    };
    let is_wanted = |release: &&Release| match wanted {
        Selection::All => in_matrix(release),
        Selection::Named(start) => release.name.starts_with(start),
        Selection::Ci => {
            let series = release.series();
            is(release, Arch::Amd64, false)
                && (CI.contains(&series) || newest(Arch::Amd64, false) == Some(series))
        }
    };
    let chosen = latest.iter().filter(is_wanted);
    let mut chosen: Vec<_> = chosen.cloned().collect();
    chosen.sort_by_key(|it| (it.arch, it.realtime, Reverse(it.series())));
    chosen
}

/// A series that CI must boot and that is missing from these.
pub fn missing(releases: &[Release]) -> Option<[u32; 2]> {
    let has = |series: &[u32; 2]| releases.iter().any(|it| it.series() == *series);
    CI.into_iter().find(|series| !has(series))
}

/// What must happen on a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// twheel attaches, and everything works.
    Attaches,
    /// twheel refuses the kernel: it is too old.
    TooOld,
    /// twheel refuses the kernel: it may interleave two softirq sections on one CPU.
    Interleaves,
}

impl Expected {
    fn on(release: &Release, config: &str) -> Self {
        let is_set = |option: &str| {
            let line = format!("{option}=y");
            config.lines().any(|it| it == line)
        };
        if release.series() < OLDEST {
            Self::TooOld
        } else if release.realtime
            && release.series() >= INTERLEAVING
            && !is_set("CONFIG_PREEMPT_RT_NEEDS_BH_LOCK")
        {
            Self::Interleaves
        } else {
            Self::Attaches
        }
    }
}

/// A kernel and its modules, unpacked.
pub struct Kernel {
    /// Which kernel it is.
    pub release: Release,
    /// What must happen on it.
    pub expected: Expected,
    /// The directory that its packages are unpacked in.
    pub root: PathBuf,
    /// Whether it has its modules: without them `lo` is the only interface.
    pub has_modules: bool,
}

impl Kernel {
    /// Fetches and unpacks a kernel from Debian, unless that was done before.
    pub fn fetch(
        archive: &Archive,
        names: &BTreeSet<String>,
        release: Release,
        cache: &Path,
    ) -> Result<Self> {
        let root = cache.join(&release.name);
        if !root.exists() {
            say!(
                "Fetching {} with apt-get; this usually takes 30 s.",
                release.name
            );
            archive.unpack(&release.packages(names), release.arch, &root, |unpacked| {
                let modules = modules(unpacked, &release.name);
                if !modules.is_dir() {
                    return Ok(());
                }
                // As the package does when it is installed; its modules have moved to /usr.
                let base = modules.ancestors().nth(3);
                let base = base.context("modules lie three deep")?;
                let mut depmod = Command::new("/sbin/depmod");
                sh::run(depmod.arg("-b").arg(base).arg(&release.name))
            })?;
        }
        let config = first(
            &root,
            &["boot/config-", "usr/lib/linux/config-"],
            &release.name,
        )
        .unwrap_or_else(|| modules(&root, &release.name).join("config"));
        // If the mirror no longer has a kernel's modules, it does not have its configuration
        // either.
        let config = fs::read_to_string(&config).unwrap_or_default();
        Ok(Self {
            expected: Expected::on(&release, &config),
            has_modules: has(&modules(&root, &release.name), VETH),
            release,
            root,
        })
    }

    /// The image to boot.
    pub fn image(&self) -> Result<PathBuf> {
        let image = self.modules().join("vmlinuz");
        if image.exists() {
            return Ok(image);
        }
        first(&self.root, &["boot/vmlinuz-"], &self.release.name)
            .with_context(|| format!("no image of {} came", self.release.name))
    }

    /// Whether the kernel has a module.
    pub fn has(&self, module: &str) -> bool {
        has(&self.modules(), module)
    }

    /// The directory of its modules.
    pub fn modules(&self) -> PathBuf {
        modules(&self.root, &self.release.name)
    }
}

fn modules(root: &Path, release: &str) -> PathBuf {
    let usr = root.join("usr/lib/modules").join(release);
    if usr.exists() {
        return usr;
    }
    root.join("lib/modules").join(release)
}

/// Whether a module exists, compressed or not.
fn has(modules: &Path, module: &str) -> bool {
    let suffixes = ["", ".xz", ".zst"];
    suffixes
        .iter()
        .any(|suffix| modules.join(format!("{module}{suffix}")).exists())
}

fn first(root: &Path, prefixes: &[&str], release: &str) -> Option<PathBuf> {
    let paths = prefixes
        .iter()
        .map(|it| root.join(format!("{it}{release}")));
    paths.into_iter().find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|it| (*it).to_owned()).collect()
    }

    fn chosen(wanted: &Selection<'_>) -> Vec<String> {
        let all = names(&[
            "linux-image-5.10.0-9-cloud-amd64",
            "linux-image-5.10.0-46-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-dbg",
            "linux-image-6.1.0-56-cloud-amd64-unsigned",
            "linux-image-6.1.0-0.deb11.60-cloud-amd64",
            "linux-image-6.1.0-56-rt-amd64",
            "linux-image-6.1.0-56-cloud-arm64",
            "linux-image-6.12-rt-amd64",
            "linux-image-6.12.9+deb13-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.12.117+deb13-cloud-amd64",
            "linux-image-6.12.117+deb13-amd64",
            "linux-image-6.12.117+deb13-cloud-arm64",
            "linux-image-6.16.12+deb13-rt-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
            "linux-binary-7.3.4+deb13-cloud-amd64",
            "linux-modules-7.3.4+deb13-cloud-amd64",
            "linux-image-7.3.5+deb13-cloud-amd64",
            "linux-binary-7.3.5+deb13-cloud-amd64",
            "linux-image-7.3.4+deb13-rt-amd64",
            "linux-image-7.3.4+deb13-cloud-arm64",
        ]);
        choose(&all, wanted).into_iter().map(|it| it.name).collect()
    }

    #[test]
    fn the_matrix_has_the_latest_whole_kernel_of_each_series() {
        assert_eq!(
            chosen(&Selection::All),
            [
                "7.3.4+deb13-cloud-amd64",
                "6.12.117+deb13-cloud-amd64",
                "6.1.0-56-cloud-amd64",
                "5.10.0-46-cloud-amd64",
                "7.3.4+deb13-rt-amd64",
                "6.1.0-56-rt-amd64",
                "7.3.4+deb13-cloud-arm64",
                "6.1.0-56-cloud-arm64",
            ]
        );
        assert_eq!(
            chosen(&Selection::Ci),
            [
                "7.3.4+deb13-cloud-amd64",
                "6.12.117+deb13-cloud-amd64",
                "6.1.0-56-cloud-amd64",
            ]
        );
        assert_eq!(missing(&[]), Some([6, 12]));
        let release = |package| Release::of_package(package).unwrap();
        let both = [
            "linux-image-6.12.9+deb13-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
        ];
        assert_eq!(missing(&both.map(release)), None);
        assert_eq!(
            chosen(&Selection::Named("6.12")),
            ["6.12.117+deb13-cloud-amd64", "6.12.117+deb13-cloud-arm64"]
        );
    }

    #[test]
    fn what_is_expected_follows_from_version_and_configuration() {
        let of = |package: &str, config: &str| {
            Expected::on(&Release::of_package(package).unwrap(), config)
        };
        let realtime = "CONFIG_PREEMPT_RT=y\n# CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is not set\n";
        let locked = "CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y\n";
        let newest = "linux-image-7.3.4+deb13-rt-amd64";
        assert_eq!(of(newest, realtime), Expected::Interleaves);
        assert_eq!(of(newest, locked), Expected::Attaches);
        assert_eq!(
            of("linux-image-6.1.0-56-rt-amd64", "CONFIG_PREEMPT_RT=y\n"),
            Expected::Attaches
        );
        assert_eq!(
            of("linux-image-5.10.0-46-cloud-amd64", ""),
            Expected::TooOld
        );
    }
}
