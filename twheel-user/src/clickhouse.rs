//! A ClickHouse server, over HTTP: what inserts lines of JSON and asks queries.
//!
//! Bodies are sent as they are: HTTP without the compression of the `clickhouse` crate, whose
//! checksummed blocks a proxy or a server of 2018 may not take. The server writes what it stores
//! compressed in any case.

use std::{fmt, io, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use clickhouse::{Compression, error::Error};
use hyper::{body::Bytes, header::HeaderValue};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{runtime::Runtime, time::timeout};

use crate::{
    export::tls,
    failure::{Failure, Kind},
};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long the server may take no byte of an insert.
const STALLED: Duration = Duration::from_secs(60);
/// How long the server may take to answer, or to send another part of an answer.
const ANSWER: Duration = Duration::from_secs(300);
/// How long it may take to agree on TLS and to answer the first question, a small one.
const FIRST: Duration = Duration::from_secs(30);
/// Keepalive probes begin after a connection was silent for so long.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// An idle connection is closed after this time: before the server closes it, by default after 3 s.
const IDLE: Duration = Duration::from_secs(2);
/// Most bytes of a server's own words in a message.
const WORDS: usize = 300;

/// How the tables are made, or brought to this version.
const SET_UP: &str = "`twheel fleet schema | clickhouse-client --multiquery`, with the options of \
    `fleet schema` that are wanted there (--database, --cluster, --kafka-...)";

/// Where a server is, and who asks it.
#[derive(Clone, Debug, Default)]
pub struct Address {
    /// `http://HOST:PORT` or `https://HOST:PORT`, and a path if a proxy wants one.
    pub url: String,
    /// The database.
    pub database: String,
    /// The user; the server's default user if `None`.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<String>,
    /// A PEM file with the certificates that are trusted, instead of the system's.
    pub ca: Option<PathBuf>,
}

/// A server that can be asked. Nothing is sent before the first question.
pub struct Server {
    address: Address,
    client: clickhouse::Client,
    runtime: Runtime,
}

/// Why a server did not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It was not reached, or the connection was lost.
    Unreachable,
    /// The two ends do not agree on TLS.
    Tls,
    /// The user is unknown, or the password is wrong.
    Login,
    /// The user may not do this.
    Rights,
    /// There is no such database or no such table.
    Missing,
    /// The tables are those of another version.
    Version,
    /// The server's disk is full.
    DiskFull,
    /// Anything else.
    Other,
}

/// A question that failed: which kind of failure, and a sentence that says what to do.
#[derive(Debug)]
pub struct Fault {
    /// The kind.
    pub refusal: Refusal,
    message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}

