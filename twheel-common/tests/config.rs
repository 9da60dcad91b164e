//! The configuration that programs get.

use std::collections::BTreeSet;

use twheel_common::{
    config::{SEATS, Watched, seat},
    state::elsewhere,
};

#[test]
fn what_is_told_of_an_interface_survives_packing() {
    for watched in [
        Watched::default(),
        Watched {
            place: 0xabcd,
            zone: 0x5f,
            flags: 0x81,
        },
    ] {
        assert_eq!(Watched::from_packed(watched.packed()), watched);
    }
}

#[test]
fn neighbours_have_seats_of_their_own() {
    let seats = |interfaces: &mut dyn Iterator<Item = u32>| {
        let seats: BTreeSet<_> = interfaces.map(seat).collect();
        assert!(seats.iter().all(|seat| *seat < SEATS));
        seats.len()
    };
    for first in [1, 1_000, 70_000] {
        assert_eq!(seats(&mut (first..first + 1_000)), 1_000, "{first}");
    }
    assert_eq!(
        seats(&mut (0..1_000).map(|number| elsewhere(number) | 2)),
        1_000
    );
}

#[test]
fn flags_and_places_are_told_apart() {
    let watched = Watched {
        place: 1,
        zone: 0,
        flags: Watched::IS_ABOVE,
    };
    assert!(watched.has(Watched::IS_ABOVE));
    assert!(watched.has(Watched::IS_ABOVE | Watched::IS_BELOW));
    assert!(!watched.has(Watched::IS_BELOW | Watched::IS_IP));
    assert!(watched.is_watched() && !Watched::IS_SEEN_BELOW.is_watched());
}
