//! What each key does. The help is made from the same table.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::views::View;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Quit,
    Help,
    Filter,
    Sort(isize),
    Reverse,
    Pause,
    Open,
    Delete,
    Names,
    Owners,
    Wheels,
    Show(View),
    Further(isize),
    /// Selects the row that is this many rows further down.
    Move(isize),
    /// The same by pages.
    Page(isize),
    First,
    Last,
    /// Scrolls by this many columns.
    Across(isize),
}

/// The keys, and what they do.
pub const KEYS: [(&str, &str); 18] = [
    ("1 to 7, F1 to F7", "show a view (see below)"),
    ("Tab, Shift-Tab", "next and previous view"),
    ("Up, Down", "select a row"),
    ("PgUp, PgDn", "a page up and down"),
    ("Home, End", "first and last row"),
    ("Left, Right", "columns that do not fit"),
    ("Enter", "all details of the flow; the flows of the group"),
    ("d", "delete the selected flow, after a question"),
    ("/", "edit the filter: applies as you type"),
    ("", "  Enter keeps it, Esc restores, Ctrl-U clears"),
    ("s, S", "next and previous sort key"),
    ("r", "reverse the order"),
    ("n", "names of hosts and services, or numbers"),
    ("o", "owners: process, user, cgroup"),
    ("w", "show or hide the wheels"),
    ("p", "pause"),
    ("?, h", "this help"),
    ("q, Esc, Ctrl-C", "quit"),
];

/// What a key does while nothing is typed or asked.
pub fn act(key: KeyEvent) -> Option<Act> {
    Some(match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Act::Quit,
        KeyCode::Char(_) if key.modifiers.contains(KeyModifiers::CONTROL) => return None,
        KeyCode::Char('q') | KeyCode::Esc => Act::Quit,
        KeyCode::Char('?' | 'h') => Act::Help,
        KeyCode::Char('/') => Act::Filter,
        KeyCode::Char('s') => Act::Sort(1),
        KeyCode::Char('S') => Act::Sort(-1),
        KeyCode::Char('r') => Act::Reverse,
        KeyCode::Char('p') => Act::Pause,
        KeyCode::Char('d') => Act::Delete,
        KeyCode::Char('n') => Act::Names,
        KeyCode::Char('o') => Act::Owners,
        KeyCode::Char('w') => Act::Wheels,
        KeyCode::Char(digit) => Act::Show(View::of_digit(digit)?),
        KeyCode::F(number) => Act::Show(*View::ALL.get(usize::from(number).checked_sub(1)?)?),
        KeyCode::Enter => Act::Open,
        KeyCode::Tab => Act::Further(1),
        KeyCode::BackTab => Act::Further(-1),
        KeyCode::Up => Act::Move(-1),
        KeyCode::Down => Act::Move(1),
        KeyCode::PageUp => Act::Page(-1),
        KeyCode::PageDown => Act::Page(1),
        KeyCode::Home => Act::First,
        KeyCode::End => Act::Last,
        KeyCode::Left => Act::Across(-1),
        KeyCode::Right => Act::Across(1),
        _ => return None,
    })
}