impl Server {
    /// Prepares to ask this server. Reads the certificates.
    ///
    /// # Errors
    ///
    /// Of [`Kind::Usage`]: the URL is no address of a server; the database has no name; the user or
    /// the password cannot be sent over HTTP; or the file with certificates holds none. Or that file
    /// cannot be read.
    pub fn new(address: Address) -> Result<Self> {
        check(&address.url)?;
        check_names(&address)?;
        let tls = tls::Client::new(address.ca.as_deref(), None)?;
        let mut http = HttpConnector::new();
        http.set_connect_timeout(Some(CONNECT));
        http.set_keepalive(Some(KEEPALIVE));
        http.set_nodelay(true);
        http.enforce_http(false);
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls.config())
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let http = HttpClient::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        let mut client = clickhouse::Client::with_http_client(http)
            .with_url(&address.url)
            .with_database(&address.database)
            .with_compression(Compression::None)
            .with_product_info("twheel", env!("CARGO_PKG_VERSION"));
        if let Some(user) = &address.user {
            client = client.with_user(user);
        }
        if let Some(password) = &address.password {
            client = client.with_password(password);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the HTTP client")?;
        Ok(Self {
            address,
            client,
            runtime,
        })
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Inserts lines of JSON into a table, and returns when the server has them. An error does not
    /// tell that it has not.
    ///
    /// # Errors
    ///
    /// The server was not reached, or has refused the lines.
    pub fn insert(&self, table: &str, lines: Bytes) -> Result<(), Fault> {
        let sql = format!("INSERT INTO {table} FORMAT JSONEachRow");
        let insert = async {
            let mut insert = self
                .client
                .insert_formatted_with(sql)
                .with_setting("date_time_input_format", "best_effort")
                .with_setting("input_format_skip_unknown_fields", "1")
                .with_timeouts(Some(STALLED), Some(ANSWER));
            insert.send(lines).await?;
            insert.end().await
        };
        self.runtime
            .block_on(insert)
            .map_err(|error| self.fault(&error))
    }

    /// Asks a query, and gives each row of its answer to `each`. The server binds `{p0:Type}` to the
    /// first parameter, `{p1:Type}` to the second, and so on.
    ///
    /// # Errors
    ///
    /// A [`Fault`]: the server was not reached, or has refused the query. A row is not as `T` has it.
    /// Or what `each` has returned.
    pub fn rows<T: DeserializeOwned>(
        &self,
        sql: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(T) -> Result<()>,
    ) -> Result<()> {
        self.rows_within(ANSWER, (sql, parameters), each)
    }

    /// The same, with the time that the server has to answer, or to send another part of its answer.
    fn rows_within<T: DeserializeOwned>(
        &self,
        within: Duration,
        (sql, parameters): (&str, &[Value]),
        each: &mut dyn FnMut(T) -> Result<()>,
    ) -> Result<()> {
        let mut query = self
            .client
            .query_raw(sql)
            .with_setting("output_format_json_quote_64bit_integers", "0");
        for (number, parameter) in parameters.iter().enumerate() {
            query = query.param(&format!("p{number}"), parameter);
        }
        self.runtime.block_on(async {
            let fault = |error| self.fault(&error);
            let mut cursor = query.fetch_bytes("JSONEachRow").map_err(fault)?;
            let mut take = |line: &[u8]| -> Result<()> {
                if line.is_empty() {
                    return Ok(());
                }
                let row = serde_json::from_slice(line).with_context(|| {
                    let row = String::from_utf8_lossy(line);
                    format!("the server has answered with a row that was not expected: {row}")
                })?;
                each(row)
            };
            // The beginning of a row whose end has not come yet.
            let mut begun = Vec::new();
            loop {
                let next = timeout(within, cursor.next()).await;
                let next = next.unwrap_or(Err(Error::TimedOut)).map_err(fault)?;
                let Some(bytes) = next else {
                    return take(&begun);
                };
                let mut rest = &bytes[..];
                while let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                    begun.extend_from_slice(&rest[..at]);
                    take(&begun)?;
                    begun.clear();
                    rest = &rest[at + 1..];
                }
                begun.extend_from_slice(rest);
            }
        })
    }

    /// Checks that the tables are those of this version of the schema.
    ///
    /// # Errors
    ///
    /// They are not ([`Refusal::Version`]), there are none, or the server was not reached.
    pub fn check_version(&self, wanted: u32) -> Result<(), Fault> {
        #[derive(Deserialize)]
        struct Row {
            version: u32,
        }
        let mut found = 0;
        let sql = "SELECT max(version) AS version FROM schema_version";
        let asked = self.rows_within(FIRST, (sql, &[]), &mut |row: Row| {
            found = row.version;
            Ok(())
        });
        if let Err(error) = asked {
            return Err(error.downcast::<Fault>().unwrap_or_else(|error| Fault {
                refusal: Refusal::Other,
                message: format!("{error:#}"),
            }));
        }
        if found == wanted {
            return Ok(());
        }
        let Address { url, database, .. } = &self.address;
        let what = match found {
            _ if found > wanted => "update this twheel",
            _ => &format!("run {SET_UP}"),
        };
        Err(Fault {
            refusal: Refusal::Version,
            message: format!(
                "the tables of the database {database} at {url} are of version {found}, and this \
                 twheel needs version {wanted}: {what}"
            ),
        })
    }

    /// What is wrong, in a sentence.
    fn fault(&self, error: &Error) -> Fault {
        let Address { url, database, .. } = &self.address;
        let refusal = refusal(error);
        let why = why(error);
        let message = match refusal {
            Refusal::Unreachable => format!(
                "cannot reach ClickHouse at {url}: {why}: check that it runs{}, and give its HTTP \
                 address with --url",
                match url.starts_with("https") {
                    true => " and takes TLS there",
                    false => "",
                }
            ),
            Refusal::Tls => format!(
                "TLS with ClickHouse at {url} failed: {why}: give the authority of its certificate \
                 with --ca, and http:// in the URL if it has no TLS"
            ),
            Refusal::Login => {
                let user = self.address.user.as_deref().unwrap_or("default");
                format!(
                    "ClickHouse at {url} refuses the user {user} or the password: give them with \
                     --user and --password-file"
                )
            }
            Refusal::Rights => {
                let user = self.address.user.as_deref().unwrap_or("default");
                format!("ClickHouse at {url} does not let the user {user} do this: grant it: {why}")
            }
            Refusal::Missing => format!(
                "the database {database} or its tables are not at {url}: give the right --database, \
                 or set it up with {SET_UP}: {why}"
            ),
            Refusal::DiskFull => {
                // Without the server's words, which name another file each time.
                format!("the disk of ClickHouse at {url} is full: free space there")
            }
            Refusal::Version | Refusal::Other => {
                let what = match error {
                    Error::BadResponse(said) if code(said).is_some() => {
                        "mend it at the server, whose log says more"
                    }
                    _ => "check that --url is the address of ClickHouse's HTTP interface",
                };
                format!("ClickHouse at {url} refuses this: {why}: {what}")
            }
        };
        Fault { refusal, message }
    }
}

