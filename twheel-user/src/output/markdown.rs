//! The documents of twheel for a terminal: Markdown without its marks.

use std::io::{self, Write};

use super::table::wrapped;

/// The longest line of prose: a longer one is tiring to read, however wide the terminal is.
const PROSE: usize = 100;
/// What stands between two columns.
const GAP: usize = 2;

/// Writes a document: headings in capitals, code indented, tables in columns, links without their
/// targets, and paragraphs and lists filled anew. What marks code stays in paragraphs. `width`: that
/// of the terminal, in characters; only code is longer.
pub fn write(document: &str, width: usize, to: &mut dyn Write) -> io::Result<()> {
    let prose = width.min(PROSE);
    let mut is_code = false;
    let mut table = Vec::new();
    let mut paragraph = String::new();
    for line in document.lines() {
        if line.starts_with('|') && !is_code {
            write_paragraph(&mut paragraph, prose, to)?;
            table.push(cells(line));
            continue;
        }
        write_table(std::mem::take(&mut table), width, to)?;
        let is_fence = line.trim_start().starts_with("```");
        let is_text = !is_code && !is_fence && !line.is_empty() && !line.starts_with('#');
        if !is_text || marker(line) > 0 {
            write_paragraph(&mut paragraph, prose, to)?;
        }
        if is_fence {
            is_code = !is_code;
        } else if is_code {
            writeln!(to, "    {line}")?;
        } else if let Some(heading) = line.strip_prefix('#') {
            let heading = plain(heading.trim_start_matches('#').trim()).replace('`', "");
            writeln!(to, "{}", heading.to_uppercase())?;
        } else if is_text && paragraph.is_empty() {
            paragraph = line.trim_end().to_owned();
        } else if is_text {
            paragraph = format!("{paragraph} {}", line.trim());
        } else {
            writeln!(to)?;
        }
    }
    write_paragraph(&mut paragraph, prose, to)?;
    write_table(table, width, to)
}

/// The length of what begins an item of a list, with the blanks before it; 0: the line begins none.
fn marker(line: &str) -> usize {
    let text = line.trim_start();
    let number = text.trim_start_matches(|it: char| it.is_ascii_digit());
    let indent = line.len() - text.len();
    if text.starts_with("- ") || text.starts_with("* ") {
        indent + 2
    } else if number.len() < text.len() && number.starts_with(". ") {
        line.len() - number.len() + 2
    } else {
        0
    }
}

/// Writes a paragraph, or an item of a list, and empties it. Lines of an item are below its text.
fn write_paragraph(paragraph: &mut String, width: usize, to: &mut dyn Write) -> io::Result<()> {
    let paragraph = std::mem::take(paragraph);
    if paragraph.is_empty() {
        return Ok(());
    }
    let indent = marker(&paragraph);
    let (mark, text) = paragraph.split_at(indent);
    for (number, line) in wrapped(&plain(text), width.saturating_sub(indent))
        .iter()
        .enumerate()
    {
        match number {
            0 => writeln!(to, "{mark}{line}")?,
            _ => writeln!(to, "{:indent$}{line}", "")?,
        }
    }
    Ok(())
}

/// A table whose second line separates its heading from the rest. Where it is too wide, the cells of
/// its widest columns have several lines.
fn write_table(mut rows: Vec<Vec<String>>, width: usize, to: &mut dyn Write) -> io::Result<()> {
    rows.retain(|row| !is_rule(row));
    let Some(columns) = rows.iter().map(Vec::len).max() else {
        return Ok(());
    };
    rows.iter_mut()
        .for_each(|row| row.resize(columns, String::new()));
    let longest = |parts: fn(&str) -> std::str::Split<'_, char>| -> Vec<usize> {
        let of = |cell: &String| parts(cell).map(|it| it.chars().count()).max().unwrap_or(0);
        let column = |column: usize| rows.iter().map(|row| of(&row[column])).max().unwrap_or(0);
        (0..columns).map(column).collect()
    };
    let mut widths = longest(|cell| cell.split('\n'));
    let least = longest(|cell| cell.split(' '));
    let room = width.saturating_sub(GAP * (columns - 1));
    while widths.iter().sum::<usize>() > room {
        let shrinks = (0..columns).filter(|it| widths[*it] > least[*it]);
        match shrinks.max_by_key(|it| widths[*it]) {
            Some(widest) => widths[widest] -= 1,
            None => return write_entries(&rows, width, to),
        }
    }
    let lines = |row: &[String]| -> Vec<Vec<String>> {
        let cells = row.iter().zip(&widths);
        cells.map(|(cell, width)| wrapped(cell, *width)).collect()
    };
    // Where a line may belong to the row above it or begin one, an empty line tells the rows apart.
    let is_apart = rows
        .iter()
        .any(|row| lines(&row[..columns - 1]).iter().any(|cell| cell.len() > 1));
    for (number, row) in rows.iter().enumerate() {
        // Some tables have an empty heading.
        if row.iter().all(String::is_empty) {
            continue;
        }
        if is_apart && number > 0 {
            writeln!(to)?;
        }
        write_row(&lines(row), &widths, to)?;
    }
    Ok(())
}

