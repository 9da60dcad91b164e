//! The schema: new, again, and from an earlier version; for a cluster, and behind Kafka.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use twheel::fleet::schema::{Schema, Topic, VERSION};
use twheel_tests::engine::{Engine, statements};

use super::{
    events::{Maker, end, line},
    printed,
};

fn schema() -> Schema {
    Schema::new("twheel")
}

fn run(engine: &Engine, script: &str) -> Result<()> {
    for statement in statements(script) {
        engine.query(&statement)?;
    }
    Ok(())
}

/// The definitions of all tables, and all columns.
fn definitions(engine: &Engine) -> Result<Vec<Value>> {
    let mut all = engine.query(
        "SELECT name, engine, sorting_key, partition_key, as_select FROM system.tables \
         WHERE database = 'twheel' ORDER BY name",
    )?;
    all.extend(engine.query(
        "SELECT table, name, type, compression_codec FROM system.columns \
         WHERE database = 'twheel' ORDER BY table, name",
    )?);
    Ok(all)
}

fn insert(engine: &Engine, events: usize) -> Result<()> {
    let mut maker = Maker::new(3);
    let lines: String = (0..events)
        .map(|_| line(&maker.event(SystemTime::now())))
        .collect();
    Ok(engine.server("twheel")?.insert("events", lines.into())?)
}

#[test]
fn the_script_can_be_run_again() -> Result<()> {
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let script = printed(&engine, &["fleet", "schema"])?.join("\n");
    ensure!(statements(&script) == schema().statements(), "{script}");
    run(&engine, &script)?;
    let first = definitions(&engine)?;
    insert(&engine, 300)?;
    run(&engine, &script)?;
    ensure!(definitions(&engine)? == first);
    let rows = engine.value("SELECT count() FROM twheel.events FINAL")?;
    ensure!(rows == 300, "{rows}");
    let versions = engine.query("SELECT version FROM twheel.schema_version")?;
    ensure!(versions.len() == 1, "{versions:?}");
    // Another time to keep events for is taken over.
    run(
        &engine,
        &printed(&engine, &["fleet", "schema", "--keep", "30d"])?.join("\n"),
    )?;
    let ttl = engine.query(
        "SELECT name FROM system.tables WHERE database = 'twheel' AND engine LIKE '%MergeTree' \
         AND name != 'schema_version' AND create_table_query NOT LIKE '%toIntervalDay(30)%'",
    )?;
    ensure!(ttl.is_empty(), "{ttl:?}");
    Ok(())
}

#[test]
fn an_earlier_version_is_migrated_with_its_rows() -> Result<()> {
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let Some(fresh) = Engine::with_schema()? else {
        return Ok(());
    };
    run(&engine, include_str!("schema-1.sql"))?;
    // A view and a column that a version before this one might not have had.
    engine.query("ALTER TABLE twheel.events DROP COLUMN owner_user")?;
    engine.query(
        "ALTER TABLE twheel.seqs_by_minute_view MODIFY QUERY SELECT toStartOfMinute(time, 'UTC') \
         AS minute, host, instance, groupBitmapState(seq) AS seqs FROM twheel.events \
         GROUP BY minute, host, instance",
    )?;
    insert(&engine, 500)?;
    let sums = "SELECT sum(cityHash64(host, instance, seq, event, time, src, rule, reason, \
                orig_bytes)) AS sum FROM twheel.events FINAL";
    let before = engine.value(sums)?;
    let refused = printed_error(&engine, &["fleet", "reasons"])?;
    ensure!(
        refused.contains("version 1") && refused.contains("twheel fleet schema"),
        "{refused}"
    );
    for statement in schema().statements() {
        engine.query(&statement)?;
    }
    ensure!(engine.value(sums)? == before);
    let version = engine.value("SELECT max(version) FROM twheel.schema_version")?;
    ensure!(version == VERSION, "{version}");
    printed(&engine, &["fleet", "reasons"])?;
    ensure!(definitions(&engine)? == definitions(&fresh)?);
    let minutes = engine.value(
        "SELECT sum(n) FROM (SELECT groupBitmapMerge(seqs) AS n FROM twheel.seqs_by_minute \
         GROUP BY host, instance)",
    )?;
    ensure!(minutes == 500, "{minutes}");
    Ok(())
}