/// Checks that this is the address of a server.
fn check(url: &str) -> Result<()> {
    let wrong = |what: &str| {
        let message = format!("{url} is no address of ClickHouse: {what}");
        Err(Failure::new(Kind::Usage, message).into())
    };
    let example = "give one like http://clickhouse.example:8123";
    let Ok(uri) = url.parse::<hyper::Uri>() else {
        return wrong(example);
    };
    let Some(authority) = uri.authority() else {
        return wrong(example);
    };
    if !matches!(uri.scheme_str(), Some("http" | "https")) || authority.host().is_empty() {
        return wrong(example);
    }
    // (A port that is too large is none for this parser.)
    let is_ipv6 = authority.host().starts_with('[');
    let has_port = authority.as_str().matches(':').count()
        > if is_ipv6 {
            authority.host().matches(':').count()
        } else {
            0
        };
    if authority.as_str().contains('@') {
        return wrong("give the user with --user, and the password with --password-file");
    }
    if has_port && authority.port_u16().is_none_or(|port| port == 0) {
        return wrong("its port is not one from 1 to 65535");
    }
    match uri.query() {
        Some(_) => wrong("give it without `?` and what follows"),
        None => Ok(()),
    }
}

/// Checks what is sent with each question.
fn check_names(address: &Address) -> Result<()> {
    let usage = |message: &str| Err(Failure::new(Kind::Usage, message).into());
    if address.database.is_empty() {
        return usage("--database is empty: give the name of the database, or leave it out");
    }
    let can_be_sent = |text: &Option<String>| {
        let text = text.as_deref().unwrap_or_default();
        HeaderValue::from_str(text).is_ok()
    };
    if !can_be_sent(&address.user) {
        return usage("--user has a control character, which HTTP cannot carry: give it without");
    }
    if !can_be_sent(&address.password) {
        return usage(
            "the first line of --password-file has a control character, which HTTP cannot carry: \
             give one without",
        );
    }
    Ok(())
}

/// The kind of a failure.
fn refusal(error: &Error) -> Refusal {
    let Error::BadResponse(said) = error else {
        return match error {
            Error::Network(_) if is_tls(error) => Refusal::Tls,
            Error::Network(_) | Error::TimedOut => Refusal::Unreachable,
            _ => Refusal::Other,
        };
    };
    // The numbers of ClickHouse's errors (`ErrorCodes.cpp`).
    match code(said) {
        Some(192..=194 | 516) => Refusal::Login,
        Some(164 | 291 | 497) => Refusal::Rights,
        Some(60 | 81) => Refusal::Missing,
        Some(243) => Refusal::DiskFull,
        _ if said.contains("No space left on device") || said.contains("errno: 28") => {
            Refusal::DiskFull
        }
        _ => Refusal::Other,
    }
}

