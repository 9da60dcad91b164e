//! The figures of the servers.

use serde_json::json;

use super::server::{
    CONNECTIONS, LAZY, NONE, OFFLOADED, QUEUE, READS, Round, Sample, TIMEOUTS, WAYS, WINDOW,
};
use crate::report::{Figure, Report, verdict};

/// A median, and its standard error, by the quartiles.
struct Middle(f64, f64);

impl Middle {
    fn of(samples: impl Iterator<Item = f64>) -> Self {
        let mut samples: Vec<_> = samples.collect();
        samples.sort_by(f64::total_cmp);
        let at = |part: f64| samples[((samples.len() - 1) as f64 * part).round() as usize];
        // Of a normal distribution: its deviation is 0.7413 of what lies between the quartiles, and
        // the median's is 1.2533 of the mean's.
        let deviation = (at(0.75) - at(0.25)) * 0.7413;
        Self(at(0.5), deviation * 1.2533 / (samples.len() as f64).sqrt())
    }

    /// A mean, and its standard error.
    fn mean(samples: impl Iterator<Item = f64> + Clone) -> Self {
        let count = samples.clone().count() as f64;
        let mean = samples.clone().sum::<f64>() / count;
        let squares: f64 = samples.map(|it| (it - mean).powi(2)).sum();
        Self(mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
    }

    fn and(&self, other: &Self) -> Self {
        Self(self.0 + other.0, self.1.hypot(other.1))
    }

    /// What it is of another, with the error of both.
    fn of_other(&self, other: &Self) -> Self {
        let ratio = self.0 / other.0;
        Self(ratio, (self.1 / other.0).hypot(ratio * other.1 / other.0))
    }
}

/// What a way costs, nanoseconds a read.
struct Cost {
    /// All that is more.
    all: Middle,
    /// What is counted: the server's calls of timers, or threads and programs of what is offloaded.
    counted: Middle,
}

/// Shows the rounds before and after idle connections are noticed.
pub fn show(report: &mut Report, all: &[Vec<Round>; 2]) {
    for (at, reads) in READS.into_iter().enumerate() {
        let rounds = all
            .each_ref()
            .map(|rounds| rounds.iter().map(|round| round[at]).collect());
        let costs = costs(report, reads, &rounds);
        compare(report, reads, &costs);
    }
}

/// Of packets for so many reads.
fn costs(
    report: &mut Report,
    reads: usize,
    rounds: &[Vec<[Sample; WAYS.len()]>; 2],
) -> [Cost; WAYS.len()] {
    let more = |way: usize, what: fn(&Sample) -> f64| {
        // Servers differ a little by the places where their memory lies.
        let [before, after] = rounds
            .each_ref()
            .map(|rounds| Middle::of(rounds.iter().map(|it| what(&it[way]) - what(&it[NONE]))));
        Middle(after.0 - before.0, after.1.hypot(before.1))
    };
    let rounds = &rounds[1];
    report.say(&format!(
        "\n{:<24} {:>8}  {:>8} {:>15} {:>14} {:>14} {:>15}",
        format!("reads a packet: {reads}"),
        "reads/s",
        "server",
        "more",
        "calls",
        "threads",
        "programs, more"
    ));
    std::array::from_fn(|way| {
        let name = WAYS[way];
        let of = |what: fn(&Sample) -> f64| rounds.iter().map(move |it| what(&it[way]));
        let rate = Middle::of(of(|it| it.reads)).0 / WINDOW.as_secs_f64();
        let server = Middle::of(of(|it| it.server)).0;
        let calls = Middle::of(of(|it| it.calls));
        let (own, programs) = (more(way, |it| it.server), more(way, |it| it.programs));
        // They run now and then: a median would leave that out.
        let threads = Middle::mean(of(|it| it.threads));
        report.say(&format!(
            "{name:<24} {rate:>8.0}  {server:>8.0} {:>8.1} ± {:>4.1} {:>8.1} ± {:>3.1} {:>8.1} ± {:>3.1} {:>8.1} ± {:>4.1}",
            own.0, own.1, calls.0, calls.1, threads.0, threads.1, programs.0, programs.1,
        ));
        let elsewhere = threads.and(&programs);
        let cost = Cost {
            counted: match way {
                OFFLOADED => calls.and(&elsewhere),
                // twheel does nothing for these.
                _ => calls,
            },
            all: own.and(&elsewhere),
        };
        let nanoseconds = Figure::from_samples(&[cost.all.0]);
        let variant = format!("{name}, {reads} reads a packet");
        report.nanoseconds("offload", &variant, CONNECTIONS as u64, &nanoseconds);
        cost
    })
}

/// Compares what is offloaded with the others.
fn compare(report: &mut Report, reads: usize, costs: &[Cost; WAYS.len()]) {
    report.say(
        "\nFor timeouts, a read: all that is more; and what is counted: the server's calls of timers,\nor threads and programs of what is offloaded.",
    );
    let offloaded = &costs[OFFLOADED];
    for (way, bound) in [(TIMEOUTS, 0.1), (QUEUE, 1.0), (LAZY, 1.0)] {
        let other = &costs[way];
        let mut said = |what: &str, ratio: Middle| {
            let verdict = verdict(&Figure::from_samples(&[ratio.0]), Some(bound));
            report.object(&json!({
                "bench": "offload", "variant": format!("offloaded/{}", WAYS[way]), "reads": reads,
                "what": what, "ratio": ratio.0, "error": ratio.1, "bound": bound,
            }));
            format!("{what} {verdict}, ± {:.3}", ratio.1)
        };
        let counted = said("counted", offloaded.counted.of_other(&other.counted));
        let all = said("all", offloaded.all.of_other(&other.all));
        report.say(&format!("offloaded / {}: {counted}; {all}", WAYS[way]));
    }
}
