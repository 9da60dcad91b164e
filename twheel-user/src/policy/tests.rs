use twheel_common::policy::{
    Dimensions, MAX_RULES, Rules, Tables, TimeoutName, Tuple, first_match,
};

use super::*;
use crate::failure::exit_code;

const ALLOWED: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(1_000_000);

fn parse(text: &str) -> Result<Policy> {
    Policy::parse("p", text.as_bytes(), ALLOWED)
}

/// Rules `r1`, `r2`, … of these conditions, a line each.
fn rules(conditions: &[&str]) -> String {
    let mut text = String::new();
    for (number, conditions) in (1..).zip(conditions) {
        let comma = if conditions.is_empty() { "" } else { ", " };
        let number: usize = number;
        text += &format!("  {{ name = \"r{number}\"{comma}{conditions} }},\n");
    }
    format!("rule = [\n{text}]\n")
}

fn refused(text: &[u8], error: &str) {
    let found = Policy::parse("p", text, ALLOWED).unwrap_err();
    let text = String::from_utf8_lossy(text);
    assert_eq!(exit_code(&found), Kind::Usage as u8, "{text}");
    let found = found.to_string();
    assert!(
        found.starts_with(error),
        "of:\n{text}\nfound:  {found}\nwanted: {error}"
    );
}

#[test]
fn all_that_a_file_may_say_is_understood() {
    let policy = parse(
        r#"
        [timeouts]
        established = "1h"
        syn_sent = "20s"

        [[rule]]
        name = "ssh"
        dport = [22, "8000-8099"]
        src = "10.0.0.0/8"
        dst = ["192.0.2.0/24", "2001:db8::/32"]
        any = "10.1.0.0/16"
        iface = ["eth0", "eth1"]
        vlan = [10, 0, 4094]
        zone = 7
        direction = "in"
        proto = "tcp"
        timeouts = { established = "5d", close = "2s" }

        [[rule]]
        name = "rest"
        [rule.timeouts]
        udp = "150ms"
        "#,
    )
    .unwrap();
    let [ssh, rest] = &policy.rules[..] else {
        panic!("{policy:?}");
    };
    let network = |text| Network::parse(text).unwrap();
    assert_eq!(
        (ssh.name.as_str(), ssh.place),
        ("ssh", Place { line: 6, column: 9 })
    );
    assert_eq!(ssh.ports, Some(vec![22..=22, 8000..=8099]));
    assert_eq!(ssh.source, Some(vec![network("10.0.0.0/8")]));
    assert_eq!(
        ssh.destination,
        Some(vec![network("192.0.2.0/24"), network("2001:db8::/32")])
    );
    assert_eq!(ssh.either, Some(vec![network("10.1.0.0/16")]));
    let place = |column| Place { line: 12, column };
    let interfaces = vec![
        ("eth0".to_owned(), place(18)),
        ("eth1".to_owned(), place(26)),
    ];
    assert_eq!(ssh.interfaces, Some(interfaces));
    assert_eq!(ssh.vlans, Some(vec![10, 0, 4094]));
    let place = Place {
        line: 14,
        column: 16,
    };
    assert_eq!(ssh.zones, Some(vec![(7, place)]));
    assert_eq!(
        (ssh.hook, &ssh.protocols),
        (Some(Hook::Ingress), &Some(vec![Protocol::Tcp]))
    );
    let secs = |secs| Some(Duration::from_secs(secs));
    let timeouts = |named: &[(TimeoutName, Option<Duration>)]| {
        let mut timeouts = [None; TIMEOUTS];
        named
            .iter()
            .for_each(|(name, timeout)| timeouts[*name as usize] = *timeout);
        timeouts
    };
    use TimeoutName as T;
    let common = [(T::Established, secs(3_600)), (T::SynSent, secs(20))];
    assert_eq!(policy.timeouts, timeouts(&common));
    let of_ssh = [
        (T::Established, secs(432_000)),
        (T::SynSent, secs(20)),
        (T::Close, secs(2)),
    ];
    assert_eq!(ssh.timeouts, timeouts(&of_ssh));
    let of_rest = [
        common[0],
        common[1],
        (T::Udp, Some(Duration::from_millis(150))),
    ];
    assert_eq!(rest.timeouts, timeouts(&of_rest));
    assert!(rest.conditions().is_empty());
}

