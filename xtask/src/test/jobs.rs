//! Runs commands, some side by side and some alone, and keeps the output of each together.

use std::{
    collections::VecDeque,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// What may run beside a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Anything that bears it, too: two jobs for each CPU, as most of them wait most of the time.
    Any,
    /// Jobs of this kind: one for each CPU.
    Quiet,
    /// Nothing.
    None,
}

impl Company {
    /// All, in the order in which their jobs run.
    const ALL: [Self; 3] = [Self::Any, Self::Quiet, Self::None];

    /// How many jobs run at a time.
    fn at_once(self, cpus: usize) -> usize {
        match self {
            Self::Any => 2 * cpus,
            Self::Quiet => cpus,
            Self::None => 1,
        }
    }
}

/// A command, and how it is to run.
pub struct Job {
    /// Its name.
    pub name: String,
    /// What to run.
    pub command: Command,
    /// What may run beside it.
    pub company: Company,
}

/// A job that has come to its end.
pub struct Ended {
    /// The job's name.
    pub name: String,
    /// How long it took.
    pub took: Duration,
    /// How it ended; an error says why it did not begin.
    pub status: Result<ExitStatus>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// Of earlier attempts that failed, the share of the CPUs' time that the host took.
    pub disturbed: Vec<f64>,
}

/// A job that runs alone and fails is run again if the host took more than this share of the CPUs' time meanwhile.
const DISTURBED: f64 = 0.01;
/// But no more often than this.
const AGAIN: usize = 2;

impl Ended {
    /// Whether it succeeded.
    pub fn is_success(&self) -> bool {
        self.status.as_ref().is_ok_and(ExitStatus::success)
    }
}

/// Runs jobs, one kind of company after the other, else in this order. Each that has ended is handed over at once. What
/// they write is kept in files below `directory`.
pub fn run(mut jobs: Vec<Job>, cpus: usize, directory: &Path, mut ended: impl FnMut(Ended)) {
    for company in Company::ALL {
        let (these, others) = jobs.into_iter().partition(|job| job.company == company);
        jobs = others;
        let workers = company.at_once(cpus);
        let jobs = Mutex::new(VecDeque::from(these));
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..workers {
                let (jobs, sender) = (&jobs, sender.clone());
                scope.spawn(move || {
                    while let Some(job) = next(jobs) {
                        // Fails only if the receiver is gone, and nobody listens any more.
                        let _ = sender.send(run_one(job, directory));
                    }
                });
            }
            drop(sender);
            receiver.iter().for_each(&mut ended);
        });
    }
}

fn next(jobs: &Mutex<VecDeque<Job>>) -> Option<Job> {
    jobs.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .pop_front()
}

/// Runs a job. One that runs alone measures time, and says nothing of twheel while the host takes the CPUs away: if it
/// fails then, it runs again.
fn run_one(mut job: Job, directory: &Path) -> Ended {
    let begun = Instant::now();
    // Files, not pipes: a process that a test leaves behind would hold a pipe open, and the end would never come.
    let file = |end| directory.join(format!("{}.{end}", job.name.replace('/', "-")));
    let (out, err) = (file("out"), file("err"));
    let mut disturbed = Vec::new();
    let status = loop {
        let before = cpu_times();
        let status = wait_for(&mut job.command, &out, &err);
        let failed = !status.as_ref().is_ok_and(ExitStatus::success);
        let stolen = stolen(before, cpu_times());
        let counts = job.company == Company::None && stolen > DISTURBED;
        if !(failed && counts && disturbed.len() < AGAIN) {
            break status;
        }
        disturbed.push(stolen);
    };
    Ended {
        disturbed,
        took: begun.elapsed(),
        status: status.with_context(|| format!("cannot run {}", job.name)),
        stdout: read(&out),
        stderr: read(&err),
        name: job.name,
    }
}

/// Time of all CPUs so far, and what the host took of it (`steal` in `proc(5)`), in the same unit.
fn cpu_times() -> [u64; 2] {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // The times of guests, behind, are in others already.
    let times = line.split_whitespace().skip(1).take(8);
    let times: Vec<u64> = times.filter_map(|time| time.parse().ok()).collect();
    [times.iter().sum(), times.get(7).copied().unwrap_or(0)]
}

