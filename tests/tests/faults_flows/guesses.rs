//! Packets that do not belong to a live flow do not change it.

use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::Direction,
    numbers::{END_WINDOW, Positions, accepts_end},
    packet::parse,
    state::State,
};
use twheel_tests::{
    is_long,
    plane::{ACK, FIN, Plane, RST, Setup},
};

use crate::{
    Random,
    packets::{ACKNOWLEDGED, Live, Packet, WINDOW, hostile, never_sent},
    put,
};

/// A small table, which loads quickly.
const SMALL: Setup = Setup {
    max_flows: 64,
    ..Setup::DEFAULT
};

/// How two like flows end, of which one is attacked.
#[derive(Clone, Copy, Debug)]
enum End {
    Silence,
    Fins,
    Reset,
}

#[test]
fn what_does_not_belong_to_a_live_flow_changes_nothing_of_it() {
    let rounds = if is_long() { 600 } else { 60 };
    let mut planes = [false, true].map(|one_way| {
        let setup = Setup { one_way, ..SMALL };
        setup.load()
    });
    for seed in 0..rounds {
        let mut random = Random::new(seed);
        let plane = &mut planes[random.below(2) as usize];
        let (begun, before) = (plane.now(), plane.counters());
        // Near the point where the numbers wrap around, or anywhere.
        let first = [0, 1].map(|_| match random.coin() {
            true => random.below(4_000).wrapping_neg(),
            false => random.word(),
        });
        let simultaneous = random.below(4) == 0;
        let mut twins = [1, 2].map(|client| Live::open(plane, client, first, simultaneous));
        let end = random.choose(&[End::Silence, End::Fins, End::Reset]);
        let mut sent = 0;
        let mut storm = |plane: &mut Plane, random: &mut Random, live: &Live| {
            for _ in 0..random.below(20) {
                let (frame, out) = hostile(random, live);
                put(plane, &frame, out);
                sent += 1;
            }
        };
        for turn in 0..12 {
            plane.pass(u64::from(random.range(1, 5_000)));
            storm(plane, &mut random, &twins[0]);
            let [hit, spared] = twins.map(|live| live.fate(plane));
            assert_eq!(hit, spared, "seed {seed}, turn {turn}");
            let (back, data) = (random.coin(), random.choose(&[0, 1, 1400]));
            for live in &mut twins {
                live.say(plane, back, data);
            }
        }
        let seen = twins[0].fate(plane).unwrap().0;
        assert_eq!(seen.state(), State::Established, "seed {seed}");
        // Their own ends are still accepted, so the stored sequence numbers are right.
        for back in [false, true] {
            for live in &mut twins {
                match end {
                    End::Silence => {}
                    End::Fins => live.finish(plane, back),
                    End::Reset if back => {}
                    End::Reset => {
                        live.put(plane, live.packet(back, RST, live.next[0], 0));
                    }
                }
            }
        }
        let [hit, spared] = twins.map(|live| live.fate(plane));
        assert_eq!(hit, spared, "seed {seed}: {end:?}");
        let state = match end {
            End::Silence => State::Established,
            End::Fins => State::LastAck,
            End::Reset => State::Close,
        };
        assert_eq!(hit.unwrap().0.state(), state, "seed {seed}: {end:?}");
        // Until the last tick before the flow ends; later packets belong to no flow.
        let due = plane.now() + SMALL.timeout - SMALL.tick;
        let mut ends = Vec::new();
        while ends.len() < 2 {
            plane.pass(SMALL.tick);
            if matches!(end, End::Silence) && plane.now() < due {
                storm(plane, &mut random, &twins[0]);
            }
            ends.extend(plane.step().iter().map(|event| (event.at, event.reason)));
            assert!(
                plane.now() < begun + 1_000_000,
                "seed {seed}: the flow does not end"
            );
        }
        assert_eq!(ends[0], ends[1], "seed {seed}: {end:?}, after {sent}");
        let counters = plane.counters();
        let counted = |counter| counters.get(counter) - before.get(counter);
        assert_eq!(
            counted(Counter::Ignored) + counted(Counter::BadFlags),
            sent,
            "seed {seed}: some packets were counted otherwise"
        );
    }
}

