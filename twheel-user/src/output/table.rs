//! Tables for people. A column is as wide as what is in it, so that nothing shifts. Rows are held
//! until the widths are known, up to a bound: a table may have millions of rows.

use std::{
    borrow::Cow,
    io::{self, Write},
    iter,
    time::Duration,
};

use super::text;
use crate::model::{Flow, Named, Timing, Tracked};

/// A duration in at most two units, such as `12.3s`, `4m05s`, `3h07m`, `4d23h`.
pub fn short(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{:.1}s", duration.as_millis() as f64 / 1000.0),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// How numbers of packets, bytes and events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Units {
    /// Large numbers with three digits and a unit, a power of 1000 as with `ip -h`: `1.23M`.
    #[default]
    Human,
    /// Every digit.
    Exact,
}

impl Units {
    /// A number in these units.
    pub fn count(self, number: u64) -> String {
        /// Shorter numbers are written in full.
        const FULL: u64 = 100_000;
        if self == Self::Exact || number < FULL {
            return number.to_string();
        }
        let mut scaled = number as f64;
        let mut unit = "";
        for next in ["k", "M", "G", "T", "P", "E"] {
            // From here on three digits would be rounded to 1000.
            if scaled < 999.5 {
                break;
            }
            scaled /= 1000.0;
            unit = next;
        }
        let digits = match scaled {
            ..9.995 => 2,
            ..99.95 => 1,
            _ => 0,
        };
        format!("{scaled:.digits$}{unit}")
    }

    /// A number of each side.
    fn sides(self, orig: u64, reply: u64) -> String {
        format!("{}/{}", self.count(orig), self.count(reply))
    }
}

/// A column of a table.
#[derive(Clone, Debug)]
pub struct Column {
    heading: String,
    /// Aligned on the right.
    is_number: bool,
    width: usize,
}

impl Column {
    /// A column of text.
    pub fn text(heading: impl Into<String>) -> Self {
        let heading = heading.into();
        Self {
            width: heading.chars().count(),
            heading,
            is_number: false,
        }
    }

    /// A column of numbers.
    pub fn number(heading: impl Into<String>) -> Self {
        Self {
            is_number: true,
            ..Self::text(heading)
        }
    }

    /// The same, at least this wide.
    pub fn at_least(mut self, width: usize) -> Self {
        self.width = self.width.max(width);
        self
    }
}

/// What stands between two columns.
const GAP: &str = "  ";
/// The widths are those of so many rows, or of all if there are fewer, and of what was
/// [measured](Table::measure). A wider cell further down widens its column from there on.
pub const HELD: usize = 100_000;
/// A last column that is narrower is not wrapped.
const NARROW: usize = 24;

/// Stands between the cells of a row that waits. No cell has it: it is not [`printable`].
const SEPARATOR: char = '\0';

/// A line of a table.
enum Row {
    /// Its cells, with [`SEPARATOR`] between them. In one text they take a fifth of the memory.
    Cells(String),
    /// A heading of the rows that follow.
    Title(String),
}

/// A table.
pub struct Table {
    columns: Vec<Column>,
    /// What waits for the widths; `None`: these are known.
    held: Option<Vec<Row>>,
    /// The text of the last column is wrapped, so that lines are no longer.
    wrap: Option<usize>,
}

