//! The sets that the data plane looks up.

use super::*;

/// Which of the first four rules a set contains.
fn members(set: Rules) -> Vec<u16> {
    (1..=4).filter(|rule| set.contains(*rule)).collect()
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

/// Rules that name VLANs or zones admit flows in these; rules that name none admit every flow.
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
            .starts_with("p:3:3: rule `r2` has vlan, but this run ignores VLANs"),
        "{error}"
    );
    assert_eq!(exit_code(&error), Kind::Usage as u8);
    install::check_vlans(&policy, &meta(Features::VLANS.0)).unwrap();
    let policy = parse(&rules(&["dport = 1", "zone = 0"])).unwrap();
    install::check_vlans(&policy, &meta(0)).unwrap();
    // The same check before there is an instance.
    let clock = crate::clock::Clock::virtual_ms();
    let file = std::env::temp_dir().join(format!("twheel-{}-vlan.toml", std::process::id()));
    std::fs::write(&file, rules(&["vlan = 10"])).unwrap();
    let found = [true, false].map(|vlans| {
        let wanted = crate::settings::Settings {
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

/// The index of an interface by name, whether a rule names it or not.
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

/// The first rule that a flow matches, by going through the rules.
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
        // Rules that are refused because of the rules before them are left out. The test needs
        // rules that almost hide each other.
        let mut conditions: Vec<String> = Vec::new();
        let wanted = [1, 2, 5, 20, 60][round % 5];
        for _ in 0..wanted {
            conditions.push(random.rule());
            let text = rules(&conditions);
            if let Err(error) = parse(&text) {
                let error = error.to_string();
                assert!(
                    error.contains("no flow can match") || error.contains("matches every flow"),
                    "{error}\n{text}"
                );
                refused += 1;
                hidden += usize::from(error.contains("comes first"));
                conditions.pop();
            }
        }
        let text = rules(&conditions);
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
    // Checks that the random policies test something.
    assert!(
        met[0] > 10_000 && met[1] > 10_000 && met[10..].iter().sum::<usize>() > 3_000,
        "{met:?}"
    );
    assert!(refused > hidden && hidden > 50, "{refused} {hidden}");
}

/// A rule is refused as hidden if, and only if, no flow matches it.
#[test]
fn a_rule_that_is_refused_is_met_by_no_flow() {
    let mut random = Random(1998);
    let (mut hidden, mut open) = (0, 0);
    for _ in 0..3_000 {
        let conditions = [random.rule(), random.rule()];
        let Err(error) = parse(&rules(&conditions)) else {
            open += 1;
            continue;
        };
        if !error.to_string().contains("comes first") {
            continue;
        }
        hidden += 1;
        let [first, second] = conditions
            .each_ref()
            .map(|conditions| parse(&rules(&[conditions])).unwrap());
        for _ in 0..200 {
            let query = random.query();
            let (first, second) = (naive(&first, &query), naive(&second, &query));
            assert!(second == 0 || first == 1, "{query:?}\n{conditions:?}");
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
