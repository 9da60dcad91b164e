//! Reports each flow that is in the table when the run ends (`--final-records`).

use anyhow::Result;
use twheel_common::step::{MAX_SWEEP, Sweep};

use crate::{
    call::{Callable, on_each_cpu},
    flows::Flows,
    pins::Pins,
    ring::Signals,
};

/// Reports an update of each flow. Waits while the ring has no room, so its reader must go on
/// meanwhile; if that has ended, returns early.
pub fn report_all(pins: &Pins, signals: &Signals) -> Result<()> {
    let records = Flows::pinned(pins)?.records();
    on_each_cpu(pins, |program, _| report_cpu(program, records, signals))
}

/// Reports the flows of one CPU's wheel, to which this thread is pinned.
fn report_cpu(program: &Callable, records: u32, signals: &Signals) -> Result<()> {
    let mut from = 0;
    loop {
        let room = signals.room();
        let answer = program.sweep(Sweep {
            from,
            count: MAX_SWEEP.min(records - from),
            reports: 1,
            ..Sweep::default()
        })?;
        from += answer.swept;
        signals.fill();
        let is_full = answer.staged > 0;
        // A full ring may have got room before what was staged was written: then nothing is staged,
        // and there is more to report.
        let is_done = from == records && !is_full;
        if is_done || is_full && !signals.await_room(room) {
            return Ok(());
        }
    }
}
