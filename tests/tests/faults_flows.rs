//! Hostile flows: what others send changes no live flow's fate, and no source keeps all of a full table.
//!
//! Under virtual time, but for the last, whose hosts and connections are real.
#![allow(missing_docs)]

use std::{
    array,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{MapData, RingBuf};
use etherparse::{PacketBuilder, TcpHeader};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use twheel::{
    share::{Holder, Reader},
    stepper::pin_to,
};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::{Direction, FlowKey, Word},
    numbers::{END_WINDOW, Positions, accepts_end},
    packet::{parse, tcp},
    quota::{CALL, LASTS},
    state::{Seen, State},
};
use twheel_tests::{
    is_soak,
    netns::{CLIENT, Family, Pair, SERVER, Twheel, require_root},
    plane::{ACK, FIN, Plane, RST, SYN, Setup, frame},
};

/// xorshift64*
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn word(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(bound)) >> 32) as u32
    }

    /// From `from` up to `to`, inclusive.
    fn range(&mut self, from: u32, to: u32) -> u32 {
        from + self.below(to - from + 1)
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }
}

/// A segment of the connection of a client; `back`: the server's.
#[derive(Clone, Copy, Debug)]
struct Packet {
    client: u32,
    back: bool,
    flags: u8,
    seq: u32,
    ack: u32,
    data: usize,
}

impl Packet {
    fn frame(self) -> Vec<u8> {
        let client = ([10, 0, 0, 1], 1024 + self.client as u16);
        let server = ([192, 0, 2, 1], 80);
        let (from, to) = if self.back {
            (server, client)
        } else {
            (client, server)
        };
        let mut header = TcpHeader::new(from.1, to.1, self.seq, 1024);
        header.acknowledgment_number = self.ack;
        header.fin = self.flags & FIN != 0;
        header.syn = self.flags & SYN != 0;
        header.rst = self.flags & RST != 0;
        header.ack = self.flags & ACK != 0;
        header.psh = self.flags & tcp::PSH != 0;
        header.urg = self.flags & tcp::URG != 0;
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4(from.0, to.0, 64)
            .tcp_header(header)
            .write(&mut frame, &vec![7; self.data])
            .unwrap();
        frame
    }
}

/// Where the frame of a [`Packet`] has its flags and its checksum.
const FLAGS: usize = 47;
const CHECKSUM: usize = 50;

/// A live connection, as its ends see it.
#[derive(Clone, Copy)]
struct Live {
    client: u32,
    /// What the client sends next, and what the server does.
    next: [u32; 2],
}

impl Live {
    /// A handshake, by way of a simultaneous open or not.
    fn open(plane: &mut Plane, client: u32, first: [u32; 2], simultaneous: bool) -> Self {
        let mut live = Self {
            client,
            next: first,
        };
        if simultaneous {
            for back in [false, true] {
                live.put(plane, live.packet(back, SYN, first[usize::from(back)], 0));
            }
            live.next = first.map(|it| it.wrapping_add(1));
            for back in [true, false] {
                let seq = first[usize::from(back)];
                live.put(plane, live.packet(back, SYN | ACK, seq, 0));
            }
        } else {
            live.put(plane, live.packet(false, SYN, first[0], 0));
            live.next[0] = first[0].wrapping_add(1);
            live.put(plane, live.packet(true, SYN | ACK, first[1], 0));
            live.next[1] = first[1].wrapping_add(1);
        }
        live.say(plane, false, 0);
        live.say(plane, true, 0);
        live
    }

    fn packet(&self, back: bool, flags: u8, seq: u32, data: usize) -> Packet {
        Packet {
            client: self.client,
            back,
            flags,
            seq,
            ack: self.next[usize::from(!back)],
            data,
        }
    }

    /// What the client sends comes in, and what the server sends goes out.
    fn put(&self, plane: &mut Plane, packet: Packet) {
        put(plane, &packet.frame(), packet.back);
    }

    /// Data, acknowledging all that the other side has sent.
    fn say(&mut self, plane: &mut Plane, back: bool, data: usize) {
        let seq = self.next[usize::from(back)];
        self.put(plane, self.packet(back, ACK, seq, data));
        self.next[usize::from(back)] = seq.wrapping_add(data as u32);
    }

