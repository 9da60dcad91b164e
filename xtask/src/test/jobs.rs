//! Runs commands, some in parallel and some alone, and keeps the output of each together.

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
use twheel_holdup::Watch;

/// What may run beside a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Any other job of this kind: two jobs for each CPU, as most jobs mostly wait.
    Any,
    /// Jobs of this kind: one for each CPU.
    Quiet,
    /// Nothing.
    None,
    /// Nothing, because it measures time. Tests that fail while the host holds the CPUs up run
    /// again.
    Timed,
}

impl Company {
    /// All kinds, in the order in which their jobs run.
    const ALL: [Self; 4] = [Self::Any, Self::Quiet, Self::None, Self::Timed];

    /// How many jobs run at a time.
    pub fn at_once(self, cpus: usize) -> usize {
        match self {
            Self::Any => 2 * cpus,
            Self::Quiet => cpus,
            Self::None | Self::Timed => 1,
        }
    }

    /// The suffix of a binary's name, for the part of its tests that has this company.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Any => ", any",
            Self::Quiet => ", quiet",
            Self::None => ", alone",
            Self::Timed => ", timed",
        }
    }
}

/// A command, and how to run it.
pub struct Job {
    /// Its name.
    pub name: String,
    /// What to run.
    pub command: Command,
    /// What may run beside it.
    pub company: Company,
    /// What proves that it has done its work.
    pub proof: Proof,
    /// Whether its tests can be left out by their names: it has `--exact`.
    pub is_exact: bool,
}

/// Checks whether an output proves that the work was done.
pub type Check = Box<dyn Fn(&str) -> Result<()> + Send>;

/// What proves that a job has done its work, besides its exit status.
pub enum Proof {
    /// The lines at the end of libtest's output.
    Tests,
    /// The job counts as one test, which passes if this function accepts its output, in which
    /// errors come last.
    Output(Check),
}

/// A finished job.
pub struct Ended {
    /// The job's name.
    pub name: String,
    /// How long it took.
    pub took: Duration,
    /// How it ended; an error says why it did not start.
    pub status: Result<ExitStatus>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// The result of the check, for a job whose output counts as one test.
    pub proven: Option<Result<()>>,
    /// Earlier attempts that failed.
    pub disturbed: Vec<Disturbed>,
}

/// An attempt that failed while the host held CPUs up. Its passed tests were not run again, if the
/// job is exact.
pub struct Disturbed {
    /// The longest time that a CPU was held up.
    pub held_up: Duration,
    /// What the job wrote to stdout.
    pub stdout: String,
    /// How many of its tests passed, and so were left out of the next attempt.
    pub passed: usize,
}

/// A job with [`Company::Timed`] is run again if a CPU was held up for longer than this.
const HELD_UP: Duration = Duration::from_millis(20);
/// Most times that a job is run again.
const AGAIN: usize = 8;
/// Before a job is run again, no CPU may have been held up for this long.
const CALM: Duration = Duration::from_secs(1);
/// Most times that this is checked for.
const LOOKS: usize = 30;

impl Ended {
    /// Whether it succeeded.
    pub fn is_success(&self) -> bool {
        self.status.as_ref().is_ok_and(ExitStatus::success) && !matches!(self.proven, Some(Err(_)))
    }
}

/// Runs jobs, one kind of company after the other, and otherwise in this order. Passes on each job
/// as soon as it has ended. The jobs' output is kept in files below `directory`.
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
                        // Fails only if the receiver is gone, and then no thread needs the result.
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

fn run_one(mut job: Job, directory: &Path) -> Ended {
    let begun = Instant::now();
    // Files, not pipes: a process that a test leaves behind would hold a pipe open, and its end
    // would never come.
    let file = |end| directory.join(format!("{}.{end}", job.name.replace('/', "-")));
    let (out, err) = (file("out"), file("err"));
    let mut disturbed = Vec::new();
    let status = loop {
        let watch = (job.company == Company::Timed).then(Watch::start);
        let status = wait_for(&mut job.command, &out, &err);
        let held_up = watch.map_or(Duration::ZERO, Watch::stop);
        let is_success = status.as_ref().is_ok_and(ExitStatus::success);
        if is_success || held_up <= HELD_UP || disturbed.len() == AGAIN {
            break status;
        }
        let stdout = read(&out);
        let passed = match job.is_exact {
            true => passed(&stdout),
            false => Vec::new(),
        };
        for test in &passed {
            job.command.args(["--skip", test]);
        }
        disturbed.push(Disturbed {
            held_up,
            passed: passed.len(),
            stdout,
        });
        wait_for_calm();
    };
    let (stdout, stderr) = (read(&out), read(&err));
    let proven = match job.proof {
        Proof::Tests => None,
        Proof::Output(proof) => Some(proof(&format!("{stdout}{stderr}"))),
    };
    Ended {
        disturbed,
        took: begun.elapsed(),
        status: status.with_context(|| format!("cannot run {}", job.name)),
        stdout,
        stderr,
        proven,
        name: job.name,
    }
}

/// The tests that have passed, by libtest's output, except those that print something of their own.
fn passed(stdout: &str) -> Vec<String> {
    let names = stdout
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... ok"));
    names.map(str::to_owned).collect()
}

/// Waits until the host no longer holds a CPU up.
fn wait_for_calm() {
    for _ in 0..LOOKS {
        let watch = Watch::start();
        thread::sleep(CALM);
        if watch.stop() <= HELD_UP {
            return;
        }
    }
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

/// The content of a file, as far as it can be read.
fn read(path: &PathBuf) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process::Command};

    use anyhow::ensure;

    use super::{Company, Ended, Job, Proof, passed, run};

    /// A job that runs a shell script.
    fn job(name: &str, company: Company, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job {
            name: name.to_owned(),
            command,
            company,
            proof: Proof::Tests,
            is_exact: false,
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
        // Fails if another job has the directory.
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
        // Each waits for the other's file: if they ran one after the other, neither would succeed.
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
    fn what_ends_well_without_its_work_done_has_failed() {
        let jobs = ["done", "nothing"].map(|output| Job {
            proof: Proof::Output(Box::new(|output| {
                ensure!(output == "done\n", "not done");
                Ok(())
            })),
            is_exact: false,
            ..job(output, Company::Any, &format!("echo {output}"))
        });
        let mut all = run_all("proof", jobs.into());
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let success: Vec<_> = all.iter().map(Ended::is_success).collect();
        assert_eq!(success, [true, false]);
    }

    #[test]
    fn what_has_passed_is_known_by_its_line() {
        let output = "running 4 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... \nfigures\nok\n\
                      test d ... ignored, why\ntest e ... ok\n\ntest result: FAILED. 3 passed\n";
        assert_eq!(passed(output), ["a", "e"]);
    }

    #[test]
    fn what_cannot_begin_has_failed() {
        let job = Job {
            name: "none".to_owned(),
            command: Command::new("/nonexistent"),
            company: Company::Any,
            proof: Proof::Tests,
            is_exact: false,
        };
        let all = run_all("none", vec![job]);
        assert!(!all[0].is_success());
        assert!(all[0].status.is_err());
    }
}
