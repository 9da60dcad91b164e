//! Reads what a machine prints, judges it, and writes the table of all machines.

use std::{fmt::Write, fs};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::kernels::{Expected, Kernel, Release};
use crate::sh;

/// How many instructions of a program the kernel may verify: by default, and with all options on.
const BUDGETS: [u64; 2] = [120_000, 240_000];
/// The document that has the table.
const DOCUMENT: &str = "docs/kernels.md";
const BEGIN: &str = "<!-- `cargo xtask vm-test` writes from here -->\n";
const END: &str = "<!-- to here -->\n";
/// What the lines that are read begin with.
const MARK: &str = "vm: ";
/// The value of an unknown field.
const UNKNOWN: &str = "?";

/// What the programs cost in one configuration.
#[derive(Default)]
struct Figures {
    /// The verified instructions of the largest program.
    instructions: Option<u64>,
    load_us: Option<u64>,
}

/// What a machine has printed so far.
pub struct Outcome {
    release: Release,
    expected: Expected,
    has_modules: bool,
    /// The version that Debian gives the kernel: `6.1.192` for the release `6.1.0-56`.
    version: Option<String>,
    stepping: Option<String>,
    egress: Option<String>,
    /// By default, and with all options on.
    figures: [Figures; 2],
    passed: usize,
    problems: Vec<String>,
    ended: bool,
}

impl Outcome {
    /// The outcome of a machine that is about to boot.
    pub fn new(kernel: &Kernel) -> Self {
        Self {
            release: kernel.release.clone(),
            expected: kernel.expected,
            has_modules: kernel.has_modules,
            version: None,
            stepping: None,
            egress: None,
            figures: Default::default(),
            passed: 0,
            problems: Vec::new(),
            ended: false,
        }
    }

    /// Reads a line. Returns what should be shown to the user at once.
    pub fn read(&mut self, line: &str) -> Option<String> {
        // The firmware leaves the cursor within the first line.
        let (_, text) = line.split_once(MARK)?;
        let (what, rest) = text.split_once(' ')?;
        match what {
            "kernel" => self.version = debian_version(rest),
            "doctor" => {
                let (name, finding) = rest.split_once(' ')?;
                self.find(usize::from(name != "default"), finding);
            }
            "pass" => {
                self.passed += 1;
                let (name, seconds) = rest.split_once(' ')?;
                return Some(format!("{name} passes, {seconds} s of its time"));
            }
            "fail" => {
                let (name, _) = rest.split_once(' ')?;
                self.problems.push(name.to_owned());
                return Some(format!("{name} FAILS"));
            }
            "ended" => self.ended = true,
            _ => {}
        }
        None
    }

    /// Reads a finding of `doctor`.
    fn find(&mut self, configuration: usize, finding: &str) {
        let Ok(finding) = serde_json::from_str::<Value>(finding) else {
            self.problems.push("doctor writes no JSON".to_owned());
            return;
        };
        let what = || finding["what"].as_str().map(str::to_owned);
        match finding["check"].as_str() {
            Some("stepping") => {
                self.stepping = what().map(|it| way(&it, &["test runs", "live frames"]))
            }
            Some("egress") => self.egress = what().map(|it| way(&it, &["TCX", "clsact"])),
            Some("programs") => {
                let instructions = finding["instructions"].as_object();
                self.figures[configuration] = Figures {
                    instructions: instructions
                        .and_then(|it| it.values().filter_map(Value::as_u64).max()),
                    load_us: finding["load_us"].as_u64(),
                };
            }
            _ => {}
        }
    }