#[test]
fn an_empty_policy_has_no_rules() {
    for text in ["", "# nothing\n", "rule = []"] {
        let policy = parse(text).unwrap();
        let compiled = policy.compile(|_| None).unwrap();
        assert_eq!(compiled.header(), &Default::default());
        assert!(compiled.header().protocols.iter().all(|set| set.is_empty()));
    }
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let cases = [
        // TOML itself.
        ("[[rule]]\nname = \n", "p:2:8: not TOML: "),
        (
            "[timeouts]\nudp = \"1s\"\nudp = \"2s\"",
            "p:3:1: not TOML: duplicate key",
        ),
        // Unknown keys.
        (
            "\n  tiemouts = 1",
            "p:2:3: unknown key `tiemouts`: there are timeouts, reap, rule",
        ),
        (
            "[[rule]]\nname = \"a\"\nsport = 1",
            "p:3:1: unknown key `sport`: there are name, dport, src, dst, any, iface, vlan, zone, ",
        ),
        (
            "[timeouts]\nsyn = \"1s\"",
            "p:2:1: unknown key `syn`: there are syn_sent, ",
        ),
        // Names.
        ("\n[[rule]]\ndport = 1", "p:2:1: this rule has no name"),
        (
            "[[rule]]\nname = \"a b\"",
            "p:2:8: name `a b`: give 1 to 64 letters",
        ),
        ("[[rule]]\nname = \"\"", "p:2:8: name ``: "),
        ("[[rule]]\nname = \"ä\"", "p:2:8: name `ä`: "),
        (
            "[[rule]]\nname = \"a\"\ndport = 1\n[[rule]]\nname = \"a\"",
            "p:5:8: the rule of line 1 is called `a` too",
        ),
    ];
    for (text, error) in cases {
        refused(text.as_bytes(), error);
    }
    let long = format!("[[rule]]\nname = \"{}\"", "a".repeat(65));
    refused(long.as_bytes(), "p:2:8: name `aaa");
    // Conditions and timeouts: the rest of a rule's third line.
    let cases = [
        // Types.
        (
            "dport = true",
            "p:3:9: dport is a boolean: give a port such as 22",
        ),
        ("dport = 1.5", "p:3:9: dport is a float: "),
        ("dport = [[1]]", "p:3:10: dport is an array: "),
        ("src = 10", "p:3:7: src is an integer: "),
        ("dst = [\"::1\", {}]", "p:3:15: dst is a table: "),
        ("any = 1979-05-27", "p:3:7: any is a datetime: "),
        (
            "iface = 1",
            "p:3:9: iface is an integer: give the name of an interface",
        ),
        (
            "direction = [\"in\"]",
            "p:3:13: direction is an array: give \"in\" or \"out\"",
        ),
        (
            "reap = \"socket\"",
            "p:3:8: reap is a string: give a list of enforce=drop, enforce=reset, reset",
        ),
        (
            "reap = [\"socket\", \"close\"]",
            "p:3:19: reap `close`: give a list of enforce",
        ),
        (
            "reap = [\"enforce\", \"enforce=reset\"]",
            "p:3:8: reap: packets are dropped or answered, not both",
        ),
        ("proto = 6", "p:3:9: proto is an integer: give \"tcp\""),
        (
            "timeouts = \"1s\"",
            "p:3:12: timeouts is a string: give a table",
        ),
        (
            "timeouts = { udp = 20 }",
            "p:3:20: udp is an integer: give a duration with its unit",
        ),
        // Ports.
        ("dport = 0", "p:3:9: dport 0: give a port"),
        ("dport = -1", "p:3:9: dport -1: give a port"),
        ("dport = 65536", "p:3:9: dport 65536: give a port"),
        ("dport = [1, \"0-9\"]", "p:3:13: dport `0-9`: "),
        ("dport = \"\"", "p:3:9: dport ``: "),
        ("dport = \"9-\"", "p:3:9: dport `9-`: "),
        ("dport = \"1-2-3\"", "p:3:9: dport `1-2-3`: "),
        ("dport = \"+1\"", "p:3:9: dport `+1`: "),
        (
            "dport = \"9-8\"",
            "p:3:9: dport `9-8` ends before it begins: give \"8-9\"",
        ),
        (
            "dport = [\"1-9\", 9]",
            "p:3:17: dport 9 overlaps 1-9 of the same rule",
        ),
        ("dport = [5, 7, \"6-8\"]", "p:3:16: dport 6-8 overlaps 7 of"),
        // Networks.
        (
            "src = \"10.0.0.1/8\"",
            "p:3:7: src: `10.0.0.1/8` has bits beyond its prefix: give 10.0.0.0/8",
        ),
        (
            "dst = [\"::1\", \"2001:db8::1/32\"]",
            "p:3:15: dst: `2001:db8::1/32` has bits beyond its prefix: give 2001:db8::/32",
        ),
        (
            "any = \"10.0.0.0/33\"",
            "p:3:7: any: `10.0.0.0/33`: the prefix length is 0 to 32",
        ),
        (
            "any = \"a.example\"",
            "p:3:7: any: `a.example` is no address or network",
        ),
        // Names that are known or not.
        ("iface = \"a/b\"", "p:3:9: iface `a/b`: "),
        (
            "iface = \"0123456789abcdef\"",
            "p:3:9: iface `0123456789abcdef`: ",
        ),
        (
            "direction = \"up\"",
            "p:3:13: direction `up`: give \"in\" or \"out\"",
        ),
        (
            "proto = [\"tcp\", \"sctp\"]",
            "p:3:17: proto `sctp`: give \"tcp\", \"udp\" or \"icmp\"",
        ),
        ("dport = 1\nproto = \"icmp\"", "p:3:9: icmp has no ports"),
        // VLANs and zones.
        (
            "vlan = '10'",
            "p:3:8: vlan is a string: give a VLAN identifier, 1 to 4094, 0 for flows in no VLAN",
        ),
        ("vlan = [10, 2.5]", "p:3:13: vlan is a float: give a VLAN"),
        ("vlan = 4095", "p:3:8: vlan 4095: give a VLAN identifier"),
        ("vlan = [1, -1]", "p:3:12: vlan -1: give a VLAN identifier"),
        (
            "vlan = 99999999999999999999",
            "p:3:8: vlan 99999999999999999999: give a VLAN",
        ),
        (
            "zone = true",
            "p:3:8: zone is a boolean: give a zone as `twheel run --zone` has it, 1 to 65535, 0 for",
        ),
        ("zone = [0, 65536]", "p:3:12: zone 65536: give a zone"),
        ("vlan = []", "p:3:8: vlan is an empty list"),
        ("zone = []", "p:3:8: zone is an empty list"),
        // Empty lists.
        ("dport = []", "p:3:9: dport is an empty list"),
        ("src = []", "p:3:7: src is an empty list"),
        ("dst = []", "p:3:7: dst is an empty list"),
        ("any = []", "p:3:7: any is an empty list"),
        ("iface = []", "p:3:9: iface is an empty list"),
        ("proto = []", "p:3:9: proto is an empty list"),
        // Timeouts.
        (
            "timeouts = { udp = \"0s\" }",
            "p:3:20: udp `0s`: give 100ms to 11days",
        ),
        (
            "timeouts = { udp = \"99ms\" }",
            "p:3:20: udp `99ms`: give 100ms to 11days",
        ),
        (
            "timeouts = { udp = \"12d\" }",
            "p:3:20: udp `12d`: give 100ms to 11days",
        ),
        ("timeouts = { udp = \"1\" }", "p:3:20: udp `1`: "),
        (
            "timeouts = { udp = \"99999999999999999999d\" }",
            "p:3:20: udp `99999999999999999999d`: ",
        ),
        ("timeouts = { tcp = \"1s\" }", "p:3:14: unknown key `tcp`: "),
    ];
    for (line, error) in cases {
        refused(format!("[[rule]]\nname = \"a\"\n{line}").as_bytes(), error);
    }
    // No range of the caller's lets a timeout of zero through.
    let text = b"[timeouts]\nudp = \"0s\"";
    let error = Policy::parse("p", text, Duration::ZERO..=Duration::MAX).unwrap_err();
    assert!(
        error.to_string().starts_with("p:2:7: udp `0s`: "),
        "{error}"
    );
    refused(b"timeouts = 1", "p:1:12: timeouts is an integer: ");
    refused(
        b"[rule]\nname = \"a\"",
        "p:1:1: rule is a table: begin each with [[rule]]",
    );
    refused(
        b"rule = [1]",
        "p:1:9: rule is an integer: begin each with [[rule]]",
    );
    // Columns are characters, not bytes.
    refused(
        "timeouts = { \"ä\" = 1 }".as_bytes(),
        "p:1:14: unknown key `ä`",
    );
    refused("rule = [{ name = 'ä' }]".as_bytes(), "p:1:18: name `ä`");
    refused(b"a = 1\n#\xc3\xa4\xff", "p:2:3: this byte is not UTF-8");
}

