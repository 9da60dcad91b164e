//! Programs that run beside a test, and what they print.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{netns::PATIENCE, running::wait_within};

/// A running program, whose messages go to a file. It is killed when this is dropped.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program. What it prints, to both outputs, is added to a file.
    ///
    /// # Errors
    ///
    /// It cannot be started, or the file cannot be written.
    pub fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it and those before it have printed to its file.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it, or one before it, has printed this text. Returns what they have printed.
    ///
    /// # Errors
    ///
    /// It has ended, or does not print the text within a minute.
    pub fn await_text(&mut self, text: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains(text) {
                return Ok(log);
            }
            self.check()?;
            ensure!(
                Instant::now() < end,
                "no {text:?} in {}: {}",
                self.log.display(),
                log.trim()
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// # Errors
    ///
    /// It has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("it has ended ({status}): {}", self.log().trim()),
            None => Ok(()),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    ///
    /// The signal cannot be sent.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        // The child has not been waited for yet, so the process id is still its own.
        kill(Pid::from_raw(self.child.id() as i32), signal).context("cannot send a signal")
    }

    /// Ends it with SIGINT, and waits until it has ended.
    ///
    /// # Errors
    ///
    /// It does not end within a minute, or has failed.
    pub fn stop(self) -> Result<()> {
        self.signal(Signal::SIGINT)?;
        self.wait()
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    ///
    /// It does not end within a minute, or has failed.
    pub fn wait(mut self) -> Result<()> {
        let status = self.ended(PATIENCE)?;
        ensure!(status.success(), "{status}: {}", self.log().trim());
        Ok(())
    }

    /// Waits until it has ended by itself, and tells how.
    ///
    /// # Errors
    ///
    /// It does not end within this time.
    pub fn ended(&mut self, within: Duration) -> Result<ExitStatus> {
        wait_within(&mut self.child, within)?
            .with_context(|| format!("it does not end: {}", self.log().trim()))
    }

    /// Ends it with SIGKILL.
    ///
    /// # Errors
    ///
    /// It cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
