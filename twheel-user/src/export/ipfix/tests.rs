use std::{collections::HashMap, time::UNIX_EPOCH};

use twheel_common::{
    event::Reason,
    flow::{Direction, FlowKey, Traffic},
    packet::tcp,
    point::Point,
    seen::{Seen, View},
};
use uuid::Uuid;

use super::*;
use crate::{
    identity::Identity,
    model::{Birth, Ended, Flow, Interval, Mark, Named, Origin, Translation, Updated},
};

/// Numbers of fields, with the number of the enterprise; and their lengths.
type Fields = Vec<(u16, Option<u32>, u16)>;
/// A record: the values of its fields.
type Record = HashMap<(u16, Option<u32>), Vec<u8>>;

/// Reads messages as a collector does.
#[derive(Default)]
struct Collector {
    templates: HashMap<u16, Fields>,
    records: Vec<Record>,
    messages: Vec<usize>,
    /// The number of records, as the next message must say.
    sequence: Option<u32>,
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u32 {
        let taken = self.take(bytes);
        taken
            .iter()
            .fold(0, |sum, byte| sum << 8 | u32::from(*byte))
    }
}

impl Collector {
    fn read(&mut self, bytes: &[u8]) {
        assert_eq!(messages(bytes).map(<[u8]>::len).sum::<usize>(), bytes.len());
        for message in messages(bytes) {
            self.messages.push(message.len());
            let mut cursor = Cursor(message);
            assert_eq!(cursor.number(2), 10, "version");
            assert_eq!(cursor.number(2) as usize, message.len());
            cursor.take(4);
            let sequence = cursor.number(4);
            assert_eq!(sequence, self.sequence.unwrap_or(sequence), "sequence");
            assert_eq!(cursor.number(4), 77, "domain");
            let before = self.records.len();
            while !cursor.0.is_empty() {
                let (set, length) = (cursor.number(2) as u16, cursor.number(2) as usize);
                assert!(length > 4, "an empty set");
                self.set(set, Cursor(cursor.take(length - 4)));
            }
            self.sequence = Some(sequence + (self.records.len() - before) as u32);
        }
    }

    fn set(&mut self, set: u16, mut cursor: Cursor<'_>) {
        while !cursor.0.is_empty() {
            match set {
                2 | 3 => {
                    let (template, count) = (cursor.number(2) as u16, cursor.number(2));
                    assert!(template >= 256);
                    if set == 3 {
                        assert_eq!(cursor.number(2), 1, "scope");
                    }
                    let fields = (0..count).map(|_| {
                        let (number, length) = (cursor.number(2) as u16, cursor.number(2) as u16);
                        let pen = (number >> 15 == 1).then(|| cursor.number(4));
                        (number & 0x7fff, pen, length)
                    });
                    let fields = fields.collect();
                    self.templates.insert(template, fields);
                }
                _ => {
                    let fields = &self.templates[&set];
                    let values = fields.iter().map(|(number, pen, length)| {
                        let length = match *length {
                            u16::MAX => cursor.number(1) as usize,
                            length => length.into(),
                        };
                        ((*number, *pen), cursor.take(length).to_vec())
                    });
                    self.records.push(values.collect());
                }
            }
        }
    }
}

fn config() -> Config {
    Config {
        domain: 77,
        name: "eth0@host".to_owned(),
        pen: None,
        biflow: false,
        most: 1400,
    }
}

fn flow(ends: [&str; 2]) -> FlowRecord<'static> {
    FlowRecord {
        start: 1_700_000_000_001,
        end: 1_700_000_000_999,
        ends: ends.map(|it| it.parse().unwrap()),
        proto: 6,
        end_reason: EndReason::Idle,
        sent: Some([(3, 180), (2, 120)].map(|(packets, bytes)| Traffic { packets, bytes })),
        has_sent: [true, true],
        vlans: [0, 0],
        iface: Some("eth0"),
        is_only_iface: true,
        is_outgoing: false,
        flow_id: Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888),
        seq: 9,
        rule: None,
        state: "established",
        reason: "idle",
        zone: 0,
        nat: None,
    }
}

fn v4() -> FlowRecord<'static> {
    flow(["10.0.0.1:4000", "10.0.0.2:443"])
}

