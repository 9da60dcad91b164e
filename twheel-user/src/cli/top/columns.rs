//! The columns of a table, fitted into the width of the screen. A column that does not fit is left
//! out as a whole: no number is cut.

use std::{borrow::Cow, iter};

use ratatui::{
    style::{Modifier, Style},
    text::{Line, Span},
};

/// Where the text of a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// A column, with the text of each row.
pub struct Column {
    /// Its heading.
    pub heading: String,
    /// Where the texts stand.
    pub side: Side,
    /// The width that it has at least, in characters, so that columns do not jump.
    pub least: usize,
    /// The texts may be shortened to this width.
    pub most: Option<usize>,
    /// The rows are sorted by it.
    pub is_key: bool,
    /// The text and the style of each row.
    pub cells: Vec<(String, Style)>,
}

impl Column {
    /// A column of words or numbers.
    pub fn new(heading: impl Into<String>, side: Side, least: usize) -> Self {
        Self {
            heading: heading.into(),
            side,
            least,
            most: None,
            is_key: false,
            cells: Vec::new(),
        }
    }

    /// The width that shows every text.
    pub fn natural(&self) -> usize {
        let texts = self.cells.iter().map(|(text, _)| width(text));
        let texts = texts.chain([width(&self.heading), self.least]);
        texts.max().unwrap_or(0)
    }

    /// The width that it takes.
    fn width(&self) -> usize {
        let natural = self.natural();
        self.most.map_or(natural, |most| natural.min(most))
    }
}

/// Columns, the first of which always stay.
pub struct Table {
    /// The columns.
    pub columns: Vec<Column>,
    /// How many of them stay when others are scrolled past.
    pub fixed: usize,
    /// How many columns behind these are scrolled past.
    pub across: usize,
    /// The row that is selected.
    pub selected: Option<usize>,
}

impl Table {
    /// Most columns that may be scrolled past.
    pub fn most_across(&self) -> usize {
        self.columns.len().saturating_sub(self.fixed + 1)
    }

    /// Moves the column that the rows are sorted by to this position, unless it stands before it, so
    /// that it is seen on a narrow screen, too. (The two columns of rates stay together.)
    pub fn lift_key(&mut self, to: usize) {
        let keys = self.columns.iter().enumerate().filter(|(_, it)| it.is_key);
        let keys: Vec<_> = keys.map(|(at, _)| at).collect();
        if let [at] = keys[..]
            && at > to
        {
            let key = self.columns.remove(at);
            self.columns.insert(to, key);
        }
    }

    /// The lines, the heading first.
    pub fn lines(&self, width: usize) -> Vec<Line<'static>> {
        let across = self.across.min(self.most_across());
        let behind = self.columns.iter().skip(self.fixed + across);
        let columns = self.columns.iter().take(self.fixed).chain(behind);
        // The mark of the selected row, and at the end that of further columns.
        let mut left = width.saturating_sub(2);
        let mut shown = Vec::new();
        let mut is_all = true;
        for column in columns {
            let needs = column.width() + usize::from(!shown.is_empty());
            if needs > left {
                is_all = false;
                break;
            }
            left -= needs;
            shown.push(column);
        }
        let rows = self.columns.iter().map(|it| it.cells.len()).max();
        let mut heading = vec![Span::raw(if across > 0 { "‹" } else { " " })];
        for (at, column) in shown.iter().enumerate() {
            let style = match column.is_key {
                true => Modifier::BOLD | Modifier::UNDERLINED,
                false => Modifier::BOLD,
            };
            heading.extend(gap(at));
            let text = fit(&column.heading, column.width(), column.side);
            heading.push(Span::styled(text, style));
        }
        if !is_all {
            heading.push(Span::raw(" ".repeat(left)));
            heading.push(Span::styled("›", Modifier::BOLD));
        }
        let line = |row| {
            let is_selected = self.selected == Some(row);
            let mut spans = vec![Span::raw(if is_selected { ">" } else { " " })];
            for (at, column) in shown.iter().enumerate() {
                spans.extend(gap(at));
                let (text, style) = column.cells.get(row).cloned().unwrap_or_default();
                let text = fit(&text, column.width(), column.side);
                spans.push(Span::styled(text, style));
            }
            let line = Line::from(spans);
            match is_selected {
                true => line.patch_style(Modifier::REVERSED),
                false => line,
            }
        };
        let rows = (0..rows.unwrap_or(0)).map(line);
        iter::once(Line::from(heading)).chain(rows).collect()
    }
}

fn gap(at: usize) -> Option<Span<'static>> {
    (at > 0).then(|| Span::raw(" "))
}

/// The width of a text on the screen.
pub fn width(text: &str) -> usize {
    Line::raw(text).width()
}

/// A text in exactly this width.
fn fit(text: &str, width: usize, side: Side) -> String {
    let text = shorten(text, width);
    let blank = " ".repeat(width.saturating_sub(self::width(&text)));
    match side {
        Side::Left => format!("{text}{blank}"),
        Side::Right => format!("{blank}{text}"),
    }
}

