//! Runs commands: many beside one another, as far as the CPUs serve, and some alone. Keeps the output
//! of each together.

use std::{
    fs::{self, File},
    io,
    os::unix::process::ExitStatusExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use twheel_holdup::Watch;

use super::report;

/// What may run beside a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Any job.
    Any,
    /// Any job. Its processes get the CPUs before those of others, as it allows for little delay.
    Quiet,
    /// The same; but it has bounds on time that others may make it miss. If it fails beside others,
    /// it runs again as [`TimedAlone`](Self::TimedAlone), and only that counts.
    Timed,
    /// Nothing, and if it fails while the host holds a CPU up, it runs again.
    TimedAlone,
    /// Nothing.
    Alone,
}

/// A command, and how to run it.
pub struct Job {
    /// Its name, which is unique.
    pub name: String,
    /// What to run.
    pub command: Command,
    /// What may run beside it.
    pub company: Company,
    /// What proves that it has done its work.
    pub proof: Proof,
    /// What it is expected to cost.
    pub cost: Cost,
}

/// What a job costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// From its start to its end.
    pub took: Duration,
    /// CPU time of its processes, as far as they were waited for.
    pub cpu: Duration,
}

impl Cost {
    /// How many CPUs it keeps busy.
    pub fn cpus(self) -> f64 {
        self.cpu.as_secs_f64() / self.took.as_secs_f64().max(0.001)
    }

    /// Its share of the CPUs in a pool: at least a twentieth of one, for what is not counted (the
    /// kernel's own threads), and at most one, so that two always fit beside each other.
    fn weight(self) -> f64 {
        self.cpus().clamp(0.05, 1.0)
    }
}

/// Checks whether an output proves that the work was done.
pub type Check = Box<dyn Fn(&str) -> Result<()> + Send>;

/// What proves that a job has done its work, besides its exit status.
pub enum Proof {
    /// The line at the end of libtest's output.
    Tests,
    /// The job counts as one test, which passes if this function accepts its output, in which
    /// errors come last.
    Output(Check),
}

/// A finished job.
pub struct Ended {
    /// The job's name.
    pub name: String,
    /// What it has cost.
    pub cost: Cost,
    /// How it ended; an error says why it did not start.
    pub status: Result<ExitStatus>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// The result of the check, for a job whose output counts as one test.
    pub proven: Option<Result<()>>,
    /// Earlier attempts that failed, and do not count.
    pub before: Vec<Attempt>,
}

impl Ended {
    /// A job whose check has panicked.
    fn panicked(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            cost: Cost::default(),
            status: Err(anyhow!("{name}: what runs it has panicked: see above")),
            stdout: String::new(),
            stderr: String::new(),
            proven: None,
            before: Vec::new(),
        }
    }

    /// Whether it succeeded.
    pub fn is_success(&self) -> bool {
        self.status.as_ref().is_ok_and(ExitStatus::success) && !matches!(self.proven, Some(Err(_)))
    }
}

/// An attempt that failed and was made again.
pub struct Attempt {
    /// Why it was made again.
    pub why: Why,
    /// What the job wrote.
    pub output: String,
}

/// Why an attempt that failed was made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It measures time, and others ran beside it.
    Company,
    /// It measures time, and the host held a CPU up for this long.
    HeldUp(Duration),
}

/// Jobs that run at a time, for each CPU: most of them mostly wait.
const SLOTS: usize = 4;
/// The weights of the jobs that run at a time add up to at most this, for each CPU.
const LOAD: f64 = 1.1;
/// A timed job that runs alone runs again if a CPU was held up for longer than this.
const HELD_UP: Duration = Duration::from_millis(20);
/// Most times that a job runs again because of that.
const AGAIN: usize = 3;
/// Before a job runs again, no CPU may have been held up for this long.
const CALM: Duration = Duration::from_secs(1);
/// Most times that this is checked for.
const LOOKS: usize = 30;

