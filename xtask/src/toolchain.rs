//! Finds a toolchain that can build the BPF target: a rustc with core's sources, and a bpf-linker.
//!
//! The target is tier 3, so core is built as well, which stable refuses. The candidates, in order:
//!
//! 1. a rustup nightly that has `rust-src`;
//! 2. Debian's `rustc-web`, `cargo-web` and `rust-web-src`, told to act as a nightly for this build
//!    alone: apt reaches it where rustup's servers are out of reach.
//!
//! rustc hands LLVM bitcode to bpf-linker, so bpf-linker's LLVM must have the same major version.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::{
    apt,
    bounded::{self, Bounded},
    sh::{self, say},
};

/// The version of bpf-linker that is used.
const BPF_LINKER: &str = "0.13.0";
/// The LLVM versions that it can be built against.
const LINKER_LLVMS: [&str; 3] = ["21", "22", "23"];
/// How long a program may take to download and build.
const BUILD: Duration = Duration::from_secs(1200);
/// The sysroot of the distribution's rustc.
const SYSTEM: &str = "/usr";
/// The Debian packages that install it.
const DEBIAN: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "libllvm22"];

/// What determines the bytes of an object, besides the sources and the flags.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compiler {
    /// The release of rustc.
    pub rustc: String,
    /// The commit it was built from.
    pub commit: String,
    /// rustc's LLVM.
    pub llvm: String,
    /// The version of bpf-linker.
    pub bpf_linker: String,
    /// bpf-linker's LLVM, which generates the code.
    pub linker_llvm: String,
}

/// A toolchain that can build the BPF target.
pub struct Toolchain {
    /// Where rustc, cargo and core's sources are.
    pub sysroot: PathBuf,
    /// The directory of bpf-linker.
    pub linker_dir: PathBuf,
    /// The versions of its parts.
    pub compiler: Compiler,
}

impl Toolchain {
    /// This toolchain's cargo, set up to build with it.
    pub fn cargo(&self) -> Command {
        let mut cargo = cargo(&self.sysroot, &self.compiler.rustc);
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [self.linker_dir.clone()]
            .into_iter()
            .chain(env::split_paths(&path));
        cargo.env("PATH", env::join_paths(path).expect("these were in PATH"));
        cargo
    }
}

/// A sysroot's cargo, set up to build with the rustc of the same sysroot, of this release, as a
/// nightly.
fn cargo(sysroot: &Path, release: &str) -> Command {
    let mut cargo = Command::new(sysroot.join("bin/cargo"));
    cargo.current_dir(sh::workspace());
    // The caller's settings are meant for the host, and must not change the bytes.
    for (key, _) in env::vars_os() {
        if key.as_encoded_bytes().starts_with(b"CARGO_PROFILE_") {
            cargo.env_remove(key);
        }
    }
    for key in ["CARGO_INCREMENTAL", "RUSTC_WRAPPER", "LD_LIBRARY_PATH"] {
        cargo.env_remove(key);
    }
    cargo.env("RUSTC", sysroot.join("bin/rustc"));
    if !release.contains("nightly") {
        cargo.env("RUSTC_BOOTSTRAP", "1");
    }
    cargo
}

/// A compiler with the sources of the standard library, which builds it for other architectures.
pub struct WithSources(Rustc);

impl WithSources {
    /// This compiler's cargo, set up to build with it.
    pub fn cargo(&self) -> Command {
        cargo(&self.0.sysroot, &self.0.release)
    }

    /// Its release, and so that of the standard library.
    pub fn release(&self) -> &str {
        &self.0.release
    }

    /// As [`source_paths`].
    pub fn paths(&self, sources: &Path) -> Result<Vec<(String, &'static str)>> {
        source_paths(&self.0.sysroot, sources)
    }
}

/// The directories of this machine that source files are in, and their names in what is built.
pub fn source_paths(sysroot: &Path, sources: &Path) -> Result<Vec<(String, &'static str)>> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".cargo")))
        .context("there is no home directory")?;
    let rust = sysroot.join("lib/rustlib/src/rust");
    // Debian has core's sources behind a symbolic link.
    let real = fs::canonicalize(&rust).context("core's sources are gone")?;
    let paths = [
        (sources, "/twheel"),
        (cargo_home.as_path(), "/cargo"),
        (&rust, "/rust"),
        (&real, "/rust"),
    ];
    let mut paths: Vec<_> = paths
        .map(|(path, name)| (path.display().to_string(), name))
        .into();
    // The directory of a registry is named after its host, and there are mirrors. If several
    // prefixes match, rustc takes the last.
    if let Ok(registries) = fs::read_dir(cargo_home.join("registry/src")) {
        for registry in registries.flatten() {
            paths.push((registry.path().display().to_string(), "/crates"));
        }
    }
    Ok(paths)
}

