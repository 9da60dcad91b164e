//! `cargo xtask mutants`: changes `twheel-common` in one place at a time, and checks that its tests
//! notice.
//!
//! cargo-mutants changes a copy of the tree, in `target/mutants`. `twheel-common/mutants.toml`
//! lists the mutants that do not change behaviour, by file and name, with the reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    base::{Base, Changed},
    sh::{self, say},
    toolchain,
};

/// The version of cargo-mutants that is used.
const CARGO_MUTANTS: &str = "27.1.0";
/// The list of mutants that do not change behaviour.
const LIST: &str = "twheel-common/mutants.toml";
/// The directory of the files.
const SOURCES: &str = "twheel-common/src";
/// The directory of the tests.
const TESTS: &str = "twheel-common/tests";
/// At least this percentage of the viable mutants must be caught.
const LEAST: usize = 95;
/// At most so many mutants of changed lines are tried: four minutes on one core.
const CHANGED: usize = 48;
/// So many of all mutants are tried if it is unknown which lines changed.
const IN_DOUBT: usize = 24;
/// If the tests of a mutant take longer than this, in seconds, they count as not ending.
const TIMEOUT: &str = "60";

/// The tests within the sources.
const INSIDE: &str = "lib";

/// The files of twheel-common, and the tests that are run against their mutants. None of these
/// tests takes more than a few seconds; mutants that only models under loom would catch are in
/// [`LIST`].
const FILES: [(&str, &[&str]); 41] = [
    ("bits", &["small"]),
    ("config", &[INSIDE, "config", "small"]),
    ("counter", &["small"]),
    ("decision", &["decision", "state_model"]),
    ("enforce", &[INSIDE]),
    ("event", &["small"]),
    ("flow", &["flow"]),
    ("hash", &["table", "table_steps"]),
    ("inbox", &["inbox"]),
    ("jiffies", &[INSIDE]),
    ("key", &["flow"]),
    ("named", &[]),
    ("numbers", &["numbers", "state", "state_model"]),
    ("offload", &[INSIDE]),
    ("packet/bytes", &["packet"]),
    ("packet/ethernet", &["packet"]),
    ("packet/ip", &["packet"]),
    ("packet/mod", &["packet"]),
    ("packet/transport", &["packet"]),
    ("packet/wanted", &["packet"]),
    ("point", &["point"]),
    ("pod", &[]),
    ("policy", &[INSIDE, "policy"]),
    ("pool", &["pool"]),
    ("probe", &[]),
    ("quota", &["small"]),
    ("record", &["table", "table_steps"]),
    ("rto", &["rto"]),
    ("rule", &[INSIDE, "state"]),
    ("rule_set", &[INSIDE, "policy"]),
    ("seen", &["numbers", "state", "state_model"]),
    ("segment", &["packet"]),
    ("snapshot", &["table", "table_steps"]),
    ("state", &["numbers", "state", "state_model"]),
    ("step", &["small"]),
    ("table", &["table", "table_steps"]),
    ("tracked", &["numbers", "state", "state_model"]),
    ("update", &[INSIDE]),
    ("visit", &["visit"]),
    ("way", &["numbers", "state", "state_model"]),
    ("wheel", &["wheel"]),
];

/// Tests that are left out: they do millions of operations, and would run for each mutant.
const SLOW: [&str; 3] = [
    "few_are_refused_at_capacity",
    "structured_keys_are_no_worse_than_random_ones",
    "sets_are_of_different_keys",
];

/// A mutant, as cargo-mutants describes it.
#[derive(Clone, Deserialize)]
struct Mutant {
    /// With file, line and column.
    name: String,
    file: String,
}

#[derive(Deserialize)]
struct Outcomes {
    outcomes: Vec<Outcome>,
}

#[derive(Deserialize)]
struct Outcome {
    scenario: Scenario,
    summary: String,
}

#[derive(Deserialize)]
enum Scenario {
    Baseline,
    Mutant(Mutant),
}

/// The list: by file and name, why the mutant does not change behaviour.
type List = BTreeMap<String, BTreeMap<String, String>>;

