//! Figures, for people or for programs.

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

    /// Figures beside one another.
    pub fn row(figures: &[Self]) -> String {
        let cell = |figure: &Self| {
            let spread = format!("({:.1}–{:.1})", figure.min, figure.max);
            format!("{:>6.1} {spread:>13}", figure.median)
        };
        figures.iter().map(cell).collect::<Vec<_>>().join("  ")
    }
}

/// A ratio, the least and the most of its rounds where there were several, and whether its median is within its bound.
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

/// Where figures go.
pub struct Report {
    json: bool,
    /// Where pages are written to.
    out: Option<PathBuf>,
    bench: &'static str,
    /// With which it was asked for.
    command: String,
    /// What was said of this bench.
    text: String,
    /// Links to its plots.
    plots: String,
}

impl Report {
    /// On standard output: as JSON lines, or as text, and as pages in a directory, too.
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

    /// Begins a bench that was asked for with this command.
    pub fn begin(&mut self, bench: &'static str, command: String) {
        self.bench = bench;
        self.command = command;
        self.text.clear();
        self.plots.clear();
    }

    /// A line for people.
    pub fn say(&mut self, line: &str) {
        if !self.json {
            put(line);
            let _ = writeln!(self.text, "{line}");
        }
    }

    /// Where pages are written to.
    pub fn out(&self) -> Option<PathBuf> {
        self.out.clone()
    }

    /// A plot beside the page: what lies across, what up.
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

    /// Writes the page of the bench: what was said, and the plots.
    pub fn end(&mut self) -> Result<()> {
        self.page(&format!(
            "# {}\n\nBy `{}`.\n\n```text\n{}```\n{}",
            self.bench, self.command, self.text, self.plots
        ))
    }

    /// Writes a page of another make.
    pub fn page(&self, text: &str) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let path = out.join(format!("{}.md", self.bench));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        put(format!("\nWritten to {}.", path.display()));
        Ok(())
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
