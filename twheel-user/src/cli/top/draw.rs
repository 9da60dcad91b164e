//! Draws `twheel top`.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Paragraph, Sparkline},
};
use twheel_common::counter::Counter;

use super::{
    app::App,
    columns::{Table, scaled, shorten, width, wrap},
    detail, flow_table, group_table, help,
    order::{Sort, name},
    picture::{Picture, Rates},
    reasons::BACK,
    style::{colour, warning},
    timeline::{self, WHEELS},
    views::View,
};
use crate::output::several;

/// Lines of the screen below which there is no chart of the rates, and no wheel beside details.
const LOW: u16 = 20;

/// The parts of the screen.
struct Areas {
    head: Rect,
    rates: Rect,
    charts: Rect,
    wheels: Rect,
    views: Rect,
    note: Rect,
    table: Rect,
    details: Rect,
    filter: Rect,
    keys: Rect,
}

fn areas(app: &App, area: Rect) -> Areas {
    let has_details = app.question.is_some() || (app.shows_details && app.view == View::Flows);
    let details = match app.flow().filter(|_| has_details) {
        Some(row) => detail::lines(app, row, area.width.into()).len() as u16,
        None => 0,
    };
    let details = details.min(area.height.saturating_sub(8));
    let shows_wheels = app.shows_wheels && area.height >= LOW + details;
    let wheels = match shows_wheels {
        true => most_wheels(area).min(app.picture.wheels.wheels.len()) as u16 + 2,
        false => 0,
    };
    let charts = if area.height >= LOW + details { 2 } else { 0 };
    let note = note(app, area.width).len() as u16;
    let [
        head,
        rates,
        charts,
        wheels,
        views,
        note,
        table,
        details,
        filter,
        keys,
    ] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(charts),
        Constraint::Length(wheels),
        Constraint::Length(1),
        Constraint::Length(note),
        Constraint::Min(2),
        Constraint::Length(details),
        Constraint::Length(1),
        Constraint::Length(1),
    ])
    .areas(area);
    Areas {
        head,
        rates,
        charts,
        wheels,
        views,
        note,
        table,
        details,
        filter,
        keys,
    }
}

/// Most wheels that are shown: they take a quarter of the screen.
fn most_wheels(area: Rect) -> usize {
    usize::from(area.height / 4).clamp(1, WHEELS)
}

/// How many rows of the table fit on the screen.
pub fn rows(app: &App) -> usize {
    usize::from(areas(app, app.size).table.height.saturating_sub(1))
}

/// How many columns can be scrolled past.
pub fn most_across(app: &App) -> usize {
    table(app, areas(app, app.size).table).most_across()
}

/// Draws everything.
pub fn draw(app: &App, frame: &mut Frame) {
    if let Some(from) = app.help {
        let lines: Vec<_> = help::lines().into_iter().skip(from).collect();
        frame.render_widget(Paragraph::new(lines), frame.area());
        return;
    }
    let areas = areas(app, frame.area());
    let picture = &app.picture;
    frame.render_widget(heading(app, areas.head.width), areas.head);
    draw_rates(picture, frame, [areas.rates, areas.charts]);
    if areas.wheels.height > 0 {
        let most = most_wheels(frame.area());
        let lines = timeline::lines(&picture.wheels, most, areas.wheels.width.into());
        frame.render_widget(Paragraph::new(lines), areas.wheels);
    }
    frame.render_widget(views(app, areas.views.width), areas.views);
    let note = note(app, areas.note.width);
    frame.render_widget(Paragraph::new(note), areas.note);
    let lines = table(app, areas.table).lines(areas.table.width.into());
    frame.render_widget(Paragraph::new(lines), areas.table);
    if areas.details.height > 0
        && let Some(row) = app.flow()
    {
        let lines = detail::lines(app, row, areas.details.width.into());
        frame.render_widget(Paragraph::new(lines), areas.details);
    }
    draw_filter(app, frame, areas.filter);
    frame.render_widget(footer(app, areas.keys.width), areas.keys);
}

/// The parts that fit, each whole; of the last one as much as fits.
fn fitting(parts: Vec<(String, Style)>, last: Option<(String, Style)>, most: u16) -> Line<'static> {
    let mut left = usize::from(most);
    let mut spans = Vec::new();
    for (text, style) in parts {
        if width(&text) <= left {
            left -= width(&text);
            spans.push(Span::styled(text, style));
        }
    }
    if let Some((text, style)) = last
        && left > 0
    {
        let text = match width(&text) > left {
            true => text.chars().take(left - 1).chain(['…']).collect(),
            false => text,
        };
        spans.push(Span::styled(text, style));
    }
    Line::from(spans)
}

