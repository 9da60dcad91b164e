//! Two CPUs at the same flows, and what must hold at rest.

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

/// For a million changes of states, of which a flow must stand in one slot and at most one inbox at all times.
const LONG: Duration = Duration::from_secs(480);

#[test]
fn two_cpus_at_once() {
    let seconds = std::env::var("TWHEEL_STRESS_SECONDS");
    let default = if twheel_tests::is_soak() { 60 } else { 5 };
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
    // Eight keys have one fingerprint.
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
            // However long that takes, within reason.
            while begin.elapsed() < duration || begin.elapsed() < long && stress.missing().is_some()
            {
                round += 1;
                stress.round(round, Duration::from_millis(250));
                stress.check();
            }
            stress.finish();
            let missing = stress.missing();
            assert!(missing.is_none(), "too few {missing:?}");
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
    /// Of the table.
    records: u32,
    ingress: &'a Xdp,
    egress: &'a SchedClassifier,
    stepper: &'a Xdp,
    deleter: &'a Xdp,
    idle: u32,
    /// Of the ring.
    events: Vec<Event>,
    ended: u64,
    /// When the last life of a key has ended.
    lives: HashMap<FlowKey, u64>,
    /// Packets, by the accounts of what has ended.
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

    /// Both CPUs for a while.
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
                    // It takes little of the two CPUs, also where they are slow, and the ring does not fill.
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
            // A panic of any of them is the test's.
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

    /// Nobody writes: everything fits together.
    fn check(&mut self) -> usize {
        self.ring.drain_ended(&mut self.events);
        let began = |event: &Event| event.at - u64::from(event.age);
        // A stepper stages events: another life of a key can begin and end meanwhile, and come into the ring first.
        // Lives that do not overlap by more than their clocks differ are in order by the middle of each.
        self.events.sort_by_key(|event| began(event) + event.at);
        for event in self.events.drain(..) {
            client(&event.key, self.load.keys).expect("the end of a flow that was not");
            assert_eq!(event.rule, 0);
            if self.load.in_step {
                // One life of a key after another, and none twice. Neither CPU is more than a burst ahead, nor so its clock.
                let before = self.lives.insert(event.key, event.at).unwrap_or(0);
                assert!(
                    before <= began(&event) + BURST / 4 + 1,
                    "lived before {before}: {event:?}"
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
        // What the table holds.
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
            let flow = self.flows.get(index).expect("a flow");
            check_flow(&flow, self.load.keys);
            assert_eq!(flow.key, details[number as usize].key(0));
            assert_eq!(details[number as usize].record, index, "{record:?}");
            assert!(held.insert(number), "of two records: {record:?}");
            assert!(listed.insert(flow.key), "twice: {record:?}");
        }
        for (line, hops) in lines.iter().zip(hops) {
            assert_eq!(line.hops, hops, "{line:?}");
        }
        self.check_free(&details, held.clone());
        let word = |number: u32| {
            let index = details[number as usize].record;
            lines[(index / LINE) as usize].words[(index % LINE) as usize]
        };
        // Where the lists lead.
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
        // And what is posted: so a flow has its place in a slot and one in an inbox, and no other.
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
            "lives and their ends"
        );
        assert_eq!(count(Counter::Deleted), self.deleted.load(Relaxed));
        listed.len()
    }

    /// Details that no flow has lie on one shelf, or in the depot, or nobody has had them.
    fn check_free(&self, details: &[Details], held: HashSet<u32>) {
        let mut seen = held;
        let mut chain = |first: Link| {
            let mut link = first;
            while let Some(number) = link.as_flow() {
                assert!(seen.insert(number), "{number} is free twice, or a flow's");
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
            assert!(seen.insert(number), "{number} is fresh, and somebody's");
        }
        assert_eq!(seen.len(), details.len(), "details are lost");
    }

    /// What there was not enough of, for the load to be what it was meant to be.
    fn missing(&self) -> Option<(&'static str, u64)> {
        let counters = self.plane.counters().unwrap();
        // With many keys CPUs seldom meet.
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

    /// All flows end.
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
            "{} packets of {} keys, {}, {} reads",
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
        // What comes while a flow ends may be counted for its successor, or for nobody.
        let seen = counters.get(Counter::Touched) + counters.get(Counter::Created);
        let missed = seen.abs_diff(self.counted);
        println!("{missed} of {seen} packets on no account");
        assert!(missed <= seen / 200 + 8, "{missed} of {seen} on no account");
    }
}
