//! `twheel help`

use std::io::{self, IsTerminal, Write};

use anyhow::Result;
use clap::Args;
use ratatui::crossterm::terminal;

use super::{complete, man, select::while_read};
use crate::output::markdown;

/// Print the help of a command, or what the documents say of filter, events, states or policy
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel help run
  twheel help policy check
  twheel help filter           # the fields of filters, and their values
  twheel help events | less")]
pub struct Help {
    /// Command; or filter, events, states or policy for that document
    #[arg(value_name = "COMMAND|TOPIC", add = complete::commands_or(&["filter", "events", "states", "policy"]))]
    about: Vec<String>,
}

/// The documents, by topic.
const TOPICS: [(&str, &str); 4] = [
    ("filter", include_str!("../../../docs/filter.md")),
    ("events", include_str!("../../../docs/events.md")),
    ("states", include_str!("../../../docs/states.md")),
    ("policy", include_str!("../../../docs/policy.md")),
];

impl Help {
    pub(super) fn execute(self) -> Result<()> {
        if let [topic] = self.about.as_slice()
            && let Some((_, document)) = TOPICS.iter().find(|(name, _)| name == topic)
        {
            return while_read(|out| print(document, out));
        }
        let mut command = man::find(&self.about, &TOPICS.map(|(name, _)| name))?;
        while_read(|out| Ok(write!(out, "{}", command.render_long_help())?))
    }
}

fn print(document: &str, out: &mut dyn Write) -> Result<()> {
    let width = match terminal::size() {
        Ok((columns, _)) if io::stdout().is_terminal() => columns.into(),
        _ => 100,
    };
    Ok(markdown::write(document, width, out)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_document_is_readable_on_a_terminal() {
        for (topic, document) in TOPICS {
            for width in [80, 100, 120] {
                let mut out = Vec::new();
                markdown::write(document, width, &mut out).unwrap();
                let text = String::from_utf8(out).unwrap();
                assert!(text.lines().count() > 40, "{topic}");
                for mark in ["](", "```", "|---"] {
                    assert!(!text.contains(mark), "{topic}: {mark}");
                }
                // Code is as it was written, and so is a word.
                let is_free = |line: &&str| !line.starts_with("    ") && line.trim().contains(' ');
                for line in text.lines().filter(is_free) {
                    assert!(line.chars().count() <= width, "{topic}: {line}");
                }
            }
        }
    }
}
