//! Where packets are counted.

use twheel_common::{
    flow::Direction,
    packet::{Segment, tcp},
    point::{Passage, Point, Sighting, continues, sighting},
    policy::Hook,
    state::{Seen, View},
};

const PATIENCE: u32 = 250;

#[test]
fn a_point_is_a_place_and_a_hook() {
    for place in [1, 2, 17, 0x7fff] {
        for hook in [Hook::Ingress, Hook::Egress] {
            let point = Point::new(place, hook);
            assert_eq!((point.interface(), point.hook()), (place, hook));
            assert_ne!(point, Point::NONE);
        }
    }
    assert_eq!(Point::new(0, Hook::Egress), Point::NONE);
}

#[test]
fn a_flow_is_seen_at_its_initiators_point_or_else_at_the_others() {
    let [low, high] = [2, 5].map(|place| Point::new(place, Hook::Ingress));
    for (initiator, point) in [(Direction::FromLow, low), (Direction::FromHigh, high)] {
        let seen = Seen::first(initiator, tcp::SYN, View::default()).unwrap();
        assert_eq!(Point::of_flow([low, high], seen), point);
        assert_eq!(Point::of_flow([low, Point::NONE], seen), low);
        assert_eq!(Point::of_flow([Point::NONE, high], seen), high);
        assert_eq!(Point::of_flow([Point::NONE; 2], seen), Point::NONE);
    }
}

#[test]
fn packets_are_counted_where_they_were_first_seen() {
    let [here, there] = [Hook::Ingress, Hook::Egress].map(|hook| Point::new(2, hook));
    let see_if = |may_be_known, point, since: i64, is_next| {
        let now = 1_000_000u64;
        let counted = (now as i64 - since) as u16;
        let passage = Passage {
            here,
            now,
            may_be_known,
            continues: is_next,
        };
        sighting(point, counted, PATIENCE, passage)
    };
    let see = |point, since, is_next| see_if(true, point, since, is_next);
    for since in [0, 1, 250, 251, 100_000] {
        // Nobody can have seen it before.
        assert_eq!(see_if(false, here, since, false), Sighting::Here);
        assert_eq!(see_if(false, there, since, false), Sighting::Moved);
        assert_eq!(see(Point::NONE, since, false), Sighting::Here);
        assert_eq!(see(here, since, false), Sighting::Here);
    }
    // It was counted there just now, or another CPU has counted a little later than we looked.
    for since in [0, 1, 250, -1, -200] {
        assert_eq!(see(there, since, false), Sighting::Again, "{since}");
        assert_eq!(see(there, since, true), Sighting::Moved, "{since}");
    }
    for since in [251, 1000, 60_000, 0xfeff] {
        assert_eq!(see(there, since, false), Sighting::Moved, "{since}");
    }
    assert_eq!(
        see(there, 0xff00, false),
        Sighting::Again,
        "256 units ahead"
    );
}

#[test]
fn the_initiators_point_is_that_of_its_side() {
    let points = [Point::new(3, Hook::Ingress), Point::new(4, Hook::Egress)];
    for (initiator, point) in [
        (Direction::FromLow, points[0]),
        (Direction::FromHigh, points[1]),
    ] {
        let seen = Seen::first(initiator, tcp::SYN, View::default()).unwrap();
        assert_eq!(Point::of_initiator(points, seen), point);
    }
}

#[test]
fn the_next_segment_of_a_side_was_counted_nowhere() {
    let view = View::default();
    let segment = |direction, flags, seq, data: u32| Segment {
        seq,
        end: seq + data,
        flags,
        direction,
        ..Segment::NONE
    };
    let (low, high) = (Direction::FromLow, Direction::FromHigh);
    let seen = Seen::first(low, tcp::ACK, view).unwrap();
    let positions = [100, 200];
    let next = |direction, flags, seq, data| {
        continues(seen, positions, &segment(direction, flags, seq, data))
    };
    assert!(next(low, tcp::ACK, 100, 10));
    assert!(!next(low, tcp::ACK, 100, 0), "an acknowledgment alone");
    assert!(!next(low, tcp::ACK, 90, 10), "it was counted");
    for flag in [tcp::SYN, tcp::FIN] {
        assert!(
            !next(low, tcp::ACK | flag, 100, 1),
            "it may wait for its acknowledgment"
        );
    }
    assert!(!next(low, tcp::ACK, 101, 10), "there is a gap");
    assert!(
        !next(high, tcp::ACK, 200, 10),
        "nothing is known of that side"
    );
    assert!(!next(low, 0x40, 100, 10), "a datagram has no number");
}