const DAY: Duration = Duration::from_secs(86_400);

/// The history of a quiet host, which an exporter may send as one block, may span years.
#[test]
fn one_insert_may_span_as_long_as_events_are_kept() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let mut maker = Maker::new(5);
    let now = SystemTime::now();
    let days = (1..500).chain((500..3_640).step_by(20));
    let pasts: Vec<_> = days.map(|days| maker.event(now - days * DAY)).collect();
    let lines: String = pasts.iter().map(line).collect();
    engine.server("twheel")?.insert("events", lines.into())?;
    let ends = pasts.iter().filter(|it| end(it).is_some()).count();
    let count = |args: &[&str]| -> Result<u64> {
        let lines = printed(&engine, &[args, &["--since", "3640d", "--json"]].concat())?;
        let flows = |line: &String| serde_json::from_str::<Value>(line).ok()?["flows"].as_u64();
        Ok(lines.iter().filter_map(flows).sum())
    };
    // Of the tables by minute, and of the events.
    for filter in ["", "age >= 0s"] {
        let found = count(&["fleet", "reasons", filter])?;
        ensure!(found == ends as u64, "{filter}: {found}, not {ends}");
    }
    Ok(())
}

/// The time that each table with data keeps its rows for, in days.
fn kept(engine: &Engine) -> Result<Vec<Value>> {
    engine.query(
        "SELECT DISTINCT extract(create_table_query, 'toIntervalDay\\\\((\\\\d+)\\\\)') AS days \
         FROM system.tables WHERE database = 'twheel' AND engine LIKE '%MergeTree' \
         AND name != 'schema_version'",
    )
}

#[test]
fn only_keep_changes_how_long_rows_are_kept() -> Result<()> {
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let script = |args: &[&str]| -> Result<()> {
        let script = printed(&engine, &[&["fleet", "schema"], args].concat())?;
        run(&engine, &script.join("\n"))
    };
    script(&["--keep", "3650d"])?;
    let mut maker = Maker::new(6);
    let old = SystemTime::now() - 200 * DAY;
    let lines: String = (0..300).map(|_| line(&maker.event(old))).collect();
    engine.server("twheel")?.insert("events", lines.into())?;
    let count = || -> Result<[Value; 2]> {
        for table in ["events", "seqs_by_minute"] {
            engine.query(&format!("OPTIMIZE TABLE twheel.{table} FINAL"))?;
        }
        Ok([
            engine.value("SELECT count() FROM twheel.events FINAL")?,
            engine.value(
                "SELECT sum(n) FROM (SELECT groupBitmapMerge(seqs) AS n \
                 FROM twheel.seqs_by_minute GROUP BY host, instance)",
            )?,
        ])
    };
    script(&[])?;
    ensure!(count()? == [300, 300], "{:?}", count()?);
    ensure!(kept(&engine)? == [json!({"days": "3650"})]);
    // It is this that removes them, and the rows themselves, beside younger ones of the same part.
    let lines: String = (0..5)
        .map(|_| line(&maker.event(SystemTime::now())))
        .collect();
    engine.server("twheel")?.insert("events", lines.into())?;
    script(&["--keep", "100d"])?;
    ensure!(kept(&engine)? == [json!({"days": "100"})]);
    ensure!(count()? == [5, 5], "{:?}", count()?);
    // New tables keep their rows for as long as is said to.
    let new = Engine::start()?.context("no engine")?;
    run(&new, &schema().script())?;
    ensure!(kept(&new)? == [json!({"days": "90"})]);
    Ok(())
}

fn printed_error(engine: &Engine, args: &[&str]) -> Result<String> {
    let ended = twheel_tests::running::once(engine.twheel(args)?)?;
    ensure!(ended.code() == Some(1), "{args:?}: {ended:?}");
    ensure!(ended.stderr.lines().count() == 1, "{}", ended.stderr);
    Ok(ended.stderr)
}

