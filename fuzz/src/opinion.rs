//! Compares etherparse's answer about a frame with twheel's, with the rules by which twheel may
//! answer differently.
//!
//! etherparse parses the whole frame at once, leniently ([`etherparse::LaxSlicedPacket`]). Where
//! etherparse stops and twheel goes on, a rule removes from the frame what made etherparse stop,
//! and etherparse is asked again. Where etherparse accepts what twheel refuses, a rule refuses it
//! by what etherparse has found. No rule uses twheel's answer. So each frame has exactly one
//! expected answer, whether rules apply to it or not, and any other answer is a disagreement.

use std::fmt;

use twheel_common::packet::{Skip, Wanted, parse_any};

use crate::{
    asked::{Asked, Next, Said},
    rules::Rules,
};

/// Two answers that no rule reconciles.
pub struct Disagreement {
    frame: Vec<u8>,
    wanted: Wanted,
    ours: Result<Said, Skip>,
    theirs: Result<Said, Skip>,
    rules: Rules,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules: Vec<_> = self.rules.iter().collect();
        writeln!(f, "{:?} of", self.wanted)?;
        writeln!(f, "  {:02x?}", self.frame)?;
        writeln!(f, "twheel says      {:?}", self.ours)?;
        write!(f, "etherparse says  {:?}, by {rules:?}", self.theirs)
    }
}

/// Parses a frame with both. Returns the rules by which they agree.
pub fn compare(frame: &[u8], wanted: Wanted) -> Result<Rules, Box<Disagreement>> {
    let ours = parse_any(frame, wanted).map(Said::from);
    let (theirs, rules) = second_opinion(frame, wanted);
    if ours == theirs {
        return Ok(rules);
    }
    Err(Box::new(Disagreement {
        frame: frame.to_vec(),
        wanted,
        ours,
        theirs,
        rules,
    }))
}

/// etherparse's answer in twheel's terms, and the rules that were applied.
fn second_opinion(frame: &[u8], wanted: Wanted) -> (Result<Said, Skip>, Rules) {
    let mut asked = Asked {
        whole: frame.len(),
        wanted,
        vlans: [0; 2],
        more: false,
        too_short: false,
        rules: Rules::default(),
    };
    let mut patch = match asked.ask(frame) {
        Next::Answer(answer) => return (answer, asked.rules),
        Next::Again(patch) => patch,
    };
    let mut frame = frame.to_vec();
    loop {
        patch.apply(&mut frame);
        match asked.ask(&frame) {
            Next::Answer(answer) => return (answer, asked.rules),
            Next::Again(next) => patch = next,
        }
    }
}
