//! Tests of filters on a flow of which every field is known.

use std::time::Duration;

use twheel_common::{
    event::Reason,
    flow::{FlowKey, Traffic},
};

use super::{Field, Filter, Knowable, Subject};
use crate::{
    failure::{Kind, exit_code},
    model::{Birth, Flow, Named, Timing},
};

const ALL: Knowable = Knowable {
    ended: true,
    accounting: true,
    rto: true,
};
const LIVE: Knowable = Knowable {
    ended: false,
    accounting: true,
    rto: true,
};

fn subject() -> Subject<'static> {
    let traffic = |packets, bytes| Traffic { packets, bytes };
    Subject {
        flow: Flow {
            proto: "tcp",
            src: "10.1.2.3:40000".parse().unwrap(),
            dst: "[2001:db8::7]:443".parse().unwrap(),
            state: "established",
            rule: 1,
            vlans: [10, 20],
            zone: 1,
            place: 2,
            is_outgoing: false,
            birth: Birth {
                key: FlowKey::NONE,
                created: 0,
                generation: 0,
            },
            stalled: true,
            replied: true,
        },
        named: Named {
            rule: Some("web servers"),
            iface: Some("eth0"),
            zone: 7,
            nat: None,
            owner: None,
        },
        picked_up: false,
        idle: Duration::from_secs(45),
        age: Duration::from_secs(3600),
        account: Some([traffic(10, 1000), traffic(20, 2000)]),
        timing: Some([
            Timing {
                srtt: 0,
                retransmissions: 3,
            },
            Timing {
                srtt: 25_000,
                retransmissions: 4,
            },
        ]),
        expires: Some(Duration::from_secs(15)),
        cpu: Some(1),
        reason: Some(Reason::Idle),
        ended: Some(Duration::from_secs(300)),
    }
}

#[track_caller]
fn check(text: &str, known: Knowable, expected: bool) {
    let filter = Filter::parse(text, known).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(filter.matches(&subject()), expected, "{text}");
}

#[test]
fn every_field_is_compared() {
    for (text, known, expected) in [
        ("proto == tcp", LIVE, true),
        ("proto == udp", LIVE, false),
        ("state == established", LIVE, true),
        ("state == ESTABLISHED", LIVE, true),
        ("state != established", LIVE, false),
        ("state in {close, established}", LIVE, true),
        ("state in {close, time_wait}", LIVE, false),
        ("src == 10.1.2.3", LIVE, true),
        ("src == 10.1.2.4", LIVE, false),
        ("src in 10.0.0.0/8", LIVE, true),
        ("src in {192.0.2.0/24, 10.1.2.0/24}", LIVE, true),
        ("src in ::/0", LIVE, false),
        ("dst in 2001:db8::/32", LIVE, true),
        ("host == 10.1.2.3 and host == 2001:db8::7", LIVE, true),
        ("host != 10.1.2.3", LIVE, false),
        ("sport == 40000", LIVE, true),
        ("dport == 443", LIVE, true),
        ("dport = 443", LIVE, true),
        ("dport == 440-450", LIVE, true),
        ("dport in 444-450", LIVE, false),
        ("dport in {80, 440-443}", LIVE, true),
        ("dport < 443", LIVE, false),
        ("dport <= 443", LIVE, true),
        ("port > 39999", LIVE, true),
        ("port != 443", LIVE, false),
        ("rule == \"web servers\"", LIVE, true),
        ("rule == ssh", LIVE, false),
        ("idle > 30s", LIVE, true),
        ("idle >= 45s", LIVE, true),
        ("idle > 45s", LIVE, false),
        ("idle > 1m", LIVE, false),
        ("age == 1h", LIVE, true),
        ("expires < 20s", LIVE, true),
        ("cpu == 1", LIVE, true),
        ("picked_up", LIVE, false),
        ("stalled", LIVE, true),
        ("packets == 30", LIVE, true),
        ("bytes > 2kB", LIVE, true),
        ("bytes > 3KiB", LIVE, false),
        ("rtt == 25ms", LIVE, true),
        ("rtt < 25ms", LIVE, false),
        ("retransmissions == 7", LIVE, true),
        ("reason == idle", ALL, true),
        ("reason in {closed, reset}", ALL, false),
        ("ended < 10m", ALL, true),
    ] {
        check(text, known, expected);
    }
}

#[test]
fn tests_are_combined_as_in_c() {
    for (text, expected) in [
        ("", true),
        ("  ", true),
        (
            "state == established and dport == 443 and idle > 30s and src in 10.0.0.0/8",
            true,
        ),
        ("dport == 1 or dport == 443", true),
        ("iface == eth0 and direction == in and zone == 7", true),
        ("iface == eth1 or direction == out or zone == 0", false),
        // Either of the two VLAN tags matches.
        ("vlan == 10 and vlan == 20", true),
        ("vlan == 30", false),
        // `and` binds tighter than `or`, and `not` than both.
        ("dport == 443 or dport == 1 and dport == 2", true),
        ("(dport == 443 or dport == 1) and dport == 2", false),
        ("not dport == 1 and dport == 443", true),
        ("not (dport == 1 or dport == 443)", false),
        ("!stalled", false),
        ("!!stalled", true),
        ("not not stalled && !picked_up || dport==1", true),
        ("NOT picked_up AND stalled", true),
    ] {
        check(text, LIVE, expected);
    }
}