/// Runs jobs: first those that bear company, those first that take longest; then, one by one, those
/// that run alone, and the timed ones that have failed in company. Passes on each job as soon as it
/// has ended for good. The jobs' output is kept in files below `directory`. Returns how long it took:
/// beside one another, alone, and again.
pub fn run(
    jobs: Vec<Job>,
    cpus: usize,
    directory: &Path,
    mut ended: impl FnMut(Ended),
) -> [Duration; 3] {
    let (mut alone, mut waiting): (Vec<_>, Vec<_>) = jobs
        .into_iter()
        .partition(|job| matches!(job.company, Company::Alone | Company::TimedAlone));
    waiting.sort_by_key(|job| std::cmp::Reverse(job.cost.took));
    let mut phases = [Duration::ZERO; 3];
    let begun = Instant::now();
    let (mut running, mut load) = (0, 0.0);
    let mut again = Vec::new();
    let (sender, receiver) = mpsc::channel::<(Job, Ended)>();
    thread::scope(|scope| {
        loop {
            while running < SLOTS * cpus
                && let Some(next) = next(&waiting, running, load, LOAD * cpus as f64)
            {
                let mut job = waiting.remove(next);
                running += 1;
                load += job.cost.weight();
                let sender = sender.clone();
                scope.spawn(move || {
                    let checked = AssertUnwindSafe(|| attempt(&mut job, directory));
                    let ended =
                        catch_unwind(checked).unwrap_or_else(|_| Ended::panicked(&job.name));
                    // Fails only if the receiver is gone, and then nobody needs the result.
                    let _ = sender.send((job, ended));
                });
            }
            if running == 0 {
                break;
            }
            let Ok((job, this)) = receiver.recv() else {
                break;
            };
            running -= 1;
            load -= job.cost.weight();
            if job.company == Company::Timed && !this.is_success() && !report::lacks_tool(&this) {
                again.push((job, this));
            } else {
                ended(this);
            }
        }
    });
    phases[0] = begun.elapsed();
    let begun = Instant::now();
    alone.sort_by_key(|job| std::cmp::Reverse(job.cost.took));
    for job in alone {
        ended(run_alone(job, Vec::new(), directory));
    }
    phases[1] = begun.elapsed();
    let begun = Instant::now();
    for (job, failed) in again {
        let failed = Attempt::of(&failed, Why::Company);
        ended(run_alone(job, vec![failed], directory));
    }
    phases[2] = begun.elapsed();
    phases
}

/// The first of the waiting jobs that fits beside those that run, if any does.
fn next(waiting: &[Job], running: usize, load: f64, most: f64) -> Option<usize> {
    let fits = |job: &Job| running == 0 || load + job.cost.weight() <= most;
    waiting.iter().position(fits)
}

/// Runs a job beside which nothing runs. If it has bounds on time and fails while the host holds a CPU
/// up, it runs again.
fn run_alone(mut job: Job, mut before: Vec<Attempt>, directory: &Path) -> Ended {
    for _ in 0..AGAIN {
        let watch = Watch::start();
        let ended = attempt(&mut job, directory);
        let held_up = watch.stop();
        if ended.is_success() || job.company == Company::Alone || held_up <= HELD_UP {
            return Ended { before, ..ended };
        }
        before.push(Attempt::of(&ended, Why::HeldUp(held_up)));
        wait_for_calm();
    }
    let ended = attempt(&mut job, directory);
    Ended { before, ..ended }
}

impl Attempt {
    fn of(ended: &Ended, why: Why) -> Self {
        let mut output = format!("{}{}", ended.stdout, ended.stderr);
        if let Some(Err(error)) = &ended.proven {
            output += &format!("{error:#}\n");
        }
        Self { why, output }
    }
}

