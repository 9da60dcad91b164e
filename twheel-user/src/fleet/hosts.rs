//! Which hosts are silent, behind, losing events, or sent twice.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use serde::Deserialize;
use twheel_common::named;

use super::{
    question::{Question, Sql, ask, bind_time},
    row,
};
use crate::{
    clickhouse::Server,
    filter::sql::{Parameters, micros_of},
};

/// Events of one instance may come by several partitions of a topic, or by several servers. So
/// numbers are judged up to the last one that had come this long ago.
const SETTLED: Duration = Duration::from_secs(60);

/// From when on something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Neither an event nor a sign of life of an exporter for longer than this.
    pub silent: Duration,
    /// The oldest event that has not arrived is older than this.
    pub behind: Duration,
    /// So many numbers of events are missing.
    pub losing: u64,
}

named! {
    /// What is wrong with an instance.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Trouble {
        /// neither an event nor a sign of life of its exporter has come for long
        Silent = "silent",
        /// its events come late
        Behind = "behind",
        /// events are missing
        Losing = "losing",
        /// two exporters send its events
        TwoExporters = "two_exporters",
    }
}

/// An instance of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The host's name.
    pub host: String,
    /// The instance.
    pub instance: String,
    /// Its last event; `None`: there is none in the time that was asked for.
    pub last: Option<SystemTime>,
    /// The last sign of life of an exporter; `None`: exporters of this version have sent none.
    pub alive: Option<SystemTime>,
    /// How late events come: of the exporter that was last heard of, the age of the oldest event that
    /// had not arrived; without exporters, the largest delay in the minute of the last event.
    pub delay: Duration,
    /// The events that have arrived.
    pub events: u64,
    /// The numbers that have not arrived, between the last one before the time that was asked for and
    /// the last one that had arrived a minute ago. Of an instance that began in that time, and since
    /// rows are kept, all from the first one; of an older one of which nothing earlier is kept, from the
    /// first that arrived.
    pub lost: u64,
    /// How many exporters were sending at the same time.
    pub exporters: u64,
    /// The events that the exporters did not find in the history since they began, as they report.
    /// Those between the first and the last event are also in `lost`.
    pub not_sent: u64,
    /// Whether the host has a newer instance of the same interface and network namespace.
    pub ended: bool,
}

impl Host {
    /// The name that the instances have in common that come one after another, and when this one
    /// was made, in milliseconds since 1970.
    fn name_and_made(&self) -> (&str, u64) {
        match self.instance.rsplit_once('.') {
            Some((name, made)) => (name, made.parse().unwrap_or(0)),
            None => (&self.instance, 0),
        }
    }

    /// What is wrong. An instance that has ended is neither silent nor behind.
    pub fn troubles(&self, now: SystemTime, thresholds: Thresholds) -> Vec<Trouble> {
        let heard = self.last.max(self.alive);
        let since = |time| now.duration_since(time).unwrap_or_default();
        let wrong = [
            (
                Trouble::Silent,
                !self.ended && heard.is_none_or(|heard| since(heard) > thresholds.silent),
            ),
            (
                Trouble::Behind,
                !self.ended && self.delay > thresholds.behind,
            ),
            (Trouble::Losing, self.lost >= thresholds.losing),
            (Trouble::TwoExporters, self.exporters > 1),
        ];
        let wrong = wrong.into_iter().filter(|(_, is_wrong)| *is_wrong);
        wrong.map(|(trouble, _)| trouble).collect()
    }
}

#[derive(Deserialize)]
struct Counted {
    host: String,
    instance: String,
    last_us: i64,
    delay_us: i64,
    events: u64,
    lost: u64,
}

/// What one exporter has reported.
#[derive(Clone, Debug, Deserialize)]
struct Export {
    host: String,
    instance: String,
    first_us: i64,
    last_us: i64,
    behind_us: u64,
    not_sent: u64,
}