/// A text without its middle, if it is wider than this: what an endpoint begins with and its port
/// stay.
pub fn shorten(text: &str, most: usize) -> Cow<'_, str> {
    if width(text) <= most {
        return text.into();
    }
    let letters: Vec<char> = text.chars().collect();
    let kept = most.saturating_sub(1);
    let end = kept / 2;
    let begin = kept - end;
    let begin = letters.iter().take(begin);
    let end = letters.iter().skip(letters.len() - end);
    let kept: String = begin.chain(&['…']).chain(end).collect();
    kept.into()
}

/// A text in lines of this width, broken between words.
pub fn wrap(text: &str, most: usize) -> Vec<Line<'static>> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().filter(|it| {
            let used = width(it);
            used == 0 || used + 1 + width(word) <= most
        });
        match last {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => *line = format!("{line} {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines.into_iter().map(Line::raw).collect()
}

/// A number in at most five characters: `999`, `1.23k`, `45.6M`, `789G`.
pub fn scaled(number: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut number = number.max(0.0);
    let mut unit = 0;
    // What would be rounded to 1000 gets the next unit.
    while number >= 999.5 && unit + 1 < UNITS.len() {
        number /= 1000.0;
        unit += 1;
    }
    let digits = match number {
        _ if unit == 0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{number:.digits$}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_five_characters_at_most() {
        for (number, text) in [
            (0.0, "0"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (1234.0, "1.23k"),
            (9994.0, "9.99k"),
            (9996.0, "10.0k"),
            (99_960.0, "100k"),
            (999_600.0, "1.00M"),
            (45.6e9, "45.6G"),
            (7e15, "7.00P"),
            (-1.0, "0"),
        ] {
            assert_eq!(scaled(number), text, "{number}");
        }
    }

    fn table(width: usize, across: usize) -> Vec<String> {
        let column = |heading: &str, side, cells: [&str; 2]| Column {
            cells: cells.map(|it| (it.to_owned(), Style::new())).to_vec(),
            ..Column::new(heading, side, 0)
        };
        let table = Table {
            columns: vec![
                column("NAME", Side::Left, ["one", "another"]),
                column("SIZE", Side::Right, ["1", "12345"]),
                column("AGE", Side::Right, ["1.0s", "9"]),
            ],
            fixed: 1,
            across,
            selected: Some(1),
        };
        let lines = table.lines(width);
        lines.iter().map(|line| line.to_string()).collect()
    }

    #[test]
    fn what_does_not_fit_is_left_out_as_a_whole() {
        let all = [
            " NAME     SIZE  AGE",
            " one         1 1.0s",
            ">another 12345    9",
        ];
        assert_eq!(table(80, 0), all);
        assert_eq!(table(20, 0), all);
        let two = [" NAME     SIZE    ›", " one         1", ">another 12345"];
        assert_eq!(table(19, 0), two);
        let one = [" NAME        ›", " one    ", ">another"];
        assert_eq!(table(14, 0), one);
        let other = ["‹NAME     AGE", " one     1.0s", ">another    9"];
        assert_eq!(table(19, 1), other);
        assert_eq!(table(19, 9), other);
        assert_eq!(table(0, 0), [" ›", " ", ">"]);
    }

    #[test]
    fn a_sentence_is_broken_between_words() {
        let wrapped = |text: &str, most| -> Vec<String> {
            let lines = wrap(text, most);
            lines.iter().map(|line| line.to_string()).collect()
        };
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("one two three", 13), ["one two three"]);
        assert_eq!(wrapped("one two", 2), ["one", "two"]);
        assert_eq!(wrapped("", 2), [""]);
    }

    #[test]
    fn the_sort_key_is_lifted() {
        let headings = |keys: &[usize], to: usize| -> String {
            let mut table = Table {
                columns: ["a", "b", "c", "d"]
                    .map(|it| Column::new(it, Side::Left, 0))
                    .into(),
                fixed: 1,
                across: 0,
                selected: None,
            };
            for key in keys {
                table.columns[*key].is_key = true;
            }
            table.lift_key(to);
            table.columns.into_iter().map(|it| it.heading).collect()
        };
        assert_eq!(headings(&[3], 1), "adbc");
        assert_eq!(headings(&[0], 1), "abcd");
        assert_eq!(headings(&[2, 3], 1), "abcd");
        assert_eq!(headings(&[], 1), "abcd");
    }

    #[test]
    fn a_text_is_shortened_in_its_middle() {
        assert_eq!(shorten("[2001:db8::1]:443", 17), "[2001:db8::1]:443");
        assert_eq!(shorten("[2001:db8::1]:443", 12), "[2001:…]:443");
        assert_eq!(shorten("abc", 1), "…");
        assert_eq!(shorten("abc", 0), "…");
    }
}
