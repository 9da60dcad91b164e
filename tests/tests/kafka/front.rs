//! A front of the broker, with what the broker of these tests does not have: TLS, a login whose
//! password is right, answers that a test chooses. All else is the broker's.
//!
//! A request of Kafka's protocol is a length (4 bytes), a kind (2), a version (2), a number (4) and so
//! on; a response is a length, the request's number and so on.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use anyhow::Result;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

const PRODUCE: u16 = 0;
const HANDSHAKE: u16 = 17;
const API_VERSIONS: u16 = 18;
const AUTHENTICATE: u16 = 36;

/// What a front adds.
#[derive(Clone, Default)]
pub struct Adds {
    /// TLS.
    pub tls: Option<Arc<ServerConfig>>,
    /// A user and a password, by SASL's PLAIN.
    pub login: Option<(String, String)>,
}

/// A front that runs.
pub struct Front {
    port: u16,
    over: Arc<AtomicBool>,
    /// Requests to produce that were passed on, whose answers are held back.
    cut: Arc<Mutex<u32>>,
}

/// A connection with or without TLS.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

impl Front {
    /// A listener for a front, so that its port is known before the broker's.
    pub fn listener() -> Result<(TcpListener, String)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        Ok((listener, format!("localhost:{}", address.port())))
    }

    /// Starts it.
    pub fn start(listener: TcpListener, broker: String, adds: Adds) -> Result<Self> {
        let over = Arc::<AtomicBool>::default();
        let cut = Arc::<Mutex<u32>>::default();
        let port = listener.local_addr()?.port();
        let (is_over, cuts) = (over.clone(), cut.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                if is_over.load(Relaxed) {
                    return;
                }
                let Ok(client) = client else { continue };
                let (broker, adds, cuts) = (broker.clone(), adds.clone(), cuts.clone());
                // It ends with its connection.
                thread::spawn(move || drop(serve(client, &broker, &adds, &cuts)));
            }
        });
        Ok(Self { port, over, cut })
    }

    /// Closes the connection instead of answering so many of the next requests to produce, which the
    /// broker has by then.
    pub fn cut(&self, requests: u32) {
        *self.cut.lock().unwrap() = requests;
    }

    /// How many of these were not cut off yet.
    pub fn left(&self) -> u32 {
        *self.cut.lock().unwrap()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Passes requests and responses on, one at a time.
fn serve(client: TcpStream, broker: &str, adds: &Adds, cut: &Mutex<u32>) -> io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(120)))?;
    let mut client: Box<dyn Stream> = match &adds.tls {
        None => Box::new(client),
        Some(config) => {
            let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
            Box::new(StreamOwned::new(connection, client))
        }
    };
    let mut broker = TcpStream::connect(broker)?;
    let mut is_known = adds.login.is_none();
    loop {
        let request = read(&mut client)?;
        let kind = u16::from_be_bytes([request[0], request[1]]);
        let number = &request[4..8];
        match (&adds.login, kind) {
            (Some(_), HANDSHAKE) => {
                // No error, and one mechanism.
                let answer = [number, &[0, 0, 0, 0, 0, 1, 0, 5], b"PLAIN"].concat();
                write(&mut client, &answer)?;
                continue;
            }
            (Some((user, password)), AUTHENTICATE) => {
                let wanted = [b"\0", user.as_bytes(), b"\0", password.as_bytes()].concat();
                is_known = request.windows(wanted.len()).any(|it| it == wanted);
                let error: &[u8] = match is_known {
                    true => &[0, 0, 255, 255],
                    // SASL_AUTHENTICATION_FAILED, without words.
                    false => &[0, 58, 255, 255],
                };
                let lifetime: &[u8] = if request[3] >= 1 { &[0; 8] } else { &[] };
                write(&mut client, &[number, error, &[0; 4], lifetime].concat())?;
                continue;
            }
            _ => {}
        }
        if !is_known && kind != API_VERSIONS {
            return Ok(());
        }
        write(&mut broker, &request)?;
        let answer = read(&mut broker)?;
        if kind == PRODUCE {
            let mut left = cut.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return Ok(());
            }
        }
        write(&mut client, &answer)?;
    }
}

fn read(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut message = vec![0; u32::from_be_bytes(length) as usize];
    from.read_exact(&mut message)?;
    Ok(message)
}

fn write(to: &mut dyn Write, message: &[u8]) -> io::Result<()> {
    to.write_all(&(message.len() as u32).to_be_bytes())?;
    to.write_all(message)?;
    to.flush()
}
