//! Policies: timeouts per service, from a file. `docs/policy.md` describes the format.
//!
//! | question | file |
//! |---|---|
//! | what a policy says, and which flows meet a rule | `rule.rs` |
//! | from text to rules, and what is wrong where | `parse.rs` |
//! | rules that are in each other's way, limits | `check.rs` |
//! | the sets that the data plane looks up | `compile.rs` |
//! | networks | `network.rs` |
//! | how one is put into force | `install.rs` |

mod check;
mod compile;
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
    rule::{Location, Policy, Query, Rule, Timeouts, Verdict, hook_name, packed},
};
use crate::{
    failure::{Failure, Kind},
    privilege::lacks,
};

/// A policy file is no longer than this, in bytes.
const MAX_FILE: u64 = 1 << 20;

impl Policy {
    /// Reads a policy from a file.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: it cannot be read, or as in [`parse`](Self::parse).
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

    /// A policy from the text of a file, of which `file` is the name for errors; no timeout may be
    /// outside `allowed`.
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
