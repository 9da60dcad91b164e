//! A fleet in ClickHouse: the schema, the filter as SQL, and the commands that ask.
//!
//! The engine is today's, in a process of its own (`twheel_tests::engine`). Each test has its own.

mod commands;
mod events;
mod filter;
mod hosts;
mod refused;
mod schema;

use anyhow::{Result, ensure};
use serde_json::Value;
use twheel_tests::{engine::Engine, running::once};

/// What a successful command prints. Lines of JSON are checked by their schema.
fn printed(engine: &Engine, args: &[&str]) -> Result<Vec<String>> {
    let ended = once(engine.twheel(args)?)?;
    ensure!(ended.code() == Some(0), "{args:?}: {}", ended.stderr);
    ensure!(ended.stderr.is_empty(), "{args:?}: {}", ended.stderr);
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// A field of an object: a text, or empty.
fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// A field of an object: a number, or the largest one.
fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(u64::MAX)
}