/// Runs a job once.
fn attempt(job: &mut Job, directory: &Path) -> Ended {
    // Files, not pipes: a process that a test leaves behind would hold a pipe open, and its end
    // would never come.
    let file = |end| directory.join(format!("{}.{end}", job.name.replace(['/', ' ', ':'], "-")));
    let (out, err) = (file("out"), file("err"));
    let begun = Instant::now();
    let (status, cpu) = match wait_for(&mut job.command, &out, &err) {
        Ok((status, cpu)) => (Ok(status), cpu),
        Err(error) => (Err(error), Duration::ZERO),
    };
    let took = begun.elapsed();
    let (stdout, stderr) = (read(&out), read(&err));
    let proven = match &job.proof {
        Proof::Tests => None,
        Proof::Output(proof) => Some(proof(&format!("{stdout}{stderr}"))),
    };
    Ended {
        name: job.name.clone(),
        cost: Cost { took, cpu },
        status: status.with_context(|| format!("cannot run {}", job.name)),
        stdout,
        stderr,
        proven,
        before: Vec::new(),
    }
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

/// Runs a command to its end. Returns how it ended, and the CPU time of its processes.
fn wait_for(command: &mut Command, out: &PathBuf, err: &PathBuf) -> Result<(ExitStatus, Duration)> {
    let create = |path: &PathBuf| {
        File::create(path).with_context(|| format!("cannot write {}", path.display()))
    };
    command
        .stdin(Stdio::null())
        .stdout(create(out)?)
        .stderr(create(err)?);
    let child = command.spawn()?;
    let id = child.id() as libc::pid_t;
    let mut status = 0;
    loop {
        // SAFETY: all-zero bytes are a valid rusage.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to variables that live through the call. The child is waited for
        // nowhere else: `child` is only dropped, which waits for nothing.
        let waited = unsafe { libc::wait4(id, &raw mut status, 0, &raw mut usage) };
        if waited == id {
            let time = |it: libc::timeval| {
                Duration::from_secs(it.tv_sec as u64) + Duration::from_micros(it.tv_usec as u64)
            };
            let cpu = time(usage.ru_utime) + time(usage.ru_stime);
            return Ok((ExitStatus::from_raw(status), cpu));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error).context("cannot wait for it");
        }
    }
}

