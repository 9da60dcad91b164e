//! Histories in a directory of their own: written, torn, damaged, bounded, read.

use std::{
    fs::{self, File},
    mem,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use twheel_common::{
    event::{Birth, Event, Pace, Reason},
    flow::{Direction, FlowKey, Traffic},
    packet::tcp,
    point::Point,
    state::{Seen, View},
};
use zerocopy::transmute;

use super::{
    HistoryReader, LEAST_BYTES, Past, PastEvent,
    directory::{STALE, remove_stale},
    format::{BODY, FLOW, HEADER, Header, LATEST, MAGIC, NAME, RECORD, segments},
    log::{Entry, Log},
    writer::identity_names,
};
use crate::{
    failure::{Kind, exit_code},
    identity::Identity,
    model::{Ended, FlowEvent},
};

const HEADER_4MS: Header = Header {
    unit_ns: 4_000_000,
    one_way: false,
};
const RULE: u16 = 7;
const RING: u32 = 0xbee;

fn event(number: u32) -> Event {
    let seen = Seen::first(Direction::FromLow, tcp::SYN, View::default()).unwrap();
    Event {
        key: FlowKey::from_parts([0, 1, 0, 2], 1 << 32 | u64::from(number & 0xffff)),
        number: 7 + u64::from(number),
        at: number.into(),
        age: number,
        idle: 25,
        seen: seen.0,
        reason: Reason::Idle as u32,
        cpu: 0,
        rule: if number.is_multiple_of(2) { RULE } else { 0 },
        point: Point::NONE,
        birth: Birth::default(),
        account: [Traffic::default(); 2],
        pace: [Pace::default(); 2],
        positions: [0; 2],
        before: Default::default(),
        since: 0,
        updates: 0,
    }
}

fn identity() -> Identity {
    Identity {
        host: "gw1".to_owned(),
        instance: "eth0@1".to_owned(),
        seed: u64::MAX - 1,
    }
}

fn put(log: &mut Log, when: u64, number: u32) {
    let event = event(number);
    let body = transmute!(event);
    let names = names(&event);
    log.append(&Entry {
        when,
        kind: FLOW,
        body: &body,
        end: number.into(),
        names: &names,
        more: &[],
    })
    .unwrap();
}

fn names(event: &Event) -> Vec<(u32, String)> {
    let rule = (event.rule != 0).then(|| (event.rule.into(), "web".to_owned()));
    rule.into_iter().collect()
}

fn append(log: &mut Log, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let when = 1_000_000 + u64::from(number);
        put(log, when, number);
    }
}

fn open(directory: &Path, bytes: Option<u64>) -> Log {
    Log::open(
        directory.join("it"),
        HEADER_4MS,
        bytes,
        RING,
        identity_names(&identity()),
    )
    .unwrap()
}

fn write(directory: &Path, numbers: std::ops::Range<u32>, bytes: u64) {
    let mut log = open(directory, Some(bytes));
    append(&mut log, numbers);
    log.flush().unwrap();
    log.sync().unwrap();
}

/// The ages of all events, in units, and the number of damaged records.
fn read(directory: &Path) -> (Vec<u32>, u64) {
    let mut reader = HistoryReader::open(directory, "it", UNIX_EPOCH).unwrap();
    let mut ages = Vec::new();
    while let Some(past) = reader.next().unwrap() {
        let age = (ended_of(&past).age.as_millis() / 4) as u32;
        assert_eq!(
            past.mark.time,
            UNIX_EPOCH + Duration::from_micros(1_000_000 + u64::from(age))
        );
        assert_eq!(past.mark.number, 7 + u64::from(age));
        assert_eq!(*past.identity, identity());
        assert_eq!(ended_of(&past).idle, Duration::from_millis(100));
        assert_eq!(
            past.known_as.rule.as_deref(),
            age.is_multiple_of(2).then_some("web"),
            "{age}"
        );
        ages.push(age);
    }
    (ages, reader.damaged)
}

fn ended_of(past: &Past) -> &Ended {
    match &past.event {
        PastEvent::Flow(FlowEvent::Ended(ended)) => ended,
        _ => panic!("only ends were written"),
    }
}

fn fresh() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("it")).unwrap();
    directory
}

