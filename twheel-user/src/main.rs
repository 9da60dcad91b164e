//! `twheel`, the program: arguments in, exit code out.

use std::process::ExitCode;

use twheel::{
    cli::{Cli, complete},
    failure::{exit_code, is_broken_pipe},
};

fn main() -> ExitCode {
    complete::answer();
    match Cli::read().and_then(Cli::execute) {
        Ok(()) => ExitCode::SUCCESS,
        // A broken pipe is no error: `| head` has read what it wanted.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            twheel::say!("twheel: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}