fn heading(app: &App, most: u16) -> Line<'static> {
    let picture = &app.picture;
    let plain = Style::new();
    let flows = picture.look.sum.live();
    let mut parts = vec![
        (
            format!("twheel {}", picture.interfaces),
            Modifier::BOLD.into(),
        ),
        (format!("  {}", several(flows, "flow")), plain),
    ];
    let lost = picture.look.sum.get(Counter::EventsLost);
    if lost > 0 {
        parts.push((format!("  {lost} events lost"), warning()));
    }
    if app.is_paused {
        parts.push(("  paused".to_owned(), Modifier::REVERSED.into()));
    }
    if app.gone.is_none() && !picture.is_running {
        let text = "  twheel run is not running: nothing expires";
        parts.push((text.to_owned(), colour(Color::Yellow)));
    }
    if app.gone.is_none()
        && let Some(rates) = picture.rates
    {
        if picture.speeds.are_known() {
            parts.push((format!("  {} bit/s", scaled(picture.sums.bits)), plain));
        }
        parts.push((format!("  {} packets/s", scaled(rates.packets)), plain));
    }
    // Left out first where there is no room.
    let capacity = format!(" of at most {}", picture.reader.meta().max_flows);
    let needs: usize = parts.iter().map(|(text, _)| width(text)).sum();
    if needs + width(&capacity) <= usize::from(most) {
        parts.insert(2, (capacity, plain));
    }
    let gone = app
        .gone
        .as_ref()
        .map(|gone| (format!("  waiting: {gone}"), warning()));
    fitting(parts, gone, most)
}

fn draw_rates(picture: &Picture, frame: &mut Frame, [labels, charts]: [Rect; 2]) {
    let halves = || Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).spacing(2);
    let [new, ended] = halves().areas(labels);
    let a_second = |rate: fn(Rates) -> f64| match picture.rates {
        Some(rates) => format!("{}/s", scaled(rate(rates))),
        None => "-".to_owned(),
    };
    let label = |texts: &[String], area: Rect| {
        let parts = texts.iter().map(|text| (text.clone(), Style::new()));
        fitting(parts.collect(), None, area.width)
    };
    frame.render_widget(
        label(&[format!("new {}", a_second(|it| it.created))], new),
        new,
    );
    let texts = [
        format!("expired {}", a_second(|it| it.expired)),
        format!("  evicted {}", a_second(|it| it.evicted)),
        format!("  deleted {}", a_second(|it| it.deleted)),
    ];
    frame.render_widget(label(&texts, ended), ended);
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

/// The views; the shown one in brackets.
fn views(app: &App, most: u16) -> Line<'static> {
    let part = |view: View| {
        let text = format!("{} {}", view.digit(), view.name());
        match view == app.view {
            true => (format!("[{text}] "), Modifier::BOLD.into()),
            false => (format!(" {text}  "), Style::new()),
        }
    };
    fitting(View::ALL.map(part).to_vec(), None, most)
}

/// The table of the view.
fn table(app: &App, area: Rect) -> Table {
    let fit = usize::from(area.height.saturating_sub(1));
    let mut table = match app.view {
        View::Flows => {
            let rows = app.picture.flows.iter().skip(app.skip).take(fit);
            flow_table::table(app, &rows.copied().collect::<Vec<_>>(), area.width.into())
        }
        View::Reasons => group_table::reasons(app),
        View::Cost => match &app.costs {
            Some(Ok(costs)) => group_table::cost(app, &costs.costs),
            _ => group_table::cost(app, &[]),
        },
        _ => {
            let groups = app.picture.groups.iter().skip(app.skip).take(fit);
            group_table::groups(app, &groups.copied().collect::<Vec<_>>())
        }
    };
    let has_rows = app.view == View::Flows || app.view.has_groups();
    table.selected = has_rows.then(|| app.at.saturating_sub(app.skip));
    table
}

