//! What a file may say, and what is wrong with it.

use super::*;

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
        ("ssh", Location { line: 6, column: 9 })
    );
    assert_eq!(ssh.ports, Some(vec![22..=22, 8000..=8099]));
    assert_eq!(ssh.source, Some(vec![network("10.0.0.0/8")]));
    assert_eq!(
        ssh.destination,
        Some(vec![network("192.0.2.0/24"), network("2001:db8::/32")])
    );
    assert_eq!(ssh.either, Some(vec![network("10.1.0.0/16")]));
    let place = |column| Location { line: 12, column };
    let interfaces = vec![
        ("eth0".to_owned(), place(18)),
        ("eth1".to_owned(), place(26)),
    ];
    assert_eq!(ssh.interfaces, Some(interfaces));
    assert_eq!(ssh.vlans, Some(vec![10, 0, 4094]));
    let place = Location {
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
            "p:2:3: unknown key `tiemouts`: use one of timeouts, reap, rule",
        ),
        (
            "[[rule]]\nname = \"a\"\nsport = 1",
            "p:3:1: unknown key `sport`: use one of name, dport, src, dst, any, iface, vlan, ",
        ),
        (
            "[timeouts]\nsyn = \"1s\"",
            "p:2:1: unknown key `syn`: use one of syn_sent, ",
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
            "p:5:8: the rule on line 1 is also called `a`",
        ),
    ];
    for (text, error) in cases {
        refused(text.as_bytes(), error);
    }
    let long = format!("[[rule]]\nname = \"{}\"", "a".repeat(65));
    refused(long.as_bytes(), "p:2:8: name `aaa");
    // Conditions and timeouts: each is the third line of a rule.
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
            "p:3:8: reap: enforce=drop and enforce=reset exclude",
        ),
        (
            "reap = { actions = [\"socket\"], cgroups = \"/a\" }",
            "p:3:32: unknown key `cgroups`: use one of actions, cgroup",
        ),
        (
            "reap = { cgroup = \"/a\" }",
            "p:3:8: reap has no actions: give actions = [",
        ),
        (
            "reap = { actions = [], cgroup = \"nginx.service\" }",
            "p:3:33: cgroup `nginx.service`: give the path of a cgroup as /proc/PID/cgroup has it",
        ),
        (
            "reap = { actions = [], cgroup = [\"/a\", \"/a/../b\"] }",
            "p:3:40: cgroup `/a/../b`: ",
        ),
        (
            "reap = { actions = [], cgroup = \"/a/\" }",
            "p:3:33: cgroup `/a/`: ",
        ),
        (
            "reap = { actions = [], cgroup = \"/a\\u0000b\" }",
            "p:3:33: cgroup `/a\\0b`: ",
        ),
        (
            "reap = { actions = [], cgroup = [] }",
            "p:3:33: cgroup is an empty list",
        ),
        (
            "reap = { actions = [], cgroup = 7 }",
            "p:3:33: cgroup is an integer: give the path",
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
            "p:3:7: any: `a.example` is not an address or network",
        ),
        // Names: known and unknown ones.
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
    // A timeout of zero is refused even if the caller's range admits it.
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

/// Bytes of a valid file, changed at random, are refused or parsed.
#[test]
fn no_text_makes_it_panic() {
    let mut random = Random(42);
    let whole = include_bytes!("../../../../docs/policy.md");
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
    use crate::{action::Action, policy::Reap};
    let policy = parse(
        "reap = [\"conntrack\", \"socket\"]\n\
         rule = [ { name = \"a\", dport = 1, reap = [] }, { name = \"b\", dport = 2 },\n\
         { name = \"c\", reap = [\"enforce\"] } ]",
    )
    .unwrap();
    let reap = |actions: &[Action]| {
        Some(Reap {
            actions: actions.iter().copied().collect(),
            cgroups: Vec::new(),
        })
    };
    assert_eq!(policy.reap, reap(&[Action::Socket, Action::Conntrack]));
    let rules: Vec<_> = policy.rules.iter().map(|rule| rule.reap.clone()).collect();
    assert_eq!(
        rules,
        [reap(&[]), policy.reap.clone(), reap(&[Action::EnforceDrop])]
    );
}

#[test]
fn actions_may_be_limited_to_cgroups() {
    let policy = parse(
        "[reap]\nactions = [\"socket\"]\ncgroup = \"/system.slice/a.service\"\n\
         [[rule]]\nname = \"a\"\ndport = 1\n\
         [[rule]]\nname = \"b\"\ndport = 2\n\
         reap = { cgroup = [\"/b\", \"/c/d\"], actions = [\"reset\", \"socket\"] }\n\
         [[rule]]\nname = \"c\"\nreap = [\"conntrack\"]",
    )
    .unwrap();
    let all: Vec<_> = policy.rules.iter().map(|rule| &rule.reap).collect();
    let all: Vec<_> = [&policy.reap].into_iter().chain(all).flatten().collect();
    let written: Vec<_> = all.iter().map(ToString::to_string).collect();
    assert_eq!(
        written,
        [
            "socket cgroup /system.slice/a.service",
            "socket cgroup /system.slice/a.service",
            "reset,socket cgroup /b,/c/d",
            "conntrack"
        ]
    );
    // As many bytes as there may be, and one more.
    let rule = |length| {
        let path = "a".repeat(length);
        format!("[reap]\nactions = []\ncgroup = \"/{path}\"")
    };
    parse(&rule(1022)).unwrap();
    refused(
        rule(1023).as_bytes(),
        "p:3:10: cgroup: the paths take 1025 bytes, with one more for each, and at most 1024",
    );
}
