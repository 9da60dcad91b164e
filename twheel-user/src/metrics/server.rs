//! The HTTP server of numbers, health and the page. It runs on a thread of its own, so that neither
//! it nor the output waits for the other.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Bytes,
    header::{self, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, oneshot};

use super::{
    ends::Question,
    exemplars::OPEN_METRICS,
    numbers::{Metrics, lock},
    sample::{Asker, Sampler},
};
use crate::failure::{Failure, Kind};

/// Most connections at a time; more wait in the kernel.
const CONNECTIONS: usize = 64;
/// A connection carries one request. The client has this long to send it …
const SPEECH: Duration = Duration::from_secs(1);
/// … and this long to receive the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Only resources of this server, and no inline script: what the page shows comes from untrusted
/// hosts.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Parses `ADDRESS:PORT`; a port alone means the loopback address.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().map_err(|_| {
        "give a port, or an IP address and a port, as 127.0.0.1:9435 or [::1]:9435".into()
    })
}

/// A bound port, on which nothing answers yet.
pub struct Listener(TcpListener, SocketAddr);

impl Listener {
    /// Binds the port.
    ///
    /// # Errors
    ///
    /// The port is in use, or the process may not bind it.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let refused = |error: io::Error| {
            let (kind, what) = match error.kind() {
                io::ErrorKind::AddrInUse => (
                    Kind::Other,
                    "the port is in use: give another, or stop the program that listens there"
                        .to_owned(),
                ),
                io::ErrorKind::AddrNotAvailable => (
                    Kind::Other,
                    "this host has no such address: give one that it has".to_owned(),
                ),
                io::ErrorKind::PermissionDenied => (
                    Kind::Permission,
                    "not permitted without CAP_NET_BIND_SERVICE: give a port of 1024 or above, or \
                     run as root"
                        .to_owned(),
                ),
                _ => (Kind::Other, format!("{error}: give another address")),
            };
            Failure::new(kind, format!("--metrics {address}: {what}"))
        };
        let listener = TcpListener::bind(address).map_err(refused)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self(listener, address))
    }

    /// The address. If port 0 was asked for, it has the port that the kernel has chosen.
    pub fn address(&self) -> SocketAddr {
        self.1
    }
}

/// Serves requests until it is dropped.
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Dropped when the thread has ended, and with it everyone who may ask.
    _sampler: Sampler,
}

/// What requests are answered from.
#[derive(Clone)]
struct Answers {
    metrics: Arc<Metrics>,
    asker: Asker,
}

/// What matters of a request.
struct Asked {
    path: String,
    query: String,
    /// The client reads OpenMetrics.
    open_metrics: bool,
}

impl Asked {
    fn new<B>(request: &Request<B>) -> Self {
        let accept = request.headers().get_all(header::ACCEPT).iter();
        let mut accept = accept.filter_map(|it| it.to_str().ok());
        Self {
            path: request.uri().path().to_owned(),
            query: request.uri().query().unwrap_or_default().to_owned(),
            open_metrics: accept.any(|it| it.contains("application/openmetrics-text")),
        }
    }
}

impl Server {
    /// Starts to serve.
    pub fn start(listener: Listener, metrics: Arc<Metrics>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start tokio for the metrics")?;
        let Listener(listener, address) = listener;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).context("cannot wait for connections")?
        };
        let (sampler, asker) = Sampler::start(metrics.clone())?;
        let answers = Answers { metrics, asker };
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("twheel-metrics".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        never = serve(&listener, &answers, address.ip()) => match never {},
                        // The sender was used or dropped; both mean to stop.
                        _ = stopped => {}
                    }
                });
            })
            .context("cannot start the metrics server's thread")?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
            _sampler: sampler,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(listener: &tokio::net::TcpListener, answers: &Answers, bound: IpAddr) -> Infallible {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = places.clone().acquire_owned().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // For example because there are no free descriptors; some may be closed meanwhile.
                log::warn!("cannot accept a connection for the metrics: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let answers = answers.clone();
        tokio::spawn(async move {
            let answer = service_fn(|request: Request<_>| {
                let refusal = refuse(&request, bound);
                let answer = refusal.unwrap_or_else(|| answer(&Asked::new(&request), &answers));
                std::future::ready(Ok::<_, Infallible>(answer))
            });
            let connection = http1::Builder::new()
                .keep_alive(false)
                .timer(TokioTimer::new())
                .header_read_timeout(SPEECH)
                .serve_connection(TokioIo::new(stream), answer);
            // Clients that are too slow, or disconnect, are not waited for.
            let _ = tokio::time::timeout(PATIENCE, connection).await;
            drop(place);
        });
    }
}

/// The refusal of a request; `None` if it is served.
fn refuse<B>(request: &Request<B>, bound: IpAddr) -> Option<Response<Full<Bytes>>> {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refusal = response(
            StatusCode::METHOD_NOT_ALLOWED,
            TEXT,
            "only GET and HEAD are supported\n",
        );
        let allowed = HeaderValue::from_static("GET, HEAD");
        refusal.headers_mut().insert(header::ALLOW, allowed);
        return Some(refusal);
    }
    let host = request.headers().get(header::HOST);
    let host = host.and_then(|host| host.to_str().ok());
    // Prevents DNS rebinding: if an attacker's name resolved to the loopback address, pages of that
    // name could read the answers.
    if bound.to_canonical().is_loopback() && !host.is_some_and(is_no_name) {
        let why = "use an IP address or localhost in the URL\n";
        return Some(response(StatusCode::FORBIDDEN, TEXT, why));
    }
    None
}

