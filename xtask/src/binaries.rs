//! What cargo builds for the tests: test binaries and the programs that they run. Whatever else needs
//! one of them takes it from here, so that each is built once.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{ebpf::Objects, sh};

/// What is built for the host. Always all of the workspace is selected, with the same features, and
/// only targets are left out: so a crate has the same features, and is built once, whoever needs it.
pub const HOST: &str =
    "--workspace --exclude twheel-ebpf --features twheel-bench/kafka,twheel-timers/tokio";
/// The test with which cargo builds the programs `twheel` and `twheel-lab`: two packages have one of
/// this name.
pub const PROGRAMS: &str = "program";
/// The directories of the packages whose tests need root.
const ROOT: [&str; 2] = ["tests", "bench"];

/// What to build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// All tests.
    All,
    /// The programs, and the integration tests of these names.
    Tests(Vec<String>),
    /// The tests of one package alone, without the features of others.
    Package(String),
}

impl Selection {
    /// The arguments of cargo.
    fn arguments(&self) -> Vec<&str> {
        let mut arguments: Vec<_> = match self {
            Self::Package(package) => vec!["--package", package],
            _ => HOST.split(' ').collect(),
        };
        if let Self::Tests(names) = self {
            arguments.extend(["--test", PROGRAMS]);
            arguments.extend(names.iter().flat_map(|name| ["--test", name.as_str()]));
        }
        arguments
    }
}

/// A program that tests run, built with them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its path.
    pub executable: PathBuf,
}

impl Program {
    /// Reads one of cargo's messages (`--message-format=json`). `None` if it concerns something
    /// else.
    fn read(message: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(message).ok()?;
        let is_program = message["profile"]["test"] == Value::Bool(false)
            && message["target"]["kind"][0].as_str() == Some("bin");
        is_program.then_some(())?;
        Some(Self {
            name: message["target"]["name"].as_str()?.to_owned(),
            executable: message["executable"].as_str()?.into(),
        })
    }
}

/// A test binary.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Binary {
    /// The directory of its package and its own name, or `lib`, such as `tests/concurrency`. It is
    /// unique.
    pub name: String,
    /// The directory of its package, which is its current directory, as with `cargo test`.
    pub package: PathBuf,
    /// Its path.
    pub executable: PathBuf,
}

impl Binary {
    /// Reads one of cargo's messages (`--message-format=json`). `None` if it concerns something
    /// else.
    fn read(message: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(message).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if message["profile"]["test"] != Value::Bool(true) {
            return None;
        }
        let manifest = PathBuf::from(text(&message["manifest_path"])?);
        let package = manifest.parent()?.to_owned();
        // A library and a program of one package may have the same name.
        let target = match message["target"]["kind"][0].as_str()? {
            "lib" => "lib".to_owned(),
            _ => text(&message["target"]["name"])?,
        };
        Some(Self {
            name: format!("{}/{target}", package.file_name()?.to_str()?),
            executable: text(&message["executable"])?.into(),
            package,
        })
    }

    /// Whether its tests need root.
    pub fn needs_root(&self) -> bool {
        ROOT.iter()
            .any(|root| Path::new(&self.name).starts_with(root))
    }
}

/// What cargo has built.
pub struct Compiled {
    /// Test binaries.
    pub binaries: Vec<Binary>,
    /// Programs.
    pub programs: Vec<Program>,
}

impl Compiled {
    /// The path of a program.
    pub fn program(&self, name: &str) -> Result<&Path> {
        let program = self.programs.iter().find(|it| it.name == name);
        let program = program.with_context(|| format!("cargo has built no {name}"))?;
        Ok(&program.executable)
    }

    /// The path of a test binary of twheel-tests.
    pub fn test(&self, name: &str) -> Result<&Path> {
        let binary = self
            .binaries
            .iter()
            .find(|it| it.name.strip_prefix("tests/") == Some(name));
        let binary = binary.with_context(|| format!("cargo has built no test {name}"))?;
        Ok(&binary.executable)
    }
}

/// A cargo command for what is selected, around these objects.
pub fn cargo(command: &str, selection: &Selection, objects: &Objects) -> Command {
    let mut cargo = sh::cargo();
    cargo
        .envs(objects.build_env())
        .arg(command)
        .args(selection.arguments());
    cargo
}

/// Lets cargo build test binaries and programs, and returns them.
pub fn build(selection: &Selection, objects: &Objects) -> Result<Compiled> {
    let mut cargo = cargo("test", selection, objects);
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let output = cargo
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo test")?;
    if !output.status.success() {
        bail!("cargo cannot build the tests ({})", output.status);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let binaries: BTreeSet<_> = messages.lines().filter_map(Binary::read).collect();
    Ok(Compiled {
        binaries: binaries.into_iter().collect(),
        programs: messages.lines().filter_map(Program::read).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::{Binary, Program, Selection};

    const MESSAGE: &str = r#"{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml",
        "target":{"kind":["test"],"name":"reap"},"profile":{"test":true},"executable":"/w/target/reap-1"}"#;

    #[test]
    fn reads_what_cargo_built() {
        let binary = Binary::read(MESSAGE).unwrap();
        assert_eq!(binary.name, "tests/reap");
        assert_eq!(binary.package.to_str(), Some("/w/tests"));
        assert_eq!(binary.executable.to_str(), Some("/w/target/reap-1"));
        assert!(binary.needs_root());
        let library = MESSAGE.replace("[\"test\"]", "[\"lib\"]");
        assert_eq!(Binary::read(&library).unwrap().name, "tests/lib");
    }

    #[test]
    fn knows_what_is_no_test() {
        assert_eq!(Binary::read("not JSON"), None);
        let program = MESSAGE.replace("\"test\":true", "\"test\":false");
        assert_eq!(Binary::read(&program), None);
        let library = MESSAGE.replace("\"/w/target/reap-1\"", "null");
        assert_eq!(Binary::read(&library), None);
    }

    #[test]
    fn reads_which_programs_cargo_built() {
        assert_eq!(Program::read(MESSAGE), None);
        let program = MESSAGE.replace("\"test\":true", "\"test\":false");
        assert_eq!(
            Program::read(&program),
            None,
            "an example, or a build script"
        );
        let program = Program::read(&program.replace("[\"test\"]", "[\"bin\"]")).unwrap();
        assert_eq!(program.name, "reap");
    }

    #[test]
    fn one_test_is_built_with_the_features_of_all() {
        let all = Selection::All.arguments();
        let one = Selection::Tests(vec!["reap".to_owned()]);
        assert_eq!(
            one.arguments(),
            [&all[..], &["--test", "program", "--test", "reap"]].concat()
        );
    }
}