/// Finds such a compiler: a rustup nightly, or Debian's, which is installed if it is missing.
pub fn with_sources() -> Result<WithSources> {
    let mut found = rustups().into_iter().filter_map(Rustc::at);
    if let Some(rustc) = found.next().or_else(|| Rustc::at(SYSTEM.into())) {
        return Ok(WithSources(rustc));
    }
    apt::install(&DEBIAN, "a minute or two")?;
    let rustc = Rustc::at(SYSTEM.into()).context("rustc-web came without the library's sources")?;
    Ok(WithSources(rustc))
}

/// The Debian packages that must be installed for a compiler of the BPF target: none if there is one
/// that has built the committed objects.
pub fn packages() -> Vec<&'static str> {
    /// The part of the objects' manifest that is read here.
    #[derive(Deserialize)]
    struct Manifest {
        compiler: Compiler,
    }
    // Another one cannot be installed beside it.
    if Rustc::at(SYSTEM.into()).is_some() {
        return Vec::new();
    }
    let manifest = sh::workspace().join("twheel-ebpf/prebuilt/MANIFEST.toml");
    let manifest = fs::read_to_string(manifest).ok();
    let manifest: Option<Manifest> = manifest.and_then(|text| toml::from_str(&text).ok());
    let recorded = manifest.map(|it| it.compiler);
    let fits = |rustc: &Rustc| recorded.as_ref().is_none_or(|it| rustc.is(it));
    match rustups()
        .into_iter()
        .filter_map(Rustc::at)
        .any(|it| fits(&it))
    {
        true => Vec::new(),
        false => DEBIAN.to_vec(),
    }
}

/// Finds a toolchain, or says why there is none. One with the recorded rustc is preferred; if
/// `exact`, rustc and linker must be the recorded ones.
pub fn find(recorded: Option<&Compiler>, exact: bool) -> Result<Toolchain> {
    let same = |rustc: &Rustc| recorded.is_some_and(|it| rustc.is(it));
    let complete = |rustc: Rustc| {
        if exact && !same(&rustc) {
            bail!("rustc {} is not the recorded one", rustc.release);
        }
        let recorded_llvm = recorded.filter(|_| exact).map(|r| r.linker_llvm.as_str());
        let (linker_dir, linker_llvm) = linker(major(&rustc.llvm), recorded_llvm)
            .with_context(|| format!("rustc {} has no linker", rustc.release))?;
        Ok(rustc.with(linker_dir, linker_llvm))
    };

    let mut found: Vec<_> = rustups().into_iter().filter_map(Rustc::at).collect();
    found.extend(Rustc::at(SYSTEM.into()));
    found.sort_by_key(|rustc| !same(rustc));
    let mut why = anyhow!("there is no compiler for the BPF target");
    for rustc in found {
        match complete(rustc) {
            Ok(toolchain) => return Ok(toolchain),
            Err(error) => why = error,
        }
    }
    if Rustc::at(SYSTEM.into()).is_some() {
        return Err(why);
    }
    if let Err(error) = apt::install(&DEBIAN, "a minute or two") {
        bail!("{why:#}; {error:#}");
    }
    complete(Rustc::at(SYSTEM.into()).context("rustc-web came without core's sources")?)
}

/// A rustc with core's sources.
struct Rustc {
    sysroot: PathBuf,
    release: String,
    commit: String,
    llvm: String,
}

impl Rustc {
    /// The rustc in `sysroot`, if it exists and has the sources.
    fn at(sysroot: PathBuf) -> Option<Self> {
        let core = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if !core.exists() {
            return None;
        }
        let version = sh::output(Command::new(sysroot.join("bin/rustc")).arg("-vV")).ok()?;
        let field = |name| {
            let mut lines = version.lines();
            Some(lines.find_map(|line| line.strip_prefix(name))?.to_owned())
        };
        Some(Self {
            release: field("release: ")?,
            commit: field("commit-hash: ")?,
            llvm: field("LLVM version: ")?,
            sysroot,
        })
    }

    /// Whether it is the recorded one.
    fn is(&self, recorded: &Compiler) -> bool {
        [&recorded.rustc, &recorded.commit, &recorded.llvm]
            == [&self.release, &self.commit, &self.llvm]
    }

    fn with(self, linker_dir: PathBuf, linker_llvm: String) -> Toolchain {
        Toolchain {
            sysroot: self.sysroot,
            linker_dir,
            compiler: Compiler {
                rustc: self.release,
                commit: self.commit,
                llvm: self.llvm,
                bpf_linker: BPF_LINKER.to_owned(),
                linker_llvm,
            },
        }
    }
}

/// The sysroots of rustup's nightlies.
fn rustups() -> Vec<PathBuf> {
    let rustup = |args: &[&str]| sh::output(Command::new("rustup").args(args)).unwrap_or_default();
    if sh::which("rustup").is_empty() {
        return Vec::new();
    }
    rustup(&["toolchain", "list"])
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| name.contains("nightly"))
        .map(|name| rustup(&["which", "rustc", "--toolchain", name]))
        .filter_map(|rustc| Some(Path::new(rustc.trim()).parent()?.parent()?.to_owned()))
        .collect()
}