#[test]
fn a_later_version_is_left_alone() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    engine.query(&format!(
        "INSERT INTO twheel.schema_version (version) VALUES ({})",
        VERSION + 1
    ))?;
    let before = definitions(&engine)?;
    let again = Schema {
        keep: Some(1),
        ..schema()
    };
    let mut refused = None;
    for statement in again.statements() {
        if let Err(error) = engine.query(&statement) {
            refused = Some(format!("{error:#}"));
            break;
        }
    }
    let refused = refused.context("it was not refused")?;
    ensure!(refused.contains("of a later version"), "{refused}");
    ensure!(definitions(&engine)? == before);
    let error = printed_error(&engine, &["fleet", "hosts"])?;
    ensure!(error.contains("update this twheel"), "{error}");
    Ok(())
}

/// The engine is one process and no cluster: so the cluster's statements are parsed, and run with
/// what a cluster does taken out.
#[test]
fn the_variant_for_a_cluster_is_valid() -> Result<()> {
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let schema = Schema {
        cluster: Some("all".to_owned()),
        ..schema()
    };
    let (mut replicated, mut distributed) = (0, 0);
    for statement in schema.statements() {
        if !statement.starts_with("SELECT") && !statement.starts_with("INSERT") {
            engine.query(&format!("EXPLAIN AST {statement}"))?;
        }
        // The same with plain tables, and with the only shard for all of them.
        let mut local = statement.replace(" ON CLUSTER `all`", "");
        let is_events = statement.contains("CREATE TABLE IF NOT EXISTS `twheel`.events_local");
        ensure!(
            statement.contains("replicated_deduplication_window = 0") == is_events,
            "{statement}"
        );
        if let Some((head, rest)) = local.split_once("ENGINE = Replicated") {
            let (family, rest) = rest.split_once('(').context("no path")?;
            let (path, rest) = rest.split_once(')').context("no end of path")?;
            let mut parts = path.splitn(3, ", ");
            let zookeeper = (parts.next(), parts.next());
            ensure!(
                zookeeper
                    .0
                    .is_some_and(|it| it.starts_with("'/clickhouse/"))
                    && zookeeper.1.is_some_and(|it| it.contains("{replica}")),
                "{path}"
            );
            let more = parts.next().unwrap_or_default();
            local = format!("{head}ENGINE = {family}({more}){rest}");
            replicated += 1;
        }
        if let Some((head, engine)) = local.split_once("ENGINE = Distributed(") {
            let engine = engine.trim_end_matches(')');
            let parts: Vec<_> = engine.splitn(4, ", ").collect();
            ensure!(parts[..2] == ["'all'", "'twheel'"], "{engine}");
            let table = parts[2].trim_matches('\'');
            // A table that stands for another one, for reading and for writing.
            let (create, _) = head.split_once("\n(").context("no columns")?;
            local = format!("{create} ENGINE = Merge('twheel', '^{table}$')");
            distributed += 1;
        }
        if !(local.starts_with("ALTER TABLE `twheel`.") && local.contains("ADD COLUMN"))
            || local.contains("_local")
        {
            engine.query(&local)?;
        }
    }
    ensure!(
        (replicated, distributed) == (6, 5),
        "{replicated} {distributed}"
    );
    let mut maker = Maker::new(4);
    let lines: String = (0..100)
        .map(|_| line(&maker.event(SystemTime::now())))
        .collect();
    for _ in 0..2 {
        let server = engine.server("twheel")?;
        server.insert("events_local", lines.clone().into())?;
    }
    // The same questions under the same names.
    let events = engine.value("SELECT count() FROM twheel.events FINAL")?;
    ensure!(events == 100, "{events}");
    let hosts = printed(&engine, &["fleet", "hosts", "--json"])?;
    let count = |line: &String| serde_json::from_str::<Value>(line).ok()?["events"].as_u64();
    ensure!(
        hosts.iter().filter_map(count).sum::<u64>() == 100,
        "{hosts:?}"
    );
    Ok(())
}