/// The mutants of a file that were tested, by name.
#[derive(Default)]
struct Met {
    caught: BTreeSet<String>,
    lived: BTreeSet<String>,
    unviable: BTreeSet<String>,
}

/// Mutants by file, and by name without the line.
type Mutants = BTreeMap<String, BTreeMap<String, Mutant>>;

/// Tries the mutants of these files, or of all of them if none is given; if `only_changed`, those
/// of the lines that changed since the [`Base`].
pub fn mutants(files: &[String], only_changed: bool) -> Result<()> {
    let chosen = chosen(files)?;
    let changed = match only_changed {
        true => Some(Base::find().changed()),
        false => None,
    };
    if let Some(changed) = &changed
        && !changed.touches(&[SOURCES, TESTS, LIST, "xtask/src/mutants.rs"])
    {
        say!(
            "No mutants to try: neither {SOURCES} nor its tests changed ({}).",
            changed.why()
        );
        return Ok(());
    }
    let listed = fs::read_to_string(sh::workspace().join(LIST));
    let listed: List = toml::from_str(&listed.with_context(|| format!("cannot read {LIST}"))?)
        .with_context(|| format!("cannot read {LIST}"))?;
    let tool = Tool {
        program: cargo_mutants()?,
        tree: copy()?,
    };
    let mut all = tool.list(&chosen)?;
    let mut wrong = gone(&all, &listed, files.is_empty());
    if let Some(changed) = &changed {
        all = tool.some(&chosen, all, changed)?;
    }
    let count = count(&all);
    if count > 0 {
        say!(
            "Trying {count} mutants; this usually takes {} min.",
            1 + count / 12
        );
    }
    let (mut caught, mut viable) = (0, 0);
    for (file, tests) in FILES {
        let name = format!("{file}.rs");
        let Some(mutants) = all.get(&name).filter(|mutants| !mutants.is_empty()) else {
            continue;
        };
        let met = tool.run(&name, tests, mutants, only_changed)?;
        let empty = BTreeMap::new();
        wrong.extend(judge(&name, &met, listed.get(&name).unwrap_or(&empty)));
        println!("{}", line(&name, &met));
        caught += met.caught.len();
        viable += met.caught.len() + met.lived.len();
    }
    println!("{caught} of {viable} viable mutants were caught");
    // For a few files the rate means little: one of them may have most of the mutants that change
    // nothing.
    if files.is_empty() && !only_changed && caught * 100 < viable * LEAST {
        wrong.push(format!("fewer than {LEAST} % were caught"));
    }
    for wrong in &wrong {
        eprintln!("error: {wrong}");
    }
    ensure!(
        wrong.is_empty(),
        "{} of what {LIST} says is wrong",
        wrong.len()
    );
    Ok(())
}

/// The files of these names, with or without `.rs`.
fn chosen(names: &[String]) -> Result<Vec<String>> {
    let known = |name: &str| FILES.iter().any(|(file, _)| *file == name);
    let directory = sh::workspace().join(SOURCES);
    for entry in fs::read_dir(directory).context("cannot read the sources of twheel-common")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(name) = name.strip_suffix(".rs").filter(|name| *name != "lib") {
            ensure!(
                known(name),
                "{name}.rs has no tests: add it to FILES in xtask/src/mutants.rs"
            );
        }
    }
    if names.is_empty() {
        return Ok(FILES.iter().map(|(file, _)| format!("{file}.rs")).collect());
    }
    names
        .iter()
        .map(|name| {
            let name = name.strip_suffix(".rs").unwrap_or(name);
            ensure!(known(name), "twheel-common has no file {name}.rs to mutate");
            Ok(format!("{name}.rs"))
        })
        .collect()
}

/// cargo-mutants, and the copy of the tree that it changes.
struct Tool {
    program: PathBuf,
    tree: PathBuf,
}

