//! A terminal in which `twheel top` runs.

use std::{
    fs,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel_tests::{
    netns::{Namespace, tool},
    running::twheel_bin,
};

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// Columns and lines, unless a test wants others.
const SIZE: (usize, usize) = (120, 30);
/// Clears the screen, as a shell command: `clear` may not be installed.
const CLEAR: &str = r"printf '\033[H\033[2J'";

/// A terminal with a shell in a namespace, made by tmux; it ends when this is dropped.
pub struct Terminal<'a> {
    host: &'a Namespace,
    socket: String,
}

impl<'a> Terminal<'a> {
    pub fn open(host: &'a Namespace) -> Result<Self> {
        Self::sized(host, SIZE)
    }

    pub fn sized(host: &'a Namespace, (width, height): (usize, usize)) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let socket = format!("twheel-test-{}-{count}", std::process::id());
        let terminal = Self { host, socket };
        let (width, height) = (width.to_string(), height.to_string());
        let size = ["-x", &width, "-y", &height];
        let shell = ["env", "-u", "NO_COLOR", "PS1=prompt> ", "sh"];
        let args = [&["-f", "/dev/null", "new-session", "-d"], &size[..], &shell];
        terminal.tmux(&args.concat())?;
        terminal.until("a prompt", |screen| screen.starts_with("prompt>"))?;
        Ok(terminal)
    }

    pub fn tmux(&self, args: &[&str]) -> Result<String> {
        let mut command = self.host.command(tool("tmux")?)?;
        let output = command.args(["-L", &self.socket]).args(args).output();
        let output = output.context("cannot run `tmux`: is it installed?")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tmux {args:?}: {stderr}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Types text.
    pub fn enter(&self, text: &str) -> Result<()> {
        self.tmux(&["send-keys", "-l", text]).map(drop)
    }

    /// Presses keys, by tmux's names.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        self.tmux(&[&["send-keys"], keys].concat()).map(drop)
    }

    pub fn screen(&self) -> Result<String> {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen is as expected.
    pub fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen()?;
            let was = is(&screen);
            ensure!(was || Instant::now() < end, "did not see {what}:\n{screen}");
            thread::sleep(Duration::from_millis(30));
            // It may have been in the middle of being drawn.
            let drawn = self.screen()?;
            if was && is(&drawn) {
                return Ok(drawn);
            }
        }
    }

    /// Runs a shell command and returns its output.
    pub fn shell(&self, command: &str) -> Result<String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let end = format!("end-{}:", COUNT.fetch_add(1, Ordering::Relaxed));
        // Written in two parts, so that the typed command is not taken for its output.
        let (a, b) = end.split_at(2);
        self.enter(&format!("{CLEAR}; {command}; echo {a}''{b}"))?;
        self.press(&["Enter"])?;
        let screen = self.until(&end, |screen| screen.contains(&end))?;
        Ok(screen.split(&end).next().unwrap_or_default().to_owned())
    }

    /// Starts `twheel top` over some text, and waits until it has drawn.
    pub fn top(&self, environment: &str, args: &str) -> Result<String> {
        let bin = twheel_bin()?;
        self.enter(&format!(
            "{CLEAR}; echo earlier text; {environment} {} top {args}; echo code $?",
            bin.display()
        ))?;
        self.press(&["Enter"])?;
        self.until("top", |screen| {
            screen.contains("PROTO") && screen.contains("q quit")
        })
    }

    pub fn resize(&self, (width, height): (usize, usize)) -> Result<()> {
        let (width, height) = (width.to_string(), height.to_string());
        let size = ["resize-window", "-x", &width, "-y", &height];
        self.tmux(&size).map(drop)
    }

    /// Whether the terminal shows the alternate screen, and whether the cursor is visible.
    pub fn modes(&self) -> Result<String> {
        let modes = "#{alternate_on} #{cursor_flag}";
        let modes = self.tmux(&["display-message", "-p", modes])?;
        Ok(modes.trim().to_owned())
    }

    /// The process of `twheel top`.
    pub fn pid(&self) -> Result<i32> {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"])?;
        let shell = shell.trim();
        let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"))?;
        Ok(children.trim().parse()?)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid()?), signal)?)
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

/// The lines of the screen that show flows, without the mark of the selected one.
pub fn flows(screen: &str) -> Vec<&str> {
    let lines = screen.lines();
    let lines = lines.map(|line| line.trim_start_matches(['>', ' ']));
    lines.filter(|line| line.starts_with("tcp ")).collect()
}

/// The line of the selected row.
pub fn selected(screen: &str) -> Option<&str> {
    screen.lines().find_map(|line| line.strip_prefix('>'))
}

/// The number on the screen after a word, without its unit.
pub fn number(screen: &str, word: &str) -> Option<u64> {
    let (_, rest) = screen.split_once(word)?;
    let digits = rest.split(|it: char| !it.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// A number such as `1.23M`.
pub fn scaled(text: &str) -> Option<f64> {
    let (number, unit) = match text.strip_suffix(['k', 'M', 'G']) {
        Some(number) => (number, text.chars().last()?),
        None => (text, ' '),
    };
    let unit = match unit {
        'k' => 1e3,
        'M' => 1e6,
        'G' => 1e9,
        _ => 1.0,
    };
    Some(number.parse::<f64>().ok()? * unit)
}

/// The text of a line below a heading: below its end, for numbers; a heading may be there twice.
pub fn below<'a>(screen: &'a str, heading: &str, line: &'a str) -> Option<&'a str> {
    let headings = screen.lines().find(|it| it.contains("PROTO"))?;
    let at = headings.find(heading)? + heading.len();
    // All in these lines are ASCII, but for marks that are counted as one letter.
    let before: String = headings.get(..at)?.to_owned();
    let end = before.chars().count();
    let line = screen.lines().find(|it| it.contains(line))?;
    let end = line
        .char_indices()
        .nth(end)
        .map_or(line.len(), |(at, _)| at);
    line[..end].split(' ').next_back()
}
