//! Deadlines.
#![allow(missing_docs)]

use std::mem::MaybeUninit;

use twheel_common::{
    flow::{Direction, FlowKey, MAX_AGE, Word, age, idle},
    state::Seen,
};

#[test]
fn a_stamp_from_the_future_is_young() {
    assert_eq!(idle(1000, 1001), 0);
    assert_eq!(
        idle(u64::from(u32::MAX), 5),
        0,
        "written after the stamp has wrapped"
    );
    assert_eq!(idle(1 << 32, u32::MAX), 1);
}

#[test]
fn a_flow_from_the_future_is_young_and_an_old_one_old() {
    assert_eq!(age(1_000, 1_001), 0);
    assert_eq!(age(1 << 32, 5), 0);
    assert_eq!(age((1 << 32) + 7, 5), 2);
    assert_eq!(age(0, 0x8000_0000 - 100_000), MAX_AGE + 100_000);
    // 2^16 units are a little.
    assert_eq!(age(0, 1 << 16), 0);
    assert_eq!(age(0, (1 << 16) + 1), u32::MAX - (1 << 16));
    // Half of what 32 bits can tell.
    assert_eq!(MAX_AGE, 0x8000_0000);
}

#[test]
fn a_word_holds_32_bits_of_the_clock_12_of_the_generation_and_20_of_what_was_seen() {
    for (now, generation, seen) in [
        (0, 0, 0),
        (0xffff_ffff, 0, 0),
        (0, 0xfff, 0),
        (0, 0, 0xf_ffff),
        (0xffff_ffff, 0xfff, 0xf_ffff),
        (0x1234_5678, 0x9ab, 0xc_def0),
    ] {
        let word = Word::new(now, generation, Seen(seen));
        let expected = now | u64::from(generation) << 32 | u64::from(seen) << 44;
        assert_eq!(word.0, expected);
        assert_eq!(u64::from(word.stamp()), now);
        assert_eq!(word.generation(), generation);
        assert_eq!(word.seen(), Seen(seen));
    }
    // Of the clock its low bits; generations wrap.
    let word = Word::new(7 << 32 | 5, 0x1003, Seen(1));
    assert_eq!((word.stamp(), word.generation()), (5, 3));
    assert_eq!(word.seen(), Seen(1));
}

#[test]
fn a_stamp_only_ever_becomes_younger() {
    let stamps = [0, 5, 0x7fff_ffff, 0x8000_0001, u32::MAX - 1];
    for stamp in stamps {
        let word = Word::new(stamp.into(), 3, Seen(2));
        for later in [1, 2, 1000, 0x7fff_ffff] {
            // The clock's upper half says nothing.
            let now = 9 << 32 | u64::from(stamp.wrapping_add(later));
            assert!(word.is_older_than(now), "{stamp} {later}");
            let touched = word.with(now, Seen(4));
            assert_eq!(touched, Word::new(now, 3, Seen(4)));
        }
        // A CPU that is late, by however little, moves nothing back; and one at the same time changes nothing.
        for earlier in [0, 1, 2, 1000, 0x7fff_ffff] {
            let now = stamp.wrapping_sub(earlier).into();
            assert!(!word.is_older_than(now), "{stamp} {earlier}");
            assert_eq!(word.with(now, Seen(4)), Word::new(stamp.into(), 3, Seen(4)));
        }
        assert_eq!(word.with_seen(Seen(4)), Word::new(stamp.into(), 3, Seen(4)));
    }
}

#[test]
fn a_word_that_is_dead_says_which_flow_it_was() {
    let word = Word::new(77, 5, Seen(0x3_0042));
    assert!(!word.is_dead());
    let dead = word.dead();
    assert!(dead.is_dead());
    assert_eq!((dead.stamp(), dead.generation()), (77, 5));
    assert_eq!(dead.seen(), Seen::DEAD);
}