    /// The end of one side.
    fn finish(&mut self, plane: &mut Plane, back: bool) {
        let seq = self.next[usize::from(back)];
        self.put(plane, self.packet(back, FIN | ACK, seq, 0));
        self.next[usize::from(back)] = seq.wrapping_add(1);
    }

    fn key(&self) -> FlowKey {
        let packet = self.packet(false, ACK, 0, 0);
        parse(packet.frame().as_slice()).unwrap().key
    }

    /// State and latest packet, which are what the deadline follows from; and where each side has got to.
    fn fate(&self, plane: &mut Plane) -> Option<(Seen, u32, u16)> {
        let word = word(plane, self.key())?;
        Some((word.seen(), word.stamp(), word.generation()))
    }
}

fn put(plane: &mut Plane, frame: &[u8], out: bool) {
    if out {
        plane.send(frame);
    } else {
        plane.receive(frame);
    }
}

fn word(plane: &mut Plane, key: FlowKey) -> Option<Word> {
    let flows = plane.plane().flows().unwrap();
    flows.iter().find(|flow| flow.key == key).map(|it| it.word)
}

/// How far a RST or FIN may lie from what its sender has sent: docs/states.md.
const WINDOW: u32 = 1 << 18;
/// How far an acknowledgment may lie behind what the other side has sent, and ahead of it.
const ACKNOWLEDGED: [u32; 2] = [1 << 26, 1 << 20];

/// A sequence number outside the window, on either side and as near as one: so much ahead.
fn outside(random: &mut Random) -> u32 {
    match random.below(4) {
        0 => WINDOW + 1,
        1 => (WINDOW + 1).wrapping_neg(),
        2 => 1 << 31,
        _ => random.range(WINDOW + 1, (WINDOW + 1).wrapping_neg()),
    }
}

/// An acknowledgment of what was never sent, or long ago: so much ahead.
fn never_sent(random: &mut Random) -> u32 {
    let [behind, ahead] = ACKNOWLEDGED;
    match random.below(3) {
        0 => ahead + 1,
        1 => (behind + 1).wrapping_neg(),
        _ => random.range(ahead + 1, (behind + 1).wrapping_neg()),
    }
}

/// What does not belong to a live flow, and is to change nothing: the frame, and whether it goes out.
fn hostile(random: &mut Random, live: &Live) -> (Vec<u8>, bool) {
    let back = random.coin();
    let [mine, theirs] = if back {
        [live.next[1], live.next[0]]
    } else {
        live.next
    };
    let mut packet = Packet {
        client: live.client,
        back,
        flags: 0,
        seq: mine.wrapping_add(outside(random)),
        ack: random.choose(&[theirs, random.0 as u32]),
        data: random.choose(&[0, 0, 1, 1400]),
    };
    let mut invalid = None;
    match random.below(8) {
        0 => packet.flags = RST,
        1 => packet.flags = RST | ACK,
        2 => {
            // Old, be it by one.
            packet.flags = RST | ACK;
            packet.seq = mine.wrapping_sub(random.range(1, 1 << 30));
        }
        3 => packet.flags = FIN | ACK,
        4 => {
            packet.flags = FIN | ACK;
            packet.seq = mine.wrapping_sub(random.below(WINDOW));
            packet.ack = theirs.wrapping_add(never_sent(random));
        }
        // The beginning of another connection, or of the same; with the right numbers, too.
        5 => (packet.flags, packet.seq) = (SYN, random.choose(&[mine, packet.seq])),
        6 => (packet.flags, packet.seq) = (SYN | ACK, random.choose(&[mine, packet.seq])),
        _ => {
            packet.seq = mine;
            let all = 0..64u8;
            let flags: Vec<u8> = all.filter(|flags| !tcp::valid(*flags)).collect();
            invalid = Some(random.choose(&flags));
        }
    }
    let mut frame = packet.frame();
    if let Some(flags) = invalid {
        frame[FLAGS] = flags;
    }
    if random.below(4) == 0 {
        frame[CHECKSUM] ^= 1 << random.below(8);
    }
    // It comes in by either way, whoever is said to have sent it.
    (frame, random.coin())
}

/// Loads quickly.
const SMALL: Setup = Setup {
    max_flows: 64,
    ..Setup::DEFAULT
};