    /// Notes another problem.
    pub fn fail(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Judges the outcome, after the last line.
    pub fn finish(&mut self) {
        if !self.ended {
            self.fail("did not come to its end".to_owned());
        }
        if self.passed == 0 {
            self.fail("no check has passed".to_owned());
        }
        if self.expected != Expected::Attaches {
            return;
        }
        let names = ["by default", "with everything on"];
        for ((name, budget), figures) in names.into_iter().zip(BUDGETS).zip(&self.figures) {
            match figures.instructions {
                Some(count) if count > budget => self.problems.push(format!(
                    "{count} instructions verified {name}, more than {budget}"
                )),
                None => self
                    .problems
                    .push(format!("doctor tells no instructions {name}")),
                _ => {}
            }
            if figures.load_us.is_none() {
                self.problems
                    .push(format!("doctor tells no time to load {name}"));
            }
        }
        for (field, name) in [(&self.stepping, "stepping"), (&self.egress, "egress")] {
            if field.as_ref().is_none_or(|it| it == UNKNOWN) {
                self.problems.push(format!("doctor tells no way of {name}"));
            }
        }
    }

    /// Whether everything is as expected.
    pub fn is_well(&self) -> bool {
        self.problems.is_empty()
    }

    /// What happened, in a few words.
    pub fn result(&self) -> String {
        if !self.is_well() {
            return format!("**fails**: {}", self.problems.join("; "));
        }
        match self.expected {
            Expected::TooOld => "refused, and says what the kernel lacks".to_owned(),
            Expected::Interleaves => "refused by name, as PREEMPT_RT".to_owned(),
            Expected::Attaches if self.has_modules => format!("{} checks pass", self.passed),
            Expected::Attaches => format!(
                "{} checks pass, on `lo` alone: the mirror lacks this kernel's modules",
                self.passed
            ),
        }
    }

    /// What was expected.
    pub fn expected(&self) -> Expected {
        self.expected
    }

    /// The kernel's name, as `uname -r` prints it.
    pub fn name(&self) -> &str {
        &self.release.name
    }

    fn row(&self) -> String {
        let version = self.version.as_deref().unwrap_or(UNKNOWN);
        let flavour = if self.release.realtime { "-rt" } else { "" };
        let attaches = self.expected == Expected::Attaches;
        let or_none = |text: Option<String>| match text {
            _ if !attaches => String::new(),
            Some(text) => text,
            None => UNKNOWN.to_owned(),
        };
        let pair = |of: fn(&Figures) -> Option<u64>| {
            let [default, everything] =
                [0, 1].map(|it| of(&self.figures[it]).map_or(UNKNOWN.to_owned(), thousands));
            or_none(Some(format!("{default} / {everything}")))
        };
        format!(
            "| {version}{flavour} | {} | {} | {} | {} | {} | {} |",
            self.release.arch.name(),
            or_none(self.stepping.clone()),
            or_none(self.egress.clone()),
            pair(|it| it.instructions),
            pair(|it| it.load_us.map(|micros| micros / 1000)),
            self.result()
        )
    }
}

/// The first words of a finding of `doctor`, if they are one of these known ways.
fn way(what: &str, ways: &[&str]) -> String {
    let way = ways.iter().find(|way| what.starts_with(**way));
    way.unwrap_or(&UNKNOWN).to_string()
}

/// `6.1.192` of `6.1.0-56-cloud-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.192-2 (2026-11-01)`.
fn debian_version(uname: &str) -> Option<String> {
    let (_, version) = uname.split_once(" Debian ")?;
    let version = version.split(['-', ' ', '~']).next()?;
    Some(version.to_owned())
}

/// A number with commas between its thousands.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The table of all machines.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut table = String::from(
        "| kernel | architecture | stepping | egress | verified instructions: default / everything on \
         | load, ms (emulated): default / everything on | result |\n|---|---|---|---|---|---|---|\n",
    );
    for outcome in outcomes {
        let _ = writeln!(table, "{}", outcome.row());
    }
    table
}

/// Writes the table into its document.
pub fn write(table: &str) -> Result<()> {
    let path = sh::workspace().join(DOCUMENT);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {DOCUMENT}"))?;
    let replaced = replace(&text, table)?;
    fs::write(&path, replaced).with_context(|| format!("cannot write {DOCUMENT}"))
}

