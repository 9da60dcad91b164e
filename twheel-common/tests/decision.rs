//! What is decided of a packet: what is stored, when the wheel must come, and what is told.
#![allow(missing_docs)]

use twheel_common::{
    decision::{Decision, Effects, Record, decide},
    flow::{Direction::*, Word},
    packet::{
        Segment, datagram,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{Known, Seen, State, View},
};

const BOTH_SIDES: View = View {
    one_way: false,
    strict: false,
};
/// Sequence numbers of the low and the high side.
const LOW: u32 = 1_000;
const HIGH: u32 = 2_000;
const NOW: u64 = 5 << 32 | 10_000;

fn segment(flags: u8, seq: u32, ack: u32, data: u32) -> Segment {
    let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment {
        flags,
        seq,
        ack,
        end: seq + data + counted,
        ..Segment::NONE
    }
}

/// A flow in this state that the low side has begun, and its latest packet came 10 units ago.
fn record(state: State) -> Record {
    Record {
        word: Word::new(NOW - 10, 7, Seen::of_socket(state, FromLow, &[])),
        known: Known {
            positions: [LOW, HIGH],
            doubt: 0,
            is_own_way: true,
            is_local: false,
        },
        is_disproved: false,
        lasts: false,
        has_way: true,
        is_ours: true,
    }
}

/// Open flows have 100 units, others 30.
fn timeout(seen: Seen) -> u32 {
    match seen.state() {
        State::Established | State::UdpStream => 100,
        _ => 30,
    }
}

fn decided(record: &Record, segment: &Segment) -> Decision {
    decide(record, segment, NOW, BOTH_SIDES, timeout)
}

/// An open flow both of whose sides have told their numbers.
fn open() -> Record {
    let mut record = record(State::Established);
    let seen = Seen::first(FromLow, ACK, BOTH_SIDES).unwrap();
    let answer = Segment {
        direction: FromHigh,
        ..segment(ACK, HIGH, LOW, 0)
    };
    record.word = record.word.with_seen(seen);
    let both = decided(&record, &answer);
    assert!(both.word.seen().is_conversation());
    record.word = Word::new(NOW - 10, 7, both.word.seen());
    record
}

#[test]
fn data_of_an_open_flow_changes_no_state() {
    let decision = decided(&open(), &segment(ACK, LOW, HIGH, 100));
    assert_eq!(decision.effects, Effects::TAKEN);
    assert_eq!(decision.due, 0);
}

#[test]
fn the_first_packet_that_is_taken_says_by_which_way_its_side_comes() {
    let unknown = Record {
        has_way: false,
        ..open()
    };
    let data = decided(&unknown, &segment(ACK, LOW, HIGH, 100));
    assert_eq!(data.effects, Effects::TAKEN.with(Effects::WAY));
    let reset = decided(&unknown, &segment(RST, LOW, 0, 0));
    let stored = Effects::TAKEN.with(Effects::WORD);
    assert_eq!(reset.effects, stored.with(Effects::WAY));
    let stray = decided(&unknown, &segment(RST, LOW + (1 << 24), 0, 0));
    assert_eq!(stray.effects, Effects::IGNORED);
}

#[test]
fn a_reset_stores_the_word_and_is_due_earlier() {
    let record = open();
    let decision = decided(&record, &segment(RST, LOW, 0, 0));
    assert_eq!(decision.effects, Effects::TAKEN.with(Effects::WORD));
    let word = decision.word;
    assert_eq!(word.seen().state(), State::Close);
    assert_eq!((word.stamp(), word.generation()), (10_000, 7));
    assert_eq!(decision.due, NOW + 30);
    assert!(!word.seen().is_posted());
}

#[test]
fn a_flow_of_another_cpus_wheel_is_posted_if_it_is_due_earlier() {
    let elsewhere = Record {
        is_ours: false,
        ..open()
    };
    let reset = decided(&elsewhere, &segment(RST, LOW, 0, 0));
    assert!(reset.word.seen().is_posted());
    assert_eq!(reset.due, NOW + 30);
    // From 30 to 100 units: the next timer visit finds it out.
    let opening = Record {
        is_ours: false,
        ..record(State::SynRecv)
    };
    let later = decided(&opening, &segment(ACK, LOW, HIGH, 0));
    assert_eq!(later.word.seen().state(), State::Established);
    assert!(!later.word.seen().is_posted());
    assert_eq!(later.due, 0);
}

#[test]
fn a_fin_waits_for_its_acknowledgment() {
    let decision = decided(&open(), &segment(FIN | ACK, LOW, HIGH, 5));
    let expected = Effects::TAKEN.with(Effects::WORD).with(Effects::DOUBT);
    assert_eq!(decision.effects, expected);
    assert_eq!(decision.doubt, LOW + 6);
    assert_eq!(decision.word.stamp(), 10_000);
}

#[test]
fn a_syn_on_what_is_over_does_not_keep_it_alive() {
    let decision = decided(&record(State::TimeWait), &segment(SYN, 77, 0, 0));
    assert!(decision.effects.has(Effects::WORD.with(Effects::DOUBT)));
    assert_eq!(decision.doubt, 78);
    assert_eq!(decision.word.stamp(), 10_000 - 10, "its stamp stays");
}

/// A flow that is over, to which a SYN came: the other side now answers it.
fn answered() -> (Record, Segment) {
    let mut over = record(State::TimeWait);
    let syn = decided(&over, &segment(SYN, 77, 0, 0));
    over.word = syn.word;
    over.known.doubt = syn.doubt;
    let answer = Segment {
        direction: FromHigh,
        ..segment(SYN | ACK, 500, 78, 0)
    };
    (over, answer)
}

#[test]
fn the_answer_to_a_syn_begins_another_generation() {
    let (over, answer) = answered();
    let decision = decided(&over, &answer);
    let begins = Effects::BEGINS.with(Effects::BOTH);
    let expected = Effects::TAKEN.with(Effects::WORD).with(begins);
    assert_eq!(decision.effects, expected);
    let word = decision.word;
    assert_eq!((word.stamp(), word.generation()), (10_000, 8));
    assert!(word.seen().is_starting());
    assert_eq!(word.seen().state(), State::SynRecv);
}

#[test]
fn a_generation_that_is_starting_is_not_followed_by_another() {
    let (mut over, answer) = answered();
    over.word = over.word.with_seen(over.word.seen().starting());
    assert_eq!(decided(&over, &answer), Decision::RACED);
}

#[test]
fn generations_wrap() {
    let (mut over, answer) = answered();
    over.word = Word::new(NOW, 0xfff, over.word.seen());
    assert_eq!(decided(&over, &answer).word.generation(), 0);
}

#[test]
fn what_was_forged_begins_anew_with_another_rule() {
    // A SYN in this host's name, and then this host's own.
    let mut forged = record(State::SynSent);
    let seen = Seen::first(FromLow, SYN, BOTH_SIDES).unwrap();
    forged.word = Word::new(NOW - 10, 7, seen);
    forged.is_disproved = true;
    let own = segment(SYN, 77, 0, 0);
    let decision = decided(&forged, &own);
    let anew = Effects::BEGINS.with(Effects::WAY).with(Effects::RULE);
    assert!(decision.effects.has(anew));
    assert_eq!(decision.word.generation(), 8);
    // Without that proof it is another SYN of the same sender, in doubt.
    forged.is_disproved = false;
    let decision = decided(&forged, &own);
    assert!(!decision.effects.has(Effects::RULE));
    assert!(decision.effects.has(Effects::DOUBT));
    // A flow with an answer is not begun anew.
    let mut open = open();
    open.is_disproved = true;
    let data = segment(ACK, LOW, HIGH, 1);
    assert_eq!(decided(&open, &data).effects, Effects::TAKEN);
}

#[test]
fn what_changes_nothing_says_why() {
    let far = segment(FIN | ACK, LOW + (1 << 30), HIGH, 0);
    assert_eq!(decided(&open(), &far).effects, Effects::IGNORED);
    let mut record = record(State::SynSent);
    record.known.is_own_way = false;
    let answer = Segment {
        direction: FromHigh,
        ..segment(SYN | ACK, HIGH, LOW, 0)
    };
    assert_eq!(decided(&record, &answer).effects, Effects::SAME_WAY);
    record.word = record.word.dead();
    assert_eq!(decided(&record, &answer).effects, Effects::RACED);
}

#[test]
fn an_answered_datagram_is_a_stream_once_it_is_old() {
    let mut young = record(State::Udp);
    young.word = young
        .word
        .with_seen(Seen::of_socket(State::Udp, FromLow, &[]));
    let datagram = Segment {
        flags: datagram::UDP,
        ..Segment::NONE
    };
    assert_eq!(decided(&young, &datagram).effects, Effects::TAKEN);
    let old = Record {
        lasts: true,
        ..young
    };
    let decision = decided(&old, &datagram);
    assert!(decision.effects.has(Effects::WORD));
    assert_eq!(decision.word.seen().state(), State::UdpStream);
}

#[test]
fn the_acknowledgment_of_a_fin_says_where_its_sender_ends() {
    let mut ending = open();
    let fin = decided(&ending, &segment(FIN | ACK, LOW, HIGH, 0));
    ending.word = fin.word;
    ending.known.doubt = fin.doubt;
    let answer = Segment {
        direction: FromHigh,
        ..segment(ACK, HIGH, fin.doubt, 0)
    };
    let decision = decided(&ending, &answer);
    let expected = Effects::TAKEN.with(Effects::WORD).with(Effects::FOLLOWS);
    assert_eq!(decision.effects, expected.with(Effects::OTHER));
    assert_eq!(decision.word.seen().state(), State::CloseWait);
    assert_eq!(decision.due, 0, "its timeout is as long as before");
}

#[test]
fn each_effect_is_a_bit_of_its_own() {
    const ALL: [Effects; 12] = [
        Effects::TAKEN,
        Effects::WORD,
        Effects::BEGINS,
        Effects::OTHER,
        Effects::BOTH,
        Effects::DOUBT,
        Effects::FOLLOWS,
        Effects::WAY,
        Effects::RULE,
        Effects::IGNORED,
        Effects::SAME_WAY,
        Effects::RACED,
    ];
    for (number, effect) in ALL.iter().enumerate() {
        assert!(!Effects::default().has(*effect));
        let others = ALL.iter().enumerate().filter(|(other, _)| *other != number);
        let others = others.fold(Effects::default(), |all, (_, other)| all.with(*other));
        assert!(!others.has(*effect) && others.with(*effect).has(*effect));
    }
}
