//! The filter as SQL: the same rows as by the evaluator of one host.

use std::time::{Duration, SystemTime};

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value};
use twheel::{
    clickhouse::Server,
    filter::{
        Field, Filter, Knowable, PROTOCOLS, REASONS, STATES, Subject,
        sql::{Parameters, Rows},
    },
    history::Past,
};
use twheel_fuzz::make::Random;
use twheel_tests::engine::Engine;

use super::events::{ADDRESSES, COUNTS, MICROS, Maker, NAMES, PORTS, end, line};

const EVENTS: usize = 2_000;
const EXPRESSIONS: usize = 10_000;
/// How many expressions a query has.
const TOGETHER: usize = 100;

const KNOWN: Knowable = Knowable {
    ended: true,
    accounting: true,
    rto: true,
};
const NETWORKS: [&str; 14] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.0.0.0/31",
    "192.0.2.0/24",
    "128.0.0.0/1",
    "::/0",
    "::/1",
    "::/64",
    "::/80",
    "::ffff:0:0/96",
    "::ffff:10.0.0.0/104",
    "2001:db8::/32",
    "2001:db8::/48",
    "::fffe:0:0/96",
];

/// A random filter, as a user writes it.
struct Writer<'a> {
    random: &'a mut Random,
}

impl Writer<'_> {
    fn one<'b>(&mut self, some: &[&'b str]) -> &'b str {
        self.random.one_of(some)
    }

    fn expression(&mut self, depth: usize) -> String {
        match self.random.below(if depth == 0 { 1 } else { 6 }) {
            0 | 1 => self.comparison(),
            2 => {
                let not = self.one(&["not", "!", "not not", "NOT"]);
                format!("{not} ({})", self.expression(depth - 1))
            }
            it => {
                let word = match it {
                    3 => self.one(&["and", "&&"]),
                    4 => self.one(&["or", "||"]),
                    _ => self.one(&["and", "or"]),
                };
                let parts: Vec<_> = (0..2 + self.random.below(2))
                    .map(|_| self.expression(depth - 1))
                    .collect();
                format!("({})", parts.join(&format!(" {word} ")))
            }
        }
    }

    fn comparison(&mut self) -> String {
        let fields: Vec<_> = Field::ALL
            .iter()
            .filter(|it| !matches!(it, Field::Expires | Field::Cpu))
            .collect();
        let field = *fields[self.random.below(fields.len())];
        let name = field.name();
        if matches!(field, Field::PickedUp | Field::Stalled) {
            return name.to_owned();
        }
        let is_ordered = matches!(
            field,
            Field::Sport
                | Field::Dport
                | Field::Port
                | Field::Vlan
                | Field::Zone
                | Field::Idle
                | Field::Age
                | Field::Ended
                | Field::Packets
                | Field::Bytes
                | Field::Rtt
                | Field::Retransmissions
        );
        match self.random.below(if is_ordered { 8 } else { 4 }) {
            0 | 1 => format!(
                "{name} {} {}",
                self.one(&["==", "="]),
                self.value(field, true)
            ),
            2 => format!("{name} != {}", self.value(field, true)),
            3 => {
                let values: Vec<_> = (0..1 + self.random.below(3))
                    .map(|_| self.value(field, true))
                    .collect();
                format!("{name} in {{{}}}", values.join(", "))
            }
            _ => {
                let sign = self.one(&["<", "<=", ">", ">="]);
                format!("{name} {sign} {}", self.value(field, false))
            }
        }
    }

    /// Upper case in places: names compare without case.
    fn cased(&mut self, name: &str) -> String {
        match self.random.once_in(3) {
            true => name.to_ascii_uppercase(),
            false => name.to_owned(),
        }
    }

    fn value(&mut self, field: Field, may_range: bool) -> String {
        match field {
            Field::Proto => {
                let name = self.one(PROTOCOLS);
                self.cased(name)
            }
            Field::State => {
                let name = self.one(&STATES);
                self.cased(name)
            }
            Field::Reason => {
                let name = self.one(&REASONS);
                self.cased(name)
            }
            Field::Direction => {
                let name = self.one(&["in", "out"]);
                self.cased(name)
            }
            Field::Rule | Field::Iface => match self.random.once_in(8) {
                true => self
                    .one(&["\"\"", "nothing", "\"p0\"", "\"{p1:UInt64}\""])
                    .to_owned(),
                false => {
                    let name = self.one(&NAMES);
                    format!("\"{}\"", self.cased(name))
                }
            },
            Field::Src | Field::Dst | Field::Host => match self.random.once_in(2) {
                true => self.one(&ADDRESSES).to_owned(),
                false => self.one(&NETWORKS).to_owned(),
            },
            Field::Sport | Field::Dport | Field::Port => {
                let port = |it: &mut Self| u64::from(it.random.one_of(&PORTS));
                self.number(may_range, port)
            }
            Field::Zone => self.number(may_range, |it| it.random.one_of(&[0, 6, 7, 65_535])),
            Field::Vlan => self.number(may_range, |it| it.random.one_of(&[0, 1, 10, 20, 4_094])),
            Field::Retransmissions => {
                self.number(may_range, |it| it.random.one_of(&[0, 1, 2, 4, 1_000]))
            }
            Field::Packets | Field::Bytes => match self.random.once_in(5) {
                true => self
                    .one(&["1GiB", "1KB", "1500B", "18446744073709551615"])
                    .to_owned(),
                false => self.number(may_range, |it| it.random.one_of(&COUNTS)),
            },
            _ => self.duration(),
        }
    }

    fn number(&mut self, may_range: bool, one: impl Fn(&mut Self) -> u64) -> String {
        let number = one(self);
        if !may_range || !self.random.once_in(3) {
            return number.to_string();
        }
        let other = one(self);
        format!("{}-{}", number.min(other), number.max(other))
    }

    fn duration(&mut self) -> String {
        match self.random.below(5) {
            0 => self
                .one(&[
                    "0s",
                    "1ns",
                    "1500ns",
                    "999999999ns",
                    "584942417355ns",
                    "25ms",
                    "25001us",
                ])
                .to_owned(),
            1 => self
                .one(&["1h30m", "5days", "1000000years", "18446744073709551615s"])
                .to_owned(),
            2 => format!("{}s", self.random.below(7_200)),
            _ => format!("{}us", self.random.one_of(&MICROS)),
        }
    }
}

