//! The test binaries: cargo builds and names them, and each becomes a job.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::sh;

/// The directory of the package whose tests need root.
const ROOT: &str = "tests";

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
        Path::new(&self.name).starts_with(ROOT)
    }

    /// The command that runs it.
    pub fn command(&self) -> Command {
        let mut command = if self.needs_root() && !sh::is_root() {
            let mut sudo = Command::new("sudo");
            sudo.arg("-E").arg(&self.executable);
            sudo
        } else {
            Command::new(&self.executable)
        };
        command.current_dir(&self.package);
        command
    }
}

/// What cargo has built.
pub struct Compiled {
    /// Test binaries.
    pub binaries: Vec<Binary>,
    /// Programs.
    pub programs: Vec<Program>,
}

/// Lets cargo build the test binaries that the command asks for, and returns them.
pub fn build(cargo: &mut Command) -> Result<Compiled> {
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
    use super::{Binary, Program};

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
}
