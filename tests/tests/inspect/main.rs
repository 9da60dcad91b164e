//! Tracked and ended flows on the command line, compared with real connections.

mod delete;
mod flows;
mod history;
mod refused;
mod stats;

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{netns::Namespace, pair::Connection, running::Ended};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn names(connections: &[Connection]) -> BTreeSet<SocketAddr> {
    connections.iter().map(|it| it.name).collect()
}

/// The output of a successful command.
fn lines(namespace: &Namespace, args: &[&str]) -> Result<Vec<String>> {
    let ended = namespace.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{args:?}: {}", ended.stderr);
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

fn objects(namespace: &Namespace, args: &[&str]) -> Result<Vec<Value>> {
    lines(namespace, args)?
        .iter()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}")))
        .collect()
}

fn src(object: &Value) -> Result<SocketAddr> {
    end(object, "src", "sport")
}

fn end(object: &Value, address: &str, port: &str) -> Result<SocketAddr> {
    let text = object[address].as_str();
    let ip = text.with_context(|| format!("no {address}"))?.parse()?;
    let number = object[port].as_u64();
    let number = number.with_context(|| format!("no {port}"))?;
    Ok(SocketAddr::new(ip, u16::try_from(number)?))
}

fn sources(objects: &[Value]) -> Result<BTreeSet<SocketAddr>> {
    objects.iter().map(src).collect()
}

/// Checks that a command failed with this exit code and with one sentence.
#[track_caller]
fn refused(ended: &Ended, code: i32, part: &str) {
    assert_eq!(ended.code(), Some(code), "{}", ended.stderr);
    assert!(ended.stderr.contains(part), "{}", ended.stderr);
    assert!(ended.lines.is_empty(), "{:?}", ended.lines);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}