impl Table {
    /// A table with a heading.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self {
            columns: columns.into_iter().collect(),
            held: Some(Vec::new()),
            wrap: None,
        }
    }

    /// The same, whose last column is wrapped at this width, if one is given.
    pub fn wrapped(self, wrap: Option<usize>) -> Self {
        Self { wrap, ..self }
    }

    /// Adds a row: a cell for each column, [`printable`].
    pub fn row(&mut self, mut cells: Vec<String>, to: &mut dyn Write) -> io::Result<()> {
        for cell in &mut cells {
            if let Cow::Owned(printed) = printable(cell) {
                *cell = printed;
            }
        }
        if self.held.is_none() {
            let cells = || cells.iter().map(String::as_str);
            self.widen(cells());
            return self.line(cells(), to);
        }
        let row = cells.join(&SEPARATOR.to_string());
        self.add(Row::Cells(row), to)
    }

    /// Makes the columns wide enough for a row that comes later.
    pub fn measure(&mut self, cells: &[String]) {
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            column.width = column.width.max(printable(cell).chars().count());
        }
    }

    /// Adds an empty line, and a heading of the rows that follow.
    pub fn title(&mut self, title: &str, to: &mut dyn Write) -> io::Result<()> {
        self.add(Row::Title(title.to_owned()), to)
    }

    fn add(&mut self, row: Row, to: &mut dyn Write) -> io::Result<()> {
        let Some(held) = &mut self.held else {
            return self.write(&row, to);
        };
        held.push(row);
        match held.len() {
            HELD.. => self.end(to),
            _ => Ok(()),
        }
    }

    /// Writes the heading, and what still waits.
    pub fn end(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let Some(held) = self.held.take() else {
            return Ok(());
        };
        for row in &held {
            if let Row::Cells(cells) = row {
                self.widen(cells.split(SEPARATOR));
            }
        }
        if self.columns.iter().any(|column| !column.heading.is_empty()) {
            self.heading(to)?;
        }
        held.iter().try_for_each(|row| self.write(row, to))
    }

    fn heading(&self, to: &mut dyn Write) -> io::Result<()> {
        let headings = self.columns.iter().map(|column| column.heading.as_str());
        self.line(headings, to)
    }

    fn widen<'a>(&mut self, cells: impl Iterator<Item = &'a str>) {
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            column.width = column.width.max(cell.chars().count());
        }
    }

    fn write(&self, row: &Row, to: &mut dyn Write) -> io::Result<()> {
        match row {
            Row::Cells(cells) => self.line(cells.split(SEPARATOR), to),
            Row::Title(title) => writeln!(to, "\n{title}"),
        }
    }

    fn line<'a>(&self, cells: impl Iterator<Item = &'a str>, to: &mut dyn Write) -> io::Result<()> {
        let last = self.columns.len().saturating_sub(1);
        let mut line = String::new();
        for (number, (column, cell)) in self.columns.iter().zip(cells).enumerate() {
            let Column {
                width, is_number, ..
            } = *column;
            if number > 0 {
                line += GAP;
            }
            let padding = iter::repeat_n(' ', width.saturating_sub(cell.chars().count()));
            match (is_number, number == last) {
                (true, _) => {
                    line.extend(padding);
                    line += cell;
                }
                (false, false) => {
                    line += cell;
                    line.extend(padding);
                }
                (false, true) => line = self.with_last(line, cell),
            }
        }
        writeln!(to, "{}", line.trim_end())
    }

    /// The line with the text of the last column.
    fn with_last(&self, mut line: String, cell: &str) -> String {
        let indent = line.chars().count();
        let room = self.wrap.and_then(|wrap| wrap.checked_sub(indent));
        let Some(room) = room.filter(|room| *room >= NARROW) else {
            return line + cell;
        };
        for (number, part) in wrapped(cell, room).into_iter().enumerate() {
            if number > 0 {
                line += &format!("\n{:indent$}", "");
            }
            line += &part;
        }
        line
    }
}

/// Text in lines of at most this many characters; longer words have lines of their own.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split(' ') {
        let long = word.chars().count();
        if used > 0 && used + 1 + long > width {
            lines.push(String::new());
            used = 0;
        }
        if let Some(line) = lines.last_mut() {
            if used > 0 {
                line.push(' ');
                used += 1;
            }
            line.push_str(word);
        }
        used += long;
    }
    lines
}

/// A table of what flows are counted by. `is_counted`: with packets and bytes.
pub fn talkers(heading: &str, is_counted: bool) -> Table {
    let mut all = vec![
        Column::text(heading).at_least(15),
        Column::number("FLOWS"),
        Column::number("SHARE"),
    ];
    if is_counted {
        all.extend([Column::number("PACKETS"), Column::number("BYTES")]);
    }
    Table::new(all)
}

