//! Builds the eBPF objects, and checks the committed ones.
//!
//! `twheel-ebpf/prebuilt` holds the objects without DWARF, so that nobody needs a compiler for the
//! BPF target who does not change the programs, and a manifest that says which compiler and which
//! sources made them. The same sources give the same bytes wherever they are built, so `--check` can
//! build them again and compare. What is built stays in `target/bpf` with its DWARF, for debuggers;
//! what is loaded is always without.

mod strip;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    sh::{self, say},
    toolchain::{self, Compiler, Toolchain},
};

const TARGET: &str = "bpfel-unknown-none";
/// The binaries of twheel-ebpf.
const NAMES: [&str; 4] = ["twheel", "bench", "peers", "probe"];
/// Those that are committed compressed: only benchmarks load them, and `cargo xtask` unpacks them.
const COMPRESSED: [&str; 2] = ["bench", "peers"];
const UPDATE: &str = "run `cargo xtask build-ebpf --update` and commit the result";

/// Flags for rustc, besides those that keep paths out of the objects.
const RUSTFLAGS: [&str; 5] = [
    // BTF: the kernel needs the type of `bpf_loop`'s callback, and the verifier's log quotes the
    // source.
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    // Atomics whose result is used (fetch-add, compare-and-swap) need v3.
    "-Ctarget-cpu=v3",
    // No one can read where a BPF program panicked, and with line numbers every edit of a comment
    // would change the object.
    "-Zlocation-detail=none",
    // aya's bindings follow the registers of the host. No program here uses registers, and the
    // objects must be the same on every host.
    "--cfg=bpf_target_arch=\"x86_64\"",
];

/// The absolute paths of the objects to load.
pub struct Objects {
    /// The data plane.
    pub twheel: PathBuf,
    /// The programs that only benchmarks load.
    pub bench: PathBuf,
    /// The programs that the benchmarks compare twheel with.
    pub peers: PathBuf,
    /// The programs that ask the kernel how it runs programs.
    pub probe: PathBuf,
}

impl Objects {
    fn at(path: impl Fn(&str) -> PathBuf) -> Self {
        let [twheel, bench, peers, probe] = NAMES.map(path);
        Self {
            twheel,
            bench,
            peers,
            probe,
        }
    }

    /// The committed objects.
    fn prebuilt() -> Result<Self> {
        for name in COMPRESSED {
            write(&unpacked(name), &committed(name)?)?;
        }
        Ok(Self::at(|name| match COMPRESSED.contains(&name) {
            true => unpacked(name),
            false => prebuilt(name),
        }))
    }

    /// These objects without their DWARF.
    fn strip(&self) -> Result<Self> {
        let stripped = Self::at(|name| sh::target(&format!("bpf/stripped/{name}.bpf.o")));
        for ((name, full), (_, path)) in self.each().into_iter().zip(stripped.each()) {
            let object = strip::strip(&read(full)?);
            write(
                path,
                &object.with_context(|| format!("cannot strip {name}"))?,
            )?;
        }
        Ok(stripped)
    }

    /// The environment variables by which a build of twheel takes these objects instead of the
    /// committed ones: none if they are the same, so that `cargo build` and `cargo xtask` share
    /// what they build.
    pub fn build_env(&self) -> Vec<(&'static str, &OsStr)> {
        [
            ("TWHEEL_BPF_OBJECT", "twheel", &self.twheel),
            ("TWHEEL_PROBE_OBJECT", "probe", &self.probe),
        ]
        .into_iter()
        .filter(|(_, name, path)| match (committed(name), read(path)) {
            (Ok(committed), Ok(object)) => committed != object,
            _ => true,
        })
        .map(|(variable, _, path)| (variable, path.as_os_str()))
        .collect()
    }