fn only_segment(directory: &Path) -> PathBuf {
    let mut segments = segments(&directory.join("it")).unwrap();
    assert_eq!(segments.len(), 1);
    segments.remove(0).1
}

#[test]
fn what_is_written_is_read_in_order_after_any_number_of_restarts() {
    let directory = fresh();
    for from in [0, 100, 101, 350] {
        let to = [100, 101, 350, 500][[0, 100, 101, 350]
            .iter()
            .position(|it| *it == from)
            .unwrap()];
        write(directory.path(), from..to, LEAST_BYTES);
    }
    assert_eq!(read(directory.path()), ((0..500).collect(), 0));
    only_segment(directory.path());
}

#[test]
fn a_writer_knows_what_earlier_ones_have_written_of_its_ring() {
    let directory = fresh();
    let open = |ring| {
        let path = directory.path().join("it");
        Log::open(
            path,
            HEADER_4MS,
            Some(LEAST_BYTES),
            ring,
            identity_names(&identity()),
        )
        .unwrap()
    };
    assert!(!open(RING).has(0), "nothing yet");
    write(directory.path(), 0..100, LEAST_BYTES);
    let log = open(RING);
    assert!((0..100).all(|end| log.has(end)) && !log.has(100));
    assert!(!open(RING + 1).has(0), "another ring, which begins anew");
    // The name of a rule is written before its event, with the same position.
    let mut log = open(RING);
    log.put(NAME, 1100, 100, &[0; BODY]);
    log.flush().unwrap();
    assert!(open(RING).has(99) && !open(RING).has(100));
    // A segment that was just begun has no records.
    let header = fs::read(only_segment(directory.path())).unwrap();
    let next = directory.path().join("it/0000000002.history");
    fs::write(next, &header[..HEADER]).unwrap();
    assert!(open(RING).has(99) && !open(RING).has(100));
    // Positions stay known however far the ring has come since.
    log.flush().unwrap();
    drop(log);
    let mut log = open(RING);
    log.adopt(100, 0);
    assert!(log.has(100));
    assert!((8..63).all(|bits| !log.has(1 << bits)));
    // A batch that is read again does not move the position back.
    log.reach(50);
    log.note(0);
    log.flush().unwrap();
    assert!(open(RING).has(99));
}

#[test]
fn what_has_left_the_ring_and_is_not_in_the_history_is_counted_once() {
    let directory = fresh();
    let mut counted = 0;
    // A writer that finds the ring released up to `released` and then loses `too_slow` more events.
    // If it is killed, it does not record them.
    let mut lost = |released, too_slow, is_killed: bool| {
        let mut log = open(directory.path(), Some(LEAST_BYTES));
        let missing = log.adopt(released, counted);
        log.flush().unwrap();
        if !is_killed {
            log.note(missing + too_slow);
            log.flush().unwrap();
        }
        counted += missing + too_slow;
        missing
    };
    let bytes = |events: u64| events * BODY as u64;
    assert_eq!(lost(bytes(100), 0, false), 0, "it begins there");
    assert_eq!(lost(bytes(100), 0, false), 0);
    assert_eq!(lost(bytes(130) + 8, 5, false), 30, "and 5 by the disk");
    assert_eq!(lost(bytes(130) + 8, 0, false), 0, "once");
    // Events that are in the history and not yet released are not lost.
    assert_eq!(lost(bytes(90), 0, false), 0);
    // 20 events were counted and not recorded in the history, and 7 were neither counted nor
    // recorded.
    assert_eq!(lost(bytes(130) + 8, 20, true), 0);
    assert_eq!(lost(bytes(157) + 8, 0, false), 7);
    assert_eq!(lost(bytes(157) + 8, 0, false), 0, "once");
    // Positions beyond 32 bits.
    let far = ((9 << 32) - bytes(157) - 8) / BODY as u64;
    assert_eq!(lost(9 << 32, 0, false), far);
    let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
    assert!(reader.next().unwrap().is_none());
    assert_eq!(reader.lost, 30 + 5 + 20 + 7 + far);
    assert_eq!(reader.lost, counted);
    let place = reader.position();
    let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
    reader.was_counted_until(place);
    assert!(reader.next().unwrap().is_none());
    assert_eq!(reader.lost, 0, "once");
}

