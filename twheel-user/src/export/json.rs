//! Events as lines of JSON.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io,
};

use serde::Serialize;

use super::{Alive, Format};
use crate::{
    history::Past,
    model::EventKind,
    output::json::{self, Json},
};

/// Events of some kinds, as `twheel run --json` prints them.
pub struct Lines {
    kinds: Vec<EventKind>,
    /// The random name of this process, in its own lines; `None` if it writes none.
    exporter: Option<String>,
}

/// What an `export` event says.
#[derive(Serialize)]
struct Exporting<'a> {
    exporter: &'a str,
    behind_us: u64,
    not_sent: u64,
}

/// How each `export` event begins.
pub const ALIVE: &[u8] = br#"{"schema":1,"event":"export","#;

impl Lines {
    /// Events of these kinds.
    pub fn new(kinds: Vec<EventKind>) -> Self {
        Self {
            kinds,
            exporter: None,
        }
    }

    /// Events of these kinds, and `export` events, which say that this process is alive.
    pub fn with_own(kinds: Vec<EventKind>) -> Self {
        // The keys of a hasher are random, and differ between processes.
        let number = RandomState::new().build_hasher().finish();
        Self {
            kinds,
            exporter: Some(format!("{number:016x}")),
        }
    }
}

impl Format for Lines {
    fn begin(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn event(&mut self, past: &Past, to: &mut Vec<u8>) -> io::Result<()> {
        if !self.kinds.contains(&past.kind()) {
            return Ok(());
        }
        let identity = past.identity.clone();
        past.write(&mut Json::new(identity), to)
    }

    fn alive(&mut self, alive: &Alive, to: &mut Vec<u8>) -> io::Result<()> {
        let Some(exporter) = &self.exporter else {
            return Ok(());
        };
        let body = Exporting {
            exporter,
            behind_us: json::micros(alive.behind),
            not_sent: alive.not_sent,
        };
        json::write_found("export", &alive.identity, body, to)
    }

    fn complete(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a> {
        Box::new(bytes.split_inclusive(|byte| *byte == b'\n'))
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::identity::Identity;

    #[test]
    fn an_export_tells_of_itself_if_asked_to() {
        let alive = Alive {
            identity: Arc::new(Identity {
                host: "gw1".to_owned(),
                instance: "eth0@host.5".to_owned(),
                seed: 0,
            }),
            behind: Duration::from_micros(17),
            not_sent: 3,
        };
        let mut text = Vec::new();
        Lines::new(Vec::new()).alive(&alive, &mut text).unwrap();
        assert!(text.is_empty());
        Lines::with_own(Vec::new())
            .alive(&alive, &mut text)
            .unwrap();
        assert!(
            text.starts_with(ALIVE),
            "{}",
            String::from_utf8_lossy(&text)
        );
        let line: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(line["host"], "gw1");
        assert_eq!(line["instance"], "eth0@host.5");
        assert_eq!(line["exporter"].as_str().unwrap().len(), 16);
        assert_eq!(
            (&line["behind_us"], &line["not_sent"]),
            (&17.into(), &3.into())
        );
    }
}
