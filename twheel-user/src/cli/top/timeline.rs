//! The wheels as lines of time: when the slots that hold flows have their turns, from now on.

use std::time::Duration;

use ratatui::{
    style::Color,
    text::{Line, Span},
};

use super::style::colour;
use crate::{
    cli::wheel::next,
    wheels::{Turning, Wheels, draw},
};

/// Most wheels that are shown.
pub const WHEELS: usize = 8;
/// The width of what stands before the cells.
const LABEL: usize = 9;
/// The widest text behind them: `slots 10/10/10  next turn overdue by 1m00s`.
const TEXT: usize = 40;

/// A logarithmic axis: a second now is as wide as an hour later.
struct Axis {
    cells: usize,
    tick: Duration,
}

impl Axis {
    /// The marks. The axis ends with the last one; later turns are in its last cell.
    const MARKS: [(u64, &str); 7] = [
        (0, "now"),
        (1, "1s"),
        (10, "10s"),
        (60, "1m"),
        (600, "10m"),
        (3600, "1h"),
        (86_400, "1d"),
    ];
    const END: u64 = 10 * 86_400;

    /// The cell of a turn this many milliseconds from now.
    fn cell(&self, millis: u64) -> usize {
        let tick = self.tick.as_millis().max(1) as f64;
        let place = |millis: f64| (1.0 + millis / tick).ln();
        let part = place(millis as f64) / place(Self::END as f64 * 1000.0);
        let last = self.cells.saturating_sub(1);
        ((part * self.cells as f64) as usize).min(last)
    }

    /// The marks below their cells, those that have room.
    fn line(&self) -> String {
        let mut line = String::new();
        for (seconds, name) in Self::MARKS {
            let at = self.cell(seconds * 1000);
            let is_apart = line.is_empty() || at > line.len();
            if is_apart && at + name.len() <= self.cells {
                line = format!("{line:at$}{name}");
            }
        }
        line
    }
}

/// The lines: one for each of the first wheels, the axis, and what it all means.
pub fn lines(wheels: &Wheels, most: usize, width: usize) -> Vec<Line<'static>> {
    let axis = Axis {
        cells: width.saturating_sub(LABEL + TEXT).max(1),
        tick: wheels.tick(),
    };
    let shown = wheels.wheels.iter().take(most);
    let mut lines: Vec<_> = shown.map(|turning| line(wheels, turning, &axis)).collect();
    lines.push(Line::raw(format!("{:LABEL$}{}", "", axis.line())));
    let more = wheels.wheels.len().saturating_sub(most);
    let legend = match more {
        0 => "due: slots by the time until their turn; taller: more; slots: used, by level"
            .to_owned(),
        _ => format!("due: slots by the time until their turn; {more} more CPUs: twheel wheel"),
    };
    lines.push(Line::raw(legend));
    lines
}

fn line(wheels: &Wheels, turning: &Turning, axis: &Axis) -> Line<'static> {
    let geometry = wheels.geometry;
    let mut held = Vec::new();
    let mut cells = Vec::new();
    for level in 0..geometry.levels {
        let before = cells.len();
        for slot in turning.wheel.occupied(geometry, level) {
            let turn = turning.wheel.turn(geometry, level << geometry.bits | slot);
            // What is overdue stands at the beginning.
            let millis = u64::try_from(wheels.until(turning, turn)).unwrap_or(0);
            cells.push((axis.cell(millis) as u32, 1));
        }
        held.push((cells.len() - before).to_string());
    }
    let drawn = draw(axis.cells as u32, cells.into_iter(), axis.cells);
    let label = format!("cpu {}", turning.cpu);
    Line::from(vec![
        Span::raw(format!("{label:<width$}│", width = LABEL - 1)),
        Span::styled(String::from_iter(drawn), colour(Color::Blue)),
        Span::raw(format!(
            "│ slots {}  {}",
            held.join("/"),
            next(wheels, turning)
        )),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stand_where_their_times_are() {
        for cells in [1, 10, 31, 71, 151] {
            let axis = Axis {
                cells,
                tick: Duration::from_millis(100),
            };
            let line = axis.line();
            assert!(line.len() <= cells, "{line}");
            for (seconds, name) in Axis::MARKS {
                let at = line.find(name);
                // `1m` is part of no other mark, nor is any other one.
                assert!(
                    at.is_none_or(|at| at == axis.cell(seconds * 1000)),
                    "{line}"
                );
                assert!(at.is_some() || cells < 31 || name == "1s", "{name}: {line}");
            }
            let turns = [0, 100, 999, 1_000, 60_000, 86_400_000, u64::MAX];
            let places = turns.map(|it| axis.cell(it));
            assert!(places.is_sorted() && places[6] < cells, "{places:?}");
            assert_eq!(places[0], 0);
        }
    }
}
