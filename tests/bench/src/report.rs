//! Reports figures, for people or for programs.

use std::{
    fmt::{Display, Write as _},
    fs,
    io::{ErrorKind, Write, stdout},
    path::PathBuf,
    process::exit,
};

use anyhow::{Context, Result};
use serde_json::json;

use crate::plot::{self, Curve};

/// A figure that was measured in several rounds.
#[derive(Clone, Copy)]
pub struct Figure {
    /// Over the rounds.
    pub median: f64,
    /// Over the rounds.
    pub min: f64,
    /// Over the rounds.
    pub max: f64,
    /// The number of rounds.
    pub rounds: usize,
}

impl Figure {
    /// From samples, of which there must be at least one.
    pub fn from_samples(samples: &[f64]) -> Self {
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

    /// Figures side by side, as a table row.
    pub fn row(figures: &[Self]) -> String {
        let cell = |figure: &Self| {
            let spread = format!("({:.1}–{:.1})", figure.min, figure.max);
            format!("{:>6.1} {spread:>13}", figure.median)
        };
        figures.iter().map(cell).collect::<Vec<_>>().join("  ")
    }
}

/// A ratio, its range if there were several rounds, and whether its median is within its bound.
pub fn verdict(ratio: &Figure, bound: Option<f64>) -> String {
    let spread = match ratio.rounds {
        1 => String::new(),
        _ => format!(" ({:.2}–{:.2})", ratio.min, ratio.max),
    };
    let verdict = match bound {
        None => String::new(),
        Some(bound) if ratio.median <= bound => format!(" within {bound}"),
        Some(bound) => format!(" ABOVE {bound}"),
    };
    format!("{:.3}{spread}{verdict}", ratio.median)
}

/// Where figures are written.
pub struct Report {
    json: bool,
    /// The directory for pages.
    out: Option<PathBuf>,
    bench: &'static str,
    /// The command that repeats the measurement.
    command: String,
    /// The text of this benchmark so far.
    text: String,
    /// Markdown links to its plots.
    plots: String,
}

impl Report {
    /// Writes to standard output, as JSON lines or as text; text also goes to pages in a directory.
    pub fn new(json: bool, out: PathBuf) -> Result<Self> {
        let mut report = Self {
            json,
            out: None,
            bench: "",
            command: String::new(),
            text: String::new(),
            plots: String::new(),
        };
        if !json {
            fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
            report.out = Some(out);
        }
        Ok(report)
    }

    /// Begins a benchmark, with the command that repeats it.
    pub fn begin(&mut self, bench: &'static str, command: String) {
        self.bench = bench;
        self.command = command;
        self.text.clear();
        self.plots.clear();
    }

    /// Writes a line for people.
    pub fn say(&mut self, line: &str) {
        if !self.json {
            put(line);
            let _ = writeln!(self.text, "{line}");
        }
    }

    /// The directory for pages.
    pub fn out(&self) -> Option<PathBuf> {
        self.out.clone()
    }

    /// Draws a plot beside the page, with the names of the horizontal and the vertical axis.
    pub fn plot(
        &mut self,
        name: &str,
        title: &str,
        axes: [&str; 2],
        curves: &[Curve],
    ) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let file = format!("{}-{name}.svg", self.bench);
        plot::draw(&out.join(&file), title, axes, curves)?;
        let _ = write!(self.plots, "\n![{title}]({file})\n");
        Ok(())
    }

    /// Writes the benchmark's page: its text and the plots.
    pub fn end(&mut self) -> Result<()> {
        self.page(&format!(
            "# {}\n\nBy `{}`.\n\n```text\n{}```\n{}",
            self.bench, self.command, self.text, self.plots
        ))
    }

    /// Writes a page whose text the caller has made.
    pub fn page(&self, text: &str) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let path = out.join(format!("{}.md", self.bench));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        put(format!("\nWritten to {}.", path.display()));
        Ok(())
    }

    /// Writes a figure in nanoseconds for programs; for people it is in a table.
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

    /// Writes any figures for programs.
    pub fn object(&mut self, figures: &serde_json::Value) {
        if self.json {
            put(figures);
        }
    }

    /// Writes a number of bytes for programs.
    pub fn bytes(&mut self, bench: &str, variant: &str, n: u64, bytes: u64) {
        if self.json {
            put(json!({ "bench": bench, "variant": variant, "n": n, "bytes": bytes }));
        }
    }
}

/// Writes a line. If the reader has closed the output, the process ends, as there is nothing left
/// to measure for; benchmarks have no pins while they report.
fn put(line: impl Display) {
    if let Err(error) = writeln!(stdout(), "{line}") {
        exit((error.kind() != ErrorKind::BrokenPipe).into());
    }
}
