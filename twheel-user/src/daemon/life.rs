//! How far a run has come, and what stays when it ends: its pins, and the events in the ring.

use std::{fs::File, io};

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By a signal, or because nobody reads its output any more.
    Good,
    /// With an error.
    Failed,
}

/// Why the loop of events ends in good order: what has ended is still handed on, and the summary is
/// printed. (Any other error ends a run at once.)
#[derive(Debug)]
pub enum Ending {
    /// SIGINT or SIGTERM; or SIGHUP, if the terminal has gone and there is no policy to load again.
    Signal,
    /// Nobody reads the output any more: `| head` has read what it wanted.
    Unread,
    /// A stepper has failed. Its error is returned when the steppers are stopped.
    StepperFailed,
    /// An event could not be handed on.
    Report(anyhow::Error),
}

impl Ending {
    /// The result of the run, if what follows succeeds.
    ///
    /// # Errors
    ///
    /// The one that ended the run.
    pub fn result(self) -> anyhow::Result<()> {
        match self {
            Self::Signal | Self::Unread | Self::StepperFailed => Ok(()),
            Self::Report(error) => Err(error),
        }
    }
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The instance is as it was found: with pins that an earlier run has `left`, or empty.
    Opened { left: bool },
    /// The maps exist: `adopted` from an earlier run, or new.
    Loaded { adopted: bool },
    /// All interfaces that exist are attached.
    Running { adopted: bool },
}

/// The life of a run's instance, which decides whether it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The user wants the instance to stay after a good end.
    keep: bool,
    stage: Stage,
}

impl Life {
    /// For an instance that was just opened. `keep`: it stays after a good end. `left`: an earlier
    /// run has left pins there.
    pub fn opened(keep: bool, left: bool) -> Self {
        let stage = Stage::Opened { left };
        Self { keep, stage }
    }

    /// The programs and maps are loaded. `adopted`: this run continues an earlier run's table, or
    /// found programs that it has left attached.
    pub fn loaded(&mut self, adopted: bool) {
        self.stage = Stage::Loaded { adopted };
    }

    /// All interfaces are attached.
    pub fn running(&mut self) {
        if let Stage::Loaded { adopted } = self.stage {
            self.stage = Stage::Running { adopted };
        }
    }

    /// Whether pins and flows stay. A run that fails does not remove what an earlier run has left.
    /// If it fails after all was attached, `--keep` applies, too.
    pub fn stays(self, end: End) -> bool {
        match (end, self.stage) {
            (End::Good, _) => self.keep,
            (End::Failed, Stage::Opened { left }) => left,
            (End::Failed, Stage::Loaded { adopted }) => adopted,
            (End::Failed, Stage::Running { adopted }) => adopted || self.keep,
        }
    }
}

/// Whether the output of a run is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlet {
    /// It is read.
    Open,
    /// Nobody reads it: events are released from the ring unwritten.
    Closed,
    /// Nobody reads it, and events stay in the ring, for the next run to print.
    Left,
}

impl Outlet {
    /// The outlet after a line could not be written, and how the run ends because of it.
    pub fn after(error: &io::Error, life: Life) -> (Self, End) {
        let end = match error.kind() {
            // A broken pipe is not an error: `| head` has read what it wanted.
            io::ErrorKind::BrokenPipe => End::Good,
            _ => End::Failed,
        };
        let outlet = match life.stays(end) {
            true => Self::Left,
            false => Self::Closed,
        };
        (outlet, end)
    }
}

/// Whether this process has a controlling terminal.
fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok()
}

/// The signals that end a run.
pub(super) struct Stop {
    pub(super) interrupt: Signal,
    pub(super) terminate: Signal,
    pub(super) hangup: Signal,
    /// Whether the process had a terminal when it started.
    has_terminal: bool,
}

impl Stop {
    pub(super) fn new() -> Result<Self> {
        let on = |kind| signal(kind).context("cannot wait for signals");
        Ok(Self {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
            hangup: on(SignalKind::hangup())?,
            has_terminal: has_terminal(),
        })
    }

    /// Whether the terminal has been closed in which the run was started.
    pub(super) fn has_lost_terminal(&self) -> bool {
        self.has_terminal && !has_terminal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [bool; 2] = [false, true];

    #[test]
    fn a_good_end_leaves_what_is_to_be_kept() {
        for (keep, left) in BOTH
            .into_iter()
            .flat_map(|keep| BOTH.map(|left| (keep, left)))
        {
            let mut life = Life::opened(keep, left);
            assert_eq!(life.stays(End::Good), keep);
            life.loaded(left);
            assert_eq!(life.stays(End::Good), keep);
            life.running();
            assert_eq!(life.stays(End::Good), keep);
        }
    }

    #[test]
    fn a_failure_leaves_what_was_there_before_and_what_is_to_be_kept_once_it_runs() {
        for keep in BOTH {
            assert!(!Life::opened(keep, false).stays(End::Failed));
            let mut life = Life::opened(keep, true);
            assert!(life.stays(End::Failed));
            // Only half of an instance was found.
            life.loaded(false);
            assert!(!life.stays(End::Failed));
            life.running();
            assert_eq!(life.stays(End::Failed), keep);
            let mut life = Life::opened(keep, true);
            life.loaded(true);
            assert!(life.stays(End::Failed));
            life.running();
            assert!(life.stays(End::Failed));
        }
    }

    #[test]
    fn only_an_event_that_cannot_be_handed_on_is_an_error_of_the_run() {
        for ending in [Ending::Signal, Ending::Unread, Ending::StepperFailed] {
            ending.result().unwrap();
        }
        let failed = Ending::Report(anyhow::anyhow!("no space"));
        assert_eq!(failed.result().unwrap_err().to_string(), "no space");
    }

    #[test]
    fn a_run_starts_before_it_runs() {
        let mut life = Life::opened(true, false);
        life.running();
        assert!(!life.stays(End::Failed));
    }

    #[test]
    fn the_ring_stays_with_the_instance() {
        let broken = io::Error::from(io::ErrorKind::BrokenPipe);
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let life = |keep, adopted| {
            let mut life = Life::opened(keep, adopted);
            life.loaded(adopted);
            life.running();
            life
        };
        for (error, keep, adopted, becomes) in [
            (&broken, false, false, (Outlet::Closed, End::Good)),
            (&broken, false, true, (Outlet::Closed, End::Good)),
            (&broken, true, false, (Outlet::Left, End::Good)),
            (&full, false, false, (Outlet::Closed, End::Failed)),
            (&full, false, true, (Outlet::Left, End::Failed)),
            (&full, true, false, (Outlet::Left, End::Failed)),
        ] {
            assert_eq!(Outlet::after(error, life(keep, adopted)), becomes);
        }
    }
}
