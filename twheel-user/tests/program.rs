//! The program `twheel` as a process, as far as that needs no privileges.

use std::process::{Command, Output};

fn twheel(args: &[&str]) -> Output {
    let mut twheel = Command::new(env!("CARGO_BIN_EXE_twheel"));
    twheel.args(args).output().expect("it can be run")
}

#[test]
fn it_says_its_version() {
    let output = twheel(&["version"]);
    assert!(output.status.success(), "{output:?}");
    let version = concat!("twheel ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), version);
}

#[test]
fn a_command_that_does_not_exist_is_refused() {
    let output = twheel(&["nonsense"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("unrecognized subcommand 'nonsense'"),
        "{said}"
    );
    assert!(output.stdout.is_empty());
}
