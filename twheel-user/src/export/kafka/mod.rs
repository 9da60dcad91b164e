//! A topic of Kafka, as a destination: librdkafka's idempotent producer. What is not acknowledged is
//! in its queue, which is bounded; the position in the history is behind what all replicas have
//! acknowledged.
//!
//! | question | file |
//! |---|---|
//! | how to reach the brokers, and whether the topic is there | `mod.rs` |
//! | sending, and what was acknowledged | `producer.rs` |
//! | what went wrong, in a sentence | `fault.rs` |

mod fault;
mod producer;

use std::{
    ffi::OsString,
    fmt, fs, io,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rdkafka::{
    ClientConfig,
    error::KafkaError,
    producer::{BaseProducer, Producer},
};

use self::{
    fault::Named,
    producer::{Producing, Reports},
};
use super::{Destination, Sink};
use crate::{
    failure::{Failure, Kind},
    history::Position,
};

/// How long the brokers may take to tell about the topic.
const CONNECT: Duration = Duration::from_secs(10);
/// How often to look meanwhile whether they refuse us.
const LOOK: Duration = Duration::from_millis(500);

/// Settings of librdkafka on which it depends that nothing gets lost and that its queue is bounded, and
/// those that have options of their own, each with its other names: `--set` cannot change them.
const OURS: [&str; 20] = [
    "bootstrap.servers",
    "metadata.broker.list",
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "retries",
    "message.send.max.retries",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "delivery.report.only.error",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "enable.gapless.guarantee",
    "allow.auto.create.topics",
    "transactional.id",
    "compression.type",
    "compression.codec",
    // Brokers of its own, which keep nothing.
    "test.mock.num.brokers",
];
/// What the names of settings with a secret contain: all users of the host see a command line.
const SECRET: [&str; 6] = [
    "password",
    "passphrase",
    "secret",
    "key.pem",
    "ssl_key",
    "oauthbearer.config",
];

/// Which brokers and which topic, and how to reach them.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `HOST:PORT` of some of the brokers.
    pub brokers: Vec<String>,
    /// The topic.
    pub topic: String,
    /// librdkafka's name of the compression.
    pub compression: &'static str,
    /// TLS, if it is used.
    pub tls: Option<Tls>,
    /// SASL, if it is used.
    pub sasl: Option<Sasl>,
    /// Other settings of librdkafka, by name.
    pub others: Vec<(String, String)>,
}

/// Whom we trust, and who we are.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// A PEM file with the certificates that are trusted, instead of the system's.
    pub ca: Option<PathBuf>,
    /// PEM files with the client's certificate and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// A user of the brokers.
#[derive(Clone, Debug)]
pub struct Sasl {
    /// librdkafka's name of the mechanism.
    pub mechanism: &'static str,
    /// The user.
    pub user: String,
    /// The password.
    pub password: String,
}

/// A topic, and how to reach it.
pub struct Topic {
    settings: Settings,
    config: ClientConfig,
}

impl Topic {
    /// Prepares to send to this topic. Reads the certificates.
    ///
    /// # Errors
    ///
    /// Of [`Kind::Usage`]: librdkafka does not have such a setting, or not with this value or with the
    /// others; or it is one that `--set` cannot change, or a secret. Or a file cannot be read.
    pub fn new(settings: Settings) -> Result<Self> {
        let mut config = ClientConfig::new();
        let protocol = match (&settings.tls, &settings.sasl) {
            (None, None) => "plaintext",
            (Some(_), None) => "ssl",
            (None, Some(_)) => "sasl_plaintext",
            (Some(_), Some(_)) => "sasl_ssl",
        };
        for (name, value) in [
            ("security.protocol", protocol),
            ("compression.type", settings.compression),
            // Each message once and in order, while this process lives; never given up.
            ("enable.idempotence", "true"),
            ("acks", "all"),
            ("message.timeout.ms", "0"),
            ("allow.auto.create.topics", "false"),
            // As Java's clients do it.
            ("partitioner", "murmur2_random"),
            ("queue.buffering.max.kbytes", "32768"),
            // Larger batches, which are compressed better.
            ("linger.ms", "50"),
            // A broker that comes back is not kept waiting.
            ("reconnect.backoff.max.ms", "2000"),
            ("client.id", "twheel"),
        ] {
            config.set(name, value);
        }
        config.set("bootstrap.servers", settings.brokers.join(","));
        if let Some(sasl) = &settings.sasl {
            config.set("sasl.mechanism", sasl.mechanism);
            config.set("sasl.username", &sasl.user);
            config.set("sasl.password", &sasl.password);
        }
        if let Some(tls) = &settings.tls {
            match &tls.ca {
                Some(ca) => config.set("ssl.ca.pem", read(ca)?),
                // Where distributions have the system's: OpenSSL in a static program knows none of
                // these places.
                None => config.set("ssl.ca.location", "probe"),
            };
            if let Some((certificate, key)) = &tls.own {
                config.set("ssl.certificate.pem", read(certificate)?);
                config.set("ssl.key.pem", read(key)?);
            }
        }
        for (name, value) in &settings.others {
            if OURS.contains(&name.as_str()) {
                let message = format!("--set {name}: twheel sets this itself; leave it out");
                return Err(Failure::new(Kind::Usage, message).into());
            }
            if SECRET.iter().any(|secret| name.contains(secret)) {
                let message = format!(
                    "--set {name}: a secret on the command line can be seen by all users of this host: \
                     give --password-file, or --key with a key that has no password"
                );
                return Err(Failure::new(Kind::Usage, message).into());
            }
            config.set(name, value);
        }
        if let Err(error) = config.create_native_config() {
            let message = match error {
                KafkaError::ClientConfig(_, why, name, _) => {
                    format!("librdkafka does not take the setting {name}: {why}")
                }
                error => format!("librdkafka does not take these settings: {error}"),
            };
            return Err(Failure::new(Kind::Usage, message).into());
        }
        let topic = Self { settings, config };
        // Some settings are refused only together, or when they are used.
        let producer = topic.producer();
        producer.map_err(|error| Failure::new(Kind::Usage, error.to_string()))?;
        Ok(topic)
    }

