//! ClickHouse's queries, in the language of Grafana's data source: `$__timeFilter`, `$__fromTime` and
//! `$__toTime` are the dashboard's time range; `$__conditionalAll` drops a condition while its
//! variable selects all.
//!
//! Numbers of events are counted by bitmaps of `seq`, which is unique in an instance: so each bitmap
//! is merged by instance first, and the counts are added up outside. In a cluster the tables are
//! distributed, where a query within `IN` must be `GLOBAL`.

/// The chosen hosts.
const HOSTS: &str = "$__conditionalAll(host IN (${host:singlequote}), $host)";
/// The name of a service.
const SERVICE: &str = "concat(proto, '/', toString(service))";
/// The chosen services.
const SERVICES: &str = "$__conditionalAll(concat(proto, '/', toString(service)) IN (${service:singlequote}), $service)";
/// A flow that was established and ended without a FIN or RST.
const LEAK: &str = "reason = 'idle' AND state = 'established'";
/// Since when rows are kept, in milliseconds since 1970, by the days of the table's TTL; 0 if it has
/// another one.
const KEPT: &str = "(SELECT if(max(days) = 0, toInt64(0), toInt64(toUnixTimestamp(now())) * 1000 - max(days) * 86400000)\n      \
                    FROM (SELECT toInt64OrZero(extract(engine_full, 'toIntervalDay[(]([0-9]+)[)]')) AS days\n      \
                    FROM system.tables WHERE database = currentDatabase()\n      \
                    AND name IN ('seqs_by_minute', 'seqs_by_minute_local')) AS ttl)";
/// TCP flows of which it is known that both sides took part, or that one refused.
const WHOLE: &str = "proto = 'tcp' AND (reason IN ('closed', 'reset') OR reason = 'idle' AND state = 'established')";

/// Ends by this expression, as the column `by`, and instance: the column `n`. `step`: by time, too.
fn counted(by: &str, filter: &str, step: bool) -> String {
    let (time, group) = match step {
        true => (format!("{} AS time, ", interval("minute")), "time, "),
        false => (String::new(), ""),
    };
    let filter = match filter {
        "" => String::new(),
        filter => format!("\n    AND {filter}"),
    };
    format!(
        "SELECT {time}host, instance, {by} AS by, groupBitmapMerge(ends) AS n\n  \
         FROM ends_by_minute\n  WHERE $__timeFilter(minute)\n    AND {HOSTS}\n    \
         AND {SERVICES}{filter}\n  GROUP BY {group}host, instance, by"
    )
}

/// The start of the interval that a time is in.
fn interval(time: &str) -> String {
    format!("toStartOfInterval({time}, INTERVAL ${{interval}} SECOND)")
}

/// A line for each value of an expression: ends a second.
fn rate(by: &str, name: &str, filter: &str) -> String {
    format!(
        "SELECT time, by AS {name}, sum(n) / ${{interval}} AS ends\nFROM (\n  {}\n)\n\
         GROUP BY time, by\nORDER BY time, by",
        counted(by, filter, true)
    )
}

/// The condition that an expression is among its values with most ends.
fn most(by: &str, filter: &str, count: u8) -> String {
    let filter = match filter {
        "" => String::new(),
        filter => format!(" AND {filter}"),
    };
    format!(
        "{by} GLOBAL IN (\n      SELECT {by} FROM ends_by_minute WHERE $__timeFilter(minute) AND {HOSTS} \
         AND {SERVICES}{filter}\n      GROUP BY 1 ORDER BY sum(finalizeAggregation(ends)) DESC \
         LIMIT {count})"
    )
}

pub fn ends_a_second() -> String {
    format!(
        "SELECT sum(n) / greatest($__toTime - $__fromTime, 1) AS ends\nFROM (\n  {}\n)",
        counted("''", "", false)
    )
}

pub fn host_count() -> String {
    format!(
        "SELECT uniqExact(host) AS hosts\nFROM seqs_by_minute\nWHERE $__timeFilter(minute)\n  AND {HOSTS}"
    )
}

pub fn idle_share() -> String {
    format!(
        "SELECT sumIf(n, by = 'idle') / sum(n) AS idle\nFROM (\n  {}\n)",
        counted("reason", "", false)
    )
}

pub fn ends_by_host() -> String {
    rate("host", "host", &most("host", "", 20))
}

pub fn ends_by(column: &str) -> String {
    rate(column, column, "")
}

pub fn ends_by_service() -> String {
    rate(SERVICE, "service", &most(SERVICE, "", 20))
}

pub fn evicted_by_host() -> String {
    let filter = "reason = 'evicted'";
    rate(
        "host",
        "host",
        &format!("{filter}\n    AND {}", most("host", filter, 20)),
    )
}

pub fn leaks_by_host() -> String {
    rate(
        "host",
        "host",
        &format!("{LEAK}\n    AND {}", most("host", LEAK, 20)),
    )
}

pub fn leaks() -> String {
    let by =
        format!("({SERVICE}, {LEAK}, minute > $__fromTime + intDiv($__toTime - $__fromTime, 2))");
    format!(
        "SELECT by.1 AS service, sumIf(n, by.2) AS idle, sum(n) AS ended, idle / ended AS share,\n  \
         sumIf(n, by.2 AND by.3) / sumIf(n, by.3) - sumIf(n, by.2 AND NOT by.3) / sumIf(n, NOT by.3) \
         AS change\nFROM (\n  {}\n)\nGROUP BY service\nHAVING idle > 0\nORDER BY idle DESC\nLIMIT 100",
        counted(&by, WHOLE, false)
    )
}