    fn each(&self) -> [(&'static str, &Path); 4] {
        let [twheel, bench, peers, probe] = NAMES;
        [
            (twheel, &self.twheel),
            (bench, &self.bench),
            (peers, &self.peers),
            (probe, &self.probe),
        ]
    }
}

/// What made the prebuilt objects.
#[derive(Serialize, Deserialize)]
struct Manifest {
    /// SHA-256 of each object.
    objects: BTreeMap<String, String>,
    compiler: Compiler,
    sources: Sources,
}

/// What the objects are made from.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Sources {
    /// Of the files, the crates they depend on, the release profile and the flags.
    sha256: String,
    /// Relative to the workspace. A new file is not missed: it becomes part of the crate only
    /// through an edit of one of these.
    files: BTreeSet<String>,
}

/// Builds the objects, with their DWARF: `cargo xtask build-ebpf`.
pub fn build() -> Result<()> {
    let toolchain = toolchain::find(recorded().as_ref(), false)?;
    for (_, path) in compile(&toolchain)?.each() {
        println!("{}", path.display());
    }
    Ok(())
}

/// The objects of these sources: the committed ones, or built here if those are of other sources.
pub fn objects() -> Result<Objects> {
    let Err(stale) = Manifest::read().and_then(|manifest| manifest.verify()) else {
        return Objects::prebuilt();
    };
    let built = toolchain::find(recorded().as_ref(), false).and_then(|it| compile(&it));
    match built {
        Ok(built) => built.strip(),
        Err(why) => bail!(
            "the eBPF objects cannot be built ({why:#}), and the prebuilt ones cannot be used: {stale:#}"
        ),
    }
}

/// The compiler of the committed objects.
fn recorded() -> Option<Compiler> {
    Manifest::read().ok().map(|manifest| manifest.compiler)
}

/// Replaces the prebuilt objects: `cargo xtask build-ebpf --update`.
pub fn update() -> Result<()> {
    let toolchain = toolchain::find(recorded().as_ref(), false)?;
    let built = recompile(&toolchain)?;
    let mut objects = BTreeMap::new();
    for (name, path) in built.strip()?.each() {
        let object = read(path)?;
        // Another gzip may compress the same object to other bytes.
        if committed(name).ok().as_ref() != Some(&object) {
            match COMPRESSED.contains(&name) {
                true => write(&prebuilt(name), &gzip(&["-9", "--no-name"], path)?)?,
                false => write(&prebuilt(name), &object)?,
            }
        }
        objects.insert(name.to_owned(), hex(Sha256::digest(object)));
    }
    let sources = Sources::new(source_files(&built)?)?;
    let compiler = toolchain.compiler;
    let manifest = toml::to_string(&Manifest {
        objects,
        compiler,
        sources,
    })?;
    let origin = "# What made these objects, and their SHA-256 (before compression).\n\
                  # Written by `cargo xtask build-ebpf --update`.";
    fs::write(Manifest::path(), format!("{origin}\n\n{manifest}"))
        .context("cannot write the manifest")?;
    say!("Updated twheel-ebpf/prebuilt.");
    Ok(())
}

/// Compares the prebuilt objects with the sources: `cargo xtask build-ebpf --check`.
pub fn check() -> Result<()> {
    let manifest = Manifest::read()?;
    manifest.verify_objects()?;
    let (files, compared) = match toolchain::find(Some(&manifest.compiler), true) {
        Ok(toolchain) => {
            let built = recompile(&toolchain)?;
            for (name, fresh) in built.strip()?.each() {
                if read(fresh)? != committed(name)? {
                    bail!("the prebuilt object {name} is not what the sources build: {UPDATE}");
                }
            }
            (source_files(&built)?, Ok(()))
        }
        Err(why) => (manifest.sources.files.clone(), Err(why)),
    };
    if Sources::new(files)? != manifest.sources {
        bail!("the prebuilt objects are from other sources: {UPDATE}");
    }
    match compared {
        Ok(()) => say!("The prebuilt objects are what the sources build, byte for byte."),
        Err(why) if sh::is_ci() => bail!(
            "nothing was compared: {why:#}; install the compiler that twheel-ebpf/prebuilt/MANIFEST.toml names, or {UPDATE}"
        ),
        Err(why) => say!(
            "The prebuilt objects are from these sources by their SHA-256; bytes were not compared: {why:#}."
        ),
    }
    Ok(())
}

