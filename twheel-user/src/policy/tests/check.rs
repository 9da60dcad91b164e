//! What is wrong with rules together.

use super::*;

#[test]
fn rules_in_each_others_way_are_refused() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["", "dport = 1"],
            "p:2:3: rule `r1` matches every flow and hides all rules after it",
        ),
        (
            &[
                "src = ['0.0.0.0/1', '128.0.0.0/1', '::/0'], proto = ['tcp', 'udp', 'icmp']",
                "dport = 1",
            ],
            "p:2:3: rule `r1` matches every flow",
        ),
        (
            &["dport = 1", "dport = 1"],
            "p:3:3: no flow can match rule `r2`: rule `r1` on line 2 comes first",
        ),
        (
            &[
                "dport = 5",
                "dport = '1-9'",
                "src = '10.0.0.0/8', dport = [2, 3]",
            ],
            "p:4:3: no flow can match rule `r3`: rule `r2` on line 3",
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
            "p:3:3: no flow can match rule `r2`: rule `r1` on line 2 comes first",
        ),
        (
            &["direction = 'in'", "direction = 'in', proto = 'tcp'"],
            "p:3:3: no flow",
        ),
        (&["proto = ['tcp', 'udp']", "dport = 1"], "p:3:3: no flow"),
        // Conditions on either end.
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
        // Conditions that no flow can match.
        (
            &["src = '10.0.0.0/8', dst = '::1'"],
            "p:2:3: no flow can match rule `r1`: src, dst and any",
        ),
        (
            &["src = '10.0.0.0/8', dst = '10.0.0.0/8', any = '11.0.0.0/8'"],
            "p:2:3: no flow can match rule `r1`",
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
        // A flow in VLAN 20 alone matches the second rule.
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
        "p:257:3: too many rules: 255 are allowed",
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
    // The set without any rule occurs at both ends.
    assert_eq!(compiled.classes().len(), 2 * 255);
    // Each rule selects ports by a bit of the port's number, so each port has a set of its own.
    let bit = |number: usize| {
        let ports = (1..2048)
            .filter(|port| port >> number & 1 == 1)
            .map(|port: u32| port.to_string());
        format!("dport = [{}]", ports.collect::<Vec<_>>().join(","))
    };
    assert!(parse(&many(9, &bit)).is_ok());
    refused(
        many(11, &bit).as_bytes(),
        "p:11:3: rule `r10`: the rules so far need more than 512",
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