/// How a pair of twins ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Silence,
    Fins,
    Reset,
}

#[test]
fn what_does_not_belong_to_a_live_flow_changes_nothing_of_it() {
    let rounds = if is_soak() { 600 } else { 60 };
    let mut planes = [false, true].map(|one_way| {
        let setup = Setup { one_way, ..SMALL };
        setup.load()
    });
    for seed in 0..rounds {
        let mut random = Random::new(seed);
        let plane = &mut planes[random.below(2) as usize];
        let (begun, before) = (plane.now(), plane.counters());
        // Where the numbers wrap, or anywhere.
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
        // Its own end is still its own, which says that positions were not moved.
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
        // Up to the last tick: what comes later is of no flow.
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
                "seed {seed}: it is still there"
            );
        }
        assert_eq!(ends[0], ends[1], "seed {seed}: {end:?}, after {sent}");
        let counters = plane.counters();
        let counted = |counter| counters.get(counter) - before.get(counter);
        assert_eq!(
            counted(Counter::Ignored) + counted(Counter::BadFlags),
            sent,
            "seed {seed}: each counts as what it is"
        );
    }
}

/// Acknowledgments of what was never sent, and data far ahead: as docs/states.md has it, they keep a flow alive, and
/// that is all. Where each side stands, and so which FIN is its own, they do not change.
#[test]
fn a_storm_of_acknowledgments_moves_nothing_but_the_stamp() {
    let mut plane = SMALL.load();
    for seed in 0..if is_soak() { 400 } else { 40 } {
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
                    // Again and again.
                    0 => packet.data = 0,
                    1 => {
                        packet.ack = packet.ack.wrapping_add(never_sent(&mut random));
                        // With the exact number it would say that what it acknowledges did not come by here.
                        packet.seq = next.wrapping_sub(1);
                    }
                    // Beyond all windows, or long past.
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
            assert_eq!(stamp, plane.now() as u32, "seed {seed}: alive by that");
            for live in &mut twins {
                live.say(&mut plane, random.0.is_multiple_of(2), 100);
            }
        }
        // Neither of two FINs is taken for one out of the window, nor one for two.
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

/// What is accepted of a RST or FIN whose numbers are guessed, of 2^32 and of 2^64: docs/states.md.
fn chance(flags: u8) -> f64 {
    let circle = 2f64.powi(32);
    let window = f64::from(WINDOW);
    let [behind, ahead] = ACKNOWLEDGED.map(f64::from);
    match flags {
        RST => (2.0 * window + 1.0) / circle,
        // Behind lie old duplicates.
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
    let tries = if is_soak() { 1u32 << 28 } else { 1 << 23 };
    let mut random = Random::new(5);
    // Both numbers of a FIN must fit: of so many tries 16 do, which proves little. So one number is drawn from near what
    // fits, and then the other.
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
            "FIN, its number near",
            FIN | ACK,
            [true, false],
            times(seq_reach),
        ),
        (
            "FIN, its acknowledgment near",
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
        assert!(expected > 100.0, "{what}: {expected:.1} prove little");
        assert!(
            off < 5.0 * expected.sqrt(),
            "{what}: {accepted} of {tries}, expected {expected:.1}"
        );
    }
}

#[test]
fn the_loaded_programs_accept_of_blind_guesses_what_the_window_has() {
    let mut plane = SMALL.load();
    let tries = if is_soak() { 1_000_000 } else { 60_000 };
    let mut random = Random::new(6);
    let mut live = Live::open(&mut plane, 1, [random.word(), random.word()], false);
    let (mut blind, mut hits) = (0u32, [0u32; 2]);
    for number in 0..tries {
        let back = random.coin();
        let (mine, theirs) = (live.next[usize::from(back)], live.next[usize::from(!back)]);
        let flags = random.choose(&[RST, RST | ACK, FIN | ACK]);
        // Every fourth knows where the window is, and tries its edges.
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
            // Over: another one.
            let next = live.next[usize::from(!back)];
            put(&mut plane, &live.packet(!back, RST, next, 0).frame(), back);
            live = Live::open(&mut plane, 1, [random.word(), random.word()], false);
            plane.drain();
        }
    }
    let chance = [RST, RST | ACK, FIN | ACK].map(chance).iter().sum::<f64>() / 3.0;
    let expected = chance * f64::from(blind);
    println!(
        "{} of {blind} guesses hit, expected {expected:.1}; of those that know, {}",
        hits[1], hits[0]
    );
    assert!(f64::from(hits[1]) <= expected + 5.0 * expected.sqrt() + 1.0);
    assert!(hits[0] > blind / 10, "the edges were not met");
}

