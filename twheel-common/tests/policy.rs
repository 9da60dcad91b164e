//! Which rule a flow meets, one dimension after the other. (Policy files are `tests/policy.rs` of twheel-user.)
#![allow(missing_docs)]

use std::cell::RefCell;

use twheel_common::policy::{
    Active, Dimensions, Ends, Header, Hook, PortClasses, Protocol, Rules, Tables, Tuple,
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
};

/// Each dimension admits these; what was asked.
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
    fn interface(&self, index: u32) -> Rules {
        self.ask(format!("interface {index}"))
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
        (Dimensions::INTERFACE, "interface 7"),
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
    // The same bit of each of the words.
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
    let all = Dimensions(0x7f);
    for dimensions in [Dimensions(0), Dimensions::RULES, Dimensions::HOOK, all] {
        for set in [0, 1] {
            let active = Active::new(set, dimensions);
            assert_eq!((active.set(), active.dimensions()), (set, dimensions));
        }
    }
    // Policies alternate: the one after 1 is 0.
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
    };
    for (number, protocol) in Protocol::ALL.into_iter().enumerate() {
        assert_eq!(protocol as usize, number);
        assert_eq!(header.protocol(protocol).first(), number as u16 + 1);
    }
    for (number, hook) in [Hook::Ingress, Hook::Egress].into_iter().enumerate() {
        assert_eq!(Hook::from_raw(number as u32), hook);
        assert_eq!(header.hook(hook).first(), number as u16 + 4);
    }
    assert_eq!(
        Protocol::ALL.map(Protocol::name),
        ["tcp", "udp", "icmp"],
        "as in a policy file"
    );
}
