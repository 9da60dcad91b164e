//! Which jobs a run of the tests has: a job for each test that needs root, and one for each other test
//! binary.

use std::{
    ffi::OsStr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::Result;

use super::{
    jobs::{Company, Job, Proof},
    times::Times,
};
use crate::{binaries::Binary, sh};

/// What may run beside tests that measure time, measure the machine or change it, and why. An entry
/// applies to the named tests of a binary; or, if it names none, to all tests that no other entry
/// names. A name that ends with `::` is a module. All other tests wait for up to a minute for what they
/// expect, or have virtual time. A test has namespaces, pins and files of its own.
const COMPANY: [(&str, &[&str], Company); 35] = [
    // Both CPUs must work on the same flows at the same time: a million state changes.
    ("tests/concurrency", &["stress::"], Company::Alone),
    // Lateness to 100 ms.
    ("tests/concurrency", &[], Company::Timed),
    // A flood from both CPUs, of which no packet may be lost before twheel sees it.
    ("tests/faults_flood", &[], Company::Alone),
    // The share of a CPU that `top` uses, which others make no smaller, but may make larger.
    (
        "tests/top",
        &["a_million_flows_cost_little_to_watch"],
        Company::Timed,
    ),
    // 100,000 flows within half a second, and a ratio.
    (
        "tests/reap",
        &["many::very_many_expiries_at_once_neither_get_lost_nor_wait_for_the_reaper"],
        Company::TimedAlone,
    ),
    // Timers of milliseconds, beside the kernel's.
    ("tests/rto", &[], Company::Timed),
    // A scrape within 2 ms.
    (
        "tests/metrics",
        &["waiting::a_million_flows_are_no_more_to_scrape_than_none"],
        Company::Timed,
    ),
    // Each flow within 250 ms.
    (
        "tests/metrics",
        &["numbers::the_numbers_are_those_of_what_was_reported"],
        Company::Timed,
    ),
    // A rate, within 20 ms.
    (
        "tests/reap",
        &["options::actions_keep_their_rate_and_ctrl_c_does_not_wait_for_them"],
        Company::Timed,
    ),
    // Whether a reaper acts within 50 ms of a packet that comes back.
    ("tests/reap", &["comes_back::"], Company::Timed),
    // Sockets that end within a second.
    (
        "tests/reap",
        &["sockets::sockets_whose_peers_are_gone_are_closed_and_no_others"],
        Company::Timed,
    ),
    ("tests/reap", &[], Company::Quiet),
    // A start within half a second.
    (
        "tests/stepping",
        &["a_start_says_that_it_loads_and_is_attached_in_half_a_second"],
        Company::Timed,
    ),
    // Ends of flows are compared with conntrack's, to a few hundredths of a second.
    ("tests/conntrack", &[], Company::Timed),
    // 100 ms beyond a tick.
    (
        "tests/namespaces",
        &[
            "exactly_the_idle_half_expires_and_on_time",
            "a_policy_is_replaced_while_flows_live",
        ],
        Company::Timed,
    ),
    ("tests/namespaces", &[], Company::Quiet),
    // Attached within 100 ms.
    (
        "tests/patterns",
        &["attach::what_is_there_and_what_comes_is_attached_in_time"],
        Company::Timed,
    ),
    ("tests/patterns", &[], Company::Quiet),
    (
        "tests/netns",
        &[
            "come_and_go::namespaces_that_appear_are_watched_in_time_and_those_that_go_are_let_go_of",
        ],
        Company::Timed,
    ),
    // 200 ms beyond the interval of updates.
    (
        "tests/updates",
        &["the_updates_and_the_end_of_a_bulk_flow_add_up_to_conntracks_counters"],
        Company::Timed,
    ),
    // A rate, over an interval that a late reading shortens.
    ("tests/top", &["rates_and_the_hand_move"], Company::Timed),
    ("tests/top", &[], Company::Quiet),
    // 50,000 connections, of which none may expire more than 50 ms later than a tick.
    ("tests/offload_many", &[], Company::Timed),
    // The same number, and none more than 300 ms late, while twheel is killed.
    ("tests/offload_killed", &[], Company::Timed),
    // 50 ms beyond a tick.
    ("tests/offload", &[], Company::Timed),
    // 200 ms for an expiry, while others do their worst; tables of a million flows.
    ("tests/offload_hostile", &[], Company::Timed),
    // Half a second until the programs know a bridge.
    (
        "tests/once",
        &["between::a_bridge_that_comes_between_later"],
        Company::Timed,
    ),
    // These allow a second and more, and mostly sleep.
    ("tests/adversary", &[], Company::Quiet),
    ("tests/idle_command", &[], Company::Quiet),
    ("tests/offload_programs", &[], Company::Quiet),
    ("tests/interfaces", &[], Company::Quiet),
    ("tests/faults_crash", &[], Company::Quiet),
    ("tests/faults_stall", &[], Company::Quiet),
    // Steppers and clocks that need the CPUs.
    (
        "bench/benches",
        &[
            "cores", "expire", "exporter", "lateness", "path", "plan", "rto",
        ],
        Company::Timed,
    ),
    ("bench/benches", &[], Company::Quiet),
];

/// Each job of a test that needs root has file systems of its own for pins and names of network
/// namespaces: no start waits for that of another test, and whatever it leaves behind goes with it.
const APART: &str = "mkdir -p /run/netns && mount -t tmpfs -o mode=755 tmpfs /run/netns \
                     && mount -t bpf bpf /sys/fs/bpf && exec \"$@\"";
/// How far the processes of a test that measures time go before others, for the scheduler (`nice(1)`).
const BEFORE_OTHERS: &str = "-10";

/// What the jobs of a run share.
pub struct Plan<'a> {
    /// Environment variables of tests.
    pub env: Vec<(&'a str, &'a OsStr)>,
    /// Names of tests, and options of libtest.
    pub args: &'a [String],
    /// The long run: more of everything. What measures time has the machine to itself.
    pub is_long: bool,
    /// What jobs cost.
    pub times: &'a Times,
}