/// What a collector reads of these flows.
fn sent(config: Config, flows: &[FlowRecord<'_>]) -> Collector {
    let mut encoder = Encoder::new(config);
    let (mut bytes, mut collector) = (Vec::new(), Collector::default());
    encoder.begin(true);
    flows.iter().for_each(|it| encoder.flow(it, &mut bytes));
    encoder.complete(&mut bytes);
    collector.read(&bytes);
    collector
}

fn number(record: &Record, element: u16) -> u64 {
    let bytes = &record[&(element, None)];
    bytes
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[test]
fn a_flow_is_two_records_one_a_direction() {
    let [orig, reply] = &sent(config(), &[v4()]).records[..] else {
        panic!("not two");
    };
    for (record, ports, addresses, counts, direction) in [
        (orig, (4000, 443), (1, 2), (3, 180), (1, 0)),
        (reply, (443, 4000), (2, 1), (2, 120), (2, 1)),
    ] {
        let get = |element| number(record, element);
        assert_eq!((get(7), get(11)), ports);
        assert_eq!((get(8) & 0xff, get(12) & 0xff), addresses);
        assert_eq!((get(2), get(1)), counts);
        assert_eq!((get(239), get(61)), direction);
        assert_eq!(get(152), 1_700_000_000_001);
        assert_eq!(get(153), 1_700_000_000_999);
        assert_eq!((get(4), get(136)), (6, 1));
        assert_eq!(get(148), 0x1111_2222_3333_4444);
        assert_eq!(record[&(82, None)], b"eth0");
        assert_eq!(record.len(), 14);
    }
}

#[test]
fn no_record_says_what_was_not_seen() {
    let nothing = FlowRecord {
        sent: None,
        has_sent: [true, false],
        iface: None,
        proto: 1,
        ..v4()
    };
    let records = sent(config(), &[nothing]).records;
    assert_eq!(records.len(), 1, "one side sent nothing");
    for absent in [1, 2, 7, 11, 58, 245, 82, 61] {
        assert!(!records[0].contains_key(&(absent, None)), "{absent}");
    }
    let silent = Traffic::default();
    let one = Traffic {
        packets: 1,
        bytes: 60,
    };
    for (sent_by, direction) in [([one, silent], 1), ([silent, one], 2)] {
        let flow = FlowRecord {
            sent: Some(sent_by),
            has_sent: sent_by.map(|it| it.packets > 0),
            ..v4()
        };
        let records = sent(config(), &[flow]).records;
        assert_eq!(records.len(), 1);
        assert_eq!(number(&records[0], 239), direction);
        assert_eq!(number(&records[0], 1), 60);
    }
    // With several interfaces nobody says where the responder's packets are counted.
    let several = FlowRecord {
        is_only_iface: false,
        ..v4()
    };
    let records = sent(config(), &[several]).records;
    let has = records.iter().map(|it| it.contains_key(&(82, None)));
    assert!(has.eq([true, false]));
}

#[test]
fn a_biflow_is_one_record_with_reverse_elements() {
    let biflow = Config {
        biflow: true,
        ..config()
    };
    let records = sent(biflow, &[v4()]).records;
    assert_eq!(records.len(), 1);
    assert_eq!(number(&records[0], 2), 3);
    assert_eq!(records[0][&(2, Some(29305))], 2_u64.to_be_bytes());
    assert_eq!(records[0][&(1, Some(29305))], 120_u64.to_be_bytes());
}

#[test]
fn private_elements_are_sent_under_the_users_number_alone() {
    let private = Config {
        pen: Some(32473),
        ..config()
    };
    let flow = FlowRecord {
        rule: Some("web"),
        zone: 7,
        ..v4()
    };
    let records = sent(private, &[flow]).records;
    let get = |element| &records[0][&(element, Some(32473))][..];
    assert_eq!(get(1), flow.flow_id.as_bytes());
    assert_eq!(get(2), 9_u64.to_be_bytes());
    assert_eq!(
        (get(3), get(4), get(5)),
        (&b"established"[..], &b"idle"[..], &b"web"[..])
    );
    assert_eq!(get(6), [0, 7]);
    assert!(
        sent(config(), &[flow]).records[0]
            .keys()
            .all(|it| it.1.is_none())
    );
}

#[test]
fn addresses_of_two_families_are_both_ipv6() {
    let flow = flow(["[2001:db8::1]:1", "10.0.0.2:2"]);
    let records = sent(config(), &[flow]).records;
    assert_eq!(records[0][&(28, None)][10..], [0xff, 0xff, 10, 0, 0, 2]);
    assert!(!records[0].contains_key(&(8, None)));
}

#[test]
fn translated_endpoints_are_those_of_the_records_direction() {
    let end = |text: &str| text.parse().unwrap();
    let nat = |src, dst| {
        Some(Translation {
            src: end(src),
            dst: end(dst),
        })
    };
    let flow_4 = FlowRecord {
        nat: nat("198.51.100.1:6000", "10.1.0.9:8080"),
        ..v4()
    };
    let flow_6 = FlowRecord {
        nat: nat("[2001:db8:3::1]:6000", "[2001:db8::9]:8080"),
        ..flow(["[2001:db8::1]:1", "[2001:db8::2]:2"])
    };
    for (flow, addresses) in [(flow_4, [225, 226]), (flow_6, [281, 282])] {
        let records = sent(config(), &[flow]).records;
        for (record, last, ports) in [
            (&records[0], [1, 9], [6000, 8080]),
            (&records[1], [9, 1], [8080, 6000]),
        ] {
            let found = addresses.map(|it| *record[&(it, None)].last().unwrap());
            assert_eq!(found, last);
            assert_eq!([227, 228].map(|it| number(record, it)), ports);
        }
    }
    assert!(!sent(config(), &[v4()]).records[0].contains_key(&(227, None)));
}

/// What an event with these totals, and these deltas in its interval, is as a record.
fn record_of(reason: Option<Reason>, deltas: [u64; 2]) -> FlowRecord<'static> {
    let sent = |packets: [u64; 2]| {
        packets.map(|packets| Traffic {
            packets,
            bytes: 100 * packets,
        })
    };
    let birth = Birth {
        key: FlowKey::from_parts([0, 1, 0, 2], 3),
        created: 0,
        generation: 0,
    };
    let origin = Origin {
        point: Point::NONE,
        is_outgoing: false,
    };
    let seen = Seen::first(Direction::FromLow, tcp::SYN, View::default()).unwrap();
    let updated = Updated {
        flow: Flow::new(birth, seen, 0, origin, false).unwrap(),
        picked_up: false,
        age: Duration::from_secs(100),
        idle: Duration::from_secs(70),
        account: Some(sent([7, 5])),
        pace: None,
        interval: Some(Interval {
            length: Duration::from_secs(60),
            account: Some(sent(deltas)),
        }),
    };
    let mark = Mark {
        number: 1,
        time: UNIX_EPOCH + Duration::from_secs(1000),
    };
    let (identity, named) = (Identity::default(), Named::default());
    match reason {
        None => FlowRecord::updated(&identity, mark, &updated, named),
        Some(reason) => {
            let ended = Ended {
                last: updated,
                reason,
            };
            FlowRecord::ended(&identity, mark, &ended, named)
        }
    }
}

#[test]
fn a_record_of_an_interval_has_what_was_sent_in_it() {
    let update = record_of(None, [3, 0]);
    assert_eq!(update.end_reason, EndReason::Active);
    assert_eq!((update.start, update.end), (940_000, 940_000));
    assert_eq!(update.has_sent, [true, false]);
    assert_eq!(update.sent.unwrap()[0].bytes, 300);
    // The end is told of both directions that the flow had, though nothing came since the update.
    let end = record_of(Some(Reason::Idle), [0, 0]);
    assert_eq!(end.end_reason, EndReason::Idle);
    assert_eq!(end.has_sent, [true, true]);
    let records = sent(config(), &[end]).records;
    assert_eq!(records.len(), 2);
    assert_eq!(number(&records[0], 2), 0);
}

#[test]
fn vlans_are_sent_where_there_are_some() {
    for (vlans, has) in [([5, 0], [true, false]), ([5, 6], [true, true])] {
        let flow = FlowRecord { vlans, ..v4() };
        let records = sent(config(), &[flow]).records;
        let found = [58, 245].map(|it| records[0].contains_key(&(it, None)));
        assert_eq!(found, has);
    }
}

#[test]
fn no_message_is_longer_than_it_may_be_and_each_says_how_many_records_came_before() {
    let long = "n".repeat(300);
    let flows: Vec<_> = (0..3000)
        .map(|number: usize| FlowRecord {
            rule: (!number.is_multiple_of(4)).then_some(&long[..1 + number % 69]),
            iface: (!number.is_multiple_of(3)).then_some(&long[..1 + number % 59]),
            vlans: [(number % 2) as u16, 0],
            ..if number.is_multiple_of(5) {
                flow(["[2001:db8::1]:1", "[2001:db8::2]:2"])
            } else {
                v4()
            }
        })
        .collect();
    for most in [LEAST_MESSAGE, 1400, 65_000] {
        let config = Config {
            most,
            pen: Some(1),
            ..config()
        };
        let collector = sent(config, &flows);
        assert_eq!(collector.records.len(), 6000);
        assert_eq!(collector.sequence, Some(6000));
        let longest = collector.messages.iter().max().unwrap();
        assert!((most - 300..=most).contains(longest), "{longest}");
    }
}

#[test]
fn the_largest_record_fits_the_smallest_message() {
    let name = "é".repeat(32);
    let flow = FlowRecord {
        vlans: [1, 2],
        iface: Some(&name),
        rule: Some(&name),
        ..flow(["[2001:db8::1]:1", "[2001:db8::2]:2"])
    };
    let config = Config {
        most: LEAST_MESSAGE,
        pen: Some(1),
        biflow: true,
        ..config()
    };
    let collector = sent(config, &[flow, flow]);
    assert!(collector.messages.iter().all(|it| *it <= LEAST_MESSAGE));
    assert_eq!(collector.records[1][&(5, Some(1))], name.as_bytes());
}

#[test]
fn a_session_begins_with_its_templates() {
    let mut encoder = Encoder::new(config());
    let mut bytes = Vec::new();
    for is_connection in [true, true, false, false] {
        bytes.clear();
        encoder.begin(is_connection);
        encoder.statistics(5, &mut bytes);
        encoder.flow(&v4(), &mut bytes);
        encoder.complete(&mut bytes);
        // A collector that knows nothing of earlier sessions.
        let mut collector = Collector::default();
        collector.read(&bytes);
        assert_eq!(collector.records.len(), 3);
        assert_eq!(number(&collector.records[0], 166), 5);
        assert_eq!(collector.records[0][&(300, None)], b"eth0@host");
        // Each connection counts from 0 on; a datagram socket goes on.
        let expected = if is_connection {
            3
        } else {
            collector.sequence.unwrap()
        };
        assert_eq!(collector.sequence, Some(expected));
    }
    assert_eq!(encoder.messages(), 4);
    // What was not completed is dropped.
    encoder.flow(&v4(), &mut bytes);
    encoder.begin(false);
    bytes.clear();
    encoder.flow(&v4(), &mut bytes);
    encoder.complete(&mut bytes);
    let mut collector = Collector::default();
    collector.read(&bytes);
    assert_eq!(collector.records.len(), 2);
    // What is said again is what was said.
    bytes.clear();
    encoder.templates(&mut bytes);
    encoder.statistics(5, &mut bytes);
    encoder.complete(&mut bytes);
    let mut again = Collector::default();
    again.read(&bytes);
    assert!(
        collector
            .templates
            .iter()
            .all(|(id, it)| again.templates[id] == *it)
    );
    assert_eq!(number(&again.records[0], 41), 5);
    assert_eq!(number(&again.records[0], 42), 10);
}

#[test]
fn each_reason_has_its_end_reason() {
    let numbers = Reason::ALL.map(|reason| EndReason::from(reason) as u8);
    assert_eq!(numbers, [1, 3, 3, 3, 5, 4, 4]);
    assert_eq!(EndReason::Active as u8, 2);
}

#[test]
fn bytes_that_are_no_messages_give_none_beyond_their_end() {
    for bytes in [&[][..], &[0; 3], &[0, 10, 0, 200], &[0; 40]] {
        assert!(messages(bytes).map(<[u8]>::len).sum::<usize>() <= bytes.len());
    }
}

#[test]
fn the_exporters_own_records_count_too() {
    let mut encoder = Encoder::new(config());
    let mut collector = Collector::default();
    for _ in 0..3 {
        let mut bytes = Vec::new();
        encoder.statistics(0, &mut bytes);
        encoder.flow(&v4(), &mut bytes);
        encoder.complete(&mut bytes);
        collector.read(&bytes);
    }
    assert_eq!(collector.sequence, Some(9));
}
