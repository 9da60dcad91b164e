//! Walks through the states of flows and compares them with a model in plain fields: each segment
//! must change what the model changes, and nothing else.
#![allow(missing_docs)]

mod model;

use twheel_common::tracked::Tracked;
use twheel_common::{
    flow::Direction::{self, *},
    numbers::{self, advance},
    packet::{
        Segment, datagram,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{
        Change, Known, Seen,
        State::{self, *},
        View,
    },
};

use self::model::{Model, next_of};

/// What is known after a segment that had this effect on a flow.
fn follow(
    before: Seen,
    mut known: Known,
    segment: &Segment,
    change: Change,
    is_told: bool,
) -> Known {
    let (me, them) = (
        segment.direction as usize,
        segment.direction.reverse() as usize,
    );
    let follows = match change {
        Change::Ignored | Change::SameWay | Change::Ended => false,
        Change::NewGeneration(_) if before.is_starting() => false,
        Change::Nothing if is_told => {
            known.positions = numbers::first(segment);
            false
        }
        Change::Nothing => true,
        Change::Add(_) | Change::AddIfItLasts(_) => segment.flags & RST == 0,
        Change::Answers(_) => {
            known.positions[them] = segment.ack;
            true
        }
        Change::Doubt(_, number, answers) => {
            known.doubt = number;
            if answers {
                known.positions[them] = segment.ack;
            }
            false
        }
        Change::Places(_) | Change::NewGeneration(_) => {
            known.positions = numbers::first(segment);
            false
        }
    };
    if follows {
        let positions = known.positions;
        if let Some(position) = advance(positions, before, segment) {
            known.positions[me] = position;
        }
        if numbers::is_apart(positions, segment) {
            let apart = numbers::apart(positions, known.doubt, before, segment, known.is_own_way);
            known.positions[them] = apart.other.unwrap_or(known.positions[them]);
            known.doubt = apart.own.unwrap_or(known.doubt);
        }
    }
    known
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32;
        ((u64::from(drawn) * u64::from(limit)) >> 32) as u32
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }

    fn is_one_in(&mut self, many: u32) -> bool {
        self.below(many) == 0
    }

    fn direction(&mut self) -> Direction {
        self.one_of(&[FromLow, FromHigh])
    }

    /// A segment whose numbers are those of the flow, near them, at the limits, or random.
    fn segment(&mut self, known: &Known, datagrams: bool) -> Segment {
        const OFF: [u32; 18] = [
            0,
            0,
            0,
            0,
            0,
            0,
            1,
            2,
            100,
            16_384,
            16_385,
            1 << 18,
            (1 << 18) + 1,
            1 << 20,
            (1 << 20) + 1,
            1 << 24,
            1 << 26,
            (1 << 26) + 1,
        ];
        let direction = self.direction();
        let mut number = |of: u32| {
            let off = self.one_of(&OFF);
            let of = if self.is_one_in(4) { known.doubt } else { of };
            match self.below(8) {
                0 => self.below(u32::MAX),
                1..4 => of.wrapping_sub(off),
                _ => of.wrapping_add(off),
            }
        };
        let mut seq = number(next_of(known.positions, direction));
        let ack = number(next_of(known.positions, direction.reverse()));
        let length = self.one_of(&[0, 0, 1, 100]);
        let flags = match datagrams {
            true => self.one_of(&[datagram::UDP, datagram::QUERY, datagram::ANSWER]),
            false => self.one_of(&[
                SYN,
                SYN | ACK,
                FIN | ACK,
                FIN,
                RST,
                RST | ACK,
                ACK,
                ACK,
                ACK,
                ACK,
                ACK,
                0,
            ]),
        };
        // A SYN or FIN that is sent again ends where it ended before.
        if flags & (SYN | FIN) != 0 && self.is_one_in(3) {
            seq = seq.wrapping_sub(1);
        }
        let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        Segment {
            direction,
            flags,
            seq,
            ack,
            end: seq.wrapping_add(length).wrapping_add(counted),
            ..Segment::NONE
        }
    }
}

/// Checks that all questions to the state bits have the model's answers.
fn assert_answers(seen: Seen, model: &Model) {
    let is_tcp = !matches!(model.state, Udp | UdpStream | Icmp);
    let is_replied = model.seen == [true; 2];
    assert_eq!(seen.state(), model.state);
    assert_eq!(seen.initiator(), model.initiator);
    assert_eq!(seen.is_pickup(), model.pickup);
    assert_eq!(seen.is_posted(), model.posted);
    assert_eq!(seen.is_starting(), model.starting);
    assert_eq!(seen.is_stalled(), model.stalled);
    assert_eq!(seen.is_replied(), is_replied);
    assert_eq!(
        seen.is_conversation(),
        is_replied && model.unplaced == [false; 2]
    );
    assert_eq!(seen.is_reset(), model.state == Close);
    assert_eq!(
        seen.is_closed(),
        matches!(model.state, LastAck | TimeWait | Close)
    );
    assert_eq!(
        seen.is_opening(),
        is_tcp && matches!(model.state, SynSent | SynSent2)
    );
    assert_eq!(
        seen.is_synchronized(),
        matches!(model.state, Established | FinWait | CloseWait | LastAck)
    );
    let is_open = matches!(model.state, Established | FinWait | CloseWait | UdpStream);
    assert_eq!(seen.is_established(true), is_open);
    assert_eq!(seen.is_established(false), is_open && is_replied);
    let with = |change: fn(&mut Model)| {
        let mut model = *model;
        change(&mut model);
        model.write()
    };
    assert_eq!(seen.posted(), with(|it| it.posted = true));
    assert_eq!(seen.delivered(), with(|it| it.posted = false));
    assert_eq!(seen.starting(), with(|it| it.starting = true));
    assert_eq!(seen.stalled(true), with(|it| it.stalled = true));
    assert_eq!(seen.stalled(false), with(|it| it.stalled = false));
}

