//! Which rule a flow matches, one dimension after the other. (Policy files: `src/policy/tests/` of
//! twheel-user.)
#![allow(missing_docs)]

use std::cell::RefCell;

use twheel_common::policy::{
    Active, Dimensions, Ends, Header, Hook, Named, PortClasses, Protocol, Rules, Tables, Tuple,
    first_match,
};

fn set(rules: &[u16]) -> Rules {
    let mut set = Rules::NONE;
    rules.iter().for_each(|&rule| set.insert(rule));
    set
}

const TUPLE: Tuple = Tuple {
    source: [1, 2],
    destination: [3, 4],
    port: 443_u16.to_be(),
    interface: 7,
    hook: Hook::Egress,
    protocol: Protocol::Udp,
    vlans: 10 | 20 << 12,
    zone: 5,
};

/// Each dimension admits these rules; the questions are recorded.
struct Policy {
    dimensions: Dimensions,
    admit: Rules,
    asked: RefCell<Vec<String>>,
}

impl Policy {
    fn new(dimension: Dimensions, admit: Rules) -> Self {
        Self {
            dimensions: Dimensions::RULES.with(dimension),
            admit,
            asked: RefCell::default(),
        }
    }

    fn ask(&self, what: String) -> Rules {
        self.asked.borrow_mut().push(what);
        self.admit
    }

    fn ends(&self, what: String) -> Ends {
        Ends {
            admit: self.ask(what),
            either: Rules::ALL,
        }
    }
}

impl Tables for Policy {
    fn dimensions(&self) -> Dimensions {
        self.dimensions
    }
    fn protocol(&self, protocol: Protocol) -> Rules {
        self.ask(format!("{protocol:?}"))
    }
    fn hook(&self, hook: Hook) -> Rules {
        self.ask(format!("{hook:?}"))
    }
    fn port(&self, port: u16) -> Rules {
        self.ask(format!("port {port}"))
    }
    fn named(&self, named: Named, number: u32) -> Rules {
        self.ask(format!("{named:?} {number}"))
    }
    fn source(&self, address: [u64; 2]) -> Ends {
        self.ends(format!("source {address:?}"))
    }
    fn destination(&self, address: [u64; 2]) -> Ends {
        self.ends(format!("destination {address:?}"))
    }
}

#[test]
fn each_dimension_is_asked_for_what_the_flow_has_and_restricts_the_rules() {
    for (dimension, asked) in [
        (Dimensions::PROTOCOL, "Udp"),
        (Dimensions::HOOK, "Egress"),
        (Dimensions::PORT, "port 443"),
        (Dimensions::INTERFACE, "Interface 7"),
        (Dimensions::ZONE, "Zone 5"),
        (Dimensions::SOURCE, "source [1, 2]"),
        (Dimensions::DESTINATION, "destination [3, 4]"),
    ] {
        for (admitted, first) in [(&[9, 77][..], 9), (&[77], 77), (&[], 0)] {
            let policy = Policy::new(dimension, set(admitted));
            assert_eq!(first_match(&policy, &TUPLE), first, "{asked}");
            assert_eq!(policy.asked.take(), [asked]);
        }
    }
}

/// Each VLAN admits only the rule with its number.
#[test]
fn a_rule_passes_that_admits_the_outer_or_the_inner_vlan() {
    struct Vlans(RefCell<Vec<u32>>);
    impl Tables for Vlans {
        fn dimensions(&self) -> Dimensions {
            Dimensions::RULES.with(Dimensions::VLAN)
        }
        fn named(&self, named: Named, number: u32) -> Rules {
            assert_eq!(named, Named::Vlan);
            self.0.borrow_mut().push(number);
            set(&[number as u16 + 1])
        }
        fn protocol(&self, _: Protocol) -> Rules {
            panic!("no rule restricts it")
        }
        fn hook(&self, _: Hook) -> Rules {
            panic!("no rule restricts it")
        }
        fn port(&self, _: u16) -> Rules {
            panic!("no rule restricts it")
        }
        fn source(&self, _: [u64; 2]) -> Ends {
            panic!("no rule restricts it")
        }
        fn destination(&self, _: [u64; 2]) -> Ends {
            panic!("no rule restricts it")
        }
    }
    for ([outer, inner], asked) in [
        ([0, 0], &[0][..]),
        ([10, 0], &[10]),
        ([0, 20], &[20]),
        ([10, 20], &[10, 20]),
        ([20, 10], &[20, 10]),
    ] {
        let tuple = Tuple {
            vlans: outer | inner << 12,
            ..TUPLE
        };
        let tables = Vlans(RefCell::default());
        let lowest = asked.iter().min().copied().unwrap();
        assert_eq!(u32::from(first_match(&tables, &tuple)), lowest + 1);
        assert_eq!(*tables.0.borrow(), asked, "{outer} {inner}");
    }
}

