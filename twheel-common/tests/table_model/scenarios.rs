//! Scenarios with several CPUs at once.

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::{sync::Arc, thread};
use twheel_common::{
    flow::Direction::*,
    packet::{
        Segment,
        tcp::{self, ACK, RST},
    },
    state::State,
    table::{self, Changed, Inserted, Records, Snapshot},
};

use crate::table::{Broken, Mapped, POSITIONS, RESET, SYN, Table, key, segment};

/// Runs a scenario in every interleaving. Panics with the first failure.
fn explore(preemptions: Option<usize>, scenario: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(scenario);
}

pub fn finds(scenario: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(scenario)).is_err()
}

/// The result of an insertion: the record, and whether it is new.
fn entered(inserted: &Inserted<usize>) -> Option<(usize, bool)> {
    match *inserted {
        Inserted::New(at, index) => {
            assert_eq!(at as u32, index);
            Some((at, true))
        }
        Inserted::Exists(at) => Some((at, false)),
        Inserted::Full => None,
    }
}

/// Two CPUs enter the same key.
pub fn two_insert(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(3, broken));
        let wanted = key(1, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &wanted, 2, 1)));
        let first = entered(&table.insert(0, &wanted, 1, 0)).unwrap();
        let second = second.join().unwrap().unwrap();
        assert!(first.1 != second.1, "not exactly one flow is new");
        assert_eq!(first.0, second.0, "the two CPUs have different records");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A CPU enters a key whose flow another CPU ends and, perhaps, enters again.
pub fn insert_against_an_eviction_of_the_key(broken: Broken) {
    for again in [false, true] {
        explore(Some(2), move || {
            let table = Arc::new(Table::new(3, broken));
            let wanted = key(1, 1);
            let at = table.enter(0, &wanted, 1);
            let other = table.clone();
            let second = thread::spawn(move || entered(&other.insert(0, &wanted, 3, 1)));
            assert!(table.evict(at).is_some(), "the flow was touched");
            let mine = again.then(|| entered(&table.insert(0, &wanted, 2, 0)).unwrap());
            let second = second.join().unwrap().unwrap();
            let new = [mine, Some(second)]
                .iter()
                .flatten()
                .filter(|(_, new)| *new)
                .count();
            assert!(new <= 1, "the key is there twice");
            assert!(!again || new == 1, "the key was not entered");
            assert_eq!(table.at_rest(&[(wanted, 0)]).len(), new);
        });
    }
}

/// Three CPUs enter the same key.
pub fn three_insert(broken: Broken) {
    explore(Some(1), move || {
        let table = Arc::new(Table::new(2, broken));
        let wanted = key(1, 1);
        let threads = [1, 2].map(|cpu| {
            let table = table.clone();
            thread::spawn(move || entered(&table.insert(0, &wanted, 2, cpu)))
        });
        let mut results = vec![entered(&table.insert(0, &wanted, 1, 0))];
        results.extend(threads.map(|thread| thread.join().unwrap()));
        let new = results.iter().flatten().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "not exactly one flow is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// Two CPUs enter the same key while a third frees a record in front.
pub fn two_insert_behind_an_eviction(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(3, broken));
        let (leaving, wanted) = (key(9, 9), key(1, 1));
        let at = table.enter(0, &leaving, 1);
        let threads = [1, 2].map(|cpu| {
            let table = table.clone();
            thread::spawn(move || entered(&table.insert(0, &wanted, 2, cpu)))
        });
        assert!(table.evict(at).is_some());
        let results = threads.map(|thread| thread.join().unwrap().unwrap());
        let new = results.iter().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "not exactly one flow is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A CPU frees a record in front, and then enters the same key as another CPU.
pub fn two_insert_one_in_front(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(2, broken));
        let (leaving, wanted) = (key(9, 9), key(1, 1));
        let at = table.enter(0, &leaving, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &wanted, 2, 1)));
        assert!(table.evict(at).is_some());
        let results = [
            entered(&table.insert(0, &wanted, 2, 0)),
            second.join().unwrap(),
        ];
        let new = results.iter().flatten().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "not exactly one flow is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A packet resets a flow, or stamps it, while its wheel ends the flow.
pub fn eviction_against_a_packet(broken: Broken) {
    for resets in [false, true] {
        explore(None, move || {
            let table = Arc::new(Table::new(1, broken));
            let flow = key(1, 1);
            let at = table.enter(0, &flow, 1);
            let other = table.clone();
            let packet = thread::spawn(move || match other.find(0, &flow) {
                Some(at) if resets => other.reset(at, &flow, 2),
                Some(at) => {
                    other.touch(at, 2);
                    false
                }
                None => false,
            });
            let ended = table.evict(at);
            let noted = packet.join().unwrap();
            let flows = table.at_rest(&[(flow, 0)]);
            match ended {
                // The state bits that the packet stored are in the report.
                Some(word) => {
                    assert!(flows.is_empty());
                    assert_eq!(word.seen() == RESET, noted);
                }
                None => {
                    assert_eq!(flows.len(), 1);
                    assert_eq!(flows[0].1.stamp(), 2);
                    assert_eq!(flows[0].1.seen() == RESET, resets);
                    assert_eq!(noted, resets);
                }
            }
        });
    }
}

/// A packet resets a flow whose record is freed meanwhile and given to another flow with the same
/// ports.
pub fn reuse_under_a_packet(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(1, broken));
        let (old, new) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &old, 1);
        let late = table.clone();
        let packet =
            thread::spawn(move || late.find(0, &old).is_some_and(|at| late.reset(at, &old, 1)));
        let other = table.clone();
        let insert = thread::spawn(move || entered(&other.insert(0, &new, 1, 1)));
        let ended = table.evict(at);
        let noted = packet.join().unwrap();
        let inserted = insert.join().unwrap();
        let flows = table.at_rest(&[(old, 0), (new, 0)]);
        assert_eq!(
            flows.len(),
            usize::from(ended.is_none()) + usize::from(inserted.is_some())
        );
        for (key, word) in flows {
            assert_eq!(
                word.seen(),
                if key == old && noted { RESET } else { SYN },
                "the packet has changed another flow"
            );
        }
    });
}