#[test]
fn words_are_the_same_but_for_an_inbox() {
    let word = Word::new(77, 5, Seen(2));
    assert!(word.is_same(word));
    let posted = word.with_seen(Seen(2).posted());
    assert!(word.is_same(posted) && posted.is_same(word));
    for bit in 0..64 {
        let other = Word(word.0 ^ 1 << bit);
        assert_eq!(word.is_same(other), other == posted, "bit {bit}");
    }
    // The high half's bits that others clear by an AND.
    let high = |word: Word| (word.0 >> 32) as u32;
    assert_eq!(high(posted) & Word::DELIVERED, high(word));
    let starting = word.with_seen(Seen(2).starting());
    assert_ne!(starting, word);
    assert_eq!(high(starting) & Word::STARTED, high(word));
    assert_eq!(high(posted) & Word::STARTED, high(posted));
    assert_eq!(high(starting) & Word::DELIVERED, high(starting));
}

/// The words of an IPv6 address.
fn words(address: &str) -> [u64; 2] {
    let bytes = address.parse::<std::net::Ipv6Addr>().unwrap().octets();
    [0, 8].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()))
}

#[test]
fn both_directions_have_one_key_and_each_end_its_own_side() {
    for (a, b) in [
        (("2001:db8::1", 1000), ("2001:db8::2", 80)),
        (("2001:db8::1", 1000), ("2001:db9::1", 80)),
        (("2001:db8:1::1", 7), ("2001:db8::2", 7)),
        (("2001:db8::1", 1), ("2001:db8::1", 2)),
    ] {
        let end = |(address, port): (&str, u16)| (words(address), port.to_be());
        let ((from, source), (to, destination)) = (end(a), end(b));
        let (key, there) = FlowKey::new(from, source, to, destination, 6);
        let (same, back) = FlowKey::new(to, destination, from, source, 6);
        assert_eq!(key, same);
        assert_eq!(there.reverse(), back);
        assert_eq!(back.reverse(), there);
        for (direction, (address, port)) in [(there, a), (back, b)] {
            assert_eq!(
                key.sender(direction),
                format!("[{address}]:{port}").parse().unwrap()
            );
        }
        assert_eq!(key.proto(), 6);
        let (udp, _) = FlowKey::new(from, source, to, destination, 17);
        assert_ne!(key, udp);
        // What the programs in the kernel copy word by word.
        let parts = FlowKey::from_parts(key.addresses(), key.ports());
        assert_eq!(parts, key);
        let mut place = MaybeUninit::uninit();
        // SAFETY: the place is ours, and it is written whole.
        let stored = unsafe {
            key.store(place.as_mut_ptr());
            place.assume_init()
        };
        assert_eq!(stored, key);
    }
    // With both ends the same, either will do.
    let end = words("2001:db8::1");
    let (_, direction) = FlowKey::new(end, 7, end, 7, 6);
    assert_eq!(direction, Direction::FromLow);
}

#[test]
fn a_key_has_its_vlans_and_its_zone() {
    for proto in [1, 6, 17, 58] {
        let (key, _) = FlowKey::new([0, 1], 0xffff, [0, 2], 0xffff, proto);
        assert_eq!((key.vlans(), key.zone(), key.proto()), ([0, 0], 0, proto));
        for (outer, inner, zone) in [(1, 0, 0), (4094, 1, 1), (0x555, 0xaaa, 63), (0, 0, 32)] {
            let vlans = outer | inner << 12;
            let placed = key.in_vlans(vlans).in_zone(zone);
            assert_eq!(placed.packed_vlans(), vlans);
            assert_eq!(placed.vlans(), [outer, inner].map(|vlan| vlan as u16));
            assert_eq!((u32::from(placed.zone()), placed.proto()), (zone, proto));
            // What the ports say is as before.
            assert_eq!(placed.ports() as u32, key.ports() as u32);
            assert_ne!(placed, key);
        }
        // A zone beyond the places that there are does not reach into the tags.
        assert_eq!(key.in_zone(64 | 5).vlans(), [0, 0]);
        assert_eq!(key.in_zone(64 | 5).zone(), 5);
    }
}
