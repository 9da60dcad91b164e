//! Runs programs that may wait for ever, above all for a network: each has a time bound and a second
//! try, and its output goes to a file. Also a lock, so that two of these commands do not make the
//! same thing at the same time.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File, OpenOptions, TryLockError},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};

use crate::sh::{self, say};

/// How many lines of a failed program's output are shown.
const TAIL: usize = 30;
/// How many characters of its last line are part of a message.
const LINE: usize = 300;
/// Seconds that a program may take to end once its time is up, before it is killed.
const GRACE: &str = "10";
/// From this size on a log is begun anew.
const LARGE: u64 = 1 << 20;
/// How long another command may hold a lock: what is done under it is bounded, too, and takes less.
const HELD: Duration = Duration::from_secs(75 * 60);

/// The log of an action, in the target directory.
pub fn log(name: &str) -> PathBuf {
    sh::target(&format!("{name}.log"))
}

/// A program that is run with a time bound.
pub struct Bounded<'a> {
    what: String,
    within: Duration,
    log: &'a Path,
    advice: &'a str,
    tries: u32,
    as_root: bool,
    is_quiet: bool,
    is_brief: bool,
    may_be_left: bool,
}

impl<'a> Bounded<'a> {
    /// `what`: what the program does, for messages that begin with "cannot". `within`: how long each
    /// try may take. `log`: the file that its output is appended to.
    pub fn new(what: impl Into<String>, within: Duration, log: &'a Path) -> Self {
        Self {
            what: what.into(),
            within,
            log,
            advice: "check the network, and try again",
            tries: 2,
            as_root: false,
            is_quiet: false,
            is_brief: false,
            may_be_left: false,
        }
    }

    /// What the user can do if it fails.
    pub fn advice(self, advice: &'a str) -> Self {
        Self { advice, ..self }
    }

    /// Without a second try.
    pub fn once(self) -> Self {
        Self { tries: 1, ..self }
    }

    /// As root.
    pub fn with_root(self) -> Self {
        Self {
            as_root: true,
            ..self
        }
    }

    /// Does not show the end of the output if the program fails.
    pub fn quiet(self) -> Self {
        Self {
            is_quiet: true,
            ..self
        }
    }

    /// The same; and the error is what could not be done and why, without what to do.
    pub fn brief(self) -> Self {
        Self {
            is_brief: true,
            ..self.quiet()
        }
    }

    /// Lets the program come to its own end if this process is interrupted. Others are ended.
    pub fn may_be_left(self) -> Self {
        Self {
            may_be_left: true,
            ..self
        }
    }