/// Compiles everything again, because cargo does not notice another linker.
fn recompile(toolchain: &Toolchain) -> Result<Objects> {
    sh::run(&mut cargo(toolchain, "clean --quiet -p twheel-ebpf"))?;
    compile(toolchain)
}

fn compile(toolchain: &Toolchain) -> Result<Objects> {
    say!(
        "Building the eBPF objects with rustc {}; this usually takes 35 s the first time.",
        toolchain.compiler.rustc
    );
    let mut flags: Vec<_> = RUSTFLAGS.map(str::to_owned).into();
    for (path, name) in toolchain::source_paths(&toolchain.sysroot, sh::workspace())? {
        flags.push(format!("--remap-path-prefix={path}={name}"));
    }
    let args = "build --quiet --locked -p twheel-ebpf --bins -Zbuild-std=core";
    let mut build = cargo(toolchain, args);
    sh::run(build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")))
        .context("the eBPF objects do not build")?;
    let release = sh::target("bpf").join(TARGET).join("release");
    Ok(Objects::at(|name| release.join(name)))
}

/// The toolchain's cargo, for the BPF target, with a target directory of its own: the host crates
/// need not wait for its lock, nor be rebuilt because of its flags.
fn cargo(toolchain: &Toolchain, args: &str) -> Command {
    let mut cargo = toolchain.cargo();
    cargo.args(args.split(' '));
    cargo.args(["--release", "--target", TARGET, "--target-dir"]);
    cargo.arg(sh::target("bpf"));
    cargo
}

/// The files of the workspace that went into the objects, from the dependency files that cargo
/// writes beside each, and the manifests of their crates.
fn source_files(objects: &Objects) -> Result<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    for (_, object) in objects.each() {
        let dep_info = read_text(&object.with_extension("d"))?;
        // Make's syntax: `object: source source`, with spaces in paths escaped.
        let (_, sources) = dep_info
            .split_once(": ")
            .context("no sources in dep-info")?;
        for source in sources.replace("\\ ", "\0").split_whitespace() {
            let source = PathBuf::from(source.replace('\0', " "));
            let Ok(file) = source.strip_prefix(sh::workspace()) else {
                continue;
            };
            let package: PathBuf = file.components().take(1).collect();
            for file in [file, &package.join("Cargo.toml")] {
                files.insert(file.display().to_string());
            }
        }
    }
    Ok(files)
}

impl Sources {
    fn new(files: BTreeSet<String>) -> Result<Self> {
        let mut parts: Vec<String> = RUSTFLAGS.map(str::to_owned).into();
        for file in &files {
            parts.push(file.clone());
            parts.push(read_text(&sh::workspace().join(file))?);
        }
        // Of Cargo.lock only the part that these crates use, so that a host crate may change
        // without a rebuild here.
        let args = "tree --locked -p twheel-ebpf -e normal --prefix none --format {p} --target";
        let tree = sh::output(sh::cargo().args(args.split(' ')).arg(TARGET))?;
        // `name version`, then perhaps a path or a mark.
        let crates = tree
            .lines()
            .map(|line| line.splitn(3, ' ').take(2).collect());
        parts.extend(crates.collect::<BTreeSet<String>>());
        let workspace: toml::Table =
            toml::from_str(&read_text(&sh::workspace().join("Cargo.toml"))?)?;
        let release = workspace.get("profile").and_then(|it| it.get("release"));
        parts.extend(release.map(toml::Value::to_string));

        let mut hash = Sha256::new();
        for part in parts {
            hash.update(part);
            // Separates the parts: text has no such byte.
            hash.update([0]);
        }
        let sha256 = hex(hash.finalize());
        Ok(Self { sha256, files })
    }
}

impl Manifest {
    /// Fails unless the files match this manifest, and the manifest matches the present sources.
    fn verify(&self) -> Result<()> {
        self.verify_objects()?;
        if Sources::new(self.sources.files.clone())? != self.sources {
            bail!("the prebuilt objects are from other sources: {UPDATE}");
        }
        Ok(())
    }