#[test]
fn a_port_used_again_at_speed_has_each_of_its_lives_reported_once() {
    let lives: usize = if is_soak() { 200_000 } else { 10_000 };
    let mut plane = SMALL.load();
    let mut random = Random::new(7);
    let mut events: Vec<Event> = Vec::new();
    let mut begun = Vec::new();
    for number in 0..lives {
        plane.pass(u64::from(random.range(1, 3)));
        begun.push(plane.now());
        // Either side may begin anew.
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
        // What is left of the life before, late.
        let late = live.packet(number % 2 == 0, FIN | ACK, first[0] ^ (1 << 31), 0);
        live.put(&mut plane, late);
        events.extend(plane.drain());
    }
    assert_eq!(events.len(), lives - 1, "each but the last");
    plane.pass(130_000);
    events.extend(plane.step());
    assert!(plane.step().is_empty());
    let lived: Vec<u64> = events.iter().map(|it| it.at - u64::from(it.age)).collect();
    assert_eq!(lived, begun, "each once, and in order");
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

/// A table of 64, of which a source may hold 16.
struct Shared {
    plane: Plane,
    shares: Reader,
    calls: RingBuf<MapData>,
}

/// A client of the address with this number: [`frame`] gives each 50,000 clients one.
fn other(number: u32) -> u32 {
    50_000 * (1 + number)
}

/// Secrets that each test of shares is tried with; they are drawn anew each time.
const SECRETS: usize = 8;

/// The same whatever the secret of the table's hash is, which says where flows stand and so which are looked at when room is
/// wanted. `TWHEEL_SEED` gives the same secrets again.
///
/// With one exception: where all 32 places of a newcomer are taken, a flow there goes or the newcomer is refused, and the table
/// counts it in `window_full`. What fails then proves nothing, and is tried with another secret.
fn for_any_secret(test: impl Fn(&mut Shared)) {
    let seed = std::env::var("TWHEEL_SEED").map_or_else(
        |_| RandomState::new().hash_one(()),
        |seed| seed.parse().unwrap(),
    );
    println!("TWHEEL_SEED={seed}");
    let wanted = if is_soak() { 50 * SECRETS } else { SECRETS };
    let (mut tried, mut full) = (0, 0);
    while tried < wanted {
        let mut random = Random::new(seed.wrapping_add(tried as u64 + full));
        let mut word = || u64::from(random.word()) << 32 | u64::from(random.word());
        let secret = array::from_fn(|_| word());
        let mut shared = Shared::new(secret);
        let result = catch_unwind(AssertUnwindSafe(|| test(&mut shared)));
        match result {
            Ok(()) => tried += 1,
            Err(_) if shared.plane.count(Counter::WindowFull) > 0 => full += 1,
            Err(panic) => {
                eprintln!("secret {secret:x?}");
                resume_unwind(panic);
            }
        }
        assert!(full <= 2, "of {tried} tables {full} had a window full");
    }
}

impl Shared {
    fn new(secret: [u64; 11]) -> Self {
        let setup = Setup {
            max_flows: 64,
            share: true,
            one_way: false,
            // Established flows outlive the test, closed ones are gone before what was counted is forgotten. What is half-open
            // has its turn before what is established, as by default: so it is looked at first wherever it stands.
            timeout: 600_000,
            close: 5_000,
            syn_sent: Some(120_000),
            secret: Some(secret),
            ..Setup::default()
        };
        let mut plane = setup.load();
        let shares = Reader::new(plane.plane(), 25).unwrap();
        let calls = plane.plane().take_wakes().unwrap();
        Self {
            plane,
            shares,
            calls,
        }
    }

    fn establish(&mut self, client: u32) {
        self.plane.receive(&frame(client, false, SYN));
        self.plane.send(&frame(client, true, SYN | ACK));
        self.plane.receive(&frame(client, false, ACK));
    }

    /// How often the loader was called since this was last asked.
    fn calls(&mut self) -> usize {
        let mut calls = 0;
        while let Some(record) = self.calls.next() {
            calls += usize::from(*record == CALL.to_ne_bytes()[..]);
        }
        calls
    }

    fn read(&mut self) -> Vec<(String, u64, bool)> {
        let of = |it: Holder| (it.source.to_string(), it.flows, it.is_new);
        self.shares.read().unwrap().into_iter().map(of).collect()
    }

    /// Flows in the table, by the addresses of their clients.
    fn clients(&mut self) -> HashMap<IpAddr, u32> {
        let mut clients = HashMap::new();
        for flow in self.plane.plane().flows().unwrap().iter() {
            let ends = [Direction::FromLow, Direction::FromHigh].map(|it| flow.key.sender(it));
            let client = ends.into_iter().find(|end| end.port() != 80).unwrap();
            *clients.entry(client.ip()).or_default() += 1;
        }
        clients
    }

    /// Of the source with too many, and of all others.
    fn held(&mut self) -> [u32; 2] {
        let clients = self.clients();
        let hog = clients.get(&HOG_IP).copied().unwrap_or(0);
        [hog, clients.values().sum::<u32>() - hog]
    }
}

/// The address of the first 50,000 clients.
const HOG_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 0));

