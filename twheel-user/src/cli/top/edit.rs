//! The filter, which applies while it is typed.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::filter::{Filter, Knowable};

/// A filter and its text.
pub struct Edit {
    /// The text, perhaps while it is edited.
    pub text: String,
    /// The last valid filter.
    filter: Filter,
    /// The text before the edit, while it is edited.
    before: Option<String>,
    /// Why the text is not a valid filter.
    pub wrong: Option<String>,
}

impl Edit {
    /// A filter with its text.
    pub fn new(text: String, filter: Filter) -> Self {
        Self {
            text,
            filter,
            before: None,
            wrong: None,
        }
    }

    /// The last valid filter.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Whether it is being edited.
    pub fn is_open(&self) -> bool {
        self.before.is_some()
    }

    /// Begins to edit it.
    pub fn open(&mut self) {
        self.before = Some(self.text.clone());
    }

    /// Also asks for this.
    pub fn narrow(&mut self, more: &str, known: Knowable) {
        self.text = match self.filter.is_empty() {
            true => more.to_owned(),
            false => format!("({}) and {more}", self.text),
        };
        self.parse(known);
    }

    /// A key while it is edited. Returns whether the filter has changed.
    pub fn key(&mut self, key: KeyEvent, known: Knowable) -> bool {
        /// More than anybody types.
        const LONGEST: usize = 1000;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            // An invalid filter is not kept.
            KeyCode::Enter if self.wrong.is_none() => {
                self.before = None;
                return false;
            }
            KeyCode::Esc => self.text = self.before.take().unwrap_or_default(),
            KeyCode::Backspace => {
                self.text.pop();
            }
            KeyCode::Char('u') if control => self.text.clear(),
            KeyCode::Char(character) if !control && self.text.len() < LONGEST => {
                self.text.push(character);
            }
            _ => return false,
        }
        self.parse(known)
    }

    /// Returns whether the text is a valid filter.
    fn parse(&mut self, known: Knowable) -> bool {
        match Filter::parse(&self.text, known) {
            Ok(filter) => {
                self.filter = filter;
                self.wrong = None;
                true
            }
            Err(error) => {
                // Only the first line: the lines below it show where, but here the filter is shown
                // anyway.
                let sentence = error.to_string();
                self.wrong = sentence.lines().next().map(str::to_owned);
                false
            }
        }
    }
}
