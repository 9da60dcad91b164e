//! TOML files that users write, and where in them an error is.

use std::{borrow::Cow, fmt, fs::File, io::Read, path::Path};

use anyhow::Result;
use caps::Capability;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    failure::{Failure, Kind},
    privilege::lacks,
};

/// Maximum size of a file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A value, and where it stands in the text.
pub type Value<'a> = Spanned<DeValue<'a>>;

/// A location in a file. Lines and columns count from 1; columns are characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl Location {
    /// That of a byte of a text.
    pub fn new(text: &str, at: usize) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Self {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// An error at a location in a file: [`Kind::Usage`], as `FILE:LINE:COLUMN: what`.
pub fn refuse(file: &str, place: Location, what: impl fmt::Display) -> anyhow::Error {
    Failure::new(Kind::Usage, format!("{file}:{place}: {what}")).into()
}

/// Reads a file. `kind`: what it should be, such as `policy file`.
///
/// # Errors
///
/// [`Kind::Usage`]: it cannot be read, or is too long.
pub fn read(path: &Path, kind: &str) -> Result<Vec<u8>> {
    let refuse = |what: String| Failure::new(Kind::Usage, format!("{}: {what}", path.display()));
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|opened| opened.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| {
            let why = lacks(&error, Capability::CAP_DAC_OVERRIDE);
            refuse(format!("cannot be read: {why}: give a {kind}"))
        })?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(refuse(format!("is longer than the {MAX_FILE} bytes allowed")).into());
    }
    Ok(bytes)
}

/// The text of a file. `kind`: what it should be, such as `policy`.
///
/// # Errors
///
/// [`Kind::Usage`], with the location: it is not UTF-8.
pub fn text<'a>(file: &str, bytes: &'a [u8], kind: &str) -> Result<&'a str> {
    str::from_utf8(bytes).map_err(|error| {
        let before = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
        let place = Location::new(&before, before.len());
        let what = format!("this byte is not UTF-8: a {kind} is TOML, which is UTF-8");
        refuse(file, place, what)
    })
}

/// Parses a file's text.
///
/// # Errors
///
/// [`Kind::Usage`], with the location: it is not TOML.
pub fn parse<'a>(file: &str, text: &'a str) -> Result<Spanned<DeTable<'a>>> {
    DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(text.len(), |span| span.start);
        let what = error.message().trim().replace('\n', ", ");
        refuse(file, Location::new(text, at), format!("not TOML: {what}"))
    })
}

/// The entries in the order of the file, so that the first error is the first in the file.
pub fn entries<'t, 'i>(table: &'t DeTable<'i>) -> Vec<(&'t Spanned<Cow<'i, str>>, &'t Value<'i>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// The type of a value, with its article: `a string`, `an array`.
pub fn type_of(value: &Value<'_>) -> String {
    let kind = value.get_ref().type_str();
    let article = match kind.starts_with(['a', 'i']) {
        true => "an",
        false => "a",
    };
    format!("{article} {kind}")
}

/// The text as the user gave it, but on one line and without control characters for a terminal.
pub fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug())
}
