//! `twheel export syslog`

use anyhow::Result;
use clap::Args;

use super::{Kinds, Source};
use crate::export::{
    syslog::Syslog,
    target::{Target, host_and_port},
};

/// Send events to a syslog daemon
///
/// Each event is a message as in RFC 5424, whose text is the line of JSON. Over TCP each event arrives at least once: after
/// a connection has ended, up to 8 MiB that the other end may not have read are sent again. Over UDP messages may get lost
/// on the way.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export syslog --to unix:/dev/log
  twheel export syslog --to tcp:logs.example:601 --events end,reap
  twheel export syslog --to udp:logs.example:514")]
pub(super) struct SyslogExport {
    /// The daemon: unix:PATH, tcp:HOST:PORT or udp:HOST:PORT
    #[arg(long, value_name = "TARGET", value_parser = target)]
    to: Target,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    kinds: Kinds,
}

impl SyslogExport {
    pub(super) fn execute(self) -> Result<()> {
        let name = self.source.name()?;
        let mut messages = Syslog::new(self.kinds.events);
        self.source.send(&name, &self.to, "syslog", &mut messages)
    }
}

fn target(text: &str) -> Result<Target, String> {
    match text.split_once(':') {
        Some(("unix", path)) if !path.is_empty() => Ok(Target::Log(path.into())),
        Some(("tcp", address)) => host_and_port(address, "tcp:logs.example:601").map(Target::Tcp),
        Some(("udp", address)) => host_and_port(address, "udp:logs.example:514").map(Target::Udp),
        _ => Err("give unix:PATH, tcp:HOST:PORT or udp:HOST:PORT".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_a_path_or_a_host_and_a_port() {
        for (text, is) in [
            ("unix:/dev/log", Target::Log("/dev/log".into())),
            ("tcp:[::1]:601", Target::Tcp("[::1]:601".to_owned())),
            ("udp:a:514", Target::Udp("a:514".to_owned())),
        ] {
            assert_eq!(target(text), Ok(is.clone()));
            assert_eq!(is.to_string(), text);
        }
        for (text, said) in [
            ("", "give unix:PATH"),
            ("unix:", "give unix:PATH"),
            ("/dev/log", "give unix:PATH"),
            ("tls:a:6514", "give unix:PATH"),
            ("tcp:a", "as in tcp:logs.example:601"),
            ("udp:a:0", "as in udp:logs.example:514"),
            ("udp:::1:514", "in brackets"),
        ] {
            let error = target(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
