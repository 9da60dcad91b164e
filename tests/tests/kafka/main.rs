//! Events go to a topic of Kafka, whoever dies on the way.
//!
//! The broker is tansu. What it does not have (TLS, right passwords) a front of these tests has.

mod front;

use std::{
    collections::BTreeMap,
    fs,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use front::{Adds, Front};
use serde_json::Value;
use twheel_tests::{
    broker::{Broker, Consumer, Message},
    is_long,
    netns::{PATIENCE, require_root},
    schema,
    sending::{Exporter, Sending, Sorted, Which, exporters},
};

const TOPIC: &str = "twheel";
const PARTITIONS: u32 = 5;

fn export(sending: &Sending, name: &str, brokers: &str, more: &[&str]) -> Result<Exporter> {
    let args = ["kafka", "--brokers", brokers, "--topic", TOPIC];
    sending.exporter(name, &[&args[..], more].concat())
}

fn lines(messages: &[Message]) -> impl Iterator<Item = &str> {
    messages.iter().map(|it| it.line.as_str())
}

fn sort(messages: &[Message]) -> Result<Sorted> {
    let mut sorted = Sorted::default();
    sorted.add_new(lines(messages))?;
    Ok(sorted)
}

/// Waits until what has arrived is enough, and returns all messages.
fn until_is(consumer: &Consumer, is_enough: impl Fn(&Sorted) -> bool) -> Result<Vec<Message>> {
    let mut sorted = Sorted::default();
    consumer.until(|messages| {
        sorted.add_new(lines(messages))?;
        Ok(is_enough(&sorted))
    })
}

/// Waits until these events have arrived, and returns all messages.
fn until(consumer: &Consumer, told: &BTreeMap<Which, String>) -> Result<Vec<Message>> {
    until_is(consumer, |sorted| sorted.events.len() >= told.len())
}

/// Asserts that what has arrived is what the history has: the same lines, in the schema, each keyed by
/// its flow, and all of a flow in one partition and in order.
fn check(messages: &[Message], told: &BTreeMap<Which, String>) -> Result<Vec<Value>> {
    let Sorted {
        events,
        exports,
        twice,
        ..
    } = sort(messages)?;
    let differs: Vec<_> = events
        .iter()
        .filter(|(which, line)| told.get(*which) != Some(line))
        .collect();
    ensure!(
        differs.is_empty() && events.len() == told.len(),
        "{differs:#?}"
    );
    let mut partitions = BTreeMap::new();
    for message in messages {
        schema::check(&message.line)?;
        let event: Value = serde_json::from_str(&message.line)?;
        let key = match event["flow_id"].as_str() {
            Some(flow) => flow,
            None => event["instance"].as_str().context("no instance")?,
        };
        ensure!(message.key == key, "{message:?}");
        let first = partitions
            .entry(key.to_owned())
            .or_insert(message.partition);
        ensure!(*first == message.partition, "two partitions: {message:?}");
    }
    let used: std::collections::BTreeSet<_> = partitions.values().collect();
    ensure!(used.len() == PARTITIONS as usize, "partitions {used:?}");
    println!(
        "{} messages for {} events: {twice} came twice",
        messages.len(),
        told.len()
    );
    Ok(exports)
}

/// The exporter is killed, and the broker is killed, stopped, and away for longer than one exporter
/// lives. The broker's store outlives it.
#[test]
fn whoever_is_killed_each_event_arrives_and_its_number_tells_what_came_twice() -> Result<()> {
    require_root();
    let Some(mut broker) = Broker::start_with_store()? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let kills: u64 = if is_long() { 60 } else { 12 };
    let mut sending = Sending::start("kafka-killed")?;
    let address = broker.address();
    for round in 0..kills {
        let exporter = export(&sending, "state", &address, &[])?;
        sending.begin(300)?;
        thread::sleep(Duration::from_millis(200 + 397 * (round % 5)));
        match round % 4 {
            1 => {
                broker.kill();
                thread::sleep(Duration::from_millis(500));
                broker.again()?;
            }
            2 => {
                broker.stop()?;
                thread::sleep(Duration::from_millis(500));
                broker.go_on()?;
                thread::sleep(Duration::from_millis(300));
            }
            _ => {}
        }
        exporter.kill()?;
    }
    let told = sending.end()?;
    let exporter = export(&sending, "state", &address, &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    let consumer = Consumer::start(&address, TOPIC, PARTITIONS as i32)?;
    let messages = until(&consumer, &told)?;
    let exports = check(&messages, &told)?;
    ensure!(exporters(&exports).len() > 1, "{exports:?}");
    // Nothing is sent twice without need.
    let exporter = export(&sending, "state", &address, &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    thread::sleep(Duration::from_secs(1));
    let (before, now) = (sort(&messages)?, sort(&consumer.read())?);
    assert_eq!(now.twice, before.twice, "came twice");
    Ok(())
}

/// A broker that says that it has a batch, and not where, may have noted its number alone: it is sent
/// again, by a new producer. This broker has it, so it comes twice.
#[test]
fn what_the_broker_says_that_it_has_and_not_where_is_sent_again() -> Result<()> {
    require_root();
    let (listener, at) = Front::listener()?;
    let Some(broker) = Broker::start_with(Some(&at), false)? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let front = Front::start(listener, broker.address(), Adds::default())?;
    let mut sending = Sending::start("kafka-cut")?;
    let mut exporter = export(&sending, "state", &at, &[])?;
    for _ in 0..5 {
        front.cut(2);
        sending.begin(300)?;
        let end = Instant::now() + PATIENCE;
        while front.left() > 0 {
            ensure!(Instant::now() < end, "nothing is sent");
            thread::sleep(Duration::from_millis(20));
        }
    }
    let told = sending.end()?;
    let consumer = Consumer::start(&at, TOPIC, PARTITIONS as i32)?;
    // What comes twice may come last.
    let messages = until_is(&consumer, |sorted| {
        sorted.events.len() >= told.len() && sorted.twice > 0
    })?;
    check(&messages, &told)?;
    exporter.says("do not say where it stands: sending again")?;
    exporter.kill()
}

/// This broker notes the number of a batch before it keeps it: if it is killed in between, it takes
/// the batch for one that it has.
#[test]
fn a_broker_that_is_killed_again_and_again_gets_all() -> Result<()> {
    require_root();
    let Some(mut broker) = Broker::start_with_store()? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let mut sending = Sending::start("kafka-broker")?;
    let address = broker.address();
    let exporter = export(&sending, "state", &address, &["--set", "linger.ms=5"])?;
    for round in 0..15 {
        for _ in 0..5 {
            sending.begin(60)?;
            thread::sleep(Duration::from_millis(90 + 17 * (round % 4)));
        }
        broker.kill();
        thread::sleep(Duration::from_millis(100));
        broker.again()?;
    }
    let told = sending.end()?;
    let consumer = Consumer::start(&address, TOPIC, PARTITIONS as i32)?;
    let messages = until(&consumer, &told)?;
    check(&messages, &told)?;
    exporter.kill()
}

/// A broker that loses what it had acknowledged, as one that keeps nothing does: what was not
/// acknowledged arrives after it is back, with a new producer.
#[test]
fn a_broker_that_has_forgotten_the_producer_gets_the_rest() -> Result<()> {
    require_root();
    let Some(mut broker) = Broker::start()? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let mut sending = Sending::start("kafka-forgets")?;
    let address = broker.address();
    let mut exporter = export(&sending, "state", &address, &[])?;
    sending.begin(500)?;
    let first = Consumer::start(&address, TOPIC, PARTITIONS as i32)?;
    first.until(|messages| Ok(messages.len() > 400))?;
    thread::sleep(Duration::from_secs(3));
    drop(first);
    broker.kill();
    sending.begin(700)?;
    let said = exporter.says("cannot reach a Kafka broker at")?;
    ensure!(said.contains("Connection refused"), "{said}");
    // It is tried several times meanwhile.
    thread::sleep(Duration::from_secs(3));
    broker.again()?;
    let said = exporter.says("have no topic twheel, and twheel creates none")?;
    ensure!(
        said.contains("kafka-topics.sh --create --topic twheel"),
        "{said}"
    );
    broker.create(TOPIC, PARTITIONS)?;
    let told = sending.end()?;
    let consumer = Consumer::start(&address, TOPIC, PARTITIONS as i32)?;
    // All that the first life has not acknowledged.
    let wanted: Vec<_> = told.keys().filter(|it| it.1 > 510).collect();
    ensure!(wanted.len() > 690, "{} events", wanted.len());
    until_is(&consumer, |sorted| {
        wanted.iter().all(|it| sorted.events.contains_key(it))
    })?;
    let said = exporter.said();
    for once in ["cannot reach a Kafka broker", "have no topic"] {
        assert_eq!(said.matches(once).count(), 1, "{said}");
    }
    exporter.kill()
}

#[test]
fn two_exporters_of_one_instance_are_told() -> Result<()> {
    require_root();
    let Some(broker) = Broker::start()? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let mut sending = Sending::start("kafka-two")?;
    let running = ["one", "two"].map(|name| export(&sending, name, &broker.address(), &[]));
    sending.begin(300)?;
    let told = sending.end()?;
    let consumer = Consumer::start(&broker.address(), TOPIC, PARTITIONS as i32)?;
    let messages = until_is(&consumer, |sorted| {
        let is_all = sorted.events.len() == told.len() && sorted.twice == told.len();
        is_all && sorted.exports.len() >= 2
    })?;
    let exports = check(&messages, &told)?;
    assert_eq!(exporters(&exports).len(), 2, "{exports:?}");
    for line in &exports {
        ensure!(line["behind_us"].as_u64() < Some(60_000_000), "{line}");
        assert_eq!(line["not_sent"], 0);
    }
    for exporter in running {
        exporter?.kill()?;
    }
    Ok(())
}

#[test]
fn an_export_says_what_is_wrong_with_the_broker() -> Result<()> {
    require_root();
    let Some(broker) = Broker::start_with(None, true)? else {
        return Ok(());
    };
    let mut sending = Sending::start("kafka-bad")?;
    sending.begin(20)?;
    sending.end()?;
    let password = sending.history.file("password");
    fs::write(&password, "wrong\n")?;
    let login = |mechanism: &'static str| {
        [
            "--sasl-mechanism",
            mechanism,
            "--user",
            "u",
            "--password-file",
            &password,
        ]
        .map(str::to_owned)
    };
    let address = broker.address();
    for mechanism in ["scram-sha-256", "scram-sha-512"] {
        let args = login(mechanism);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let mut exporter = export(&sending, mechanism, &address, &args)?;
        let said = exporter.says("refuse the user u")?;
        ensure!(
            said.contains("--password-file and --sasl-mechanism"),
            "{said}"
        );
        thread::sleep(Duration::from_secs(2));
        assert_eq!(exporter.said().lines().count(), 1, "{}", exporter.said());
        exporter.kill()?;
    }
    // Without a login, where one is wanted, the broker closes the connection.
    let mut exporter = export(&sending, "nobody", &address, &[])?;
    let said = exporter.says("cannot reach a Kafka broker")?;
    ensure!(
        said.contains("whether it wants --tls or --sasl-mechanism"),
        "{said}"
    );
    exporter.kill()?;
    for (args, says) in [
        (
            &["--brokers", "host", "--topic", "t"][..],
            "give a host and a port",
        ),
        (
            &["--brokers", "a:1", "--topic", "t", "--set", "x"],
            "NAME=VALUE",
        ),
        (
            &["--brokers", "a:1", "--topic", "t", "--set", "x=1"],
            "does not take the setting x",
        ),
        (
            &["--brokers", "a:1", "--topic", "t", "--set", "acks=1"],
            "twheel sets this itself",
        ),
        (
            &["--brokers", "a:1", "--topic", "t", "--set", "retries=3"],
            "twheel sets this itself",
        ),
        (
            &[
                "--brokers",
                "a:1",
                "--topic",
                "t",
                "--set",
                "sasl.password=p",
            ],
            "--password-file",
        ),
        (
            &["--brokers", "a:1", "--topic", ".."],
            "1 to 249 characters",
        ),
        (
            &[
                "--brokers",
                "a:1",
                "--topic",
                "t",
                "--tls",
                "--ca",
                "/nothing",
            ],
            "cannot read /nothing",
        ),
    ] {
        let exporter = sending.exporter("usage", &[&["kafka"], args].concat())?;
        let code = if says == "cannot read /nothing" { 1 } else { 2 };
        assert_eq!(exporter.code()?, Some(code), "{args:?}");
        let said = fs::read_to_string(sending.history.file("usage.said"))?;
        ensure!(said.contains(says), "{args:?}: {said}");
    }
    Ok(())
}

#[test]
fn tls_and_a_login_are_those_that_were_given() -> Result<()> {
    require_root();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()])?;
    let (listener, at) = Front::listener()?;
    let Some(broker) = Broker::start_with(Some(&at), false)? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der())
        .map_err(anyhow::Error::msg)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)?;
    let adds = Adds {
        tls: Some(Arc::new(tls)),
        login: Some(("twheel".to_owned(), "a secret".to_owned())),
    };
    let _front = Front::start(listener, broker.address(), adds)?;
    let mut sending = Sending::start("kafka-tls")?;
    sending.begin(100)?;
    let told = sending.end()?;
    let (ca, password) = (
        sending.history.file("ca.pem"),
        sending.history.file("password"),
    );
    fs::write(&ca, made.cert.pem())?;
    fs::write(&password, "wrong\n")?;
    let login = [
        "--sasl-mechanism",
        "plain",
        "--user",
        "twheel",
        "--password-file",
        &password,
    ];
    for (args, says) in [
        (&["--tls"][..], "TLS with the Kafka brokers"),
        (
            &[&["--tls", "--ca", &ca][..], &login].concat(),
            "refuse the user twheel",
        ),
    ] {
        let mut exporter = export(&sending, says, &at, args)?;
        exporter.says(says)?;
        exporter.kill()?;
    }
    fs::write(&password, "a secret\n")?;
    let args = [&["--tls", "--ca", &ca, "--once"][..], &login].concat();
    let exporter = export(&sending, "state", &at, &args)?;
    ensure!(
        exporter.code()? == Some(0),
        "it does not end: {}",
        broker.said()
    );
    let settings = [
        ("security.protocol", "sasl_ssl"),
        ("ssl.ca.location", &ca),
        ("sasl.mechanism", "PLAIN"),
        ("sasl.username", "twheel"),
        ("sasl.password", "a secret"),
    ];
    let consumer = Consumer::start_with(&at, TOPIC, PARTITIONS as i32, &settings)?;
    check(&until(&consumer, &told)?, &told)?;
    Ok(())
}