#[test]
fn the_oldest_goes_first_and_the_rest_stays_within_bounds() {
    let directory = fresh();
    for from in (0..30_000).step_by(2500) {
        write(directory.path(), from..from + 2500, LEAST_BYTES);
    }
    let (ages, damaged) = read(directory.path());
    assert_eq!(damaged, 0);
    assert_eq!(*ages.last().unwrap(), 29_999);
    assert!(
        ages.windows(2).all(|two| two[1] == two[0] + 1),
        "without a gap"
    );
    // Seven of eight segments are full. Each has a thousand records, less two with names, and the
    // header.
    assert!((7 * 1000..8 * 1024).contains(&ages.len()), "{}", ages.len());
    let sizes = segments(&directory.path().join("it")).unwrap();
    let sizes: u64 = sizes
        .iter()
        .map(|(_, path)| fs::metadata(path).unwrap().len())
        .sum();
    assert!(sizes <= LEAST_BYTES, "{sizes}");
}

#[test]
fn a_write_that_was_torn_costs_the_last_record_alone() {
    let whole = fresh();
    write(whole.path(), 0..10, LEAST_BYTES);
    let bytes = fs::read(only_segment(whole.path())).unwrap();
    // Four of the records are names.
    assert_eq!(bytes.len(), HEADER + 14 * RECORD);
    for cut in [1, 3, 17, RECORD - 1] {
        let directory = fresh();
        let path = directory.path().join("it/0000000001.history");
        fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        assert_eq!(
            read(directory.path()),
            ((0..9).collect(), 0),
            "less {cut} bytes"
        );
        // A new writer continues after the last whole record.
        write(directory.path(), 9..12, LEAST_BYTES);
        assert_eq!(
            read(directory.path()),
            ((0..12).collect(), 0),
            "less {cut} bytes"
        );
    }
    // Long enough, but not written: zeros, which no checksum matches.
    let directory = fresh();
    let path = directory.path().join("it/0000000001.history");
    let mut zeros = bytes.clone();
    zeros[bytes.len() - RECORD..].fill(0);
    fs::write(&path, &zeros).unwrap();
    assert_eq!(read(directory.path()), ((0..9).collect(), 1));
    write(directory.path(), 9..12, LEAST_BYTES);
    assert_eq!(read(directory.path()), ((0..12).collect(), 0));
}

#[test]
fn a_damaged_record_in_the_middle_costs_itself_and_is_counted() {
    let directory = fresh();
    write(directory.path(), 0..10, LEAST_BYTES);
    let path = only_segment(directory.path());
    let mut bytes = fs::read(&path).unwrap();
    bytes[HEADER + 5 * RECORD + 40] ^= 1;
    fs::write(&path, bytes).unwrap();
    let (ages, damaged) = read(directory.path());
    assert_eq!((ages.len(), damaged), (9, 1));
    // Once, if another reader goes on from where one has counted it.
    let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
    while reader.next().unwrap().is_some() {}
    let counted = reader.position();
    let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
    reader.was_counted_until(counted);
    while reader.next().unwrap().is_some() {}
    assert_eq!(reader.damaged, 0);
}

#[test]
fn a_disk_that_is_full_for_a_while_costs_what_ends_meanwhile() {
    let directory = fresh();
    let mut log = open(directory.path(), Some(LEAST_BYTES));
    let good = mem::replace(&mut log.file, File::open("/dev/full").unwrap());
    log.wanted = 3;
    append(&mut log, 0..3);
    log.flush().unwrap_err();
    log.file = good;
    assert_eq!(log.recover(), 3);
    log.wanted = 2;
    append(&mut log, 3..5);
    log.flush().unwrap();
    assert_eq!((log.wanted, log.recover()), (0, 0));
    assert_eq!(read(directory.path()), (vec![3, 4], 0));
}

