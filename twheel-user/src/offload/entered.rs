//! Takes flows out of the table that were entered for a registration, when it is over and no packet
//! of theirs was seen. Else programs could fill the table with connections that pass no watched
//! interface.

use std::collections::BTreeMap;

use anyhow::Result;
use nix::{
    sched::{sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use twheel_common::{
    event::Reason,
    flow::idle,
    step::{Delete, Deleted, MAX_DELETES},
};

use super::{server::Thread, table::Table as _};
use crate::cpu::pin_to;

/// Most flows that are taken out before programs have their turn.
const TAKEN: usize = 1_024;

impl Thread {
    /// Takes out some of them.
    pub(super) fn take_out(&mut self) {
        let entered = self.registry.entered();
        let all: Vec<_> = entered.drain(..entered.len().min(TAKEN)).collect();
        if all.is_empty() {
            return;
        }
        let (table, mut batches) = (self.registry.table(), BTreeMap::<u32, Vec<_>>::new());
        let (now, mut later) = (table.now(), Vec::new());
        for (record, generation) in all {
            let Some(flow) = table.flow(record) else {
                continue;
            };
            let (word, stamp) = (flow.word, flow.word.stamp());
            if word.generation() != generation || stamp != flow.created || table.is_marked(record) {
                continue;
            }
            // A packet within the same unit of the clock would not show.
            match idle(now, stamp) {
                0 => later.push((record, generation)),
                _ => batches
                    .entry(flow.cpu)
                    .or_default()
                    .push((flow.delete(Reason::Deleted), generation)),
            }
        }
        match self.take_out_these(&batches) {
            Ok(again) => later.extend(again),
            Err(error) => log::debug!("flows of programs stay until their timeout: {error:#}"),
        }
        self.registry.entered().extend(later);
    }

    /// Takes flows from the wheels of their CPUs. Returns those that are to be tried again.
    fn take_out_these(
        &self,
        batches: &BTreeMap<u32, Vec<(Delete, u16)>>,
    ) -> Result<Vec<(u32, u16)>> {
        let this = Pid::from_raw(0);
        let (before, mut again) = (sched_getaffinity(this)?, Vec::new());
        let mut take = || -> Result<()> {
            for (cpu, flows) in batches {
                pin_to(*cpu)?;
                for some in flows.chunks(MAX_DELETES) {
                    let mut asked: Vec<_> = some.iter().map(|(flow, _)| *flow).collect();
                    self.delete.delete(&mut asked)?;
                    let answers = some.iter().zip(&asked);
                    again.extend(answers.filter_map(|((flow, generation), answer)| {
                        let outcome = Deleted::from_raw(answer.outcome);
                        let is_left = matches!(outcome, Some(Deleted::RingFull | Deleted::Posted));
                        is_left.then_some((flow.index, *generation))
                    }));
                }
            }
            Ok(())
        };
        let taken = take();
        sched_setaffinity(this, &before)?;
        taken.map(|()| again)
    }
}