#[test]
fn of_what_nobody_knows_nothing_is_true_but_its_negation() {
    let mut unknown = subject();
    (unknown.named, unknown.account, unknown.timing) = (Named::default(), None, None);
    for text in [
        "rule == a",
        "packets >= 0",
        "rtt >= 0s",
        "retransmissions >= 0",
    ] {
        assert!(
            !Filter::parse(text, LIVE).unwrap().matches(&unknown),
            "{text}"
        );
        let not = Filter::parse(&format!("not ({text})"), LIVE).unwrap();
        assert!(not.matches(&unknown), "{text}");
    }
}

#[test]
fn what_is_wrong_is_pointed_at() {
    for (text, known, column, part) in [
        (
            "stat == close",
            LIVE,
            1,
            "unknown field `stat`: give one of proto, state",
        ),
        (
            "state == foo",
            LIVE,
            10,
            "unknown state `foo`: give one of syn_sent",
        ),
        ("state", LIVE, 6, "a comparison of state with a value"),
        ("state ==", LIVE, 9, "expected a value"),
        ("state == close and", LIVE, 19, "expected a field"),
        ("(state == close", LIVE, 16, "or `)`"),
        ("dport in {1,2", LIVE, 14, "add it"),
        ("dport in {1,2 ", LIVE, 14, "add it"),
        ("dport in {1, 2 and idle > 1s", LIVE, 29, "`}`"),
        ("dport in {1 2}", LIVE, 10, "expected a list in braces"),
        ("(state == close) and", LIVE, 21, "expected a field"),
        ("state == close)", LIVE, 15, "expected"),
        ("state < close", LIVE, 7, "has no order"),
        ("src > 10.0.0.1", LIVE, 5, "has no order"),
        ("src == nowhere", LIVE, 8, "is not an address or network"),
        ("src in 10.0.0.0/33", LIVE, 8, "prefix length"),
        (
            "dport == 65536",
            LIVE,
            10,
            "is not a number from 0 to 65535",
        ),
        ("dport == 9-1", LIVE, 10, "is not a number"),
        ("dport > 1-9", LIVE, 7, "a range has no order"),
        ("idle > 30", LIVE, 8, "is not a duration"),
        ("idle > 3x", LIVE, 8, "is not a duration"),
        ("stalled == 1", LIVE, 9, "is a flag"),
        ("state == {a}", LIVE, 10, "expected a value"),
        ("state in {close, }}", LIVE, 19, "expected"),
        ("reason == idle", LIVE, 1, "`twheel expired`"),
        ("expires > 1s", ALL, 1, "`twheel flows`"),
        ("äöü == 1", LIVE, 1, "expected"),
        ("rule == \"ä\" and x == 1", LIVE, 17, "unknown field `x`"),
    ] {
        let error = Filter::parse(text, known).unwrap_err();
        assert_eq!(exit_code(&error), Kind::Usage as u8, "{text}");
        let message = error.to_string();
        assert!(
            message.starts_with(&format!("filter, column {column}: ")),
            "{text}: {message}"
        );
        assert!(message.contains(part), "{text}: {message}");
        let mark = message.lines().last().unwrap();
        assert_eq!(mark.chars().count(), 2 + column, "{message}");
    }
    for (text, part) in [("packets > 1", "--accounting"), ("stalled", "--rto on")] {
        let error = Filter::parse(text, Knowable::default()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn no_text_makes_the_parser_panic_or_overflow() {
    for text in [
        "(".repeat(100_000),
        "!".repeat(100_000),
        "not ".repeat(100_000),
        "\"".to_owned(),
        "\u{0}".to_owned(),
        "state == \"close".to_owned(),
    ] {
        assert!(Filter::parse(&text, LIVE).is_err());
    }
    let long = vec!["dport == 1"; 10_000].join(" or ");
    check(&long, LIVE, false);
    check(&format!("rule != \"{}\"", "(".repeat(100)), LIVE, true);
    // Every prefix of a filter, cut between any two characters.
    let whole = "not (state in {close, udp} or src == 10.0.0.0/8) and rule != \"ä b\" && idle>=1h";
    for (at, _) in whole.char_indices() {
        let _ = Filter::parse(&whole[..at], LIVE);
    }
    check(whole, LIVE, false);
}

#[test]
fn the_reference_names_every_field() {
    let reference = include_str!("../../../docs/filter.md");
    for field in Field::ALL {
        assert!(
            reference.contains(&format!("| `{}` |", field.name())),
            "{} is not in docs/filter.md",
            field.name()
        );
    }
}
