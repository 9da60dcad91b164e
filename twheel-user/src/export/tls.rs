//! TLS to a collector (RFC 7011, sections 10.4 and 11): rustls, with `ring`.

use std::{
    fmt, fs,
    io::{self, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};

use crate::failure::{Failure, Kind};

/// Whom we trust, if anyone, and who we are.
#[derive(Clone)]
pub struct Client(Arc<ClientConfig>, bool);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl PartialEq for Client {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Client {}

impl Client {
    /// `ca`: a PEM file with the certificates that are trusted, instead of the system's. `own`: PEM
    /// files with the client's certificate, and those between it and the authority; and its key.
    ///
    /// # Errors
    ///
    /// A file cannot be read; or, of [`Kind::Usage`], does not hold what it should.
    pub fn new(ca: Option<&Path>, own: Option<(&PathBuf, &PathBuf)>) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        match ca {
            Some(path) => {
                for certificate in certificates(path)? {
                    roots
                        .add(certificate)
                        .map_err(|error| unusable(path, &error))?;
                }
            }
            None => {
                // Those that cannot be used are skipped; others may do.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let trusts = !roots.is_empty();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .context("cannot use TLS")?
            .with_root_certificates(roots);
        let config = match own {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let bytes = read(key)?;
                let private =
                    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| unusable(key, &error))?;
                config
                    .with_client_auth_cert(certificates(certificate)?, private)
                    .map_err(|error| unusable(certificate, &error))?
            }
        };
        Ok(Self(Arc::new(config), trusts))
    }

    /// Checks that it can trust a server at all.
    ///
    /// # Errors
    ///
    /// Of [`Kind::Unsupported`]: the system has no certificates of authorities.
    pub fn check_trust(&self) -> Result<()> {
        if self.1 {
            return Ok(());
        }
        let message = "this system has no certificates of authorities (such as \
                       /etc/ssl/certs/ca-certificates.crt): install them (ca-certificates), or \
                       give --ca with a file that has the server's";
        Err(Failure::new(Kind::Unsupported, message).into())
    }

    /// The configuration, for a client that makes its connections itself.
    pub fn config(&self) -> ClientConfig {
        (*self.0).clone()
    }

    /// Agrees with the other end of a connection, whose certificate must be for `host`.
    ///
    /// # Errors
    ///
    /// It does not answer within this time, or the two do not agree.
    pub fn connect(&self, host: &str, socket: TcpStream, within: Duration) -> io::Result<Stream> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(self.0.clone(), name).map_err(io::Error::other)?;
        let mut stream = Stream { connection, socket };
        stream.socket.set_read_timeout(Some(within))?;
        while stream.connection.is_handshaking() {
            match stream.connection.complete_io(&mut stream.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(stream)
    }
}

/// The certificates in a file; there is at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| unusable(path, &error))?;
    if found.is_empty() {
        return Err(unusable(path, &"it holds no certificate").into());
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn unusable(path: &Path, why: &dyn fmt::Display) -> Failure {
    let message = format!("cannot use {}: {why}: give a PEM file", path.display());
    Failure::new(Kind::Usage, message)
}

/// A connection with TLS. When it is dropped, the other end is told that it ends.
pub struct Stream {
    connection: ClientConnection,
    /// What it goes through.
    pub socket: TcpStream,
}

impl Stream {
    /// Writes all of this.
    ///
    /// # Errors
    ///
    /// The connection has ended; if the other end has said why, that is the error.
    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = rustls::Stream::new(&mut self.connection, &mut self.socket);
        match stream.write_all(bytes).and_then(|()| stream.flush()) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.heed().err().unwrap_or(error)),
        }
    }

    /// Reads what the other end has sent by now: alerts and session tickets. Otherwise a socket that is
    /// closed would drop what the other end has not read (RFC 1122, section 4.2.2.13).
    ///
    /// # Errors
    ///
    /// It ends the connection, and says why.
    pub fn heed(&mut self) -> io::Result<()> {
        self.socket.set_nonblocking(true)?;
        let heeded = self.read_all();
        self.socket.set_nonblocking(false)?;
        heeded
    }

    fn read_all(&mut self) -> io::Result<()> {
        loop {
            match self.connection.read_tls(&mut self.socket) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            let state = self.connection.process_new_packets();
            let plain = state.map_err(io::Error::other)?.plaintext_bytes_to_read();
            // A collector has nothing to say.
            let mut reader = self.connection.reader().take(plain as u64);
            io::copy(&mut reader, &mut io::sink())?;
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.heed();
        self.connection.send_close_notify();
        let _ = self.connection.write_tls(&mut self.socket);
    }
}