/// Acknowledgments of what was never sent, and data far ahead, keep a flow alive and do nothing
/// else (docs/states.md). They change neither side's next sequence number, and so not which FINs
/// are accepted.
#[test]
fn a_storm_of_acknowledgments_moves_nothing_but_the_stamp() {
    let mut plane = SMALL.load();
    for seed in 0..if is_long() { 400 } else { 40 } {
        let mut random = Random::new(1_000 + seed);
        let first = [random.word(), random.word()];
        let mut twins = [1, 2].map(|client| Live::open(&mut plane, client, first, false));
        for _ in 0..10 {
            plane.pass(u64::from(random.range(1, 5_000)));
            for _ in 0..50 {
                let back = random.coin();
                let live = &twins[0];
                let next = live.next[usize::from(back)];
                let mut packet = live.packet(back, ACK, next, random.choose(&[0, 1, 1400]));
                match random.below(3) {
                    // A duplicate.
                    0 => packet.data = 0,
                    1 => {
                        packet.ack = packet.ack.wrapping_add(never_sent(&mut random));
                        // With the exact number, the packet would show that the data that it
                        // acknowledges took another path.
                        packet.seq = next.wrapping_sub(1);
                    }
                    // Far beyond all windows, or far behind.
                    _ => {
                        let far = random.range((1 << 24) + 1, u32::MAX - (1 << 12));
                        packet.seq = next.wrapping_add(far);
                    }
                }
                put(&mut plane, &packet.frame(), random.coin());
            }
            let (hit, spared) = (twins[0].fate(&mut plane), twins[1].fate(&mut plane));
            let ((hit, stamp, _), (spared, ..)) = (hit.unwrap(), spared.unwrap());
            assert_eq!(hit, spared, "seed {seed}");
            assert_eq!(
                stamp,
                plane.now() as u32,
                "seed {seed}: the packets did not renew the stamp"
            );
            for live in &mut twins {
                live.say(&mut plane, random.0.is_multiple_of(2), 100);
            }
        }
        // Neither flow takes its two FINs for one that is out of the window, nor for the same one
        // twice.
        for back in [false, true] {
            for live in &mut twins {
                live.finish(&mut plane, back);
            }
            let [hit, spared] = twins.map(|live| live.fate(&mut plane));
            assert_eq!(hit, spared, "seed {seed}");
        }
        plane.pass(10_100);
        let ends: Vec<_> = plane.step().iter().map(|it| (it.at, it.seen)).collect();
        assert_eq!(ends.len(), 2, "seed {seed}");
        assert_eq!(ends[0], ends[1], "seed {seed}");
    }
}

/// The share of RSTs or FINs with guessed numbers that is accepted, of 2^32 and 2^64 possibilities:
/// docs/states.md.
fn chance(flags: u8) -> f64 {
    let circle = 2f64.powi(32);
    let window = f64::from(WINDOW);
    let [behind, ahead] = ACKNOWLEDGED.map(f64::from);
    match flags {
        RST => (2.0 * window + 1.0) / circle,
        // Those behind are taken for old duplicates.
        _ if flags & RST != 0 => (window + 1.0) / circle,
        _ => (2.0 * window + 1.0) / circle * ((behind + ahead + 1.0) / circle),
    }
}

#[test]
fn who_does_not_know_the_numbers_has_the_chance_that_the_window_gives() {
    assert_eq!(END_WINDOW, WINDOW);
    let mut plane = SMALL.load();
    let live = Live::open(&mut plane, 1, [0x1234_5678, 0xffff_ff00], false);
    let seen = live.fate(&mut plane).unwrap().0;
    let mut segment = parse(live.packet(false, RST, 0, 0).frame().as_slice()).unwrap();
    let positions: Positions = match segment.direction {
        Direction::FromLow => live.next,
        Direction::FromHigh => [live.next[1], live.next[0]],
    };
    let tries = if is_long() { 1u32 << 28 } else { 1 << 23 };
    let mut random = Random::new(5);
    // Both numbers of a FIN must fit: by pure chance, 16 of all tries would, which proves little.
    // So one of the numbers is drawn from near the right one, and in the next case the other.
    let near = |position: u32, reach: u32, random: &mut Random| {
        let offset = random.below(2 * reach);
        position.wrapping_sub(reach).wrapping_add(offset)
    };
    let [behind, ahead] = ACKNOWLEDGED;
    let (seq_reach, ack_reach) = (4 * WINDOW, 4 * behind.max(ahead));
    let (mine, theirs) = match segment.direction {
        Direction::FromLow => (positions[0], positions[1]),
        Direction::FromHigh => (positions[1], positions[0]),
    };
    let times = |reach: u32| 2f64.powi(32) / (2.0 * f64::from(reach));
    for (what, flags, is_near, times) in [
        ("RST", RST, [false; 2], 1.0),
        ("RST with an ACK", RST | ACK, [false; 2], 1.0),
        (
            "FIN with a near sequence number",
            FIN | ACK,
            [true, false],
            times(seq_reach),
        ),
        (
            "FIN with a near acknowledgment",
            FIN | ACK,
            [false, true],
            times(ack_reach),
        ),
    ] {
        segment.flags = flags;
        let mut accepted = 0u32;
        for _ in 0..tries {
            (segment.seq, segment.ack) = (random.word(), random.word());
            if is_near[0] {
                segment.seq = near(mine, seq_reach, &mut random);
            }
            if is_near[1] {
                segment.ack = near(theirs, ack_reach, &mut random);
            }
            accepted += u32::from(accepts_end(positions, seen, &segment));
        }
        let expected = chance(flags) * times * f64::from(tries);
        let off = (f64::from(accepted) - expected).abs();
        println!("{what}: {accepted} of {tries} accepted, expected {expected:.1}");
        assert!(expected > 100.0, "{what}: {expected:.1} expected, too few");
        assert!(
            off < 5.0 * expected.sqrt(),
            "{what}: {accepted} of {tries}, expected {expected:.1}"
        );
    }
}

