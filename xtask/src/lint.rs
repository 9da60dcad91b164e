//! `cargo xtask lint`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    binaries::HOST,
    dashboards, setup,
    sh::{self, say},
};

/// Most lines in a source file.
const MOST_LINES: usize = 600;
/// Files that may have more lines, and why: they are tables of data.
const TABLES: &[(&str, &str)] = &[];

/// The cargo commands of the lints. Unless quiet, cargo says what it works on. Clippy uses
/// clippy.toml, which limits the parameters of a function.
pub fn commands(is_quiet: bool) -> Vec<Command> {
    let cargo = |args: &str| {
        let mut cargo = sh::cargo();
        cargo
            .args(is_quiet.then_some("--quiet"))
            .args(args.split(' '))
            .env("RUSTDOCFLAGS", "-Dwarnings");
        cargo
    };
    // The same packages as for the tests, so that what they depend on has the same features.
    let without_kafka = HOST.replace("twheel-bench/kafka,", "");
    vec![
        // What needs no C compiler first. Apart from the host crates, with which it would share
        // features. For the host target, since the compiler for the BPF target may lack clippy; the
        // code is the same.
        cargo("clippy -p twheel-ebpf -- -Dwarnings"),
        // What is left of the timers without the standard library.
        cargo("clippy -p twheel-timers --no-default-features -- -Dwarnings"),
        cargo(&format!("clippy {HOST} --all-targets -- -Dwarnings")),
        // What is left without the export to Kafka.
        cargo(&format!(
            "clippy {without_kafka} --bin twheel -- -Dwarnings"
        )),
        cargo(&format!("doc {HOST} --no-deps")),
    ]
}

/// Checks formatting, lints and documentation; all warnings count.
pub fn lint() -> Result<()> {
    say!("Checking formatting, lints and documentation; this usually takes 3 min the first time.");
    sources()?;
    dashboards::check()?;
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    for mut command in commands(true) {
        // Those of all packages build librdkafka.
        if command.get_args().any(|it| it == "--workspace") {
            setup::kafka()?;
        }
        sh::run(&mut command)?;
    }
    oldest_rust()
}

/// Checks `twheel-timers` with the oldest compiler that it promises, if that is installed.
fn oldest_rust() -> Result<()> {
    let manifest = sh::workspace().join("twheel-common/timers/Cargo.toml");
    let text = fs::read_to_string(&manifest);
    let text = text.with_context(|| format!("cannot read {}", manifest.display()))?;
    let manifest: toml::Table = text
        .parse()
        .context("cannot read the manifest of twheel-timers")?;
    let oldest = manifest["package"]["rust-version"].as_str();
    let oldest = format!("{}.0", oldest.context("twheel-timers has no rust-version")?);
    let rustup = |args: &str| {
        let mut rustup = Command::new("rustup");
        rustup.current_dir(sh::workspace());
        rustup.args(["run", &oldest, "cargo"]).args(args.split(' '));
        rustup
    };
    if !rustup("--version")
        .output()
        .is_ok_and(|it| it.status.success())
    {
        say!("Rust {oldest} is not installed: twheel-timers is not checked with it.");
        return Ok(());
    }
    let mut check = rustup("check --quiet -p twheel-timers --all-features --target-dir");
    sh::run(check.arg(sh::target("oldest-rust")))
}

