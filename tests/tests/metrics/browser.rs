//! A real browser, and what it shows.

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
use serde_json::Value;
use twheel_tests::netns::{Namespace, tool};

use crate::connect_to;

/// How a page is opened.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Behind the address, with the part after `#`.
    pub path: &'a str,
    /// The window, in pixels.
    pub size: (u32, u32),
    /// The reader prefers dark colours.
    pub dark: bool,
    /// How many of the page's seconds pass.
    pub seconds: u32,
    /// The name of a picture, which is made if `TWHEEL_SCREENSHOT` names a directory for it.
    pub picture: Option<&'a str>,
}

impl Default for View<'_> {
    fn default() -> Self {
        Self {
            path: "/",
            size: (1280, 1300),
            dark: false,
            seconds: 4,
            picture: None,
        }
    }
}

/// Opens an address in a browser and returns the document as markup.
pub fn browse(host: &Namespace, address: SocketAddr, view: View<'_>) -> Result<String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("twheel-chromium-{}-{number}", std::process::id());
    let profile = std::env::temp_dir().join(name);
    let run = |how: &str| -> Result<String> {
        let output = host
            .command(tool("chromium")?)?
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
            ])
            .arg(format!("--window-size={},{}", view.size.0, view.size.1))
            .arg(format!(
                "--blink-settings=preferredColorScheme={}",
                u8::from(!view.dark)
            ))
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("--virtual-time-budget={}", view.seconds * 1000))
            .arg(how)
            .arg(format!("http://{address}{}", view.path))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .context("cannot run chromium")?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let shown = run("--dump-dom").and_then(|shown| {
        let directory = std::env::var_os("TWHEEL_SCREENSHOT").map(PathBuf::from);
        if let Some((directory, picture)) = directory.zip(view.picture) {
            run(&format!(
                "--screenshot={}",
                directory.join(picture).display()
            ))?;
        }
        Ok(shown)
    });
    let _ = fs::remove_dir_all(profile);
    shown
}

/// What a [front](through) does with a request.
pub enum Does {
    /// Passes it on to the server, and the answer back.
    Pass,
    /// Gives no answer.
    Drop,
    /// Answers itself, with a text of this content type.
    Text(&'static str, String),
    /// Passes it on, and adds a script to the page that is the answer. Another page may hold it.
    AddScript,
}

/// Calls `inside` with an address at which each request is answered as `does` says, given its first
/// line.
pub fn through<T>(
    host: &Namespace,
    server: SocketAddr,
    does: impl Fn(&str) -> Does + Sync,
    inside: impl FnOnce(SocketAddr) -> Result<T>,
) -> Result<T> {
    let listener = host.enter(|| Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?))?;
    let address = listener.local_addr()?;
    let (over, listener, does) = (AtomicBool::new(false), &listener, &does);
    let over = &over;
    thread::scope(|scope| {
        scope.spawn(move || {
            // A browser opens connections that it may never use.
            while let Ok((caller, _)) = listener.accept() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                scope.spawn(move || answer(caller, host, server, does));
            }
        });
        let result = inside(address);
        over.store(true, Ordering::Relaxed);
        let _ = connect_to(host, address);
        result
    })
}

fn answer(
    mut caller: TcpStream,
    host: &Namespace,
    server: SocketAddr,
    does: impl Fn(&str) -> Does,
) -> Result<()> {
    let mut request = [0; 8192];
    let length = caller.read(&mut request)?;
    let request = std::str::from_utf8(&request[..length])?;
    let does = does(request.lines().next().unwrap_or_default());
    let mut body = match &does {
        Does::Drop => return Ok(()),
        Does::Text(kind, text) => format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{text}",
            text.len()
        ),
        Does::Pass | Does::AddScript => {
            let mut answers = connect_to(host, server)?;
            answers.write_all(request.as_bytes())?;
            let mut answer = String::new();
            answers.read_to_string(&mut answer)?;
            answer
        }
    };
    if matches!(does, Does::AddScript) {
        let (head, page) = body.split_once("\r\n\r\n").context("no end of the head")?;
        let script = "<script type=\"module\" src=\"probe.js\"></script></body>";
        let page = page.replace("</body>", script);
        let head = head.lines().filter(|it| !it.starts_with("content-length"));
        let head: Vec<_> = head.collect();
        let head = head.join("\r\n").replace("; frame-ancestors 'none'", "");
        body = format!("{head}\r\ncontent-length: {}\r\n\r\n{page}", page.len());
    }
    Ok(caller.write_all(body.as_bytes())?)
}

