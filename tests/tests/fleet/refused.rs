//! What is wrong is told in a sentence.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use tokio::net::TcpSocket;
use twheel_tests::{
    engine::Engine,
    running::{once, twheel_bin},
};

#[test]
fn what_is_wrong_is_told_in_a_sentence() -> Result<()> {
    let refused = |command: std::process::Command, code: i32| -> Result<String> {
        let ended = once(command)?;
        ensure!(ended.code() == Some(code), "{ended:?}");
        ensure!(ended.lines.is_empty(), "{ended:?}");
        Ok(ended.stderr)
    };
    // It is bound and does not listen, so that nobody else listens there.
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let url = format!("http://{}", socket.local_addr()?);
    for command in ["expired", "talkers", "reasons", "hosts", "leaks"] {
        let mut twheel = std::process::Command::new(twheel_bin()?);
        twheel.args(["fleet", command, "--url", &url]);
        let error = refused(twheel, 1)?;
        ensure!(
            error.starts_with("twheel: cannot reach ClickHouse at"),
            "{error}"
        );
        ensure!(error.lines().count() == 1, "{error}");
    }
    // A filter is checked before a server is asked.
    for command in ["expired", "talkers", "reasons", "leaks"] {
        for (filter, column, why) in [
            ("dport = 443 and dprt = 3", 17, "unknown field `dprt`"),
            ("cpu == 1", 1, "is known only of flows in the table"),
            ("not expires > 1s", 5, "is known only of flows in the table"),
            ("dport == 65536", 10, "is not a number from 0 to 65535"),
        ] {
            let mut twheel = std::process::Command::new(twheel_bin()?);
            twheel.args(["fleet", command, filter, "--url", &url]);
            let error = refused(twheel, 2)?;
            ensure!(
                error.contains(&format!("filter, column {column}: ")),
                "{error}"
            );
            ensure!(error.contains(why), "{error}");
            let mark = error.lines().nth(2).context("no mark")?;
            ensure!(mark == format!("{}^", " ".repeat(column + 1)), "{error}");
        }
    }
    let Some(engine) = Engine::start()? else {
        return Ok(());
    };
    let error = refused(engine.twheel(&["fleet", "leaks"])?, 1)?;
    ensure!(
        error.contains("set it up with `twheel fleet schema"),
        "{error}"
    );
    let Some(engine) = Engine::with_login(Some(("me", "secret")))? else {
        return Ok(());
    };
    let error = refused(engine.twheel(&["fleet", "leaks", "--user", "you"])?, 1)?;
    ensure!(
        error.contains("refuses the user you or the password"),
        "{error}"
    );
    for (args, what) in [
        (vec!["schema", "--keep", "12h"], "whole days"),
        (vec!["schema", "--kafka-topic", "t"], "--kafka-brokers"),
        (vec!["schema", "--kafka-group", "g"], "--kafka-brokers"),
        (vec!["talkers", "--by", "state"], "possible values"),
        (vec!["leaks", "--since", "often"], "--since"),
    ] {
        let mut twheel = std::process::Command::new(twheel_bin()?);
        twheel.arg("fleet").args(args);
        let error = refused(twheel, 2)?;
        ensure!(error.contains(what), "{error}");
    }
    Ok(())
}
