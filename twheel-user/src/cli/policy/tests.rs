//! What `twheel policy check` says.

use clap::Parser;

use super::*;
use crate::failure::exit_code;

const POLICY: &str = r#"
[timeouts]
syn_sent = "20s"

[[rule]]
name = "ssh"
dport = 22
src = "10.0.0.0/8"
timeouts = { established = "5d" }

[[rule]]
name = "dns"
dport = 53
proto = "udp"
iface = "eth0"
"#;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    check: Check,
}

fn report(arguments: &[&str]) -> Result<String> {
    let policy = Rules::parse(
        "p.toml",
        POLICY.as_bytes(),
        Duration::from_millis(100)..=Duration::from_secs(1 << 20),
    )?;
    let line = ["check", "p.toml"].iter().chain(arguments);
    let mut out = Vec::new();
    Arguments::try_parse_from(line)?
        .check
        .report(&policy, &mut out)?;
    Ok(String::from_utf8(out)?)
}

#[test]
fn a_file_is_listed() {
    assert_eq!(
        report(&[]).unwrap(),
        "\
p.toml: 2 rules, ok

rule  line  name  conditions; timeouts
   1     5  ssh   dport 22 src 10.0.0.0/8; syn_sent 20s established 5d
   2    11  dns   proto udp iface eth0 dport 53; syn_sent 20s
   -     -  -     no rule; syn_sent 20s
"
    );
    let json: Value = serde_json::from_str(&report(&["--json"]).unwrap()).unwrap();
    assert_eq!(
        json["rules"][0]["timeouts_us"]["established"],
        432_000_000_000_u64
    );
    assert_eq!(json["rules"][1]["conditions"][0], "proto udp");
}

#[test]
fn a_flow_is_told_its_rule_and_why_none_before() {
    let flow = [
        "--proto",
        "tcp",
        "--src",
        "10.1.2.3:999",
        "--dst",
        "192.0.2.1:22",
    ];
    assert_eq!(
        report(&flow).unwrap(),
        "\
rule 1 `ssh`, p.toml:5
  syn_sent     20s
  established  5d
  others       as without a policy
"
    );
    let flow = [
        "--proto",
        "udp",
        "--dst",
        "[2001:db8::1]:53",
        "--iface",
        "eth0",
    ];
    let text = report(&flow).unwrap();
    assert!(text.starts_with("rule 2 `dns`, p.toml:11\n"), "{text}");
    assert!(
        text.ends_with("not rule 1 `ssh` (line 5): dport: not 53\n"),
        "{text}"
    );
    let flow = ["--proto", "icmp", "--json"];
    let json: Value = serde_json::from_str(&report(&flow).unwrap()).unwrap();
    assert!(json.get("rule").is_none());
    assert_eq!(json["not"][0]["failed"], "dport: icmp has no ports");
    assert_eq!(json["not"][1]["failed"], "proto: not icmp");
    assert_eq!(json["timeouts_us"], json!({ "syn_sent": 20_000_000 }));
}

#[test]
fn what_the_answer_depends_on_is_asked_for() {
    let cases: [(&[&str], &str); 5] = [
        (
            &["--dst", "192.0.2.1:22", "--proto", "tcp"],
            "depends on src: give --src too",
        ),
        (
            &["--src", "10.0.0.1", "--proto", "tcp"],
            "depends on dport: give --dst with a port too",
        ),
        (
            &["--src", "10.0.0.1", "--dst", "192.0.2.1:22"],
            "depends on proto: give --proto too",
        ),
        (&["--src", "10.0.0.1", "--dst", "::1"], "one family"),
        (
            &["--proto", "icmp", "--dst", "10.0.0.1:1"],
            "icmp has no ports",
        ),
    ];
    for (arguments, part) in cases {
        let error = report(arguments).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        assert_eq!(exit_code(&error), Kind::Usage as u8);
    }
}

#[test]
fn vlans_and_zones_are_told_apart() {
    const POLICY: &str = r#"
[[rule]]
name = "tagged"
vlan = [10, 20]
zone = 7
[[rule]]
name = "untagged"
vlan = 0
"#;
    let report = |arguments: &[&str]| {
        let allowed = Duration::from_millis(100)..=Duration::from_secs(1 << 20);
        let policy = Rules::parse("p.toml", POLICY.as_bytes(), allowed)?;
        let line = ["check", "p.toml"].iter().chain(arguments);
        let mut out = Vec::new();
        Arguments::try_parse_from(line)?
            .check
            .report(&policy, &mut out)?;
        anyhow::Ok(String::from_utf8(out)?)
    };
    let listed = report(&[]).unwrap();
    assert!(
        listed.contains("tagged    vlan 10,20 zone 7; as"),
        "{listed}"
    );
    for (arguments, begin, end) in [
        (
            &["--vlan", "20", "--zone", "7"][..],
            "rule 1 `tagged`",
            "policy\n",
        ),
        (
            &["--vlan", "30,10", "--zone", "7"],
            "rule 1 `tagged`",
            "policy\n",
        ),
        (
            &["--vlan", "0", "--zone", "7"],
            "rule 2 `untagged`",
            "not rule 1 `tagged` (line 2): vlan: not 0\n",
        ),
        (
            &["--vlan", "10", "--zone", "0"],
            "no rule\n",
            "not rule 1 `tagged` (line 2): zone: not 0\nnot rule 2 `untagged` (line 6): vlan: not 10\n",
        ),
        (
            &["--vlan", "30,40", "--zone", "7"],
            "no rule\n",
            "(line 2): vlan: not 30,40\nnot rule 2 `untagged` (line 6): vlan: not 30,40\n",
        ),
    ] {
        let found = report(arguments).unwrap();
        assert!(found.starts_with(begin), "{arguments:?}: {found}");
        assert!(found.ends_with(end), "{arguments:?}: {found}");
    }
    for (arguments, part) in [
        (&["--zone", "7"], "depends on vlan: give --vlan too"),
        (&["--vlan", "10"], "depends on zone: give --zone too"),
        (&["--vlan", "4095"], "give a VLAN identifier from 1 to 4094"),
        (&["--vlan", "10,20,30"], "give a VLAN identifier"),
        (&["--zone", "65536"], "give 0 to 65535"),
    ] {
        let error = report(arguments).unwrap_err().to_string();
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}

#[test]
fn ends_have_a_port_or_none() {
    let v6 = "2001:db8::1".parse().unwrap();
    assert_eq!(end("2001:db8::1"), Ok(Endpoint(v6, None)));
    assert_eq!(end("[2001:db8::1]"), Ok(Endpoint(v6, None)));
    assert_eq!(end("[2001:db8::1]:22"), Ok(Endpoint(v6, Some(22))));
    assert_eq!(
        end("10.0.0.1:22"),
        Ok(Endpoint("10.0.0.1".parse().unwrap(), Some(22)))
    );
    for text in [
        "",
        "10.0.0.1:",
        "10.0.0.1:65536",
        "a.example:22",
        "[10.0.0.1",
    ] {
        assert!(end(text).is_err(), "{text}");
    }
}
