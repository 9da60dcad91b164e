//! Zig, as the C compiler and the linker of static programs: it brings musl, its headers and those of
//! the kernel, libunwind and libc++ for every architecture, so that neither needs packages of another
//! architecture.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    apt,
    bounded::{self, Bounded},
    sh::say,
    toolchain,
};

/// How long each step of its installation may take.
const INSTALL: Duration = Duration::from_secs(10 * 60);
/// The package on PyPI, whose wheel has the compiler.
const PACKAGE: &str = "ziglang==0.17.1";
/// Names the directory whose name must not get into programs.
pub const FROM: &str = "TWHEEL_BUILD_DIR";

/// Its version.
pub fn version() -> &'static str {
    PACKAGE.rsplit('=').next().unwrap_or_default()
}

/// Zig, as a directory of programs that are called as a C compiler is.
pub struct Zig {
    bin: PathBuf,
    cache: PathBuf,
}

impl Zig {
    /// Installs it once into the cache, and writes the programs for an architecture, such as
    /// `x86_64`.
    pub fn new(arch: &str) -> Result<Self> {
        let home = toolchain::cache()?.join(PACKAGE.replace("==", "-"));
        let zig = home.join("package/ziglang/zig");
        if !zig.exists() {
            install(&home)?;
        }
        let it = Self {
            bin: home.join("bin"),
            cache: home.join("cache"),
        };
        fs::create_dir_all(&it.bin).with_context(|| format!("cannot make {}", it.bin.display()))?;
        let zig = zig.display();
        it.put(&compiler(arch), &script(&zig.to_string(), "cc", arch))?;
        it.put(&cxx(arch), &script(&zig.to_string(), "c++", arch))?;
        for tool in ["ar", "ranlib"] {
            let text = format!("#!/bin/sh\nexec {zig} {tool} \"$@\"\n");
            it.put(&format!("twheel-{tool}"), &text)?;
        }
        Ok(it)
    }

    fn put(&self, name: &str, text: &str) -> Result<()> {
        let path = self.bin.join(name);
        if fs::read_to_string(&path).is_ok_and(|it| it == text) {
            return Ok(());
        }
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Lets a cargo compile and link with it. The names have no directory, since OpenSSL keeps that of
    /// its compiler as text. `from`: the directory whose name must not get into the program.
    pub fn set(&self, cargo: &mut Command, arch: &str, from: &Path) -> Result<()> {
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [self.bin.clone()]
            .into_iter()
            .chain(env::split_paths(&path));
        cargo.env(
            "PATH",
            env::join_paths(path).context("a directory of PATH has a colon")?,
        );
        let linker = format!(
            "CARGO_TARGET_{}_UNKNOWN_LINUX_MUSL_LINKER",
            arch.to_uppercase()
        );
        cargo
            .env(linker, compiler(arch))
            .env("CC", compiler(arch))
            .env("CXX", cxx(arch))
            .env("AR", "twheel-ar")
            .env("RANLIB", "twheel-ranlib")
            // What is built to run here, such as macros, is for this machine.
            .env("HOST_CC", "cc")
            .env("HOST_CXX", "c++")
            .env("HOST_AR", "ar")
            .env("ZIG_GLOBAL_CACHE_DIR", &self.cache)
            .env(FROM, from);
        for variable in ["CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"] {
            cargo.env_remove(variable);
        }
        Ok(())
    }
}

fn compiler(arch: &str) -> String {
    format!("twheel-cc-{arch}")
}

fn cxx(arch: &str) -> String {
    format!("twheel-c++-{arch}")
}

fn script(zig: &str, language: &str, arch: &str) -> String {
    format!(
        r#"#!/bin/bash
# Written by `cargo xtask`: zig, called as gcc is.
args=()
for arg in "$@"; do
    case "$arg" in
    # The compiler's own are used; or it does not know them.
    --target=* | -lgcc | -lgcc_s | -lgcc_eh | -Wl,-znostart-stop-gc | -Wl,--fix-cortex-a53-843419) ;;
    # It ignores this one.
    -static-pie) args+=(-static -pie) ;;
    # librdkafka's names a symbol that it has only when it tests itself.
    -Wl,--version-script=*) args+=("$arg" -Wl,--undefined-version) ;;
    # OpenSSL keeps its directories as text.
    -D*) args+=("${{arg//"${FROM}"//twheel}}") ;;
    *) args+=("$arg") ;;
    esac
done
exec {zig} {language} -target {arch}-linux-musl "-ffile-prefix-map=${FROM}=/twheel" "${{args[@]}}"
"#
    )
}

fn install(home: &Path) -> Result<()> {
    let has_pip = Command::new("python3")
        .args(["-c", "import venv, ensurepip"])
        .stderr(std::process::Stdio::null())
        .status();
    if !has_pip.is_ok_and(|status| status.success()) {
        apt::install(&["python3-venv"], "20 s")?;
    }
    say!(
        "Installing {PACKAGE} into {}; this usually takes 20 s.",
        home.display()
    );
    let venv = home.join("venv");
    let log = bounded::log("setup-zig");
    let bounded = Bounded::new(format!("install {PACKAGE}"), INSTALL, &log);
    let mut make = Command::new("python3");
    bounded.run(make.args(["-m", "venv", "--clear"]).arg(&venv))?;
    let partial = home.join("partial");
    let _ = fs::remove_dir_all(&partial);
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip.args(["--no-deps", "--upgrade", "--target"]);
    bounded.run(pip.arg(&partial).arg(PACKAGE))?;
    let _ = fs::remove_dir_all(&venv);
    fs::rename(&partial, home.join("package")).context("cannot move what pip has installed")
}
