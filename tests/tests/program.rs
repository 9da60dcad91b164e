//! The programs of the labs as processes. (They are built wherever this is.)

use std::process::Command;

use twheel_tests::netns::require_root;

#[test]
fn a_lab_without_a_twheel_says_so() {
    require_root();
    let mut lab = Command::new(env!("CARGO_BIN_EXE_twheel-lab"));
    let output = lab.env("TWHEEL_BIN", "/nonexistent/twheel").output();
    let output = output.expect("it can be run");
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("/nonexistent/twheel"), "{said}");
}

#[test]
#[cfg(feature = "kafka")]
fn the_lab_of_a_fleet_knows_its_options() {
    let run = |arg| {
        let mut lab = Command::new(env!("CARGO_BIN_EXE_twheel-fleet-lab"));
        lab.arg(arg).output().expect("it can be run")
    };
    assert!(run("--help").status.success());
    assert_eq!(run("--nonsense").status.code(), Some(2));
}