#[test]
fn rules_in_each_others_way_are_refused() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["", "dport = 1"],
            "p:2:3: rule `r1` restricts nothing and hides all that follow",
        ),
        (
            &[
                "src = ['0.0.0.0/1', '128.0.0.0/1', '::/0'], proto = ['tcp', 'udp', 'icmp']",
                "dport = 1",
            ],
            "p:2:3: rule `r1` restricts nothing",
        ),
        (
            &["dport = 1", "dport = 1"],
            "p:3:3: no flow can meet rule `r2`: rule `r1` of line 2 comes first",
        ),
        (
            &[
                "dport = 5",
                "dport = '1-9'",
                "src = '10.0.0.0/8', dport = [2, 3]",
            ],
            "p:4:3: no flow can meet rule `r3`: rule `r2` of line 3",
        ),
        (
            &["dport = ['1-5', '6-9']", "dport = '2-8'"],
            "p:3:3: no flow",
        ),
        (
            &[
                "src = '10.0.0.0/8'",
                "src = ['10.1.0.0/16', '10.2.0.0/16'], iface = 'a', direction = 'in'",
            ],
            "p:3:3: no flow",
        ),
        (
            &["src = ['10.0.0.0/9', '10.128.0.0/9']", "src = '10.0.0.0/8'"],
            "p:3:3: no flow",
        ),
        (
            &["dst = '0.0.0.0/0'", "src = '10.0.0.0/8'"],
            "p:3:3: no flow",
        ),
        (&["iface = ['a', 'b']", "iface = 'b'"], "p:3:3: no flow"),
        (&["vlan = [10, 20]", "vlan = 20"], "p:3:3: no flow"),
        (&["vlan = [10, 0]", "vlan = 0, dport = 1"], "p:3:3: no flow"),
        (&["zone = [7, 8]", "zone = [8, 7]"], "p:3:3: no flow"),
        (
            &["zone = 0", "zone = 0, vlan = 10"],
            "p:3:3: no flow can meet rule `r2`: rule `r1` of line 2 comes first",
        ),
        (
            &["direction = 'in'", "direction = 'in', proto = 'tcp'"],
            "p:3:3: no flow",
        ),
        (&["proto = ['tcp', 'udp']", "dport = 1"], "p:3:3: no flow"),
        // Either end.
        (
            &["any = '10.0.0.0/8'", "src = '10.1.0.0/16'"],
            "p:3:3: no flow",
        ),
        (
            &["any = '10.0.0.0/8'", "dst = '10.1.0.0/16'"],
            "p:3:3: no flow",
        ),
        (
            &["any = '10.0.0.0/8'", "any = '10.1.0.0/16'"],
            "p:3:3: no flow",
        ),
        (
            &[
                "any = '10.0.0.0/8'",
                "src = '0.0.0.0/0', any = '10.1.0.0/16'",
            ],
            "p:3:3: no flow",
        ),
        (
            &[
                "src = '10.0.0.0/8'",
                "src = '0.0.0.0/0', dst = '11.0.0.0/8', any = '10.1.0.0/16'",
            ],
            "p:3:3: no flow",
        ),
        // What no flow is.
        (
            &["src = '10.0.0.0/8', dst = '::1'"],
            "p:2:3: no flow can meet rule `r1`: src, dst and any",
        ),
        (
            &["src = '10.0.0.0/8', dst = '10.0.0.0/8', any = '11.0.0.0/8'"],
            "p:2:3: no flow can meet rule `r1`",
        ),
    ];
    for (conditions, error) in cases {
        refused(rules(conditions).as_bytes(), error);
    }
    let fine: &[&[&str]] = &[
        &[""],
        &["dport = 1", ""],
        &["dport = '1-5'", "dport = '5-6'"],
        &["dport = '1-65535'", "proto = 'icmp'"],
        &["any = '10.1.0.0/16'", "any = '10.0.0.0/8'"],
        &["src = '10.0.0.0/8'", "any = '10.0.0.0/8'"],
        &[
            "src = '10.0.0.0/8', dst = '10.0.0.0/8'",
            "any = '10.0.0.0/8'",
        ],
        &[
            "any = '10.0.0.0/8', src = '11.0.0.0/8'",
            "dst = '10.0.0.0/8'",
        ],
        &["src = '::/0'", "src = '10.0.0.0/8'"],
        &["iface = 'a'", "iface = ['a', 'b']"],
        &["direction = 'in'", "direction = 'out'"],
        // A flow of VLAN 20 alone meets the second.
        &["vlan = 10", "vlan = [10, 20]"],
        &["vlan = 0", "vlan = 10", ""],
        &["zone = 7", "zone = 0", "zone = 8", ""],
        &["vlan = 10", "zone = 10"],
    ];
    for conditions in fine {
        assert!(parse(&rules(conditions)).is_ok(), "{conditions:?}");
    }
}

