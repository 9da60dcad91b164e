//! `twheel export kafka`

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::{Kinds, Source};
use crate::export::target::host_and_port;

/// Send events to a topic of Kafka
///
/// Each event is a message, the line of JSON, whose key is `flow_id`. It arrives at least once: idempotent, and acknowledged by
/// all replicas in sync. Those that come twice, after this process was killed, are told by `host`, `instance` and `seq`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export kafka --brokers kafka1.example:9092,kafka2.example:9092 --topic twheel
  twheel export kafka --brokers kafka1.example:9093 --topic twheel --tls --ca ca.pem
      --sasl-mechanism scram-sha-512 --user twheel --password-file /etc/twheel/password")]
pub(super) struct KafkaExport {
    /// Some of the brokers: HOST:PORT, a list
    #[arg(long, value_name = "BROKERS", value_delimiter = ',', required = true, value_parser = broker)]
    brokers: Vec<String>,
    /// Topic, which must exist
    #[arg(long, value_name = "TOPIC", value_parser = topic)]
    topic: String,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    kinds: Kinds,
    /// Compression of batches
    #[arg(long, value_name = "NAME", default_value = "zstd")]
    compression: Compression,
    /// Use TLS
    #[arg(long)]
    tls: bool,
    /// PEM file with the authorities whose brokers are trusted, instead of the system's
    #[arg(long, value_name = "FILE", requires = "tls")]
    ca: Option<PathBuf>,
    /// PEM file with the certificate that is shown to the brokers
    #[arg(long, value_name = "FILE", requires = "key", requires = "tls")]
    cert: Option<PathBuf>,
    /// PEM file with its key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// Log in with SASL
    #[arg(
        long,
        value_name = "NAME",
        requires = "user",
        requires = "password_file"
    )]
    sasl_mechanism: Option<Mechanism>,
    /// User of the brokers
    #[arg(long, value_name = "NAME", requires = "sasl_mechanism")]
    user: Option<String>,
    /// File with the user's password, in its first line
    #[arg(long, value_name = "FILE", requires = "sasl_mechanism")]
    password_file: Option<PathBuf>,
    /// Another setting of librdkafka, such as linger.ms=5; can be given several times
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Compression {
    None,
    Lz4,
    Zstd,
    Snappy,
    Gzip,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mechanism {
    Plain,
    #[value(name = "scram-sha-256")]
    ScramSha256,
    #[value(name = "scram-sha-512")]
    ScramSha512,
}

/// The address of a broker.
pub(in crate::cli) fn broker(text: &str) -> Result<String, String> {
    host_and_port(text, "kafka1.example:9092")
}

/// The name of a topic, as brokers take them.
pub(in crate::cli) fn topic(text: &str) -> Result<String, String> {
    let is_good = |it: u8| it.is_ascii_alphanumeric() || b"._-".contains(&it);
    if (1..=249).contains(&text.len()) && text.bytes().all(is_good) && text != "." && text != ".." {
        return Ok(text.to_owned());
    }
    Err(
        "give 1 to 249 characters, each a letter from A to Z or a to z, a digit, or one of . _ -; \
         not `.` or `..`"
            .to_owned(),
    )
}

fn setting(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("give NAME=VALUE, as in linger.ms=5".to_owned()),
    }
}

impl KafkaExport {
    #[cfg(not(feature = "kafka"))]
    pub(super) fn execute(self) -> Result<()> {
        use crate::failure::{Failure, Kind};
        Err(Failure::new(
            Kind::Unsupported,
            "this twheel was built without Kafka: install a package of it, or build it with \
             `cargo build --release -p twheel-user --features kafka`",
        )
        .into())
    }

    #[cfg(feature = "kafka")]
    pub(super) fn execute(self) -> Result<()> {
        use crate::{
            cli::clickhouse::password,
            export::{
                json::Lines,
                kafka::{Sasl, Settings, Tls, Topic},
            },
        };

        let name = self.source.name()?;
        // Before this process gives up what lets it read the files.
        let sasl = match (self.sasl_mechanism, &self.user, &self.password_file) {
            (Some(mechanism), Some(user), Some(file)) => Some(Sasl {
                mechanism: match mechanism {
                    Mechanism::Plain => "PLAIN",
                    Mechanism::ScramSha256 => "SCRAM-SHA-256",
                    Mechanism::ScramSha512 => "SCRAM-SHA-512",
                },
                user: user.clone(),
                password: password(file)?,
            }),
            _ => None,
        };
        let to = Topic::new(Settings {
            brokers: self.brokers,
            topic: self.topic,
            compression: match self.compression {
                Compression::None => "none",
                Compression::Lz4 => "lz4",
                Compression::Zstd => "zstd",
                Compression::Snappy => "snappy",
                Compression::Gzip => "gzip",
            },
            tls: self.tls.then(|| Tls {
                ca: self.ca,
                own: self.cert.zip(self.key),
            }),
            sasl,
            others: self.settings,
        })?;
        let mut lines = Lines::with_own(self.kinds.events);
        self.source.send(&name, &to, "kafka", &mut lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_has_a_name_and_a_value() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(setting("linger.ms=5"), pair("linger.ms", "5"));
        assert_eq!(setting("a=b=c"), pair("a", "b=c"));
        assert_eq!(setting("a="), pair("a", ""));
        for text in ["", "linger.ms", "=5"] {
            setting(text).unwrap_err();
        }
    }

    #[test]
    fn a_topic_has_a_name_that_brokers_take() {
        for name in ["twheel", "a.b_c-9", "...", &"x".repeat(249)] {
            assert_eq!(topic(name).unwrap(), name);
        }
        for name in ["", ".", "..", "a b", "a/b", "é", "a\n", &"x".repeat(250)] {
            let error = topic(name).unwrap_err();
            assert!(error.contains("1 to 249 characters"), "{name}: {error}");
        }
    }
}
