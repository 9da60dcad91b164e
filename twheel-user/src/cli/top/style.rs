//! Colours. Each says again what a word on the screen says.

use std::sync::LazyLock;

use ratatui::style::{Color, Modifier, Style};

/// A colour, unless the user wants none: <https://no-color.org>.
pub fn colour(colour: Color) -> Style {
    static IS_WANTED: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty()));
    match *IS_WANTED {
        true => Style::new().fg(colour),
        false => Style::new(),
    }
}

/// Of what should not be.
pub fn warning() -> Style {
    colour(Color::Red).add_modifier(Modifier::BOLD)
}

/// Of a state: whether the flow opens, is open, or closes.
pub fn of_state(state: &str) -> Style {
    match state {
        "established" | "udp_stream" => colour(Color::Green),
        "syn_sent" | "syn_recv" | "syn_sent2" | "unreplied" => colour(Color::Yellow),
        "fin_wait" | "close_wait" | "last_ack" | "time_wait" | "close" => colour(Color::Magenta),
        _ => colour(Color::Cyan),
    }
}
