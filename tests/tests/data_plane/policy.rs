//! Which rule and which timeouts a flow gets: by addresses, VLANs and zones, and from a new policy.

use std::collections::BTreeMap;

use twheel::{names::Names, watched::Watch};
use twheel_tests::plane::{ACK, INTERFACE, Plane, Setup, frame};

use crate::{index, tagged};

#[test]
fn each_flow_has_the_timeouts_of_the_first_rule_it_meets() {
    let mut plane = Setup::default().load();
    plane.policy(
        r#"
        [timeouts]
        established = "50s"
        unreplied = "50s"
        [[rule]]
        name = "late"
        src = "10.0.0.1"
        timeouts = { established = "90s", unreplied = "90s" }
        [[rule]]
        name = "out"
        direction = "out"
        timeouts = { unreplied = "20s" }
        [[rule]]
        name = "web"
        dport = [443, "80-81"]
        iface = "any"
        timeouts = { unreplied = "30s" }
        "#,
    );
    // To port 80 of 192.0.2.1: from 10.0.0.0; from 10.0.0.1; seen outgoing; and in the other
    // direction.
    plane.receive(&frame(1, false, ACK));
    plane.receive(&frame(50_004, false, ACK));
    plane.send(&frame(2, false, ACK));
    plane.receive(&frame(3, true, ACK));
    let rules = [1, 50_004, 2, 3].map(|client| flows_rule(&mut plane, client));
    let [web, late, out, none] = rules;
    let data_plane = plane.plane();
    let names = Names::open(&|name: &str| data_plane.open(name)).unwrap();
    let name = |number| names.rule(number).unwrap();
    assert_eq!(
        [late, out, web].map(name),
        ["late", "out", "web"].map(|name| Some(name.to_owned()))
    );
    assert_eq!(none, 0);
    let mut ends = Vec::new();
    for second in 1..=100 {
        plane.pass(1_000);
        ends.extend(plane.step().iter().map(|event| (second, event.rule)));
    }
    let expected = [(20, out), (30, web), (50, 0), (90, late)];
    assert_eq!(ends, expected);
}

#[test]
fn flows_of_the_same_addresses_have_the_timeouts_of_their_vlans() {
    let mut plane = Setup::default().load();
    plane.policy(
        r#"
        [timeouts]
        unreplied = "50s"
        [[rule]]
        name = "ten"
        vlan = 10
        timeouts = { unreplied = "20s" }
        [[rule]]
        name = "twenty"
        vlan = [20, 21]
        timeouts = { unreplied = "30s" }
        [[rule]]
        name = "untagged"
        vlan = 0
        timeouts = { unreplied = "40s" }
        "#,
    );
    let data_plane = plane.plane();
    let names = Names::open(&|name: &str| data_plane.open(name)).unwrap();
    let cases: [(&[u16], Option<&str>, u64); 7] = [
        (&[10], Some("ten"), 20),
        (&[20], Some("twenty"), 30),
        // Matched by the inner identifier; by the first rule that matches either; by neither.
        (&[5, 20], Some("twenty"), 30),
        (&[20, 10], Some("ten"), 20),
        (&[5, 6], None, 50),
        (&[30], None, 50),
        (&[], Some("untagged"), 40),
    ];
    for (vlans, ..) in cases {
        plane.receive(&tagged(&frame(1, false, ACK), vlans));
    }
    let flows: BTreeMap<_, _> = plane
        .plane()
        .flows()
        .unwrap()
        .iter()
        .map(|flow| (flow.key.vlans(), names.rule(flow.rule).unwrap()))
        .collect();
    assert_eq!(flows.len(), cases.len());
    for (vlans, rule, _) in cases {
        let mut both = vlans.to_vec();
        both.resize(2, 0);
        assert_eq!(flows[&[both[0], both[1]]].as_deref(), rule, "{vlans:?}");
    }
    let mut ends = Vec::new();
    for second in 1..=60 {
        plane.pass(1_000);
        ends.extend(plane.step().iter().map(|_| second));
    }
    let mut expected = cases.map(|(.., second)| second);
    expected.sort_unstable();
    assert_eq!(ends, expected);
}

#[test]
fn vlans_of_an_old_policy_count_no_more() {
    let mut plane = Setup::default().load();
    let rule = |name: &str, vlan| format!("[[rule]]\nname = '{name}'\nvlan = {vlan}\n");
    // The third rule is stored where the first one was.
    for (name, vlan) in [("first", 10), ("second", 20), ("third", 30)] {
        plane.policy(&rule(name, vlan));
    }
    for vlan in [10, 20, 30] {
        plane.receive(&tagged(&frame(1, false, ACK), &[vlan]));
    }
    let flows = plane.plane().flows().unwrap();
    let mut met: Vec<_> = flows
        .iter()
        .map(|flow| (flow.key.vlans()[0], flow.rule != 0))
        .collect();
    met.sort_unstable();
    assert_eq!(met, [(10, false), (20, false), (30, true)]);
}