#[test]
fn there_are_limits() {
    let many = |count: usize, condition: &dyn Fn(usize) -> String| {
        let conditions: Vec<_> = (0..count).map(condition).collect();
        rules(&conditions.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let port = |number| format!("dport = {}", number + 1);
    assert_eq!(
        parse(&many(MAX_RULES, &port)).unwrap().rules.len(),
        MAX_RULES
    );
    refused(
        many(MAX_RULES + 1, &port).as_bytes(),
        "p:257:3: one rule too many: 255 are allowed",
    );
    let interface = |number| format!("iface = 'eth{number}'");
    assert!(parse(&many(64, &interface)).is_ok());
    refused(
        many(65, &interface).as_bytes(),
        "p:66:3: rule `r65`: the rules so far name too many interfaces: 64",
    );
    let vlans = |from: usize, count: usize| {
        let all = (from..from + count).map(|vlan| vlan.to_string());
        format!("vlan = [{}]", all.collect::<Vec<_>>().join(","))
    };
    assert!(
        parse(&rules(&[
            &vlans(0, 1024),
            &vlans(100, 900).replace("vlan", "dport")
        ]))
        .is_ok()
    );
    refused(
        rules(&[&vlans(0, 1024), &vlans(1024, 1)]).as_bytes(),
        "p:3:3: rule `r2`: the rules so far name too many VLANs: 1024 are allowed",
    );
    let zones = |from: usize, count: usize| vlans(from, count).replace("vlan", "zone");
    assert!(
        parse(&rules(&[
            &zones(0, 64),
            &zones(60, 4).replace("zone", "vlan")
        ]))
        .is_ok()
    );
    refused(
        rules(&[&zones(0, 64), &zones(64, 1)]).as_bytes(),
        "p:3:3: rule `r2`: the rules so far name too many zones: 63 are allowed, and 0",
    );
    // Nested ranges: 255 rules make as many classes as they can.
    let nested = |number: usize| format!("dport = '{}-{}'", 1000 - number, 2000 + number);
    let compiled = parse(&many(255, &nested))
        .unwrap()
        .compile(|_| None)
        .unwrap();
    assert_eq!(compiled.classes().len(), 256);
    let shifted = |number: usize| format!("dport = '{}-{}'", 1000 + number, 2000 + number);
    let compiled = parse(&many(255, &shifted))
        .unwrap()
        .compile(|_| None)
        .unwrap();
    // The set of no rule stands at both ends.
    assert_eq!(compiled.classes().len(), 2 * 255);
    // Each rule's ports by a bit of the port's number: each port has a set of its own.
    let bit = |number: usize| {
        let ports = (1..2048)
            .filter(|port| port >> number & 1 == 1)
            .map(|port: u32| port.to_string());
        format!("dport = [{}]", ports.collect::<Vec<_>>().join(","))
    };
    assert!(parse(&many(9, &bit)).is_ok());
    refused(
        many(11, &bit).as_bytes(),
        "p:11:3: rule `r10`: the ports of the rules so far make more than 512",
    );
    let networks = |count: u32| {
        let all = (0..count).map(|number| format!("'{}'", std::net::Ipv4Addr::from(number)));
        rules(&[&format!("src = [{}]", all.collect::<Vec<_>>().join(","))])
    };
    assert!(parse(&networks(16_382)).is_ok());
    refused(
        networks(16_383).as_bytes(),
        "p:2:3: rule `r1`: the rules so far name too many networks: 16382",
    );
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    let error = |path: &str| {
        let error = Policy::load(Path::new(path), ALLOWED).unwrap_err();
        assert_eq!(exit_code(&error), Kind::Usage as u8);
        error.to_string()
    };
    let missing = error("/nonexistent/p.toml");
    assert!(
        missing.starts_with("/nonexistent/p.toml: cannot be read: No such file"),
        "{missing}"
    );
    assert!(error("/").starts_with("/: cannot be read: "));
    assert_eq!(
        error("/dev/zero"),
        "/dev/zero: is longer than the 1048576 bytes allowed"
    );
}

#[test]
fn interfaces_are_looked_up_by_the_caller() {
    let policy = parse(&rules(&["iface = ['a', 'b']", "dport = 1"])).unwrap();
    let compiled = policy
        .compile(|name| {
            ["a", "b"]
                .iter()
                .position(|it| *it == name)
                .map(|at| at as u32 + 7)
        })
        .unwrap();
    let mut both = Rules::NONE;
    both.insert(1);
    both.insert(2);
    assert!(compiled.interfaces().eq([(7, both), (8, both)]));
    assert!(!compiled.header().other_interfaces.contains(1));
    let error = policy
        .compile(|name| (name == "a").then_some(1))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("p:2:32: iface: there is no interface `b` here"),
        "{error}"
    );
    assert_eq!(exit_code(&error), Kind::Usage as u8);
}

/// Which rules a flow in these VLANs, and in a zone, meets of those that name some.
#[test]
fn vlans_and_zones_have_the_rules_that_name_them_and_those_that_name_none() {
    let policy = parse(&rules(&[
        "vlan = [10, 20], dport = 1",
        "vlan = 0, dport = 2",
        "zone = [7, 0]",
        "zone = 8, dport = 4",
    ]))
    .unwrap();
    let compiled = policy.compile(|_| None).unwrap();
    let members = |set: Rules| {
        (1..=4)
            .filter(|rule| set.contains(*rule))
            .collect::<Vec<u16>>()
    };
    let vlans: Vec<_> = compiled
        .vlans()
        .map(|(vlan, set)| (vlan, members(set)))
        .collect();
    assert_eq!(
        vlans,
        [(0, vec![2, 3, 4]), (10, vec![1, 3, 4]), (20, vec![1, 3, 4])]
    );
    let zones: Vec<_> = compiled
        .zones()
        .map(|(zone, set)| (zone, members(set)))
        .collect();
    assert_eq!(
        zones,
        [(0, vec![1, 2, 3]), (7, vec![1, 2, 3]), (8, vec![1, 2, 4])]
    );
    assert_eq!(members(compiled.header().other_vlans), [3, 4]);
    assert_eq!(members(compiled.header().other_zones), [1, 2]);
}

#[test]
fn a_run_that_ignores_vlans_has_no_rules_that_name_some() {
    use twheel_common::config::{Features, Meta};
    let policy = parse(&rules(&["dport = 1", "vlan = 0"])).unwrap();
    let meta = |features| Meta {
        features: Features(features),
        ..Meta::default()
    };
    let error = install::check_vlans(&policy, &meta(!Features::VLANS.0)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("p:3:3: rule `r2` has vlan, but this run has --vlan ignore"),
        "{error}"
    );
    assert_eq!(exit_code(&error), Kind::Usage as u8);
    install::check_vlans(&policy, &meta(Features::VLANS.0)).unwrap();
    let policy = parse(&rules(&["dport = 1", "zone = 0"])).unwrap();
    install::check_vlans(&policy, &meta(0)).unwrap();
    // The same before there is a run.
    let clock = crate::clock::Clock::virtual_ms();
    let file = std::env::temp_dir().join(format!("twheel-{}-vlan.toml", std::process::id()));
    std::fs::write(&file, rules(&["vlan = 10"])).unwrap();
    let found = [true, false].map(|vlans| {
        let wanted = crate::settings::Wanted {
            vlans,
            ..Default::default()
        };
        let config = wanted.config(clock).unwrap().0;
        install::check(&file, clock, &config).is_ok()
    });
    std::fs::remove_file(&file).unwrap();
    assert_eq!(found, [true, false]);
}

#[test]
fn only_what_rules_restrict_is_looked_up() {
    let dimensions = |conditions| {
        parse(&rules(&[conditions]))
            .unwrap()
            .compile(|_| Some(1))
            .unwrap()
            .dimensions()
    };
    use Dimensions as D;
    let cases = [
        ("", D::RULES),
        ("proto = 'udp'", D::RULES.with(D::PROTOCOL)),
        ("dport = 1", D::RULES.with(D::PORT)),
        ("src = '::1'", D::RULES.with(D::SOURCE)),
        ("dst = '::1'", D::RULES.with(D::DESTINATION)),
        ("any = '::1'", D::RULES.with(D::SOURCE).with(D::DESTINATION)),
        ("iface = 'a'", D::RULES.with(D::INTERFACE)),
        ("direction = 'out'", D::RULES.with(D::HOOK)),
        ("vlan = 0", D::RULES.with(D::VLAN)),
        ("zone = 0", D::RULES.with(D::ZONE)),
    ];
    for (conditions, wanted) in cases {
        assert_eq!(dimensions(conditions), wanted, "{conditions}");
    }
}

/// xorshift64*: the same policies each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn some<T>(&mut self, one: impl Fn(&mut Self) -> T) -> Vec<T> {
        (0..1 + self.below(3)).map(|_| one(self)).collect()
    }

    /// Addresses close to each other, so that prefixes nest and tuples hit them.
    fn address(&mut self) -> Ipv6Addr {
        let close = |random: &mut Self| random.pick(&[0u8, 1, 2, 127, 128, 255]);
        if self.one_in(2) {
            let [a, b, c, d] = [
                10 + self.below(2) as u8,
                close(self),
                close(self),
                close(self),
            ];
            return mapped(std::net::Ipv4Addr::new(a, b, c, d).into());
        }
        let mut bytes = [0; 16];
        match self.below(4) {
            // Where IPv4 is mapped to, nearly.
            0 => bytes[10] = 0xfe,
            1 => bytes[0] = 0x80,
            _ => bytes[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]),
        }
        bytes[7] = close(self);
        bytes[15] = close(self);
        bytes.into()
    }

    fn network(&mut self) -> String {
        let address = self.address();
        let (shown, bits) = match address.to_ipv4_mapped() {
            Some(v4) => {
                let bits = self.pick(&[0, 7, 8, 9, 16, 17, 24, 31, 32]);
                let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                (
                    std::net::Ipv4Addr::from_bits(v4.to_bits() & mask).to_string(),
                    bits,
                )
            }
            None => {
                let bits = self.pick(&[0, 1, 16, 32, 64, 80, 88, 95, 96, 120, 127, 128]);
                let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                (
                    Ipv6Addr::from_bits(address.to_bits() & mask).to_string(),
                    bits,
                )
            }
        };
        format!("{shown}/{bits}")
    }

    fn rule(&mut self) -> String {
        let mut parts = Vec::new();
        for key in ["src", "dst", "any"] {
            if self.one_in(3) {
                parts.push(format!("{key} = {:?}", self.some(Self::network)));
            }
        }
        if self.one_in(3) {
            let low = 1 + self.below(40);
            let high = low + self.below(20);
            parts.push(format!(
                "dport = ['{low}-{high}', {}]",
                high + 1 + self.below(3)
            ));
        }
        if self.one_in(4) {
            parts.push(format!(
                "iface = {:?}",
                self.some(|random| random.pick(&INTERFACES))
            ));
        }
        if self.one_in(4) {
            let vlans = self.some(|random| random.pick(&VLANS));
            parts.push(format!("vlan = {vlans:?}"));
        }
        if self.one_in(4) {
            let zones = self.some(|random| random.pick(&ZONES));
            parts.push(format!("zone = {zones:?}"));
        }
        if self.one_in(4) {
            parts.push(format!("direction = '{}'", self.pick(&["in", "out"])));
        }
        if self.one_in(3) {
            parts.push(format!(
                "proto = {:?}",
                self.some(|random| random.pick(&["tcp", "udp"]))
            ));
        }
        parts.join(", ")
    }

    fn query(&mut self) -> Query {
        let source = self.address();
        let destination = loop {
            let address = self.address();
            if address.to_ipv4_mapped().is_some() == source.to_ipv4_mapped().is_some() {
                break address;
            }
        };
        Query {
            protocol: Some(self.pick(&Protocol::ALL)),
            source: Some(source),
            destination: Some(destination),
            port: Some(self.below(64) as u16),
            interface: Some(self.pick(&["a", "b", "c", "d"]).to_owned()),
            hook: Some(self.pick(&[Hook::Ingress, Hook::Egress])),
            // One VLAN is that of no rule; so is one zone.
            vlans: Some([0; 2].map(|_| self.pick(&[0, 0, 10, 20, 30, 40]))),
            zone: Some(self.pick(&[0, 0, 7, 8, 9])),
        }
    }
}

