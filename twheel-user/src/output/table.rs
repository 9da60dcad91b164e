//! Tables for people. A column is as wide as what is in it, so that nothing shifts. Rows are held
//! until the widths are known, up to a bound: a table may have millions of rows.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
    io::{self, Write},
};

use super::units::Units;

/// A column of a table.
#[derive(Clone, Debug)]
pub struct Column {
    heading: String,
    /// Aligned on the right.
    is_number: bool,
    pub(super) width: usize,
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
/// Most lines have fewer bytes.
const ROOM: usize = 200;
/// A last column that is narrower is not wrapped.
const NARROW: usize = 24;

/// The cells of a row, in one text: a table may have millions of rows.
#[derive(Clone, Debug, Default)]
pub struct Cells {
    text: String,
    /// Where each ends there.
    ends: Vec<usize>,
}

impl Cells {
    /// Adds a cell, [`printable`].
    pub fn push(&mut self, cell: impl fmt::Display) {
        let begin = self.text.len();
        // Writing to a string cannot fail.
        let _ = write!(self.text, "{cell}");
        if let Cow::Owned(printed) = printable(&self.text[begin..]) {
            self.text.truncate(begin);
            self.text += &printed;
        }
        self.ends.push(self.text.len());
    }

    /// Removes all, and keeps the memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }

    /// Each cell.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let mut begin = 0;
        let cell = move |end: &usize| &self.text[std::mem::replace(&mut begin, *end)..*end];
        self.ends.iter().map(cell)
    }
}

impl<T: fmt::Display> FromIterator<T> for Cells {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut cells = Self::default();
        all.into_iter().for_each(|cell| cells.push(cell));
        cells
    }
}

/// A line of a table.
enum Row {
    Cells(Cells),
    /// A heading of the rows that follow.
    Title(String),
}

/// A table.
pub struct Table {
    pub(super) columns: Vec<Column>,
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

    /// Adds a row: a cell for each column.
    pub fn row(
        &mut self,
        cells: impl IntoIterator<Item: fmt::Display>,
        to: &mut dyn Write,
    ) -> io::Result<()> {
        self.add_cells(&cells.into_iter().collect(), to)
    }

    /// The same.
    pub fn add_cells(&mut self, cells: &Cells, to: &mut dyn Write) -> io::Result<()> {
        if self.held.is_none() {
            self.measure(cells);
            return self.line(cells.iter(), to);
        }
        self.add(Row::Cells(cells.clone()), to)
    }

    /// Makes the columns wide enough for a row that comes later.
    pub fn measure(&mut self, cells: &Cells) {
        for (column, cell) in self.columns.iter_mut().zip(cells.iter()) {
            column.width = column.width.max(characters(cell));
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
                self.measure(cells);
            }
        }
        if self.columns.iter().any(|column| !column.heading.is_empty()) {
            self.heading(to)?;
        }
        held.iter().try_for_each(|row| self.write(row, to))
    }

    /// Writes the heading.
    pub(super) fn heading(&self, to: &mut dyn Write) -> io::Result<()> {
        let headings = self.columns.iter().map(|column| column.heading.as_str());
        self.line(headings, to)
    }

    fn write(&self, row: &Row, to: &mut dyn Write) -> io::Result<()> {
        match row {
            Row::Cells(cells) => self.line(cells.iter(), to),
            Row::Title(title) => writeln!(to, "\n{title}"),
        }
    }

    /// Writes a row.
    pub(super) fn line<'a>(
        &self,
        cells: impl Iterator<Item = &'a str>,
        to: &mut dyn Write,
    ) -> io::Result<()> {
        let last = self.columns.len().saturating_sub(1);
        let mut line = String::with_capacity(ROOM);
        for (number, (column, cell)) in self.columns.iter().zip(cells).enumerate() {
            let Column {
                width, is_number, ..
            } = *column;
            if number > 0 {
                line += GAP;
            }
            let padding = width.saturating_sub(characters(cell));
            match (is_number, number == last) {
                (true, _) => {
                    pad(&mut line, padding);
                    line += cell;
                }
                (false, false) => {
                    line += cell;
                    pad(&mut line, padding);
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

/// How many characters a cell has.
pub(super) fn characters(cell: &str) -> usize {
    match cell.is_ascii() {
        true => cell.len(),
        false => cell.chars().count(),
    }
}

fn pad(line: &mut String, mut spaces: usize) {
    const SPACES: &str = "                                ";
    while spaces > 0 {
        let some = spaces.min(SPACES.len());
        *line += &SPACES[..some];
        spaces -= some;
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
    if text.bytes().all(|it| matches!(it, b' '..=b'~')) || !text.contains(char::is_control) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn written(mut table: Table, rows: &[[&str; 3]]) -> Vec<String> {
        let mut out = Vec::new();
        for row in rows {
            table.row(row, &mut out).unwrap();
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
        table.measure(&long.into_iter().collect());
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
