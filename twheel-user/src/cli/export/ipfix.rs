//! `twheel export ipfix`

use std::{path::PathBuf, str::FromStr, time::Duration};

use anyhow::Result;
use clap::Args;

use super::Source;
use crate::{
    cli::select::interval,
    export::{
        ipfix::{Config, Ipfix, LEAST_MESSAGE},
        target::{Target, host_and_port},
        tls::Client,
    },
    failure::{Failure, Kind},
    given,
};

/// Send ended flows to an IPFIX collector
///
/// A flow gives a record for each direction that had packets, or one with reverse elements (`--biflow`). docs/ipfix.md
/// lists the elements. Over TCP and TLS each flow arrives at least once. Over UDP datagrams may get lost on the way.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export ipfix --to collector.example:4739
  twheel export ipfix --to collector.example:4739,tcp --biflow
  twheel export ipfix --to collector.example:4740,tls --ca ca.pem --cert host.pem --key host.key")]
pub(super) struct IpfixExport {
    /// The collector: HOST:PORT, and after a comma `udp` (default), `tcp` or `tls`
    #[arg(long, value_name = "COLLECTOR")]
    to: Collector,
    #[command(flatten)]
    source: Source,
    /// Send one record a flow, with reverse elements (RFC 5103), not one a direction
    #[arg(long)]
    biflow: bool,
    /// Observation domain [default: a hash of the history's name]
    #[arg(long, value_name = "NUMBER", value_parser = given::number(0..=u32::MAX), allow_hyphen_values = true)]
    domain: Option<u32>,
    /// Send private elements, too, under this private enterprise number: yours
    #[arg(long, value_name = "NUMBER", value_parser = given::number(1..=u32::MAX), allow_hyphen_values = true)]
    pen: Option<u32>,
    /// How often the exporter's statistics, and over UDP the templates, are sent again
    #[arg(long, value_name = "DURATION", value_parser = interval, default_value = "60s")]
    refresh: Duration,
    /// Most bytes of a message [default: 1400 over UDP, else 16384]
    #[arg(long, value_name = "BYTES", value_parser = given::number(LEAST_MESSAGE as u16..=65_000), allow_hyphen_values = true)]
    message_size: Option<u16>,
    /// PEM file with the authorities whose collectors are trusted, instead of the system's; only with `tls`
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file with the certificate that is shown to the collector; only with `tls`
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file with its key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

impl IpfixExport {
    pub(super) fn execute(self) -> Result<()> {
        let name = self.source.name()?;
        let Collector { address, transport } = self.to.clone();
        let has_files = self.ca.is_some() || self.cert.is_some();
        if has_files && transport != Transport::Tls {
            let message = format!("--ca, --cert and --key need TLS: give --to {address},tls");
            return Err(Failure::new(Kind::Usage, message).into());
        }
        let to = match transport {
            Transport::Udp => Target::Udp(address),
            Transport::Tcp => Target::Tcp(address),
            // Before this process gives up what lets it read the key.
            Transport::Tls => {
                let own = self.cert.as_ref().zip(self.key.as_ref());
                let client = Client::new(self.ca.as_deref(), own)?;
                client.check_trust()?;
                Target::Tls(address, client)
            }
        };
        let is_connection = transport != Transport::Udp;
        let most = self
            .message_size
            .unwrap_or(if is_connection { 16 << 10 } else { 1400 });
        let config = Config {
            // 0 means that there is no such domain (RFC 7011, section 3.1).
            domain: self
                .domain
                .unwrap_or_else(|| crc32fast::hash(name.as_bytes()).max(1)),
            name: name.clone(),
            pen: self.pen,
            biflow: self.biflow,
            most: most.into(),
        };
        let mut ipfix = Ipfix::new(config, is_connection, self.refresh);
        self.source.send(&name, &to, "ipfix", &mut ipfix)
    }
}

/// A collector, as an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Collector {
    /// A host and a port.
    address: String,
    transport: Transport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Udp,
    Tcp,
    Tls,
}

impl FromStr for Collector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, transport) = match text.split_once(',') {
            None | Some((_, "udp")) => (text.trim_end_matches(",udp"), Transport::Udp),
            Some((address, "tcp")) => (address, Transport::Tcp),
            Some((address, "tls")) => (address, Transport::Tls),
            Some((address, other)) => {
                return Err(format!(
                    "{other} is no transport: give {address},udp, {address},tcp or {address},tls"
                ));
            }
        };
        Ok(Self {
            address: host_and_port(address, "collector.example:4739")?,
            transport,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_a_host_a_port_and_a_transport() {
        for (text, address, transport) in [
            ("flows.example:4739", "flows.example:4739", Transport::Udp),
            ("10.0.0.1:4739,udp", "10.0.0.1:4739", Transport::Udp),
            ("[::1]:4739,tcp", "[::1]:4739", Transport::Tcp),
            ("a:4740,tls", "a:4740", Transport::Tls),
        ] {
            let address = address.to_owned();
            assert_eq!(text.parse(), Ok(Collector { address, transport }));
        }
        for (text, said) in [
            ("", "a host and a port"),
            ("host", "a host and a port"),
            (":4739", "a host and a port"),
            ("host:", "a host and a port"),
            ("host:0", "a host and a port"),
            ("host:65536,tcp", "a host and a port"),
            ("host:4739,sctp", "host:4739,udp"),
            ("host:4739,", "is no transport"),
            ("::1:4739", "in brackets"),
        ] {
            let error = text.parse::<Collector>().unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
