//! Collectors and exporters that end, refuse, or are not there.

use std::{
    collections::BTreeSet,
    fs,
    net::{TcpListener, UdpSocket},
    process::Stdio,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::{PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::{Twheel, wait_within},
};

use crate::{
    collectors::free_port,
    flows::{Lab, past},
    listener::{Listener, Session, the_number},
};

const PEN: &str = "32473";
/// The private element with the number of the event.
const SEQ: &str = "Enterprise { enterprise_number: 32473, field_number: 2 }";

/// The numbers of the events that came, each session for itself, with how many records there were.
fn numbers(listener: &Listener) -> Result<(BTreeSet<u64>, usize)> {
    let (mut numbers, mut records) = (BTreeSet::new(), 0);
    for connection in listener.connections() {
        let session = Session::parse(&connection, 0)?;
        ensure!(session.flows.is_empty() || !session.statistics.is_empty());
        records += session.flows.len();
        for flow in &session.flows {
            numbers.insert(the_number(flow, SEQ)?);
        }
    }
    Ok((numbers, records))
}

/// Waits until these events have come.
fn await_numbers(listener: &Listener, wanted: &BTreeSet<u64>) -> Result<usize> {
    let end = Instant::now() + PATIENCE;
    loop {
        let (numbers, records) = numbers(listener)?;
        if numbers == *wanted {
            return Ok(records);
        }
        let missing = wanted.difference(&numbers).count();
        ensure!(Instant::now() < end, "{missing} events have not come");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn whoever_is_killed_each_flow_arrives_over_tcp() -> Result<()> {
    require_root();
    let kills = if is_long() { 60 } else { 8 };
    let history = Directory::new("ipfix-kills")?;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "300ms", "--json"];
    let twheel = Twheel::start(
        &pair.server,
        &[&args[..], &["--history", history.path()]].concat(),
    )?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let to = format!("{},tcp", listener.local_addr()?);
    let state = history.file("state");
    let export = [
        "export", "ipfix", "--to", &to, "--pen", PEN, "--iface", SERVER,
    ];
    let export = [
        &export[..],
        &["--state", &state, "--history", history.path()],
    ]
    .concat();
    // The first connections end after a few messages, which are read; what follows is not.
    let collector = Listener::start(listener, 3, None);
    let export = || {
        let mut export = pair.server.twheel(&export)?;
        anyhow::Ok(export.stdin(Stdio::null()).stderr(Stdio::null()).spawn()?)
    };
    for round in 0..kills {
        let mut exporter = export()?;
        pair.server
            .begin_these(SERVER, 200 * round..200 * (round + 1))?;
        thread::sleep(Duration::from_millis(u64::from(50 + 97 * (round % 7))));
        exporter.kill()?;
        exporter.wait()?;
    }
    let end = Instant::now() + PATIENCE;
    pair.server.await_expired(200 * u64::from(kills), end)?;
    let wanted: BTreeSet<_> = loop {
        let ends = past(&pair.server, history.path())?;
        if ends.len() == 200 * kills as usize {
            break ends.iter().filter_map(|it| it["seq"].as_u64()).collect();
        }
        ensure!(Instant::now() < end, "{} ends", ends.len());
        thread::sleep(Duration::from_millis(100));
    };
    let mut exporter = export()?;
    let records = await_numbers(&collector, &wanted)?;
    exporter.kill()?;
    exporter.wait()?;
    let connections = collector.connections().len();
    assert!(connections > 2, "{connections} connections");
    println!(
        "{records} records of {} flows, {connections} connections",
        wanted.len()
    );
    twheel.kill()?;
    Ok(())
}

#[test]
fn a_datagram_that_is_refused_is_sent_again_and_that_is_said_once() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix-refused")?;
    let host = &lab.pair.server;
    let port = free_port(host)?;
    let args = lab.export(&format!("127.0.0.1:{port}"), "state", &["--once"]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let mut exporter = host.twheel(&args)?.stderr(Stdio::piped()).spawn()?;
    // Several attempts.
    thread::sleep(Duration::from_secs(2));
    let socket = host.enter(|| Ok(UdpSocket::bind(("127.0.0.1", port))?))?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    let (mut messages, mut buffer, mut ended) = (Vec::new(), vec![0; 1 << 16], None);
    let end = Instant::now() + PATIENCE;
    while ended.is_none() {
        ensure!(Instant::now() < end, "it does not end");
        ended = exporter.try_wait()?;
        while let Ok(length) = socket.recv(&mut buffer) {
            messages.push(buffer[..length].to_vec());
        }
    }
    assert!(ended.is_some_and(|it| it.success()));
    let first = u32::from_be_bytes(messages[0][8..12].try_into()?);
    assert!(first > 0, "the count goes on behind what was refused");
    let session = Session::parse(&messages, first)?;
    assert_eq!(session.flows.len(), lab.records(false)?.len());
    let said = std::io::read_to_string(exporter.stderr.take().context("no stderr")?)?;
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("refused") && said.contains("sending again"),
        "{said}"
    );
    Ok(())
}

/// An authority, and what it has signed: for the collector, and for the exporter.
struct Keys {
    directory: Directory,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Keys {
    fn new(name: &str) -> Result<Self> {
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let keys = Self {
            directory: Directory::new(name)?,
            authority: CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?,
        };
        fs::write(keys.directory.0.join("ca"), keys.authority.pem())?;
        let key = KeyPair::generate()?;
        let client = CertificateParams::new(["exporter".to_owned()])?;
        let client = client.signed_by(&key, &keys.authority)?;
        fs::write(keys.directory.0.join("cert"), client.pem())?;
        fs::write(keys.directory.0.join("key"), key.serialize_pem())?;
        Ok(keys)
    }

    /// A collector with these keys, which wants to see the exporter's certificate.
    fn server(&self) -> Result<Arc<ServerConfig>> {
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone())?;
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                .build()?;
        let key = KeyPair::generate()?;
        let server = CertificateParams::new(["127.0.0.1".to_owned()])?;
        let server = server.signed_by(&key, &self.authority)?;
        let private = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![server.der().clone()], private)?;
        Ok(Arc::new(config))
    }

    fn file(&self, name: &str) -> String {
        self.directory.file(name)
    }
}