impl Plan<'_> {
    /// The jobs of a test binary, of those that are `wanted` of its tests.
    pub fn jobs(
        &self,
        binary: &Binary,
        wanted: impl Fn(&[String]) -> Vec<String>,
    ) -> Result<Vec<Job>> {
        let tests = self.list(binary)?;
        let wanted = wanted(&tests);
        if !binary.needs_root() {
            let job = || self.job(binary, None, &tests, &wanted);
            return Ok((!wanted.is_empty()).then(job).into_iter().collect());
        }
        let jobs = wanted
            .iter()
            .map(|test| self.job(binary, Some(test), &tests, &[]));
        Ok(jobs.collect())
    }

    /// The tests of a binary that the arguments select.
    fn list(&self, binary: &Binary) -> Result<Vec<String>> {
        let mut list = Command::new(&binary.executable);
        list.current_dir(&binary.package).args(self.args);
        list.args(["--list", "--format", "terse"])
            .stdin(Stdio::null());
        let listed = sh::output(&mut list)?;
        let names = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// The job of one test; or of those that are wanted among all.
    fn job(&self, binary: &Binary, test: Option<&str>, all: &[String], wanted: &[String]) -> Job {
        let company = match test {
            Some(test) => self.company(&binary.name, test),
            None => Company::Any,
        };
        let name = match test {
            Some(test) => format!("{} {test}", binary.name),
            None => binary.name.clone(),
        };
        let mut command = match test {
            Some(_) => apart(&binary.executable, company),
            None => Command::new(&binary.executable),
        };
        command
            .current_dir(&binary.package)
            .envs(self.env.iter().copied());
        match test {
            Some(test) => {
                command.args([test, "--exact", "--test-threads=1"]);
                command.args(options(self.args));
            }
            None => {
                command.args(self.args);
                if wanted.len() < all.len() {
                    command.arg("--exact");
                    command.args(wanted);
                }
            }
        }
        if self.is_long {
            command.arg("--include-ignored");
        }
        Job {
            cost: self.times.of(&name),
            name,
            command,
            company,
            proof: Proof::Tests,
        }
    }

    fn company(&self, binary: &str, test: &str) -> Company {
        match company(binary, test) {
            Company::Timed if self.is_long => Company::TimedAlone,
            other => other,
        }
    }
}

/// A command for a program that needs root, in mounts of its own.
pub fn apart(program: &Path, company: Company) -> Command {
    let mut command = match sh::is_root() {
        true => Command::new("unshare"),
        false => {
            let mut sudo = Command::new("sudo");
            sudo.args(["-E", "unshare"]);
            sudo
        }
    };
    command.args(["--mount", "--propagation", "slave", "sh", "-c", APART, "sh"]);
    if company != Company::Any {
        command.args(["nice", "-n", BEFORE_OTHERS]);
    }
    command.arg(program);
    command
}