impl Tool {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", sh::target("mutants/build"));
        command.args(["mutants", "--no-config", "--package", "twheel-common"]);
        command
    }

    /// The command that lists the mutants of these files.
    fn lister(&self, files: &[String]) -> Command {
        let mut command = self.command();
        command.args(["--list", "--json"]);
        for file in files {
            command.args(["--file", &format!("{SOURCES}/{file}")]);
        }
        command
    }

    /// The mutants of these files.
    fn list(&self, files: &[String]) -> Result<Mutants> {
        let mutants = listed(&mut self.lister(files))?;
        let mut found = BTreeMap::new();
        for file in files {
            let path = format!("{SOURCES}/{file}");
            let mutants = mutants.iter().filter(|mutant| mutant.file == path);
            found.insert(file.clone(), named(mutants));
        }
        Ok(found)
    }

    /// Of all mutants, those of the changed lines, or some of all if these are unknown; no more
    /// than fit into a landing.
    fn some(&self, files: &[String], all: Mutants, changed: &Changed) -> Result<Mutants> {
        if !changed.is_known() {
            say!("Which lines changed is unknown: {}.", changed.why());
            return Ok(evenly(all, IN_DOUBT));
        }
        if !changed.touches(&[SOURCES]) {
            say!("The tests changed, not the lines ({}).", changed.why());
            return Ok(evenly(all, IN_DOUBT));
        }
        let diff = sh::target("mutants/changed.diff");
        fs::write(&diff, changed.diff(&[SOURCES])?).context("cannot write the diff")?;
        let on_changed_lines = listed(self.lister(files).arg("--in-diff").arg(&diff))?;
        let names: BTreeSet<_> = on_changed_lines.into_iter().map(|it| it.name).collect();
        let mut found = all;
        for mutants in found.values_mut() {
            mutants.retain(|_, mutant| names.contains(&mutant.name));
        }
        let all = count(&found);
        let some = evenly(found, CHANGED);
        let left = match all - count(&some) {
            0 => String::new(),
            left => format!("; {left} of them are left to `cargo xtask mutants`"),
        };
        say!(
            "The changed lines have {all} mutants ({}){left}.",
            changed.why()
        );
        Ok(some)
    }

    /// Tests these mutants; if `only_these`, no others of the file.
    fn run(
        &self,
        file: &str,
        tests: &[&str],
        mutants: &BTreeMap<String, Mutant>,
        only_these: bool,
    ) -> Result<Met> {
        let output = sh::target("mutants/out").join(file);
        let _ = fs::remove_dir_all(&output);
        fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
        let mut command = self.command();
        command.args(["--in-place", "--timeout", TIMEOUT, "--no-times"]);
        command.args(["--file", &format!("{SOURCES}/{file}")]);
        if only_these {
            for mutant in mutants.values() {
                command.args(["--re", &format!("^{}$", escaped(&mutant.name))]);
            }
        }
        command.arg("--output").arg(&output);
        command.args(tests.iter().map(|test| match *test {
            INSIDE => "--cargo-arg=--lib".to_owned(),
            test => format!("--cargo-arg=--test={test}"),
        }));
        command.args(["--", "--"]);
        command.args(SLOW.iter().flat_map(|test| ["--skip", test]));
        let status = command.status().context("cannot run cargo-mutants")?;
        // Codes 2 and 3: some mutants survived, or their tests did not end.
        if !matches!(status.code(), Some(0 | 2 | 3)) {
            bail!("cargo-mutants failed ({status}): do the tests of {file} pass?");
        }
        let path = output.join("mutants.out/outcomes.json");
        let outcomes: Outcomes = read(&path)?;
        let mut met = Met::default();
        for outcome in outcomes.outcomes {
            let Scenario::Mutant(mutant) = outcome.scenario else {
                continue;
            };
            let name = mutants
                .iter()
                .find(|(_, listed)| listed.name == mutant.name);
            let Some((name, _)) = name else {
                // cargo-mutants also tries some mutants that the expressions do not match.
                ensure!(only_these, "{} was not listed", mutant.name);
                continue;
            };
            match outcome.summary.as_str() {
                "CaughtMutant" | "Timeout" => &mut met.caught,
                "MissedMutant" => &mut met.lived,
                "Unviable" => &mut met.unviable,
                other => bail!("{}: {other}", mutant.name),
            }
            .insert(name.clone());
        }
        Ok(met)
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))
}

