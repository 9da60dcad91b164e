//! The commands that ask, against sums made here. Every event arrives two or three times.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel::{
    history::Past,
    model::{Ended, FlowEvent},
    output::text::Text,
};
use twheel_common::event::Reason;
use twheel_tests::engine::Engine;

use super::{
    events::{Maker, end, line, micros},
    number, printed, text,
};

const MINUTE: u64 = 60;

/// Events of the last hour, in an engine; none is within minutes of half an hour ago, so that a
/// test may take that long.
struct Fleet {
    engine: Engine,
    pasts: Vec<Past>,
    half: SystemTime,
}

impl Fleet {
    fn new(seed: u64, events: usize) -> Result<Option<Self>> {
        let Some(engine) = Engine::with_schema()? else {
            return Ok(None);
        };
        let mut maker = Maker::new(seed);
        let now = SystemTime::now();
        let mut pasts: Vec<_> = (0..events)
            .map(|number| {
                let ago = match number % 3 {
                    0 => 35 * MINUTE + maker.random.below(22 * 60) as u64,
                    _ => MINUTE + maker.random.below(23 * 60) as u64,
                };
                let micros = maker.random.below(1_000_000) as u64;
                maker.event(now - Duration::from_secs(ago) + Duration::from_micros(micros))
            })
            .collect();
        let server = engine.server("twheel")?;
        let lines: Vec<_> = pasts.iter().map(line).collect();
        server.insert("events", lines.concat().into())?;
        // Again in other parts, in another order; and some of it once more.
        for part in lines.rchunks(events / 7 + 1) {
            let again: String = part.iter().rev().map(String::as_str).collect();
            server.insert("events", again.into())?;
        }
        server.insert("events", lines[..events / 3].concat().into())?;
        pasts.sort_by_key(|past| {
            let identity = past.identity.clone();
            (
                past.mark.time,
                identity.host.clone(),
                identity.instance.clone(),
                past.mark.number,
            )
        });
        Ok(Some(Self {
            engine,
            pasts,
            half: now - Duration::from_secs(30 * MINUTE),
        }))
    }

    /// The ends of the last half hour, or of the hour before.
    fn ends(&self, is_now: bool) -> impl Iterator<Item = (&Past, &Ended)> {
        let half = self.half;
        let pasts = self.pasts.iter();
        pasts.filter_map(move |past| {
            let is_in = (past.mark.time > half) == is_now;
            end(past).filter(|_| is_in).map(|ended| (past, ended))
        })
    }

    fn lines(&self, args: &[&str]) -> Result<Vec<String>> {
        printed(&self.engine, &[&["fleet"], args].concat())
    }

    fn json(&self, args: &[&str]) -> Result<Vec<Value>> {
        let lines = self.lines(&[args, &["--json"]].concat())?;
        let parse = |line: &String| serde_json::from_str(line).context("no JSON");
        lines.iter().map(parse).collect()
    }
}

fn is_close(value: &Value, name: &str, expected: f64) -> bool {
    value[name]
        .as_f64()
        .is_some_and(|it| (it - expected).abs() < 1e-9)
}

const ALL: &str = "begin,update,end,rto,reap,run";

#[test]
fn events_print_as_they_do_on_their_host() -> Result<()> {
    let Some(fleet) = Fleet::new(11, 1_500)? else {
        return Ok(());
    };
    let expected: Vec<_> = fleet
        .pasts
        .iter()
        .map(|it| line(it).trim_end().to_owned())
        .collect();
    let found = fleet.lines(&["expired", "--since", "2h", "--events", ALL, "--json"])?;
    for (found, expected) in found.iter().zip(&expected) {
        ensure!(found == expected, "{found}\n{expected}");
    }
    ensure!(found.len() == expected.len(), "{}", found.len());
    // The same without JSON, with the time and the host.
    let found = fleet.lines(&["expired", "--since", "2h", "--events", ALL])?;
    let found = found.join("\n") + "\n";
    let mut expected = Vec::new();
    let mut text = Text::default();
    let flows = fleet.pasts.iter().filter_map(Past::flow);
    flows.for_each(|flow| text.make_room(flow));
    for past in &fleet.pasts {
        let time = humantime::format_rfc3339_seconds(past.mark.time);
        let host = past.identity.host.escape_debug().to_string();
        expected.extend(format!("{time}  {host:<15}  ").into_bytes());
        past.write(&mut text, &mut expected)?;
    }
    ensure!(found == String::from_utf8(expected)?, "{found}");
    Ok(())
}

