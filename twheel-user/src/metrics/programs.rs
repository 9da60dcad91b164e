//! What the programs of the instance have cost, for Prometheus.

use prometheus::{Counter, IntCounter, Opts, Registry};

use crate::cost::CostReading;

/// Adds the families of what each program has used. The kernel counts it only while its statistics of
/// programs are on: programs of which it has counted nothing have no value.
pub(super) fn register(reading: &CostReading, registry: &Registry) -> prometheus::Result<()> {
    for (program, namespace, runs, time) in reading.programs() {
        if runs == 0 {
            continue;
        }
        let labelled = |name: &str, help: &str| {
            let opts = Opts::new(name, help).const_label("program", program);
            // An empty label is as none.
            opts.const_label("namespace", namespace.unwrap_or_default())
        };
        let counted = IntCounter::with_opts(labelled(
            "twheel_program_runs_total",
            "runs of each BPF program, counted while the kernel's statistics of programs are on",
        ))?;
        counted.inc_by(runs);
        let used = Counter::with_opts(labelled(
            "twheel_program_run_seconds_total",
            "time of those runs",
        ))?;
        used.inc_by(time.as_secs_f64());
        registry.register(Box::new(counted))?;
        registry.register(Box::new(used))?;
    }
    Ok(())
}
