//! A ClickHouse server: Debian's, of version 18.16. It knows neither all types of today's schema nor
//! expiring rows nor most functions, so its tables are reduced ones, which are made here.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::Signal,
};

use crate::{
    broker::{free_port, until_open},
    directory::Directory,
    netns::PATIENCE,
    process::Process,
};

/// The server's program, by its Debian package.
const PROGRAM: &str = "/usr/sbin/clickhouse-server";
/// The user whose password is [`PASSWORD`]; the default user has none.
pub const USER: &str = "exporter";
/// Its password.
pub const PASSWORD: &str = "a secret";

/// How a server is started.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Its certificate and its key, in PEM files: it takes HTTPS, too.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The size of the disk for its data, in bytes; `None`: that of the directory for temporary files.
    pub disk: Option<u64>,
}

/// A running server; killed when this is dropped.
pub struct ClickHouse {
    process: Option<Process>,
    http: u16,
    https: u16,
    disk: Option<PathBuf>,
    directory: Directory,
}

impl ClickHouse {
    /// Starts a server with the tables of a fleet, of the schema's present version. `None`, and a test
    /// says so, where there is none.
    pub fn start(setup: &Setup) -> Result<Option<Self>> {
        if !Path::new(PROGRAM).exists() {
            crate::skipped(format!("no ClickHouse server: {PROGRAM} is not there"));
            return Ok(None);
        }
        let (http, https) = (free_port()?, free_port()?);
        let directory = Directory::new(&format!("clickhouse-{http}"))?;
        let data = directory.0.join("data");
        fs::create_dir_all(&data)?;
        let mut server = Self {
            process: None,
            http,
            https,
            disk: None,
            directory,
        };
        if let Some(size) = setup.disk {
            let options = format!("size={size}");
            mount(
                Some("tmpfs"),
                &data,
                Some("tmpfs"),
                MsFlags::empty(),
                Some(options.as_str()),
            )?;
            server.disk = Some(data.clone());
        }
        let tls = setup.tls.as_ref().map_or(String::new(), |(certificate, key)| {
            format!(
                "<https_port>{https}</https_port><openSSL><server><certificateFile>{}</certificateFile>\
                 <privateKeyFile>{}</privateKeyFile><verificationMode>none</verificationMode>\
                 <loadDefaultCAFile>false</loadDefaultCAFile></server></openSSL>",
                certificate.display(),
                key.display()
            )
        });
        let (data, tcp) = (data.display(), free_port()?);
        let config = format!(
            "<yandex><logger><level>warning</level><console>1</console></logger>\
             <http_port>{http}</http_port><tcp_port>{tcp}</tcp_port>{tls}\
             <listen_host>127.0.0.1</listen_host><path>{data}/</path><tmp_path>{data}/tmp/</tmp_path>\
             <format_schema_path>{data}/schemas/</format_schema_path>\
             <mark_cache_size>67108864</mark_cache_size><timezone>UTC</timezone>\
             <users_config>users.xml</users_config><default_profile>default</default_profile>\
             <default_database>default</default_database></yandex>"
        );
        fs::write(server.directory.file("config.xml"), config)?;
        let user = |name: &str, password: &str| {
            format!(
                "<{name}><password>{password}</password><networks><ip>127.0.0.1</ip></networks>\
                 <profile>default</profile><quota>default</quota></{name}>"
            )
        };
        let users = format!(
            "<yandex><profiles><default></default></profiles><quotas><default></default></quotas>\
             <users>{}{}</users></yandex>",
            user("default", ""),
            user(USER, PASSWORD)
        );
        fs::write(server.directory.file("users.xml"), users)?;
        server.again()?;
        for sql in TABLES {
            server.ask(sql)?;
        }
        let version = twheel::fleet::schema::VERSION;
        server.ask(&format!(
            "INSERT INTO twheel.schema_version (version) VALUES ({version})"
        ))?;
        Ok(Some(server))
    }

    /// Starts it again, with the same data and at the same ports.
    pub fn again(&mut self) -> Result<()> {
        let mut command = Command::new(PROGRAM);
        let config = self.directory.file("config.xml");
        command
            .arg(format!("--config-file={config}"))
            .current_dir(&self.directory.0);
        self.process = Some(Process::start(command, self.directory.0.join("log"))?);
        until_open(self.http)?;
        let end = Instant::now() + PATIENCE;
        while let Err(error) = self.ask("SELECT 1") {
            ensure!(Instant::now() < end, "{error:#}");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
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

    /// The address of its HTTP interface.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.http)
    }

    /// The address of its HTTP interface with TLS.
    pub fn https(&self) -> String {
        format!("https://127.0.0.1:{}", self.https)
    }

    /// Asks a query, and returns the answer as lines.
    pub fn ask(&self, sql: &str) -> Result<Vec<String>> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.http))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = sql.len();
        write!(
            stream,
            "POST / HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n{sql}"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        ensure!(head.contains(" 200 "), "{sql}: {body}");
        Ok(body.lines().map(str::to_owned).collect())
    }

    /// The number that is the answer to a query.
    pub fn number(&self, sql: &str) -> Result<u64> {
        let lines = self.ask(sql)?;
        Ok(lines.first().context("no row")?.parse()?)
    }

    /// The directory of its data.
    pub fn data(&self) -> PathBuf {
        self.directory.0.join("data")
    }
}

impl Drop for ClickHouse {
    fn drop(&mut self) {
        self.kill();
        if let Some(disk) = &self.disk {
            let _ = umount2(disk, MntFlags::MNT_DETACH);
        }
    }
}

/// The tables of a fleet, reduced to what a server of 2018 knows. The number of an event tells those
/// that come twice, as in the schema of today.
const TABLES: [&str; 4] = [
    "CREATE DATABASE twheel",
    "CREATE TABLE twheel.schema_version (version UInt32, applied DateTime DEFAULT now()) \
     ENGINE = ReplacingMergeTree() PARTITION BY tuple() ORDER BY version",
    "CREATE TABLE twheel.events (event String, time DateTime, host String, instance String, \
     seq UInt64, flow_id String, proto String, src String, sport UInt16, dst String, dport UInt16, \
     state String, reason String, age_us UInt64, idle_us UInt64, orig_packets UInt64, \
     orig_bytes UInt64, reply_packets UInt64, reply_bytes UInt64, what String) \
     ENGINE = ReplacingMergeTree() PARTITION BY toYYYYMM(time) ORDER BY (host, instance, seq)",
    "CREATE TABLE twheel.exports (time DateTime, host String, instance String, exporter String, \
     behind_us UInt64, not_sent UInt64) ENGINE = ReplacingMergeTree() PARTITION BY toYYYYMM(time) \
     ORDER BY (host, instance, exporter, time)",
];
