//! ClickHouse's engine for tests: today's, in a process of its own (`chdb`), behind a small HTTP
//! server of ours (`engine.py`) that speaks as much of ClickHouse's interface as twheel uses.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel::{
    clickhouse::{Address, Server},
    fleet::schema::{LONGEST, Schema},
};

use crate::{directory::Directory, running::twheel_bin, skipped};

/// The directory of the Python environment with `chdb` and the other tools of a fleet's tests, in
/// the environment.
pub const TOOLS: &str = "TWHEEL_FLEET_TOOLS";
/// Python in that directory.
pub const PYTHON: &str = "bin/python";

/// That directory. `None`: the tools are not installed, which is reported as a skipped test.
pub fn tools() -> Option<PathBuf> {
    let tools = std::env::var_os(TOOLS).map(PathBuf::from);
    let found = tools.filter(|tools| tools.join(PYTHON).exists());
    if found.is_none() {
        skipped(format_args!(
            "{TOOLS} names no Python environment with chdb: `cargo xtask test` makes one"
        ));
    }
    found
}

/// Starts an engine, on the data in a directory, and waits until it listens. It ends when its
/// standard input is closed. `python`: a command of the tools; `login`: its only user and the password.
///
/// # Errors
///
/// It does not start.
pub fn spawn(
    mut python: Command,
    data: impl AsRef<OsStr>,
    login: Option<(&str, &str)>,
) -> Result<(Child, u16)> {
    python
        .args(["-c", include_str!("engine.py")])
        .arg(data)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if let Some((user, password)) = login {
        python.args([user, password]);
    }
    let mut child = python.spawn().context("cannot start ClickHouse's engine")?;
    let mut line = String::new();
    let stdout = child.stdout.take().context("the engine has no output")?;
    BufReader::new(stdout).read_line(&mut line)?;
    let port = line.trim().parse();
    if port.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    Ok((child, port.context("ClickHouse's engine does not start")?))
}

/// The statements of a script. Each ends with a semicolon and a line's end.
pub fn statements(script: &str) -> Vec<String> {
    let script: String = script
        .lines()
        .filter(|line| !line.starts_with("--"))
        .map(|line| format!("{line}\n"))
        .collect();
    let statements = script.split(";\n").map(str::trim);
    statements
        .filter(|it| !it.is_empty())
        .map(str::to_owned)
        .collect()
}

/// A running engine; it ends, and its data are removed, when this is dropped.
pub struct Engine {
    child: Child,
    port: u16,
    _data: Directory,
}

impl Engine {
    /// Starts an engine with nothing in it; `None` if the tools are not installed.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn start() -> Result<Option<Self>> {
        Self::with_login(None)
    }

    /// The same, for one user with a password.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn with_login(login: Option<(&str, &str)>) -> Result<Option<Self>> {
        let Some(tools) = tools() else {
            return Ok(None);
        };
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let data = Directory::new(&format!("engine-{number}"))?;
        let python = Command::new(tools.join(PYTHON));
        let (child, port) = spawn(python, data.file("data"), login)?;
        Ok(Some(Self {
            child,
            port,
            _data: data,
        }))
    }

    /// Starts an engine with the tables of a fleet in the database `twheel`.
    ///
    /// # Errors
    ///
    /// It does not start, or refuses the schema.
    pub fn with_schema() -> Result<Option<Self>> {
        let Some(engine) = Self::start()? else {
            return Ok(None);
        };
        let schema = Schema {
            keep: Some(LONGEST),
            ..Schema::new("twheel")
        };
        for statement in schema.statements() {
            engine.query(&statement)?;
        }
        Ok(Some(engine))
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The client of twheel, for a database.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    pub fn server(&self, database: &str) -> Result<Server> {
        Server::new(Address {
            url: self.url(),
            database: database.to_owned(),
            ..Address::default()
        })
    }

    /// Runs a statement in the database `default`; the rows of its answer, as JSON.
    ///
    /// # Errors
    ///
    /// The engine refuses it.
    pub fn query(&self, sql: &str) -> Result<Vec<Value>> {
        let asked = self.server("default")?.all(sql, &[]);
        asked.with_context(|| format!("in {sql}"))
    }

    /// The only value of a statement's answer.
    ///
    /// # Errors
    ///
    /// The engine refuses it, or there are more or none.
    pub fn value(&self, sql: &str) -> Result<Value> {
        let rows = self.query(sql)?;
        let [Value::Object(row)] = rows.as_slice() else {
            anyhow::bail!("not one row: {sql}: {rows:?}");
        };
        ensure!(row.len() == 1, "not one value: {sql}: {row:?}");
        let value = row.values().next();
        value.cloned().context("no value")
    }

    /// A `twheel` command on this server.
    ///
    /// # Errors
    ///
    /// There is no `twheel`.
    pub fn twheel(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(twheel_bin()?);
        command.args(args).env("TWHEEL_CLICKHOUSE_URL", self.url());
        Ok(command)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // It ends by itself when its input is closed; this is faster.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
