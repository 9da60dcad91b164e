//! What `?` shows.

use ratatui::{style::Modifier, text::Line};

use super::{flow_table, keys::KEYS, views::View};

/// The lines of the help, at most 80 characters wide.
pub fn lines() -> Vec<Line<'static>> {
    let heading = |text: &'static str| Line::styled(text, Modifier::BOLD);
    let entry = |name: &str, meaning: &str| Line::raw(format!("  {name:<18} {meaning}"));
    let mut lines = vec![heading(
        "Keys (Up and Down scroll this help, any other key closes it)",
    )];
    lines.extend(KEYS.iter().map(|(key, meaning)| entry(key, meaning)));
    lines.push(Line::raw(""));
    lines.push(heading("Views"));
    for view in View::ALL {
        let name = format!("{} {}", view.digit(), view.name());
        lines.push(entry(&name, view.meaning()));
    }
    lines.push(Line::raw(""));
    lines.push(heading("Columns"));
    for (name, meaning) in flow_table::meanings() {
        lines.push(entry(
            if name.is_empty() { "(last)" } else { name },
            meaning,
        ));
    }
    lines.push(Line::raw(""));
    lines.push(heading("Colours of states"));
    for (colour, states) in [
        ("green", "established, udp_stream"),
        (
            "yellow",
            "syn_sent, syn_recv, syn_sent2, unreplied: it opens",
        ),
        (
            "magenta",
            "fin_wait, close_wait, last_ack, time_wait, close: it closes",
        ),
        ("cyan", "udp, icmp"),
        ("red", "stalled, also marked with !"),
    ] {
        lines.push(entry(colour, states));
    }
    lines.push(Line::raw(""));
    lines.push(heading("Wheels"));
    for text in [
        "Each line is the timing wheel of a CPU, from now on. A mark is where slots",
        "that hold flows have their turn: then their flows are visited, and end if",
        "their timeout is over. Taller marks are more slots. The axis is logarithmic.",
        "`slots 3/1/0` are the slots in use on each level. Rates: twheel top --help.",
    ] {
        lines.push(Line::raw(format!("  {text}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_fits_a_narrow_terminal() {
        for line in lines() {
            assert!(line.width() <= 80, "{line}");
        }
    }
}
