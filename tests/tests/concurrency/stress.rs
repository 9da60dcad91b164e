//! Two CPUs work on the same flows; the invariants are checked when they rest.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use aya::{
    maps::{Array, MapData, PerCpuArray},
    programs::{SchedClassifier, Xdp},
};
use twheel::{
    call::step,
    data_plane::{DataPlane, Events},
    flows::Flows,
    stepper::pin_to,
};
use twheel_common::{
    counter::Counter,
    event::Event,
    flow::FlowKey,
    pool::Shelf,
    state::State,
    step::Outcome,
    table::{self, Details, Extras, Hash, LINE, Line, holds_flow},
    wheel::{Heads, LISTS, Link, Wheel},
};
use twheel_tests::plane::{Setup, twins};

use crate::{
    CPUS, check_flow, client,
    driver::{BURST, Driver, Load, NARROW, WIDE},
};

/// Long enough for a million state changes. At all times, a flow must be in exactly one slot and in
/// at most one inbox.
const LONG: Duration = Duration::from_secs(480);

#[test]
fn two_cpus_at_once() {
    let seconds = std::env::var("TWHEEL_STRESS_SECONDS");
    let default = if twheel_tests::is_long() { 60 } else { 5 };
    let seconds = seconds.map_or(default, |seconds| seconds.parse().unwrap());
    run(Duration::from_secs(seconds));
}

fn run(duration: Duration) {
    let views = |load: Load| {
        [false, true].map(|one_way| Load {
            setup: Setup {
                one_way,
                ..load.setup
            },
            ..load
        })
    };
    let (duration, long) = (duration / 2, LONG / 2);
    // Eight keys share one fingerprint.
    let twins = Load {
        setup: Setup {
            secret: Some(twins(3)),
            ..NARROW.setup
        },
        ..NARROW
    };
    for load in [NARROW, WIDE, twins].into_iter().flat_map(views) {
        Stress::with(load, |stress| {
            let begin = Instant::now();
            let mut round = 0;
            // However long it takes, up to a limit.
            while begin.elapsed() < duration || begin.elapsed() < long && stress.missing().is_some()
            {
                round += 1;
                stress.round(round, Duration::from_millis(250));
                stress.check();
            }
            stress.finish();
            let missing = stress.missing();
            assert!(missing.is_none(), "the load caused too few of {missing:?}");
        });
    }
}

/// What the threads share.
struct Stress<'a> {
    load: Load,
    plane: &'a DataPlane,
    ring: &'a mut Events,
    wakes: aya::maps::RingBuf<MapData>,
    clock: Array<aya::maps::MapData, u64>,
    now: u64,
    flows: Flows,
    /// The number of records in the table.
    records: u32,
    ingress: &'a Xdp,
    egress: &'a SchedClassifier,
    stepper: &'a Xdp,
    deleter: &'a Xdp,
    idle: u32,
    /// Events of the ring.
    events: Vec<Event>,
    ended: u64,
    /// When the latest flow of a key ended.
    lives: HashMap<FlowKey, u64>,
    /// Packets in the accounts of ended flows.
    counted: u64,
    packets: AtomicU64,
    reads: AtomicU64,
    deleted: AtomicU64,
}

