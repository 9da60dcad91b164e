//! `twheel policy load` while flows live: each flow gets the rule that a new flow of its kind gets,
//! and `--dry-run` says beforehand how many change.
#![allow(missing_docs)]

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::PacketBuilder;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::stepper::pin_to;
use twheel_tests::{
    netns::{Namespace, PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
    path,
    running::{Ended, PolicyFile, Twheel},
};

const LEGS: [&str; 2] = ["leg0", "leg1"];
/// All protocols; and no flow ends while its rule is looked at, however slow the machine is.
const TRACKED: [&str; 4] = ["--proto", "tcp,udp,icmp", "--timeout", "1h"];

/// A gateway with two interfaces, and a host behind each.
struct Lab {
    gateway: Namespace,
    _hosts: Vec<Namespace>,
    /// Of each interface, the other end and the gateway's.
    ends: Vec<[OwnedFd; 2]>,
}

impl Lab {
    fn new() -> Result<Self> {
        let gateway = Namespace::new("gateway")?;
        let (mut hosts, mut ends) = (Vec::new(), Vec::new());
        for leg in LEGS {
            let host = Namespace::new("host")?;
            host.ip(&format!(
                "link add eth type veth peer name {leg} netns {}",
                gateway.name()
            ))?;
            host.ip("link set eth up")?;
            gateway.ip(&format!("link set {leg} up"))?;
            ends.push([
                host.enter(|| path::open("eth", 0))?,
                gateway.enter(|| path::open(leg, 0))?,
            ]);
            hosts.push(host);
        }
        Ok(Self {
            gateway,
            _hosts: hosts,
            ends,
        })
    }

    /// The rules of all live flows, by the initiator's port.
    fn rules(&self) -> Result<BTreeMap<u16, Option<String>>> {
        let flows = ["flows", "--json", "--iface", LEGS[0]];
        let ended = self.gateway.twheel_once(&flows)?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        let rule = |line: &twheel_tests::running::Printed| {
            let flow: Value = serde_json::from_str(&line.text)?;
            let port = flow["sport"].as_u64().context("no port")? as u16;
            Ok((port, flow["rule"].as_str().map(str::to_owned)))
        };
        ended.lines.iter().map(rule).collect()
    }

    /// Begins a flow of each kind, with ports from this one on, and waits for them.
    fn begin(&self, kinds: &[Kind], first: u16) -> Result<()> {
        for (port, kind) in (first..).zip(kinds) {
            let end = &self.ends[kind.leg][usize::from(kind.is_outgoing)];
            path::send(end, &kind.frame(port)?)?;
        }
        let until = Instant::now() + PATIENCE;
        let ports = first..first + kinds.len() as u16;
        loop {
            let rules = self.rules()?;
            if ports.clone().all(|port| rules.contains_key(&port)) {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{first}: {rules:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Loads a policy. What comes of the flows is what `--dry-run` has said, which changes nothing.
    fn load(&self, file: &PolicyFile) -> Result<Numbers> {
        let before = self.rules()?;
        let load = ["policy", "load", file.path(), "--iface", LEGS[0]];
        let dry = self
            .gateway
            .twheel_once(&[&load[..], &["--dry-run"]].concat())?;
        let foretold = foretold(&dry)?;
        let after = self.rules()?;
        ensure!(
            after == before,
            "a dry run has changed rules: {before:?}, then {after:?}"
        );
        let ended = self.gateway.twheel_once(&load)?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        let numbers = Numbers::parse(&ended.stderr)?;
        ensure!(numbers == foretold, "{numbers:?}, not {foretold:?}");
        let (would, has) = (retimed(&dry.lines[0].text), retimed(&ended.stderr));
        ensure!(would == has, "{would:?}, not {has:?}");
        Ok(numbers)
    }
}

/// The rules that get other timeouts, by the sentence about live flows.
fn retimed(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.contains(" live flow"))?;
    Some(line.split_once("; other timeouts for ")?.1)
}

/// The numbers of a line that says what becomes of live flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Numbers {
    all: u64,
    changed: u64,
    lost: u64,
    gained: u64,
    exposed: u64,
    due: u64,
}

impl Numbers {
    fn parse(text: &str) -> Result<Self> {
        let line = text.lines().find(|line| line.contains(" live flow"));
        let line = line.with_context(|| format!("no flows: {text}"))?;
        let (_, said) = line.split_once("; ").context("no sentence")?;
        let (all, parts) = said.split_once(" live flow").context("no flows")?;
        let (_, parts) = parts.split_once(": ").context("no parts")?;
        let parts = parts.split("; ").next().unwrap_or_default();
        let number = |text: &str| -> Result<u64> { Ok(text.replace(',', "").parse()?) };
        let mut numbers = Self {
            all: number(all)?,
            ..Self::default()
        };
        for part in parts
            .split(", ")
            .filter(|part| !part.starts_with("no change"))
        {
            let (count, what) = part.split_once(' ').context("no number")?;
            let field = match what.trim_start_matches("would ") {
                it if it.starts_with("change") => &mut numbers.changed,
                it if it.starts_with("los") => &mut numbers.lost,
                "get a rule" | "got a rule" => &mut numbers.gained,
                "may now be reaped" | "might be reaped then" => &mut numbers.exposed,
                it if it.contains("due") => &mut numbers.due,
                other => anyhow::bail!("{other}: {line}"),
            };
            *field = number(count)?;
        }
        Ok(numbers)
    }
}

/// What a dry run has said; the sums of its table are the numbers of its first line.
fn foretold(dry: &Ended) -> Result<Numbers> {
    ensure!(dry.code() == Some(0), "{}", dry.stderr);
    let lines: Vec<_> = dry.lines.iter().map(|line| line.text.as_str()).collect();
    let (first, table) = lines.split_first().context("no output")?;
    ensure!(first.contains(": not loaded; "), "{first}");
    let numbers = Numbers::parse(first)?;
    let mut moved = [0; 3];
    for row in table.iter().skip(2) {
        let cells: Vec<_> = row.split_ascii_whitespace().collect();
        let [flows, from, to, _, _] = cells[..] else {
            anyhow::bail!("{row:?}");
        };
        let kind = match (from, to) {
            (_, "-") => 1,
            ("-", _) => 2,
            _ => 0,
        };
        moved[kind] += flows.parse::<u64>()?;
    }
    ensure!(
        moved == [numbers.changed, numbers.lost, numbers.gained],
        "{lines:?}"
    );
    Ok(numbers)
}

#[derive(Clone, Copy, PartialEq)]
enum Proto {
    Tcp,
    Udp,
    Icmp,
}

/// A kind of flow: how its first packet is seen.
#[derive(Clone, Copy)]
struct Kind {
    leg: usize,
    is_outgoing: bool,
    tags: &'static [u16],
    is_v6: bool,
    proto: Proto,
    dport: u16,
    /// Whether it goes to the second server.
    other: bool,
}

const KIND: Kind = Kind {
    leg: 0,
    is_outgoing: false,
    tags: &[],
    is_v6: false,
    proto: Proto::Tcp,
    dport: 80,
    other: false,
};

impl Kind {
    fn frame(&self, port: u16) -> Result<Vec<u8>> {
        let last = if self.other { 3 } else { 1 };
        let link = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let v6 = |last| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        let ip = match self.is_v6 {
            true => link.ipv6(v6(2), v6(last), 64),
            false => link.ipv4([10, 99, 0, 2], [10, 99, 0, last], 64),
        };
        let mut frame = Vec::new();
        match self.proto {
            Proto::Tcp => ip
                .tcp(port, self.dport, 1000, 1000)
                .syn()
                .write(&mut frame, &[])?,
            Proto::Udp => ip.udp(port, self.dport).write(&mut frame, &[0; 20])?,
            Proto::Icmp => ip.icmpv4_echo_request(port, 1).write(&mut frame, &[])?,
        }
        for tag in self.tags.iter().rev() {
            let [high, low] = tag.to_be_bytes();
            frame.splice(12..12, [0x81, 0, high, low]);
        }
        Ok(frame)
    }
}

/// Kinds of flows that differ in one thing each.
fn kinds() -> Vec<Kind> {
    vec![
        KIND,
        Kind { dport: 22, ..KIND },
        Kind {
            other: true,
            ..KIND
        },
        Kind {
            is_v6: true,
            ..KIND
        },
        Kind {
            tags: &[10],
            ..KIND
        },
        Kind {
            tags: &[20, 10],
            ..KIND
        },
        Kind {
            is_outgoing: true,
            ..KIND
        },
        Kind {
            proto: Proto::Udp,
            ..KIND
        },
        Kind {
            proto: Proto::Icmp,
            ..KIND
        },
        Kind { leg: 1, ..KIND },
        Kind {
            leg: 1,
            is_outgoing: true,
            ..KIND
        },
    ]
}

const CONDITIONS: &[&str] = &[
    "dport = 22",
    "dport = '80-90'",
    "src = '10.99.0.0/24'",
    "src = '2001:db8::/64'",
    "dst = '10.99.0.3'",
    "any = ['10.99.0.3', '2001:db8::1']",
    "iface = 'leg0'",
    "vlan = 10",
    "vlan = 20",
    "vlan = 0",
    "direction = 'out'",
    "direction = 'in'",
    "proto = 'udp'",
    "proto = ['icmp', 'tcp']",
    "iface = 'leg0'\ndirection = 'out'\nvlan = 0",
];

/// Loads a policy of each condition, one after the other. Each time, the flows of all earlier times
/// have the rules that new flows of their kinds get.
fn follow(lab: &Lab, file: &str, kinds: &[Kind], conditions: &[&str]) -> Result<()> {
    let policy = |number: usize, condition: &str| {
        format!(
            "[[rule]]\nname = 'rule-{number}'\n{condition}\n\
             [[rule]]\nname = 'rest'\nsrc = '0.0.0.0/0'\n"
        )
    };
    let file = PolicyFile::new(file, "[timeouts]\nudp = '5m'\nicmp = '5m'\n")?;
    lab.load(&file)?;
    let (mut first, mut begun, mut moved) = (10_000, 0, Numbers::default());
    for (number, condition) in conditions.iter().enumerate() {
        lab.begin(kinds, first)?;
        first += 1000;
        begun += kinds.len();
        file.write(&format!(
            "{}[timeouts]\nudp = '5m'\nicmp = '5m'\n",
            policy(number, condition)
        ))?;
        let numbers = lab.load(&file)?;
        ensure!(numbers.all == begun as u64, "{condition}: {numbers:?}");
        moved.changed += numbers.changed;
        moved.lost += numbers.lost;
        moved.gained += numbers.gained;
        lab.begin(kinds, first)?;
        begun += kinds.len();
        let rules = lab.rules()?;
        for (port, rule) in &rules {
            let new = &rules[&(first + port % 1000)];
            ensure!(rule == new, "{condition}: {port}: {rule:?}, not {new:?}");
        }
        let name = format!("rule-{number}");
        let met = rules.values().flatten().filter(|rule| **rule == name);
        let met = met.count();
        ensure!(0 < met && met < begun, "{condition} tells no flows apart");
        first += 1000;
    }
    let Numbers {
        changed,
        lost,
        gained,
        ..
    } = moved;
    ensure!(changed > 0 && lost > 0 && gained > 0, "{moved:?}");
    Ok(())
}

#[test]
fn live_flows_get_the_rules_that_new_flows_get() -> Result<()> {
    require_root();
    let lab = Lab::new()?;
    let mut args = vec!["--zone", "leg1=7"];
    args.extend(TRACKED);
    args.extend(LEGS.iter().flat_map(|leg| ["--iface", leg]));
    let twheel = Twheel::start(&lab.gateway, &args)?;
    twheel.await_stderr("leg1: attached")?;
    let zones = ["iface = 'leg1'", "zone = 7", "zone = [0, 9]"];
    follow(&lab, "several", &kinds(), &[CONDITIONS, &zones].concat())?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// A run on one interface does not keep the place of its flows: it is always the same.
#[test]
fn so_they_do_where_there_is_one_interface() -> Result<()> {
    require_root();
    let lab = Lab::new()?;
    let args = [&TRACKED[..], &["--iface", LEGS[0]]].concat();
    let twheel = Twheel::start(&lab.gateway, &args)?;
    let kinds: Vec<_> = kinds().into_iter().filter(|kind| kind.leg == 0).collect();
    let conditions: Vec<_> = CONDITIONS
        .iter()
        .copied()
        .filter(|condition| *condition != "iface = 'leg0'")
        .collect();
    follow(&lab, "single", &kinds, &conditions)?;
    // A condition that all flows meet, and one that none does.
    for (interface, some) in [("leg0", true), ("leg1", false)] {
        let text = format!("[[rule]]\nname = 'here'\niface = '{interface}'\n");
        lab.load(&PolicyFile::new(interface, &text)?)?;
        let rules = lab.rules()?;
        ensure!(!rules.is_empty());
        ensure!(
            rules.values().all(|rule| rule.is_some() == some),
            "{interface}: {rules:?}"
        );
    }
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// The interface of some flows is removed, and comes back with another index.
#[test]
fn flows_of_an_interface_that_comes_back_have_its_rules() -> Result<()> {
    require_root();
    let mut lab = Lab::new()?;
    let rule = "[[rule]]\nname = 'one'\niface = 'leg1'\n";
    let file = PolicyFile::new("back", rule)?;
    let mut args = vec!["--policy", file.path(), "--wait-iface"];
    args.extend(LEGS.iter().flat_map(|leg| ["--iface", leg]));
    let twheel = Twheel::start(&lab.gateway, &args)?;
    for leg in LEGS {
        twheel.await_stderr(&format!("{leg}: attached"))?;
    }
    let kinds = [KIND, Kind { leg: 1, ..KIND }];
    lab.begin(&kinds, 10_000)?;
    let one = Some("one".to_owned());
    ensure!(lab.rules()? == BTreeMap::from([(10_000, None), (10_001, one.clone())]));
    lab.gateway.ip("link del leg1")?;
    twheel.await_stderr("leg1: disappeared")?;
    lab.ends.truncate(1);
    let other = Namespace::new("host")?;
    other.ip(&format!(
        "link add eth type veth peer name leg1 netns {}",
        lab.gateway.name()
    ))?;
    other.ip("link set eth up")?;
    lab.gateway.ip("link set leg1 up")?;
    // The run reads the policy again by itself.
    twheel.await_stderr(": in force; 2 live flows: no change")?;
    let all = lab.rules()?;
    ensure!(
        all == BTreeMap::from([(10_000, None), (10_001, one)]),
        "{all:?}"
    );
    file.write(&rule.replace("one", "two"))?;
    let numbers = lab.load(&file)?;
    ensure!(numbers.changed == 1, "{numbers:?}");
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn a_hundred_thousand_flows_follow_and_add_up() -> Result<()> {
    require_root();
    const FLOWS: u32 = 100_000;
    let pair = Pair::new()?;
    // Flows of the first half come from 10.0.0.0, the others from 10.0.0.1.
    let policy = |first: &str, second: &str, timeout: &str| {
        let rule = |name: &str, last: u32, timeout: &str| {
            format!(
                "[[rule]]\nname = '{name}'\nsrc = '10.0.0.{last}'\n\
                 timeouts = {{ established = '{timeout}', unreplied = '{timeout}' }}\n"
            )
        };
        format!("{}{}", rule(first, 0, "1h"), rule(second, 1, timeout))
    };
    let file = PolicyFile::new("many", &policy("one", "two", "1h"))?;
    let args = [
        "--iface",
        SERVER,
        "--policy",
        file.path(),
        "--max-flows",
        "131072",
    ];
    let twheel = Twheel::start(&pair.server, &args)?;
    thread::scope(|scope| {
        let begin = |cpu: u32, flows: std::ops::Range<u32>| {
            let server = &pair.server;
            scope.spawn(move || -> Result<()> {
                pin_to(cpu)?;
                server.begin_these(SERVER, flows)
            })
        };
        let cpus = if thread::available_parallelism()?.get() > 1 {
            1
        } else {
            0
        };
        let halves = [begin(0, 0..FLOWS / 2), begin(cpus, FLOWS / 2..FLOWS)];
        let [one, two] = halves.map(|half| half.join().expect("no panic"));
        one.and(two)
    })?;
    let half = u64::from(FLOWS / 2);
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let dry = || {
        pair.server
            .twheel_once(&[&load[..], &["--dry-run"]].concat())
    };
    // The first rule gets another name, the second goes.
    file.write(&policy("other", "none", "1h").replace("10.0.0.1", "10.0.0.9"))?;
    let told = foretold(&dry()?)?;
    let started = Instant::now();
    let ended = pair.server.twheel_once(&load)?;
    println!("swept {FLOWS} flows in {:?}", started.elapsed());
    let numbers = Numbers::parse(&ended.stderr)?;
    ensure!(numbers == told, "{numbers:?}, not {told:?}");
    let wanted = Numbers {
        all: FLOWS.into(),
        changed: half,
        lost: half,
        ..Numbers::default()
    };
    ensure!(numbers == wanted, "{}", ended.stderr);
    // Now the run itself reads the file again, and half of the flows are due.
    thread::sleep(Duration::from_millis(500));
    file.write(&policy("other", "none", "300ms"))?;
    let told = foretold(&dry()?)?;
    kill(Pid::from_raw(twheel.pid().try_into()?), Signal::SIGHUP)?;
    let stderr = twheel.await_stderr(": in force; ")?;
    let numbers = Numbers::parse(&stderr)?;
    ensure!(numbers == told, "{numbers:?}, not {told:?}");
    let wanted = Numbers {
        all: FLOWS.into(),
        gained: half,
        due: half,
        ..Numbers::default()
    };
    ensure!(numbers == wanted, "{stderr}");
    let expired = pair.server.counter("expired")?;
    let until = Instant::now() + PATIENCE;
    while pair.server.counter("expired")? < half {
        ensure!(Instant::now() < until, "{expired} have expired");
        thread::sleep(Duration::from_millis(100));
    }
    ensure!(twheel.stop()?.code() == Some(0));
    pair.server.check_clean(SERVER)
}

#[test]
fn other_timeouts_of_a_rule_are_told() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let policy = |udp: &str, established: &str| {
        format!(
            "[timeouts]\nudp = '{udp}'\n[[rule]]\nname = 'r'\ndport = 7000\n\
             timeouts = {{ established = '{established}' }}\n"
        )
    };
    let file = PolicyFile::new("retimed", &policy("30s", "9m"))?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER, "--policy", file.path()])?;
    for (udp, established, told) in [
        ("30s", "5h", Some("r")),
        ("30s", "5h", None),
        ("20s", "5h", Some("flows of no rule, r")),
    ] {
        file.write(&policy(udp, established))?;
        let load = ["policy", "load", file.path(), "--iface", SERVER];
        let dry = pair
            .server
            .twheel_once(&[&load[..], &["--dry-run"]].concat())?;
        ensure!(dry.code() == Some(0), "{}", dry.stderr);
        assert_eq!(retimed(&dry.lines[0].text), told, "{dry:?}");
        let ended = pair.server.twheel_once(&load)?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        assert_eq!(retimed(&ended.stderr), told, "{}", ended.stderr);
        assert_eq!(ended.stderr.contains("no change of"), told.is_some());
    }
    ensure!(twheel.stop()?.code() == Some(0));
    pair.server.check_clean(SERVER)
}

#[test]
fn a_dry_run_changes_nothing_and_refuses_what_loading_does() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let first = "[[rule]]\nname = 'old'\ndport = 7777\ntimeouts = { established = '1h' }\n";
    let file = PolicyFile::new("dry", first)?;
    let args = ["--iface", SERVER, "--policy", file.path(), "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut connection = pair.connect(Family::V4)?;
    connection.talk()?;
    thread::sleep(Duration::from_millis(300));
    file.write("[[rule]]\nname = 'new'\ndport = 7777\ntimeouts = { established = '200ms' }\n")?;
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let dry = [&load[..], &["--dry-run"]].concat();
    let told = foretold(&pair.server.twheel_once(&dry)?)?;
    ensure!((told.changed, told.due) == (1, 1), "{told:?}");
    let expiries = twheel.expiries_until(Instant::now() + Duration::from_secs(1))?;
    ensure!(expiries.is_empty(), "{expiries:?}");
    let ended = pair.server.twheel_once(&load)?;
    ensure!(Numbers::parse(&ended.stderr)? == told, "{}", ended.stderr);
    let expiries = twheel.ends_within(Duration::from_secs(1), 1)?;
    let rules: Vec<_> = expiries.iter().map(|it| it.rule.as_deref()).collect();
    ensure!(rules == [Some("new")], "{expiries:?}");
    for text in [
        "[[rule]]\nname = 'a'\niface = 'no-such'\n",
        "reap = ['enforce']\n",
        "?",
    ] {
        file.write(text)?;
        let [loaded, dry] = [&load[..], &dry].map(|args| pair.server.twheel_once(args));
        let (loaded, dry) = (loaded?, dry?);
        ensure!(dry.code() == Some(2), "{text}: {}", dry.stderr);
        ensure!((loaded.code(), &loaded.stderr) == (dry.code(), &dry.stderr));
    }
    ensure!(twheel.stop()?.code() == Some(0));
    pair.server.check_clean(SERVER)
}
