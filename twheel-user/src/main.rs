//! `twheel`, the program: arguments in, exit code out.

use std::process::ExitCode;

use clap::Parser;
use twheel::{
    cli::{Cli, complete},
    failure::{exit_code, is_broken_pipe},
};

fn main() -> ExitCode {
    complete::answer();
    match Cli::parse().execute() {
        Ok(()) => ExitCode::SUCCESS,
        // A broken pipe is no error: `| head` has read what it wanted.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            twheel::say!("twheel: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}