#[test]
fn the_loaded_programs_accept_of_blind_guesses_what_the_window_has() {
    let mut plane = SMALL.load();
    let tries = if is_long() { 1_000_000 } else { 60_000 };
    let mut random = Random::new(6);
    let mut live = Live::open(&mut plane, 1, [random.word(), random.word()], false);
    let (mut blind, mut hits) = (0u32, [0u32; 2]);
    for number in 0..tries {
        let back = random.coin();
        let (mine, theirs) = (live.next[usize::from(back)], live.next[usize::from(!back)]);
        let flags = random.choose(&[RST, RST | ACK, FIN | ACK]);
        // Every fourth packet knows where the window is and tries its edges.
        let guesses = number % 4 != 0;
        let seq = match guesses {
            true => random.word(),
            false => mine
                .wrapping_add(random.choose(&[WINDOW, WINDOW.wrapping_neg(), 0]))
                .wrapping_add(random.below(5))
                .wrapping_sub(2),
        };
        let ack = match guesses {
            true => random.word(),
            false => theirs,
        };
        let packet = Packet {
            client: 1,
            back,
            flags,
            seq,
            ack,
            data: 0,
        };
        let ahead = seq.wrapping_sub(mine) as i32;
        let window = WINDOW as i32;
        let acknowledged = theirs.wrapping_sub(ack) as i32;
        let [behind, beyond] = ACKNOWLEDGED.map(|it| it as i32);
        let expected = match flags {
            RST => (-window..=window).contains(&ahead),
            _ if flags & RST != 0 => (0..=window).contains(&ahead),
            _ => (-window..=window).contains(&ahead) && (-beyond..=behind).contains(&acknowledged),
        };
        let before = plane.count(Counter::Changed);
        put(&mut plane, &packet.frame(), random.coin());
        let changed = plane.count(Counter::Changed) > before;
        assert_eq!(changed, expected, "{packet:?}, {ahead} ahead");
        blind += u32::from(guesses);
        hits[usize::from(guesses)] += u32::from(changed);
        if changed {
            // The connection has ended: open another one.
            let next = live.next[usize::from(!back)];
            put(&mut plane, &live.packet(!back, RST, next, 0).frame(), back);
            live = Live::open(&mut plane, 1, [random.word(), random.word()], false);
            plane.drain();
        }
    }
    let chance = [RST, RST | ACK, FIN | ACK].map(chance).iter().sum::<f64>() / 3.0;
    let expected = chance * f64::from(blind);
    println!(
        "{} of {blind} guesses hit, expected {expected:.1}; {} hits at the edges",
        hits[1], hits[0]
    );
    assert!(f64::from(hits[1]) <= expected + 5.0 * expected.sqrt() + 1.0);
    assert!(hits[0] > blind / 10, "the edges were seldom hit");
}

#[test]
fn a_port_used_again_at_speed_has_each_of_its_lives_reported_once() {
    let lives: usize = if is_long() { 200_000 } else { 10_000 };
    let mut plane = SMALL.load();
    let mut random = Random::new(7);
    let mut events: Vec<Event> = Vec::new();
    let mut begun = Vec::new();
    for number in 0..lives {
        plane.pass(u64::from(random.range(1, 3)));
        begun.push(plane.now());
        // The next connection takes the same port again.
        let first = [random.word(), random.word()];
        let mut live = Live::open(&mut plane, 1, first, false);
        match random.below(3) {
            0 => live.put(&mut plane, live.packet(true, RST, live.next[1], 0)),
            order => {
                live.finish(&mut plane, order == 1);
                live.finish(&mut plane, order != 1);
                live.say(&mut plane, order == 1, 0);
            }
        }
        // A late segment of the previous connection.
        let late = live.packet(number % 2 == 0, FIN | ACK, first[0] ^ (1 << 31), 0);
        live.put(&mut plane, late);
        events.extend(plane.drain());
    }
    assert_eq!(
        events.len(),
        lives - 1,
        "not every flow but the last has ended"
    );
    plane.pass(130_000);
    events.extend(plane.step());
    assert!(plane.step().is_empty());
    let lived: Vec<u64> = events.iter().map(|it| it.at - u64::from(it.age)).collect();
    assert_eq!(
        lived, begun,
        "the flows were not reported once each and in order"
    );
    let of = |reason: Reason| {
        events
            .iter()
            .filter(|it| it.reason == reason as u32)
            .count()
    };
    assert_eq!(of(Reason::Superseded), lives - 1);
    assert_eq!(plane.count(Counter::Superseded), lives as u64 - 1);
    assert_eq!(plane.count(Counter::EventsLost), 0);
    assert_eq!(plane.counters().live(), 0);
}