#[test]
fn a_source_with_too_much_makes_room_for_others_down_to_its_share() {
    for_any_secret(|it| {
        for number in 0..8 {
            it.establish(other(number));
        }
        for client in 0..56 {
            it.plane.pass(1);
            it.establish(client);
        }
        assert_eq!((it.held(), it.calls()), ([56, 8], 0), "not full yet");

        // Nobody has counted yet: it is refused, and the loader is called, once a second.
        for number in 100..110 {
            it.establish(other(number));
        }
        assert_eq!((it.held(), it.calls()), ([56, 8], 1));
        it.plane.pass(1_000);
        it.establish(other(100));
        assert_eq!(it.calls(), 1);
        assert_eq!(it.read(), [(HOG_IP.to_string(), 56, true)]);

        let refused = it.plane.count(Counter::TableFull);
        for number in 100..140 {
            it.establish(other(number));
            // It asks for more all the while.
            it.plane.receive(&frame(1_000 + number, false, SYN));
        }
        assert_eq!(it.held(), [16, 48]);
        assert_eq!(it.plane.count(Counter::TableFull), refused + 40, "its own");
        let events = it.plane.drain();
        let of_hog = |event: &Event| {
            let ends = [Direction::FromLow, Direction::FromHigh].map(|it| event.key.sender(it));
            event.reason == Reason::Evicted as u32 && ends.iter().any(|end| end.ip() == HOG_IP)
        };
        assert_eq!(events.iter().filter(|event| of_hog(event)).count(), 40);
        assert_eq!(events.len(), 40);
        // Those first that were idle for longest.
        assert!(events.is_sorted_by_key(|event| event.at - u64::from(event.idle)));
        for counter in [Counter::Evicted, Counter::OverShare] {
            assert_eq!(it.plane.count(counter), 40);
        }

        // It keeps its share.
        for number in 200..220 {
            it.establish(other(number));
        }
        assert_eq!(it.held(), [16, 48]);
        it.plane.pass(1_000);
        it.establish(other(200));
        assert_eq!(it.calls(), 1);
        assert_eq!(it.read(), []);
        it.establish(other(200));
        assert_eq!(it.held(), [16, 48]);
        it.plane.pass(700_000);
        assert_eq!(it.plane.step().len(), 64, "making room has broken a list");
        assert_eq!(it.plane.count(Counter::Orphans), 0);
    });
}