/// A text whose control characters are written as escapes: names in events may have any, also those
/// that control a terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let mut printed = String::new();
    for it in text.chars() {
        match it.is_control() {
            true => printed.extend(it.escape_debug()),
            false => printed.push(it),
        }
    }
    printed.into()
}

/// The cells of one of them: its name, its flows, their share of all from 0 to 1, and what they
/// have sent, if that is counted.
pub fn talker(
    name: &str,
    (flows, share): (u64, f64),
    sent: Option<[u64; 2]>,
    units: Units,
) -> Vec<String> {
    // A name may have any characters, also those that control a terminal.
    let mut cells = vec![name.escape_debug().to_string(), units.count(flows)];
    cells.push(percent(share));
    cells.extend(sent.into_iter().flatten().map(|it| units.count(it)));
    cells
}

/// A share from 0 to 1, in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// The optional columns of a table of flows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Columns {
    /// Packets and bytes.
    pub accounting: bool,
    /// Round trips and retransmissions.
    pub rto: bool,
    /// Names of rules.
    pub rules: bool,
}

/// A table of flows.
pub fn flows(columns: Columns) -> Table {
    let text = Column::text;
    let number = |heading| Column::number(heading).at_least(6);
    let mut all = vec![
        text("PROTO"),
        text("STATE").at_least(11),
        text("SRC").at_least(21),
        text("   DST").at_least(24),
        number("IDLE"),
        number("EXPIRES"),
        number("AGE"),
    ];
    if columns.accounting {
        all.extend([number("PACKETS"), number("BYTES").at_least(9)]);
    }
    if columns.rto {
        all.extend([number("RTT").at_least(11), number("RETRANS")]);
    }
    if columns.rules {
        all.push(text("RULE"));
    }
    all.push(text(""));
    Table::new(all)
}

/// The cells of a flow in such a table.
pub fn flow(tracked: &Tracked, named: Named<'_>, columns: Columns, units: Units) -> Vec<String> {
    let Flow {
        proto,
        state,
        src,
        dst,
        ..
    } = tracked.flow;
    let mut cells = vec![
        proto.to_owned(),
        state.to_owned(),
        src.to_string(),
        format!("-> {dst}"),
        short(tracked.idle),
        short(tracked.expires),
        short(tracked.age),
    ];
    if columns.accounting {
        let [orig, reply] = tracked.account.unwrap_or_default();
        cells.push(units.sides(orig.packets, reply.packets));
        cells.push(units.sides(orig.bytes, reply.bytes));
    }
    if columns.rto {
        let [orig, reply] = tracked.timing.unwrap_or_default();
        cells.push(format!("{}/{}", rtt(orig), rtt(reply)));
        let [orig, reply] = [orig, reply].map(|it| it.retransmissions.into());
        cells.push(units.sides(orig, reply));
    }
    if columns.rules {
        cells.push(named.rule.unwrap_or("-").to_owned());
    }
    let unruled = Named {
        rule: None,
        ..named
    };
    let mut more = text::more(tracked.flow, unruled);
    if tracked.flow.stalled {
        more += "  stalled";
    }
    if tracked.picked_up {
        more += "  picked up";
    }
    cells.push(more.trim_start().to_owned());
    cells
}

/// The heading of a table of flows with columns of fixed widths.
pub fn heading(columns: Columns, to: &mut dyn Write) -> io::Result<()> {
    flows(columns).heading(to)
}

/// A line of such a table.
pub fn line(
    tracked: &Tracked,
    named: Named<'_>,
    columns: Columns,
    to: &mut dyn Write,
) -> io::Result<()> {
    let cells = flow(tracked, named, columns, Units::Human);
    flows(columns).line(cells.iter().map(String::as_str), to)
}

