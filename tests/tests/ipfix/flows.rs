//! Flows of all kinds, and what their records must say.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    forge::Forger,
    netns::{Namespace, PATIENCE},
    pair::{Family, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::listener::Message;

/// The VLAN of one of the flows.
const VLAN: u16 = 10;
/// Flows beyond the size of the table: some are evicted.
const CROWD: u32 = 1_000;

/// A history of flows that have ended.
pub struct Lab {
    /// The hosts.
    pub pair: Pair,
    /// The directory of the history.
    pub directory: Directory,
    /// The events of the ends, as twheel prints them.
    pub ends: Vec<Value>,
}

/// What exports a history.
pub struct Exporter<'a> {
    /// The host of the run and of the export.
    pub host: &'a Namespace,
    /// The instance.
    pub interface: &'a str,
    /// The directory of the history.
    pub directory: &'a Directory,
}

/// A record of a flow in one direction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    /// Addresses and, unless it is ICMP, ports of the sender and the receiver.
    pub ends: [(IpAddr, u16); 2],
    pub proto: u8,
    /// Milliseconds since 1970.
    pub start: u64,
    pub end: u64,
    pub packets: u64,
    pub bytes: u64,
    /// What the other side has sent; 0 in a record of one direction.
    pub reverse: (u64, u64),
    pub end_reason: u8,
    pub vlan: u16,
}

impl Lab {
    /// Makes flows with real packets, and waits for their ends.
    pub fn new(name: &str) -> Result<Self> {
        let directory = Directory::new(name)?;
        let pair = Pair::new()?;
        let mut args = vec!["--iface", SERVER, "--json", "--accounting"];
        args.extend(["--proto", "tcp,udp,icmp", "--timeout", "400ms"]);
        args.extend(["--max-flows", "77", "--history", directory.path()]);
        let twheel = Twheel::start(&pair.server, &args)?;
        make(&pair)?;
        await_empty(&pair.server)?;
        pair.server.begin_flows(SERVER, CROWD)?;
        await_empty(&pair.server)?;
        let ended = twheel.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let mut lab = Self {
            pair,
            directory,
            ends: Vec::new(),
        };
        lab.ends = lab.past()?;
        Ok(lab)
    }

    /// The ends in the history, as twheel prints them.
    pub fn past(&self) -> Result<Vec<Value>> {
        past(&self.pair.server, self.directory.path())
    }

    /// What exports this history.
    pub fn exporter(&self) -> Exporter<'_> {
        Exporter {
            host: &self.pair.server,
            interface: SERVER,
            directory: &self.directory,
        }
    }

    /// As [`Exporter::args`].
    pub fn export(&self, to: &str, name: &str, options: &[&str]) -> Vec<String> {
        self.exporter().args(to, name, options)
    }

    /// As [`Exporter::once`].
    pub fn export_once(&self, to: &str, name: &str, options: &[&str]) -> Result<String> {
        self.exporter().once(to, name, options)
    }

    /// The records that are to be sent, sorted.
    pub fn records(&self, biflow: bool) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for end in &self.ends {
            records.extend(of_end(end, biflow)?);
        }
        records.sort();
        Ok(records)
    }
}

impl Exporter<'_> {
    /// The arguments of an export of this history; `name` is the file that keeps the position.
    pub fn args(&self, to: &str, name: &str, options: &[&str]) -> Vec<String> {
        let state = self.directory.file(name);
        let export = ["export", "ipfix", "--iface", self.interface, "--to", to];
        let export = [&export[..], &["--history", self.directory.path()]].concat();
        let export = [&export[..], &["--state", &state], options].concat();
        export.into_iter().map(str::to_owned).collect()
    }

    /// Exports the whole history. Returns what was said.
    pub fn once(&self, to: &str, name: &str, options: &[&str]) -> Result<String> {
        let args = self.args(to, name, &[&["--once"], options].concat());
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let ended = self.host.twheel_once(&args)?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        Ok(ended.stderr)
    }

    /// The messages that it sends by UDP.
    pub fn messages(&self, name: &str, options: &[&str]) -> Result<Vec<Message>> {
        let socket = self.host.enter(|| Ok(UdpSocket::bind("127.0.0.1:0")?))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let to = format!("127.0.0.1:{}", socket.local_addr()?.port());
        thread::scope(|scope| {
            let reader = scope.spawn(|| -> Result<Vec<Message>> {
                let (mut messages, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
                loop {
                    let length = socket.recv(&mut buffer)?;
                    if length == 0 {
                        return Ok(messages);
                    }
                    messages.push(buffer[..length].to_vec());
                }
            });
            let said = self.once(&to, name, options);
            self.host
                .enter(|| Ok(UdpSocket::bind("127.0.0.1:0")?.send_to(&[], &to)?))?;
            let messages = reader.join().expect("a panic")?;
            ensure!(said?.is_empty(), "something was said");
            Ok(messages)
        })
    }
}