/// Fails if a source file is too long, or if the documentation of a crate's root does not name all
/// its modules.
fn sources() -> Result<()> {
    let mut files = Vec::new();
    find(sh::workspace(), &mut files)?;
    files.sort();
    let mut wrong = Vec::new();
    for file in &files {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(sh::workspace()).unwrap_or(file);
        let lines = text.lines().count();
        if lines > MOST_LINES && !TABLES.iter().any(|(table, _)| Path::new(table) == name) {
            wrong.push(format!(
                "{} has {lines} lines, more than {MOST_LINES}: divide it",
                name.display()
            ));
        }
        if has_idle_example(file, &text)? {
            wrong.push(format!(
                "{} has an example that is not tested: delete `doctest = false` in its Cargo.toml",
                name.display()
            ));
        }
        let unnamed = if is_root(file) {
            unnamed(&text)
        } else {
            Vec::new()
        };
        if !unnamed.is_empty() {
            wrong.push(format!(
                "{} does not name all modules in its documentation: {}",
                name.display(),
                unnamed.join(", ")
            ));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Whether an example in the documentation of a file would not be tested: a block of code, where the
/// manifest of the crate says `doctest = false`.
fn has_idle_example(file: &Path, text: &str) -> Result<bool> {
    let mut in_block = false;
    let mut has_example = false;
    for line in text.lines().map(str::trim_start) {
        let doc = line.strip_prefix("//!").or(line.strip_prefix("///"));
        if let Some(language) = doc.and_then(|it| it.trim_start().strip_prefix("```")) {
            let is_code =
                |word: &str| !["text", "ignore", "sh", "toml", "json", "c"].contains(&word);
            has_example |= !in_block && language.split(',').all(is_code);
            in_block = !in_block;
        }
    }
    if !has_example {
        return Ok(false);
    }
    let manifests = file.ancestors().map(|it| it.join("Cargo.toml"));
    let manifest = manifests
        .into_iter()
        .find(|it| it.exists())
        .context("a source file is in no crate")?;
    let text = fs::read_to_string(&manifest);
    let text = text.with_context(|| format!("cannot read {}", manifest.display()))?;
    let manifest: toml::Table = text.parse().context("cannot read a manifest")?;
    let doctest = manifest.get("lib").and_then(|lib| lib.get("doctest"));
    Ok(doctest.and_then(toml::Value::as_bool) == Some(false))
}

/// Finds source files below a directory, except in built and hidden directories.
fn find(directory: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                find(&path, into)?;
            }
        } else if name.ends_with(".rs") {
            into.push(path);
        }
    }
    Ok(())
}

/// Whether a file is the root of a library, or of a program that has none.
fn is_root(file: &Path) -> bool {
    match file.parent() {
        Some(source) if source.ends_with("src") => {
            file.ends_with("lib.rs") || file.ends_with("main.rs") && !source.join("lib.rs").exists()
        }
        _ => false,
    }
}

/// The modules that a root declares and its documentation does not name, as `name`, or as a file or
/// directory.
fn unnamed(root: &str) -> Vec<&str> {
    let index: String = root
        .lines()
        .filter(|line| line.starts_with("//!"))
        .collect();
    let declared = root.lines().filter_map(|line| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        line.strip_prefix("mod ")?.strip_suffix(';')
    });
    declared
        .filter(|name| {
            // `mod@` if a macro has the same name.
            let known = ["", ".rs", "/"].map(|end| format!("`{name}{end}`"));
            let known = known.into_iter().chain([format!("`mod@{name}`")]);
            !known.into_iter().any(|it| index.contains(&it))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{has_idle_example, unnamed};
    use crate::sh;

    #[test]
    fn an_example_that_is_not_tested_is_found() {
        let example = "/// As here:\n///\n/// ```\n/// assert!(true);\n/// ```\nfn a() {}\n";
        let is_idle =
            |file: &str, text| has_idle_example(&sh::workspace().join(file), text).unwrap();
        assert!(is_idle("twheel-user/src/lib.rs", example));
        assert!(!is_idle("twheel-common/timers/src/lib.rs", example));
        let text = example.replace("/// ```\n/// a", "/// ```text\n/// a");
        assert!(!is_idle("twheel-user/src/lib.rs", &text));
    }

    #[test]
    fn a_module_that_no_index_names_is_found() {
        let root = "//! | [`a`], `b.rs` |\n//! | `c/`, [`mod@e`] |\n\nmod a;\npub mod b;\nmod c;\npub mod d;\nmod e;\nmod tests {\n";
        assert_eq!(unnamed(root), ["d"]);
    }
}
