//! What it takes to hand timeouts over, and what a server saves that has handed them over.

mod calls;
mod requests;
mod server;
mod shown;

use std::{fs, time::Duration};

use anyhow::{Context, Result};

use crate::report::Report;

/// Measures both.
pub fn bench(report: &mut Report) -> Result<()> {
    requests::bench(report)?;
    server::bench(report)
}

/// CPU time of the threads of a process whose names begin so (`schedstat`).
fn thread_time(pid: u32, name: &str) -> Result<Duration> {
    let mut time = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.starts_with(name) {
            let schedstat = fs::read_to_string(task.join("schedstat"))?;
            let taken = schedstat.split_whitespace().next().context("schedstat")?;
            time += taken.parse::<u64>().context("schedstat")?;
        }
    }
    Ok(Duration::from_nanos(time))
}