fn rtt(timing: Timing) -> String {
    text::rtt(timing.srtt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        for (seconds, text) in [
            (0.0, "0.0s"),
            (59.94, "59.9s"),
            (59.999, "60.0s"),
            (60.0, "1m00s"),
            (3599.0, "59m59s"),
            (3600.0, "1h00m"),
            (86_399.0, "23h59m"),
            (431_999.0, "4d23h"),
        ] {
            assert_eq!(short(Duration::from_secs_f64(seconds)), text);
        }
    }

    #[test]
    fn numbers_have_five_characters_at_most() {
        for (number, text) in [
            (0, "0"),
            (99_999, "99999"),
            (100_000, "100k"),
            (999_499, "999k"),
            (999_500, "1.00M"),
            (1_234_567, "1.23M"),
            (9_994_999, "9.99M"),
            (9_995_000, "10.0M"),
            (12_345_678, "12.3M"),
            (99_950_000, "100M"),
            (3_400_000_000, "3.40G"),
            (1_000_000_000_000_000, "1.00P"),
            (u64::MAX, "18.4E"),
        ] {
            assert_eq!(Units::Human.count(number), text);
            assert_eq!(Units::Exact.count(number), number.to_string());
        }
    }

    fn written(mut table: Table, rows: &[[&str; 3]]) -> Vec<String> {
        let mut out = Vec::new();
        for row in rows {
            let cells = row.iter().map(|cell| (*cell).to_owned()).collect();
            table.row(cells, &mut out).unwrap();
        }
        table.end(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn table() -> Table {
        Table::new([
            Column::text("NAME"),
            Column::number("N").at_least(3),
            Column::text("MEANING"),
        ])
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        assert_eq!(written(table(), &[]), ["NAME    N  MEANING"]);
        assert_eq!(
            written(table(), &[["a", "1", "x"], ["längst", "123456", ""]]),
            [
                "NAME         N  MEANING",
                "a            1  x",
                "längst  123456"
            ]
        );
    }

    #[test]
    fn a_wider_cell_after_many_rows_widens_its_column_for_good() {
        let mut rows = vec![["ab", "1", "x"]; HELD];
        rows.extend([["abcdefgh", "1", "x"], ["ab", "1", "x"]]);
        let lines = written(table(), &rows);
        assert_eq!(lines.len(), HELD + 3);
        assert!(
            lines[..=HELD]
                .iter()
                .all(|it| it.find('x').is_none_or(|at| at == 11))
        );
        assert_eq!(lines[HELD + 1], "abcdefgh    1  x");
        assert_eq!(lines[HELD + 2], "ab          1  x");
    }

    #[test]
    fn what_was_measured_shifts_nothing_after_many_rows() {
        let long = ["abcdefgh", "12345", "x"];
        let mut table = table();
        table.measure(&long.map(str::to_owned));
        let mut rows = vec![["ab", "1", "x"]; HELD];
        rows.extend([long, ["", "", "x"]]);
        let lines = written(table, &rows);
        assert_eq!(lines.len(), HELD + 3);
        let at: Vec<_> = lines.iter().filter_map(|it| it.find('x')).collect();
        assert_eq!(at, vec![17; HELD + 2]);
    }

    #[test]
    fn what_controls_a_terminal_is_printed_as_escapes() {
        assert_eq!(printable("eth0 \"é\""), "eth0 \"é\"");
        assert_eq!(printable("a\u{1b}[2J\n"), "a\\u{1b}[2J\\n");
        let (mut table, mut out) = (Table::new(vec![Column::text("A")]), Vec::new());
        table.row(vec!["\u{7}".to_owned()], &mut out).unwrap();
        table.end(&mut out).unwrap();
        assert!(!out.contains(&7), "{out:?}");
    }

    #[test]
    fn the_last_column_is_wrapped() {
        let meaning = "flows that ended because of something";
        let lines = written(table().wrapped(Some(36)), &[["a", "1", meaning]]);
        assert_eq!(
            lines[1..],
            [
                "a       1  flows that ended because",
                "           of something"
            ]
        );
        // Without the room it is not.
        let lines = written(table().wrapped(Some(30)), &[["a", "1", meaning]]);
        assert_eq!(lines.len(), 2);
    }
}
