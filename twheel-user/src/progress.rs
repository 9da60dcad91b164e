//! Shows the progress of long work on standard error, if that is a terminal; otherwise nothing.

use std::{
    io::{IsTerminal, stderr},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

pub use indicatif::ProgressBar;
use indicatif::{ProgressDrawTarget, ProgressFinish, ProgressIterator, ProgressStyle};

/// Work that takes no longer shows nothing.
const PATIENCE: Duration = Duration::from_millis(50);
/// The interval between redraws.
const FRAME: Duration = Duration::from_millis(100);

/// A bar over this many steps, which is erased when it is dropped.
pub fn bar(what: impl Into<String>, steps: u64) -> ProgressBar {
    styled(
        "{msg} {wide_bar} {percent:>3} %  {eta}",
        what.into(),
        Some(steps),
    )
}

/// No bar, for callers that want none.
pub fn none() -> ProgressBar {
    ProgressBar::hidden()
}

/// A bar over an iterator.
pub fn over<I: ExactSizeIterator>(
    what: impl Into<String>,
    steps: I,
) -> impl Iterator<Item = I::Item> {
    let bar = bar(what, steps.len() as u64);
    steps.progress_with(bar)
}

/// Does work whose duration is unknown; shows its name and a spinner meanwhile.
pub fn spin<T>(what: &str, work: impl FnOnce() -> T) -> T {
    if !stderr().is_terminal() {
        return work();
    }
    thread::scope(|scope| {
        let (working, end) = channel::<()>();
        scope.spawn(move || {
            if end.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let spinner = styled("{spinner} {msg}, {elapsed}", what.to_owned(), None);
            while end.recv_timeout(FRAME) == Err(RecvTimeoutError::Timeout) {
                spinner.tick();
            }
        });
        // Dropped however the work ends.
        let _working = working;
        work()
    })
}

/// The same, but reports it on one line if standard error is not a terminal.
pub fn told<T>(what: &str, work: impl FnOnce() -> T) -> T {
    if stderr().is_terminal() {
        return spin(what, work);
    }
    thread::scope(|scope| {
        let (working, end) = channel::<()>();
        scope.spawn(move || {
            if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                say!("twheel: {what}");
            }
        });
        let _working = working;
        work()
    })
}

fn styled(template: &str, what: String, steps: Option<u64>) -> ProgressBar {
    // indicatif draws only if standard error is a terminal.
    let bar = ProgressBar::with_draw_target(steps, ProgressDrawTarget::stderr());
    match ProgressStyle::with_template(template) {
        Ok(style) => bar
            .with_style(style)
            .with_message(what)
            .with_finish(ProgressFinish::AndClear),
        Err(_) => none(),
    }
}
