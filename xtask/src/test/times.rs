//! What each test has cost before: by that the longest begin first, and as many run beside one another
//! as the CPUs serve.
//!
//! `target/test-times` has the last run of each test on this machine; `times.txt`, beside this file, is
//! for the first: lines of seconds, CPU seconds and the name of a job. To renew it, copy the lines of at
//! least a second from there.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf, time::Duration};

use super::jobs::Cost;
use crate::sh::{self, say};

const COMMITTED: &str = include_str!("times.txt");
/// What a test of which nothing is known is taken to cost: it begins before the many short ones.
const UNKNOWN: Cost = Cost {
    took: Duration::from_secs(2),
    cpu: Duration::from_millis(600),
};
/// How many runs are remembered in which tests had to run again.
const RUNS: usize = 5;

/// What jobs have cost, by their names.
pub struct Times(BTreeMap<String, Cost>);

impl Times {
    /// Those of the last runs.
    pub fn load() -> Self {
        let mut times = read(COMMITTED);
        times.extend(read(&fs::read_to_string(path()).unwrap_or_default()));
        Self(times)
    }

    /// What a job is expected to cost.
    pub fn of(&self, name: &str) -> Cost {
        self.0.get(name).copied().unwrap_or(UNKNOWN)
    }

    /// Keeps what jobs have cost.
    pub fn save<'a>(mut self, costs: impl Iterator<Item = (&'a str, Cost)>) {
        self.0
            .extend(costs.map(|(name, cost)| (name.to_owned(), cost)));
        let mut text = String::new();
        for (name, cost) in &self.0 {
            let [took, cpu] = [cost.took, cost.cpu].map(|it| it.as_secs_f64());
            let _ = writeln!(text, "{took:.2} {cpu:.2} {name}");
        }
        if let Err(error) = fs::write(path(), text) {
            say!("cannot write {}: {error}", path().display());
        }
    }
}

fn path() -> PathBuf {
    sh::target("test-times")
}

fn read(text: &str) -> BTreeMap<String, Cost> {
    let line = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let mut seconds = || Duration::try_from_secs_f64(words.next()?.parse().ok()?).ok();
        let (took, cpu) = (seconds()?, seconds()?);
        Some((words.next()?.to_owned(), Cost { took, cpu }))
    };
    text.lines().filter_map(line).collect()
}

/// Notes which jobs had to run again in this run, in a file of this name. Returns for each in how many
/// of how many runs, the last ones, it had to.
pub fn note_again(file: &str, names: &[&str]) -> Vec<(String, usize, usize)> {
    let path = sh::target(file);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let (text, counts) = again(&text, names);
    if let Err(error) = fs::write(&path, text) {
        say!("cannot write {}: {error}", path.display());
    }
    counts
}

/// A line for each of the last runs: the names, with tabs between them.
fn again(text: &str, names: &[&str]) -> (String, Vec<(String, usize, usize)>) {
    let this = names.join("\t");
    let mut runs: Vec<_> = text.lines().chain([this.as_str()]).collect();
    runs.drain(..runs.len().saturating_sub(RUNS));
    let count = |name: &&str| {
        let has = |run: &&&str| run.split('\t').any(|it| it == *name);
        let count = runs.iter().filter(has).count();
        ((*name).to_owned(), count, runs.len())
    };
    let counts = names.iter().map(count).collect();
    let text = runs.iter().map(|run| format!("{run}\n")).collect();
    (text, counts)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{COMMITTED, again, read};

    #[test]
    fn the_committed_list_is_read() {
        let lines = COMMITTED.lines().count();
        assert!(lines > 50, "{lines}");
        assert_eq!(read(COMMITTED).len(), lines);
    }

    #[test]
    fn what_is_no_line_is_left_out() {
        let times = read("1.50 0.25 tests/a b::c\nnonsense\n-1 0 d\n2 x e\n");
        assert_eq!(times.len(), 1);
        let cost = times["tests/a b::c"];
        assert_eq!(cost.took, Duration::from_millis(1500));
        assert_eq!(cost.cpu, Duration::from_millis(250));
    }

    #[test]
    fn the_last_five_runs_count() {
        let mut text = String::new();
        for run in 0..7 {
            let names: &[&str] = if run % 2 == 0 { &["a x", "b"] } else { &["b"] };
            let (next, counts) = again(&text, names);
            text = next;
            assert_eq!(counts.len(), names.len());
        }
        assert_eq!(text.lines().count(), 5);
        let (_, counts) = again(&text, &["a x", "c"]);
        assert_eq!(
            counts,
            [("a x".to_owned(), 3, 5), ("c".to_owned(), 1, 5)],
            "{text}"
        );
        assert_eq!(again("", &[]).0, "\n");
    }
}
