//! The page in a browser.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use twheel_common::config::NAME_BYTES;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Busy, Family, PORT, Pair, SERVER},
};

use crate::{Watched, connect_to, expiries, millis};

/// Opens an address in a browser, lets this many of the page's seconds pass, and returns the
/// document as markup. Also takes a screenshot, if `TWHEEL_SCREENSHOT` names a place for it.
fn browse(host: &Namespace, address: SocketAddr, seconds: u32, picture: &str) -> Result<String> {
    let profile = std::env::temp_dir().join(format!("twheel-chromium-{}", std::process::id()));
    let run = |how: &str| -> Result<String> {
        let output = host
            .command("chromium")?
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--window-size=1200,1300",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("--virtual-time-budget={}", seconds * 1000))
            .arg(how)
            .arg(format!("http://{address}/"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .context("cannot run `chromium`: `cargo xtask setup` installs it")?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let shown = run("--dump-dom").and_then(|shown| {
        if let Some(to) = std::env::var_os("TWHEEL_SCREENSHOT") {
            let file = PathBuf::from(to).join(picture);
            run(&format!("--screenshot={}", file.display()))?;
        }
        Ok(shown)
    });
    let _ = fs::remove_dir_all(profile);
    shown
}

/// All texts that are between two others.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    let parts = text.split(from).skip(1);
    parts.filter_map(|part| part.split(to).next()).collect()
}

#[test]
fn a_browser_draws_the_page() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(
        &pair.server,
        &["--timeout", "60s,close=1s", "--slots", "64"],
    )?;
    let busy = Busy::start(pair.connect_some(5)?, millis(50));
    pair.half_open(Family::V4)?;
    for connection in pair.connect_some(3)? {
        connection.reset()?;
    }
    let ended = expiries(&watched.twheel, 3)?;
    let shown = browse(&pair.server, watched.address, 6, "page.png")?;
    let has = |what: &str| {
        ensure!(
            shown.contains(what),
            "the page does not show {what}: {shown}"
        );
        Ok(())
    };
    has(">live</p>")?;
    has(&format!("<span id=\"interfaces\">{SERVER}</span>"))?;
    has("established 5</li>")?;
    has("syn_sent 1</li>")?;
    has("<polygon class=\"c0\"")?;
    // The wheels: all flows are in their slots, and the hands have moved.
    let slots = between(&shown, "data-slots=\"", "\"");
    let slots: Vec<u32> = slots
        .iter()
        .map(|it| it.parse())
        .collect::<Result<_, _>>()?;
    assert_eq!(
        slots.len() % 3,
        0,
        "not three levels for each CPU: {slots:?}"
    );
    let held: u32 = slots.iter().sum();
    assert!((1..=6).contains(&held), "{slots:?}");
    assert_eq!(
        between(&shown, "class=\"lit\" d=\"M", "\"").len(),
        slots.iter().filter(|it| **it > 0).count()
    );
    let hands = between(&shown, "transform=\"rotate(", ")");
    assert_eq!(hands.len(), slots.len());
    let moved = hands
        .iter()
        .filter(|it| it.parse::<f64>().is_ok_and(|it| it > 0.0));
    assert!(moved.count() > 0, "{hands:?}");
    // The latest comes first.
    let rows = between(&shown, "<tr><td>", "</tr>");
    assert_eq!(rows.len(), 3, "{rows:?}");
    for (row, expiry) in rows.iter().zip(ended.iter().rev()) {
        let cells = format!(
            "<td>tcp</td><td>{}</td><td>{}</td><td>close</td><td>reset</td><td></td>",
            expiry.src, expiry.dst
        );
        assert!(row.contains(&cells), "no {cells} in {row}");
    }
    drop(busy);
    Ok(())
}

#[test]
fn what_strangers_say_is_no_markup() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let policy = std::env::temp_dir().join(format!("twheel-markup-{}.toml", std::process::id()));
    fs::write(
        &policy,
        format!(
            "[[rule]]\nname = \"markup\"\ndport = {PORT}\ntimeouts = {{ established = \"1s\" }}\n"
        ),
    )?;
    let file = policy.to_str().context("the path is not UTF-8")?;
    let watched = Watched::start(&pair.server, &["--policy", file]);
    fs::remove_file(&policy)?;
    let watched = watched?;
    // A policy cannot contain such a name: somebody has written it into the map.
    let instance = pair.server.instances()?.pop().context("no instance")?;
    let map = Map::Array(MapData::from_pin(instance.join("NAMES"))?);
    let mut names = Array::<_, [u8; NAME_BYTES]>::try_from(map)?;
    let markup = "<img src=x onerror=\"document.title=1\"><script>alert(1)</script>";
    let mut name = [0; NAME_BYTES];
    name[..markup.len()].copy_from_slice(markup.as_bytes());
    let number = (0..100).find(|number| {
        names
            .get(number, 0)
            .is_ok_and(|it| it.starts_with(b"markup"))
    });
    names.set(number.context("no rule")?, name, 0)?;
    let _connection = pair.connect_some(1)?;
    let ended = expiries(&watched.twheel, 1)?;
    assert_eq!(ended[0].rule.as_deref(), Some(markup));
    let shown = browse(&pair.server, watched.address, 3, "markup.png")?;
    ensure!(shown.contains("<td>&lt;img src=x onerror="), "{shown}");
    ensure!(!shown.contains("<img"), "{shown}");
    ensure!(!shown.contains("<script>"), "{shown}");
    ensure!(
        shown.contains(&format!("<title>twheel {SERVER}</title>")),
        "{shown}"
    );
    Ok(())
}

/// Forwards a request and its answer, except for a repeated request for the status.
fn pass_on(
    mut caller: TcpStream,
    host: &Namespace,
    to: SocketAddr,
    asked: &AtomicU32,
) -> Result<()> {
    let mut request = [0; 4096];
    let length = caller.read(&mut request)?;
    let request = std::str::from_utf8(&request[..length])?;
    if request.starts_with("GET /api/status") && asked.fetch_add(1, Ordering::Relaxed) > 0 {
        return Ok(());
    }
    let mut answer = Vec::new();
    let mut answers = connect_to(host, to)?;
    answers.write_all(request.as_bytes())?;
    answers.read_to_end(&mut answer)?;
    Ok(caller.write_all(&answer)?)
}

#[test]
fn the_page_says_when_the_connection_is_lost() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &[])?;
    let _connections = pair.connect_some(2)?;
    let bind = || Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
    let listener = pair.server.enter(bind)?;
    let address = listener.local_addr()?;
    let (listener, host, to) = (&listener, &pair.server, watched.address);
    let (asked, over) = (AtomicU32::new(0), AtomicBool::new(false));
    let (asked, over) = (&asked, &over);
    let shown = thread::scope(|scope| {
        scope.spawn(move || {
            // A browser opens connections that it may never use.
            while let Ok((caller, _)) = listener.accept() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                scope.spawn(move || pass_on(caller, host, to, asked));
            }
        });
        let shown = browse(host, address, 5, "lost.png");
        over.store(true, Ordering::Relaxed);
        let _ = connect_to(host, address);
        shown
    })?;
    ensure!(shown.contains("<body class=\"lost\">"), "{shown}");
    ensure!(
        shown.contains(">connection lost: what you see is old; trying again</p>"),
        "{shown}"
    );
    ensure!(
        shown.contains("established 2</li>"),
        "the page no longer shows what it showed before: {shown}"
    );
    Ok(())
}
