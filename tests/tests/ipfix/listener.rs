//! A collector of our own, which goes away at times; and messages as another crate parses them.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use netflow_parser::{
    NetflowPacket, NetflowParser,
    variable_versions::ipfix::{FlowSetBody, IPFixFieldPair},
};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A message.
pub type Message = Vec<u8>;
type Connections = Arc<Mutex<Vec<Vec<Message>>>>;

/// Reads messages from TCP connections, one after the other.
pub struct Listener {
    connections: Connections,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// `messages`: after so many the first connection is closed, without reading what has arrived;
    /// after twice as many the second, and so on. `tls`: what to ask of the exporter, if anything.
    pub fn start(listener: TcpListener, messages: usize, tls: Option<Arc<ServerConfig>>) -> Self {
        let (connections, stop) = (Connections::default(), Arc::<AtomicBool>::default());
        let (into, is_over) = (connections.clone(), stop.clone());
        let thread = thread::spawn(move || {
            listener.set_nonblocking(true).unwrap();
            let mut most = 0_usize;
            while !is_over.load(Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                most = most.saturating_add(messages);
                into.lock().unwrap().push(Vec::new());
                let patience = Some(Duration::from_millis(100));
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(patience).unwrap();
                read(encrypted(stream, tls.clone()), most, &into, &is_over);
            }
        });
        Self {
            connections,
            stop,
            thread: Some(thread),
        }
    }

    /// The messages of each connection.
    pub fn connections(&self) -> Vec<Vec<Message>> {
        self.connections.lock().unwrap().clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn encrypted(stream: TcpStream, tls: Option<Arc<ServerConfig>>) -> Box<dyn Read> {
    match tls {
        None => Box::new(stream),
        Some(config) => {
            let connection = ServerConnection::new(config).unwrap();
            Box::new(StreamOwned::new(connection, stream))
        }
    }
}

/// Reads so many messages, or until the connection ends.
fn read(mut stream: Box<dyn Read>, messages: usize, into: &Connections, is_over: &AtomicBool) {
    let (mut bytes, mut count, mut chunk) = (Vec::new(), 0, vec![0; 1 << 16]);
    while !is_over.load(Relaxed) {
        match stream.read(&mut chunk) {
            Ok(0) => return,
            Ok(length) => bytes.extend_from_slice(&chunk[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(_) => return,
        }
        while bytes.len() >= 4 {
            let length = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
            if bytes.len() < length {
                break;
            }
            let rest = bytes.split_off(length);
            let message = std::mem::replace(&mut bytes, rest);
            into.lock().unwrap().last_mut().unwrap().push(message);
            count += 1;
            if count == messages {
                return;
            }
        }
    }
}

/// A record: its elements, by their names.
pub type Fields = BTreeMap<String, Vec<u8>>;

/// What one session has said.
#[derive(Default)]
pub struct Session {
    /// Records of flows.
    pub flows: Vec<Fields>,
    /// Records of the exporter.
    pub statistics: Vec<Fields>,
}

impl Session {
    /// Parses messages, which are all that came in one session.
    ///
    /// # Errors
    ///
    /// The crate `netflow_parser` does not understand one; or a sequence number is not the number of
    /// records before that message, since `first`.
    pub fn parse(messages: &[Message], first: u32) -> Result<Self> {
        let mut parser = NetflowParser::default();
        let mut session = Self::default();
        for message in messages {
            let parsed = parser.parse_bytes(message);
            ensure!(parsed.error.is_none(), "{:?}", parsed.error);
            let [NetflowPacket::IPFix(packet)] = &parsed.packets[..] else {
                bail!("{} packets", parsed.packets.len());
            };
            let count = session.flows.len() + session.statistics.len();
            let sequence = packet.header.sequence_number;
            ensure!(sequence == first + count as u32, "{sequence} after {count}");
            for set in &packet.flowsets {
                match &set.body {
                    FlowSetBody::Data(data) => {
                        let flows = data.fields.iter().map(|it| fields(it));
                        session.flows.extend(flows.collect::<Result<Vec<_>>>()?);
                    }
                    FlowSetBody::OptionsData(data) => {
                        let statistics = data.fields.iter().map(|it| fields(it));
                        session
                            .statistics
                            .extend(statistics.collect::<Result<Vec<_>>>()?);
                    }
                    FlowSetBody::Template(_)
                    | FlowSetBody::Templates(_)
                    | FlowSetBody::OptionsTemplate(_)
                    | FlowSetBody::OptionsTemplates(_) => {}
                    other => bail!("another set: {other:?}"),
                }
            }
        }
        Ok(session)
    }
}

fn fields(record: &[IPFixFieldPair]) -> Result<Fields> {
    let fields = record.iter().map(|(field, value)| {
        let mut bytes = Vec::new();
        value.write_be_bytes(&mut bytes)?;
        Ok((format!("{field:?}"), bytes))
    });
    fields.collect()
}

/// The number in a field; `None` if the record does not have it.
pub fn number(fields: &Fields, name: &str) -> Option<u64> {
    let bytes = fields.get(name)?;
    Some(
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    )
}

/// The number in a field that each record has.
pub fn the_number(fields: &Fields, name: &str) -> Result<u64> {
    number(fields, name).with_context(|| format!("no {name} in {fields:?}"))
}
