//! Runs other programs.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{IsTerminal, stdin},
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// Tells the user what happens, on stderr: stdout belongs to the program that is run.
macro_rules! say {
    ($($arg:tt)*) => { eprintln!("xtask: {}", format_args!($($arg)*)) };
}
pub(crate) use say;

/// What `cargo run` and `cargo test` set for the package that they run, and what names objects to
/// the build of twheel.
const FORGOTTEN: [&str; 10] = [
    "CARGO_BIN_NAME",
    "CARGO_CRATE_NAME",
    "CARGO_MANIFEST_DIR",
    "CARGO_MANIFEST_LINKS",
    "CARGO_MANIFEST_PATH",
    "CARGO_PKG_*",
    "CARGO_PRIMARY_PACKAGE",
    "OUT_DIR",
    "TWHEEL_BPF_OBJECT",
    "TWHEEL_PROBE_OBJECT",
];

/// The directory of the workspace.
pub fn workspace() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask is a member of a workspace")
}

/// A path below cargo's target directory.
pub fn target(path: &str) -> PathBuf {
    // Relative to the workspace, as cargo's default is, not to the current directory.
    workspace()
        .join(env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()))
        .join(path)
}

/// The cargo that runs this xtask, to build the host crates.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(workspace());
    forget_xtask(&mut cargo);
    cargo
}

/// Removes from a command's environment what cargo has set for xtask, and which objects twheel was
/// built around before.
///
/// Cargo runs build scripts again if a variable that they read has another value than last time.
/// With the name and directory of xtask, `cargo build` and `cargo xtask` in turn would build ring,
/// and all that depends on it, anew each time.
pub fn forget_xtask(command: &mut Command) {
    forget(command, env::vars_os());
}

fn forget(command: &mut Command, variables: impl IntoIterator<Item = (OsString, OsString)>) {
    let variables: Vec<_> = variables.into_iter().collect();
    let cargo = variables.iter().find(|(key, _)| key == "CARGO");
    let toolchain = cargo.and_then(|(_, path)| Path::new(path).parent()?.parent());
    let libraries = toolchain.map(|toolchain| toolchain.join("lib"));
    for (key, value) in &variables {
        let name = key.to_string_lossy();
        let is_xtasks = FORGOTTEN.iter().any(|it| match it.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == *it,
        });
        if is_xtasks {
            command.env_remove(key);
        } else if name == "LD_LIBRARY_PATH" {
            let cargos = |path: &PathBuf| {
                path.starts_with(target(""))
                    || libraries.as_ref().is_some_and(|it| path.starts_with(it))
            };
            let paths: Vec<_> = env::split_paths(value).filter(|it| !cargos(it)).collect();
            match env::join_paths(&paths) {
                Ok(rest) if !paths.is_empty() => command.env(key, rest),
                _ => command.env_remove(key),
            };
        }
    }
}

/// git, in the workspace.
pub fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(workspace());
    git
}

/// Runs a command to its end. Fails if the command does.
pub fn run(command: &mut Command) -> Result<()> {
    let name = name(command);
    let status = command
        .status()
        .with_context(|| format!("cannot run {name}"))?;
    if !status.success() {
        bail!("{name} failed ({status})");
    }
    Ok(())
}

/// Runs a command to its end and returns its stdout.
pub fn output(command: &mut Command) -> Result<String> {
    let name = name(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name} wrote something not UTF-8"))
}

/// Replaces this process with the command, so that signals and the exit code need no forwarding.
pub fn exec(command: &mut Command) -> Result<()> {
    let name = name(command);
    Err(command.exec()).with_context(|| format!("cannot run {name}"))
}