const INTERFACES: [&str; 3] = ["a", "b", "c"];
const VLANS: [u16; 4] = [0, 10, 20, 30];
const ZONES: [u16; 3] = [0, 7, 8];

/// By name, whether a rule names it or not.
fn index(name: &str) -> Option<u32> {
    name.bytes().next().map(u32::from)
}

fn tuple(query: &Query) -> Option<Tuple> {
    Some(Tuple {
        source: words(query.source?),
        destination: words(query.destination?),
        port: query.port?.to_be(),
        interface: index(query.interface.as_ref()?)?,
        hook: query.hook?,
        protocol: query.protocol?,
        vlans: packed(query.vlans?),
        zone: query.zone?.into(),
    })
}

/// The first rule that a flow meets, rule by rule.
fn naive(policy: &Policy, query: &Query) -> u16 {
    let met = policy
        .rules
        .iter()
        .position(|rule| rule.judge(query) == Verdict::Met);
    met.map_or(0, |at| at as u16 + 1)
}

#[test]
fn the_sets_find_the_rule_that_going_through_them_finds() {
    let mut random = Random(0x7477_6865_656c);
    let mut met = [0; MAX_RULES + 1];
    let (mut refused, mut hidden) = (0, 0);
    for round in 0..200 {
        // Rules that are refused by what stands before them are left out: what is wanted is rules
        // that are in each other's way nearly.
        let mut conditions: Vec<String> = Vec::new();
        let wanted = [1, 2, 5, 20, 60][round % 5];
        for _ in 0..wanted {
            conditions.push(random.rule());
            let text = rules(&conditions.iter().map(String::as_str).collect::<Vec<_>>());
            if let Err(error) = parse(&text) {
                let error = error.to_string();
                assert!(
                    error.contains("no flow can meet") || error.contains("restricts nothing"),
                    "{error}\n{text}"
                );
                refused += 1;
                hidden += usize::from(error.contains("comes first"));
                conditions.pop();
            }
        }
        let text = rules(&conditions.iter().map(String::as_str).collect::<Vec<_>>());
        let policy = parse(&text).unwrap();
        let compiled = policy.compile(index).unwrap();
        for _ in 0..500 {
            let query = random.query();
            let wanted = naive(&policy, &query);
            let found = first_match(&compiled, &tuple(&query).unwrap());
            assert_eq!(found, wanted, "{query:?}\n{text}");
            met[usize::from(found)] += 1;
        }
    }
    // The policies are such that the test tests something.
    assert!(
        met[0] > 10_000 && met[1] > 10_000 && met[10..].iter().sum::<usize>() > 3_000,
        "{met:?}"
    );
    assert!(refused > hidden && hidden > 50, "{refused} {hidden}");
}