#[test]
fn flows_arrive_over_tls_and_only_there() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix-tls")?;
    let (keys, others) = (Keys::new("ipfix-keys")?, Keys::new("ipfix-other-keys")?);
    let host = &lab.pair.server;
    let listener = host.enter(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let to = format!("{},tls", listener.local_addr()?);
    let collector = Listener::start(listener, usize::MAX, Some(keys.server()?));
    // Whoever is not trusted is told nothing, nor is who asks for a certificate and sees none.
    for (ca, own, said) in [
        (others.file("ca"), Some(&keys), "invalid peer certificate"),
        (keys.file("ca"), None, "CertificateRequired"),
        (keys.file("ca"), Some(&others), "fatal alert"),
    ] {
        let (cert, key) = own.map_or_else(Default::default, |it| (it.file("cert"), it.file("key")));
        let mut options = vec!["--pen", PEN, "--ca", &ca];
        if own.is_some() {
            options.extend(["--cert", &cert, "--key", &key]);
        }
        let args = lab.export(&to, "refused", &options);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let mut exporter = host.twheel(&args)?.stderr(Stdio::piped()).spawn()?;
        assert!(wait_within(&mut exporter, Duration::from_secs(2))?.is_none());
        let stderr = std::io::read_to_string(exporter.stderr.take().context("no stderr")?)?;
        assert!(stderr.contains(said), "{said}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(collector.connections().iter().all(Vec::is_empty));
    }
    let (ca, cert, key) = (keys.file("ca"), keys.file("cert"), keys.file("key"));
    let own = ["--pen", PEN, "--ca", &ca, "--cert", &cert, "--key", &key];
    let said = lab.export_once(&to, "trusted", &own)?;
    assert_eq!(said, "");
    let wanted = lab
        .ends
        .iter()
        .filter_map(|it| it["seq"].as_u64())
        .collect();
    let records = await_numbers(&collector, &wanted)?;
    assert_eq!(records, lab.records(false)?.len(), "each once");
    Ok(())
}

#[test]
fn what_cannot_be_used_is_said_in_a_sentence() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix-bad")?;
    let host = &lab.pair.server;
    let nonsense = lab.directory.file("nonsense");
    fs::write(&nonsense, "nonsense")?;
    for (to, options, code, said) in [
        ("host", &[][..], 2, "give a host and a port"),
        ("host:4739,sctp", &[], 2, "sctp is no transport"),
        ("::1:4739", &[], 2, "in brackets"),
        ("host:4739", &["--ca", &nonsense], 2, "need TLS"),
        (
            "host:4739,tls",
            &["--ca", &nonsense],
            2,
            "it holds no certificate",
        ),
        ("host:4739,tls", &["--cert", &nonsense], 2, "--key"),
        (
            "host:4739,tls",
            &["--ca", "/nowhere"],
            1,
            "cannot read /nowhere",
        ),
        (
            "host:4739",
            &["--message-size", "100"],
            2,
            "give 640 to 65000",
        ),
        ("host:4739", &["--pen", "0"], 2, "--pen"),
    ] {
        let args = lab.export(to, "state", options);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let ended = host.twheel_once(&args)?;
        assert_eq!(ended.code(), Some(code), "{ended:?}");
        assert!(ended.stderr.contains(said), "{said}: {ended:?}");
    }
    // A host that nobody knows may be known later.
    for to in ["nobody.invalid:4739", "nobody.invalid:4739,tcp"] {
        let args = lab.export(to, "state", &[]);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let mut exporter = host.twheel(&args)?.stderr(Stdio::piped()).spawn()?;
        assert!(wait_within(&mut exporter, Duration::from_secs(2))?.is_none());
        let stderr = std::io::read_to_string(exporter.stderr.take().context("no stderr")?)?;
        assert!(
            stderr.contains("trying again until it is there"),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    Ok(())
}

#[test]
fn a_datagram_has_arrived_when_nothing_has_refused_it_for_a_second() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix-settled")?;
    let host = &lab.pair.server;
    let socket = host.enter(|| Ok(UdpSocket::bind("127.0.0.1:0")?))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let args = lab.export(&socket.local_addr()?.to_string(), "state", &[]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let before = Instant::now();
    let mut exporter = host.twheel(&args)?.spawn()?;
    socket.recv(&mut [0; 1400])?;
    let state = lab.directory.0.join("state");
    let mut kept = state.exists();
    while !kept {
        ensure!(before.elapsed() < PATIENCE, "no position is kept");
        thread::sleep(Duration::from_millis(20));
        kept = state.exists();
    }
    assert!(
        before.elapsed() > Duration::from_secs(1),
        "a refusal may still come"
    );
    exporter.kill()?;
    exporter.wait()?;
    Ok(())
}
