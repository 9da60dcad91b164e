//! The SQL that sets up a database for a fleet, or migrates it from any earlier version.
//!
//! It is printed as a script for `clickhouse-client`. Tables that hold data are created if they do
//! not exist, and get the columns that they lack; views are given their present query, without a
//! moment in which they are missing. So running it again changes nothing.

use super::columns::{Column, ENDS, EVENTS, EXPORTS, INSERTED, REFUSED, SEQS};

/// The version of the schema that this twheel sets up and reads. It grows with each change of it.
pub const VERSION: u32 = 2;

/// The longest time that events can be kept, in days. (`DateTime` ends in 2106.)
pub const LONGEST: u32 = 3_650;

/// How long events are kept if nobody has said it, in days.
pub const KEEP: u32 = 90;

/// A topic of Kafka that ClickHouse reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// The brokers, `HOST:PORT` with commas.
    pub brokers: String,
    /// The topic's name.
    pub name: String,
    /// The consumer group in which ClickHouse reads.
    pub group: String,
}

/// What to set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    /// The database.
    pub database: String,
    /// How long events are kept, in days. `None`: tables that exist keep their time, and new ones get
    /// [`KEEP`].
    pub keep: Option<u32>,
    /// The cluster, as the servers' configuration names it; `None`: one server.
    pub cluster: Option<String>,
    /// The topic that is read; `None`: exporters insert by themselves.
    pub topic: Option<Topic>,
}

/// A table that holds data.
struct Table {
    name: &'static str,
    columns: Vec<Column>,
    /// What its engine does with rows of the same key, before `MergeTree`.
    family: &'static str,
    arguments: &'static str,
    index: &'static str,
    partition: &'static str,
    key: &'static str,
    /// The expression of the time after which a row is kept for as long as asked for.
    age: &'static str,
}

/// Rows of the same event, host and instance are on one shard, where duplicates are found.
const SHARD: &str = "cityHash64(host, instance)";
/// The same of rows that have none: of lines that are no events.
const SHARD_OF_REFUSED: &str = "cityHash64(topic, partition, offset)";

/// How all tables with data remove what is older than asked for: the rows themselves, at most once
/// a day, since that writes the rest of a part anew. Parts of which all rows are that old are just
/// dropped. A change of the time is no reason to write anything anew.
const SETTINGS: &str = "merge_with_ttl_timeout = 86400, materialize_ttl_recalculate_only = 1";

/// A row that is inserted again may be in a block of which all rows are known. It must reach the
/// views all the same, as the insert before may have ended between the table and a view. The engine
/// and the bitmaps deal with rows that come twice.
const EACH_BLOCK: &str = ", replicated_deduplication_window = 0";

/// The tables are partitioned by quarter. ClickHouse refuses an insert, and stops to read a topic,
/// if a block has rows of more than 100 partitions. A quiet host's history, which may be sent as one
/// block, may span years: 100 quarters are 25 years, more than twice [`LONGEST`]; 100 months would
/// be less than that.
fn tables() -> Vec<Table> {
    let with = |columns: &[Column], more: Column| columns.iter().copied().chain([more]).collect();
    vec![
        Table {
            name: "events",
            columns: with(EVENTS, INSERTED),
            family: "Replacing",
            arguments: "inserted",
            index: "INDEX by_time time TYPE minmax GRANULARITY 1",
            partition: "toStartOfQuarter(time)",
            key: "host, instance, seq",
            age: "toDateTime(time)",
        },
        Table {
            name: "exports",
            columns: with(EXPORTS, INSERTED),
            family: "Replacing",
            arguments: "inserted",
            index: "",
            partition: "toStartOfQuarter(time)",
            key: "host, instance, exporter, time",
            age: "toDateTime(time)",
        },
        Table {
            name: "refused",
            columns: REFUSED.to_vec(),
            family: "Replacing",
            arguments: "time",
            index: "",
            partition: "toStartOfQuarter(time)",
            key: "topic, partition, offset",
            age: "toDateTime(time)",
        },
        Table {
            name: "ends_by_minute",
            columns: ENDS.to_vec(),
            family: "Aggregating",
            arguments: "",
            index: "",
            partition: "toStartOfQuarter(minute)",
            key: "minute, host, instance, proto, service, reason, state",
            age: "minute",
        },
        Table {
            name: "seqs_by_minute",
            columns: SEQS.to_vec(),
            family: "Aggregating",
            arguments: "",
            index: "",
            partition: "toStartOfQuarter(minute)",
            key: "minute, host, instance",
            age: "minute",
        },
    ]
}

/// A view: what is inserted into one table is inserted into another one, too.
struct View {
    name: &'static str,
    from: &'static str,
    to: &'static str,
    query: String,
}