/// The cache directory for what takes long to build, shared by all clones.
pub fn cache() -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".cache")))
        .context("there is no home directory to keep a cache in")?;
    Ok(cache.join("twheel"))
}

/// The directory and the LLVM version of a bpf-linker for this LLVM major version, and exactly of
/// version `exactly` if one is given; built here if needed.
fn linker(llvm_major: &str, exactly: Option<&str>) -> Result<(PathBuf, String)> {
    let tools = cache()?.join("tools");
    let cached = tools.join("bin/bpf-linker");
    for linker in sh::which("bpf-linker").into_iter().chain([cached.clone()]) {
        let llvm = linker_llvm(&linker).filter(|llvm| major(llvm) == llvm_major);
        if let (Some(llvm), Some(dir)) = (llvm, linker.parent())
            && exactly.is_none_or(|exactly| llvm == exactly)
        {
            return Ok((dir.to_owned(), llvm));
        }
    }
    // It is linked to the system's libLLVM, so another build would change nothing.
    if linker_llvm(&cached).is_none_or(|llvm| major(&llvm) != llvm_major) {
        install_linker(&tools, llvm_major)?;
    }
    let llvm = linker_llvm(&cached).context("the bpf-linker built here does not run")?;
    if exactly.is_some_and(|exactly| llvm != exactly) {
        bail!("the LLVM of bpf-linker is {llvm}, not the recorded one");
    }
    Ok((tools.join("bin"), llvm))
}

/// The LLVM version of a bpf-linker; `None` if the linker has another version or does not start.
fn linker_llvm(linker: &Path) -> Option<String> {
    let ask = |args: &[&str]| {
        let mut linker = Command::new(linker);
        let output = linker.args(args).stderr(Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    if ask(&["--version"])?.trim() != format!("bpf-linker {BPF_LINKER}") {
        return None;
    }
    // bpf-linker has no option for that, but passes this one to LLVM.
    let answer = ask(&["--llvm-args=--version", "--output=/dev/null", "/dev/null"])?;
    let (_, version) = answer.split_once("LLVM version ")?;
    version.split_whitespace().next().map(str::to_owned)
}

/// Builds bpf-linker against the system's libLLVM, into `tools/bin`.
fn install_linker(tools: &Path, major: &str) -> Result<()> {
    if !LINKER_LLVMS.contains(&major) {
        bail!("bpf-linker {BPF_LINKER} does not know LLVM {major}");
    }
    let _lock = bounded::lock(&tools.join("bpf-linker.lock"), "build bpf-linker")?;
    let built = tools.join("bin/bpf-linker");
    if linker_llvm(&built).is_some_and(|llvm| self::major(&llvm) == major) {
        return Ok(());
    }
    let libllvm = match libllvm(major) {
        Some(path) => path,
        None => {
            apt::install(&[&format!("libllvm{major}")], "20 s")?;
            libllvm(major).with_context(|| format!("there is no libLLVM {major}"))?
        }
    };
    // The build looks for the name that only the -dev package has; that package is large.
    let prefix = tools.join("llvm");
    let link = prefix.join("lib/libLLVM.so");
    fs::create_dir_all(prefix.join("lib")).context("cannot create a directory for bpf-linker")?;
    let _ = fs::remove_file(&link);
    symlink(libllvm, &link).with_context(|| format!("cannot create {}", link.display()))?;

    say!(
        "Building bpf-linker {BPF_LINKER} into {}; this usually takes 45 s.",
        tools.display()
    );
    let features = format!("--features=llvm-{major}");
    build_tool("bpf-linker", BPF_LINKER, |cargo| {
        cargo.args(["--no-default-features", &features]);
        cargo.env("LLVM_PREFIX", &prefix);
    })
}

/// Builds a program of crates.io into the cache's `tools/bin`: within a time limit, and with a second
/// try. `set` adds options.
pub fn build_tool(name: &str, version: &str, set: impl FnOnce(&mut Command)) -> Result<()> {
    let mut cargo = sh::cargo();
    cargo.args(["install", name, "--version", version, "--locked", "--force"]);
    cargo.arg("--root").arg(cache()?.join("tools"));
    set(&mut cargo);
    let log = bounded::log(&format!("setup-{name}"));
    Bounded::new(format!("download and build {name} {version}"), BUILD, &log)
        .advice("check the network and cargo's registry")
        .run(&cargo)
}

/// The system's libLLVM of a major version.
fn libllvm(major: &str) -> Option<PathBuf> {
    let multiarch = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    let llvm = format!("/usr/lib/llvm-{major}/lib");
    let names = [
        format!("libLLVM.so.{major}."),
        format!("libLLVM-{major}.so"),
    ];
    [&multiarch, &llvm, "/usr/lib64", "/usr/lib"]
        .into_iter()
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flat_map(|entries| entries.flatten())
        .find(|entry| {
            names
                .iter()
                .any(|name| entry.file_name().to_string_lossy().starts_with(name))
        })
        .map(|entry| entry.path())
}

fn major(version: &str) -> &str {
    version.split('.').next().unwrap_or_default()
}
