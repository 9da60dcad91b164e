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

use std::{ops::RangeInclusive, path::Path, time::Duration};

use anyhow::Result;

pub use self::{
    compile::{Compiled, words},
    network::{Network, mapped},
    rule::{Policy, Query, Reap, Rule, Timeouts, Verdict, hook_name, packed},
};
use crate::toml_file;

impl Policy {
    /// Reads a policy from a file.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`](crate::failure::Kind::Usage): the file cannot be read, or as in [`parse`](Self::parse).
    pub fn load(path: &Path, allowed: RangeInclusive<Duration>) -> Result<Self> {
        let bytes = toml_file::read(path, "policy file")?;
        Self::parse(&path.display().to_string(), &bytes, allowed)
    }

    /// Parses the text of a file. `file` is its name in errors; each timeout must be in `allowed`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`](crate::failure::Kind::Usage), as `FILE:LINE:COLUMN: what is wrong: what is allowed`.
    pub fn parse(file: &str, text: &[u8], allowed: RangeInclusive<Duration>) -> Result<Self> {
        let policy = parse::parse(file, text, allowed)?;
        check::check(&policy)?;
        Ok(policy)
    }
}

#[cfg(test)]
mod tests;
