//! `twheel list`

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::Result;
use bytesize::ByteSize;
use clap::Args;
use serde::Serialize;

use super::select::while_read;
use crate::{
    history, host,
    output::{
        json,
        table::{Column, Table},
    },
    patterns::Asked,
    pins::{self, FoundInstance, entries, unescape},
};

/// List all instances and histories of this host, in all network namespaces, running or not
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel list
  twheel list --json | jq 'select(.state == \"stopped\")'")]
pub struct List {
    /// Directory of the histories
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// An instance, or the history that one has left.
#[derive(Serialize)]
struct Listed {
    /// The instance's lasting name.
    name: String,
    /// The network namespace's.
    namespace: String,
    interfaces: Vec<String>,
    state: State,
    /// Its pins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pins: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<History>,
}

impl Listed {
    /// Its interfaces for people: of none, why.
    fn interfaces_told(&self) -> String {
        if !self.interfaces.is_empty() {
            return self.interfaces.join(",");
        }
        let (first, _) = self.name.split_once('@').unwrap_or((&self.name, ""));
        let first = unescape(first);
        match Asked::parse(&first).is_ok_and(|it| it.is_pattern()) {
            true => format!("none matches {first}"),
            false => format!("none: {first} is not attached"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// A `twheel run` uses it.
    Running,
    /// Its pins are there, and packets touch its flows; none expires.
    Stopped,
    /// It is pinned by another version of twheel.
    OtherVersion,
    /// There is only a history.
    Gone,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::OtherVersion => "other version",
            Self::Gone => "gone",
        }
    }
}

#[derive(Serialize)]
struct History {
    path: PathBuf,
    bytes: u64,
    /// When it was last written to.
    #[serde(skip)]
    written: Option<SystemTime>,
}

impl List {
    pub(super) fn execute(self) -> Result<()> {
        host::check_pins()?;
        let mut left = histories(&self.history)?;
        let mut listed: Vec<_> = pins::found()?
            .into_iter()
            .map(|found| instance(found, &mut left))
            .collect();
        listed.extend(left.into_iter().map(|(name, history)| Listed {
            namespace: namespace_of(&name).to_owned(),
            interfaces: history::interfaces_of(&history.path, &name),
            state: State::Gone,
            pins: None,
            history: Some(history),
            name,
        }));
        for it in &mut listed {
            it.interfaces.sort();
        }
        listed.sort_by(|one, other| {
            let key = |it: &Listed| (it.namespace.clone(), it.name.clone());
            key(one).cmp(&key(other))
        });
        while_read(|out| {
            if self.json {
                for it in &listed {
                    json::write_now("instance", it, out)?;
                }
                return Ok(());
            }
            print(&listed, out)
        })
    }
}

fn print(listed: &[Listed], out: &mut dyn Write) -> Result<()> {
    let headings = ["NAMESPACE", "INTERFACES", "STATE", "HISTORY"];
    let mut table = Table::new(headings.map(Column::text));
    for it in listed {
        let history = it.history.as_ref().map_or("none".to_owned(), |history| {
            let written = history.written.map_or(String::new(), |written| {
                format!(", written {}", humantime::format_rfc3339_seconds(written))
            });
            format!("{}{written}", ByteSize(history.bytes))
        });
        let cells = vec![
            it.namespace.clone(),
            it.interfaces_told(),
            it.state.name().to_owned(),
            history,
        ];
        table.row(cells, out)?;
    }
    Ok(table.end(out)?)
}

/// An instance, with its history, which is taken from those that are left.
fn instance(found: FoundInstance, left: &mut BTreeMap<String, History>) -> Listed {
    let name = pins::lasting_name(&found.path);
    Listed {
        namespace: namespace_of(&name).to_owned(),
        state: match (found.current, found.held) {
            (false, _) => State::OtherVersion,
            (true, true) => State::Running,
            (true, false) => State::Stopped,
        },
        pins: Some(found.path.clone()),
        interfaces: found.present_interfaces(),
        history: left.remove(&name),
        name,
    }
}

/// The network namespace in a lasting name.
fn namespace_of(name: &str) -> &str {
    name.split_once('@').map_or("", |(_, namespace)| namespace)
}

/// All histories, by name.
fn histories(directory: &Path) -> Result<BTreeMap<String, History>> {
    let mut found = BTreeMap::new();
    for path in entries(directory)? {
        let Some(name) = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
        else {
            continue;
        };
        if !path.is_dir() || !name.contains('@') {
            continue;
        }
        // Those of other users may be unreadable.
        let files = fs::read_dir(&path).into_iter().flatten().flatten();
        let files: Vec<_> = files.filter_map(|file| file.metadata().ok()).collect();
        let written = files.iter().filter_map(|file| file.modified().ok()).max();
        let bytes = files.iter().map(fs::Metadata::len).sum();
        found.insert(
            name,
            History {
                path,
                bytes,
                written,
            },
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_without_interfaces_says_what_it_waits_for() {
        let told = |name: &str, interfaces: &[&str]| {
            let listed = Listed {
                name: name.to_owned(),
                namespace: "host".to_owned(),
                interfaces: interfaces.iter().map(|it| (*it).to_owned()).collect(),
                state: State::Running,
                pins: None,
                history: None,
            };
            listed.interfaces_told()
        };
        assert_eq!(told("veth%2A@host", &["veth0", "veth1"]), "veth0,veth1");
        assert_eq!(told("veth%2A@host", &[]), "none matches veth*");
        assert_eq!(told("all@host", &[]), "none matches all");
        assert_eq!(told("eth0%2E7@host", &[]), "none: eth0.7 is not attached");
    }
}
