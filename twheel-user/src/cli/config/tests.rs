use std::collections::BTreeSet;

use super::{file::options, *};
use crate::failure::exit_code;

/// Parses a file's text.
fn parse(text: &str) -> Result<Vec<file::Set>> {
    File::parse("f", text.as_bytes(), &run_command()).map(|file| file.options)
}

/// What is said of a text that is refused.
fn refused(text: &str) -> String {
    let error = parse(text).err().unwrap_or_else(|| panic!("{text}"));
    assert_eq!(exit_code(&error), Kind::Usage as u8);
    error.to_string()
}

fn example() -> String {
    let mut text = Vec::new();
    example::write(&run_command(), &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// The example, with each option in force and each switch on.
fn everything() -> String {
    let example = example();
    let lines = example.lines();
    let lines = lines.filter_map(|line| line.strip_prefix('#').filter(|it| !it.starts_with(' ')));
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("\n").replace("= false", "= true")
}

#[test]
fn the_example_changes_nothing() {
    assert_eq!(parse(&example()).unwrap(), []);
    for line in example().lines() {
        assert!(line.chars().count() <= 130, "{line}");
    }
}

#[test]
fn every_option_of_run_can_be_set() {
    let set = parse(&everything()).unwrap();
    let command = run_command();
    let known: BTreeSet<_> = options(&command)
        .map(|arg| arg.get_long().unwrap())
        .collect();
    let names: BTreeSet<_> = set.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, known);
    // Each is what the command line would say.
    let arguments = set.iter().flat_map(|it| &it.arguments);
    let matches = command.try_get_matches_from(arguments).unwrap();
    for arg in options(&run_command()) {
        let source = matches.value_source(arg.get_id().as_str());
        assert_eq!(source, Some(ValueSource::CommandLine), "{arg}");
    }
}

#[test]
fn values_are_what_the_command_line_has() {
    let set = parse(
        "iface = [\"eth0\", \"eth1\"]\nkeep = true\nnat = false\nmax-flows = 1_000\nmetrics = 9435\n\
         protect = \"dport == 22\"\n",
    );
    let arguments: Vec<_> = set
        .unwrap()
        .into_iter()
        .flat_map(|it| it.arguments)
        .collect();
    assert_eq!(
        arguments,
        [
            "--iface=eth0",
            "--iface=eth1",
            "--keep",
            "--max-flows=1000",
            "--metrics=9435",
            "--protect=dport == 22"
        ]
    );
}

#[test]
fn what_is_wrong_is_said_with_file_line_and_key() {
    for (text, said) in [
        (
            "\nmax_flows = 1",
            "f:2:1: unknown option `max_flows`: write max-flows",
        ),
        (
            "acounting = true",
            "f:1:1: unknown option `acounting`: write accounting",
        ),
        (
            "config = \"x\"",
            "f:1:1: unknown option `config`: `twheel config example` prints all options",
        ),
        (
            "[qq]\nkeep = true",
            "f:1:2: unknown option `qq`: `twheel config example` prints all options",
        ),
        ("keep = 1", "f:1:8: keep is an integer: write true or false"),
        (
            "max-flows = true",
            "f:1:13: max-flows is a boolean: write a string, or a decimal number, such as max-flows = 131072",
        ),
        (
            "iface = [\"eth0\",\n true]",
            "f:2:2: iface is a boolean: write a string, or an array of strings, such as iface = [\"eth0\", \"eth1\"]",
        ),
        (
            "slots = 0x10",
            "f:1:9: slots is an integer: write a string, or a decimal number, such as slots = 1024",
        ),
        (
            "tick = [\"1s\"]",
            "f:1:8: tick is an array: write a string, or a decimal number, such as tick = \"100ms\"",
        ),
        (
            "iface = []",
            "f:1:9: iface is an empty array: fill it, or remove the line",
        ),
        (
            "tick = \"soon\"",
            "f:1:8: tick = `soon`: give a duration with its unit, such as 150ms, 30s, 10m, 2h or 1d",
        ),
        ("rto = \"yes\"", "f:1:7: rto = `yes`: write one of on, off"),
        (
            "reap-rate = 0",
            "f:1:13: reap-rate = `0`: give 1 to 1000000",
        ),
        ("keep = true\nkeep = true", "f:2:1: not TOML: duplicate key"),
    ] {
        assert_eq!(refused(text), said, "{text}");
    }
}

fn arguments(line: &[&str]) -> Result<Option<Vec<String>>> {
    let matches = Cli::command().try_get_matches_from(line)?;
    let arguments = from_files(&matches)?;
    Ok(arguments.map(|it| it.into_iter().map(|it| it.into_string().unwrap()).collect()))
}

#[test]
fn the_command_line_wins_over_files_and_later_files_over_earlier_ones() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(
        path("a"),
        "iface = [\"eth0\", \"eth1\"]\ntick = \"1s\"\nslots = 64\njson = true",
    )
    .unwrap();
    std::fs::write(path("b"), "tick = \"2s\"\nnetns = \"blue\"").unwrap();
    let [a, b, none] = ["a", "b", "none"].map(|name| format!("--config={}", path(name)));
    assert_eq!(
        arguments(&["twheel", "run", "--iface", "lo"]).unwrap(),
        None
    );
    let both = arguments(&["twheel", "run", &a, &b, "--iface", "lo", "--slots=128"]).unwrap();
    assert_eq!(both.unwrap(), ["--json", "--tick=2s", "--netns=blue"]);
    // Of doctor, what it knows, and its own output.
    let doctor = arguments(&["twheel", "doctor", &a, &b]).unwrap();
    let expected = ["--iface=eth0", "--iface=eth1", "--slots=64", "--tick=2s"];
    assert_eq!(doctor.unwrap(), expected);

    let missing = arguments(&["twheel", "run", &none])
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("/none: cannot be read: ")
            && missing.contains("give a configuration file")
    );
    let maybe = none.replace("--config=", "--config=-");
    assert_eq!(
        arguments(&["twheel", "run", &maybe]).unwrap(),
        Some(Vec::new())
    );
}

/// Checks a file as `twheel config check` does, and returns what that prints.
fn check(text: &str, interfaces: &[&str]) -> Result<String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("f");
    std::fs::write(&path, text).unwrap();
    let check = Check {
        files: vec![path],
        interfaces: interfaces.iter().map(|&it| it.to_owned()).collect(),
    };
    let mut out = Vec::new();
    check.execute(&mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

#[test]
fn check_prints_the_command_line_and_finds_contradictions() {
    let line = check("keep = true\nprotect = \"dport == 22\"", &["eth0"]).unwrap();
    assert_eq!(
        line,
        "twheel run --iface=eth0 --keep '--protect=dport == 22'\n"
    );
    assert_eq!(check("", &[]).unwrap(), "twheel run\n");
    let both = check("mode = \"native\"\nhook = \"tcx\"", &[]).unwrap_err();
    assert!(
        both.to_string().contains("--mode sets where XDP runs"),
        "{both}"
    );
    let policy = check("policy = \"/nonexistent\"", &[]).unwrap_err();
    assert!(
        policy.to_string().contains("/nonexistent: cannot be read"),
        "{policy}"
    );
}