/// `FROM` and the table are added to the first line of each query.
fn views() -> Vec<View> {
    vec![
        View {
            name: "ends_by_minute_view",
            from: "events",
            to: "ends_by_minute",
            query: "SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, proto, \
                    if(proto IN ('icmp', 'icmpv6'), 0, dport) AS service, reason, state, \
                    groupBitmapState(seq) AS ends {FROM} WHERE event = 'end' \
                    GROUP BY minute, host, instance, proto, service, reason, state"
                .to_owned(),
        },
        View {
            name: "seqs_by_minute_view",
            from: "events",
            to: "seqs_by_minute",
            query: "SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, \
                    groupBitmapState(seq) AS seqs, min(seq) AS first_seq, max(seq) AS last_seq, \
                    max(time) AS latest, max(toUnixTimestamp64Micro(inserted) - \
                    toUnixTimestamp64Micro(time)) AS delay_us {FROM} \
                    GROUP BY minute, host, instance"
                .to_owned(),
        },
    ]
}

/// The table of the Kafka engine.
const QUEUE: &str = "kafka";
/// The columns that the Kafka engine adds.
const VIRTUAL: &str = "_topic LowCardinality(String), _partition UInt64, _offset UInt64, \
                       _raw_message String, _error String";
/// A line that is JSON, but not from an exporter of twheel.
const NOT_OURS: &str =
    "host = '' OR instance = '' OR event = '' OR time = 0 OR (event != 'export' AND seq = 0)";

/// The views behind the Kafka engine's table.
fn queue_views() -> Vec<View> {
    let names = |columns: &[Column]| {
        let names: Vec<_> = columns.iter().map(|column| column.name).collect();
        names.join(", ")
    };
    let view = |name, to, query| View {
        name,
        from: QUEUE,
        to,
        query,
    };
    vec![
        view(
            "kafka_events",
            "events",
            format!(
                "SELECT {} {{FROM}} WHERE _error = '' AND event != 'export' AND NOT ({NOT_OURS})",
                names(EVENTS)
            ),
        ),
        view(
            "kafka_exports",
            "exports",
            format!(
                "SELECT {} {{FROM}} WHERE _error = '' AND event = 'export' AND NOT ({NOT_OURS})",
                names(EXPORTS)
            ),
        ),
        view(
            "kafka_refused",
            "refused",
            format!(
                "SELECT _topic AS topic, _partition AS partition, _offset AS offset, _raw_message AS line, \
                 if(_error = '', 'not an event of twheel: host, instance, event, time or seq is missing', \
                 _error) AS error {{FROM}} WHERE _error != '' OR {NOT_OURS}"
            ),
        ),
    ]
}

impl Schema {
    /// That of one server, behind no topic.
    pub fn new(database: &str) -> Self {
        Self {
            database: database.to_owned(),
            keep: None,
            cluster: None,
            topic: None,
        }
    }

    /// The script.
    pub fn script(&self) -> String {
        let keep = match self.keep {
            Some(days) => format!("All tables keep their rows for {days} days from now on."),
            None => format!(
                "Tables that exist keep their rows for as\n-- long as before; new ones for {KEEP} days."
            ),
        };
        let mut script = format!(
            "-- twheel, schema version {VERSION}. Run it with `clickhouse-client`, also again, or on an \
             earlier\n-- version. {keep}\n"
        );
        for statement in self.statements() {
            script += &statement;
            script += ";\n\n";
        }
        script
    }

    /// The statements, in order.
    pub fn statements(&self) -> Vec<String> {
        let mut all = vec![format!(
            "CREATE DATABASE IF NOT EXISTS {}{}",
            identifier(&self.database),
            self.on_cluster()
        )];
        all.extend(self.version_table());
        if self.topic.is_some() {
            // Nothing is read from the topic while the tables change. The table holds no data: the
            // position in the topic is kept by the brokers.
            all.push(self.drop_queue());
        }
        for table in tables() {
            all.extend(self.table(&table));
        }
        for view in views() {
            all.extend(self.view(&view));
        }
        if let Some(topic) = &self.topic {
            // ClickHouse begins to read when the table has its first view, and what it reads reaches
            // only the views that are there. So they get a table that reads nothing first.
            all.push(self.stand_in());
            for view in queue_views() {
                all.extend(self.view(&view));
            }
            all.push(self.drop_queue());
            all.push(self.queue(topic));
        }
        let versions = self.name("schema_version");
        all.push(format!(
            "INSERT INTO {versions} (version) SELECT {VERSION} \
             WHERE {VERSION} NOT IN (SELECT version FROM {versions})"
        ));
        all
    }