/// The share of the CPUs' time that the host took between the two.
fn stolen([all, steal]: [u64; 2], [all_after, steal_after]: [u64; 2]) -> f64 {
    let all = all_after.saturating_sub(all).max(1);
    steal_after.saturating_sub(steal) as f64 / all as f64
}

fn wait_for(command: &mut Command, out: &PathBuf, err: &PathBuf) -> Result<ExitStatus> {
    let create = |path: &PathBuf| {
        File::create(path).with_context(|| format!("cannot write {}", path.display()))
    };
    command
        .stdin(Stdio::null())
        .stdout(create(out)?)
        .stderr(create(err)?);
    Ok(command.status()?)
}

/// What stands in a file, as far as it can be read.
fn read(path: &PathBuf) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process::Command};

    use super::{Company, Ended, Job, cpu_times, run, stolen};

    /// A job of a shell's.
    fn job(name: &str, company: Company, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job {
            name: name.to_owned(),
            command,
            company,
        }
    }

    fn run_all(test: &str, jobs: Vec<Job>) -> Vec<Ended> {
        let directory = env::temp_dir().join(format!("twheel-jobs-{}-{test}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let mut all = Vec::new();
        run(jobs, 2, &directory, |ended| all.push(ended));
        fs::remove_dir_all(&directory).unwrap();
        all
    }

    #[test]
    fn what_the_host_takes_is_a_share_of_all() {
        assert_eq!(stolen([100, 5], [300, 15]), 0.05);
        assert_eq!(stolen([100, 5], [100, 5]), 0.0);
        let [all, steal] = cpu_times();
        assert!(all > steal, "{all} {steal}");
    }

    #[test]
    fn keeps_outputs_apart_and_tells_who_failed() {
        let script = |code| format!("echo out; sleep 0.1; echo more; echo err >&2; exit {code}");
        let jobs = (0..4).map(|code| job(&format!("a/{code}"), Company::Any, &script(code)));
        let mut all = run_all("apart", jobs.collect());
        all.sort_by(|a, b| a.name.cmp(&b.name));
        for (code, ended) in all.iter().enumerate() {
            assert_eq!(ended.stdout, "out\nmore\n");
            assert_eq!(ended.stderr, "err\n");
            assert_eq!(ended.is_success(), code == 0);
        }
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn what_runs_alone_runs_alone() {
        let directory = env::temp_dir().join(format!("twheel-alone-{}", std::process::id()));
        // Fails where another has the directory.
        let exclusive = format!(
            "mkdir {0} && sleep 0.05 && rmdir {0}",
            directory.to_str().unwrap()
        );
        let shared = format!("sleep 0.1; test ! -e {}", directory.to_str().unwrap());
        let jobs = (0..6).map(|n| match Company::ALL[n % 3] {
            Company::None => job(&n.to_string(), Company::None, &exclusive),
            other => job(&n.to_string(), other, &shared),
        });
        let all = run_all("alone", jobs.collect());
        assert_eq!(all.len(), 6);
        for ended in all {
            assert!(ended.is_success(), "{}: {}", ended.name, ended.stderr);
        }
    }

    #[test]
    fn what_bears_company_runs_side_by_side() {
        // Each waits for the other's file: one after the other, neither would end well.
        let file = |n| env::temp_dir().join(format!("twheel-both-{}-{n}", std::process::id()));
        let script = |mine, other| {
            format!(
                "touch {0}; for i in $(seq 500); do test -e {1} && exit 0; sleep 0.02; done; exit 1",
                file(mine).display(),
                file(other).display()
            )
        };
        let all = run_all(
            "both",
            vec![
                job("0", Company::Quiet, &script(0, 1)),
                job("1", Company::Quiet, &script(1, 0)),
            ],
        );
        for n in 0..2 {
            fs::remove_file(file(n)).unwrap();
        }
        assert!(all.iter().all(Ended::is_success));
    }

    #[test]
    fn what_cannot_begin_has_failed() {
        let job = Job {
            name: "none".to_owned(),
            command: Command::new("/nonexistent"),
            company: Company::Any,
        };
        let all = run_all("none", vec![job]);
        assert!(!all[0].is_success());
        assert!(all[0].status.is_err());
    }
}