/// The Kafka engine needs a broker, and this process has none: its table is made but for that. The
/// views behind it are fed through the table that stands in for it while they are made.
#[test]
fn lines_of_a_topic_reach_their_tables() -> Result<()> {
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let schema = Schema {
        topic: Some(Topic {
            brokers: "127.0.0.1:1".to_owned(),
            name: "it's".to_owned(),
            group: "group".to_owned(),
        }),
        ..schema()
    };
    let statements = schema.statements();
    let kafka = statements
        .iter()
        .position(|it| it.contains("ENGINE = Kafka"))
        .context("no table of the Kafka engine")?;
    for _ in 0..2 {
        let others = statements.iter().enumerate();
        for (_, statement) in others.filter(|(number, _)| ![kafka - 1, kafka].contains(number)) {
            engine.query(statement)?;
        }
    }
    let mut maker = Maker::new(6);
    let pasts: Vec<_> = (0..400).map(|_| maker.event(SystemTime::now())).collect();
    let mut lines: String = pasts.iter().map(line).collect();
    for (number, exporter) in ["a", "b", "a"].iter().enumerate() {
        lines += &format!(
            r#"{{"schema":1,"event":"export","time":"2026-11-25T10:00:0{number}.000001Z","host":"gw1","instance":"eth0@host.1","exporter":"{exporter}","behind_us":{number},"not_sent":7}}"#
        );
        lines.push('\n');
    }
    // Lines that are JSON and not ours, and one of a kind that is not known yet.
    lines += r#"{"hello":"world","_offset":1}
{"schema":1,"event":"end","time":"2026-11-25T10:00:00.000001Z","host":"gw1","instance":"x@host.1","_offset":2}
{"schema":1,"event":"end","time":"2026-11-25T10:00:00.000001Z","instance":"x@host.1","seq":5,"_offset":3}
{"schema":1,"event":"export","time":"2026-11-25T10:00:00.000001Z","host":"gw1","_offset":4}
{"schema":1,"event":"later","time":"2026-11-25T10:00:00.000001Z","host":"gw1","instance":"x@host.1","seq":5,"new":1}
"#;
    let server = engine.server("twheel")?;
    // All of it twice: Kafka delivers at least once.
    for _ in 0..2 {
        server.insert("kafka", lines.clone().into())?;
    }
    // A line that the engine could not read.
    engine.query(
        "INSERT INTO twheel.kafka (_topic, _partition, _offset, _raw_message, _error) \
         VALUES ('it\\'s', 3, 99, '{broken', 'Cannot parse JSON')",
    )?;
    let count = |sql: &str| -> Result<u64> {
        let value = engine.value(&format!("SELECT count() {sql}"))?;
        value.as_u64().context("no number")
    };
    ensure!(count("FROM twheel.events FINAL")? == 401);
    ensure!(count("FROM twheel.events FINAL WHERE event = 'later'")? == 1);
    ensure!(count("FROM twheel.exports FINAL WHERE not_sent = 7")? == 3);
    let ours = count("FROM twheel.refused FINAL WHERE error LIKE 'not an event of twheel%'")?;
    ensure!(ours == 4, "{ours}");
    let broken = "FROM twheel.refused WHERE line = '{broken' AND topic = 'it\\'s' \
                  AND partition = 3 AND offset = 99 AND error = 'Cannot parse JSON'";
    ensure!(count(broken)? == 1);
    // Each line is as it was sent.
    let found = printed(
        &engine,
        &[
            "fleet",
            "expired",
            "--json",
            "--events",
            "begin,update,end,rto,reap,run",
        ],
    )?;
    let mut expected: Vec<_> = pasts
        .iter()
        .map(|it| line(it).trim_end().to_owned())
        .collect();
    let mut found = found;
    expected.sort_unstable();
    found.sort_unstable();
    ensure!(found == expected);
    // The real table is valid up to the broker: what this engine refuses is to connect.
    engine.query(&format!("EXPLAIN AST {}", statements[kafka]))?;
    engine.query(&statements[kafka - 1])?;
    let refused = engine
        .query(&statements[kafka])
        .map_err(|it| format!("{it:#}"));
    if let Err(refused) = refused {
        ensure!(refused.contains("Shutdown was called"), "{refused}");
    }
    Ok(())
}
