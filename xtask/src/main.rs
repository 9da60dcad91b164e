//! `cargo xtask`: builds, runs, tests and benches twheel.
//!
//! The host crates build with plain `cargo build` on stable, around the eBPF objects in
//! `twheel-ebpf/prebuilt`. What needs more than that (the BPF target, root, a lab) is here.
//!
//! | question | modules |
//! |---|---|
//! | How is another program run? | `sh` |
//! | What must a machine have? | `setup`, `apt` |
//! | What builds the eBPF objects, and what is built around them? | `toolchain`, `ebpf`, `run`, `cross` |
//! | Is it right? | `lint`, `test`, `fuzz`, `mutants`, `vm` |
//! | How fast is it? | `bench` |
//! | What goes into a package? | `man` |

mod apt;
mod bench;
mod cross;
mod ebpf;
mod fuzz;
mod lint;
mod man;
mod mutants;
mod run;
mod setup;
mod sh;
mod test;
mod toolchain;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, runs, tests and benches twheel.
///
/// Each command first sets up what it needs, and says so: on Debian, missing packages are
/// installed with apt-get; bpf-linker is built once and kept in ~/.cache/twheel/tools. Where the
/// eBPF objects cannot be built, the ones in twheel-ebpf/prebuilt are used.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run twheel: on the interface given with --iface, else in a lab of network namespaces
    ///
    /// All arguments go to `twheel run`, or to `twheel-lab` when there is no --iface.
    #[command(disable_help_flag = true)]
    Run {
        /// Passed on as they are
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },

    /// Run all tests, those that need root included, and count them
    Test {
        /// In release mode, many more random operations, and the tests that are marked as ignored
        #[arg(long)]
        exhaustive: bool,
        /// Only the tests of faults: floods, crashes, stalls, hostile packets
        #[arg(long, conflicts_with = "exhaustive")]
        faults: bool,
        /// The same, longer and with more of everything: an hour
        #[arg(long, conflicts_with = "exhaustive")]
        soak: bool,
        /// A filter on test names, and other arguments for the test binaries
        #[arg(last = true)]
        args: Vec<String>,
    },

    /// Run a benchmark, or all of them
    Bench {
        /// Which one, and what is passed on, such as --json
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },

    /// Build the program twheel, and print where it is
    Build {
        /// For which architecture
        #[arg(long, value_enum, default_value = "native")]
        target: cross::Target,
    },

    /// Build the eBPF objects into target/bpf
    BuildEbpf {
        /// Compare them with the committed ones, and fail when they differ
        #[arg(long, conflicts_with = "update")]
        check: bool,
        /// Replace the committed ones
        #[arg(long)]
        update: bool,
    },

    /// Check formatting, lints and documentation
    Lint,

    /// Fuzz the parser beside etherparse with libFuzzer, for a minute unless told otherwise
    ///
    /// Needs a nightly of rustup's and a C++ compiler; cargo-fuzz is built once.
    Fuzz {
        /// Afterwards minimise the corpus into fuzz/corpus.hex
        #[arg(long)]
        keep: bool,
        /// Passed on to libFuzzer, such as -max_total_time=600
        #[arg(last = true)]
        args: Vec<String>,
    },

    /// Break twheel-common in one place at a time, and see whether its tests notice
    ///
    /// cargo-mutants is built once. twheel-common/mutants.toml lists the mutants that change nothing.
    Mutants {
        /// Only those of these files, such as state.rs
        files: Vec<String>,
        /// Only a few, chosen by the commit
        #[arg(long, conflicts_with = "files")]
        sample: bool,
    },

    /// Boot Debian's kernels in virtual machines and check twheel there
    ///
    /// All of them, which takes an hour or so, also write the table of docs/kernels.md.
    VmTest {
        /// Only kernels whose release begins with this, such as 6.12, of the matrix or not
        #[arg(long, value_name = "TEXT")]
        kernel: Option<String>,
        /// Only the newest, 6.12 and 6.1, with fewer checks: what each run of CI does
        #[arg(long, conflicts_with = "kernel")]
        ci: bool,
        /// Only the checks of this name, such as interfaces
        #[arg(long, value_name = "NAME")]
        check: Option<String>,
        /// Machines at a time; each takes one CPU [default: 2; with --ci, all]
        #[arg(long, value_name = "N")]
        jobs: Option<usize>,
    },

    /// Write a man page for each command of twheel into target/man
    Man,

    /// Do only the set-up that the other commands start with
    Setup,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Run { args } => run::run(&args),
        Task::Test {
            exhaustive,
            faults,
            soak,
            args,
        } => test::test(
            test::Which {
                exhaustive,
                faults,
                soak,
            },
            &args,
        ),
        Task::Bench { args } => bench::bench(&args),
        Task::BuildEbpf { check: true, .. } => ebpf::check(),
        Task::BuildEbpf { update: true, .. } => ebpf::update(),
        Task::BuildEbpf { .. } => ebpf::build(),
        Task::Lint => lint::lint(),
        Task::Fuzz { keep, args } => fuzz::fuzz(keep, &args),
        Task::Mutants { files, sample } => mutants::mutants(&files, sample),
        Task::Build { target } => cross::build(target),
        Task::VmTest {
            kernel,
            ci,
            check,
            jobs,
        } => vm::test(&vm::Options {
            kernel,
            ci,
            check,
            jobs,
        }),
        Task::Man => man::man(),
        Task::Setup => setup::setup(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
