//! Owners, similar keys, and where keys are put.

use twheel_common::{
    flow::FlowKey,
    table::{self, BUSY, Details, Hash, Inserted, LINE, Place, TWIN, WINDOW},
};

use crate::{
    AT, HOME, TWINS, Table, assert_settled, at_each_step, begins, end, enter, find, insert, key,
    memory::Memory, new, word_at,
};

#[test]
fn an_owner_without_its_rule_is_the_same_else() {
    let table = &new();
    insert(table, &[0]);
    let details = table.held_at(AT).details;
    let without = table::without_rule(details.owner);
    assert_eq!(table::rule(without), 0);
    assert_eq!(table::cpu(without), details.cpu());
    assert_eq!(without, details.owner & !(0x1ff << 20));
    assert_eq!(
        table::key(details.addresses, details.ports, without, 0),
        key(0)
    );
}

#[test]
fn an_owner_has_a_protocol_a_cpu_and_a_rule() {
    const PROTOCOLS: [u8; 4] = [1, 6, 17, 58];
    let key = |proto| FlowKey::new([0, 1], 1, [0, 2], 2, proto).0;
    for proto in PROTOCOLS {
        let owner = Details::owner_of(&key(proto), 0xabc, 0x155);
        let other = table::with_rule(owner, 0x0aa);
        // A number beyond all rules.
        let wide = table::with_rule(owner, 0xffff);
        for (owner, rule) in [(owner, 0x155), (other, 0x0aa), (wide, 0x1ff)] {
            assert_eq!((table::cpu(owner), table::rule(owner)), (0xabc, rule));
            for wanted in PROTOCOLS {
                assert_eq!(table::is_of(owner, &key(wanted)), wanted == proto);
            }
        }
    }
}

#[test]
fn keys_that_share_a_part_are_others() {
    let [own, address, port] = [[1, 2], [9, 2], [1, 9]].map(|[address, port]| {
        let source = [0, u64::from(address as u8)];
        FlowKey::new(source, port, [0, 77], 443, 6).0
    });
    // With the same fingerprint, and with another one.
    for (other, fingerprint) in [(address, 3), (port, 3), (address, 5), (port, 5)] {
        let table = &Memory::new(((HOME + WINDOW) / LINE) as usize);
        let places = [3, fingerprint].map(|fingerprint| Place {
            home: HOME,
            fingerprint,
        });
        let enter =
            |key: &FlowKey, place| match table::insert(table, place, key, &begins(0, table.take()))
            {
                Inserted::New(at, _) => at,
                _ => panic!("the key exists already"),
            };
        let (at, beside) = (enter(&own, places[0]), enter(&other, places[1]));
        assert_eq!(table::find(table, places[0], &own), Some(at));
        assert_eq!(table::find(table, places[1], &other), Some(beside));
        let word = word_at(table, at);
        assert_eq!(table::change(table, at, &other, word, word), None);
        assert_eq!(table::change(table, at, &own, word, word), Some(Ok(word)));
    }
}

#[test]
fn two_with_one_fingerprint_are_told_apart() {
    let [first, second] = [TWINS, TWINS + 1];
    let marked = |table: &Table, number| {
        let at = find(table, number).unwrap();
        assert_eq!(table.held_at(at).key(), key(number));
        table.held_at(at).tag & TWIN != 0
    };
    // Both are entered at once.
    at_each_step(
        |_| {},
        |table| insert(table, &[second]),
        |table| enter(table, first),
        |table, entered| {
            assert!(entered.unwrap().1);
            assert!(marked(table, first) && marked(table, second));
            assert_settled(table, &[first, second]);
        },
    );
    // One is looked for while the other is entered: the two are told apart before the second can be
    // found.
    at_each_step(
        |table| insert(table, &[first]),
        |table| {
            let found = find(table, first).map(|at| table.held_at(at).key());
            assert_eq!(found, Some(key(first)));
            let found = find(table, second).map(|at| table.held_at(at).tag & BUSY);
            assert!(found.is_none_or(|busy| busy == 0));
        },
        |table| enter(table, second),
        |table, _| assert_settled(table, &[first, second]),
    );
    at_each_step(
        |table| insert(table, &[first]),
        |table| insert(table, &[second]),
        |table| find(table, first).map(|at| table.held_at(at).key()),
        |table, found| {
            assert_eq!(found, Some(key(first)));
            assert_settled(table, &[first, second]);
        },
    );
    // One ends while the other is entered, and further flows take its record.
    for others in [&[][..], &[1, 2]] {
        at_each_step(
            |table| insert(table, &[first]),
            |table| {
                assert!(end(table, first));
                insert(table, others);
            },
            |table| enter(table, second),
            |table, entered| {
                assert!(entered.unwrap().1);
                let mut left = others.to_vec();
                left.push(second);
                assert_settled(table, &left);
            },
        );
    }
}

#[test]
fn behind_the_last_home_there_is_a_window() {
    for (max_flows, homes) in [(0, 64), (64, 64), (65, 65), (1_000, 1_000)] {
        let hash = Hash::new([1; 11], max_flows);
        assert_eq!((hash.homes, hash.lines()), (homes, homes + 31));
        assert_eq!(hash.records(), 2 * homes + 62);
    }
}

/// Multilinear hashing in pairs, scrambled, as its documentation describes it.
#[test]
fn places_are_those_of_the_hash() {
    let mut random = 1u64;
    let mut next = || {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        random ^ random >> 29
    };
    for _ in 0..1_000 {
        let hash = Hash::new([(); 11].map(|()| next()), 1_000_000);
        let key = FlowKey::from_parts([(); 4].map(|()| next()), next() & 0xff_ffff_ffff);
        let [a, b, c, d] = key.addresses();
        let mut sum = u128::from(hash.keys[0]);
        for (number, word) in [a, b, c, d, key.ports()].into_iter().enumerate() {
            let [low, high] = [word as u32, (word >> 32) as u32].map(u64::from);
            let first = hash.keys[2 * number + 1].wrapping_add(low);
            let second = hash.keys[2 * number + 2].wrapping_add(high);
            sum += u128::from(first.wrapping_mul(second));
        }
        let mut home = (sum as u64 >> 32) as u32;
        home = home ^ home >> 15;
        home = (u64::from(home) * 0x2c1b_3c6d) as u32;
        home = home ^ home >> 12;
        let home = u128::from(home) * u128::from(hash.homes) / (1 << 32);
        let place = hash.place(&key);
        assert_eq!(u128::from(place.home), 2 * home);
        assert_eq!(place.fingerprint, sum as u64 >> 8 | 1);
    }
}
