//! Why a ClickHouse server did not do what was asked, and what to do about it.

use std::{fmt, io};

use clickhouse::error::Error;

use super::address::Address;

/// Most bytes of a server's own words in a message.
const WORDS: usize = 300;

/// How the tables are made, or brought to this version.
pub(super) const SET_UP: &str = "`twheel fleet schema | clickhouse-client --multiquery`, with the options of \
    `fleet schema` that are wanted there (--database, --cluster, --kafka-...)";

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
    /// The answer takes too long.
    Slow,
    /// Anything else.
    Other,
}

/// A question that failed: which kind of failure, and a sentence that says what to do.
#[derive(Debug)]
pub struct Fault {
    /// The kind.
    pub refusal: Refusal,
    pub(super) message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}

impl Fault {
    /// What is wrong when a server at this address is asked, in a sentence.
    pub(super) fn new(address: &Address, error: &Error) -> Self {
        Self::of(address, refusal(error), &why(error))
    }

    /// The same. `why`: what the server or the network has said.
    pub(super) fn of(address: &Address, refusal: Refusal, why: &str) -> Self {
        let Address {
            url,
            database,
            user,
            ..
        } = address;
        let user = user.as_deref().unwrap_or("default");
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
            Refusal::Login => format!(
                "ClickHouse at {url} refuses the user {user} or the password: give them with \
                 --user and --password-file"
            ),
            Refusal::Rights => {
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
            Refusal::Slow => format!(
                "ClickHouse at {url} is too slow: {why}: ask for less (a shorter --since, a --host), \
                 or look at its load"
            ),
            Refusal::Version | Refusal::Other => {
                let what = match code(why) {
                    Some(_) => "mend it at the server, whose log says more",
                    None => "check that --url is the address of ClickHouse's HTTP interface",
                };
                format!("ClickHouse at {url} refuses this: {why}: {what}")
            }
        };
        Self { refusal, message }
    }
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
        Some(159) => Refusal::Slow,
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
    fn a_refusal_says_what_to_do() {
        let address = Address::default();
        for (said, wanted) in [
            ("Code: 252. DB::Exception: Too many parts", "whose log says"),
            ("Code: 159. DB::Exception: Timeout exceeded", "ask for less"),
            ("404 Not Found", "check that --url"),
            ("Code: 60. DB::Exception: no table", "--kafka-..."),
        ] {
            let fault = Fault::new(&address, &Error::BadResponse(said.to_owned()));
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
}