#[test]
fn expired_takes_a_time_hosts_a_filter_and_a_limit() -> Result<()> {
    let Some(fleet) = Fleet::new(12, 900)? else {
        return Ok(());
    };
    let lines = |wanted: &dyn Fn(&Past, &Ended) -> bool| -> Vec<String> {
        let ends = fleet.ends(true).filter(|(past, ended)| wanted(past, ended));
        ends.map(|(past, _)| line(past).trim_end().to_owned())
            .collect()
    };
    let ask =
        |args: &[&str]| fleet.lines(&[&["expired", "--since", "30m", "--json"], args].concat());
    let all = lines(&|_, _| true);
    ensure!(ask(&[])? == all);
    ensure!(ask(&["--limit", "7"])? == all[all.len() - 7..]);
    ensure!(ask(&["--limit", "0"])?.is_empty());
    let gw1 = lines(&|past, _| past.identity.host == "gw1");
    ensure!(!gw1.is_empty() && ask(&["--host", "gw1"])? == gw1);
    let odd = lines(&|past, _| past.identity.host != "gw1");
    ensure!(ask(&["--host", "it's \\N", "--host", "gw2"])? == odd);
    let idle = lines(&|_, ended| ended.reason == Reason::Idle && ended.flow.dst.port() == 443);
    ensure!(!idle.is_empty());
    ensure!(ask(&["reason == idle", "and dport == 443", "--events", ALL])? == idle);
    let counted = lines(&|_, it| {
        let sent = it
            .account
            .map_or(0, |sides| sides[0].packets + sides[1].packets);
        sent > 1_000 && !it.flow.stalled
    });
    ensure!(!counted.is_empty());
    ensure!(ask(&["packets > 1000 and not stalled"])? == counted);
    let none: Vec<String> = Vec::new();
    ensure!(ask(&["--host", "' OR 1=1 --"])? == none);
    Ok(())
}