/// What has to be said of the table, above it.
fn note(app: &App, most: u16) -> Vec<Line<'static>> {
    let has_accounts = app.picture.reader.table().has_accounts();
    let note = match app.view {
        View::Flows if !has_accounts && app.sort == Sort::Last => {
            "accounting is off, so there are no rates: the last packet comes first".to_owned()
        }
        View::Reasons => match app.reasons.as_ref().and_then(|it| it.wrong()) {
            Some(wrong) => {
                format!("counted since the instance began, without the history: {wrong}")
            }
            None => format!(
                "from the history, since {} minutes before this view was first shown",
                BACK.as_secs() / 60
            ),
        },
        View::Cost => match &app.costs {
            Some(Err(wrong)) => wrong.clone(),
            Some(Ok(costs)) if costs.costs.is_empty() => "measuring".to_owned(),
            _ => "measured while this view is shown: measuring slows every BPF program".to_owned(),
        },
        _ => return Vec::new(),
    };
    wrap(&note, most.into())
}

fn draw_filter(app: &App, frame: &mut Frame, area: Rect) {
    let text = format!("filter: {}", app.filter.text);
    // While it is edited, its end is shown.
    let most = usize::from(area.width).saturating_sub(1);
    let over = width(&text).saturating_sub(most);
    let is_open = app.filter.is_open();
    let text = match is_open && over > 0 {
        true => text.chars().skip(over).collect(),
        false => shorten(&text, most).into_owned(),
    };
    let end = width(&text) as u16;
    let sums = app.picture.sums;
    let mut parts = vec![(text, Style::new())];
    let mut last = None;
    if let Some(wrong) = wrong(app, area.width) {
        last = Some((format!("   {wrong}"), warning()));
    } else if app.filter.wrong.is_none() {
        parts.push((
            format!("   {}", several(sums.matching, "flow")),
            Style::new(),
        ));
        if app.picture.speeds.are_known() {
            let bits = format!(", {} bit/s", scaled(sums.matching_bits));
            parts.push((bits, Style::new()));
        }
        if app.view.has_groups() {
            let count = app.picture.group_count;
            let groups = several(count, app.view.name().trim_end_matches('s'));
            parts.push((format!(", {groups}"), Style::new()));
        }
    }
    if is_open {
        frame.set_cursor_position((area.x.saturating_add(end), area.y));
    }
    frame.render_widget(fitting(parts, last, area.width), area);
}

/// Why the filter is not valid, if there is room for that behind it; otherwise it stands below.
fn wrong(app: &App, most: u16) -> Option<&str> {
    /// Enough for the beginning.
    const BEGIN: usize = 40;
    let needs = width("filter: ") + width(&app.filter.text) + 3;
    let wrong = app.filter.wrong.as_deref()?;
    (needs + width(wrong).min(BEGIN) <= usize::from(most)).then_some(wrong)
}

fn footer(app: &App, most: u16) -> Line<'static> {
    let (parts, last) = match (&app.question, &app.message) {
        _ if app.filter.is_open() && app.filter.wrong.is_some() && wrong(app, most).is_none() => {
            (vec!["Esc undo".to_owned()], app.filter.wrong.clone())
        }
        _ if app.filter.is_open() => (
            ["Enter keep", "Esc undo", "Ctrl-U clear"]
                .map(str::to_owned)
                .into(),
            None,
        ),
        (Some(_), _) => (
            vec![
                "delete this flow?".to_owned(),
                "y delete".to_owned(),
                "n keep".to_owned(),
            ],
            None,
        ),
        (None, Some(message)) => (Vec::new(), Some(message.clone())),
        (None, None) => (hints(app), None),
    };
    let parts = parts
        .into_iter()
        .map(|text| (format!("{text}  "), Modifier::REVERSED.into()));
    let last = last.map(|text| (text, Modifier::REVERSED.into()));
    fitting(parts.collect(), last, most)
}

/// The keys that are most useful here.
fn hints(app: &App) -> Vec<String> {
    let order = if app.reverse { ", reversed" } else { "" };
    let sort = match app.view {
        View::Flows => Some(name(&app.sort)),
        view if view.has_groups() => Some(name(&app.group_sort)),
        _ => None,
    };
    let mut hints = vec![
        "q quit".to_owned(),
        "? help".to_owned(),
        "/ filter".to_owned(),
    ];
    hints.extend(sort.map(|sort| format!("s sort: {sort}{order}")));
    match app.view {
        View::Flows => hints.extend(["Enter details", "d delete"].map(str::to_owned)),
        view if view.has_groups() => hints.push("Enter flows".to_owned()),
        _ => {}
    }
    let others = [
        "n names",
        "o owners",
        "w wheels",
        "p pause",
        "r reverse",
        "Tab view",
    ];
    hints.extend(others.map(str::to_owned));
    hints
}
