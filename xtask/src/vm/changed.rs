//! Whether anything has changed that may behave differently on another kernel.
//!
//! A file counts unless it is listed here as apart, so that nothing new is forgotten.

use std::path::Path;

use super::script;
use crate::{base::Base, sh::say};

/// Files and directories that the machines do not run, or whose code asks the kernel for nothing
/// that differs among kernels, and why.
const APART: [(&str, &str); 44] = [
    (".ci", "which checks are run"),
    (".editorconfig", "editors"),
    (".gitattributes", "git"),
    (".github", "which checks are run"),
    (".gitignore", "git"),
    ("CHANGELOG.md", "documentation"),
    ("CONTRIBUTING.md", "documentation"),
    ("LICENSE-APACHE", "documentation"),
    ("LICENSE-MIT", "documentation"),
    ("README.md", "documentation"),
    ("clippy.toml", "lints"),
    ("deny.toml", "lints"),
    ("dist", "units and packages, for `vm-test --system`"),
    ("docs", "documentation"),
    ("fuzz", "runs on the host"),
    ("rustfmt.toml", "lints"),
    ("tests/bench", "benchmarks"),
    ("tests/src/bin", "labs"),
    ("tests/src/broker.rs", "servers beside twheel"),
    ("tests/src/clickhouse_server.rs", "servers beside twheel"),
    ("tests/src/engine.py", "servers beside twheel"),
    ("tests/src/engine.rs", "servers beside twheel"),
    ("tests/src/fleet", "servers beside twheel"),
    ("tests/src/tansu.rs", "servers beside twheel"),
    (
        "tests/tests",
        "not run there, but for the tests of the scripts",
    ),
    ("twheel-common/mutants.toml", "runs on the host"),
    ("twheel-common/tests", "runs on the host"),
    ("twheel-common/timers/docs", "documentation"),
    ("twheel-common/timers/examples", "documentation"),
    ("twheel-common/timers/tests", "runs on the host"),
    ("twheel-user/src/cli", "options, and how answers are shown"),
    ("twheel-user/src/clickhouse", "HTTP"),
    ("twheel-user/src/export", "reads the history, and sends it"),
    ("twheel-user/src/failure.rs", "exit codes"),
    ("twheel-user/src/filter", "selects among flows"),
    ("twheel-user/src/fleet", "asks ClickHouse"),
    ("twheel-user/src/given.rs", "reads numbers"),
    ("twheel-user/src/history", "files on disk"),
    ("twheel-user/src/output", "how events are written"),
    ("twheel-user/src/plan.rs", "computes"),
    ("twheel-user/src/progress.rs", "draws on a terminal"),
    ("twheel-user/src/toml_file.rs", "reads text"),
    ("twheel-user/src/web", "the page"),
    ("xtask", "builds and runs"),
];
/// What counts nevertheless, and why.
const FACING: [(&str, &str); 17] = [
    ("twheel-user/src/cli/config", "chooses hooks and modes"),
    ("twheel-user/src/cli/config.rs", "chooses hooks and modes"),
    ("twheel-user/src/cli/delete.rs", "deletes in the table"),
    ("twheel-user/src/cli/detach.rs", "detaches"),
    ("twheel-user/src/cli/doctor.rs", "loads"),
    ("twheel-user/src/cli/flush.rs", "deletes in the table"),
    ("twheel-user/src/cli/idle", "takes sockets of processes"),
    ("twheel-user/src/cli/idle.rs", "takes sockets of processes"),
    ("twheel-user/src/cli/options.rs", "chooses hooks and modes"),
    ("twheel-user/src/cli/policy", "replaces policies"),
    (
        "twheel-user/src/cli/reap.rs",
        "chooses what is done to sockets",
    ),
    ("twheel-user/src/cli/run.rs", "loads and attaches"),
    (
        "twheel-user/src/cli/top/deletion.rs",
        "deletes in the table",
    ),
    ("xtask/src/binaries.rs", "builds"),
    ("xtask/src/cross.rs", "builds for arm64"),
    ("xtask/src/run.rs", "builds"),
    ("xtask/src/vm", "these machines"),
];
/// The directory of tests, some of which the machines run.
const TESTS: &str = "tests/tests";

/// Whether the machines are to be booted for what has changed since the [`Base`]; says so if not.
pub fn is_needed() -> bool {
    let changed = Base::find().changed();
    let is_needed = changed.any(faces_kernel);
    if !is_needed {
        say!(
            "No machine is booted: nothing that faces the kernel changed ({}).",
            changed.why()
        );
    }
    is_needed
}

/// Whether a file counts.
fn faces_kernel(file: &Path) -> bool {
    let is_in = |list: &[(&str, &str)]| list.iter().any(|(path, _)| file.starts_with(path));
    !is_in(&APART) || is_in(&FACING) || is_run(file)
}

/// Whether a file belongs to a test that the scripts run.
fn is_run(file: &Path) -> bool {
    let Ok(test) = file.strip_prefix(TESTS) else {
        return false;
    };
    let name = test.iter().next().unwrap_or_default();
    let name = Path::new(name).file_stem().unwrap_or_default();
    script::binaries().any(|binary| name == binary)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{APART, FACING, TESTS, faces_kernel};
    use crate::{sh, vm::script};

    #[test]
    fn all_that_is_listed_exists_and_is_in_order() {
        for (path, _) in APART.iter().chain(&FACING) {
            assert!(sh::workspace().join(path).exists(), "{path}");
        }
        for list in [&APART[..], &FACING] {
            assert!(list.is_sorted_by_key(|(path, _)| path));
        }
        for (path, _) in FACING {
            let mut apart = APART.iter();
            assert!(
                apart.any(|(it, _)| Path::new(path).starts_with(it)),
                "{path}"
            );
        }
        for name in script::binaries() {
            let test = sh::workspace().join(TESTS).join(name);
            assert!(
                test.is_dir() || test.with_extension("rs").exists(),
                "{name}"
            );
        }
    }

    #[test]
    fn a_file_counts_unless_it_is_apart() {
        for file in [
            "Cargo.lock",
            "Cargo.toml",
            "a new directory/file",
            "tests/src/netns.rs",
            "tests/tests/netns/main.rs",
            "tests/tests/passed.rs",
            "twheel-common/src/wheel.rs",
            "twheel-ebpf/prebuilt/twheel.bpf.o",
            "twheel-ebpf/src/main.rs",
            "twheel-user/src/a_new_module.rs",
            "twheel-user/src/cli/idle/watch.rs",
            "twheel-user/src/cli/run.rs",
            "twheel-user/src/netlink.rs",
            "twheel-user/src/offload/passed.rs",
            "twheel-user/src/reap/worker.rs",
            "xtask/src/vm/init.sh",
        ] {
            assert!(faces_kernel(Path::new(file)), "{file}");
        }
        for file in [
            "docs/usage.md",
            "tests/bench/src/main.rs",
            "tests/tests/kafka/main.rs",
            "tests/tests/verifier.rs",
            "twheel-common/tests/wheel.rs",
            "twheel-user/src/cli/top/draw.rs",
            "twheel-user/src/export/json.rs",
            "twheel-user/src/web/page.js",
            "xtask/src/lint.rs",
        ] {
            assert!(!faces_kernel(Path::new(file)), "{file}");
        }
    }
}