#[test]
fn a_source_with_too_much_evicts_nobody_elses_flows() {
    for_any_secret(|it| {
        for client in 0..56 {
            it.establish(client);
        }
        for number in 0..9 {
            it.establish(other(number));
        }
        assert_eq!(it.read(), [(HOG_IP.to_string(), 56, true)]);
        // In the place of eight established flows as many that are half-open, which go for anybody else.
        for number in 0..8 {
            it.plane.receive(&frame(other(number), false, RST));
        }
        it.plane.pass(5_100);
        assert_eq!(it.plane.step().len(), 8);
        for number in 10..18 {
            it.plane.receive(&frame(other(number), false, SYN));
        }
        let refused = it.plane.count(Counter::TableFull);
        for client in 2_000..2_050 {
            it.plane.receive(&frame(client, false, SYN));
        }
        assert_eq!(it.held(), [56, 8]);
        assert_eq!(it.plane.count(Counter::TableFull), refused + 50);
        it.plane.receive(&frame(other(50), false, SYN));
        assert_eq!(it.plane.drain().len(), 1, "one of those, for another");
        assert_eq!(it.held(), [56, 8]);

        it.plane.pass(LASTS * 1_000);
        it.plane.receive(&frame(3_000, false, SYN));
        assert_eq!(it.held(), [57, 7], "what was counted is forgotten");
    });
}

#[test]
fn what_was_counted_is_soon_forgotten() {
    for_any_secret(|it| {
        for client in 0..64 {
            it.establish(client);
        }
        it.plane.receive(&frame(other(0), false, SYN));
        assert_eq!(it.read(), [(HOG_IP.to_string(), 64, true)]);
        it.plane.pass(LASTS * 1_000 - 1);
        it.establish(other(0));
        assert_eq!(it.held(), [63, 1]);
        it.plane.pass(1);
        it.establish(other(1));
        assert_eq!(it.held(), [63, 1], "believed for too long");
        assert_eq!(it.calls(), 2);
        assert_eq!(it.read(), [(HOG_IP.to_string(), 63, false)]);
        it.establish(other(1));
        assert_eq!(it.held(), [62, 2]);
    });
}

/// A flow that has made room is not over: its next packet comes, from either end.
#[test]
fn who_has_lost_a_flow_does_not_get_it_back_as_nobodys() {
    for_any_secret(|it| {
        for client in 0..64 {
            it.establish(client);
        }
        it.plane.receive(&frame(other(0), false, SYN));
        it.read();
        for number in 0..30 {
            it.establish(other(number));
        }
        assert_eq!(it.held(), [34, 30]);
        for client in 0..64 {
            it.plane.send(&frame(client, true, ACK));
            it.plane.receive(&frame(client, false, ACK));
        }
        assert_eq!(it.held(), [34, 30], "for its own it has made no room");
        assert_eq!(it.plane.drain().len(), 30);
        // Where there is room they come back, and count.
        it.plane.pass(LASTS * 1_000);
        for number in 0..30 {
            it.plane.receive(&frame(other(number), false, RST));
        }
        it.plane.pass(10_100);
        assert_eq!(it.plane.step().len(), 30);
        for client in 0..64 {
            it.plane.send(&frame(client, true, ACK));
            it.plane.receive(&frame(client, false, ACK));
        }
        assert_eq!(it.held(), [64, 0]);
        let mut held = it.read();
        held.sort_by_key(|(_, flows, _)| *flows);
        let both = [("192.0.2.1", 30, true), (&HOG_IP.to_string(), 64, false)];
        let both = both.map(|(source, flows, is_new)| (source.to_owned(), flows, is_new));
        assert_eq!(held, both, "both ends of what was picked up");
    });
}

#[test]
fn a_network_is_one_source_and_this_host_is_none() {
    for_any_secret(|it| {
        let mut connect = |source: [u8; 16], port: u16| {
            for (back, syn, ack) in [
                (false, true, false),
                (true, true, true),
                (false, false, true),
            ] {
                let server = ([0x20; 16], 80);
                let ((from, sport), (to, dport)) = match back {
                    false => ((source, port), server),
                    true => (server, (source, port)),
                };
                let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6(from, to, 64);
                let mut segment = builder.tcp(sport, dport, if syn { 1 } else { 2 }, 1024);
                if syn {
                    segment = segment.syn();
                }
                if ack {
                    segment = segment.ack(2);
                }
                let mut frame = Vec::new();
                segment.write(&mut frame, &[]).unwrap();
                put(&mut it.plane, &frame, back);
            }
        };
        for host in 0..20 {
            let mut source = [0x3f; 16];
            source[15] = host;
            connect(source, 1_000);
        }
        for port in 1_000..1_030 {
            connect(std::net::Ipv6Addr::LOCALHOST.octets(), port);
        }
        let network = "3f3f:3f3f:3f3f:3f3f::/64".to_owned();
        assert_eq!(it.read(), [(network, 20, true)]);
    });
}