/// The ends in a history, as twheel prints them.
pub fn past(host: &Namespace, history: &str) -> Result<Vec<Value>> {
    let args = ["expired", "--json", "--iface", SERVER, "--events", "end"];
    let ended = host.twheel_once(&[&args[..], &["--history", history]].concat())?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    let lines = ended.lines.iter();
    lines
        .map(|line| Ok(serde_json::from_str(&line.text)?))
        .collect()
}

fn make(pair: &Pair) -> Result<()> {
    let forger = Forger::new(pair)?;
    for family in [Family::V4, Family::V6] {
        let mut talks = [(); 4].map(|()| pair.connect(family));
        for talk in talks.iter_mut().flatten() {
            talk.talk()?;
        }
        let [closes, resets, idles, deleted] = talks;
        closes?.close()?;
        resets?.reset()?;
        let port = deleted?.name.port();
        let filter = format!("sport == {port}");
        let gone = pair
            .server
            .twheel_once(&["delete", "--iface", SERVER, &filter])?;
        ensure!(gone.code() == Some(0), "{gone:?}");
        pair.half_open(family)?;
        udp(pair, family)?;
        forger.ping(family, 7)?;
        idles?.talk()?;
    }
    forger.tagged(PORT, VLAN.try_into()?)
}

/// A question that is answered, and one that is not.
fn udp(pair: &Pair, family: Family) -> Result<()> {
    let bind = |host: &Namespace, address: IpAddr| {
        host.enter(|| {
            let socket = UdpSocket::bind(SocketAddr::new(address, 0))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })
    };
    let server = bind(&pair.server, family.server())?;
    for is_answered in [true, false] {
        let client = bind(&pair.client, family.client())?;
        client.send_to(b"question", server.local_addr()?)?;
        let (_, from) = server.recv_from(&mut [0; 100])?;
        if is_answered {
            server.send_to(b"a longer answer", from)?;
            client.recv_from(&mut [0; 100])?;
        }
    }
    Ok(())
}

/// Waits until all flows have ended.
fn await_empty(host: &Namespace) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let flows = host.twheel_once(&["flows", "--json", "--iface", SERVER])?;
        ensure!(flows.code() == Some(0), "{flows:?}");
        if flows.lines.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < end, "flows do not end");
        thread::sleep(Duration::from_millis(100));
    }
}

fn of_end(end: &Value, biflow: bool) -> Result<Vec<Record>> {
    let number = |key: &str| {
        end[key]
            .as_u64()
            .with_context(|| format!("no {key}: {end}"))
    };
    let text = |key: &str| {
        end[key]
            .as_str()
            .with_context(|| format!("no {key}: {end}"))
    };
    let proto = match text("proto")? {
        "tcp" => 6,
        "udp" => 17,
        "icmp" => 1,
        _ => 58,
    };
    let side = |address: &str, port: &str| -> Result<(IpAddr, u16)> {
        let is_icmp = [1, 58].contains(&proto);
        let port = if is_icmp { 0 } else { number(port)? as u16 };
        Ok((text(address)?.parse()?, port))
    };
    let ends = [side("src", "sport")?, side("dst", "dport")?];
    let time = micros(humantime::parse_rfc3339(text("time")?)?);
    let sent = [
        (number("orig_packets")?, number("orig_bytes")?),
        (number("reply_packets")?, number("reply_bytes")?),
    ];
    let record = |sender: usize| Record {
        ends: [ends[sender], ends[1 - sender]],
        proto,
        start: 0,
        end: 0,
        packets: sent[sender].0,
        bytes: sent[sender].1,
        reverse: if biflow { sent[1 - sender] } else { (0, 0) },
        end_reason: 0,
        vlan: end["vlan"].as_u64().unwrap_or(0) as u16,
    };
    let sides = if biflow { 0..1 } else { 0..2 };
    let records = sides.map(record).filter(|it| biflow || it.packets > 0);
    let (age, idle) = (number("age_us")?, number("idle_us")?);
    let end_reason = match text("reason")? {
        "idle" => 1,
        "closed" | "reset" | "superseded" => 3,
        "deleted" | "flushed" => 4,
        "evicted" => 5,
        other => anyhow::bail!("{other} is no reason"),
    };
    Ok(records
        .map(|record| Record {
            start: (time - age) / 1000,
            end: (time - idle) / 1000,
            end_reason,
            ..record
        })
        .collect())
}

/// Microseconds since 1970.
fn micros(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}
