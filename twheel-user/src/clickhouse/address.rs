//! Where a ClickHouse server is, and who asks it.

use std::path::PathBuf;

use anyhow::Result;
use hyper::header::HeaderValue;

use crate::failure::{Failure, Kind};

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

/// Checks that this is the address of a server.
pub(super) fn check(url: &str) -> Result<()> {
    let wrong = |what: &str| {
        let message = format!("{url} is not the address of a ClickHouse server: {what}");
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
    if authority.as_str().contains('@') {
        return wrong("give the user with --user, and the password with --password-file");
    }
    // What follows the host. (A port that is too large is none for this parser.)
    let has_port = authority.as_str() != authority.host();
    if has_port && authority.port_u16().is_none_or(|port| port == 0) {
        return wrong("its port is not one from 1 to 65535");
    }
    match uri.query() {
        Some(_) => wrong("give it without `?` and what follows"),
        None => Ok(()),
    }
}

/// Checks what is sent with each question.
pub(super) fn check_names(address: &Address) -> Result<()> {
    let usage = |message: &str| Err(Failure::new(Kind::Usage, message).into());
    if address.ca.is_some() && address.url.starts_with("http://") {
        return usage("--ca is for a server with TLS: give https:// in --url, or leave --ca out");
    }
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
            (
                Address {
                    ca: Some("ca.pem".into()),
                    ..address("t", "u", "p")
                },
                "--ca is for",
            ),
        ] {
            let error = check_names(&address).unwrap_err();
            assert_eq!(crate::failure::exit_code(&error), Kind::Usage as u8);
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