/// Writes a row. `cells`: the lines of each.
fn write_row(cells: &[Vec<String>], widths: &[usize], to: &mut dyn Write) -> io::Result<()> {
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    for number in 0..height {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            let text = cell.get(number).map_or("", String::as_str);
            line += &format!("{text:width$}{:GAP$}", "");
        }
        writeln!(to, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Writes a table that has no room for its columns: each cell on lines of its own, after its
/// heading.
fn write_entries(rows: &[Vec<String>], width: usize, to: &mut dyn Write) -> io::Result<()> {
    const INDENT: usize = 4;
    let Some((headings, rows)) = rows.split_first() else {
        return Ok(());
    };
    for row in rows {
        for (column, (heading, cell)) in headings.iter().zip(row).enumerate() {
            let text = match heading.is_empty() || column == 0 {
                true => cell.clone(),
                false => format!("{heading}: {cell}"),
            };
            let indent = if column == 0 { 0 } else { INDENT };
            for line in wrapped(&text, width.saturating_sub(indent)) {
                writeln!(to, "{:indent$}{line}", "")?;
            }
        }
    }
    Ok(())
}

fn is_rule(row: &[String]) -> bool {
    row.iter().all(|cell| cell.starts_with("---"))
}

/// The cells of a line of a table.
fn cells(line: &str) -> Vec<String> {
    // A bar that belongs to a cell is escaped.
    let line = line.trim().replace("\\|", "\u{0}");
    let line = line.trim_start_matches('|').trim_end_matches('|');
    line.split('|')
        .map(|cell| plain(cell.trim()).replace('`', "").replace('\u{0}', "|"))
        .collect()
}

/// A line without the marks of links.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, link)) = rest.split_once('[') {
        text += before;
        let found = link.split_once("](").and_then(|(label, after)| {
            let (_, after) = after.split_once(')')?;
            (!label.contains('[')).then_some((label, after))
        });
        match found {
            Some((label, after)) => {
                text += label;
                rest = after;
            }
            None => {
                text.push('[');
                rest = link;
            }
        }
    }
    text += rest;
    text.replace("**", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(document: &str, width: usize) -> String {
        let mut out = Vec::new();
        write(document, width, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn marks_are_removed_and_text_stays() {
        assert_eq!(
            written(
                "# A `filter`\n\nSee [states](states.md#x), **not** a[0].\n\n```\n# code `x`\n```\n",
                80
            ),
            "A FILTER\n\nSee states, not a[0].\n\n    # code `x`\n"
        );
    }

    #[test]
    fn tables_have_columns() {
        let table = "| field | value |\n|---|---|\n| `or` | `a \\|\\| b` |\n| x | one two three four five six |\n";
        assert_eq!(
            written(table, 34),
            "\nfield  value\nor     a || b\nx      one two three four five six\n"
                .trim_start_matches('\n')
        );
        assert_eq!(
            written(table, 31),
            "field  value\nor     a || b\nx      one two three four five\n       six\n"
        );
    }

    #[test]
    fn a_wide_table_keeps_its_headings_and_columns() {
        let table = "| state | seen of the flow | timeout |\n|---|---|---|\n\
                     | `a` | one two three four | five six |\n| b | x | y |\n";
        assert_eq!(
            written(table, 26),
            "state  seen of    timeout\n       the flow\n\n\
             a      one two    five six\n       three\n       four\n\nb      x          y\n"
        );
        // No word is cut: where the words are too long, each cell has its heading.
        assert_eq!(
            written(table, 12),
            "a\n    seen of\n    the\n    flow:\n    one two\n    three\n    four\n    \
             timeout:\n    five six\nb\n    seen of\n    the\n    flow: x\n    timeout:\n    y\n"
        );
    }

    #[test]
    fn paragraphs_and_items_are_filled() {
        assert_eq!(
            written(
                "One two\nthree [four\nfive](x.md).\n\n- six seven\n  eight\n1. nine\nten",
                14
            ),
            "One two three\nfour five.\n\n- six seven\n  eight\n1. nine ten\n"
        );
    }
}