/// A rule is refused as hidden if, and only if, no flow meets it.
#[test]
fn a_rule_that_is_refused_is_met_by_no_flow() {
    let mut random = Random(1998);
    let (mut hidden, mut open) = (0, 0);
    for _ in 0..3_000 {
        let conditions = [random.rule(), random.rule()];
        let both = [conditions[0].as_str(), conditions[1].as_str()];
        let Err(error) = parse(&rules(&both)) else {
            open += 1;
            continue;
        };
        if !error.to_string().contains("comes first") {
            continue;
        }
        hidden += 1;
        let [first, second] = both.map(|conditions| parse(&rules(&[conditions])).unwrap());
        for _ in 0..200 {
            let query = random.query();
            let (first, second) = (naive(&first, &query), naive(&second, &query));
            assert!(second == 0 || first == 1, "{query:?}\n{both:?}");
        }
    }
    assert!(hidden > 20 && open > 1_000, "{hidden} {open}");
}

/// Each entry of a trie has exactly the rules that admit its addresses.
#[test]
fn entries_have_the_rules_of_what_is_around_them() {
    let policy = parse(&rules(&[
        "src = '10.0.0.0/8'",
        "src = ['10.1.0.0/16', '::/0']",
        "any = '10.1.2.0/24', proto = 'udp'",
        "dport = 1",
    ]))
    .unwrap();
    let compiled = policy.compile(|_| None).unwrap();
    let members = |set: Rules| {
        (1..=4)
            .filter(|rule| set.contains(*rule))
            .collect::<Vec<u16>>()
    };
    let mut entries: Vec<_> = compiled
        .source_prefixes()
        .map(|(prefix, ends)| {
            let address = Ipv6Addr::from(prefix.address).to_canonical().to_string();
            (
                prefix.bits,
                address,
                members(ends.admit),
                members(ends.either),
            )
        })
        .collect();
    entries.sort();
    let entry = |bits, address: &str, admit: &[u16], either: &[u16]| {
        (bits, address.to_owned(), admit.to_vec(), either.to_vec())
    };
    assert_eq!(
        entries,
        [
            entry(0, "::", &[2, 3, 4], &[1, 2, 4]),
            entry(96, "0.0.0.0", &[3, 4], &[1, 2, 4]),
            entry(104, "10.0.0.0", &[1, 3, 4], &[1, 2, 4]),
            entry(112, "10.1.0.0", &[1, 2, 3, 4], &[1, 2, 4]),
            entry(120, "10.1.2.0", &[1, 2, 3, 4], &[1, 2, 3, 4]),
        ]
    );
    let mut destinations: Vec<_> = compiled
        .destination_prefixes()
        .map(|(prefix, ends)| (prefix.bits, members(ends.either)))
        .collect();
    destinations.sort();
    assert_eq!(
        destinations,
        [
            (0, vec![1, 2, 4]),
            (96, vec![1, 2, 4]),
            (120, vec![1, 2, 3, 4])
        ]
    );
}

