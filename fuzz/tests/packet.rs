//! Compares the host's parser with etherparse on many random packets, the same in each run.
//! `cargo xtask fuzz` does the same with libFuzzer, which is guided by coverage.
#![allow(missing_docs)]

use std::{collections::BTreeMap, env};

use twheel_common::packet::{Protocols, Wanted};
use twheel_fuzz::{
    corpus, input,
    make::{Random, damage, packet},
    opinion::compare,
    rules::{Rule, Rules},
};

/// How often each rule was applied, and how many frames needed none.
#[derive(Default)]
struct Tally {
    executions: u64,
    outright: u64,
    rules: BTreeMap<Rule, u64>,
}

impl Tally {
    fn compare(&mut self, frame: &[u8], wanted: Wanted) {
        let rules = compare(frame, wanted).unwrap_or_else(|wrong| panic!("{wrong}"));
        self.executions += 1;
        self.outright += u64::from(rules == Rules::default());
        for rule in rules.iter() {
            *self.rules.entry(rule).or_default() += 1;
        }
    }
}

#[test]
fn no_disagreement_with_etherparse_is_unexplained() {
    let executions = match env::var_os("TWHEEL_LONG") {
        Some(_) => 50_000_000,
        None => 2_000_000,
    };
    let mut tally = Tally::default();
    let kept: Vec<_> = corpus::kept().collect();
    for bytes in &kept {
        let (wanted, frame) = input(bytes).expect("an input is not empty");
        tally.compare(frame, wanted);
    }
    let mut random = Random(0x7477_6865_656c);
    let mut frame = Vec::new();
    while tally.executions < executions {
        let wanted = Wanted {
            // All protocols in three cases of four.
            protocols: Protocols([7, 7, 7, random.below(8) as u32][random.below(4)]),
            timing: !random.once_in(4),
            vlans: !random.once_in(4),
        };
        if random.once_in(10) {
            frame.clone_from(&kept[random.below(kept.len())]);
            frame.remove(0);
            damage(&mut random, &mut frame);
        } else {
            packet(&mut random, &mut frame);
        }
        tally.compare(&frame, wanted);
    }
    println!(
        "{} executions, {} agree outright",
        tally.executions, tally.outright
    );
    for rule in Rule::ALL {
        let times = tally.rules.get(&rule).copied().unwrap_or(0);
        println!("{times:>9}  {rule:?}");
        assert_ne!(times, 0, "{rule:?} explains nothing");
    }
}
