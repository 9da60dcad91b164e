//! What crosses the kernel boundary and is too small for a file of its own: numbers, names, ticks,
//! counters, sources.
#![allow(missing_docs)]

use std::net::Ipv6Addr;

use twheel_common::{
    bits,
    config::{RULES, Tick, UNRULED},
    counter::{COUNT, Counter, Counters, FIRST_INTERFACE, MAX_INTERFACES, NO_INTERFACE, USERSPACE},
    event::{BEGUN, Birth, Event, Reason, Record, RtoExpired, UPDATED},
    flow::{FlowKey, Word},
    point::Point,
    quota::source,
    state::{Seen, State},
    step::{Answer, Delete, Deleted, Enter, MAX_DELETES, Outcome, Step, Sweep},
};

#[test]
fn a_tick_is_the_one_that_a_time_lies_in() {
    let tick = Tick(100);
    for (time, of, begin, from) in [
        (0, 0, 0, 0),
        (1, 0, 0, 1),
        (99, 0, 0, 1),
        (100, 1, 100, 1),
        (101, 1, 100, 2),
        (250, 2, 200, 3),
    ] {
        assert_eq!(tick.number(time), of);
        assert_eq!(tick.begin(time), begin);
        assert_eq!(tick.from(time), from);
    }
    // No running twheel sets a tick of 0.
    assert_eq!(Tick(0).number(7), 7);
}

#[test]
fn the_last_numbers_are_kept_apart() {
    // 0 means no rule; the last number has the timeouts of flows without a rule.
    assert_eq!(usize::from(UNRULED) + 1, RULES);
    // First what belongs to no interface, then the running twheel's own, and then the interfaces.
    assert_eq!([NO_INTERFACE, USERSPACE, FIRST_INTERFACE], [0, 1, 2]);
}

#[test]
fn bits_and_indices_have_their_numbers() {
    for bit in 0..64 {
        assert_eq!(bits::lowest(1 << bit), bit);
        assert_eq!(bits::lowest(u64::MAX << bit), bit);
    }
    for number in [0, 1, 2, 511, u16::MAX] {
        assert_eq!(bits::index(number), usize::from(number));
    }
}

#[test]
fn reasons_have_their_numbers_and_names() {
    let expected = [
        (1, Reason::Idle, "idle"),
        (2, Reason::Closed, "closed"),
        (3, Reason::Reset, "reset"),
        (4, Reason::Superseded, "superseded"),
        (5, Reason::Evicted, "evicted"),
        (6, Reason::Deleted, "deleted"),
        (7, Reason::Flushed, "flushed"),
    ];
    for (number, reason, name) in expected {
        assert_eq!(Reason::from_raw(number), Some(reason));
        assert_eq!(reason.name(), name);
    }
    assert_eq!(Reason::from_raw(0), None);
    assert_eq!(Reason::from_raw(8), None);
}

#[test]
fn a_flow_expires_idle_closed_or_reset() {
    for state in State::ALL {
        let expected = match state {
            State::LastAck | State::TimeWait => Reason::Closed,
            State::Close => Reason::Reset,
            _ => Reason::Idle,
        };
        assert_eq!(Reason::of_expiry(Seen(state as u32)), expected, "{state:?}");
    }
}

#[test]
fn events_say_what_was_seen() {
    let event = Event {
        key: FlowKey::NONE,
        number: 1,
        at: 0,
        age: 0,
        idle: 0,
        seen: 0x1234,
        reason: 1,
        cpu: 0,
        rule: 0,
        point: Point::NONE,
        birth: Birth::default(),
        account: Default::default(),
        pace: Default::default(),
        positions: [0; 2],
        before: Default::default(),
        since: 0,
        updates: 0,
    };
    assert_eq!(event.seen(), Seen(0x1234));
    let record = |reason| Record::from(Event { reason, ..event });
    assert!(matches!(record(BEGUN), Record::Begun(_)));
    assert!(matches!(record(UPDATED), Record::Updated(_)));
    for reason in Reason::ALL {
        assert!(matches!(record(reason as u32), Record::Ended(_)));
    }
    let expired = RtoExpired {
        key: FlowKey::NONE,
        number: 2,
        at: 0,
        age: 0,
        reserved: 0,
        direction: 0,
        birth: Birth::default(),
        seen: 0x4321,
        rule: 0,
        point: Point::NONE,
        outstanding: 1,
        expiries: 1,
        pace: Default::default(),
    };
    assert_eq!(expired.seen(), Seen(0x4321));
}

#[test]
fn a_birth_says_the_first_direction_and_the_generation() {
    for is_outgoing in [false, true] {
        for generation in [0, 1, 0x7ff, 0xfff] {
            let word = Word::new(u64::MAX, generation, Seen(0xfffff));
            let birth = Birth::new(is_outgoing, word);
            assert_eq!(birth.is_outgoing(), is_outgoing);
            assert_eq!(birth.generation(), generation);
        }
    }
}

