//! Policies: timeouts per service, from a file. `docs/policy.md` describes the format.
//!
//! | question | file |
//! |---|---|
//! | what a policy contains, and which flows match a rule | `rule.rs` |
//! | parsing, and errors with their location | `parse.rs` |
//! | rules that hide each other, and limits | `check.rs` |
//! | the sets that the data plane looks up | `compile.rs` |
//! | networks | `network.rs` |
//! | putting a policy into force | `install.rs` |
//! | how live flows follow a new policy | `follow.rs`, and before it is loaded `forecast.rs` |
//! | the cgroups that actions are limited to | `cgroups.rs` |

pub mod cgroups;
mod check;
mod compile;
pub mod follow;
pub mod forecast;
pub mod install;
pub mod network;
mod parse;
mod rule;

use std::{fs::File, io::Read, ops::RangeInclusive, path::Path, time::Duration};

use anyhow::Result;
use caps::Capability;

pub use self::{
    compile::{Compiled, words},
    network::{Network, mapped},
    rule::{Location, Policy, Query, Reap, Rule, Timeouts, Verdict, hook_name, packed},
};
use crate::{
    failure::{Failure, Kind},
    privilege::lacks,
};

/// Maximum size of a policy file, in bytes.
const MAX_FILE: u64 = 1 << 20;

impl Policy {
    /// Reads a policy from a file.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: the file cannot be read, or as in [`parse`](Self::parse).
    pub fn load(path: &Path, allowed: RangeInclusive<Duration>) -> Result<Self> {
        let file = path.display().to_string();
        let refuse = |what: String| Failure::new(Kind::Usage, format!("{file}: {what}"));
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|opened| opened.take(MAX_FILE + 1).read_to_end(&mut bytes))
            .map_err(|error| {
                let why = lacks(&error, Capability::CAP_DAC_OVERRIDE);
                refuse(format!("cannot be read: {why}: give a policy file"))
            })?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(refuse(format!("is longer than the {MAX_FILE} bytes allowed")).into());
        }
        Self::parse(&file, &bytes, allowed)
    }

    /// Parses the text of a file. `file` is its name in errors; each timeout must be in `allowed`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], as `FILE:LINE:COLUMN: what is wrong: what is allowed`.
    pub fn parse(file: &str, text: &[u8], allowed: RangeInclusive<Duration>) -> Result<Self> {
        let policy = parse::parse(file, text, allowed)?;
        check::check(&policy)?;
        Ok(policy)
    }
}

#[cfg(test)]
mod tests;