/// The numbers of the events that match, by SQL, one list for each filter.
fn by_sql(server: &Server, filters: &[Filter], now: SystemTime) -> Result<Vec<Vec<u64>>> {
    let mut parameters = Parameters::default();
    let columns: Vec<_> = filters
        .iter()
        .enumerate()
        .map(|(number, filter)| {
            let condition = filter.sql(Rows::Events, now, &mut parameters);
            format!("arraySort(groupArrayIf(seq, {condition})) AS f{number}")
        })
        .collect();
    let sql = format!(
        "SELECT {} FROM events FINAL WHERE event = 'end'",
        columns.join(", ")
    );
    let mut lists = Vec::new();
    server.rows(&sql, parameters.values(), &mut |row: Map<String, Value>| {
        for number in 0..filters.len() {
            let list = row[&format!("f{number}")].as_array().expect("a list");
            lists.push(list.iter().filter_map(Value::as_u64).collect());
        }
        Ok(())
    })?;
    Ok(lists)
}

/// The same by the evaluator.
fn by_evaluator(pasts: &[Past], filter: &Filter, now: SystemTime) -> Vec<u64> {
    let matches = |past: &&Past| {
        let ago = now.duration_since(past.mark.time).unwrap_or_default();
        end(past)
            .is_some_and(|ended| filter.matches(&Subject::ended(ended, past.known_as.named(), ago)))
    };
    let matching = pasts.iter().filter(matches);
    matching.map(|past| past.mark.number).collect()
}

/// A list may have thousands of values, and a server must not need minutes for it.
#[test]
fn lists_of_thousands_of_values_give_the_same_rows_by_sql() -> Result<()> {
    const VALUES: usize = 5_000;
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let mut maker = Maker::new(7);
    let now = SystemTime::now();
    let pasts: Vec<_> = (0..EVENTS).map(|_| maker.event(now)).collect();
    let server = engine.server("twheel")?;
    server.insert("events", pasts.iter().map(line).collect::<String>().into())?;
    let mut list = |one: &mut dyn FnMut(&mut Random) -> String| {
        let values: Vec<_> = (0..VALUES).map(|_| one(&mut maker.random)).collect();
        values.join(", ")
    };
    let addresses = list(&mut |it| format!("203.0.{}.{}", it.below(256), it.below(256)));
    let networks = list(&mut |it| format!("198.18.{}.{}/31", it.below(256), 2 * it.below(128)));
    let ports = list(&mut |it| format!("{}", 20_000 + it.below(10_000)));
    let ranges = list(&mut |it| format!("{0}-{0}", 20_000 + it.below(10_000)));
    let filters = [
        format!("src in {{{addresses}, {}}}", ADDRESSES[0]),
        format!("host in {{{networks}, 10.0.0.0/8, ::/0}}"),
        format!("not dst in {{{networks}, ::/0}}"),
        format!("dport in {{{ports}, {}}}", PORTS[0]),
        format!("port in {{{ranges}, {}}}", PORTS[1]),
    ];
    for text in &filters {
        let filter = Filter::parse(text, KNOWN)?;
        let begun = std::time::Instant::now();
        let found = by_sql(&server, std::slice::from_ref(&filter), now)?;
        println!("{:.40}…: {:?}", text, begun.elapsed());
        let expected = by_evaluator(&pasts, &filter, now);
        ensure!(found == [expected.clone()], "{text:.100}");
        ensure!(
            (1..EVENTS).contains(&expected.len()),
            "{text:.100}: {}",
            expected.len()
        );
    }
    Ok(())
}