/// Zones match by the numbers that `--zone` gives, whatever their indices in keys.
#[test]
fn flows_have_the_rules_of_their_zones() {
    let setup = Setup {
        room: 1,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    let policy = "rule = [ { name = 'seven', zone = 7 }, { name = 'none', zone = 0 },
        { name = 'others', zone = [9, 65535] } ]";
    // Before the policy comes, the first two indices are taken.
    for zone in [500, 9] {
        watch.enter(INTERFACE, "any", zone, 0).unwrap();
    }
    plane.policy(policy);
    let wanted = [
        (7, Some("seven")),
        (0, Some("none")),
        (9, Some("others")),
        (65_535, Some("others")),
        (500, None),
    ];
    for (client, (zone, rule)) in (1..).zip(wanted) {
        watch.enter(INTERFACE, "any", zone, 0).unwrap();
        plane.receive(&frame(client, false, ACK));
        let names = {
            let data_plane = plane.plane();
            Names::open(&|name: &str| data_plane.open(name)).unwrap()
        };
        let port = frame(client, false, ACK)[34..36].to_vec();
        let flows = plane.plane().flows().unwrap();
        let flow = flows
            .iter()
            .find(|flow| {
                flow.key.ports().to_le_bytes()[..4]
                    .windows(2)
                    .any(|it| it == port)
            })
            .unwrap();
        assert_eq!(names.zone(flow.key.zone()).unwrap(), zone);
        assert_eq!(names.rule(flow.rule).unwrap().as_deref(), rule, "{zone}");
    }
    // A policy may take all zones that are left, and no more. A refused policy changes nothing.
    let zones = |from: u16, count: u16| {
        let all: Vec<u16> = (from..from + count).collect();
        format!("[[rule]]\nname = 'many'\nzone = {all:?}\n")
    };
    let refused = plane.try_policy(&zones(1000, 60)).unwrap_err();
    assert!(
        refused.to_string().contains(": zone 1059 is too many"),
        "{refused}"
    );
    assert!(refused.to_string().starts_with("test:3:"), "{refused}");
    plane.try_policy(&zones(2000, 59)).unwrap();
    assert!(plane.try_policy(&zones(3000, 1)).is_err());
    plane.try_policy(&zones(2010, 3)).unwrap();
}

/// The rule of a client's flow.
fn flows_rule(plane: &mut Plane, client: u32) -> u16 {
    let index = index(plane, client);
    plane.plane().flows().unwrap().get(index).unwrap().rule
}

#[test]
fn live_flows_follow_a_new_policy_within_a_tick() {
    let mut plane = Setup::default().load();
    let rule = |name: &str, timeout: &str| {
        format!("[[rule]]\nname = '{name}'\ndport = 80\ntimeouts = {{ unreplied = '{timeout}' }}\n")
    };
    plane.policy(&rule("web", "600s"));
    plane.receive(&frame(1, false, ACK));
    let number = flows_rule(&mut plane, 1);
    // Another rule comes before it in the file, but it keeps its number, because it keeps its name.
    let other = "[[rule]]\nname = 'ssh'\ndport = 22\ntimeouts = { close = '1s' }\n";
    plane.policy(&format!("{other}{}", rule("web", "20s")));
    assert_eq!(plane.sweep().to_string(), "1 live flow: no change");
    assert_eq!(flows_rule(&mut plane, 1), number);
    plane.pass(20_100);
    assert_eq!(plane.step().len(), 1);
    // When a rule is removed, its flows have no rule.
    plane.receive(&frame(2, false, ACK));
    assert_eq!(flows_rule(&mut plane, 2), number);
    plane.policy(other);
    assert_eq!(plane.sweep().to_string(), "1 live flow: 1 lost its rule");
    assert_eq!(flows_rule(&mut plane, 2), 0);
    plane.pass(59_900);
    assert!(plane.step().is_empty());
    plane.pass(200);
    assert_eq!(plane.step().len(), 1);
    // Its number may be reused later.
    plane.policy(&rule("new", "20s"));
    plane.receive(&frame(3, false, ACK));
    assert_ne!(flows_rule(&mut plane, 3), 0);
}

#[test]
fn a_policy_of_no_rules_is_none() {
    let mut plane = Setup::default().load();
    plane.policy("[timeouts]\nunreplied = '5s'\n");
    plane.receive(&frame(1, false, ACK));
    plane.pass(5_100);
    assert_eq!(plane.step().len(), 1);
}