/// What may run beside a test.
fn company(binary: &str, test: &str) -> Company {
    let names = |names: &[&str]| {
        names.iter().any(|name| match name.ends_with("::") {
            true => test.starts_with(name),
            false => test == *name,
        })
    };
    let of_it = || COMPANY.iter().filter(|(of, ..)| *of == binary);
    let named = of_it().find(|(_, tests, _)| names(tests));
    let rest = || of_it().find(|(_, names, _)| names.is_empty());
    named
        .or_else(rest)
        .map_or(Company::Any, |(_, _, company)| *company)
}

/// The options among arguments of libtest, with their values: all but the names of tests.
fn options(args: &[String]) -> Vec<&String> {
    const WITH_VALUE: [&str; 6] = [
        "--skip",
        "--color",
        "--format",
        "--logfile",
        "--test-threads",
        "-Z",
    ];
    // libtest takes these once.
    const GIVEN: [&str; 3] = ["--exact", "--test-threads", "--include-ignored"];
    let mut options = Vec::new();
    let (mut is_value, mut leave_out) = (false, false);
    for arg in args {
        let is_option = is_value || arg.starts_with('-');
        let is_given_anyway = !is_value && GIVEN.iter().any(|it| arg.starts_with(it));
        is_value = !is_value && WITH_VALUE.contains(&arg.as_str());
        if is_given_anyway {
            // With its value.
            leave_out = is_value;
        } else if leave_out {
            leave_out = false;
        } else if is_option {
            options.push(arg);
        }
    }
    options
}

/// Three of these, those whose turn it is at a commit.
pub fn in_turn(all: &[String], commits: usize) -> Vec<String> {
    const AT_ONCE: usize = 3;
    let parts = all.len().div_ceil(AT_ONCE).max(1);
    let part = all.iter().skip(commits % parts * AT_ONCE);
    part.take(AT_ONCE).cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::{COMPANY, company, in_turn, options};
    use crate::{sh, test::jobs::Company};

    #[test]
    fn a_test_has_the_company_of_its_name_or_of_its_binary() {
        assert_eq!(company("tests/bad_input", "a"), Company::Any);
        assert_eq!(company("tests/concurrency", "stress::b"), Company::Alone);
        assert_eq!(company("tests/concurrency", "reset::b"), Company::Timed);
        assert_eq!(company("tests/rto", "a"), Company::Timed);
        assert_eq!(company("tests/top", "a"), Company::Quiet);
        assert_eq!(company("tests/metrics", "page::a"), Company::Any);
        assert_eq!(company("tests/reap", "comes_back::a"), Company::Timed);
    }

    #[test]
    fn each_test_that_is_named_exists() {
        for (binary, names, _) in COMPANY {
            let directory = match binary.split_once('/') {
                Some(("bench", name)) => sh::workspace().join("tests/bench/tests").join(name),
                _ => sh::workspace().join("tests").join(binary),
            };
            assert!(directory.exists() || directory.with_extension("rs").exists());
            for name in names {
                let file = match name.split_once("::") {
                    Some((module, _)) => directory.join(module).with_extension("rs"),
                    None if directory.is_dir() => directory.join("main.rs"),
                    None => directory.with_extension("rs"),
                };
                let text = fs::read_to_string(&file).unwrap();
                let function = name.rsplit("::").next().unwrap_or(name);
                assert!(
                    function.is_empty()
                        || text.contains(&format!("\nfn {function}() "))
                        // Listed in a macro.
                        || text.contains(&format!("\n    {function}\n")),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn names_of_tests_are_no_options() {
        let args = ["name", "--skip", "this", "--nocapture", "other"].map(str::to_owned);
        assert_eq!(options(&args), ["--skip", "this", "--nocapture"]);
        let args = [
            "--exact",
            "name",
            "--test-threads",
            "2",
            "--test-threads=3",
            "--quiet",
        ];
        assert_eq!(options(&args.map(str::to_owned)), ["--quiet"]);
    }

    #[test]
    fn each_has_its_turn() {
        let all: Vec<_> = (0..17).map(|number| number.to_string()).collect();
        let turns: Vec<_> = (100..106).map(|commits| in_turn(&all, commits)).collect();
        let seen: BTreeSet<_> = turns.iter().flatten().cloned().collect();
        assert_eq!(seen.len(), 17);
        assert!(turns.iter().all(|turn| (1..=3).contains(&turn.len())));
        assert_eq!(in_turn(&[], 7), [""; 0]);
    }
}