#[test]
fn answers_of_programs_have_their_numbers() {
    for (number, outcome) in [
        (1, Outcome::Done),
        (2, Outcome::Budget),
        (3, Outcome::RingFull),
    ] {
        assert_eq!(Outcome::from_raw(number), Some(outcome));
    }
    assert_eq!(
        Outcome::from_raw(0),
        None,
        "0 is what userspace writes before the call"
    );
    for (number, deleted) in [
        (101, Deleted::Done),
        (102, Deleted::Changed),
        (103, Deleted::RingFull),
        (104, Deleted::Elsewhere),
        (105, Deleted::Posted),
    ] {
        assert_eq!(Deleted::from_raw(number), Some(deleted));
        assert_eq!(
            Reason::from_raw(number),
            None,
            "a reason has the same number"
        );
    }
    for reason in Reason::ALL {
        assert_eq!(Deleted::from_raw(reason as u32), None);
    }
}

#[test]
fn an_answer_is_as_long_as_the_longest_argument() {
    assert_eq!(size_of::<Delete>(), 16);
    assert_eq!(size_of::<Answer>(), MAX_DELETES * 16);
    for argument in [size_of::<Step>(), size_of::<Sweep>(), size_of::<Enter>()] {
        assert!(argument <= size_of::<Answer>());
    }
}

#[test]
fn the_last_interface_has_the_last_index_of_15_bits() {
    assert_eq!(FIRST_INTERFACE + MAX_INTERFACES - 1, 0x7fff);
}

#[test]
fn counters_of_cpus_add_up_one_by_one() {
    let one = Counters(std::array::from_fn(|number| number as u64 + 1));
    let other = Counters(std::array::from_fn(|number| 1000 * number as u64));
    let sum = Counters::sum([&one, &other]);
    for (number, counter) in Counter::ALL.iter().enumerate() {
        assert_eq!(one.get(*counter), number as u64 + 1);
        assert_eq!(sum.get(*counter), 1001 * number as u64 + 1);
    }
    let mut added = one;
    added.add(&other);
    assert_eq!(added, sum);
    assert_eq!(Counters::sum([]), Counters([0; COUNT]));
}

#[test]
fn flows_that_came_and_did_not_go_are_live() {
    let mut counters = Counters::default();
    let mut count = |counter: Counter, by| {
        counters.0[counter as usize] += by;
        counters.live()
    };
    assert_eq!(count(Counter::Created, 100), 100);
    assert_eq!(count(Counter::Expired, 30), 70);
    assert_eq!(count(Counter::Evicted, 20), 50);
    assert_eq!(count(Counter::Deleted, 10), 40);
    // These count the next flow of the same key, and what does not change the number of flows.
    assert_eq!(count(Counter::Superseded, 5), 40);
    assert_eq!(count(Counter::OverQuota, 5), 40);
    // Counted as ended before it was counted as begun.
    assert_eq!(count(Counter::Deleted, 50), 0);
}

/// An address in the form that a key has.
fn words(address: &str) -> [u64; 2] {
    let bytes = address.parse::<Ipv6Addr>().unwrap().octets();
    [0, 8].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()))
}

#[test]
fn an_ipv4_address_answers_for_itself_and_an_ipv6_one_for_its_network() {
    let [a, b] = ["::ffff:192.0.2.1", "::ffff:192.0.2.2"].map(words);
    assert_eq!(source(a), a);
    assert_ne!(source(a), source(b));
    let [a, b, c] = ["2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:2::1"].map(words);
    assert_eq!(source(a), words("2001:db8:0:1::"));
    assert_eq!(
        source(a),
        source(b),
        "addresses of one network are one source"
    );
    assert_ne!(source(a), source(c));
}

#[test]
fn the_documents_table_of_counters_says_what_the_program_says() {
    let events = include_str!("../../docs/events.md");
    let (_, table) = events.split_once("| counter | counts |").unwrap();
    let rows: Vec<_> = table
        .lines()
        .filter_map(|row| {
            row.strip_prefix("| `")?
                .strip_suffix(" |")?
                .split_once("` | ")
        })
        .map(|(name, text)| (name, plain(text)))
        .collect();
    let counters: Vec<_> = Counter::ALL
        .iter()
        .map(|it| (it.name(), it.meaning().to_owned()))
        .collect();
    assert_eq!(rows, counters);
}

/// Text without links and marks for code.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        let (label, after) = link.split_once("](").unwrap();
        plain += before;
        plain += label;
        rest = after.split_once(')').unwrap().1;
    }
    (plain + rest).replace('`', "")
}