fn replace(text: &str, table: &str) -> Result<String> {
    let begin = text.find(BEGIN).map(|at| at + BEGIN.len());
    let end = text.find(END);
    let (Some(begin), Some(end)) = (begin, end) else {
        anyhow::bail!(
            "{DOCUMENT} lacks the lines between which the table stands: {BEGIN}and {END}"
        );
    };
    ensure!(
        begin <= end,
        "{DOCUMENT} has the end of the table before its beginning"
    );
    Ok(format!("{}\n{table}\n{}", &text[..begin], &text[end..]))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// The outcome of a machine on which twheel should attach, and which printed these lines.
    fn outcome(lines: &[&str]) -> Outcome {
        let mut outcome = Outcome::new(&Kernel {
            release: Release::of_package("linux-image-6.1.0-56-rt-amd64").unwrap(),
            expected: Expected::Attaches,
            root: PathBuf::new(),
            has_modules: true,
        });
        for line in lines {
            outcome.read(line);
        }
        outcome.finish();
        outcome
    }

    fn programs(configuration: &str, instructions: u64) -> String {
        format!(
            "vm: doctor {configuration} {{\"check\":\"programs\",\"load_us\":320000,\
             \"instructions\":{{\"twheel_xdp\":7,\"twheel_egress\":{instructions}}}}}"
        )
    }

    const STEPPING: &str =
        r#"vm: doctor default {"check":"stepping","what":"live frames: this kernel …"}"#;
    const EGRESS: &str = r#"vm: doctor default {"check":"egress","what":"clsact: outgoing …"}"#;

    #[test]
    fn what_a_machine_tells_is_judged() {
        let version = "[c\u{1b}7vm: kernel 6.1.0-56-rt-amd64 #1 SMP Debian 6.1.192-2 (2026-11-01)";
        let [default, everything] = [("default", 120_000), ("everything", 240_000)]
            .map(|(name, count)| programs(name, count));
        let well = [
            version,
            &default,
            STEPPING,
            EGRESS,
            &everything,
            "vm: pass run 2",
            "vm: ended 0",
        ];
        let told = outcome(&well);
        assert!(told.is_well(), "{}", told.result());
        assert_eq!(
            told.row(),
            "| 6.1.192-rt | x86-64 | live frames | clsact | 120,000 / 240,000 | 320 / 320 | 1 checks pass |"
        );
        let [default, everything] = [("default", 120_001), ("everything", 240_001)]
            .map(|(name, count)| programs(name, count));
        for line in [&default, &everything, "vm: fail run 2"] {
            let mut lines = well.to_vec();
            lines.insert(6, line);
            assert!(!outcome(&lines).is_well(), "{line}");
        }
        assert!(!outcome(&well[..6]).is_well(), "it did not end");
        let mut unchecked = well.to_vec();
        unchecked.remove(5);
        assert!(!outcome(&unchecked).is_well(), "nothing was checked");
        for missing in 1..5 {
            let mut lines = well.to_vec();
            lines.remove(missing);
            assert!(!outcome(&lines).is_well(), "without {}", well[missing]);
        }
    }

    #[test]
    fn the_table_goes_between_its_marks() {
        let text = format!("before\n{BEGIN}old\n{END}after\n");
        let expected = format!("before\n{BEGIN}\nnew\n\n{END}after\n");
        assert_eq!(replace(&text, "new\n").unwrap(), expected);
        assert_eq!(replace(&expected, "new\n").unwrap(), expected);
        assert!(replace("no marks", "new\n").is_err());
    }

    #[test]
    fn versions_and_numbers_are_read_and_written() {
        let uname = "6.1.0-56-cloud-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.192-2 (2026-11-01)";
        assert_eq!(debian_version(uname).as_deref(), Some("6.1.192"));
        assert_eq!(debian_version("6.1.0 #1 SMP"), None);
        for (number, text) in [
            (7, "7"),
            (999, "999"),
            (41_234, "41,234"),
            (1_000_001, "1,000,001"),
        ] {
            assert_eq!(thousands(number), text);
        }
        assert_eq!(
            way("TCX: outgoing packets can be seen", &["TCX", "clsact"]),
            "TCX"
        );
        assert_eq!(way("nothing", &["TCX", "clsact"]), UNKNOWN);
    }
}
