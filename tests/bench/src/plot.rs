//! Draws plots with logarithmic axes.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

/// Size of a plot in pixels.
const SIZE: (u32, u32) = (960, 600);
/// Width of the legend.
const KEY: i32 = 250;

/// A curve: its name and its points.
pub type Curve = (String, Vec<(f64, f64)>);

/// Groups points with the names of their curves into curves.
pub fn curves(points: impl IntoIterator<Item = (String, (f64, f64))>) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for (name, point) in points {
        match curves.iter_mut().find(|(other, _)| *other == name) {
            Some((_, curve)) => curve.push(point),
            None => curves.push((name, vec![point])),
        }
    }
    curves
}

/// The powers of ten that enclose all values.
fn decades<'a>(values: impl Iterator<Item = &'a f64>) -> std::ops::Range<f64> {
    let (least, most) = values.fold((f64::INFINITY, 1.0f64), |(least, most), value| {
        (least.min(*value), most.max(*value))
    });
    let power = |exponent: f64| 10f64.powf(exponent);
    power(least.min(most).log10().floor())..power(most.log10().ceil())
}

/// Draws curves; nothing if there are none.
pub fn draw(path: &Path, title: &str, [across, up]: [&str; 2], curves: &[Curve]) -> Result<()> {
    let points = || curves.iter().flat_map(|(_, curve)| curve);
    if points().next().is_none() {
        return Ok(());
    }
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    let plot = || -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .margin_right(KEY)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(
                decades(points().map(|(x, _)| x)).log_scale(),
                decades(points().map(|(_, y)| y)).log_scale(),
            )?;
        chart
            .configure_mesh()
            .x_desc(across)
            .y_desc(up)
            .x_label_formatter(&|x| format!("{x}"))
            .y_label_formatter(&|y| format!("{y}"))
            .draw()?;
        for (number, (name, curve)) in curves.iter().enumerate() {
            // Eleven hues; those of successive curves are far apart.
            let hue = (number * 4 % 11) as f64 / 11.0;
            let style = HSLColor(hue, 0.8, 0.38).stroke_width(2);
            chart.draw_series(LineSeries::new(curve.iter().copied(), style).point_size(3))?;
            // Beside the chart, where it hides nothing.
            let (x, y) = (SIZE.0 as i32 - KEY + 12, 40 + 18 * number as i32);
            area.draw(&PathElement::new([(x, y), (x + 18, y)], style))?;
            let label = ("sans-serif", 13).into_font();
            area.draw(&Text::new(name.as_str(), (x + 24, y - 7), label))?;
        }
        area.present()?;
        Ok(())
    };
    plot()
        .map_err(|error| anyhow!("{error}"))
        .with_context(|| format!("cannot draw {}", path.display()))
}