/// The broker stands still or is away while events go on: what the exporter holds is bounded.
#[test]
fn memory_is_bounded_while_the_broker_is_away() -> Result<()> {
    require_root();
    let Some(mut broker) = Broker::start_with_store()? else {
        return Ok(());
    };
    broker.create(TOPIC, PARTITIONS)?;
    let flows = if is_long() { 350_000 } else { 200_000 };
    let mut sending = Sending::start("kafka-memory")?;
    let exporter = export(&sending, "state", &broker.address(), &[])?;
    sending.begin(100)?;
    let consumer = Consumer::start(&broker.address(), TOPIC, PARTITIONS as i32)?;
    consumer.until(|messages| Ok(messages.len() > 100))?;
    drop(consumer);
    let before = exporter.memory()?;
    let mut most = 0;
    broker.stop()?;
    for round in 0..10 {
        if round == 5 {
            broker.kill();
        }
        sending.begin(flows / 10)?;
        thread::sleep(Duration::from_millis(500));
        most = most.max(exporter.memory()?);
    }
    broker.again()?;
    let told = sending.end()?;
    let consumer = Consumer::start(&broker.address(), TOPIC, PARTITIONS as i32)?;
    let messages = until(&consumer, &told)?;
    most = most.max(exporter.memory()?);
    println!("{before} bytes before, {most} at most");
    // The queue of 32 MiB, what librdkafka needs for each message, and its batches.
    ensure!(most < 96 << 20, "{most} bytes");
    check(&messages, &told)?;
    exporter.kill()
}