    /// Runs the program: its name, its arguments, the variables and the directory of `command`.
    ///
    /// # Errors
    ///
    /// One sentence: what could not be done, why, what to do, and where the output is.
    pub fn run(&self, command: &Command) -> Result<()> {
        let mut attempt = 1;
        loop {
            let failure = match self.attempt(command)? {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            if attempt < self.tries {
                say!("cannot {} ({failure}); trying again.", self.what);
                attempt += 1;
                continue;
            }
            if !self.is_quiet {
                failure.show(self.log);
            }
            return Err(self.error(&failure));
        }
    }

    fn error(&self, failure: &Failure) -> anyhow::Error {
        if self.is_brief {
            return anyhow!("cannot {} ({failure})", self.what);
        }
        let often = if self.tries > 1 { ", tried twice" } else { "" };
        anyhow!(
            "cannot {}{often} ({failure}): {}; {} has the output",
            self.what,
            self.advice,
            self.log.display()
        )
    }

    /// Fails only if the program cannot be tried.
    fn attempt(&self, command: &Command) -> Result<Result<(), Failure>> {
        let mut bounded = self.command(command)?;
        let mut log = open(self.log)?;
        let begin = log.metadata().map_or(0, |it| it.len());
        writeln!(log, "--- {}", words(command)).context("cannot write a log")?;
        let copy = log.try_clone().context("cannot open a log twice")?;
        let begun = Instant::now();
        let status = bounded
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(copy)
            .status()
            .context("cannot run `timeout`, which is part of coreutils")?;
        if status.success() {
            return Ok(Ok(()));
        }
        let written = fs::read(self.log).unwrap_or_default();
        // Another process may have begun the log anew.
        let written = written.get(begin as usize..).unwrap_or(&written);
        Ok(Err(Failure {
            how: How::of(status, begun.elapsed(), self.within),
            output: String::from_utf8_lossy(written).into_owned(),
        }))
    }

    /// `timeout` runs the program in a process group of its own, and ends the group. It runs as the
    /// same user, who alone may do that.
    fn command(&self, command: &Command) -> Result<Command> {
        let seconds = self.within.as_secs_f64().to_string();
        let mut words: Vec<&OsStr> = Vec::new();
        // What a terminal sends when its user interrupts does not reach that process group.
        if !self.may_be_left && !sh::which("setpriv").is_empty() {
            words.extend(["setpriv", "--pdeathsig", "TERM"].map(OsStr::new));
        }
        words.extend(["timeout", "-k", GRACE, &seconds].map(OsStr::new));
        words.push(command.get_program());
        words.extend(command.get_args());
        let mut bounded = if self.as_root {
            let set = command
                .get_envs()
                .filter_map(|(key, value)| Some((key.to_str()?, value?)));
            sh::as_root(words[0], set)?
        } else {
            let mut bounded = Command::new(words[0]);
            for (key, value) in command.get_envs() {
                match value {
                    Some(value) => bounded.env(key, value),
                    None => bounded.env_remove(key),
                };
            }
            bounded
        };
        bounded.args(&words[1..]);
        if let Some(directory) = command.get_current_dir() {
            bounded.current_dir(directory);
        }
        Ok(bounded)
    }
}

/// Why a try failed, and what the program wrote.
struct Failure {
    how: How,
    output: String,
}

#[derive(Debug, PartialEq, Eq)]
enum How {
    TookLonger(Duration),
    Status(ExitStatus),
}

impl How {
    fn of(status: ExitStatus, took: Duration, within: Duration) -> Self {
        // `timeout` returns 124. If it had to kill the process group, it is part of that.
        let is_late = status.code() == Some(124) || status.code() == Some(137);
        let is_killed = status.code().is_none();
        if (is_late || is_killed) && took >= within {
            Self::TookLonger(within)
        } else {
            Self::Status(status)
        }
    }
}

impl Failure {
    /// The last line that says something.
    fn line(&self) -> Option<&str> {
        let lines = self.output.lines().map(str::trim);
        lines
            .skip_while(|it| it.starts_with("--- "))
            .filter(|it| !it.is_empty())
            .last()
    }