/// The number of an error, as in `Code: 60. DB::Exception: …` or `Code: 60, e.displayText() = …`.
fn code(said: &str) -> Option<u32> {
    let (_, rest) = said.split_once("Code: ")?;
    let end = rest.find(|it: char| !it.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

/// Whether the two ends do not agree on TLS.
fn is_tls(error: &Error) -> bool {
    deepest(error, &mut |cause| cause.is::<rustls::Error>())
}

/// Visits an error and its causes, those inside an [`io::Error`] too, until one is found.
fn deepest(
    error: &(dyn std::error::Error + 'static),
    found: &mut dyn FnMut(&(dyn std::error::Error + 'static)) -> bool,
) -> bool {
    let mut next = Some(error);
    while let Some(cause) = next {
        if found(cause) {
            return true;
        }
        let inner = cause
            .downcast_ref::<io::Error>()
            .and_then(|it| it.get_ref());
        if let Some(inner) = inner
            && deepest(inner, found)
        {
            return true;
        }
        next = cause.source();
    }
    false
}

/// What the server or the network has said, in few words.
fn why(error: &Error) -> String {
    let words = match error {
        Error::BadResponse(said) => said.clone(),
        Error::TimedOut => "it does not answer".to_owned(),
        error => {
            // The last cause says what happened; those above it say where.
            let mut last = error.to_string();
            deepest(error, &mut |cause| {
                last = cause.to_string();
                cause.source().is_none() && cause.is::<rustls::Error>()
            });
            last
        }
    };
    let line = words.lines().next().unwrap_or_default();
    let mut end = line.len().min(WORDS);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].trim().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url_of_a_server() {
        for url in ["http://localhost:8123", "https://[::1]:8443/", "http://a/b"] {
            check(url).unwrap();
        }
        for (url, said) in [
            ("", "give one like"),
            ("localhost", "give one like"),
            ("localhost:8123", "give one like"),
            ("tcp://localhost:9000", "give one like"),
            ("http://", "give one like"),
            ("http://u:p@localhost:8123", "--password-file"),
            ("http://localhost:8123/?user=u", "without `?`"),
            ("http://localhost:99999", "from 1 to 65535"),
            ("http://localhost:0", "from 1 to 65535"),
            ("http://[::1]:65536/a", "from 1 to 65535"),
        ] {
            let error = check(url).unwrap_err().to_string();
            assert!(error.contains(said), "{url}: {error}");
        }
    }

    #[test]
    fn what_cannot_be_sent_is_refused_and_names_its_option() {
        let address = |database: &str, user: &str, password: &str| Address {
            url: "http://localhost:8123".to_owned(),
            database: database.to_owned(),
            user: Some(user.to_owned()),
            password: Some(password.to_owned()),
            ca: None,
        };
        check_names(&address("t", "u", "p w!~ä")).unwrap();
        for (address, said) in [
            (address("", "u", "p"), "--database"),
            (address("t", "u\u{1}", "p"), "--user"),
            (address("t", "u", "p\r"), "--password-file"),
            (address("t", "u", "p\u{7f}"), "--password-file"),
        ] {
            let error = Server::new(address).err().unwrap();
            assert_eq!(crate::failure::exit_code(&error), Kind::Usage as u8);
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let address = Address {
            url: "http://localhost:8123".to_owned(),
            database: "t".to_owned(),
            ..Address::default()
        };
        let server = Server::new(address).unwrap();
        for (said, wanted) in [
            ("Code: 252. DB::Exception: Too many parts", "whose log says"),
            ("404 Not Found", "check that --url"),
            ("Code: 60. DB::Exception: no table", "--kafka-..."),
        ] {
            let fault = server.fault(&Error::BadResponse(said.to_owned()));
            assert!(fault.to_string().contains(wanted), "{fault}");
        }
    }

    #[test]
    fn a_failure_is_told_by_its_number() {
        for (said, is) in [
            (
                "Code: 516. DB::Exception: default: Authentication failed",
                Refusal::Login,
            ),
            (
                "Code: 193, e.displayText() = DB::Exception: Wrong password for user default",
                Refusal::Login,
            ),
            (
                "Code: 60. DB::Exception: Table t.events does not exist",
                Refusal::Missing,
            ),
            (
                "Code: 243. DB::Exception: Cannot reserve 1.00 MiB, not enough space",
                Refusal::DiskFull,
            ),
            (
                "Code: 75, e.displayText() = DB::ErrnoException: Cannot write to file /a, errno: 28, \
                 strerror: No space left on device",
                Refusal::DiskFull,
            ),
            (
                "Code: 497. DB::Exception: Not enough privileges",
                Refusal::Rights,
            ),
            ("Code: 252. DB::Exception: Too many parts", Refusal::Other),
            ("404 Not Found", Refusal::Other),
        ] {
            let error = Error::BadResponse(said.to_owned());
            assert_eq!(refusal(&error), is, "{said}");
        }
        assert_eq!(refusal(&Error::TimedOut), Refusal::Unreachable);
        let tls = rustls::Error::General("it".to_owned());
        let network = Error::Network(Box::new(io::Error::other(io::Error::other(tls))));
        assert_eq!(refusal(&network), Refusal::Tls);
        assert!(why(&network).contains("it"));
    }

    #[test]
    fn no_server_is_a_sentence() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let address = Address {
            url,
            database: "twheel".to_owned(),
            ..Address::default()
        };
        let server = Server::new(address).unwrap();
        let fault = server.check_version(1).unwrap_err();
        assert_eq!(fault.refusal, Refusal::Unreachable, "{fault}");
        assert!(fault.to_string().contains("Connection refused"), "{fault}");
        let fault = server.insert("events", Bytes::from_static(b"{}\n"));
        assert_eq!(fault.unwrap_err().refusal, Refusal::Unreachable);
    }
}