/// Two CPUs enter different keys where one record is free, or two are.
pub fn different_keys(broken: Broken) {
    for records in [1, 2] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(records, broken));
            let (a, b) = (key(1, 1), key(2, 1));
            let other = table.clone();
            let second = thread::spawn(move || entered(&other.insert(0, &b, 2, 1)));
            let results = [entered(&table.insert(0, &a, 1, 0)), second.join().unwrap()];
            let new = results.iter().flatten().filter(|(_, new)| *new).count();
            let flows = table.at_rest(&[(a, 0), (b, 0)]);
            assert_eq!(flows.len(), new);
            assert_eq!(flows.len(), records);
            for (key, _) in flows {
                assert!(
                    table.finds(&key),
                    "found another flow with the same fingerprint"
                );
            }
        });
    }
}

/// A packet of a flow comes while its twin is entered in front of it.
pub fn a_twin_in_front_of_a_packet(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(2, broken));
        let (leaving, flow, twin) = (key(9, 9), key(1, 1), key(2, 1));
        let front = table.enter(0, &leaving, 1);
        table.enter(0, &flow, 1);
        assert!(table.evict(front).is_some());
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &twin, 2, 1)));
        assert!(table.finds(&flow), "found its twin");
        assert_eq!(second.join().unwrap(), Some((front, true)));
        assert!(table.finds(&flow) && table.finds(&twin));
        table.at_rest(&[(flow, 0), (twin, 0)]);
    });
}

/// A flow ends while its twin is entered.
pub fn a_twin_that_leaves(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table {
            is_marked: true,
            ..Table::new(2, broken)
        });
        let (flow, twin) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &flow, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &twin, 2, 1)));
        assert!(table.evict(at).is_some());
        assert!(second.join().unwrap().is_some());
        assert!(table.finds(&twin));
        assert_eq!(table.at_rest(&[(flow, 0), (twin, 0)]).len(), 1);
    });
}

/// A SYN supersedes a flow while the wheel ends it and its record goes to another flow.
pub fn eviction_against_a_new_life(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(1, broken));
        let (flow, stranger) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &flow, 1);
        assert!(table.reset(at, &flow, 1));
        let other = table.clone();
        let packet = thread::spawn(move || {
            other
                .find(0, &flow)
                .and_then(|at| other.supersede(at, &flow, 2))
        });
        let word = table.word(at);
        let ended = table.kill(at, word).then(|| {
            let created = table.created(at);
            table.remove(at);
            (created, word)
        });
        let inserted = entered(&table.insert(0, &stranger, 3, 0));
        let superseded = packet.join().unwrap();
        // Each flow ends once, with its own beginning.
        let mut lives: Vec<_> = superseded.into_iter().chain(ended).collect();
        lives.sort_unstable_by_key(|(_, word)| word.generation());
        for (created, word) in &lives {
            assert_eq!(*created, word.stamp(), "the beginning of another flow");
            assert!(!word.seen().is_starting());
        }
        lives.dedup_by_key(|(_, word)| word.generation());
        let lived = 1 + usize::from(superseded.is_some());
        let flows = table.at_rest(&[(flow, 0), (stranger, 0)]);
        assert_eq!(flows.len(), 1);
        let stands = flows[0].0 == flow;
        assert_eq!(
            lives.len() + usize::from(stands),
            lived,
            "a flow has ended twice"
        );
        assert_eq!(inserted.is_some(), !stands);
        assert!(!flows[0].1.seen().is_starting());
        let created = match (stands, superseded) {
            (false, _) => 3,
            (true, Some(_)) => 2,
            (true, None) => 1,
        };
        assert_eq!(table.created(at), created);
    });
}