    /// A producer, which has not asked for the topic yet.
    fn producer(&self) -> io::Result<BaseProducer<Reports>> {
        let producer = self.config.create_with_context(Reports::default());
        producer.map_err(|error| self.named().unusable(&error))
    }

    /// The names for messages.
    fn named(&self) -> Named {
        Named {
            brokers: self.settings.brokers.join(","),
            topic: self.settings.topic.clone(),
            user: self.settings.sasl.as_ref().map(|sasl| sasl.user.clone()),
        }
    }

    /// Asks the brokers for the topic. It is not created.
    fn find(&self, producer: &BaseProducer<Reports>) -> io::Result<()> {
        let named = self.named();
        let end = Instant::now() + CONNECT;
        loop {
            let asked = producer
                .client()
                .fetch_metadata(Some(&self.settings.topic), LOOK);
            // Errors of connections come as events.
            for _ in 0..10 {
                producer.poll(Duration::ZERO);
            }
            let (code, said) = match asked {
                Ok(metadata) => {
                    let topic = metadata.topics().first();
                    match topic.and_then(|topic| topic.error()) {
                        None if topic.is_some_and(|it| !it.partitions().is_empty()) => {
                            return Ok(());
                        }
                        None => return Err(named.no_topic()),
                        Some(code) => (code.into(), String::new()),
                    }
                }
                Err(KafkaError::MetadataFetch(code)) => {
                    match producer.context().take_reason() {
                        // The brokers have answered, or refuse us: it is no use to wait.
                        Some((code, said)) => (code, said),
                        None if Instant::now() < end => continue,
                        None => (code, String::new()),
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            };
            return Err(named.fault(code, &said));
        }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { brokers, topic, .. } = &self.settings;
        write!(f, "kafka:{}/{topic}", brokers.join(","))
    }
}

impl Destination for Topic {
    fn open(&self, from: Position) -> io::Result<Box<dyn Sink>> {
        let producer = self.producer()?;
        self.find(&producer)?;
        Ok(Box::new(Producing::new(producer, self.named(), from)))
    }

    fn lasting_name(&self) -> io::Result<OsString> {
        let mut brokers = self.settings.brokers.clone();
        brokers.sort();
        Ok(format!("kafka:{}/{}", brokers.join(","), self.settings.topic).into())
    }

    fn complaint(&self, error: &io::Error) -> String {
        // It names the brokers.
        error.to_string()
    }
}

fn read(path: &PathBuf) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(others: &[(&str, &str)]) -> Result<Topic> {
        let others = others
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Topic::new(Settings {
            brokers: vec!["b:9092".to_owned(), "a:9092".to_owned()],
            topic: "t".to_owned(),
            compression: "zstd",
            others: others.collect(),
            ..Settings::default()
        })
    }

    #[test]
    fn what_librdkafka_does_not_have_is_refused() {
        let topic = with(&[("batch.size", "65536")]).unwrap();
        assert_eq!(topic.to_string(), "kafka:b:9092,a:9092/t");
        assert_eq!(topic.lasting_name().unwrap(), "kafka:a:9092,b:9092/t");
        for (name, value, said) in [
            ("no.such", "1", "does not take the setting no.such"),
            ("batch.size", "many", "does not take the setting batch.size"),
            ("acks", "1", "twheel sets this itself"),
            ("enable.idempotence", "false", "twheel sets this itself"),
            ("compression.codec", "none", "twheel sets this itself"),
            ("retries", "0", "twheel sets this itself"),
            ("max.in.flight", "9", "twheel sets this itself"),
            (
                "delivery.report.only.error",
                "true",
                "twheel sets this itself",
            ),
            (
                "queue.buffering.max.kbytes",
                "9999999",
                "twheel sets this itself",
            ),
            ("sasl.password", "p", "--password-file"),
            ("ssl.key.password", "p", "--password-file"),
            ("sasl.oauthbearer.client.secret", "p", "--password-file"),
            // What is refused when a producer is made.
            ("security.protocol", "ssl", "check --ca"),
        ] {
            let others: &[_] = match name {
                "security.protocol" => &[(name, value), ("ssl.ca.location", "/nothing")],
                _ => &[(name, value)],
            };
            let error = with(others).err().unwrap();
            assert_eq!(crate::failure::exit_code(&error), Kind::Usage as u8);
            let error = error.to_string();
            assert!(error.contains(said), "{name}: {error}");
        }
    }
}