/// Bytes of a valid file, changed at random, are refused or understood.
#[test]
fn no_text_makes_it_panic() {
    let mut random = Random(42);
    let whole = include_bytes!("../../../docs/policy.md");
    let start = whole
        .windows(8)
        .position(|window| window == b"```toml\n")
        .unwrap()
        + 8;
    let end = start
        + whole[start..]
            .windows(4)
            .position(|window| window == b"\n```")
            .unwrap();
    let example = &whole[start..end];
    Policy::parse("docs/policy.md", example, ALLOWED).unwrap();
    for _ in 0..5_000 {
        let mut bytes = example.to_vec();
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len());
            match random.below(3) {
                0 => bytes[at] = random.below(256) as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random.pick(b"[]{}\"'=,.-/#\n059a")),
            }
        }
        if let Ok(policy) = Policy::parse("p", &bytes, ALLOWED) {
            policy.compile(|_| Some(1)).unwrap();
        }
    }
}

#[test]
fn what_is_done_to_expired_flows_is_that_of_the_rule_else_of_the_policy() {
    use crate::reap::{Action, Actions};
    let policy = parse(
        "reap = [\"conntrack\", \"socket\"]\n\
         rule = [ { name = \"a\", dport = 1, reap = [] }, { name = \"b\", dport = 2 },\n\
         { name = \"c\", reap = [\"enforce\"] } ]",
    )
    .unwrap();
    let reap = |actions: &[Action]| Some(actions.iter().copied().collect::<Actions>());
    assert_eq!(policy.reap, reap(&[Action::Socket, Action::Conntrack]));
    let rules: Vec<_> = policy.rules.iter().map(|rule| rule.reap).collect();
    assert_eq!(
        rules,
        [reap(&[]), policy.reap, reap(&[Action::EnforceDrop])]
    );
}
