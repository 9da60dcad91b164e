//! `cargo xtask recording`: the lab as a user sees it in a terminal, as an animated picture,
//! `docs/lab.svg`. `script` of util-linux notes what the lab writes, and when. (`script(1)`)

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    run, setup,
    sh::{self, say},
};

/// What the user has typed.
const COMMAND: &str = "$ cargo xtask run";
/// The terminal's lines.
const ROWS: usize = 30;
/// The terminal's columns.
const COLUMNS: usize = 100;
/// Pixels of a character.
const CHARACTER: [f64; 2] = [8.0, 18.0];
/// Pixels around the text.
const MARGIN: f64 = 14.0;
/// Seconds before the lab begins, and after it has ended.
const PAUSES: [f64; 2] = [1.0, 6.0];

/// A line, and the second at which it comes.
type Line = (f64, String);

/// Runs the lab, and writes the picture.
pub fn record() -> Result<()> {
    sh::require_root()?;
    setup::lab()?;
    let (built, lab) = run::lab()?;
    let directory = sh::target("recording");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let [timing, output] = ["timing", "output"].map(|name| directory.join(name));
    let mut script = sh::as_root("script", built.env())?;
    script
        .args(["--quiet", "--flush", "--return", "--log-timing"])
        .args([&timing, Path::new("--log-out"), &output])
        .arg("--command")
        .arg(lab);
    sh::run(&mut script)?;
    let read = |path: &Path| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let lines = lines(&read(&timing)?, &read(&output)?)?;
    fs::write(picture_path(), picture(&lines)).context("cannot write docs/lab.svg")?;
    say!("{} shows {} lines.", picture_path().display(), lines.len());
    Ok(())
}

/// The lines that `script` has noted, which wrote how many bytes came after how many seconds.
fn lines(timing: &str, output: &str) -> Result<Vec<Line>> {
    // Before what the program wrote stands a line of script's own.
    let (_, mut rest) = output
        .split_once('\n')
        .context("script has noted nothing")?;
    let (mut at, mut lines) = (PAUSES[0], vec![(0.0, COMMAND.to_owned())]);
    let mut begun = String::new();
    for entry in timing.lines() {
        let (after, bytes) = entry.split_once(' ').context("no delay and size")?;
        at += after.parse::<f64>()?;
        let (text, later) = rest
            .split_at_checked(bytes.trim().parse()?)
            .context("too short")?;
        rest = later;
        begun += text;
        while let Some((line, more)) = begun.split_once('\n') {
            lines.push((at, line.trim_end().to_owned()));
            begun = more.to_owned();
        }
    }
    let widest = lines.iter().map(|(_, line)| line.chars().count()).max();
    ensure!(
        widest.unwrap_or_default() <= COLUMNS,
        "a line of the lab is wider than {COLUMNS} columns"
    );
    Ok(lines)
}

/// The picture: each line appears at its time, and what is above the terminal's first line is
/// scrolled away. Who wants no motion sees the end.
fn picture(lines: &[Line]) -> String {
    let [wide, high] = CHARACTER;
    let seconds = lines.last().map_or(0.0, |(at, _)| *at) + PAUSES[1];
    let (width, height) = (
        COLUMNS as f64 * wide + 2.0 * MARGIN,
        ROWS as f64 * high + 2.0 * MARGIN,
    );
    let scrolled = |shown: usize| shown.saturating_sub(ROWS) as f64 * high;
    let mut times: Vec<(f64, usize)> = Vec::new();
    for (number, (at, _)) in lines.iter().enumerate() {
        match times.last_mut() {
            Some((last, shown)) if at - *last < 0.02 => *shown = number + 1,
            _ => times.push((*at, number + 1)),
        }
    }
    let (mut style, mut scroll, mut text) = (String::new(), String::new(), String::new());
    let mut first = 0;
    for (group, (at, shown)) in times.iter().enumerate() {
        let percent = 100.0 * at / seconds;
        let _ = write!(
            scroll,
            "{percent:.2}%{{transform:translateY(-{}px)}}",
            scrolled(*shown)
        );
        if group > 0 {
            let _ = writeln!(
                style,
                "@keyframes g{group}{{0%{{opacity:0}}{percent:.2}%{{opacity:1}}}}\n\
                 .g{group}{{animation:g{group} {seconds:.1}s step-end infinite}}"
            );
        }
        let _ = writeln!(text, "<g class=\"g{group}\">");
        for (number, (_, line)) in lines.iter().enumerate().take(*shown).skip(first) {
            let y = MARGIN + (number as f64 + 0.75) * high;
            let line = escaped(line);
            let _ = writeln!(text, "<text x=\"{MARGIN}\" y=\"{y}\">{line}</text>");
        }
        text += "</g>\n";
        first = *shown;
    }
    let end = scrolled(lines.len());
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{COMMAND}: the lab's output\">\n<style>\n\
         text{{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9;white-space:pre}}\n\
         .all{{transform:translateY(-{end}px);animation:scroll {seconds:.1}s step-end infinite}}\n\
         @keyframes scroll{{{scroll}}}\n{style}\
         @media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}\n</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#20242c\"/>\n\
         <svg y=\"{MARGIN}\" width=\"100%\" height=\"{}\"><g transform=\"translate(0 -{MARGIN})\">\
         <g class=\"all\">\n{text}</g></g></svg>\n</svg>\n",
        ROWS as f64 * high
    )
}

/// A line as SVG has it.
fn escaped(line: &str) -> String {
    line.replace('&', "&amp;").replace('<', "&lt;")
}

/// Where the picture is.
fn picture_path() -> PathBuf {
    sh::workspace().join("docs/lab.svg")
}

/// Fails unless the picture shows what the lab prints today. Lines with numbers differ each time.
pub fn shows(output: &str) -> Result<()> {
    let picture = fs::read_to_string(picture_path()).context("there is no docs/lab.svg")?;
    has_lines_of(&picture, output)
}

fn has_lines_of(picture: &str, output: &str) -> Result<()> {
    let told = output.lines().map(str::trim_end);
    for line in told.filter(|it| !it.is_empty() && !it.contains(|c: char| c.is_ascii_digit())) {
        ensure!(
            picture.contains(&format!(">{}</text>", escaped(line))),
            "docs/lab.svg does not show {line:?}, which the lab prints: run `cargo xtask recording`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_when_they_were_written() {
        let output = "Script started\nThe lab\r\n  <busy>\r\nEnd\r\n";
        let lines = lines("0.5 4\n0.25 17\n1.0 3\n", output).unwrap();
        let wanted = [
            (0.0, COMMAND),
            (1.75, "The lab"),
            (1.75, "  <busy>"),
            (2.75, "End"),
        ];
        assert_eq!(lines, wanted.map(|(at, line)| (at, line.to_owned())));
        let picture = picture(&lines);
        assert!(picture.contains(">  &lt;busy></text>"), "{picture}");
        assert!(has_lines_of(&picture, "The lab\n\n  <busy>\nEnd \n 12 flows\n").is_ok());
        assert!(has_lines_of(&picture, "Another lab\n").is_err());
    }

    #[test]
    fn what_script_has_not_written_is_an_error() {
        assert!(lines("0.5 4\n", "").is_err());
        assert!(lines("0.5 40\n", "Script started\nshort\n").is_err());
        let wide = format!("Script started\n{}\n", "x".repeat(101));
        assert!(lines("0.5 102\n", &wide).is_err());
    }
}
