//! The servers on the hub: a broker that speaks Kafka's protocol, and ClickHouse's engine.

use std::{
    net::{SocketAddr, SocketAddrV4},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel::clickhouse::{Address, Server};

use super::{
    hosts::{HUB, Network},
    running::TOPIC,
};
pub use crate::{engine::tools, tansu::Keep};
use crate::{
    engine::{self, PYTHON},
    netns::PATIENCE,
    process::Process,
    running::{twheel_bin, wait_within},
    tansu,
};

/// The broker's port on the hub, which is a namespace of its own.
const BROKER: u16 = 9092;
/// The address of the broker's store on the hub.
pub const STORE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(HUB, 9000));
/// The engine's port on the hub.
const ENGINE: u16 = 8123;

/// A running broker, and its store. They are killed when this is dropped.
pub struct Broker {
    process: Option<Process>,
    tansu: PathBuf,
    log: PathBuf,
    keep: Keep,
    _store: Option<Process>,
}

impl Broker {
    /// The broker as clients name it.
    pub fn address() -> String {
        format!("{HUB}:{BROKER}")
    }

    /// Starts a broker on the hub, with a store if it keeps topics there, and makes a topic of three
    /// partitions.
    ///
    /// # Errors
    ///
    /// It does not start, or cannot make the topic.
    pub fn start(network: &Network, tools: &Path, log: PathBuf, keep: Keep) -> Result<Self> {
        let store = match keep {
            Keep::Memory => None,
            Keep::Store(at) => {
                let log = log.with_extension("store");
                Some(tansu::store(tools, Some(&network.hub), at, log)?)
            }
        };
        let mut broker = Self {
            process: None,
            tansu: tansu::program(tools)?,
            log,
            keep,
            _store: store,
        };
        broker.again(network)?;
        let end = Instant::now() + PATIENCE;
        loop {
            let create = network.on_hub(&broker.tansu)?;
            let Err(error) = tansu::create(create, &Self::address(), TOPIC, 3) else {
                return Ok(broker);
            };
            if let Some(process) = &mut broker.process {
                process.check()?;
            }
            ensure!(Instant::now() < end, "{error:#}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts it again.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn again(&mut self, network: &Network) -> Result<()> {
        let mut command = network.on_hub(&self.tansu)?;
        tansu::serve(&mut command, &Self::address(), &Self::address(), self.keep);
        self.process = Some(Process::start(command, self.log.clone())?);
        Ok(())
    }

    /// Kills it.
    ///
    /// # Errors
    ///
    /// It cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Process::kill)
    }
}

/// A running engine. Its tables are in files, so one that is killed can be started again.
pub struct Database {
    /// Closing its standard input ends it.
    child: Child,
    directory: PathBuf,
    tools: PathBuf,
}

impl Database {
    /// The server as clients name it.
    pub fn url() -> String {
        format!("http://{HUB}:{ENGINE}")
    }

    /// A client, for a database. It reaches the server from the hub.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    pub fn server(database: &str) -> Result<Server> {
        Server::new(Address {
            url: Self::url(),
            database: database.to_owned(),
            ..Address::default()
        })
    }

    /// Starts the engine on the hub, whose tables are in this directory.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn start(network: &Network, tools: &Path, directory: PathBuf) -> Result<Self> {
        Ok(Self {
            child: spawn(network, tools, &directory)?,
            directory,
            tools: tools.to_owned(),
        })
    }

    /// Kills it with SIGKILL.
    ///
    /// # Errors
    ///
    /// It cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again on the same tables.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn restart(&mut self, network: &Network) -> Result<()> {
        self.child = spawn(network, &self.tools, &self.directory)?;
        Ok(())
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it in order.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn stop(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        wait_within(&mut self.child, PATIENCE)?.context("it does not end")?;
        Ok(())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(network: &Network, tools: &Path, directory: &Path) -> Result<Child> {
    let mut python = network.on_hub(tools.join(PYTHON))?;
    python.env("TWHEEL_ENGINE_LISTEN", format!("{HUB}:{ENGINE}"));
    Ok(engine::spawn(python, directory, None)?.0)
}

/// A client of the engine, on the hub.
pub struct Client<'a> {
    network: &'a Network,
}

impl<'a> Client<'a> {
    /// Each question is asked on a thread that has entered the hub.
    pub fn new(network: &'a Network) -> Self {
        Self { network }
    }

    fn with<T: Send>(&self, ask: impl FnOnce(Server) -> Result<T> + Send) -> Result<T> {
        self.network.hub.enter(|| ask(Database::server("twheel")?))
    }

    /// The rows of a query's answer.
    ///
    /// # Errors
    ///
    /// The engine refuses the query or is not there.
    pub fn rows(&self, sql: &str) -> Result<Vec<Value>> {
        self.with(|server| server.all(sql, &[]))
    }

    /// What a command of `twheel fleet` prints.
    ///
    /// # Errors
    ///
    /// It fails.
    pub fn twheel(&self, args: &[&str]) -> Result<String> {
        let output = self
            .network
            .on_hub(twheel_bin()?)?
            .arg("fleet")
            .args(args)
            .env("TWHEEL_CLICKHOUSE_URL", Database::url())
            .stdin(Stdio::null())
            .output()?;
        ensure!(
            output.status.success(),
            "`twheel fleet {}` failed: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Sets the tables up with what `twheel fleet schema` prints, with these arguments.
    ///
    /// # Errors
    ///
    /// The command fails, or the engine refuses a statement.
    pub fn set_up(&self, args: &[&str]) -> Result<()> {
        self.run(&self.twheel(&[&["schema"], args].concat())?)
    }

    /// The same, for events that come by the topic.
    ///
    /// # Errors
    ///
    /// As for [`set_up`](Self::set_up).
    pub fn set_up_with_topic(&self) -> Result<()> {
        let brokers = Broker::address();
        self.set_up(&["--kafka-brokers", &brokers, "--kafka-topic", TOPIC])
    }

    /// Removes the tables, and sets them up again.
    ///
    /// # Errors
    ///
    /// As for [`set_up`](Self::set_up).
    pub fn set_up_anew(&self) -> Result<()> {
        self.run("DROP DATABASE twheel SYNC;\n")?;
        self.set_up(&[])
    }

    /// Runs the statements of a script, each of which ends with a semicolon and a line's end.
    /// Without the table of the Kafka engine: see `carry`.
    ///
    /// # Errors
    ///
    /// The engine refuses a statement.
    pub fn run(&self, script: &str) -> Result<()> {
        let mut statements = engine::statements(script);
        // This engine reads no topic (`carry`): the table that stands in for it while the views are
        // made stays.
        if let Some(queue) = statements
            .iter()
            .position(|it| it.contains("ENGINE = Kafka"))
        {
            let (drop, create) = (&statements[queue - 1], &statements[queue]);
            ensure!(drop.starts_with("DROP TABLE"), "no DROP before {create}");
            statements.drain(queue - 1..=queue);
        }
        self.network.hub.enter(|| {
            // The database may not exist yet.
            let server = Database::server("default")?;
            for statement in &statements {
                server.rows(statement, &[], &mut |_: Value| Ok(()))?;
            }
            Ok(())
        })
    }

    /// Inserts lines of JSON into a table.
    ///
    /// # Errors
    ///
    /// The engine refuses them or is not there.
    pub fn insert(&self, table: &str, lines: String) -> Result<()> {
        self.with(|server| Ok(server.insert(table, lines.into())?))
    }
}