#[test]
fn talkers_are_summed_by_each_name() -> Result<()> {
    let Some(fleet) = Fleet::new(13, 1_200)? else {
        return Ok(());
    };
    let or_dash = |name: Option<&str>| name.unwrap_or("-").to_owned();
    let owner = |past: &Past| past.known_as.owner.clone().unwrap_or_default();
    type Name<'a> = &'a dyn Fn(&Past, &Ended) -> String;
    let names: [(&str, Name<'_>); 7] = [
        ("src", &|_, it| it.flow.src.ip().to_canonical().to_string()),
        ("dst", &|_, it| it.flow.dst.ip().to_canonical().to_string()),
        ("port", &|_, it| match it.flow.proto {
            "icmp" | "icmpv6" => format!("{}/0", it.flow.proto),
            proto => format!("{proto}/{}", it.flow.dst.port()),
        }),
        ("host", &|past, _| past.identity.host.clone()),
        ("command", &|past, _| {
            or_dash(owner(past).command.as_deref())
        }),
        ("cgroup", &|past, _| or_dash(owner(past).cgroup.as_deref())),
        ("rule", &|past, _| or_dash(past.known_as.rule.as_deref())),
    ];
    let filter = "proto != udp";
    for (by, name) in names {
        // Flows, those with counts, packets, bytes.
        let mut sums: BTreeMap<String, [u64; 4]> = BTreeMap::new();
        let mut all = 0;
        for (past, ended) in fleet.ends(true).filter(|(_, it)| it.flow.proto != "udp") {
            let sum = sums.entry(name(past, ended)).or_default();
            all += 1;
            sum[0] += 1;
            sum[1] += u64::from(ended.account.is_some());
            for side in ended.account.into_iter().flatten() {
                sum[2] += side.packets;
                sum[3] += side.bytes;
            }
        }
        let args = [
            "talkers", "--by", by, filter, "--since", "30m", "--limit", "1000",
        ];
        let found = fleet.json(&args)?;
        ensure!(found.len() == sums.len(), "{by}: {found:?}");
        let flows: Vec<_> = found.iter().map(|it| number(it, "flows")).collect();
        ensure!(flows.is_sorted_by(|one, two| one >= two), "{by}: {flows:?}");
        for value in &found {
            let sum = sums.get(text(value, "talker")).context("a stranger")?;
            let [flows, counted, packets, bytes] = *sum;
            ensure!(text(value, "event") == "fleet_talker");
            ensure!(number(value, "flows") == flows, "{by}: {value}");
            ensure!(
                is_close(value, "share", flows as f64 / f64::from(all)),
                "{value}"
            );
            if counted > 0 {
                ensure!(
                    number(value, "packets") == packets,
                    "{by}: {value} {packets}"
                );
                ensure!(number(value, "bytes") == bytes, "{by}: {value} {bytes}");
            } else {
                ensure!(value.get("packets").is_none(), "{by}: {value}");
            }
        }
        // The table has the same lines, and says what it leaves out.
        let table = fleet.lines(&[
            "talkers", "--by", by, filter, "--since", "30m", "--limit", "1",
        ])?;
        let first = &found[0];
        let name = text(first, "talker").escape_debug().to_string();
        ensure!(
            table[0].starts_with(&by.to_uppercase()) || by == "port",
            "{table:?}"
        );
        let heading: Vec<_> = table[0].split_ascii_whitespace().skip(1).collect();
        ensure!(
            heading == ["FLOWS", "SHARE", "PACKETS", "BYTES"],
            "{table:?}"
        );
        ensure!(table[1].starts_with(&name), "{table:?}");
        ensure!(
            table[1].contains(&format!(" {} ", number(first, "flows"))),
            "{table:?}"
        );
        let more = format!("and {} more, of {all} flows in total", sums.len() - 1);
        ensure!(table[2] == more, "{table:?}");
    }
    Ok(())
}

#[test]
fn reasons_are_the_same_from_the_view_and_from_the_events() -> Result<()> {
    let Some(fleet) = Fleet::new(14, 1_500)? else {
        return Ok(());
    };
    type Wanted<'a> = &'a dyn Fn(&Ended) -> bool;
    let cases: [(&str, Wanted<'_>); 6] = [
        ("", &|_| true),
        ("sport <= 65535", &|_| true),
        ("proto == TCP and not state == close", &|it| {
            it.flow.proto == "tcp" && it.flow.state != "close"
        }),
        ("dport == 443 and proto in {tcp, udp}", &|it| {
            it.flow.dst.port() == 443 && matches!(it.flow.proto, "tcp" | "udp")
        }),
        // Of ICMP, the view has no port.
        ("dport == 443", &|it| it.flow.dst.port() == 443),
        ("reason in {idle, closed} and src in 10.0.0.0/8", &|it| {
            let is_in =
                matches!(it.flow.src.ip(), std::net::IpAddr::V4(it) if it.octets()[0] == 10);
            is_in && matches!(it.reason, Reason::Idle | Reason::Closed)
        }),
    ];
    for (filter, wanted) in cases {
        let mut sums: BTreeMap<(String, String), u64> = BTreeMap::new();
        for (_, ended) in fleet.ends(true).filter(|(_, it)| wanted(it)) {
            let name = (ended.reason.name().to_owned(), ended.flow.state.to_owned());
            *sums.entry(name).or_default() += 1;
        }
        let all: u64 = sums.values().sum();
        let found = fleet.json(&["reasons", filter, "--since", "30m"])?;
        ensure!(found.len() == sums.len(), "{filter}: {found:?}");
        for value in &found {
            let name = (
                text(value, "reason").to_owned(),
                text(value, "state").to_owned(),
            );
            let flows = *sums.get(&name).context("a stranger")?;
            ensure!(number(value, "flows") == flows, "{filter}: {value} {flows}");
            ensure!(
                is_close(value, "share", flows as f64 / all as f64),
                "{value}"
            );
        }
        let table = fleet.lines(&["reasons", filter, "--since", "30m"])?;
        ensure!(
            table.len() == found.len() + 1 && table[0].starts_with("REASON"),
            "{table:?}"
        );
        let words: Vec<_> = table[1].split_whitespace().collect();
        let first = &found[0];
        let flows = number(first, "flows").to_string();
        ensure!(
            words[..3] == [text(first, "reason"), text(first, "state"), &flows],
            "{table:?}"
        );
    }
    Ok(())
}

/// Ends of established TCP flows, and those of them that were idle: now and before.
#[derive(Clone, Default)]
struct Leaking {
    now: [u64; 2],
    before: [u64; 2],
    hosts: BTreeSet<String>,
    first: Option<u64>,
}

#[test]
fn leaks_are_compared_with_the_time_before() -> Result<()> {
    let Some(fleet) = Fleet::new(15, 4_000)? else {
        return Ok(());
    };
    for by_host in [false, true] {
        for (filter, port) in [
            ("", None),
            ("sport < 50000 or sport >= 50000", None),
            ("dport == 443", Some(443)),
        ] {
            let mut sums: BTreeMap<String, Leaking> = BTreeMap::new();
            for is_now in [true, false] {
                for (past, ended) in fleet.ends(is_now) {
                    let flow = ended.flow;
                    let is_idle = ended.reason == Reason::Idle && flow.state == "established";
                    let is_ended = matches!(ended.reason, Reason::Closed | Reason::Reset);
                    let is_other = port.is_some_and(|port| port != flow.dst.port());
                    if flow.proto != "tcp" || !(is_idle || is_ended) || is_other {
                        continue;
                    }
                    let host = past.identity.host.clone();
                    let service = format!("tcp/{}", flow.dst.port());
                    let name = if by_host { host.clone() } else { service };
                    let sum = sums.entry(name).or_default();
                    let counts = if is_now {
                        &mut sum.now
                    } else {
                        &mut sum.before
                    };
                    counts[0] += 1;
                    counts[1] += u64::from(is_idle);
                    if is_idle {
                        let minute = micros(past.mark.time) / 60_000_000 * 60_000_000;
                        sum.first = Some(sum.first.map_or(minute, |it| it.min(minute)));
                    }
                    if is_idle && is_now {
                        sum.hosts.insert(host);
                    }
                }
            }
            sums.retain(|_, sum| sum.now[1] > 0);
            ensure!(!sums.is_empty());
            let by = if by_host { "host" } else { "service" };
            let found = fleet.json(&["leaks", filter, "--by", by, "--since", "30m"])?;
            ensure!(found.len() == sums.len(), "{filter}: {found:?}");
            let share = |[ended, idle]: [u64; 2]| match ended {
                0 => 0.0,
                _ => idle as f64 / ended as f64,
            };
            for value in &found {
                let name = text(value, if by_host { "reporter" } else { "service" });
                let sum = sums
                    .get(name)
                    .with_context(|| format!("a stranger: {value}"))?;
                let names = ["ended", "idle", "ended_before", "idle_before", "hosts"];
                let found = names.map(|name| number(value, name));
                let [now, before] = [sum.now, sum.before];
                let hosts = sum.hosts.len() as u64;
                let expected = [now[0], now[1], before[0], before[1], hosts];
                ensure!(found == expected, "{filter}: {value} {expected:?}");
                ensure!(is_close(value, "share", share(now)), "{value}");
                ensure!(is_close(value, "share_before", share(before)), "{value}");
                ensure!(
                    is_close(value, "change", share(now) - share(before)),
                    "{value}"
                );
                let first = humantime::parse_rfc3339(text(value, "first"))?;
                ensure!(Some(micros(first)) == sum.first, "{value}");
            }
            let idle: Vec<_> = found.iter().map(|it| number(it, "idle")).collect();
            ensure!(idle.is_sorted_by(|one, two| one >= two), "{idle:?}");
            let table = fleet.lines(&[
                "leaks", filter, "--by", by, "--since", "30m", "--limit", "1",
            ])?;
            ensure!(table[0].starts_with(&by.to_uppercase()), "{table:?}");
            let first = &found[0];
            let words: Vec<_> = table[1].split_whitespace().map(str::to_owned).collect();
            let counts = ["ended", "idle"].map(|name| number(first, name).to_string());
            ensure!(
                table[1].contains(&counts.join(" ")) || words.len() > 7,
                "{table:?}"
            );
            let change = first["change"].as_f64().context("no change")?;
            ensure!(
                words.contains(&format!("{:+.1}%", 100.0 * change)),
                "{table:?} {change}"
            );
            if found.len() > 1 {
                ensure!(
                    table[2] == format!("and {} more", found.len() - 1),
                    "{table:?}"
                );
            }
        }
    }
    Ok(())
}

/// Whether a random fleet has what the tests above count.
#[test]
fn random_events_are_of_all_kinds() {
    let mut maker = Maker::new(1);
    let pasts: Vec<_> = (0..500).map(|_| maker.event(SystemTime::now())).collect();
    let kinds: BTreeSet<_> = pasts.iter().map(|it| it.kind().name()).collect();
    assert_eq!(kinds.len(), 6, "{kinds:?}");
    let is_timed = |past: &&Past| matches!(&past.event, twheel::history::PastEvent::Flow(FlowEvent::Ended(it)) if it.pace.is_some());
    assert!(pasts.iter().filter(is_timed).count() > 50);
}
