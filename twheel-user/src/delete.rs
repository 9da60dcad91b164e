//! Deleting flows of an instance from beside its loader.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use aya::programs::Xdp;
use twheel_common::{
    event::Reason,
    step::{Delete, Deleted, MAX_DELETES},
};

use crate::{
    data_plane,
    failure::{Failure, Kind},
    flows::Flow,
    pins::Pins,
    stepper::pin_to,
};

/// How long a ring of events may stay full before whoever reads it is taken for gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at a full ring.
const PAUSE: Duration = Duration::from_millis(1);

/// How deleting went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Flows deleted, each with an event.
    pub done: u64,
    /// Flows that had a packet since they were chosen, or have ended: left as they are.
    pub changed: u64,
}

/// Deletes flows, each on the CPU of its wheel. A flow that had a packet since it was chosen stays. Memory does not
/// grow with their number.
///
/// # Errors
///
/// [`Kind::Other`]: the ring of events stays full, since nobody reads it; what was deleted until then is.
pub fn delete_all(
    pins: &Pins,
    flows: impl Iterator<Item = Flow> + Send,
    reason: Reason,
) -> Result<Tally> {
    let program = pins.xdp("twheel_delete")?;
    // A thread of its own: this one stays where it may run.
    thread::scope(|scope| {
        scope
            .spawn(|| {
                let mut tally = Tally::default();
                let mut batches: BTreeMap<u32, Vec<Delete>> = BTreeMap::new();
                for flow in flows {
                    let batch = batches.entry(flow.cpu).or_default();
                    batch.push(flow.delete(reason));
                    if batch.len() == MAX_DELETES {
                        delete(&program, flow.cpu, batch, &mut tally)?;
                    }
                }
                for (cpu, batch) in &mut batches {
                    delete(&program, *cpu, batch, &mut tally)?;
                }
                Ok(tally)
            })
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the thread that deletes panicked")))
    })
}

/// Deletes flows of one CPU's wheel, and empties the list.
fn delete(program: &Xdp, cpu: u32, batch: &mut Vec<Delete>, tally: &mut Tally) -> Result<()> {
    pin_to(cpu)?;
    let mut since = Instant::now();
    while !batch.is_empty() {
        let mut asked = batch.clone();
        data_plane::delete(program, &mut asked)?;
        let mut left = Vec::new();
        for (entry, answer) in batch.iter().zip(&asked) {
            match Deleted::from_raw(answer.outcome) {
                Some(Deleted::Done) => tally.done += 1,
                // Elsewhere: the record is another flow's by now.
                Some(Deleted::Changed | Deleted::Elsewhere) => tally.changed += 1,
                Some(Deleted::RingFull) => left.push(*entry),
                None => {
                    return Err(anyhow!("outcome {}", answer.outcome))
                        .context("the program that deletes gives an answer that is none");
                }
            }
        }
        if left.len() < batch.len() {
            since = Instant::now();
        } else if since.elapsed() > PATIENCE {
            return Err(Failure::new(
                Kind::Other,
                format!(
                    "{} flows deleted; the rest stay, since nobody reads the events: run twheel on the \
                     interface meanwhile, or remove the instance with `twheel detach`",
                    tally.done
                ),
            )
            .into());
        }
        *batch = left;
        if !batch.is_empty() {
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}
