//! A busy loop on each CPU, beside the tests: `cargo xtask test --busy`.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

/// Busy loops, which end when this is dropped, and with this process.
pub struct Loops(Vec<Child>);

impl Loops {
    /// Starts a loop on each CPU.
    pub fn start() -> Result<Self> {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let start = |cpu: usize| {
            Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "taskset", "--cpu-list"])
                .arg(cpu.to_string())
                .args(["sh", "-c", "while :; do :; done"])
                .stdin(Stdio::null())
                .spawn()
                .context("cannot start a busy loop")
        };
        let mut loops = Self(Vec::new());
        for cpu in 0..cpus {
            loops.0.push(start(cpu)?);
        }
        thread::sleep(Duration::from_millis(200));
        for (cpu, child) in loops.0.iter_mut().enumerate() {
            let ended = child.try_wait().context("cannot look at a busy loop")?;
            ensure!(ended.is_none(), "the busy loop on CPU {cpu} has ended");
        }
        Ok(loops)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails only if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs, thread,
        time::{Duration, Instant},
    };

    use super::Loops;

    /// The CPU time of a process, in ticks (`proc_pid_stat(5)`).
    fn ticks(id: u32) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        stat.split_whitespace().nth(13)?.parse().ok()
    }

    #[test]
    fn loops_are_busy_and_end() {
        let loops = Loops::start().unwrap();
        let ids: Vec<_> = loops.0.iter().map(|child| child.id()).collect();
        assert!(!ids.is_empty());
        // They begin when the CPUs have time for them.
        let until = Instant::now() + Duration::from_secs(60);
        while !ids.iter().all(|id| ticks(*id) > Some(0)) {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(50));
        }
        drop(loops);
        assert!(ids.iter().all(|id| ticks(*id).is_none()));
    }
}