/// Whether a `Host` header is an address or `localhost`, with or without a port.
fn is_no_name(host: &str) -> bool {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    host.parse::<SocketAddr>().is_ok()
        || host.parse::<Ipv4Addr>().is_ok()
        || bare.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok())
        || match host.split_once(':') {
            Some((name, port)) => {
                name.eq_ignore_ascii_case("localhost") && port.parse::<u16>().is_ok()
            }
            None => host.eq_ignore_ascii_case("localhost"),
        }
}

/// The paths that are answered.
const PATHS: &str = "not found: there are /, /metrics, /healthz, /api/status, /api/history and \
                     /api/ended\n";

/// What `/api/history` may be asked for.
const SINCE: &str = "give nothing, or since=N: a time in milliseconds since 1970\n";

fn answer(asked: &Asked, answers: &Answers) -> Response<Full<Bytes>> {
    let metrics = &answers.metrics;
    let path = asked.path.as_str();
    let made = |kind, made: Result<String>| match made {
        Ok(body) => response(StatusCode::OK, kind, body),
        Err(error) => {
            log::error!("cannot answer {path}: {error:#}");
            response(
                StatusCode::INTERNAL_SERVER_ERROR,
                TEXT,
                format!("{error:#}\n"),
            )
        }
    };
    let page = |kind, text: &'static str| response(StatusCode::OK, kind, text);
    match path {
        "/metrics" if asked.open_metrics => made(OPEN_METRICS, metrics.open_metrics()),
        "/metrics" => made(prometheus::TEXT_FORMAT, metrics.text()),
        "/healthz" if metrics.is_healthy() => response(StatusCode::OK, TEXT, "ok\n"),
        "/healthz" => response(
            StatusCode::SERVICE_UNAVAILABLE,
            TEXT,
            "a stepper has failed: flows no longer expire\n",
        ),
        "/api/status" => {
            answers.asker.ask();
            made(JSON, metrics.status())
        }
        "/api/history" => {
            let mut query = form_urlencoded::parse(asked.query.as_bytes());
            let since = query.next().map_or(Some(0), |(name, value)| {
                value.parse().ok().filter(|_| name == "since")
            });
            match since.filter(|_| query.next().is_none()) {
                Some(since) => made(JSON, lock(&metrics.history).since(since)),
                None => response(StatusCode::BAD_REQUEST, TEXT, SINCE),
            }
        }
        "/api/ended" => match Question::new(&asked.query).map(|it| metrics.ended(&it)) {
            Err(wrong) | Ok(Ok(Err(wrong))) => response(StatusCode::BAD_REQUEST, TEXT, wrong),
            Ok(Ok(Ok(found))) => made(JSON, Ok(found)),
            Ok(Err(error)) => made(JSON, Err(error)),
        },
        "/" => page(
            "text/html; charset=utf-8",
            include_str!("../web/index.html"),
        ),
        "/page.js" => page(SCRIPT, include_str!("../web/page.js")),
        "/draw.js" => page(SCRIPT, include_str!("../web/draw.js")),
        "/style.css" => page("text/css; charset=utf-8", include_str!("../web/style.css")),
        _ => response(StatusCode::NOT_FOUND, TEXT, PATHS),
    }
}

fn response(
    status: StatusCode,
    kind: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, address) in [
            ("9435", "127.0.0.1:9435"),
            ("127.0.0.1:9435", "127.0.0.1:9435"),
            ("0.0.0.0:1", "0.0.0.0:1"),
            ("[::1]:9435", "[::1]:9435"),
        ] {
            assert_eq!(parse_address(text).unwrap().to_string(), address);
        }
        for text in [
            "",
            "65536",
            "-1",
            "localhost:9435",
            "127.0.0.1",
            "::1:9435x",
            ":9435",
            "[::1]",
        ] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_is_no_host_of_the_loopback_address() {
        for host in [
            "127.0.0.1:9435",
            "127.0.0.1",
            "[::1]:9435",
            "[::1]",
            "localhost",
            "LocalHost:80",
        ] {
            assert!(is_no_name(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:9435",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:x",
            "[evil]",
        ] {
            assert!(!is_no_name(host), "{host}");
        }
        let ask = |host: Option<&str>, bound: &str| {
            let mut request = Request::get("/metrics");
            if let Some(host) = host {
                request = request.header(header::HOST, host);
            }
            let refusal = refuse(&request.body(()).unwrap(), bound.parse().unwrap());
            refusal.map(|it| it.status())
        };
        assert_eq!(
            ask(Some("evil.example"), "127.0.0.1"),
            Some(StatusCode::FORBIDDEN)
        );
        assert_eq!(
            ask(Some("evil.example"), "::1"),
            Some(StatusCode::FORBIDDEN)
        );
        assert_eq!(ask(None, "127.0.0.1"), Some(StatusCode::FORBIDDEN));
        assert_eq!(ask(Some("localhost:9435"), "127.0.0.1"), None);
        assert_eq!(ask(Some("router.lan:9435"), "192.0.2.1"), None);
    }

    #[test]
    fn only_reading() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
            let request = Request::builder().method(method).body(()).unwrap();
            let refusal = refuse(&request, Ipv4Addr::LOCALHOST.into()).unwrap();
            assert_eq!(refusal.status(), StatusCode::METHOD_NOT_ALLOWED);
        }
    }
}
