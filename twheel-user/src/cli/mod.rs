//! The commands: a file each.

mod delete;
mod detach;
mod expired;
mod flows;
mod flush;
mod plan;
mod policy;
mod run;
mod select;
mod stats;
mod talkers;
mod top;
mod wheel;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

/// Watches the flows of network interfaces from inside the kernel and says when one has expired.
#[derive(Parser)]
#[command(name = "twheel", version, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Flows(flows::Flows),
    Expired(expired::Expired),
    Stats(stats::Stats),
    Talkers(talkers::Talkers),
    Top(top::Top),
    Wheel(wheel::Wheel),
    Delete(delete::Delete),
    Flush(flush::Flush),
    Detach(detach::Detach),
    Plan(plan::Plan),
    Policy(policy::Policy),
}

const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 failure; 2 unusable arguments; 3 not permitted; 4 the host lacks \
something; 5 the interface is unknown or taken; 6 pins in the way, or none where some are needed.";

impl Cli {
    /// Does what was asked.
    pub fn execute(self) -> Result<()> {
        match self.command {
            Command::Run(run) => run.execute(),
            Command::Flows(flows) => flows.execute(),
            Command::Expired(expired) => expired.execute(),
            Command::Stats(stats) => stats.execute(),
            Command::Talkers(talkers) => talkers.execute(),
            Command::Top(top) => top.execute(),
            Command::Wheel(wheel) => wheel.execute(),
            Command::Delete(delete) => delete.execute(),
            Command::Flush(flush) => flush.execute(),
            Command::Detach(detach) => detach.execute(),
            Command::Plan(plan) => plan.execute(),
            Command::Policy(policy) => policy.execute(),
        }
    }
}

/// [`Scheme`](twheel_common::wheel::Scheme), as an argument.
#[derive(Clone, Copy, ValueEnum)]
enum Scheme {
    /// One level, as long as the longest timeout (scheme 4 of Varghese & Lauck)
    Simple,
    /// One level; who is due later goes round several times (scheme 6)
    Hashed,
    /// Several levels, each slot of one as long as the level below (scheme 7)
    Hierarchical,
}

impl From<Scheme> for twheel_common::wheel::Scheme {
    fn from(scheme: Scheme) -> Self {
        match scheme {
            Scheme::Simple => Self::Simple,
            Scheme::Hashed => Self::Hashed,
            Scheme::Hierarchical => Self::Hierarchical,
        }
    }
}
