//! The units of systemd in `dist`, and what they allow. systemd itself must be process 1, so tests run
//! programs with a unit's limits by other means.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::skipped;

/// The highest exposure that `systemd-analyze security` may find: 2.5 of 10.
const EXPOSURE: &str = "25";

/// A unit.
pub struct Unit {
    /// Its file's name, such as `twheel@.service`.
    name: &'static str,
    text: String,
}

impl Unit {
    /// Reads a unit of this name.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn read(name: &'static str) -> Result<Self> {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../dist")).join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(Self { name, text })
    }

    /// The values of a directive, in order.
    pub fn directive(&self, name: &str) -> Vec<&str> {
        let lines = self.text.lines().filter_map(|line| line.split_once('='));
        lines
            .filter(|(key, _)| *key == name)
            .map(|(_, value)| value)
            .collect()
    }

    /// Lets `systemd-analyze` check the unit, and how much it exposes. `programs`: the directory of
    /// `twheel`; `directory`: where the unit is written for that.
    ///
    /// # Errors
    ///
    /// What it finds.
    pub fn verify(&self, directory: &Path, programs: &Path) -> Result<()> {
        let path = directory.join(self.name.replace('@', "@eth7"));
        let programs = programs.to_str().context("no UTF-8")?;
        fs::write(&path, self.text.replace("/usr/local/bin", programs))?;
        let template = self.name.trim_end_matches(".service");
        for args in [
            &["verify"][..],
            &["security", "--offline=true", "--threshold", EXPOSURE],
        ] {
            let output = Command::new("systemd-analyze")
                .args(args)
                .arg(&path)
                .output()?;
            let said = String::from_utf8_lossy(&output.stdout);
            let stderr = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{args:?}: {said}{stderr}");
            ensure!(!stderr.contains(template), "{args:?}: {stderr}");
            println!(
                "{args:?}: {}",
                said.lines().last().unwrap_or("nothing to say")
            );
        }
        Ok(())
    }

    /// Checks that the unit allows every system call that `strace` has recorded of a program, from its
    /// `execve` on.
    ///
    /// # Errors
    ///
    /// Those that it refuses; or fewer than 30 were recorded, which no run of ours does with.
    pub fn check_calls(&self, trace: &Path, program: &Path) -> Result<BTreeSet<String>> {
        let trace = fs::read_to_string(trace)?;
        let begin = format!("execve(\"{}\"", program.display());
        let called: BTreeSet<_> = trace
            .lines()
            .skip_while(|line| !line.contains(&begin))
            .filter_map(|line| line.split_ascii_whitespace().nth(1)?.split_once('('))
            .map(|(name, _)| name.to_owned())
            .filter(|it| !it.is_empty())
            .collect();
        println!("{} system calls: {called:?}", called.len());
        ensure!(called.len() > 30, "{called:?}");
        let allowed = self.allowed()?;
        let refused: Vec<_> = called.difference(&allowed).collect();
        ensure!(refused.is_empty(), "{} refuses {refused:?}", self.name);
        Ok(called)
    }

    /// The system calls that the unit allows: systemd expands its own sets.
    fn allowed(&self) -> Result<BTreeSet<String>> {
        let output = Command::new("systemd-analyze")
            .arg("syscall-filter")
            .output()?;
        let text = String::from_utf8(output.stdout)?;
        let mut sets: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut set = "";
        for line in text.lines() {
            match line.trim() {
                "" => set = "",
                it if !line.starts_with(' ') => set = it,
                it if it.starts_with('#') => {}
                it if !set.is_empty() => sets.entry(set).or_default().push(it),
                _ => {}
            }
        }
        let mut allowed = BTreeSet::new();
        for filter in self.directive("SystemCallFilter") {
            let mut named = BTreeSet::new();
            let names = filter.trim_start_matches('~').split_ascii_whitespace();
            names.for_each(|it| spell(&sets, it, &mut named));
            match filter.starts_with('~') {
                true => allowed.retain(|it| !named.contains(it)),
                false => allowed.extend(named),
            }
        }
        // These are always allowed.
        spell(&sets, "@default", &mut allowed);
        Ok(allowed)
    }
}

/// Adds the system calls of a set, or one that is named itself.
fn spell(sets: &BTreeMap<&str, Vec<&str>>, name: &str, into: &mut BTreeSet<String>) {
    match sets.get(name) {
        Some(members) => members.iter().for_each(|it| spell(sets, it, into)),
        None => drop(into.insert(name.to_owned())),
    }
}

/// Whether a program is installed; if not, a test that needs it is skipped, which is said.
pub fn is_installed(program: &str) -> bool {
    let is = Command::new(program).arg("--version").output().is_ok();
    if !is {
        skipped(format_args!("{program} is not installed"));
    }
    is
}