#[test]
fn less_room_than_before_is_kept_to_and_stale_histories_go() {
    let directory = fresh();
    write(directory.path(), 0..20_000, 4 * LEAST_BYTES);
    write(directory.path(), 20_000..20_001, LEAST_BYTES);
    let sizes = segments(&directory.path().join("it")).unwrap();
    let sizes: u64 = sizes
        .iter()
        .map(|(_, path)| fs::metadata(path).unwrap().len())
        .sum();
    assert!(sizes <= LEAST_BYTES, "{sizes}");
    assert_eq!(read(directory.path()).0.last(), Some(&20_000));
    // A writer without a maximum size keeps what exists.
    write(directory.path(), 20_001..40_000, 4 * LEAST_BYTES);
    let kept = read(directory.path()).0.len();
    drop(open(directory.path(), None));
    assert_eq!(read(directory.path()).0.len(), kept);

    fs::write(directory.path().join("something else"), "").unwrap();
    let soon = SystemTime::now() + STALE - Duration::from_secs(60);
    remove_stale(directory.path(), soon).unwrap();
    assert!(directory.path().join("it").exists());
    remove_stale(directory.path(), soon + Duration::from_secs(120)).unwrap();
    assert!(!directory.path().join("it").exists());
    assert!(directory.path().join("something else").exists());
}

#[test]
fn a_time_that_no_calendar_has_is_damage() {
    let directory = fresh();
    let mut log = open(directory.path(), Some(LEAST_BYTES));
    put(&mut log, LATEST + 1, 1);
    log.flush().unwrap();
    // The event, and the three names before it.
    assert_eq!(read(directory.path()), (vec![], 4));
}

#[test]
fn another_version_is_refused_by_the_reader_and_left_alone_by_the_writer() {
    for (at, part) in [
        (0, "not a history"),
        (8, "another version"),
        (16, "damaged at its beginning"),
    ] {
        let directory = fresh();
        write(directory.path(), 0..10, LEAST_BYTES);
        let path = only_segment(directory.path());
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 0xff;
        fs::write(&path, &bytes).unwrap();
        let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
        assert!(reader.next().unwrap().is_none());
        assert!(reader.refused[0].to_string().contains(part));
        write(directory.path(), 10..20, LEAST_BYTES);
        assert_eq!(fs::read(&path).unwrap(), bytes);
        assert_eq!(segments(&directory.path().join("it")).unwrap().len(), 2);
        // The rest can still be read.
        assert_eq!(read(directory.path()).0, (10..20).collect::<Vec<_>>());
    }
    // The power failed before the header was written.
    let directory = fresh();
    write(directory.path(), 0..10, LEAST_BYTES);
    fs::write(directory.path().join("it/0000000002.history"), [0; HEADER]).unwrap();
    assert_eq!(read(directory.path()), ((0..10).collect(), 1));
    // Too short for a header: its writer died.
    let directory = fresh();
    write(directory.path(), 0..10, LEAST_BYTES);
    fs::write(only_segment(directory.path()), &MAGIC[..5]).unwrap();
    write(directory.path(), 10..20, LEAST_BYTES);
    assert_eq!(read(directory.path()).0, (10..20).collect::<Vec<_>>());
    let error = HistoryReader::open(directory.path(), "other", UNIX_EPOCH)
        .map(|_| ())
        .unwrap_err();
    assert_eq!(exit_code(&error), Kind::Pins as u8, "{error}");
}

#[test]
fn a_reader_goes_on_where_a_writer_does() {
    let directory = fresh();
    write(directory.path(), 0..1, LEAST_BYTES);
    let mut reader = HistoryReader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
    let follow = reader.follow().unwrap();
    let mut seen = 0;
    for to in [1, 2, 900, 5000] {
        if to > 1 {
            write(directory.path(), seen..to, LEAST_BYTES);
            follow.wait().unwrap();
        }
        while let Some(past) = reader.next().unwrap() {
            assert_eq!(
                ended_of(&past).age,
                Duration::from_millis(4 * u64::from(seen))
            );
            seen += 1;
        }
        assert_eq!(seen, to);
    }
}

#[test]
fn what_ended_before_is_passed_over() {
    let directory = fresh();
    write(directory.path(), 0..100, LEAST_BYTES);
    let since = UNIX_EPOCH + Duration::from_micros(1_000_090);
    let mut reader = HistoryReader::open(directory.path(), "it", since).unwrap();
    let mut ages = Vec::new();
    while let Some(past) = reader.next().unwrap() {
        ages.push(ended_of(&past).age.as_millis() / 4);
    }
    assert_eq!(ages, (90..100).collect::<Vec<_>>());
}