pub fn leak_share() -> String {
    let by = format!("({SERVICE}, {LEAK})");
    format!(
        "SELECT time, by.1 AS service, sumIf(n, by.2) / sum(n) AS share\nFROM (\n  {}\n)\n\
         GROUP BY time, service\nORDER BY time, service",
        counted(
            &by,
            &format!("{WHOLE}\n    AND {}", most(SERVICE, LEAK, 10)),
            true
        )
    )
}

/// The numbers of each instance, and how many are missing: counted as `twheel fleet hosts` does. The
/// first one is the one after the last number before the time range; or 1, if the instance began in
/// it, and since rows are kept; or the first that came. The last one is that which had come a minute
/// ago, as events may come in another order.
fn missing() -> String {
    let is_whole = "first >= low AND last <= high";
    format!(
        "SELECT host, instance, events, low, high,\n    \
         if(high >= low, high - low + 1 - sum(if({is_whole}, bitmapCardinality(seen), \
         bitmapCardinality(bitmapSubsetInRange(seen, if({is_whole}, 0, low), \
         if({is_whole}, 0, high + 1))))), 0) AS missing\n  FROM (\n    \
         SELECT host, instance, minute, groupBitmapMergeState(seqs) AS seen,\n      \
         min(first_seq) AS first, max(last_seq) AS last\n    \
         FROM seqs_by_minute WHERE $__timeFilter(minute) AND {HOSTS}\n    \
         GROUP BY host, instance, minute\n  ) AS minutes JOIN (\n  \
         SELECT host, instance, events, high,\n    \
         multiIf(ifNull(before, 0) > 0, before + 1, \
         made >= greatest(toInt64(toUnixTimestamp($__fromTime)) * 1000, {KEPT}), 1, oldest) AS low\n  FROM (\n    \
         SELECT host, instance, groupBitmapMerge(seqs) AS events, min(first_seq) AS oldest,\n      \
         maxIf(last_seq, toUnixTimestamp64Micro(latest) + delay_us\n        \
         <= toUnixTimestamp64Micro(now64(6)) - 60000000) AS high,\n      \
         toInt64OrZero(splitByChar('.', toString(instance))[-1]) AS made\n    \
         FROM seqs_by_minute WHERE $__timeFilter(minute) AND {HOSTS}\n    \
         GROUP BY host, instance\n  ) AS seen_now LEFT JOIN (\n    \
         SELECT host, instance, max(last_seq) AS before\n    \
         FROM seqs_by_minute WHERE minute < $__fromTime AND {HOSTS}\n    \
         GROUP BY host, instance\n  ) AS seen_before USING (host, instance)\n  \
         ) AS bounds USING (host, instance)\n  GROUP BY host, instance, events, low, high"
    )
}

pub fn missing_count() -> String {
    format!("SELECT sum(missing) AS missing\nFROM (\n  {}\n)", missing())
}

pub fn missing_by_host() -> String {
    format!(
        "SELECT host, instance, events, missing\nFROM (\n  {}\n)\n\
         ORDER BY missing DESC, host, instance\nLIMIT 1000",
        missing()
    )
}

pub fn exporters() -> String {
    format!(
        "SELECT host, instance, exporter, argMax(behind_us, time) / 1e6 AS behind,\n  \
         argMax(not_sent, time) AS not_sent, dateDiff('second', max(time), now()) AS silent\n\
         FROM exports\nWHERE $__timeFilter(time)\n  AND {HOSTS}\n\
         GROUP BY host, instance, exporter\nORDER BY behind DESC, host, instance\nLIMIT 1000"
    )
}

/// A line for each host, of the exporters' own records.
fn exports(value: &str, name: &str) -> String {
    let time = interval("time");
    format!(
        "SELECT {time} AS at, host, {value} AS {name}\nFROM exports\nWHERE $__timeFilter(time)\n  \
         AND {HOSTS}\n  AND host GLOBAL IN (\n    SELECT host FROM exports WHERE $__timeFilter(time) \
         AND {HOSTS}\n    GROUP BY host ORDER BY {value} DESC LIMIT 20)\n\
         GROUP BY at, host\nORDER BY at, host"
    )
}

pub fn delay() -> String {
    exports("max(behind_us) / 1e6", "behind")
}

pub fn not_sent() -> String {
    exports("max(not_sent)", "not_sent")
}

/// Counts each event once, however often it came.
pub fn reaped() -> String {
    format!(
        "SELECT {} AS at, concat(action, ' ', outcome) AS outcome_of, \
         uniqExact(host, instance, seq) / ${{interval}} AS actions\nFROM events\n\
         WHERE $__timeFilter(time)\n  AND {HOSTS}\n  AND event = 'reap'\n\
         GROUP BY at, outcome_of\nORDER BY at, outcome_of",
        interval("time")
    )
}

/// The hosts to choose from.
pub fn host_names() -> String {
    "SELECT DISTINCT host FROM seqs_by_minute WHERE $__timeFilter(minute) ORDER BY host".to_owned()
}

/// The services to choose from.
pub fn service_names() -> String {
    format!(
        "SELECT {SERVICE} AS name FROM ends_by_minute WHERE $__timeFilter(minute) GROUP BY name \
         ORDER BY sum(finalizeAggregation(ends)) DESC LIMIT 1000"
    )
}