/// Mutants by their names without file, line and column; of several with the same name, also by
/// their order.
fn named<'a>(mutants: impl Iterator<Item = &'a Mutant>) -> BTreeMap<String, Mutant> {
    let mut same: BTreeMap<&str, Vec<&Mutant>> = BTreeMap::new();
    for mutant in mutants {
        let name = mutant.name.splitn(4, ':').last().unwrap_or_default();
        same.entry(name.trim()).or_default().push(mutant);
    }
    let mut names = BTreeMap::new();
    for (name, mutants) in same {
        let count = mutants.len();
        for (number, mutant) in mutants.into_iter().enumerate() {
            let name = match count {
                1 => name.to_owned(),
                _ => format!("{name} ({} of {count})", number + 1),
            };
            names.insert(name, mutant.clone());
        }
    }
    names
}

/// Entries of the list that match no mutant: in all files, or only in those that were asked for.
fn gone(
    all: &BTreeMap<String, BTreeMap<String, Mutant>>,
    listed: &List,
    is_all: bool,
) -> Vec<String> {
    let mut gone = Vec::new();
    for (file, names) in listed {
        let Some(mutants) = all.get(file) else {
            if is_all {
                gone.push(format!("there is no {file}: delete [\"{file}\"]"));
            }
            continue;
        };
        for name in names.keys().filter(|name| !mutants.contains_key(*name)) {
            gone.push(format!(
                "{file} has no such mutant: delete or rename \"{name}\""
            ));
        }
    }
    gone
}

/// Errors in the list, as the mutants that were tested show.
fn judge(file: &str, met: &Met, listed: &BTreeMap<String, String>) -> Vec<String> {
    let lived = met.lived.iter().filter(|name| !listed.contains_key(*name));
    let lived = lived.map(|name| {
        format!(
            "{file}: no test notices \"{name}\": add one, or the mutant and why it changes nothing"
        )
    });
    let caught = met.caught.union(&met.unviable);
    let caught = caught.filter(|name| listed.contains_key(*name));
    let caught = caught.map(|name| format!("{file}: caught: delete \"{name}\""));
    lived.chain(caught).collect()
}

fn line(file: &str, met: &Met) -> String {
    let (caught, lived) = (met.caught.len(), met.lived.len());
    let share = 100.0 * caught as f64 / (caught + lived).max(1) as f64;
    let unviable = met.unviable.len();
    format!("{file:<11} {caught:4} caught, {lived:3} lived, {unviable:3} unviable  {share:5.1} %")
}

/// The mutants that a command lists.
fn listed(command: &mut Command) -> Result<Vec<Mutant>> {
    let list = sh::output(command)?;
    if list.trim().is_empty() {
        // That is how it lists none.
        return Ok(Vec::new());
    }
    serde_json::from_str(&list).context("cannot read the mutants")
}

fn count(mutants: &Mutants) -> usize {
    mutants.values().map(BTreeMap::len).sum()
}

/// At most so many of these mutants, at even distances.
fn evenly(all: Mutants, most: usize) -> Mutants {
    let count = count(&all);
    let flat = all
        .into_iter()
        .flat_map(|(file, mutants)| mutants.into_iter().map(move |it| (file.clone(), it)));
    // Each step that takes the share to the next whole number chooses a mutant.
    let is_chosen =
        |index: usize| count <= most || (index + 1) * most / count > index * most / count;
    let mut chosen = Mutants::new();
    for (index, (file, (name, mutant))) in flat.enumerate() {
        if is_chosen(index) {
            chosen.entry(file).or_default().insert(name, mutant);
        }
    }
    chosen
}