#[test]
fn without_shares_nobody_is_called_and_a_full_table_refuses() {
    let setup = Setup {
        max_flows: 64,
        one_way: false,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut shares = Reader::new(plane.plane(), 25).unwrap();
    let mut calls = plane.plane().take_wakes().unwrap();
    while calls.next().is_some() {}
    for client in 0..64 {
        for (back, flags) in [(false, SYN), (true, SYN | ACK), (false, ACK)] {
            put(&mut plane, &frame(client, back, flags), back);
        }
    }
    assert_eq!(shares.read().unwrap().len(), 1);
    while calls.next().is_some() {}
    plane.receive(&frame(other(0), false, SYN));
    assert!(calls.next().is_none());
    assert_eq!(plane.count(Counter::TableFull), 1);
}

/// Flows that the real table has room for, and of which a source may hold so many.
const ROOM: usize = 4096;
/// A quarter.
const SHARE: usize = ROOM / 4;
/// Of others who were there before.
const EARLY: usize = 100;
/// Of others who come later, more than there is room for.
const LATE: usize = ROOM - SHARE - EARLY + 40;

/// Real connections between two hosts; the server accepts them all and keeps them.
struct Hosts {
    pair: Pair,
    listen: SocketAddr,
    stop: Arc<AtomicBool>,
    accepting: Option<thread::JoinHandle<()>>,
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // It waits for one more.
        let _ = self
            .pair
            .client
            .enter(|| Ok(TcpStream::connect(self.listen)?));
        let _ = self.accepting.take().map(thread::JoinHandle::join);
    }
}

/// Where others than the first address of the client connect from: four of them.
fn source(number: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, 100 + (number % 4) as u8).into()
}

impl Hosts {
    fn new() -> Result<Self> {
        let pair = Pair::new()?;
        for number in 0..4 {
            pair.client
                .ip(&format!("addr add {}/24 dev {CLIENT}", source(number)))?;
        }
        let listener = pair.server.enter(|| {
            let address = (Family::V4.server(), 0);
            TcpListener::bind(address).context("cannot listen")
        })?;
        let listen = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let accepting = thread::spawn(move || {
            let mut accepted = Vec::new();
            while !stopped.load(Relaxed) {
                accepted.extend(listener.accept());
            }
        });
        Ok(Self {
            pair,
            listen,
            stop,
            accepting: Some(accepting),
        })
    }

    /// Opens connections, half of them on each of two CPUs, on whose wheels their flows then stand.
    fn open(&self, count: usize, from: impl Fn(usize) -> IpAddr + Sync) -> Result<Vec<TcpStream>> {
        let runtime = |cpu: usize| -> Result<Vec<TcpStream>> {
            pin_to(cpu as u32)?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let connect = async |number: usize| -> Result<TcpStream> {
                let socket = tokio::net::TcpSocket::new_v4()?;
                socket.bind(SocketAddr::new(from(number), 0))?;
                Ok(socket.connect(self.listen).await?.into_std()?)
            };
            runtime.block_on(async {
                let mut streams = Vec::new();
                for number in (cpu..count).step_by(2) {
                    streams.push(connect(number).await.context("cannot connect")?);
                }
                Ok(streams)
            })
        };
        thread::scope(|scope| {
            let threads = [0, 1].map(|cpu| {
                let (client, runtime) = (&self.pair.client, &runtime);
                scope.spawn(move || client.enter(|| runtime(cpu)))
            });
            let mut all = Vec::new();
            for thread in threads {
                all.extend(thread.join().unwrap()?);
            }
            Ok(all)
        })
    }

    /// Flows that are tracked: of the first address, and of all others.
    fn tracked(&self) -> Result<[usize; 2]> {
        let hog = Family::V4.client().to_string();
        let ended = self.pair.server.twheel_once(&["flows", "--json"])?;
        ensure!(ended.code() == Some(0), "flows: {}", ended.stderr);
        let mut tracked = [0, 0];
        for line in ended.lines {
            let line: serde_json::Value = serde_json::from_str(&line.text)?;
            // Of what was picked up, either end may be said to have begun it.
            let is_hog = ["src", "dst"].iter().any(|end| line[end] == hog.as_str());
            tracked[usize::from(!is_hog)] += 1;
        }
        Ok(tracked)
    }
}

