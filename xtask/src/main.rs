//! `cargo xtask`: builds, runs, tests and benches twheel.
//!
//! The host crates build with plain `cargo build` on stable, around the eBPF objects in
//! `twheel-ebpf/prebuilt`. This crate does what needs more than that: the BPF target, root, a lab.
//!
//! | question | modules |
//! |---|---|
//! | How is another program run? | `sh`, `bounded` |
//! | What must a machine have? | `setup`, `apt`, `downloads`, `python`, `fleet_tools`, `kubernetes_tools`, `prometheus` |
//! | What builds the eBPF objects, and what is built around them? | `toolchain`, `ebpf`, `run`, `binaries`, `cross`, `statics`, `zig` |
//! | Is it right? | `lint`, `test`, `fuzz`, `mutants`, `vm`, `rebuilds` |
//! | What has changed? | `base` |
//! | What is it made of? | `dependencies` |
//! | How fast is it? | `bench` |
//! | What does a whole fleet look like? | `fleet` |
//! | What goes into a package, and what is published? | `man`, `dashboards`, `package`, `release` |
//! | What does the README show? | `recording` |
//! | What is the image of containers? | `image` |

mod apt;
mod base;
mod bench;
mod binaries;
mod bounded;
mod cross;
mod dashboards;
mod dependencies;
mod downloads;
mod ebpf;
mod fleet;
mod fleet_tools;
mod fuzz;
mod image;
mod kubernetes_tools;
mod lint;
mod man;
mod mutants;
mod package;
mod prometheus;
mod python;
mod rebuilds;
mod recording;
mod release;
mod run;
mod setup;
mod sh;
mod statics;
mod test;
mod toolchain;
mod vm;
mod zig;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, runs, tests and benches twheel.
///
/// Each command first installs what it needs, and says so: on Debian, missing packages with apt-get.
/// The eBPF objects in twheel-ebpf/prebuilt are used, or built if their sources have changed;
/// bpf-linker is then built once and kept in ~/.cache/twheel/tools.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run twheel on the interfaces of --iface; without --iface, run a lab of network namespaces
    ///
    /// All arguments are passed to `twheel run`, or without --iface to `twheel-lab`.
    #[command(disable_help_flag = true)]
    Run {
        /// Arguments, passed on unchanged
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },

    /// Run a fleet on this machine: hosts with traffic, a broker, ClickHouse's engine; and ask it
    ///
    /// It ends by itself, compares what is in ClickHouse with the hosts' histories, and leaves a page of results.
    Fleet(fleet::Options),

    /// Run all tests, including those that need root, and count them
    Test(test::Options),

    /// Run a benchmark, or all of them
    Bench {
        /// Name of the benchmark, and its arguments, such as --json
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },

    /// Build the program twheel, and print its path
    Build {
        /// Target architecture
        #[arg(long, value_enum, default_value = "native")]
        target: cross::Target,
    },

    /// Build the eBPF objects into target/bpf, with debug information
    BuildEbpf {
        /// Compare them with the committed objects, and fail if they differ
        #[arg(long, conflicts_with = "update")]
        check: bool,
        /// Replace the committed objects
        #[arg(long)]
        update: bool,
    },

    /// Check formatting, lints and documentation
    Lint,

    /// After test and lint: check that nothing of it is built again, whichever way it is asked for
    Rebuilds,

    /// Check the crates that twheel is made of: licences, sources, duplicates, advisories
    ///
    /// By cargo-deny, which is built once, and deny.toml.
    Deny(dependencies::Options),

    /// Fuzz the parser with libFuzzer, compared with etherparse, for a minute by default
    ///
    /// Installs a C++ compiler if there is none. With a rustup nightly it also uses the address sanitizer.
    Fuzz {
        /// Afterwards write the minimised corpus to fuzz/corpus.hex
        #[arg(long)]
        keep: bool,
        /// Arguments of libFuzzer, such as -max_total_time=600
        #[arg(last = true)]
        args: Vec<String>,
    },

    /// Mutate twheel-common in one place at a time, and check that its tests fail
    ///
    /// cargo-mutants is built once. twheel-common/mutants.toml lists the mutants that change nothing.
    Mutants {
        /// Mutate only these files, such as state.rs
        files: Vec<String>,
        /// Only lines that changed since the main branch, or since the commit in TWHEEL_BASE: 48 mutants at most
        #[arg(long, conflicts_with = "files")]
        changed: bool,
    },

    /// Boot Debian's kernels in virtual machines and check twheel on each
    ///
    /// A run of all kernels takes about an hour and also writes the table of docs/kernels.md.
    VmTest {
        /// Only kernels whose release begins with this, such as 6.12, also outside the matrix
        #[arg(long, value_name = "TEXT")]
        kernel: Option<String>,
        /// Only the newest, 6.12 and 6.1, with fewer checks, as CI does
        #[arg(long, conflicts_with = "kernel")]
        ci: bool,
        /// Only if something that faces the kernel changed since the main branch, or since the commit in TWHEEL_BASE
        #[arg(long)]
        changed: bool,
        /// Only checks of this name, such as interfaces
        #[arg(long, value_name = "NAME")]
        check: Option<String>,
        /// Debian systems with systemd instead: install the package, and restart, upgrade and purge it under traffic
        #[arg(long, conflicts_with_all = ["kernel", "ci", "changed", "check", "jobs"])]
        system: bool,
        /// Virtual machines at a time, one CPU each [default: 2; with --ci, all]
        #[arg(long, value_name = "N")]
        jobs: Option<usize>,
    },

    /// Build deb and rpm packages, of static programs for x86-64 and arm64, into target/packages
    Package(package::Options),

    /// Make all that is published of this version: programs, packages, sources, checksums, notes
    Release {
        /// Of sources that are not committed, with the notes of what is unreleased, and built once only
        #[arg(long)]
        draft: bool,
    },

    /// Write a man page for each command of twheel into target/man
    Man,

    /// Write the dashboards of a fleet for Grafana into dist/grafana
    Dashboards,

    /// Run the lab, and write what it shows into docs/lab.svg, as an animated picture
    Recording,

    /// Write an OCI image of static programs, as an archive that container engines load
    ///
    /// Without a registry and without a container engine. The same programs give the same archive.
    Image(image::Options),

    /// Only install what the other commands need
    Setup {
        /// Install what .ci/run needs, virtual machines included, and build nothing
        #[arg(long)]
        landing: bool,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Run { args } => run::run(&args),
        Task::Fleet(options) => fleet::fleet(&options),
        Task::Test(options) => test::test(&options),
        Task::Bench { args } => bench::bench(&args),
        Task::BuildEbpf { check: true, .. } => ebpf::check(),
        Task::BuildEbpf { update: true, .. } => ebpf::update(),
        Task::BuildEbpf { .. } => ebpf::build(),
        Task::Lint => lint::lint(),
        Task::Rebuilds => rebuilds::check(),
        Task::Deny(options) => dependencies::deny(&options),
        Task::Fuzz { keep, args } => fuzz::fuzz(keep, &args),
        Task::Mutants { files, changed } => mutants::mutants(&files, changed),
        Task::Build { target } => cross::build(target),
        Task::VmTest {
            kernel,
            ci,
            changed,
            check,
            system,
            jobs,
        } => vm::test(&vm::Options {
            kernel,
            ci,
            changed,
            check,
            system,
            jobs,
        }),
        Task::Package(options) => package::package(&options),
        Task::Release { draft } => release::release(draft),
        Task::Man => man::man(),
        Task::Dashboards => dashboards::write(),
        Task::Recording => recording::record(),
        Task::Image(options) => image::image(&options),
        Task::Setup { landing: true } => downloads::landing(),
        Task::Setup { landing: false } => setup::setup(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