/// A name as a regular expression that matches nothing else.
fn escaped(name: &str) -> String {
    let mut escaped = String::new();
    for letter in name.chars() {
        // Escapes no other characters: `\<` and `\>` are word boundaries.
        if r"\.+*?()|[]{}^$#&-~".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// Copies the tree, without what git ignores.
fn copy() -> Result<PathBuf> {
    let tree = sh::target("mutants/tree");
    let _ = fs::remove_dir_all(&tree);
    let mut git = sh::git();
    git.args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    for file in sh::output(&mut git)?.split_terminator('\0') {
        let from = sh::workspace().join(file);
        // The file was deleted, but is still in the index.
        if !from.exists() {
            continue;
        }
        let to = tree.join(file);
        let parent = to.parent().context("a file is in a directory")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {file}"))?;
    }
    Ok(tree)
}

/// cargo-mutants, of this version, because others have other mutants; built here if needed.
fn cargo_mutants() -> Result<PathBuf> {
    let tools = toolchain::cache()?.join("tools");
    let cached = tools.join("bin/cargo-mutants");
    let found = sh::which("cargo-mutants");
    let wanted = format!("cargo-mutants {CARGO_MUTANTS}");
    let mut tools_found = found.into_iter().chain([cached.clone()]);
    let is_wanted = |tool: &PathBuf| {
        let version = Command::new(tool).args(["mutants", "--version"]).output();
        version.is_ok_and(|it| String::from_utf8_lossy(&it.stdout).trim() == wanted)
    };
    if let Some(tool) = tools_found.find(is_wanted) {
        return Ok(tool);
    }
    say!(
        "Building cargo-mutants {CARGO_MUTANTS} into {}; this usually takes 90 s.",
        tools.display()
    );
    toolchain::build_tool("cargo-mutants", CARGO_MUTANTS, |_| {})?;
    Ok(cached)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(line: u32, what: &str) -> Mutant {
        let file = "twheel-common/src/flow.rs".to_owned();
        let name = format!("{file}:{line}:5: {what}");
        Mutant { name, file }
    }

    #[test]
    fn mutants_of_one_name_are_told_apart_without_their_lines() {
        let mutants = [
            mutant(3, "replace | with & in a::b"),
            mutant(9, "replace | with & in a::b"),
            mutant(12, "replace a::b -> Option<u32> with None"),
        ];
        let named = named(mutants.iter());
        let names: Vec<_> = named.keys().collect();
        assert_eq!(
            names,
            [
                "replace a::b -> Option<u32> with None",
                "replace | with & in a::b (1 of 2)",
                "replace | with & in a::b (2 of 2)",
            ]
        );
        assert_eq!(named[names[2]].name, mutants[1].name);
    }

    #[test]
    fn the_list_is_neither_too_short_nor_too_long() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let met = Met {
            caught: names(&["caught", "listed though caught"]),
            lived: names(&["lived", "listed"]),
            unviable: names(&["unviable"]),
        };
        let listed = ["listed", "listed though caught", "not run"];
        let listed = listed.map(|name| (name.to_owned(), String::new())).into();
        let wrong = judge("flow.rs", &met, &listed);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].contains("\"lived\"") && wrong[1].contains("delete \"listed though"));
        let listed = List::from([("flow.rs".to_owned(), listed)]);
        let all = BTreeMap::from([("flow.rs".to_owned(), BTreeMap::new())]);
        assert_eq!(gone(&all, &listed, false).len(), 3);
        assert_eq!(gone(&BTreeMap::new(), &listed, false).len(), 0);
        assert_eq!(gone(&BTreeMap::new(), &listed, true).len(), 1);
    }

    #[test]
    fn mutants_are_chosen_at_even_distances() {
        let mutants: Vec<_> = (100..200).map(|line| mutant(line, "replace a")).collect();
        let named = |from, to| named(mutants[from..to].iter());
        let all = Mutants::from([
            ("flow.rs".to_owned(), named(0, 60)),
            ("key.rs".to_owned(), named(60, 100)),
        ]);
        let some = evenly(all.clone(), 10);
        assert_eq!((some["flow.rs"].len(), some["key.rs"].len()), (6, 4));
        for most in [0, 1, 48, 99, 100, 101] {
            assert_eq!(count(&evenly(all.clone(), most)), most.min(100));
        }
    }

    #[test]
    fn a_name_matches_itself() {
        assert_eq!(escaped("a -> (b) | c"), r"a \-> \(b\) \| c");
    }
}