/// Each sends a byte, from the CPU on which it was opened.
fn talk(streams: &mut [TcpStream]) -> Result<()> {
    use std::io::Write;
    let (first, second) = streams.split_at_mut(streams.len().div_ceil(2));
    for (cpu, streams) in [(0, first), (1, second)] {
        pin_to(cpu)?;
        streams
            .iter_mut()
            .try_for_each(|it| it.write_all(b"!").context("cannot send"))?;
    }
    Ok(())
}

#[test]
fn a_source_that_fills_a_real_table_gives_way_to_others() -> Result<()> {
    require_root();
    // Some 17,000, both ends of each connection.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let hosts = Hosts::new()?;
    let hog = Family::V4.client();
    let room = ROOM.to_string();
    let args = [
        "--iface",
        SERVER,
        "--max-flows",
        &room,
        "--history",
        "off",
        "--json",
    ];
    let twheel = Twheel::start(&hosts.pair.server, &args)?;
    let mut early = hosts.open(EARLY, source)?;
    let mut its = hosts.open(ROOM, |_| hog)?;
    assert_eq!(hosts.tracked()?, [ROOM - EARLY, EARLY]);

    // It goes on while the others come.
    let stop = AtomicBool::new(false);
    let mut late = thread::scope(|scope| -> Result<Vec<TcpStream>> {
        let more = scope.spawn(|| {
            let mut more = Vec::new();
            while !stop.load(Relaxed) && more.len() < 1_000 {
                more.extend(hosts.open(100, |_| hog)?);
            }
            anyhow::Ok(more)
        });
        let begin = Instant::now();
        let late = (|| {
            let mut late = hosts.open(LATE, source)?;
            println!("{LATE} others connected after {:?}", begin.elapsed());
            loop {
                talk(&mut late)?;
                let tracked = hosts.tracked()?;
                println!("{tracked:?} after {:?}", begin.elapsed());
                ensure!(tracked[0] >= SHARE, "it has lost of its share: {tracked:?}");
                if tracked == [SHARE, ROOM - SHARE] {
                    return Ok(late);
                }
                ensure!(
                    begin.elapsed() < Duration::from_secs(30),
                    "no room: {tracked:?}"
                );
                thread::sleep(Duration::from_millis(200));
            }
        })();
        stop.store(true, Relaxed);
        its.extend(more.join().unwrap()?);
        late
    })?;

    // It has its share, and keeps it.
    thread::sleep(Duration::from_millis(1_100));
    for streams in [&mut late, &mut early, &mut its] {
        talk(streams)?;
    }
    assert_eq!(hosts.tracked()?, [SHARE, ROOM - SHARE]);
    let told = twheel.stderr();
    let line = format!(
        "the table is full: {hog} has {} flows, and its share is {SHARE}",
        ROOM - EARLY
    );
    assert_eq!(told.matches(&line).count(), 1, "{told}");
    let ended = twheel.expiries_until(Instant::now() + Duration::from_millis(500))?;
    // (Of all, handshakes that were under way go, too; the next packet begins the flow again.)
    let mut gone = 0;
    for flow in ended {
        assert_eq!(flow.reason, "evicted");
        if flow.state == "established" {
            assert_eq!(flow.src.ip(), hog, "{flow:?}");
            gone += 1;
        }
    }
    assert!(gone >= ROOM - EARLY - SHARE, "{gone} made room");
    twheel.stop()?;

    // Without shares, who comes first has all.
    let twheel = Twheel::start(
        &hosts.pair.server,
        &[&args[..], &["--source-share", "off"]].concat(),
    )?;
    talk(&mut its)?;
    assert_eq!(hosts.tracked()?, [ROOM, 0]);
    for _ in 0..3 {
        talk(&mut late)?;
        thread::sleep(Duration::from_millis(500));
    }
    assert_eq!(hosts.tracked()?, [ROOM, 0]);
    twheel.stop()?;
    Ok(())
}
