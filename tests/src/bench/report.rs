//! Figures, for people or for programs.

use std::{
    fmt::Display,
    io::{ErrorKind, Write, stdout},
    process::exit,
};

use serde_json::json;

/// What was measured over several rounds.
#[derive(Clone, Copy)]
pub struct Figure {
    /// Of the rounds.
    pub median: f64,
    /// As above.
    pub min: f64,
    /// As above.
    pub max: f64,
    /// How many there were.
    pub rounds: usize,
}

impl Figure {
    /// Of samples, at least one.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rounds = sorted.len();
        Self {
            median: (sorted[(rounds - 1) / 2] + sorted[rounds / 2]) / 2.0,
            min: sorted[0],
            max: sorted[rounds - 1],
            rounds,
        }
    }

    /// Figures beside one another.
    pub fn row(figures: &[Self]) -> String {
        let cell = |figure: &Self| {
            let spread = format!("({:.1}–{:.1})", figure.min, figure.max);
            format!("{:>6.1} {spread:>13}", figure.median)
        };
        figures.iter().map(cell).collect::<Vec<_>>().join("  ")
    }
}

/// A ratio, and whether it is within its bound.
pub fn verdict(ratio: f64, bound: Option<f64>) -> String {
    let verdict = match bound {
        None => String::new(),
        Some(bound) if ratio <= bound => format!("(within {bound})"),
        Some(bound) => format!("(ABOVE {bound})"),
    };
    format!("{ratio:.3} {verdict}")
}

/// Where figures go.
pub struct Report {
    json: bool,
}

impl Report {
    /// On standard output, as JSON lines or as text.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// A line for people.
    pub fn say(&mut self, line: &str) {
        if !self.json {
            put(line);
        }
    }

    /// A figure in nanoseconds, for programs; people get it in a table.
    pub fn nanoseconds(&mut self, bench: &str, variant: &str, n: u64, figure: &Figure) {
        if self.json {
            // Hundredths are already noise.
            let round = |value: f64| (value * 100.0).round() / 100.0;
            put(json!({
                "bench": bench,
                "variant": variant,
                "n": n,
                "median_ns": round(figure.median),
                "min_ns": round(figure.min),
                "max_ns": round(figure.max),
                "rounds": figure.rounds,
            }));
        }
    }

    /// Any figures, for programs.
    pub fn object(&mut self, figures: &serde_json::Value) {
        if self.json {
            put(figures);
        }
    }

    /// Bytes, for programs.
    pub fn bytes(&mut self, bench: &str, variant: &str, n: u64, bytes: u64) {
        if self.json {
            put(json!({ "bench": bench, "variant": variant, "n": n, "bytes": bytes }));
        }
    }
}

/// Writes a line. Once nobody reads, there is nothing left to measure for; benches have no pins while they report.
fn put(line: impl Display) {
    if let Err(error) = writeln!(stdout(), "{line}") {
        exit((error.kind() != ErrorKind::BrokenPipe).into());
    }
}
