//! `twheel fleet schema`

use std::time::Duration;

use anyhow::Result;
use clap::{Args, builder::NonEmptyStringValueParser};

use crate::{
    cli::{
        export::kafka::{broker, topic},
        select::while_read,
    },
    fleet::schema::{LONGEST, Schema, Topic},
    given,
};

/// Print the SQL that sets up the tables in ClickHouse, or brings them to the present version
///
/// It can be run on an empty server, on a database of any earlier version, and again. No data are removed, except by --keep:
/// what is older than that. The command talks to no server.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet schema | clickhouse-client --multiquery
  twheel fleet schema --keep 30d --cluster all | clickhouse-client --multiquery
  twheel fleet schema --kafka-brokers kafka1:9092,kafka2:9092 --kafka-topic twheel | clickhouse-client --multiquery")]
pub(super) struct SchemaCommand {
    /// Database that the tables are in
    #[arg(long, value_name = "NAME", default_value = "twheel", value_parser = NonEmptyStringValueParser::new())]
    database: String,
    /// How long events are kept, in whole days. Without it, tables that exist keep their time, and new ones get 90 days
    #[arg(long, value_name = "DURATION", value_parser = days)]
    keep: Option<u32>,
    /// Cluster of servers, as their configuration names it: replicated tables on every server, and tables over all shards
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    cluster: Option<String>,
    /// Kafka's brokers, HOST:PORT with commas: ClickHouse reads the topic by itself
    #[arg(long, value_name = "BROKERS", requires = "kafka_topic", value_delimiter = ',', value_parser = broker)]
    kafka_brokers: Vec<String>,
    /// Topic that the exporters send to
    #[arg(long, value_name = "TOPIC", requires = "kafka_brokers", value_parser = topic)]
    kafka_topic: Option<String>,
    /// Consumer group of the ClickHouse servers
    #[arg(long, value_name = "GROUP", requires = "kafka_brokers", default_value = "clickhouse-twheel", value_parser = NonEmptyStringValueParser::new())]
    kafka_group: String,
}

impl SchemaCommand {
    pub(super) fn execute(self) -> Result<()> {
        let schema = Schema {
            database: self.database,
            keep: self.keep,
            cluster: self.cluster,
            topic: self.kafka_topic.map(|name| Topic {
                brokers: self.kafka_brokers.join(","),
                name,
                group: self.kafka_group,
            }),
        };
        while_read(|out| Ok(out.write_all(schema.script().as_bytes())?))
    }
}

/// Parses a number of whole days.
fn days(text: &str) -> Result<u32, String> {
    const DAY: u64 = 86_400;
    let duration = given::duration(text)?;
    let days = u32::try_from(duration.as_secs() / DAY).unwrap_or(u32::MAX);
    let whole = Duration::from_secs(u64::from(days) * DAY);
    match whole == duration && (1..=LONGEST).contains(&days) {
        true => Ok(days),
        false => Err(format!("give 1 to {LONGEST} whole days, such as 90d")),
    }
}

#[cfg(test)]
mod tests {
    use super::days;

    #[test]
    fn only_whole_days_are_taken() {
        assert_eq!(days("90d"), Ok(90));
        assert_eq!(days("48h"), Ok(2));
        assert_eq!(days("3650d"), Ok(3_650));
        for text in ["0d", "3651d", "12h", "90", "1d1s", "", "9999999999y"] {
            days(text).unwrap_err();
        }
    }
}