/// A browser's window is no narrower.
const NARROWEST: u32 = 500;

/// Opens the page and runs a script in it, which sets `top.document.body.dataset.probe` to a JSON
/// text; and returns that. A page that is to be narrower than a window is in a frame.
pub fn probe(host: &Namespace, server: SocketAddr, view: View<'_>, script: &str) -> Result<Value> {
    let (width, height) = view.size;
    let frame = format!(
        "<!doctype html><body><iframe src=\"/\" width=\"{width}\" height=\"{height}\" \
         style=\"border: 0\"></iframe></body>"
    );
    let does = |request: &str| match request.split(' ').nth(1) {
        Some("/") => Does::AddScript,
        Some("/frame") => Does::Text("text/html; charset=utf-8", frame.clone()),
        Some("/probe.js") => Does::Text("text/javascript", script.to_owned()),
        _ => Does::Pass,
    };
    let view = match width < NARROWEST {
        true => View {
            path: "/frame",
            ..view
        },
        false => view,
    };
    let shown = through(host, server, does, |address| browse(host, address, view))?;
    let probe = between(&shown, "data-probe=\"", "\"");
    let probe = probe.first().context("the script has set nothing")?;
    serde_json::from_str(&unescaped(probe))
        .with_context(|| format!("no JSON: {}", unescaped(probe)))
}

/// All texts that are between two others.
pub fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    let parts = text.split(from).skip(1);
    parts.filter_map(|part| part.split(to).next()).collect()
}

/// A text as it was before it was written as markup.
pub fn unescaped(markup: &str) -> String {
    let text = markup.replace("&lt;", "<").replace("&gt;", ">");
    text.replace("&quot;", "\"").replace("&amp;", "&")
}

/// The text of markup.
fn text(markup: &str) -> String {
    let parts = markup.split('<');
    let texts = parts.map(|part| part.split_once('>').map_or(part, |(_, text)| text));
    unescaped(&texts.collect::<String>())
}

/// The cells of a table's body, by row.
pub fn rows(shown: &str, id: &str) -> Vec<Vec<String>> {
    let (_, after) = shown
        .split_once(&format!(" id=\"{id}\""))
        .unwrap_or_default();
    let table = after.split("</table>").next().unwrap_or_default();
    between(table, "<tr>", "</tr>")
        .into_iter()
        .map(|row| between(row, "<td", "</td>"))
        .filter(|cells| !cells.is_empty())
        .map(|cells| {
            cells
                .iter()
                .map(|cell| text(&format!("<td{cell}")))
                .collect()
        })
        .collect()
}

/// The numbers that stand first on the page, by name.
pub fn rates(shown: &str) -> Vec<(String, String)> {
    let terms = between(shown, "<dt>", "</dd>");
    let pair = |it: &str| {
        let (name, value) = it.split_once("</dt><dd>")?;
        Some((unescaped(name), unescaped(value)))
    };
    terms.into_iter().filter_map(pair).collect()
}

/// The text of the element with this identifier, in which there is no other one of its kind.
pub fn said(shown: &str, id: &str) -> String {
    let (before, after) = shown
        .split_once(&format!(" id=\"{id}\""))
        .unwrap_or_default();
    let tag = before.rsplit_once('<').unwrap_or_default().1;
    let tag = tag.split(' ').next().unwrap_or_default();
    let inside = after.split_once('>').unwrap_or_default().1;
    let inside = inside.split(&format!("</{tag}>")).next();
    text(inside.unwrap_or_default())
}
