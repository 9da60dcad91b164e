//! The documents of twheel for a terminal: Markdown without its marks.

use std::io::{self, Write};

use super::table::{Column, Table, wrapped};

/// Writes a document: headings in capitals, code indented, tables in columns, links without their
/// targets. Paragraphs keep their lines and what marks code. `width`: that of the terminal, in characters.
pub fn write(document: &str, width: usize, to: &mut dyn Write) -> io::Result<()> {
    let mut is_code = false;
    let mut table = Vec::new();
    for line in document.lines() {
        if line.starts_with('|') && !is_code {
            table.push(cells(line));
            continue;
        }
        write_table(std::mem::take(&mut table), width, to)?;
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if is_code {
            writeln!(to, "    {line}")?;
        } else if let Some(heading) = line.strip_prefix('#') {
            let heading = plain(heading.trim_start_matches('#').trim()).replace('`', "");
            writeln!(to, "{}", heading.to_uppercase())?;
        } else {
            writeln!(to, "{}", plain(line))?;
        }
    }
    write_table(table, width, to)
}

/// A table whose second line separates its heading from the rest.
fn write_table(rows: Vec<Vec<String>>, width: usize, to: &mut dyn Write) -> io::Result<()> {
    /// The last column needs at least this width.
    const LAST: usize = 24;
    let Some(columns) = rows.iter().map(Vec::len).max() else {
        return Ok(());
    };
    let wide = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let wide = cells.map(|cell| cell.chars().count() + 2).max();
        wide.unwrap_or(0)
    };
    let others: usize = (0..columns - 1).map(wide).sum();
    if others + LAST > width {
        for row in rows.iter().filter(|row| !is_rule(row)).skip(1) {
            write_entry(row, width, to)?;
        }
        return Ok(());
    }
    let mut table = Table::new((0..columns).map(|_| Column::text(""))).wrapped(Some(width));
    let rows = rows.into_iter().filter(|row| !is_rule(row));
    for row in rows.filter(|row| row.iter().any(|cell| !cell.is_empty())) {
        table.row(row, to)?;
    }
    table.end(to)
}

/// A row that has no room for its columns: the last cell is below the others.
fn write_entry(row: &[String], width: usize, to: &mut dyn Write) -> io::Result<()> {
    let Some((last, others)) = row.split_last() else {
        return Ok(());
    };
    writeln!(to, "{}", others.join("  "))?;
    for line in wrapped(last, width.saturating_sub(4)) {
        writeln!(to, "    {line}")?;
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
        // Where the first column is long, the last is below it.
        let table =
            "| option | meaning |\n|---|---|\n| `--a-very-long-option VALUE` | what it does |\n";
        assert_eq!(
            written(table, 40),
            "--a-very-long-option VALUE\n    what it does\n"
        );
    }
}