    fn version_table(&self) -> [String; 2] {
        let name = self.name("schema_version");
        let engine = match &self.cluster {
            None => "MergeTree".to_owned(),
            // The same on every server of every shard.
            Some(_) => format!(
                "ReplicatedMergeTree({}, '{{shard}}-{{replica}}')",
                text(&format!(
                    "/clickhouse/twheel/{}/schema_version",
                    self.database
                ))
            ),
        };
        [
            format!(
                "CREATE TABLE IF NOT EXISTS {name}{} (version UInt32, applied DateTime DEFAULT now()) \
                 ENGINE = {engine} ORDER BY version",
                self.on_cluster()
            ),
            format!(
                "SELECT throwIf(max(version) > {VERSION}, 'the schema in this database is of a later \
                 version than {VERSION}: use the twheel that set it up') FROM {name} FORMAT Null"
            ),
        ]
    }

    /// A table, with what it lacks; and in a cluster, the table of the same name that covers all
    /// shards.
    fn table(&self, table: &Table) -> Vec<String> {
        let name = self.stored(table.name);
        let on_cluster = self.on_cluster();
        let mut columns: Vec<_> = table.columns.iter().map(Column::stored).collect();
        let lacking = add_columns(table, Column::stored);
        columns.extend(
            [table.index]
                .iter()
                .filter(|it| !it.is_empty())
                .map(|it| (*it).to_owned()),
        );
        let ttl = |days| format!("{} + INTERVAL {days} DAY", table.age);
        let mut create = format!(
            "CREATE TABLE IF NOT EXISTS {name}{on_cluster}\n(\n    {}\n)\nENGINE = {}\n",
            columns.join(",\n    "),
            self.engine(table),
        );
        create += &format!(
            "PARTITION BY {}\nORDER BY ({})\nTTL {}\nSETTINGS {SETTINGS}",
            table.partition,
            table.key,
            ttl(self.keep.unwrap_or(KEEP)),
        );
        if self.cluster.is_some() && table.name == "events" {
            create += EACH_BLOCK;
        }
        let mut all = vec![create];
        all.push(format!("ALTER TABLE {name}{on_cluster}\n    {lacking}"));
        // Nobody may lose rows by running the script again.
        if let Some(days) = self.keep {
            let ttl = ttl(days);
            all.push(format!("ALTER TABLE {name}{on_cluster} MODIFY TTL {ttl}"));
        }
        let Some(cluster) = &self.cluster else {
            return all;
        };
        let columns: Vec<_> = table.columns.iter().map(Column::typed).collect();
        let shard = match table.columns.iter().any(|column| column.name == "instance") {
            true => SHARD,
            false => SHARD_OF_REFUSED,
        };
        let whole = self.name(table.name);
        all.push(format!(
            "CREATE TABLE IF NOT EXISTS {whole}{on_cluster}\n(\n    {}\n)\n\
             ENGINE = Distributed({}, {}, {}, {shard})",
            columns.join(",\n    "),
            text(cluster),
            text(&self.database),
            text(&format!("{}_local", table.name)),
        ));
        all.push(format!(
            "ALTER TABLE {whole}{on_cluster}\n    {}",
            add_columns(table, Column::typed)
        ));
        all
    }

    fn engine(&self, table: &Table) -> String {
        let Table {
            name,
            family,
            arguments,
            ..
        } = table;
        if self.cluster.is_none() {
            return format!("{family}MergeTree({arguments})");
        }
        let path = text(&format!(
            "/clickhouse/twheel/{}/{{shard}}/{name}",
            self.database
        ));
        let more = match *arguments {
            "" => String::new(),
            more => format!(", {more}"),
        };
        format!("Replicated{family}MergeTree({path}, '{{replica}}'{more})")
    }

    /// A view that is there from now on, with its present query.
    fn view(&self, view: &View) -> [String; 2] {
        let name = self.name(view.name);
        let on_cluster = self.on_cluster();
        // What is read from a topic goes to the shard where its duplicates are.
        let (from, to) = match view.from == QUEUE {
            true => (self.name(view.from), self.name(view.to)),
            false => (self.stored(view.from), self.stored(view.to)),
        };
        let query = view.query.replace("{FROM}", &format!("FROM {from}"));
        [
            format!(
                "CREATE MATERIALIZED VIEW IF NOT EXISTS {name}{on_cluster} TO {to} AS\n{query}"
            ),
            format!("ALTER TABLE {name}{on_cluster} MODIFY QUERY\n{query}"),
        ]
    }

    fn drop_queue(&self) -> String {
        let (name, on_cluster) = (self.name(QUEUE), self.on_cluster());
        format!("DROP TABLE IF EXISTS {name}{on_cluster} SYNC")
    }

