//! A configuration file with every option.

use std::io::{self, Write};

use clap::{Arg, ArgAction, Command};

use super::file::options;
use crate::output::table::wrapped;

const HEAD: &str = "\
# Configuration of `twheel run`. An option is a line: its long name, = and a value. Text stands in
# quotes. What may be repeated may be an array of strings. A line that begins with # shows the
# default, or, where the help names none, an example.
#
# Options of the command line win over those of a file. Check a file with `twheel config check FILE`;
# `systemctl restart twheel@eth0` puts it into force, and keeps the flows.
";
/// Longest line of help.
const WIDTH: usize = 98;

/// Values for the options that have no default.
const VALUES: [(&str, &str); 26] = [
    ("iface", "[\"eth0\", \"eth1\"]"),
    ("exclude", "\"veth0\""),
    ("netns", "\"all\""),
    ("mode", "\"native\""),
    ("order", "\"first\""),
    ("tick", "\"100ms\""),
    ("timeout", "\"established=1h,syn_sent=20s\""),
    ("zone", "[\"eth0=1\", \"eth1=2\"]"),
    ("active-timeout", "\"60s\""),
    ("policy", "\"/etc/twheel/policy.toml\""),
    ("slots", "1024"),
    ("levels", "3"),
    ("metrics", "\"127.0.0.1:9435\""),
    ("offload", "\"/run/twheel/offload\""),
    ("offload-limit", "100000"),
    ("offload-program-limit", "50000"),
    ("group", "\"twheel\""),
    ("stepping", "\"live-frames\""),
    ("protect", "[\"dport == 22\"]"),
    ("rto-min", "\"200ms\""),
    ("rto-max", "\"2m\""),
    ("max-retrans", "3"),
    ("reap-rate", "100"),
    ("reap-max-share", "20"),
    ("enforce-rate", "10"),
    ("reap-netns", "\"blue\""),
];

/// Writes the file.
pub(super) fn write(command: &Command, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{HEAD}")?;
    let mut heading = None;
    for arg in options(command) {
        let Some(name) = arg.get_long() else { continue };
        if arg.get_help_heading() != heading {
            heading = arg.get_help_heading();
            writeln!(out, "\n# {}", heading.unwrap_or("Options"))?;
        }
        writeln!(out)?;
        let help = arg.get_long_help().or(arg.get_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        let words: Vec<_> = help.split_whitespace().collect();
        for line in wrapped(&words.join(" "), WIDTH) {
            writeln!(out, "# {line}")?;
        }
        let values: Vec<_> = match arg.get_action() {
            ArgAction::SetTrue => Vec::new(),
            _ => arg.get_possible_values(),
        };
        for value in values.iter().filter(|it| !it.is_hide_set()) {
            let help = value.get_help().map(ToString::to_string);
            writeln!(
                out,
                "# - {}: {}",
                value.get_name(),
                help.unwrap_or_default()
            )?;
        }
        writeln!(out, "#{name} = {}", value(name, arg).unwrap_or_default())?;
    }
    Ok(())
}

/// An option's default, or an example of a value, as TOML.
pub(super) fn value(name: &str, arg: &Arg) -> Option<String> {
    if let ArgAction::SetTrue = arg.get_action() {
        return Some("false".to_owned());
    }
    if let Some((_, value)) = VALUES.iter().find(|(known, _)| *known == name) {
        return Some((*value).to_owned());
    }
    let default = arg.get_default_values().first()?.to_str()?;
    Some(match default.parse::<u32>() {
        Ok(number) => number.to_string(),
        Err(_) => format!("\"{default}\""),
    })
}
