//! Which ClickHouse server, and as whom.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use crate::clickhouse::{Address, Server};

/// Which ClickHouse server.
#[derive(Args, Clone)]
pub struct ClickHouse {
    /// HTTP address of the ClickHouse server: http://HOST:PORT or https://HOST:PORT
    #[arg(
        long,
        value_name = "URL",
        env = "TWHEEL_CLICKHOUSE_URL",
        default_value = "http://localhost:8123"
    )]
    pub url: String,
    /// Database with the tables of `twheel fleet schema`
    #[arg(long, value_name = "NAME", default_value = "twheel")]
    pub database: String,
    /// User of the ClickHouse server [default: the server's default user]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// File with the user's password, in its first line
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// PEM file with the authorities whose servers are trusted, instead of the system's; only with https
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

impl ClickHouse {
    /// The server, which was not asked anything yet. Reads the password and the certificates.
    ///
    /// # Errors
    ///
    /// A file cannot be read or used, or the URL is no address of a server.
    pub fn server(&self) -> Result<Server> {
        let password = self.password_file.as_ref().map(password).transpose()?;
        Server::new(Address {
            url: self.url.clone(),
            database: self.database.clone(),
            user: self.user.clone(),
            password,
            ca: self.ca.clone(),
        })
    }
}

/// The first line of a file.
///
/// # Errors
///
/// It cannot be read.
pub fn password(path: &PathBuf) -> Result<String> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the password in {}", path.display()))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