    /// A table with the columns of the Kafka engine's table, also those that the engine adds.
    fn stand_in(&self) -> String {
        format!(
            "CREATE TABLE {}{}\n(\n    {},\n    {VIRTUAL}\n)\nENGINE = Null",
            self.name(QUEUE),
            self.on_cluster(),
            queue_columns().join(",\n    "),
        )
    }

    fn queue(&self, topic: &Topic) -> String {
        format!(
            "CREATE TABLE {}{}\n(\n    {}\n)\nENGINE = Kafka\nSETTINGS kafka_broker_list = {}, \
             kafka_topic_list = {}, kafka_group_name = {}, kafka_format = 'JSONEachRow', \
             kafka_handle_error_mode = 'stream', date_time_input_format = 'best_effort', \
             input_format_skip_unknown_fields = 1",
            self.name(QUEUE),
            self.on_cluster(),
            queue_columns().join(",\n    "),
            text(&topic.brokers),
            text(&topic.name),
            text(&topic.group),
        )
    }

    fn on_cluster(&self) -> String {
        let cluster = self.cluster.as_ref();
        cluster.map_or_else(String::new, |name| {
            format!(" ON CLUSTER {}", identifier(name))
        })
    }

    /// The table as queries name it.
    fn name(&self, name: &str) -> String {
        format!("{}.{name}", identifier(&self.database))
    }

    /// The table that holds the data, in a cluster those of one shard.
    fn stored(&self, name: &str) -> String {
        match self.cluster {
            Some(_) => self.name(&format!("{name}_local")),
            None => self.name(name),
        }
    }
}

/// The columns of the Kafka engine's table: all that a line of an event or an exporter may have.
fn queue_columns() -> Vec<String> {
    let more = EXPORTS
        .iter()
        .filter(|column| EVENTS.iter().all(|event| event.name != column.name));
    EVENTS.iter().chain(more).map(Column::typed).collect()
}

/// Adds what a table of an earlier version lacks. (A column of the key cannot be added.)
fn add_columns(table: &Table, column: impl Fn(&Column) -> String) -> String {
    let keys: Vec<_> = table.key.split(", ").collect();
    let others = table.columns.iter().filter(|it| !keys.contains(&it.name));
    let others: Vec<_> = others
        .map(|it| format!("ADD COLUMN IF NOT EXISTS {}", column(it)))
        .collect();
    others.join(",\n    ")
}

/// A name in backquotes.
fn identifier(name: &str) -> String {
    format!("`{}`", name.replace('\\', "\\\\").replace('`', "\\`"))
}

/// A text in quotes.
fn text(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn each_field_of_an_event_has_a_column_and_no_column_is_without_a_field() {
        let lines: Value =
            serde_json::from_str(include_str!("../../../docs/events.schema.json")).unwrap();
        let fields = |kinds: &[&str]| {
            let mut fields: BTreeSet<_> = ["schema", "event", "time", "host"].into();
            for kind in kinds {
                let properties = lines["$defs"][kind]["properties"].as_object();
                fields.extend(properties.unwrap().keys().map(String::as_str));
            }
            fields
        };
        let columns = |columns: &[Column]| -> BTreeSet<_> {
            columns.iter().map(|column| column.name).collect()
        };
        let kinds = ["begin", "update", "end", "rto", "reap", "run"];
        assert_eq!(columns(EVENTS), fields(&kinds));
    }

    #[test]
    fn names_and_texts_are_quoted() {
        let schema = Schema {
            cluster: Some("c`d".to_owned()),
            topic: Some(Topic {
                brokers: "h:9092".to_owned(),
                name: "it's".to_owned(),
                group: "back\\slash".to_owned(),
            }),
            ..Schema::new("a`b")
        };
        let script = schema.script();
        for quoted in [
            "`a\\`b`.events",
            "ON CLUSTER `c\\`d`",
            "'it\\'s'",
            "'back\\\\slash'",
        ] {
            assert!(script.contains(quoted), "{quoted}");
        }
        for bare in ["`a`b", "`c`d", "it's", "'back\\slash'"] {
            assert!(!script.contains(bare), "{bare}");
        }
    }

    #[test]
    fn in_a_cluster_each_statement_is_for_the_cluster() {
        let schema = Schema {
            cluster: Some("all".to_owned()),
            ..Schema::new("twheel")
        };
        for statement in schema.statements() {
            let is_query = statement.starts_with("SELECT") || statement.starts_with("INSERT");
            assert!(
                is_query || statement.contains(" ON CLUSTER `all`"),
                "{statement}"
            );
        }
    }
}
