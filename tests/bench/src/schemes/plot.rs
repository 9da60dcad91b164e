//! The plots of the schemes.

use std::path::Path;

use anyhow::Result;

use super::{Operation, Results, contender, workload::Intervals};
use crate::plot::{Curve, draw};

/// A plot for each operation, and one against the working set.
pub fn all(out: &Path, results: &Results) -> Result<()> {
    for operation in Operation::ALL {
        let curve = |(contender, entry): (usize, &contender::Entry)| {
            let curve = results.curve(Intervals::Uniform, contender, operation);
            (entry.name.to_owned(), curve)
        };
        let curves: Vec<Curve> = contender::ALL.iter().enumerate().map(curve).collect();
        let file = format!("schemes-{}.svg", operation.name().replace(' ', "-"));
        let title = format!("{}, uniform intervals", operation.name());
        draw(&out.join(file), &title, ["timers", "ns"], &curves)?;
    }
    let mut curves = vec![("a random read".to_owned(), results.misses.clone())];
    for operation in [Operation::Stop, Operation::Rearm] {
        for (contender, entry) in contender::ALL.iter().enumerate() {
            if !matches!(entry.name.as_bytes()[0], b'4' | b'6' | b'7') {
                continue;
            }
            let curve = results
                .curve(Intervals::Uniform, contender, operation)
                .into_iter();
            let curve = curve.filter_map(|(n, each)| {
                let bytes = results.bytes.get(&(contender, n as u32))?;
                // The driver's handles are read, too.
                let handle = if entry.name == contender::INTRUSIVE {
                    0.0
                } else {
                    8.0
                };
                Some(((bytes + handle) * n, each))
            });
            curves.push((
                format!("{}, {}", entry.name, operation.name()),
                curve.collect(),
            ));
        }
    }
    let title = "stop and re-arm, uniform intervals, against the working set";
    draw(
        &out.join("schemes-working-set.svg"),
        title,
        ["bytes", "ns"],
        &curves,
    )
}
