//! Timeouts that programs hand over, for Prometheus.

use nix::errno::Errno;
use prometheus::{IntCounterVec, IntGauge, Opts, Registry};
use twheel_client::protocol::Outcome;

use crate::offload::Tally;

/// Adds the families of registrations and of the programs that have them.
pub(super) fn register(tally: &Tally, registry: &Registry) -> prometheus::Result<()> {
    let registrations = IntGauge::new(
        "twheel_offload_registrations",
        "connections whose timeout a program has handed over, or may reclaim after a restart",
    )?;
    registrations.set(tally.registrations() as i64);
    let programs = IntGauge::new(
        "twheel_offload_programs",
        "programs that are connected to hand over timeouts",
    )?;
    programs.set(tally.programs() as i64);
    let ended = IntCounterVec::new(
        Opts::new(
            "twheel_offload_ended_total",
            "registrations that ended other than by their program, by outcome",
        ),
        &["outcome"],
    )?;
    for (outcome, name) in [
        (Outcome::Expired, "expired"),
        (Outcome::Closed, "closed"),
        (Outcome::Unseen, "unseen"),
    ] {
        let count = tally.told(outcome);
        ended.with_label_values(&[name]).inc_by(count);
    }
    let refused = IntCounterVec::new(
        Opts::new(
            "twheel_offload_refused_total",
            "requests of programs that were refused, by error",
        ),
        &["error"],
    )?;
    for (error, count) in tally.refused() {
        let error = Errno::from_raw(error as i32);
        let name = format!("{error:?}");
        refused.with_label_values(&[name]).inc_by(count);
    }
    registry.register(Box::new(registrations))?;
    registry.register(Box::new(programs))?;
    registry.register(Box::new(ended))?;
    registry.register(Box::new(refused))
}
