//! Completions in shells.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::pty::openpty;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Pair, SERVER},
    running::{PolicyFile, Twheel, twheel_bin, wait_within},
};

/// What bash proposes for the last word of a command line.
fn proposed(host: &Namespace, words: &[&str]) -> Result<Vec<String>> {
    let program = twheel_bin()?;
    let program = program.to_str().context("a path in Unicode")?;
    let script = Command::new(program)
        .args(["completions", "bash"])
        .output()?;
    let mut bash = host.command("bash")?;
    let calls = r#"
COMP_WORDS=("$@") COMP_LINE="$*" COMP_CWORD=$(($# - 1)) COMP_TYPE=9
_twheel_complete twheel "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}""#;
    let script = String::from_utf8(script.stdout)? + calls;
    bash.args(["--norc", "-c", &script, "bash", "twheel"])
        .args(words);
    let output = bash.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && stderr.is_empty(),
        "{words:?}: {stderr}"
    );
    let lines = String::from_utf8(output.stdout)?;
    let lines = lines.lines().filter(|line| !line.is_empty());
    Ok(lines.map(str::to_owned).collect())
}

#[test]
fn shells_know_what_is_there() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let policy =
        "[[rule]]\nname = \"web-of-all\"\ndport = 443\ntimeouts = { established = \"1h\" }\n";
    let policy = PolicyFile::new("screens", policy)?;
    let check = |words: &[&str], expected: &[&str]| -> Result<()> {
        let found = proposed(host, words)?;
        ensure!(found == expected, "{words:?}: {found:?}");
        Ok(())
    };
    check(&["run", "--iface", "serv"], &[SERVER])?;
    check(&["run", "--iface", "lo,serv"], &[&format!("lo,{SERVER}")])?;
    check(&["run", "--reap", "reset,so"], &["reset,socket"])?;
    check(&["run", "--timeout", "time"], &["time_wait="])?;
    check(&["run", "--events", "end,re"], &["end,reap"])?;
    check(&["run", "--group", "roo"], &["root"])?;
    check(&["talkers", "--state", "time"], &["time_wait"])?;
    check(&["flows", "--sort", "ex"], &["expires"])?;
    check(&["help", "filt"], &["filter"])?;
    check(&["files", "policies/w"], &["policies/web-server.toml"])?;
    check(&["help", "policy", "ch"], &["check"])?;
    check(&["help", "policy", "fil"], &[])?;
    check(&["man", "tal"], &["talkers"])?;
    check(&["run", "--reap", "reset,s"], &["reset,socket"])?;
    check(&["run", "--reap", "reset,r"], &[])?;
    check(&["run", "--exclude", "al"], &[])?;
    check(&["expired", "reason == sup"], &["reason == superseded"])?;
    check(&["flows", "--iface", "serv"], &[])?;
    let args = ["--iface", SERVER, "--policy", policy.path()];
    let twheel = Twheel::start(host, &args)?;
    check(&["flows", "--iface", "serv"], &[SERVER])?;
    check(&["flows", "rule", "==", "web"], &["web-of-all"])?;
    check(&["detach", "--iface", ""], &[SERVER])?;
    let namespace = &host.name()[..host.name().len() - 1];
    ensure!(proposed(host, &["run", "--netns", namespace])?.contains(&host.name().to_owned()));
    twheel.stop()?;
    host.check_clean(SERVER)
}

/// What bash makes of these lines, each with a tab at its end.
fn completed(host: &Namespace, lines: &[&str]) -> Result<Vec<String>> {
    let pty = openpty(None, None)?;
    let mut bash = host.command("bash")?;
    let copy = || -> Result<OwnedFd> { Ok(pty.slave.try_clone()?) };
    bash.args(["--norc", "-i"]).env("TERM", "dumb");
    bash.stdin(copy()?).stdout(copy()?).stderr(copy()?);
    let mut child = bash.spawn()?;
    drop((bash, pty.slave));
    let mut terminal = File::from(pty.master);
    let mut typed = format!("source <({} completions bash)\n", twheel_bin()?.display());
    for line in lines {
        // Back to the beginning: the line is printed and not executed.
        typed += &format!("{line}\t\x01echo GOT \n");
    }
    terminal.write_all(format!("{typed}exit\n").as_bytes())?;
    let reader = thread::spawn(move || {
        let mut written = Vec::new();
        // Linux returns an error once no process has the other end open.
        let _ = terminal.read_to_end(&mut written);
        written
    });
    wait_within(&mut child, Duration::from_secs(60))?;
    let written = reader.join().ok().context("the reader panicked")?;
    let written = String::from_utf8(written)?;
    let lines = written.lines().map(|line| line.trim_end_matches('\r'));
    let got = lines.filter_map(|line| line.strip_prefix("GOT "));
    Ok(got.map(str::to_owned).collect())
}

#[test]
fn bash_completes_what_is_behind_a_sign_that_cuts_words() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let iface = format!("twheel run --iface={SERVER}");
    let cases = [
        ("twheel run --reap=so", "twheel run --reap=socket"),
        (
            "twheel run --reap=reset,so",
            "twheel run --reap=reset,socket",
        ),
        (&iface[..iface.len() - 2], &iface),
        (
            "twheel run --reap enforce=d",
            "twheel run --reap enforce=drop",
        ),
        (
            "twheel run --timeout close=3s,estab",
            "twheel run --timeout close=3s,established=",
        ),
        (
            "twheel run --timeout=close=3s,estab",
            "twheel run --timeout=close=3s,established=",
        ),
        (
            "twheel flows state == estab",
            "twheel flows state == established",
        ),
        ("twheel help policy ch", "twheel help policy check"),
    ];
    let found = completed(&pair.server, &cases.map(|(line, _)| line))?;
    ensure!(found == cases.map(|(_, whole)| whole), "{found:#?}");
    Ok(())
}