#[test]
fn random_filters_give_the_same_rows_by_sql_as_on_one_host() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let seed = match std::env::var("TWHEEL_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => std::process::id().into(),
    };
    println!("TWHEEL_SEED={seed}");
    let mut maker = Maker::new(seed);
    let now = SystemTime::now();
    // Some are later than the time of the question.
    let oldest = now - Duration::from_secs(7_000);
    let pasts: Vec<_> = (0..EVENTS)
        .map(|_| {
            let later = Duration::from_micros(maker.random.below(7_100_000_000) as u64);
            maker.event(oldest + later)
        })
        .collect();
    let server = engine.server("twheel")?;
    let lines: String = pasts.iter().map(line).collect();
    server.insert("events", lines.into())?;
    let ends = pasts.iter().filter(|past| end(past).is_some()).count();
    let (mut some, mut tried) = (0, 0);
    while tried < EXPRESSIONS {
        let texts: Vec<_> = (0..TOGETHER)
            .map(|_| {
                let depth = maker.random.below(4);
                let random = &mut maker.random;
                Writer { random }.expression(depth)
            })
            .collect();
        let filters = texts.iter().map(|text| Filter::parse(text, KNOWN));
        let filters: Vec<_> = filters.collect::<Result<_>>()?;
        let lists = by_sql(&server, &filters, now)?;
        ensure!(lists.len() == filters.len(), "{} lists", lists.len());
        for ((text, filter), found) in texts.iter().zip(&filters).zip(lists) {
            let expected = by_evaluator(&pasts, filter, now);
            some += usize::from(!expected.is_empty() && expected.len() < ends);
            if found == expected {
                continue;
            }
            let differ: Vec<_> = found
                .iter()
                .filter(|seq| !expected.contains(seq))
                .chain(expected.iter().filter(|seq| !found.contains(seq)))
                .take(3)
                .map(|seq| line(&pasts[*seq as usize - 1]))
                .collect();
            bail!("seed {seed}: {text}: {differ:?}");
        }
        tried += filters.len();
    }
    println!("{some} of {tried} filters chose some of {ends} ends");
    ensure!(some * 2 > tried, "only {some} of {tried} filters choose");
    Ok(())
}

#[test]
fn a_name_is_never_a_part_of_the_sql() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let mut maker = Maker::new(5);
    let pasts: Vec<_> = (0..200).map(|_| maker.event(SystemTime::now())).collect();
    let server = engine.server("twheel")?;
    let lines: String = pasts.iter().map(line).collect();
    server.insert("events", lines.into())?;
    for name in [
        "') OR 1=1 --",
        "' UNION ALL SELECT 1 --",
        "'; DROP TABLE events; --",
        "\\'; DROP TABLE events; --",
        "{p0:String}",
        "{p1:UInt64}",
        "\\",
        "\\\\'",
        "/* */",
        "?",
        "??",
        "\\x27 OR 1=1",
        "\u{0}",
        "--\r\nContent-Disposition: form-data; name=\"query",
    ] {
        let text = format!("rule == \"{name}\" or iface in {{\"{name}\"}}");
        if name.contains('"') {
            ensure!(Filter::parse(&text, KNOWN).is_err(), "{text}");
            continue;
        }
        let filter = Filter::parse(&text, KNOWN)?;
        let mut parameters = Parameters::default();
        let sql = filter.sql(Rows::Events, SystemTime::now(), &mut parameters);
        let is_simple = sql
            .chars()
            .all(|it| it.is_ascii_alphanumeric() || "_ ()=!'{}:".contains(it));
        ensure!(is_simple && !sql.contains("DROP"), "{sql}");
        let found = by_sql(&server, std::slice::from_ref(&filter), SystemTime::now())?;
        let expected = by_evaluator(&pasts, &filter, SystemTime::now());
        ensure!(found == [expected], "{name}: {found:?}");
    }
    let rows = engine.value("SELECT count() FROM twheel.events")?;
    ensure!(rows == 200, "{rows}");
    Ok(())
}