/// The instances of which anything has arrived, by name.
///
/// # Errors
///
/// The server was not reached, or has refused the question.
pub fn hosts(server: &Server, question: &Question) -> Result<Vec<Host>> {
    let counted: Vec<Counted> = ask(server, &counts(question))?;
    let exports: Vec<Export> = ask(server, &exports(question))?;
    let mut hosts: BTreeMap<(String, String), Host> = BTreeMap::new();
    let empty = |(host, instance): &(String, String)| Host {
        host: host.clone(),
        instance: instance.clone(),
        last: None,
        alive: None,
        delay: Duration::ZERO,
        events: 0,
        lost: 0,
        exporters: 0,
        not_sent: 0,
        ended: false,
    };
    for it in counted {
        let name = (it.host, it.instance);
        let host = hosts.entry(name.clone()).or_insert_with(|| empty(&name));
        host.last = Some(row::time(it.last_us));
        host.delay = Duration::from_micros(u64::try_from(it.delay_us).unwrap_or(0));
        host.events = it.events;
        host.lost = it.lost;
    }
    let mut by_instance: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for export in exports {
        let name = (export.host.clone(), export.instance.clone());
        by_instance.entry(name).or_default().push(export);
    }
    for (name, exports) in by_instance {
        let host = hosts.entry(name.clone()).or_insert_with(|| empty(&name));
        if let Some(latest) = exports.iter().max_by_key(|it| it.last_us) {
            host.alive = Some(row::time(latest.last_us));
            host.delay = Duration::from_micros(latest.behind_us);
        }
        host.exporters = at_once(&exports);
        host.not_sent = exports.iter().map(|it| it.not_sent).sum();
    }
    let mut hosts: Vec<_> = hosts.into_values().collect();
    mark_ended(&mut hosts);
    Ok(hosts)
}

/// Of the instances that come one after another, only the newest one runs.
fn mark_ended(hosts: &mut [Host]) {
    let mut newest = BTreeMap::new();
    for it in &*hosts {
        let (name, made) = it.name_and_made();
        let newest = newest
            .entry((it.host.clone(), name.to_owned()))
            .or_insert(made);
        *newest = made.max(*newest);
    }
    for it in hosts {
        let (name, made) = it.name_and_made();
        it.ended = newest
            .get(&(it.host.clone(), name.to_owned()))
            .is_some_and(|newest| made < *newest);
    }
}

/// The largest number of exporters that were there at the same time. One that is started again
/// begins after the last report of the one before.
fn at_once(exports: &[Export]) -> u64 {
    let open_at = |time: i64| {
        let open = exports
            .iter()
            .filter(|it| it.first_us <= time && (time < it.last_us || it.first_us == time));
        open.count() as u64
    };
    let beginnings = exports.iter().map(|it| open_at(it.first_us));
    beginnings.max().unwrap_or(0)
}

/// The numbers of each instance. `before` is the last one before the time that is asked for, or 0:
/// numbers begin with 1. A row by minute was last added to at `latest + delay_us` at the latest. The
/// numbers of whole minutes are only counted: to look at each of them takes a second for each day of
/// a host with 1,000 events a second.
fn counts(question: &Question) -> Sql {
    let mut parameters = Parameters::default();
    let hosts = question.of_hosts(&mut parameters);
    let since = micros_of(question.from_minute());
    let from = bind_time(question.from_minute(), &mut parameters);
    let began = parameters.bind(since / 1_000, "Int64");
    let settled = question.now.checked_sub(SETTLED);
    let settled = parameters.bind(
        micros_of(settled.unwrap_or(SystemTime::UNIX_EPOCH)),
        "Int64",
    );
    let now = parameters.bind(micros_of(question.now) / 1_000, "Int64");
    let kept = kept_since(&now);
    let is_whole = "first >= low AND last <= high";
    let text = format!(
        "SELECT host, instance, last_us, delay_us, events, \
         if(high >= low, high - low + 1 - sum(if({is_whole}, bitmapCardinality(seen), \
         bitmapCardinality(bitmapSubsetInRange(seen, if({is_whole}, 0, low), \
         if({is_whole}, 0, high + 1))))), 0) AS lost \
         FROM (\
         SELECT host, instance, minute, groupBitmapMergeState(seqs) AS seen, \
         min(first_seq) AS first, max(last_seq) AS last \
         FROM seqs_by_minute WHERE minute >= {from}{hosts} GROUP BY host, instance, minute\
         ) AS minutes JOIN (\
         SELECT host, instance, last_us, delay_us, events, high, \
         multiIf(ifNull(before, 0) > 0, before + 1, made >= greatest({began}, {kept}), 1, oldest) \
         AS low FROM (\
         SELECT host, instance, toUnixTimestamp64Micro(max(latest)) AS last_us, \
         argMax(delay_us, (minute, delay_us)) AS delay_us, \
         groupBitmapMerge(seqs) AS events, min(first_seq) AS oldest, maxIf(last_seq, \
         toUnixTimestamp64Micro(latest) + seqs_by_minute.delay_us <= {settled}) AS high, \
         toInt64OrZero(splitByChar('.', toString(instance))[-1]) AS made \
         FROM seqs_by_minute WHERE minute >= {from}{hosts} GROUP BY host, instance\
         ) AS seen_now LEFT JOIN (\
         SELECT host, instance, max(last_seq) AS before \
         FROM seqs_by_minute WHERE minute < {from}{hosts} GROUP BY host, instance\
         ) AS seen_before USING (host, instance)\
         ) AS bounds USING (host, instance) \
         GROUP BY host, instance, last_us, delay_us, events, low, high ORDER BY host, instance"
    );
    Sql { text, parameters }
}

