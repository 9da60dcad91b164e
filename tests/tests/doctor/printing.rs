//! How output is printed to terminals, files and pipes.

use std::{
    fs::{self, File},
    io::Read,
    os::fd::OwnedFd,
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    pty::openpty,
    sys::signal::{Signal, kill},
    unistd::{Pid, pipe2},
};
use twheel::failure::Kind;
use twheel_tests::{
    netns::require_root,
    pair::{Family, Pair, SERVER},
    running::{Twheel, once},
};

use crate::host;

const ESCAPE: char = '\u{1b}';

/// What a program writes to a terminal of its own.
fn on_terminal(command: &mut Command) -> Result<String> {
    let pty = openpty(None, None)?;
    let copy = || -> Result<OwnedFd> { Ok(pty.slave.try_clone()?) };
    command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
    let mut child = command.spawn()?;
    // The command holds copies of the descriptors, which keep the terminal open.
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    drop(pty.slave);
    let mut written = Vec::new();
    let read = File::from(pty.master).read_to_end(&mut written);
    child.wait()?;
    match read {
        // Linux returns this error once no process has the other end open.
        Err(error) if error.raw_os_error() != Some(Errno::EIO as i32) => Err(error.into()),
        _ => Ok(String::from_utf8(written)?),
    }
}

#[test]
fn colours_are_for_terminals() -> Result<()> {
    let host = host()?;
    let doctor = || -> Result<Command> {
        let mut command = host.twheel(&["doctor"])?;
        command.env_remove("NO_COLOR").env("TERM", "xterm");
        Ok(command)
    };
    let text = on_terminal(&mut doctor()?)?;
    ensure!(text.contains(ESCAPE), "no colour: {text}");
    let text = on_terminal(doctor()?.env("NO_COLOR", "1"))?;
    ensure!(
        text.contains("kernel") && !text.contains(ESCAPE),
        "{text:?}"
    );
    let ended = once(doctor()?)?;
    let text = format!("{ended:?}");
    ensure!(
        text.contains("kernel") && !text.contains("\\u{1b}"),
        "{text}"
    );
    Ok(())
}

#[test]
fn bars_are_for_terminals() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let twheel = Twheel::start(host, &["--iface", SERVER])?;
    let policy = std::env::temp_dir().join(format!("twl-{}-policy.toml", process::id()));
    fs::write(&policy, "[timeouts]\nestablished = \"1h\"\n")?;
    let policy_path = policy.to_string_lossy().into_owned();
    let result = || -> Result<()> {
        for (args, result) in [
            (
                &["policy", "load", &policy_path, "--iface", SERVER][..],
                ": in force; ",
            ),
            (&["flush", "--iface", SERVER], " deleted"),
        ] {
            // A bar appears with the first flow.
            let _connection = pair.connect(Family::V4)?;
            let mut command = host.twheel(args)?;
            let text = on_terminal(command.env("TERM", "xterm"))?;
            ensure!(
                text.contains(ESCAPE) && text.contains(result),
                "no bar: {text:?}"
            );
            let ended = host.twheel_once(args)?;
            ensure!(ended.stderr.contains(result), "{ended:?}");
            ensure!(!ended.stderr.contains([ESCAPE, '\r']), "{ended:?}");
        }
        Ok(())
    }();
    fs::remove_file(&policy)?;
    result?;
    twheel.stop()?;
    host.check_clean(SERVER)
}

#[test]
fn a_reader_that_has_gone_is_no_failure() -> Result<()> {
    let host = host()?;
    let policy = std::env::temp_dir().join(format!("twl-{}-rules.toml", process::id()));
    fs::write(
        &policy,
        "[[rule]]\nname = \"ssh\"\ndport = 22\ntimeouts = { established = \"1h\" }\n",
    )?;
    let policy_path = policy.to_string_lossy().into_owned();
    let result = || -> Result<()> {
        for args in [
            &["plan", "--flows", "1000"][..],
            &["plan", "--flows", "1000", "--json"],
            &["policy", "check", &policy_path],
            &["policy", "check", &policy_path, "--json"],
            &["doctor"],
            // Red findings as well.
            &["doctor", "--iface", "nowhere0"],
            &["doctor", "--json"],
            &["completions", "bash"],
            &["completions", "zsh"],
            &["--help"],
            &["run", "--help"],
            &["--version"],
        ] {
            let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
            drop(reader);
            let output = host.twheel(args)?.stdout(writer).output()?;
            let stderr = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(0), "{args:?}: {output:?}");
            ensure!(stderr.is_empty(), "{args:?}: {stderr}");
        }
        Ok(())
    }();
    fs::remove_file(&policy)?;
    result
}

#[test]
fn nobody_need_read_standard_error() -> Result<()> {
    let host = host()?;
    for (args, code) in [
        (&["run", "--iface", SERVER][..], 0),
        (&["run", "--iface", SERVER, "--keep"], 0),
        (&["flush", "--iface", SERVER], 0),
        (&["detach", "--iface", SERVER], 0),
        (&["detach", "--iface", SERVER], Kind::Pins as i32),
    ] {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        drop(reader);
        let mut child = host.twheel(args)?.stderr(writer).spawn()?;
        if args[0] == "run" {
            let end = Instant::now() + Duration::from_secs(20);
            while host.attached(SERVER)? != ["xdp", "egress"] {
                ensure!(
                    Instant::now() < end,
                    "{args:?}: the run has not attached: {:?}",
                    child.wait()?
                );
                thread::sleep(Duration::from_millis(20));
            }
            kill(Pid::from_raw(child.id() as i32), Signal::SIGINT)?;
        }
        let status = child.wait()?;
        ensure!(status.code() == Some(code), "{args:?}: {status:?}");
    }
    host.check_clean(SERVER)
}