    /// Fails unless the files match this manifest.
    fn verify_objects(&self) -> Result<()> {
        for name in NAMES {
            if self.objects.get(name) != Some(&hex(Sha256::digest(committed(name)?))) {
                bail!("the prebuilt object {name} is not the one in its manifest: {UPDATE}");
            }
        }
        Ok(())
    }

    fn path() -> PathBuf {
        sh::workspace().join("twheel-ebpf/prebuilt/MANIFEST.toml")
    }

    fn read() -> Result<Self> {
        toml::from_str(&read_text(&Self::path())?)
            .context("the manifest of the prebuilt objects is not as expected")
    }
}

/// The file of a committed object.
fn prebuilt(name: &str) -> PathBuf {
    let end = match COMPRESSED.contains(&name) {
        true => ".gz",
        false => "",
    };
    sh::workspace().join(format!("twheel-ebpf/prebuilt/{name}.bpf.o{end}"))
}

/// Where a committed object that is compressed is unpacked.
fn unpacked(name: &str) -> PathBuf {
    sh::target(&format!("bpf/prebuilt/{name}.bpf.o"))
}

/// A committed object.
fn committed(name: &str) -> Result<Vec<u8>> {
    match COMPRESSED.contains(&name) {
        true => gzip(&["--decompress"], &prebuilt(name)),
        false => read(&prebuilt(name)),
    }
}

/// What gzip makes of a file.
fn gzip(args: &[&str], path: &Path) -> Result<Vec<u8>> {
    let mut gzip = Command::new("gzip");
    let gzip = gzip.args(args).arg("--stdout").arg(path);
    let output = gzip.output().context("cannot run gzip")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("gzip cannot read {}: {}", path.display(), error.trim());
    }
    Ok(output.stdout)
}

/// Writes a file, unless it has these bytes already: cargo looks at the time.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|it| it == bytes) {
        return Ok(());
    }
    let directory = path.parent().context("a file is in a directory")?;
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, bytes))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn hex(hash: impl IntoIterator<Item = u8>) -> String {
    hash.into_iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{env, fs, path::Path};

    use super::{Manifest, NAMES, Objects, committed, prebuilt};

    /// Most bytes of the committed objects together.
    const MOST: u64 = 800_000;

    /// Tests run the committed objects, or those that `cargo xtask` has built since, and named.
    #[test]
    fn tests_run_no_prebuilt_object_of_other_sources() {
        let named = env::var_os("TWHEEL_BPF_OBJECT");
        if named.is_none_or(|path| Path::new(&path) == prebuilt("twheel")) {
            Manifest::read().unwrap().verify().unwrap();
        }
    }

    #[test]
    fn a_prebuilt_object_of_other_sources_is_refused() {
        let mut manifest = Manifest::read().unwrap();
        manifest.verify_objects().unwrap();
        manifest.sources.sha256 = "0".repeat(64);
        let error = manifest.verify().unwrap_err().to_string();
        assert!(
            error.contains("from other sources") && error.contains("build-ebpf --update"),
            "{error}"
        );
        let mut manifest = Manifest::read().unwrap();
        manifest.objects.insert("twheel".to_owned(), "0".repeat(64));
        assert!(manifest.verify().is_err());
    }

    #[test]
    fn prebuilt_objects_are_small() {
        let size = |name| fs::metadata(prebuilt(name)).unwrap().len();
        let sizes = NAMES.map(size);
        assert!(sizes.iter().sum::<u64>() <= MOST, "{sizes:?}");
    }

    #[test]
    fn only_objects_that_differ_from_the_prebuilt_are_named_to_cargo() {
        let mut objects = Objects::prebuilt().unwrap();
        assert_eq!(objects.build_env(), []);
        for (name, path) in objects.each() {
            assert!(fs::read(path).unwrap() == committed(name).unwrap());
        }
        objects.probe = objects.peers.clone();
        let expected = ("TWHEEL_PROBE_OBJECT", objects.probe.as_os_str());
        assert_eq!(objects.build_env(), [expected]);
        objects.twheel = "/nowhere".into();
        assert_eq!(objects.build_env().len(), 2);
    }
}