impl Stress<'_> {
    fn with(load: Load, test: impl FnOnce(&mut Stress<'_>)) {
        let mut plane = load.setup.load();
        let (plane, ring) = plane.parts();
        let idle = plane.timeouts(0).expect("timeouts").0[State::Established as usize];
        let flows = plane.flows().unwrap();
        let records = Hash::new([0; 11], load.setup.max_flows).records() as u32;
        let wakes = plane.take_wakes().unwrap();
        let clock = plane.bpf_mut().take_map("CLOCK").unwrap();
        let plane = &*plane;
        let program = |name| plane.bpf().program(name).unwrap();
        let mut stress = Stress {
            load,
            plane,
            ring,
            wakes,
            clock: Array::try_from(clock).unwrap(),
            now: load.setup.start,
            flows,
            records,
            ingress: program("twheel_xdp").try_into().unwrap(),
            egress: program("twheel_egress").try_into().unwrap(),
            stepper: program("twheel_step").try_into().unwrap(),
            deleter: program("twheel_delete").try_into().unwrap(),
            idle,
            events: Vec::new(),
            ended: 0,
            lives: HashMap::new(),
            counted: 0,
            packets: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            deleted: AtomicU64::new(0),
        };
        test(&mut stress);
    }

    /// Runs both CPUs for a while.
    fn round(&mut self, number: u64, duration: Duration) {
        let stop = AtomicBool::new(false);
        let clock = &mut self.clock;
        let (ring, wakes, events) = (&mut *self.ring, &mut self.wakes, &mut self.events);
        let shared = Driver {
            load: self.load,
            flows: &self.flows,
            records: self.records,
            ingress: self.ingress,
            egress: self.egress,
            stepper: self.stepper,
            deleter: self.deleter,
            packets: &self.packets,
            deleted: &self.deleted,
            stop: &stop,
            arrived: &AtomicU64::new(0),
        };
        let mut now = self.now;
        thread::scope(|scope| {
            let shared = &shared;
            let reader = scope.spawn(|| {
                let mut reads = 0;
                while !shared.stop.load(Relaxed) {
                    let begin = Instant::now();
                    for flow in shared.flows.iter() {
                        check_flow(&flow, shared.load.keys);
                        reads += 1;
                    }
                    ring.drain_ended(events);
                    while wakes.next().is_some() {}
                    // The reader takes a small part of the two CPUs, even slow ones, and the ring
                    // does not fill.
                    let pause = [50, 1_000].map(Duration::from_micros);
                    thread::sleep((8 * begin.elapsed()).clamp(pause[0], pause[1]));
                }
                reads
            });
            let other = scope.spawn(|| shared.drive(CPUS[1], number << 1 | 1, || {}));
            let first = scope.spawn(|| {
                let mut packets = 0;
                shared.drive(CPUS[0], number << 1, || {
                    packets += 1;
                    if packets % 4 == 0 {
                        now += 1;
                        clock.set(0, now, 0).unwrap();
                    }
                });
            });
            thread::sleep(duration);
            stop.store(true, Relaxed);
            // A panic in any thread fails the test.
            for result in [first.join(), other.join()] {
                result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            match reader.join() {
                Ok(reads) => self.reads.fetch_add(reads, Relaxed),
                Err(panic) => std::panic::resume_unwind(panic),
            };
        });
        self.now = now;
    }

    /// Checks all invariants while no thread writes.
    fn check(&mut self) -> usize {
        self.ring.drain_ended(&mut self.events);
        let began = |event: &Event| event.at - u64::from(event.age);
        // A stepper stages events: meanwhile, the next flow of the same key can begin and end, and
        // its event can come into the ring first. Flows whose lives do not overlap by more than
        // their clocks differ are in the order of the middles of their lives.
        self.events.sort_by_key(|event| began(event) + event.at);
        for event in self.events.drain(..) {
            client(&event.key, self.load.keys).expect("an event of a flow that never was");
            assert_eq!(event.rule, 0);
            if self.load.in_step {
                // The flows of a key follow one another, and each ends once. Neither CPU is more
                // than a burst ahead, so neither are their clocks.
                let before = self.lives.insert(event.key, event.at).unwrap_or(0);
                assert!(
                    before <= began(&event) + BURST / 4 + 1,
                    "began before the previous flow ended at {before}: {event:?}"
                );
            }
            self.ended += 1;
            self.counted += event.account.iter().map(|side| side.packets).sum::<u64>();
        }
        let counters = self.plane.counters().unwrap();
        let count = |counter| counters.get(counter);
        assert_eq!(count(Counter::Orphans), 0);

        fn all<T: aya::Pod>(plane: &DataPlane, name: &str) -> Vec<T> {
            let map = Array::<_, T>::try_from(plane.map(name).unwrap()).unwrap();
            map.iter().collect::<Result<_, _>>().unwrap()
        }
        let lines: Vec<Line> = all(self.plane, "FLOWS");
        assert_eq!(lines.len() as u32 * LINE, self.records);
        let details: Vec<Details> = all(self.plane, "DETAILS");
        let extras: Vec<Extras> = all(self.plane, "EXTRAS");
        // Checks the table's records.
        let mut listed = HashSet::new();
        let mut held = HashSet::new();
        let mut hops = vec![0; lines.len()];
        let records = lines
            .iter()
            .flat_map(|line| (0..LINE as usize).map(move |at| (line, at)));
        for (index, (line, at)) in (0..).zip(records) {
            let (tag, word, number) = (line.tags[at], line.words[at], line.details[at]);
            let record = (index, tag, word, number);
            if tag == 0 {
                assert!(word.0 == 0 || word.is_dead(), "{record:?}");
                continue;
            }
            assert!(holds_flow(tag), "left behind: {record:?}");
            assert!(!word.is_dead(), "dead: {record:?}");
            assert!(!word.seen().is_starting(), "starting: {record:?}");
            let distance = table::distance(tag);
            hops[((index - distance) / LINE) as usize] |= 1 << distance;
            let flow = self.flows.get(index).expect("the record holds no flow");
            check_flow(&flow, self.load.keys);
            assert_eq!(flow.key, details[number as usize].key(0));
            assert_eq!(details[number as usize].record, index, "{record:?}");
            assert!(held.insert(number), "details of two records: {record:?}");
            assert!(listed.insert(flow.key), "in the table twice: {record:?}");
        }
        for (line, hops) in lines.iter().zip(hops) {
            assert_eq!(line.hops, hops, "{line:?}");
        }
        self.check_free(&details, held.clone());
        let word = |number: u32| {
            let index = details[number as usize].record;
            lines[(index / LINE) as usize].words[(index % LINE) as usize]
        };
        // Follows the lists of the slots.
        let slots = PerCpuArray::<_, Heads>::try_from(self.plane.map("SLOTS").unwrap()).unwrap();
        let mut linked = HashSet::new();
        for slot in 0..self.plane.config().geometry.slots() + 1 {
            for (cpu, heads) in (0..).zip(slots.get(&slot, 0).unwrap().iter()) {
                for (list, head) in (0..).zip(heads) {
                    let (mut link, mut before) = (*head, Link::list(slot, list));
                    while let Some(number) = link.as_flow() {
                        let flow = &details[number as usize];
                        assert!(linked.insert(number), "in two lists: {flow:?}");
                        assert!(held.contains(&number) && flow.cpu() == cpu);
                        assert_eq!(number % LISTS as u32, list, "{flow:?}");
                        assert_eq!(flow.prev, before, "{flow:?}");
                        (before, link) = (link, flow.next);
                    }
                    assert_eq!(link, Link::NONE);
                }
            }
        }
        assert_eq!(linked.len(), listed.len(), "flows in no list");
        // Follows the inboxes: a flow is in one slot, in at most one inbox, and in no other list.
        let inboxes = Array::<_, [u64; 8]>::try_from(self.plane.map("INBOXES").unwrap()).unwrap();
        let wheels = PerCpuArray::<_, Wheel>::try_from(self.plane.map("WHEEL").unwrap()).unwrap();
        let wheels = wheels.get(&0, 0).unwrap();
        let mut posted = HashSet::new();
        for (cpu, wheel) in (0..inboxes.len()).zip(wheels.iter()) {
            let [head, ..] = inboxes.get(&cpu, 0).unwrap();
            for first in [Link::from_raw(head as u32), wheel.inbox] {
                let mut link = first;
                while let Some(number) = link.as_flow() {
                    let flow = &details[number as usize];
                    assert!(posted.insert(number), "posted twice: {flow:?}");
                    assert!(held.contains(&number) && flow.cpu() == cpu);
                    assert!(word(number).seen().is_posted(), "{flow:?}");
                    link = extras[number as usize].inbox;
                }
                assert_eq!(link, Link::NONE);
            }
        }
        let says = |number: &&u32| word(**number).seen().is_posted();
        assert_eq!(held.iter().filter(says).count(), posted.len());
        let live = listed.len() as u64;
        assert_eq!(self.plane.tracked().unwrap(), live);
        assert_eq!(counters.live(), live);
        assert_eq!(
            count(Counter::Created) + count(Counter::Superseded),
            self.ended + count(Counter::EventsLost) + live,
            "flows begun, and flows ended or alive"
        );
        assert_eq!(count(Counter::Deleted), self.deleted.load(Relaxed));
        listed.len()
    }

    /// Details that no flow uses are in one shelf, or in the depot, or were never used.
    fn check_free(&self, details: &[Details], held: HashSet<u32>) {
        let mut seen = held;
        let mut chain = |first: Link| {
            let mut link = first;
            while let Some(number) = link.as_flow() {
                assert!(
                    seen.insert(number),
                    "details {number} are free twice, or in use"
                );
                link = details[number as usize].next;
            }
        };
        let shelves = PerCpuArray::<_, Shelf>::try_from(self.plane.map("SHELF").unwrap()).unwrap();
        let shelves = shelves.get(&0, 0).unwrap();
        for shelf in shelves.iter() {
            chain(shelf.free);
            chain(shelf.spare);
        }
        let depot = Array::<_, u64>::try_from(self.plane.map("DEPOT").unwrap()).unwrap();
        let mut link = Link::from_raw(depot.get(&0, 0).unwrap() as u32);
        while let Some(first) = link.as_flow() {
            chain(link);
            link = details[first as usize].prev;
        }
        let fresh = depot.get(&1, 0).unwrap() as u32..details.len() as u32;
        let fresh = shelves
            .iter()
            .map(|shelf| shelf.fresh..shelf.fresh_end)
            .chain([fresh]);
        for number in fresh.flatten() {
            assert!(
                seen.insert(number),
                "details {number} were never used, but are free or in use"
            );
        }
        assert_eq!(
            seen.len(),
            details.len(),
            "some details are neither in use nor free"
        );
    }

    /// What did not happen often enough for the load to test what it should.
    fn missing(&self) -> Option<(&'static str, u64)> {
        let counters = self.plane.counters().unwrap();
        // With many keys, CPUs seldom meet.
        let meet = (self.load.keys < 1_000).then_some((Counter::Raced, 1));
        let changed = if self.load.in_step { 500_000 } else { 1 };
        [
            (Counter::Changed, changed),
            (Counter::Touched, 1),
            (Counter::Created, 1),
            (Counter::Expired, 1),
            (Counter::Evicted, 1),
            (Counter::Deleted, 1),
            (Counter::Superseded, 1),
            (Counter::Posted, 1),
        ]
        .into_iter()
        .chain(meet)
        .map(|(counter, wanted)| (counter.name(), counters.get(counter), wanted))
        .find_map(|(name, count, wanted)| (count < wanted).then_some((name, count)))
    }

    /// Lets all flows expire.
    fn finish(&mut self) {
        let live = self.check() as u64;
        let ended = self.ended;
        for _ in 0..4 {
            self.now += u64::from(self.idle);
            self.clock.set(0, self.now, 0).unwrap();
            for cpu in CPUS {
                pin_to(cpu).unwrap();
                while step(self.stepper, None, 256).unwrap().outcome != Outcome::Done as u32 {
                    self.ring.drain_ended(&mut self.events);
                }
            }
        }
        pin_to(CPUS[0]).unwrap();
        assert_eq!(self.check(), 0);
        assert_eq!(self.ended - ended, live);
        let counters = self.plane.counters().unwrap();
        println!(
            "{} packets of {} keys, {}, {} flows read",
            self.packets.load(Relaxed),
            self.load.keys,
            match self.load.setup.one_way {
                true => "one direction seen",
                false => "both seen",
            },
            self.reads.load(Relaxed)
        );
        for counter in Counter::ALL {
            println!("{:>12} {}", counters.get(*counter), counter.name());
        }
        // A packet that comes while its flow ends may be counted for the next flow, or for none.
        let seen = counters.get(Counter::Touched) + counters.get(Counter::Created);
        let missed = seen.abs_diff(self.counted);
        println!("{missed} of {seen} packets on no account");
        assert!(
            missed <= seen / 200 + 8,
            "{missed} of {seen} packets in no account"
        );
    }
}