/// The content of a file, as far as it can be read.
fn read(path: &PathBuf) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::{env, fs, path::PathBuf, process::Command, time::Duration};

    use anyhow::ensure;

    use super::{Company, Cost, Ended, Job, Proof, Why, next, run};

    /// A job that runs a shell script.
    fn job(name: &str, company: Company, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job {
            name: name.to_owned(),
            command,
            company,
            proof: Proof::Tests,
            cost: Cost::default(),
        }
    }

    /// A job that takes so many seconds of wall-clock and CPU time.
    fn costing(took: u64, cpu: u64) -> Job {
        Job {
            cost: Cost {
                took: Duration::from_secs(took),
                cpu: Duration::from_secs(cpu),
            },
            ..job("costing", Company::Any, "")
        }
    }

    fn temporary(name: &str) -> PathBuf {
        env::temp_dir().join(format!("twheel-jobs-{}-{name}", std::process::id()))
    }

    fn run_all(test: &str, jobs: Vec<Job>) -> Vec<Ended> {
        let directory = temporary(test);
        fs::create_dir_all(&directory).unwrap();
        let mut all = Vec::new();
        let _ = run(jobs, 2, &directory, |ended| all.push(ended));
        fs::remove_dir_all(&directory).unwrap();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    #[test]
    fn keeps_outputs_apart_and_tells_who_failed() {
        let script = |code| format!("echo out; sleep 0.1; echo more; echo err >&2; exit {code}");
        let jobs = (0..4).map(|code| job(&format!("a/{code} b::c"), Company::Any, &script(code)));
        let all = run_all("apart", jobs.collect());
        for (code, ended) in all.iter().enumerate() {
            assert_eq!(ended.stdout, "out\nmore\n");
            assert_eq!(ended.stderr, "err\n");
            assert_eq!(ended.is_success(), code == 0);
            assert!(ended.before.is_empty());
        }
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn what_runs_alone_runs_alone() {
        let directory = temporary("alone");
        // Fails if another job has the directory.
        let exclusive = format!(
            "mkdir {0} && sleep 0.05 && rmdir {0}",
            directory.to_str().unwrap()
        );
        let shared = format!("sleep 0.1; test ! -e {}", directory.to_str().unwrap());
        let kinds = [
            Company::Any,
            Company::Quiet,
            Company::Timed,
            Company::TimedAlone,
            Company::Alone,
        ];
        let jobs = (0..10).map(|n| match kinds[n % 5] {
            alone @ (Company::Alone | Company::TimedAlone) => {
                job(&n.to_string(), alone, &exclusive)
            }
            other => job(&n.to_string(), other, &shared),
        });
        let all = run_all("alone-output", jobs.collect());
        assert_eq!(all.len(), 10);
        for ended in all {
            assert!(ended.is_success(), "{}: {}", ended.name, ended.stderr);
        }
    }

    #[test]
    fn what_bears_company_runs_side_by_side() {
        // Each waits for the other's file: if they ran one after the other, neither would succeed.
        let file = |n: usize| temporary(&format!("both-{n}"));
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
                job("0", Company::Timed, &script(0, 1)),
                job("1", Company::Any, &script(1, 0)),
            ],
        );
        for n in 0..2 {
            fs::remove_file(file(n)).unwrap();
        }
        assert!(all.iter().all(Ended::is_success));
        assert!(all.iter().all(|ended| ended.before.is_empty()));
    }

    #[test]
    fn a_timed_job_that_fails_in_company_runs_again_alone() {
        let marker = temporary("again-marker");
        // Fails the first time.
        let script = format!("echo says so; mkdir {}", marker.display());
        let flaky = |company| {
            let script = format!("test -e {0} && exit 0; {script}; exit 1", marker.display());
            job("flaky", company, &script)
        };
        let all = run_all("again", vec![flaky(Company::Timed)]);
        fs::remove_dir(&marker).unwrap();
        assert!(all[0].is_success());
        let [attempt] = &all[0].before[..] else {
            panic!("it ran again once")
        };
        assert_eq!(
            (attempt.why, attempt.output.as_str()),
            (Why::Company, "says so\n")
        );
        // One that has no bounds on time has failed.
        for company in [Company::Any, Company::Quiet, Company::Alone] {
            let all = run_all("again-any", vec![flaky(company)]);
            fs::remove_dir(&marker).unwrap();
            assert!(!all[0].is_success() && all[0].before.is_empty());
        }
        // And so has one that fails alone, too.
        let all = run_all(
            "again-fails",
            vec![job("bad", Company::Timed, "echo no; exit 1")],
        );
        assert!(!all[0].is_success());
        assert_eq!(all[0].before[0].why, Why::Company);
    }

    #[test]
    fn what_ends_well_without_its_work_done_has_failed() {
        let jobs = ["done", "nothing"].map(|output| Job {
            proof: Proof::Output(Box::new(|output| {
                ensure!(output == "done\n", "not done");
                Ok(())
            })),
            ..job(output, Company::Any, &format!("echo {output}"))
        });
        let all = run_all("proof", jobs.into());
        let success: Vec<_> = all.iter().map(Ended::is_success).collect();
        assert_eq!(success, [true, false]);
    }

    #[test]
    fn what_cannot_begin_has_failed() {
        let mut none = job("none", Company::Any, "");
        none.command = Command::new("/nonexistent");
        let all = run_all("none", vec![none]);
        assert!(!all[0].is_success());
        assert!(all[0].status.is_err());
    }

    #[test]
    fn the_time_of_all_processes_is_counted() {
        // As much work on a busy machine.
        let spin = "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; sleep 0.3; true";
        let all = run_all("time", vec![job("spin", Company::Any, spin)]);
        let cost = all[0].cost;
        assert!(cost.cpu >= Duration::from_millis(50), "{cost:?}");
        assert!(
            cost.took >= cost.cpu + Duration::from_millis(200),
            "{cost:?}"
        );
    }

    #[test]
    fn a_job_waits_until_there_is_a_cpu_for_it() {
        let waiting = [costing(9, 90), costing(8, 8), costing(7, 1)];
        assert_eq!(next(&waiting, 0, 0.0, 2.0), Some(0));
        assert_eq!(next(&waiting, 1, 1.0, 2.0), Some(0));
        assert_eq!(next(&waiting, 2, 1.5, 2.0), Some(2));
        assert_eq!(next(&waiting, 2, 2.0, 2.0), None);
        // If nothing runs, anything fits.
        assert_eq!(next(&waiting, 0, 3.0, 2.0), Some(0));
    }
}
