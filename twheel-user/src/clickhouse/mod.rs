//! A ClickHouse server, over HTTP: what inserts lines of JSON and asks queries.
//!
//! Bodies are sent as they are: HTTP without the compression of the `clickhouse` crate, whose
//! checksummed blocks a proxy or a server of 2018 may not take. The server writes what it stores
//! compressed in any case.

mod address;
mod fault;

use std::time::Duration;

use anyhow::{Context, Result};
use clickhouse::{Compression, error::Error};
use hyper::body::Bytes;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{runtime::Runtime, time::timeout};

pub use self::{
    address::Address,
    fault::{Fault, Refusal},
};
use self::{
    address::{check, check_names},
    fault::SET_UP,
};
use crate::{export::tls, given::written};

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

/// A server that can be asked. Nothing is sent before the first question.
pub struct Server {
    address: Address,
    client: clickhouse::Client,
    runtime: Runtime,
}

impl Server {
    /// Prepares to ask this server. Reads the certificates.
    ///
    /// # Errors
    ///
    /// Of [`Usage`](crate::failure::Kind::Usage): the URL is no address of a server; the database has no name; the user or
    /// the password cannot be sent over HTTP; the file with certificates holds none, or is given for a
    /// server without TLS. Or that file cannot be read.
    pub fn new(address: Address) -> Result<Self> {
        check(&address.url)?;
        check_names(&address)?;
        let tls = tls::Client::new(address.ca.as_deref(), None)?;
        if address.url.starts_with("https:") {
            tls.check_trust()?;
        }
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
            .map_err(|error| Fault::new(&self.address, &error))
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

    /// All rows of a query's answer.
    ///
    /// # Errors
    ///
    /// As for [`rows`](Self::rows).
    pub fn all<T: DeserializeOwned>(&self, sql: &str, parameters: &[Value]) -> Result<Vec<T>> {
        let mut all = Vec::new();
        self.rows(sql, parameters, &mut |row| {
            all.push(row);
            Ok(())
        })?;
        Ok(all)
    }

    /// As [`rows`](Self::rows), with the time for an answer, or for another part of one.
    fn rows_within<T: DeserializeOwned>(
        &self,
        within: Duration,
        (sql, parameters): (&str, &[Value]),
        each: &mut dyn FnMut(T) -> Result<()>,
    ) -> Result<()> {
        let mut query = self
            .client
            .query_raw(sql)
            .with_setting("output_format_json_quote_64bit_integers", "0")
            // The server does not go on when nobody waits any more.
            .with_setting("max_execution_time", within.as_secs().to_string());
        for (number, parameter) in parameters.iter().enumerate() {
            query = query.param(&format!("p{number}"), parameter);
        }
        self.runtime.block_on(async {
            let fault = |error| Fault::new(&self.address, &error);
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
                let next = match next {
                    Ok(next) => next.map_err(fault)?,
                    Err(_) if within > FIRST => {
                        return Err(self.slow().into());
                    }
                    Err(_) => return Err(fault(Error::TimedOut).into()),
                };
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

    /// What is wrong if an answer takes too long.
    fn slow(&self) -> Fault {
        let why = format!("no answer for {}", written(ANSWER));
        Fault::of(&self.address, Refusal::Slow, &why)
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
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use socket2::{Domain, Socket, Type};

    use super::*;

    fn server(url: &str) -> Server {
        let address = Address {
            url: url.to_owned(),
            database: "twheel".to_owned(),
            ..Address::default()
        };
        Server::new(address).unwrap()
    }

    #[test]
    fn no_server_is_a_sentence() {
        // It is bound and does not listen, so that nobody else listens there.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&any.into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let server = server(&format!("http://{address}"));
        let fault = server.check_version(1).unwrap_err();
        assert_eq!(fault.refusal, Refusal::Unreachable, "{fault}");
        assert!(fault.to_string().contains("Connection refused"), "{fault}");
        let fault = server.insert("events", Bytes::from_static(b"{}\n"));
        assert_eq!(fault.unwrap_err().refusal, Refusal::Unreachable);
    }
}