/// The beginning of a flow: its first segment, or a socket.
fn begin(random: &mut Random, view: View, datagrams: bool) -> Option<Tracked> {
    let positions = [random.below(u32::MAX), random.below(u32::MAX)];
    let mut known = Known {
        positions,
        doubt: random.below(u32::MAX),
        is_own_way: true,
        is_local: false,
    };
    if !random.is_one_in(3) {
        let segment = random.segment(&known, datagrams);
        let seen = Seen::first(segment.direction, segment.flags, view);
        let model = Model::first(&segment, view);
        assert_eq!(
            seen,
            model.map(|model| model.write()),
            "{segment:?} {view:?}"
        );
        let flow = Tracked::first(&segment, view)?;
        known.positions = numbers::first(&segment);
        known.doubt = 0;
        assert_eq!((Some(flow.seen), flow.known), (seen, known));
        return Some(flow);
    }
    let states = match datagrams {
        true => &State::ALL[9..],
        false => &State::ALL[..9],
    };
    let (state, initiator) = (random.one_of(states), random.direction());
    let fins = match datagrams {
        true => [false; 2],
        false => [random.is_one_in(3), random.is_one_in(3)],
    };
    let finished: Vec<_> = [FromLow, FromHigh]
        .into_iter()
        .filter(|it| fins[*it as usize])
        .collect();
    let seen = Seen::of_socket(state, initiator, &finished);
    assert_eq!(seen, Model::of_socket(state, initiator, fins).write());
    Some(Tracked {
        seen,
        known,
        lasts: false,
    })
}

#[test]
fn every_change_is_the_models() {
    const WALKS: u32 = 200_000;
    let mut random = Random(1);
    // How often each change occurred, and each state.
    let (mut changes, mut states) = ([0; 9], [0; 12]);
    for walk in 0..WALKS {
        let view = View {
            one_way: walk & 1 != 0,
            strict: walk & 6 == 6,
        };
        let datagrams = walk % 16 == 0;
        let Some(mut flow) = begin(&mut random, view, datagrams) else {
            continue;
        };
        for _ in 0..24 {
            if random.is_one_in(16) {
                flow.seen = flow.seen.posted();
            }
            if random.is_one_in(16) {
                flow.seen = flow.seen.stalled(!flow.seen.is_stalled());
            }
            if random.is_one_in(16) {
                flow.seen = flow.seen.starting();
            }
            let segment = random.segment(&flow.known, datagrams);
            flow.known.is_own_way = !random.is_one_in(8);
            flow.known.is_local = random.is_one_in(4);
            flow.lasts = random.is_one_in(2);
            let is_disproved = random.is_one_in(32);
            let (before, known) = (flow.seen, flow.known);
            let model = Model::read(before);
            assert_eq!(model.write(), before);
            assert_answers(before, &model);
            assert_eq!(
                before.is_kept_by(segment.direction, segment.flags),
                model.is_kept_by(segment.direction, segment.flags)
            );
            let (change, anew) = match is_disproved {
                true => (flow.see_disproved(&segment, view), model.anew(&segment)),
                false => (flow.see(&segment, view), None),
            };
            let expected = match anew {
                Some(seen) => Change::NewGeneration(seen),
                None => model.next(&segment, &known, view),
            };
            assert_eq!(change, expected, "{model:?} {known:?} {segment:?} {view:?}");
            let is_told = model.is_told_by(segment.direction, view);
            // A young flow of datagrams stays what it is.
            let applied = match change {
                Change::AddIfItLasts(_) if !flow.lasts => Change::Nothing,
                change => change,
            };
            let after = follow(before, known, &segment, applied, is_told);
            assert_eq!(flow.known, after);
            states[model.state as usize] += 1;
            let (number, seen) = match change {
                Change::Nothing => (0, before),
                Change::Ignored => (1, before),
                Change::SameWay => (2, before),
                Change::AddIfItLasts(seen) => (3, if flow.lasts { seen } else { before }),
                Change::Add(seen) => (4, seen),
                Change::Doubt(seen, ..) => (5, seen),
                Change::Answers(seen) => (6, seen),
                Change::Places(seen) => (7, seen),
                // Another CPU has begun a generation, and not noted when.
                Change::NewGeneration(_) if before.is_starting() => (8, before),
                Change::NewGeneration(seen) => (8, seen),
                Change::Ended => panic!("the flow was not ended"),
            };
            changes[number] += 1;
            assert_eq!(flow.seen, seen);
        }
        assert_eq!(
            Seen::DEAD.next(&random.segment(&flow.known, datagrams), &flow.known, view),
            Change::Ended
        );
    }
    assert!(changes.iter().all(|often| *often > 1_000), "{changes:?}");
    assert!(states.iter().all(|often| *often > 10_000), "{states:?}");
}

#[test]
fn states_have_conntracks_names() {
    let names = State::ALL.map(State::name);
    assert_eq!(
        names,
        [
            "syn_sent",
            "syn_recv",
            "established",
            "fin_wait",
            "close_wait",
            "last_ack",
            "time_wait",
            "close",
            "syn_sent2",
            "udp",
            "udp_stream",
            "icmp"
        ]
    );
}
