//! Ctrl-C, and the other signals that ask a lab to end.

use std::{
    fmt,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

/// The exit code that shells report for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// The error with which a lab ends if a signal asks it to.
#[derive(Debug)]
pub struct Interrupted;

impl Interrupted {
    /// Says so, and returns the exit code.
    pub fn exit() -> ExitCode {
        eprintln!("Interrupted. Nothing is left behind.");
        ExitCode::from(INTERRUPTED)
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Returns a flag that is set when a signal asks this program to end, from now on.
///
/// # Errors
///
/// The signals cannot be caught.
pub fn on_signal() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = flag.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start tokio")?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    drop(guard);
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
                raised.store(true, Relaxed);
            }
        })
    });
    Ok(flag)
}

/// Whether to go on: such a flag is not set.
///
/// # Errors
///
/// [`Interrupted`]: it is.
pub fn check(flag: &AtomicBool) -> Result<()> {
    match flag.load(Relaxed) {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}
