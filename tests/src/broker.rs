//! A broker that speaks Kafka's protocol, on this host, and a consumer of its topics.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::{
    directory::Directory,
    engine::tools,
    netns::PATIENCE,
    process::Process,
    tansu::{self, Keep},
};

/// A running broker; killed when this is dropped.
pub struct Broker {
    tools: PathBuf,
    port: u16,
    /// The address that it tells its clients.
    advertised: String,
    authentication: bool,
    keep: Keep,
    process: Option<Process>,
    store: Option<Process>,
    directory: Directory,
}

impl Broker {
    /// Starts a broker that keeps topics in its memory. `None`, and a test says so, where there is
    /// none.
    pub fn start() -> Result<Option<Self>> {
        Self::start_with(None, false)
    }

    /// The same. `advertised`: the address that it tells its clients, if that is not its own.
    /// `authentication`: it wants its clients to log in.
    pub fn start_with(advertised: Option<&str>, authentication: bool) -> Result<Option<Self>> {
        let Some(mut broker) = Self::new()? else {
            return Ok(None);
        };
        if let Some(advertised) = advertised {
            broker.advertised = advertised.to_owned();
        }
        broker.authentication = authentication;
        broker.again()?;
        Ok(Some(broker))
    }

    /// Starts a broker that keeps topics in a store of objects.
    pub fn start_with_store() -> Result<Option<Self>> {
        let Some(mut broker) = Self::new()? else {
            return Ok(None);
        };
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let log = broker.directory.0.join("store.log");
        broker.store = Some(tansu::store(&broker.tools, None, at, log)?);
        broker.keep = Keep::Store(at);
        broker.again()?;
        Ok(Some(broker))
    }

    /// One that does not run yet.
    fn new() -> Result<Option<Self>> {
        let Some(tools) = tools() else {
            return Ok(None);
        };
        let port = free_port()?;
        Ok(Some(Self {
            tools,
            port,
            advertised: format!("127.0.0.1:{port}"),
            authentication: false,
            keep: Keep::Memory,
            process: None,
            store: None,
            directory: Directory::new(&format!("broker-{port}"))?,
        }))
    }

    fn tansu(&self) -> Result<Command> {
        Ok(Command::new(tansu::program(&self.tools)?))
    }

    /// Starts it again, at the same port.
    pub fn again(&mut self) -> Result<()> {
        let mut command = self.tansu()?;
        tansu::serve(&mut command, &self.address(), &self.advertised, self.keep);
        command.args(self.authentication.then_some("--authentication"));
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
        tansu::create(self.tansu()?, &self.address(), topic, partitions)
    }

    fn log(&self) -> PathBuf {
        self.directory.0.join("broker.log")
    }

    /// What it has said.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }
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

        /// Waits until what was read is enough. The closure gets all of it each time.
        pub fn until(
            &self,
            mut is_enough: impl FnMut(&[Message]) -> Result<bool>,
        ) -> Result<Vec<Message>> {
            let end = Instant::now() + 3 * PATIENCE;
            loop {
                let count = {
                    let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
                    if is_enough(&read)? {
                        return Ok(read.clone());
                    }
                    read.len()
                };
                ensure!(Instant::now() < end, "only {count} messages");
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
