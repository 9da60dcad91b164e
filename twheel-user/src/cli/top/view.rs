//! Draws `twheel top`.

use clap::ValueEnum;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Paragraph, Sparkline},
};
use twheel_common::counter::Counter;

use super::{App, Picture, Rates};
use crate::{
    cli::wheel::next,
    model::Named,
    output::table,
    wheels::{Turning, Wheels, cell, draw as draw_level},
};

/// Most wheels that are shown.
const WHEELS: usize = 8;

/// A colour, unless the user wants none: <https://no-color.org>.
fn colour(colour: Color) -> Style {
    match std::env::var_os("NO_COLOR") {
        Some(value) if !value.is_empty() => Style::new(),
        _ => Style::new().fg(colour),
    }
}

fn warning() -> Style {
    colour(Color::Red).add_modifier(Modifier::BOLD)
}

/// Draws everything.
pub(super) fn draw(app: &App, frame: &mut Frame) {
    let picture = &app.picture;
    let wheels = picture.wheels.wheels.len().min(WHEELS) as u16;
    let [head, rates, charts, turning, flows, filter, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(wheels),
        Constraint::Min(2),
        Constraint::Length(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(app), head);
    draw_rates(picture, frame, [rates, charts]);
    let lines = picture.wheels.wheels.iter().take(WHEELS);
    let lines: Vec<_> = lines
        .map(|turning_one| wheel(&picture.wheels, turning_one, turning.width))
        .collect();
    frame.render_widget(Paragraph::new(lines), turning);
    frame.render_widget(Paragraph::new(table(app, flows.height)), flows);
    draw_filter(app, frame, filter);
    frame.render_widget(footer(app), keys);
}

fn heading(app: &App) -> Line<'static> {
    let picture = &app.picture;
    let mut spans = vec![
        Span::styled(format!("twheel {}", picture.interfaces), Modifier::BOLD),
        Span::raw(format!(
            "  {} flows of at most {}",
            picture.look.sum.live(),
            picture.reader.meta().max_flows
        )),
    ];
    if let Some(rates) = picture.rates {
        spans.push(Span::raw(format!("  {:.0} packets/s", rates.packets)));
    }
    let lost = picture.look.sum.get(Counter::EventsLost);
    if lost > 0 {
        spans.push(Span::styled(format!("  {lost} events lost"), warning()));
    }
    if let Some(gone) = &app.gone {
        spans.push(Span::styled(format!("  waiting: {gone}"), warning()));
    } else if !picture.is_running {
        let text = "  twheel run is not running: nothing expires";
        spans.push(Span::styled(text, colour(Color::Yellow)));
    }
    if app.paused {
        spans.push(Span::styled("  paused", Modifier::REVERSED));
    }
    Line::from(spans)
}

fn draw_rates(picture: &Picture, frame: &mut Frame, [labels, charts]: [Rect; 2]) {
    let halves = || Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).spacing(2);
    let [new, ended] = halves().areas(labels);
    let a_second = |rate: fn(Rates) -> f64| match picture.rates {
        Some(rates) => format!("{:.0}/s", rate(rates)),
        None => "-".to_owned(),
    };
    frame.render_widget(Line::raw(format!("new {}", a_second(|it| it.created))), new);
    let text = format!(
        "expired {}  evicted {}  deleted {}",
        a_second(|it| it.expired),
        a_second(|it| it.evicted),
        a_second(|it| it.deleted)
    );
    frame.render_widget(Line::raw(text), ended);
    let [new, ended] = halves().areas(charts);
    let mut chart = |rate: fn(&Rates) -> f64, shade, area: Rect| {
        let looks = picture.history.iter().take(area.width.into());
        let mut rates: Vec<_> = looks.map(|it| rate(it).ceil() as u64).collect();
        rates.reverse();
        let chart = Sparkline::default().data(rates).style(colour(shade));
        frame.render_widget(chart, area);
    };
    chart(|it| it.created, Color::Green, new);
    let gone = |it: &Rates| it.expired + it.evicted + it.deleted;
    chart(gone, Color::Cyan, ended);
}

/// The lowest level of a CPU's wheel, and how many slots of each level hold flows.
fn wheel(wheels: &Wheels, turning: &Turning, width: u16) -> Line<'static> {
    let geometry = wheels.geometry;
    let label = format!("cpu {:<3} [", turning.cpu);
    let held: Vec<_> = (0..geometry.levels)
        .map(|level| turning.wheel.occupied(geometry, level).count().to_string())
        .collect();
    let text = format!("] slots {}  {}", held.join("/"), next(wheels, turning));
    // The same width in all lines, whatever their texts are.
    let width = usize::from(width).saturating_sub(label.len() + 40);
    let filled = turning.wheel.occupied(geometry, 0).map(|slot| (slot, 1));
    let cells = draw_level(wheels.slots(), filled, width);
    let hand = cell(wheels.slots(), wheels.hand(turning, 0), width);
    let part = |cells: &[char]| Span::styled(String::from_iter(cells), colour(Color::Blue));
    Line::from(vec![
        Span::raw(label),
        part(&cells[..hand]),
        Span::styled("│", colour(Color::Yellow)),
        part(&cells[hand + 1..]),
        Span::raw(text),
    ])
}

fn table(app: &App, height: u16) -> Vec<Line<'static>> {
    let picture = &app.picture;
    let columns = picture.reader.columns();
    let text = |line: Vec<u8>| String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
    let mut heading = Vec::new();
    // Writing to memory cannot fail.
    let _ = table::heading(columns, &mut heading);
    let mut lines = vec![Line::styled(text(heading), Modifier::BOLD)];
    let rows = usize::from(height.saturating_sub(1));
    let shown = picture.flows.iter().skip(app.skip).take(rows);
    for (at, tracked) in shown.enumerate() {
        let mut line = Vec::new();
        let named = Named {
            owner: picture.owners.get(at).and_then(Option::as_ref),
            ..picture.reader.known_as(&tracked.flow)
        };
        let _ = table::line(tracked, named, columns, &mut line);
        lines.push(Line::raw(text(line)));
    }
    lines
}

fn draw_filter(app: &App, frame: &mut Frame, area: Rect) {
    let text = format!("filter: {}", app.text);
    let end = Line::raw(text.as_str()).width() as u16;
    let mut spans = vec![Span::raw(text)];
    if let Some(wrong) = &app.wrong {
        spans.push(Span::styled(format!("   {wrong}"), warning()));
    } else {
        spans.push(Span::raw(format!("   {} flows", app.picture.passing)));
    }
    if app.before.is_some() {
        let x = area
            .x
            .saturating_add(end)
            .min(area.right().saturating_sub(1));
        frame.set_cursor_position((x, area.y));
    }
    frame.render_widget(Line::from(spans), area);
}

fn footer(app: &App) -> Line<'static> {
    let name = app.key.to_possible_value();
    let name = name.as_ref().map_or("", |key| key.get_name());
    let order = if app.reverse { ", reversed" } else { "" };
    let keys = match app.before {
        Some(_) => "Enter keep  Esc undo  Ctrl-U clear".to_owned(),
        None => {
            format!("q quit  / filter  s sort: {name}{order}  r reverse  p pause  arrows scroll")
        }
    };
    Line::styled(keys, Modifier::REVERSED)
}