    fn show(&self, log: &Path) {
        say!("the end of {}:", log.display());
        let lines: Vec<_> = self.output.lines().collect();
        for line in &lines[lines.len().saturating_sub(TAIL)..] {
            eprintln!("    {line}");
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.how {
            How::TookLonger(within) => {
                write!(f, "it took longer than {} s", within.as_secs_f64())?;
            }
            How::Status(status) => write!(f, "{status}")?,
        }
        let Some(line) = self.line() else {
            return Ok(());
        };
        let short: String = line.chars().take(LINE).collect();
        write!(f, ": {short}")
    }
}

/// Opens a log to append to it.
fn open(log: &Path) -> Result<File> {
    let failed = || format!("cannot write {}", log.display());
    if let Some(directory) = log.parent() {
        fs::create_dir_all(directory).with_context(failed)?;
    }
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).open(log);
    let file = file.with_context(failed)?;
    if file.metadata().is_ok_and(|it| it.len() > LARGE) {
        file.set_len(0).with_context(failed)?;
    }
    Ok(file)
}

/// A program and its arguments, for a log.
fn words(command: &Command) -> String {
    let words: Vec<OsString> = [command.get_program()]
        .into_iter()
        .chain(command.get_args())
        .map(OsStr::to_owned)
        .collect();
    words.join(OsStr::new(" ")).to_string_lossy().into_owned()
}

/// A lock between processes, and between threads of one. It is released when this is dropped.
pub struct Lock {
    _file: File,
}

/// Waits until no other command holds the lock of this file. `what`: what is done under it.
pub fn lock(path: &Path, what: &str) -> Result<Lock> {
    lock_within(path, what, HELD)
}

fn lock_within(path: &Path, what: &str, within: Duration) -> Result<Lock> {
    let failed = || format!("cannot lock {}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(failed)?;
    }
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).open(path);
    let file = file.with_context(failed)?;
    let begun = Instant::now();
    let mut is_said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Lock { _file: file }),
            Err(TryLockError::Error(error)) => return Err(error).with_context(failed),
            Err(TryLockError::WouldBlock) => {}
        }
        if begun.elapsed() >= within {
            bail!(
                "another command has held {} for {} s to {what}: end it, and try again",
                path.display(),
                within.as_secs_f64()
            );
        }
        if !is_said {
            say!("Waiting for another command to {what}.");
            is_said = true;
        }
        thread::sleep(Duration::from_millis(100).min(within));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::PathBuf,
        process::Command,
        time::{Duration, Instant},
    };

    use super::{Bounded, lock, lock_within};
    use crate::sh;

    /// An empty directory for a test.
    fn directory(name: &str) -> PathBuf {
        let directory = sh::target(&format!("xtask-tests/bounded-{name}"));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    const SOON: Duration = Duration::from_millis(300);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn what_takes_too_long_is_ended_with_its_children_and_tried_twice() {
        let directory = directory("late");
        let log = directory.join("log");
        let mut command = shell("echo try >>tries; sleep 1000 & echo $! >>children; sleep 1000");
        command.current_dir(&directory);
        let begun = Instant::now();
        let error = Bounded::new("fetch it", SOON, &log).quiet().run(&command);
        assert!(begun.elapsed() < LATE);
        assert_eq!(
            error.unwrap_err().to_string(),
            format!(
                "cannot fetch it, tried twice (it took longer than 0.3 s): check the network, and \
                 try again; {} has the output",
                log.display()
            )
        );
        let tries = fs::read_to_string(directory.join("tries")).unwrap();
        assert_eq!(tries, "try\ntry\n");
        let children = fs::read_to_string(directory.join("children")).unwrap();
        let is_gone = |child: &str| {
            // One that was ended may still wait to be collected.
            let status = fs::read_to_string(format!("/proc/{child}/stat"));
            status.map_or(true, |it| it.contains(") Z"))
        };
        let end = Instant::now() + LATE;
        while !children.lines().all(is_gone) {
            assert!(Instant::now() < end, "{children}");
        }
        assert_eq!(children.lines().count(), 2);
    }

    #[test]
    fn a_second_try_may_succeed() {
        let directory = directory("second");
        let mut command = shell("test -e tried || { touch tried; exit 7; }");
        command.current_dir(&directory);
        let log = directory.join("log");
        Bounded::new("do it", LATE, &log).run(&command).unwrap();
    }

    #[test]
    fn a_failure_is_one_sentence_with_the_last_line() {
        let directory = directory("failure");
        let log = directory.join("log");
        let bounded = Bounded::new("fetch it", LATE, &log).quiet().once();
        let bounded = bounded.advice("name another mirror");
        let error = bounded.run(&shell("echo one; echo 'E: two' >&2; echo; exit 3"));
        let wanted = "cannot fetch it (exit status: 3: E: two): name another mirror; ";
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(wanted), "{error}");
        let error = bounded.run(&Command::new("/nonexistent"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("No such file or directory"), "{error}");
        assert_eq!(
            bounded
                .brief()
                .run(&shell("exit 3"))
                .unwrap_err()
                .to_string(),
            "cannot fetch it (exit status: 3)"
        );
        let written = fs::read_to_string(&log).unwrap();
        assert!(written.starts_with("--- sh -c echo one;"), "{written}");
    }

    #[test]
    fn variables_are_passed_on() {
        let directory = directory("variables");
        let log = directory.join("log");
        let mut command = shell("test \"$A\" = b && test -z \"${HOME+is set}\"");
        command.env("A", "b").env_remove("HOME");
        let bounded = Bounded::new("look", LATE, &log).once();
        bounded.run(&command).unwrap();
    }

    #[test]
    fn only_one_holds_a_lock() {
        let path = directory("lock").join("it.lock");
        let held = lock(&path, "work").unwrap();
        let error = lock_within(&path, "work", SOON).err().unwrap();
        assert_eq!(
            error.to_string(),
            format!(
                "another command has held {} for 0.3 s to work: end it, and try again",
                path.display()
            )
        );
        drop(held);
        lock_within(&path, "work", SOON).unwrap();
    }
}