/// A command's name in error messages: the program, and its first arguments up to an option.
pub fn name(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name();
    let args = command.get_args();
    program
        .into_iter()
        .chain(args.take_while(|arg| !arg.as_encoded_bytes().starts_with(b"-")))
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Where `PATH` finds a program. There may be several.
pub fn which(program: &str) -> Vec<PathBuf> {
    env::split_paths(&env::var_os("PATH").unwrap_or_default())
        .map(|dir| dir.join(program))
        .filter(|path| path.is_file())
        .collect()
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Whether this is a run of continuous integration, which must not leave a check out.
pub fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

/// Fails, with one sentence, if nothing can be run as root.
pub fn require_root() -> Result<()> {
    if is_root() {
        return Ok(());
    }
    if which("sudo").is_empty() {
        bail!("this needs root, and there is no sudo: run it as root");
    }
    let asks = !Command::new("sudo")
        .args(["-n", "true"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if asks && !stdin().is_terminal() {
        bail!(
            "this needs root, and sudo asks for a password, which nobody can type here: run it as root"
        );
    }
    Ok(())
}

/// A command that runs as root, through sudo if needed.
pub fn as_root<'a>(
    program: impl AsRef<OsStr>,
    env: impl IntoIterator<Item = (&'a str, &'a OsStr)>,
) -> Result<Command> {
    require_root()?;
    if is_root() {
        let mut command = Command::new(program);
        command.envs(env);
        return Ok(command);
    }
    let mut command = Command::new("sudo");
    // sudo drops the environment of its command, but `env` sets it again.
    command.arg("env");
    for (key, value) in env {
        let mut pair = std::ffi::OsString::from(key);
        pair.push("=");
        pair.push(value);
        command.arg(pair);
    }
    command.arg(program);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, ffi::OsString, process::Command};

    use super::{forget, target};

    #[test]
    fn cargo_is_told_nothing_of_xtask() {
        let built = target("release/deps");
        let libraries = format!("{}:/tools/rust/lib:/opt/lib", built.display());
        let given = [
            ("CARGO", "/tools/rust/bin/cargo"),
            ("CARGO_HOME", "/cargo"),
            ("CARGO_TARGET_DIR", "/target"),
            ("CARGO_INCREMENTAL", "0"),
            ("CARGO_PROFILE_DEV_DEBUG", "0"),
            ("CARGO_BUILD_JOBS", "2"),
            ("PATH", "/bin"),
            ("CARGO_MANIFEST_DIR", "/xtask"),
            ("CARGO_MANIFEST_PATH", "/xtask/Cargo.toml"),
            ("CARGO_PKG_NAME", "xtask"),
            ("CARGO_PKG_VERSION_MAJOR", "0"),
            ("CARGO_PRIMARY_PACKAGE", "1"),
            ("OUT_DIR", "/out"),
            ("TWHEEL_BPF_OBJECT", "/object"),
            ("LD_LIBRARY_PATH", &libraries),
        ];
        let set = |given: &[(&str, &str)]| {
            let mut command = Command::new("cargo");
            let given = given.iter().map(|(key, value)| (key.into(), value.into()));
            forget(&mut command, given);
            let set = command.get_envs();
            let set = set.map(|(key, value)| (key.to_owned(), value.map(OsString::from)));
            set.collect::<BTreeMap<_, _>>()
        };
        let changed = set(&given);
        for (key, _) in given {
            let expected = match key {
                "LD_LIBRARY_PATH" => Some(Some("/opt/lib".into())),
                "CARGO_MANIFEST_DIR" | "CARGO_MANIFEST_PATH" | "CARGO_PKG_NAME" => Some(None),
                "CARGO_PKG_VERSION_MAJOR" | "CARGO_PRIMARY_PACKAGE" | "OUT_DIR" => Some(None),
                "TWHEEL_BPF_OBJECT" => Some(None),
                _ => None,
            };
            assert_eq!(
                changed.get(OsString::from(key).as_os_str()),
                expected.as_ref()
            );
        }
        let changed = set(&[("LD_LIBRARY_PATH", &built.display().to_string())]);
        assert_eq!(changed.into_values().collect::<Vec<_>>(), [None]);
    }
}
