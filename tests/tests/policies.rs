//! The policies in `dist/policies` are accepted, and give the flows for which they were written the
//! rule, the timeout and the actions that they promise.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use twheel_tests::running::{once, twheel_bin};

/// What becomes of a flow.
struct Fate {
    /// Its protocol, the address that begins it, its other end, and its direction.
    flow: [&'static str; 4],
    /// The rule that it meets; empty if it meets none.
    rule: &'static str,
    /// The timeout while it is established.
    established: &'static str,
    /// What is done when it has expired.
    reap: &'static str,
}

const fn fate(
    flow: [&'static str; 4],
    rule: &'static str,
    established: &'static str,
    reap: &'static str,
) -> Fate {
    Fate {
        flow,
        rule,
        established,
        reap,
    }
}

/// The visitors' side of an address of a documentation network.
const VISITOR: &str = "198.51.100.7";

/// The policies, and flows that they tell apart.
const POLICIES: [(&str, &[Fate]); 4] = [
    (
        "web-server.toml",
        &[
            fate(
                ["tcp", VISITOR, "192.0.2.1:443", "in"],
                "visitors",
                "10m",
                "socket cgroup /system.slice/nginx.service",
            ),
            fate(
                ["udp", VISITOR, "192.0.2.1:443", "in"],
                "visitors-quic",
                "",
                "none",
            ),
            fate(["tcp", VISITOR, "192.0.2.1:22", "in"], "ssh", "5d", "none"),
            fate(
                ["tcp", VISITOR, "192.0.2.1:8443", "in"],
                "websocket",
                "2h",
                "none",
            ),
            fate(
                ["tcp", "192.0.2.1", "10.0.0.2:8080", "out"],
                "backends",
                "1h",
                "none",
            ),
            // What the web server itself asks of others is no visitor's.
            fate(
                ["tcp", "192.0.2.1", "198.51.100.9:443", "out"],
                "",
                "",
                "none",
            ),
        ],
    ),
    (
        "nat-gateway.toml",
        &[
            fate(
                ["tcp", "192.168.1.7", "198.51.100.9:443", "in"],
                "",
                "124m",
                "conntrack",
            ),
            fate(
                ["tcp", "192.168.50.7", "198.51.100.9:443", "in"],
                "guests",
                "124m",
                "reset,conntrack",
            ),
            fate(
                ["udp", "192.168.50.7", "198.51.100.9:443", "in"],
                "",
                "124m",
                "conntrack",
            ),
            fate(
                ["udp", "192.168.50.7", "198.51.100.9:53", "in"],
                "dns",
                "2m",
                "conntrack",
            ),
            fate(
                ["tcp", "192.168.1.7", "198.51.100.9:5228", "in"],
                "long-lived",
                "1d",
                "conntrack",
            ),
            fate(
                ["tcp", "192.168.1.7", "192.168.1.1:22", "in"],
                "own",
                "5d",
                "none",
            ),
        ],
    ),
    (
        "database-proxy.toml",
        &[
            fate(
                ["tcp", "10.1.0.7", "10.0.0.2:6432", "in"],
                "clients",
                "30m",
                "socket cgroup /system.slice/pgbouncer.service,/system.slice/haproxy.service",
            ),
            fate(
                ["tcp", "10.9.0.7", "10.0.0.2:6432", "in"],
                "admins",
                "1d",
                "none",
            ),
            fate(
                ["tcp", "10.0.0.2", "10.0.0.3:5432", "out"],
                "servers",
                "50m",
                "none",
            ),
            fate(["tcp", "10.1.0.7", "10.0.0.2:22", "in"], "", "", "none"),
        ],
    ),
    (
        "kubernetes-node.toml",
        &[
            fate(
                ["tcp", "10.244.1.7", "10.96.0.1:6443", "out"],
                "cluster",
                "1d",
                "none",
            ),
            fate(
                ["tcp", "10.0.0.2", "10.0.0.3:10250", "in"],
                "cluster",
                "1d",
                "none",
            ),
            fate(
                ["tcp", "10.0.0.2", "10.0.0.3:22", "in"],
                "ssh",
                "5d",
                "none",
            ),
            fate(
                ["udp", "10.244.1.7", "10.244.0.2:53", "in"],
                "dns",
                "1m",
                "conntrack",
            ),
            fate(
                ["tcp", VISITOR, "10.0.0.3:30443", "in"],
                "node-ports",
                "1h",
                "conntrack",
            ),
            fate(
                ["tcp", "10.244.1.7", "10.244.2.9:8080", "in"],
                "web",
                "1h",
                "conntrack",
            ),
            // HTTP/3 and what else goes by UDP has the kernel's timeouts.
            fate(
                ["udp", "10.244.1.7", "10.244.2.9:8080", "in"],
                "",
                "1d",
                "none",
            ),
            fate(
                ["tcp", "10.244.1.7", "10.244.2.9:5432", "in"],
                "",
                "1d",
                "none",
            ),
        ],
    ),
];

fn directory() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/policies"))
}

/// What `twheel policy check` prints of a policy, with these other arguments.
fn check(policy: &str, args: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new(twheel_bin()?);
    command.args(["policy", "check"]);
    let ended = once({
        command.arg(directory().join(policy)).args(args);
        command
    })?;
    ensure!(ended.code() == Some(0), "{policy} {args:?}: {ended:?}");
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// The rest of the line that begins with a word, or nothing.
fn value<'a>(lines: &'a [String], word: &str) -> &'a str {
    let rest = lines
        .iter()
        .find_map(|line| line.trim_start().strip_prefix(word)?.strip_prefix(' '));
    rest.unwrap_or_default().trim()
}

#[test]
fn each_policy_is_tested_here() -> Result<()> {
    let mut found: Vec<_> = fs::read_dir(directory())?
        .map(|entry| Ok(entry?.file_name().into_string().unwrap_or_default()))
        .collect::<Result<_>>()?;
    found.sort();
    let mut tested: Vec<_> = POLICIES.iter().map(|(name, _)| name.to_string()).collect();
    tested.sort();
    ensure!(found == tested, "{found:?}");
    Ok(())
}

#[test]
fn flows_meet_the_rules_that_were_written_for_them() -> Result<()> {
    for (policy, fates) in POLICIES {
        for Fate {
            flow: [proto, src, dst, direction],
            rule,
            established,
            reap,
        } in fates
        {
            let args = [
                "--proto",
                proto,
                "--src",
                src,
                "--dst",
                dst,
                "--direction",
                direction,
            ];
            let printed = check(policy, &args)?;
            let line = printed
                .iter()
                .find(|line| line.starts_with("rule ") && line.contains('`') || *line == "no rule")
                .with_context(|| format!("{policy} {args:?}: no rule is named: {printed:#?}"))?;
            let met = line.split('`').nth(1).unwrap_or_default();
            let is = (met, value(&printed, "established"), value(&printed, "reap"));
            ensure!(
                is == (*rule, *established, *reap),
                "{policy} {args:?}: {is:?}: {printed:#?}"
            );
        }
    }
    Ok(())
}

/// A rule that no flow of the test meets is not tested.
#[test]
fn each_rule_is_met() -> Result<()> {
    for (policy, fates) in POLICIES {
        let text = fs::read_to_string(directory().join(policy))?;
        let names = text.lines().filter_map(|line| line.strip_prefix("name = "));
        for name in names.map(|name| name.trim_matches('"')) {
            ensure!(
                fates.iter().any(|fate| fate.rule == name),
                "{policy}: no flow meets {name}"
            );
        }
    }
    Ok(())
}