/// Since when rows are kept, in milliseconds since 1970, by the days of the table's TTL; 0 if it has
/// another one, or the user may not see it. `now`: the SQL for the present time, in milliseconds.
fn kept_since(now: &str) -> String {
    format!(
        "(SELECT if(max(days) = 0, toInt64(0), {now} - max(days) * 86400000) FROM (\
         SELECT toInt64OrZero(extract(engine_full, 'toIntervalDay[(]([0-9]+)[)]')) AS days \
         FROM system.tables WHERE database = currentDatabase() \
         AND name IN ('seqs_by_minute', 'seqs_by_minute_local')) AS ttl)"
    )
}

/// The reports of each exporter. A report that arrives twice changes nothing here.
fn exports(question: &Question) -> Sql {
    let mut parameters = Parameters::default();
    let hosts = question.of_hosts(&mut parameters);
    let from = bind_time(question.from_minute(), &mut parameters);
    let text = format!(
        "SELECT host, instance, exporter, toUnixTimestamp64Micro(min(time)) AS first_us, \
         toUnixTimestamp64Micro(max(time)) AS last_us, argMax(behind_us, time) AS behind_us, \
         argMax(not_sent, time) AS not_sent FROM exports WHERE time >= {from}{hosts} \
         GROUP BY host, instance, exporter ORDER BY host, instance, exporter"
    );
    Sql { text, parameters }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(first_us: i64, last_us: i64) -> Export {
        Export {
            host: "h".to_owned(),
            instance: "i".to_owned(),
            first_us,
            last_us,
            behind_us: 0,
            not_sent: 0,
        }
    }

    #[test]
    fn exporters_one_after_another_are_one_at_a_time() {
        for (exports, expected) in [
            (vec![], 0),
            (vec![export(5, 5)], 1),
            (vec![export(0, 10), export(11, 20), export(20, 30)], 1),
            (vec![export(0, 10), export(9, 20)], 2),
            (vec![export(0, 100), export(5, 5)], 2),
            (vec![export(0, 100), export(5, 6), export(7, 8)], 2),
            (vec![export(0, 100), export(5, 60), export(7, 8)], 3),
        ] {
            assert_eq!(at_once(&exports), expected, "{exports:?}");
        }
    }

    #[test]
    fn each_trouble_has_its_threshold() {
        let second = Duration::from_secs;
        let now = SystemTime::UNIX_EPOCH + second(1_000_000);
        let thresholds = Thresholds {
            silent: second(300),
            behind: second(60),
            losing: 1,
        };
        let good = Host {
            host: "h".to_owned(),
            instance: "i".to_owned(),
            last: Some(now - second(300)),
            alive: None,
            delay: second(60),
            events: 5,
            lost: 0,
            exporters: 1,
            not_sent: 0,
            ended: false,
        };
        let check = |host: Host, troubles: &[Trouble]| {
            assert_eq!(host.troubles(now, thresholds), troubles, "{host:?}");
        };
        check(good.clone(), &[]);
        let last = Some(now - second(301));
        check(
            Host {
                last,
                ..good.clone()
            },
            &[Trouble::Silent],
        );
        let alive = Some(now);
        let idle = Host {
            last,
            alive,
            ..good.clone()
        };
        check(idle, &[]);
        let last = None;
        check(
            Host {
                last,
                ..good.clone()
            },
            &[Trouble::Silent],
        );
        let delay = second(61);
        check(
            Host {
                delay,
                ..good.clone()
            },
            &[Trouble::Behind],
        );
        // Of an instance that is no more, nothing is to come.
        let over = Host {
            last,
            delay,
            lost: 1,
            ended: true,
            ..good.clone()
        };
        check(over, &[Trouble::Losing]);
        check(
            Host {
                lost: 1,
                ..good.clone()
            },
            &[Trouble::Losing],
        );
        let two = Host {
            exporters: 2,
            delay,
            ..good
        };
        check(two, &[Trouble::Behind, Trouble::TwoExporters]);
    }
}
