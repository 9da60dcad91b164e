//! The text of a configuration file.

use std::path::Path;

use anyhow::Result;
use clap::{
    Arg, ArgAction, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use toml::de::DeValue;

use crate::toml_file::{self, Location, Value, entries, quoted, refuse, type_of};

/// A file, read and checked.
pub(super) struct File {
    /// What it sets, in its order.
    pub options: Vec<Set>,
}

/// An option that is set.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Set {
    /// Its long name, without dashes.
    pub name: String,
    /// The arguments that set it; none for a switch that stays off.
    pub arguments: Vec<String>,
}

impl File {
    /// Reads a file with options of this command.
    pub fn read(path: &Path, command: &Command) -> Result<Self> {
        let bytes = toml_file::read(path, "configuration file")?;
        Self::parse(&path.display().to_string(), &bytes, command)
    }

    /// Reads the text of a file; `file` is its name in errors.
    pub fn parse(file: &str, bytes: &[u8], command: &Command) -> Result<Self> {
        let text = toml_file::text(file, bytes, "configuration file")?;
        let parser = Parser {
            file,
            text,
            command,
        };
        parser.parse()
    }
}

struct Parser<'a> {
    file: &'a str,
    text: &'a str,
    command: &'a Command,
}

impl Parser<'_> {
    fn parse(&self) -> Result<File> {
        let document = toml_file::parse(self.file, self.text)?;
        let mut options = Vec::new();
        for (key, value) in entries(document.get_ref()) {
            let name = key.get_ref().as_ref();
            let Some(arg) = option(self.command, name) else {
                return Err(self.error(key.span().start, &self.unknown(name)));
            };
            options.push(Set {
                name: name.to_owned(),
                arguments: self.arguments(name, arg, value)?,
            });
        }
        Ok(File { options })
    }

    fn arguments(&self, name: &str, arg: &Arg, value: &Value<'_>) -> Result<Vec<String>> {
        if let ArgAction::SetTrue = arg.get_action() {
            return match value.get_ref() {
                DeValue::Boolean(true) => Ok(vec![format!("--{name}")]),
                DeValue::Boolean(false) => Ok(Vec::new()),
                _ => Err(self.wrong_type(name, value, "write true or false")),
            };
        }
        let repeats = matches!(arg.get_action(), ArgAction::Append);
        let items: Vec<&Value<'_>> = match value.get_ref() {
            DeValue::Array(items) if repeats && items.is_empty() => {
                let what = format!("{name} is an empty array: fill it, or remove the line");
                return Err(self.error(value.span().start, &what));
            }
            DeValue::Array(items) if repeats => items.iter().collect(),
            _ => vec![value],
        };
        let mut arguments = Vec::new();
        for item in items {
            let text = match item.get_ref() {
                DeValue::String(text) => text.to_string(),
                DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
                _ => {
                    let allowed = match repeats {
                        true => "write a string, or an array of strings",
                        false => "write a string, or a decimal number",
                    };
                    return Err(self.wrong_type(name, item, &with_example(name, arg, allowed)));
                }
            };
            let argument = format!("--{name}={text}");
            // Alone, so that an error is known to be this one's.
            let line = ["--config=none", &argument];
            if let Err(error) = self.command.clone().try_get_matches_from(line) {
                let what = format!("{name} = {}: {}", quoted(&text), why(&error));
                return Err(self.error(item.span().start, &what));
            }
            arguments.push(argument);
        }
        Ok(arguments)
    }

    fn unknown(&self, name: &str) -> String {
        let line = ["--config=none".to_owned(), format!("--{name}")];
        let error = self.command.clone().try_get_matches_from(line).err();
        let similar = error.and_then(|it| match it.get(ContextKind::SuggestedArg)? {
            ContextValue::String(name) => Some(name.trim_start_matches('-').to_owned()),
            _ => None,
        });
        let known = |name: &String| option(self.command, name).is_some();
        let similar = Some(name.replace('_', "-")).filter(known).or(similar);
        let remedy = match similar.filter(known) {
            Some(similar) => format!("write {similar}"),
            None => "`twheel config example` prints all options".to_owned(),
        };
        format!("unknown option {}: {remedy}", quoted(name))
    }

    fn wrong_type(&self, name: &str, value: &Value<'_>, allowed: &str) -> anyhow::Error {
        let what = format!("{name} is {}: {allowed}", type_of(value));
        self.error(value.span().start, &what)
    }

    fn error(&self, at: usize, what: &str) -> anyhow::Error {
        refuse(self.file, Location::new(self.text, at), what)
    }
}

/// The option of this long name, if files may set it.
pub(super) fn option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    options(command).find(|arg| arg.get_long() == Some(name))
}

/// The options that files may set.
pub(super) fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    command
        .get_arguments()
        .filter(|arg| !["config", "help", "version"].contains(&arg.get_id().as_str()))
}

fn with_example(name: &str, arg: &Arg, allowed: &str) -> String {
    match super::example::value(name, arg) {
        Some(value) => format!("{allowed}, such as {name} = {value}"),
        None => allowed.to_owned(),
    }
}

/// Why an option's value is refused, and what to write instead.
fn why(error: &clap::Error) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::Strings(values)) => Some(values.join(", ")),
        _ => None,
    };
    match (error.kind(), std::error::Error::source(error)) {
        (ErrorKind::ValueValidation, Some(why)) => why.to_string(),
        (ErrorKind::InvalidValue, _) => match context(ContextKind::ValidValue) {
            Some(values) => format!("write one of {values}"),
            None => "write a value".to_owned(),
        },
        _ => said(error),
    }
}

/// What clap says of an error, on one line.
pub(super) fn said(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    let text = text.split("\n\nFor more").next().unwrap_or(text);
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    lines.join(" ").trim().to_owned()
}