#[test]
fn entries_of_different_kinds_and_policies_have_different_keys() {
    let kinds = [Named::Interface, Named::Vlan, Named::Zone];
    let keys = kinds.map(|kind| [0, 1].map(|set| kind.key(set, 7)));
    for (place, key) in keys.as_flattened().iter().enumerate() {
        assert_eq!(Named::set(*key), place as u32 % 2);
        assert!(!keys.as_flattened()[..place].contains(key));
    }
}

#[test]
fn an_identifier_of_icmp_is_no_port() {
    let policy = Policy::new(Dimensions::PORT, set(&[1]));
    let ping = Tuple {
        protocol: Protocol::Icmp,
        ..TUPLE
    };
    assert_eq!(first_match(&policy, &ping), 1);
    assert_eq!(policy.asked.take(), ["port 0"]);
}

#[test]
fn the_tries_are_not_asked_once_nothing_is_left() {
    let ends = Dimensions::SOURCE.with(Dimensions::DESTINATION);
    let policy = Policy::new(ends.with(Dimensions::HOOK), Rules::NONE);
    assert_eq!(first_match(&policy, &TUPLE), 0);
    assert_eq!(policy.asked.take(), ["Egress"]);
}

#[test]
fn sets_of_equal_words_meet_and_join_too() {
    // The same bit in each of the words.
    let places = [5, 69, 133, 197];
    for some in 1..16_u32 {
        let rules: Vec<u16> = (0..4)
            .filter(|word| some >> word & 1 != 0)
            .map(|word| places[word])
            .collect();
        let some = set(&rules);
        assert!(!some.is_empty(), "{rules:?}");
        assert_eq!(some.or(some), some);
        assert_eq!(some.and(some), some);
        assert_eq!(some.first(), rules[0]);
    }
}

#[test]
fn the_policy_that_counts_and_its_dimensions_are_one_word() {
    let all = Dimensions(0x1ff);
    for dimensions in [Dimensions(0), Dimensions::RULES, Dimensions::HOOK, all] {
        for set in [0, 1] {
            let active = Active::new(set, dimensions);
            assert_eq!((active.set(), active.dimensions()), (set, dimensions));
        }
    }
    // Two policies alternate: 0 follows 1.
    assert_eq!(Active::new(2, all), Active::new(0, all));
    assert!(all.has(Dimensions::HOOK.with(Dimensions::PORT)));
    assert!(!Dimensions::HOOK.has(Dimensions::HOOK.with(Dimensions::PORT)));
    assert_eq!(Dimensions::HOOK.with(Dimensions::HOOK), Dimensions::HOOK);
}

#[test]
fn each_port_has_a_class() {
    assert_eq!(size_of::<PortClasses>(), 128 << 10);
}

#[test]
fn small_dimensions_are_in_the_header_by_number() {
    let header = Header {
        protocols: [1, 2, 3].map(|rule| set(&[rule])),
        hooks: [4, 5].map(|rule| set(&[rule])),
        other_interfaces: set(&[6]),
        other_vlans: set(&[7]),
        other_zones: set(&[8]),
    };
    for (number, protocol) in Protocol::ALL.into_iter().enumerate() {
        assert_eq!(protocol as usize, number);
        assert_eq!(header.protocol(protocol).first(), number as u16 + 1);
    }
    for (number, hook) in [Hook::Ingress, Hook::Egress].into_iter().enumerate() {
        assert_eq!(Hook::from_raw(number as u32), hook);
        assert_eq!(header.hook(hook).first(), number as u16 + 4);
    }
    let kinds = [Named::Interface, Named::Vlan, Named::Zone];
    for (number, named) in kinds.into_iter().enumerate() {
        assert_eq!(header.other(named).first(), number as u16 + 6);
    }
    assert_eq!(
        Protocol::ALL.map(Protocol::name),
        ["tcp", "udp", "icmp"],
        "the name differs from that in a policy file"
    );
}