/// A RST near the next number, on a connection that continues: each side's packets are seen by a
/// CPU of its own, and the flow's wheel may end it meanwhile.
pub fn an_end_in_doubt_against_both_sides(broken: Broken) {
    for ends in [false, true] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(1, broken));
            let flow = key(1, 1);
            let at = table.enter_established(&flow);
            let before = table.word(at).seen();
            let near = Segment {
                seq: POSITIONS[0] + 1,
                ..segment(&flow, FromLow, RST)
            };
            table.see(at, &near, 2);
            assert!(table.word(at).seen().is_reset());
            let other = table.clone();
            let packet = thread::spawn(move || other.see(at, &segment(&flow, FromHigh, ACK), 3));
            assert_eq!(table.see(at, &segment(&flow, FromLow, ACK), 3), None);
            let ended = ends.then(|| table.evict(at)).flatten();
            assert_eq!(packet.join().unwrap(), None);
            let flows = table.at_rest(&[(flow, 0)]);
            assert_eq!(flows.len(), usize::from(ended.is_none()));
            // Only if the flow has not ended; the end has reported its state bits.
            for seen in flows.iter().map(|(_, word)| word.seen()) {
                assert_eq!(seen, before, "both sides have continued, but the RST stays");
            }
        });
    }
}

/// After a reset, a port is used again, and an attacker forges a SYN at the same time.
pub fn candidates(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(1, broken));
        let flow = key(1, 1);
        let at = table.enter_established(&flow);
        table.see(at, &segment(&flow, FromLow, RST), 2);
        let syn = |seq: u32| Segment {
            seq,
            end: seq + 1,
            ..segment(&flow, FromLow, tcp::SYN)
        };
        let answer = Segment {
            ack: 5_001,
            ..segment(&flow, FromHigh, tcp::SYN | ACK)
        };
        let other = table.clone();
        let forged = syn(9_000);
        let forger = thread::spawn(move || other.see(at, &forged, 3));
        let mut ended = Vec::new();
        for segment in [&syn(5_000), &answer] {
            ended.extend(table.see(at, segment, 3));
        }
        assert_eq!(forger.join().unwrap(), None, "a SYN alone has begun a flow");
        // Sent again, in case the forged SYN came between them.
        for segment in [&syn(5_000), &answer] {
            ended.extend(table.see(at, segment, 4));
        }
        assert_eq!(ended.len(), 1, "the old flow did not end exactly once");
        assert!(ended[0].seen().is_reset());
        let flows = table.at_rest(&[(flow, 0)]);
        assert_eq!(flows[0].1.seen().state(), State::SynRecv);
        assert_eq!(flows[0].1.generation(), ended[0].generation() + 1);
    });
}

/// A reader looks at a record that passes from one flow to another, or whose flow is superseded.
pub fn reading(broken: Broken) {
    for supersedes in [false, true] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(1, broken));
            let (old, new) = (key(1, 1), key(2, 1));
            let at = table.enter(0, &old, 1);
            if supersedes {
                assert!(table.reset(at, &old, 1));
            }
            let other = table.clone();
            let writer = thread::spawn(move || {
                if supersedes {
                    assert!(other.supersede(at, &old, 2).is_some());
                } else {
                    assert!(other.evict(at).is_some());
                    assert!(entered(&other.insert(0, &new, 2, 1)).is_some());
                }
            });
            let read = table::read(&Mapped(&table));
            writer.join().unwrap();
            let second = if supersedes { (old, 0) } else { (new, 1) };
            match read {
                Ok(Some(flow)) => {
                    let Snapshot {
                        key,
                        cpu,
                        rule: _,
                        word,
                        created,
                        is_outgoing: _,
                        point: _,
                        seen_at: _,
                    } = flow;
                    let whole = match created {
                        1 => (key, cpu) == (old, 0) && word.seen().is_closed() == supersedes,
                        _ => (key, cpu) == second && word.seen() == SYN,
                    };
                    assert!(
                        whole && word.stamp() == created,
                        "a mixture of two flows: {flow:?}"
                    );
                }
                Ok(None) => assert!(!supersedes, "a live flow is missed"),
                Err(Changed) => {}
            }
            assert!(matches!(
                table::read(&Mapped(&table)),
                Ok(Some(flow)) if flow.created == 2
            ));
        });
    }
}
