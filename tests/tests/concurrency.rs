//! The loaded programs on two CPUs at once: packets of the same flows, steppers, deletions, and a reader
//! that never stops anybody. Virtual time runs meanwhile.
//!
//! `TWHEEL_STRESS_SECONDS` says for how long each load, half of it in each view, 5 by default, 60 where `TWHEEL_SOAK` is set.
#![allow(missing_docs)]

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use aya::{
    maps::{Array, MapData, PerCpuArray},
    programs::{SchedClassifier, TestRun, TestRunOptions, Xdp},
};
use etherparse::TcpHeader;
use nix::time::{ClockId, clock_getres, clock_gettime};
use twheel::{
    call::{delete, step},
    data_plane::{DataPlane, Events},
    flows::{Flow, Flows},
    stepper::pin_to,
};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::{Direction, FlowKey},
    pool::Shelf,
    state::State,
    step::{Deleted, Outcome},
    table::{self, Details, Extras, Hash, LINE, Line, holds_flow},
    wheel::{Heads, LISTS, Link, Wheel},
};
use twheel_holdup::Watch;
use twheel_tests::plane::{ACK, FIN, PASS, RST, SYN, Setup, UNSPEC, frame, set_flags, twins};
use twheel_tests::{
    forge::Forger,
    is_soak,
    netns::{Family, Pair, SERVER, Twheel, require_root},
};

/// Packets of a CPU in a burst.
const BURST: u64 = 16;

/// For a million changes of states, of which a flow must stand in one slot and at most one inbox at all times.
const LONG: Duration = Duration::from_secs(480);
/// Two CPUs drive the programs.
const CPUS: [u32; 2] = [0, 1];

/// What the threads do. Each load runs in both views: with both directions seen, as production has it by default, and with one.
#[derive(Clone, Copy)]
struct Load {
    /// Keys, of which half of the packets are.
    keys: u32,
    /// And half of these.
    hot: u32,
    /// Both CPUs go through bursts of packets of the same keys side by side, and between
    /// bursts the table is looked at.
    in_step: bool,
    setup: Setup,
}

/// Few records and few keys: both CPUs are at the same flows always, enter the same keys at once, and
/// records change hands all the time.
const NARROW: Load = Load {
    keys: 64,
    hot: 4,
    in_step: true,
    setup: Setup {
        tick: 1,
        timeout: 12,
        close: 3,
        max_flows: 24,
        ring_bytes: 1 << 22,
        accounting: true,
        // Stamps wrap on the way.
        start: (1 << 32) - 20_000,
        ..Setup::DEFAULT
    },
};

/// A million keys come, go and come again, and the table is full now and then.
const WIDE: Load = Load {
    keys: 1_000_000,
    hot: 64,
    in_step: false,
    setup: Setup {
        tick: 4,
        timeout: 1_000,
        close: 100,
        max_flows: 4_096,
        ..NARROW.setup
    },
};

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
        Stress::of(load, |stress| {
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
    fn of(load: Load, test: impl FnOnce(&mut Stress<'_>)) {
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

/// What a thread that drives a CPU needs.
struct Driver<'a> {
    load: Load,
    flows: &'a Flows,
    records: u32,
    ingress: &'a Xdp,
    egress: &'a SchedClassifier,
    stepper: &'a Xdp,
    deleter: &'a Xdp,
    packets: &'a AtomicU64,
    deleted: &'a AtomicU64,
    stop: &'a AtomicBool,
    /// Of both CPUs, at the ends of bursts.
    arrived: &'a AtomicU64,
}

impl Driver<'_> {
    /// Packets, steps and deletions on a CPU; calls `turn` before each packet.
    fn drive(&self, cpu: u32, seed: u64, mut turn: impl FnMut()) {
        pin_to(cpu).expect("this test needs two CPUs");
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut frames = [frame(0, false, ACK), frame(0, true, ACK)];
        let (mut packets, mut burst) = (0, 0);
        loop {
            if self.load.in_step && packets % BURST == 0 {
                burst += 1;
                self.meet(cpu, burst);
            }
            if self.stop.load(Relaxed) {
                break;
            }
            turn();
            let client = match self.load.in_step {
                // Keys that were not there for a while, and both CPUs at once.
                true if random.below(4) != 0 => {
                    (packets as u32 / 4 * 2 + random.below(2)) % self.load.keys
                }
                _ if random.below(2) == 0 => random.below(self.load.keys),
                _ => random.below(self.load.hot),
            };
            let back = random.below(2) == 1;
            let frame = &mut frames[usize::from(back)];
            let address = if back { 30 } else { 26 };
            let port = if back { 36 } else { 34 };
            frame[address..address + 4]
                .copy_from_slice(&(0x0a00_0000 + client / 50_000).to_be_bytes());
            frame[port..port + 2].copy_from_slice(&(1024 + (client % 50_000) as u16).to_be_bytes());
            let flags = match random.below(8) {
                0..3 => SYN,
                3 => SYN | ACK,
                4..6 => ACK,
                6 => FIN | ACK,
                _ => RST,
            };
            set_flags(frame, flags);
            let options = TestRunOptions {
                data_in: Some(frame),
                ..TestRunOptions::new()
            };
            if random.below(2) == 0 {
                assert_eq!(self.ingress.test_run(options).unwrap().return_value, PASS);
            } else {
                assert_eq!(self.egress.test_run(options).unwrap().return_value, UNSPEC);
            }
            packets += 1;
            if random.below(8) == 0 {
                step(self.stepper, None, 8).unwrap();
            }
            if random.below(64) == 0 {
                self.delete(cpu, &mut random);
            }
        }
        self.packets.fetch_add(packets, Relaxed);
    }

    /// Waits for the other CPU, or for the end; then, while it waits, looks at the table.
    fn meet(&self, cpu: u32, burst: u64) {
        let wait = |arrivals| {
            let mut turns = 0;
            while self.arrived.load(SeqCst) < arrivals && !self.stop.load(Relaxed) {
                turns += 1;
                match turns % 1_000 {
                    0 => thread::yield_now(),
                    _ => std::hint::spin_loop(),
                }
            }
        };
        self.arrived.fetch_add(1, SeqCst);
        wait(burst * 4 - 2);
        if cpu == CPUS[0] && burst.is_multiple_of(4) && !self.stop.load(Relaxed) {
            let mut keys = HashSet::new();
            for flow in self.flows.iter() {
                assert!(keys.insert(flow.key), "twice: {flow:?}");
            }
        }
        self.arrived.fetch_add(1, SeqCst);
        wait(burst * 4);
    }

    /// Deletes a few flows of this CPU's wheel, some of which will have changed since.
    fn delete(&self, cpu: u32, random: &mut Random) {
        let some = (0..64).filter_map(|_| self.flows.get(random.below(self.records)));
        let ours = some.filter(|flow| flow.cpu == cpu);
        let mut entries: Vec<_> = ours
            .map(|flow| flow.delete(Reason::Deleted))
            .take(4)
            .collect();
        if entries.is_empty() {
            return;
        }
        delete(self.deleter, None, &mut entries).unwrap();
        for entry in &entries {
            match Deleted::from_raw(entry.outcome).expect("an outcome") {
                Deleted::Done => drop(self.deleted.fetch_add(1, Relaxed)),
                Deleted::Changed | Deleted::RingFull | Deleted::Posted => {}
                Deleted::Elsewhere => panic!("read as ours"),
            }
        }
    }
}

/// A flow that was reset.
struct Reset {
    client: SocketAddr,
    /// When the RST was sent.
    at: Instant,
    /// By how much jiffies were behind then. More than one, if the CPU that counts them was held up.
    behind: Duration,
}

/// A SYN on one CPU, and a RST of the same flow on another.
fn reset_elsewhere(forger: &Forger, flow: u32, cpus: [u32; 2]) -> Result<Reset> {
    let from = SocketAddr::new(Family::V4.client(), 1024 + flow as u16);
    let to = SocketAddr::new(Family::V4.server(), 9);
    let syn = TcpHeader {
        syn: true,
        sequence_number: 1000,
        ..TcpHeader::default()
    };
    let rst = TcpHeader {
        rst: true,
        sequence_number: 1001,
        ..TcpHeader::default()
    };
    pin_to(cpus[0])?;
    forger.send(from, to, syn)?;
    pin_to(cpus[1])?;
    let counted = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)?);
    let elapsed = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    let at = Instant::now();
    forger.send(from, to, rst)?;
    Ok(Reset {
        client: from,
        at,
        behind: elapsed.saturating_sub(counted),
    })
}

/// A run on the server that sees incoming packets only. There a flow that is reset has the timeout of `close`.
fn one_way(pair: &Pair, more: &[&str]) -> Result<Twheel> {
    let mut args = vec!["--iface", SERVER, "--json", "--egress", "off"];
    args.extend(more);
    Twheel::start(&pair.server, &args)
}

/// Those that were reset on another CPU stand in the inbox of their wheel's, since nothing is due for an hour.
#[test]
fn quiet_flows_that_were_reset_on_either_cpu_are_deleted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let forger = Forger::new(&pair)?;
    let twheel = one_way(&pair, &["--timeout", "syn_sent=2h,close=1h"])?;
    for flow in 0..40 {
        reset_elsewhere(&forger, flow, [flow % 2, flow / 2 % 2])?;
    }
    let delete = |more: &[&str]| -> Result<String> {
        let mut args = vec!["delete", "state == close", "--iface", SERVER, "--json"];
        args.extend(more);
        let ended = pair.server.twheel_once(&args)?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        Ok(ended.lines.iter().map(|line| &*line.text).collect())
    };
    assert_eq!(delete(&["--dry-run"])?, r#"{"would_delete":40}"#);
    assert_eq!(delete(&[])?, r#"{"deleted":40,"stayed":0}"#);
    assert_eq!(delete(&["--dry-run"])?, r#"{"would_delete":0}"#);
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0));
    assert_eq!(ended.lines.len(), 40);
    Ok(())
}

/// Steppers that sleep, since nothing is due for an hour; and flows that begin on one CPU and are reset on the other, which
/// brings their deadline to 300 ms. None is later than a tick and what scheduling takes, and none is forgotten.
#[test]
fn a_stepper_that_sleeps_is_called_in_time() -> Result<()> {
    require_root();
    const CLOSE: Duration = Duration::from_millis(300);
    const TICK: Duration = Duration::from_millis(20);
    const SCHEDULING: Duration = Duration::from_millis(100);
    let flows = if is_soak() { 10_000 } else { 300 };
    let pair = Pair::new()?;
    let forger = Forger::new(&pair)?;
    let options = ["--tick", "20ms", "--timeout", "syn_sent=1h,close=300ms"];
    let twheel = one_way(&pair, &options)?;
    let watch = Watch::start();
    let send = |cpu: u32| -> Result<Vec<Reset>> {
        let mut random = Random(0x5eed + u64::from(cpu));
        let mut sent = Vec::new();
        for flow in 0..flows {
            sent.push(reset_elsewhere(&forger, flow * 2 + cpu, [cpu, 1 - cpu])?);
            // Also just when a stepper that has reported others goes to sleep.
            thread::sleep(Duration::from_micros(random.below(30_000).into()));
        }
        Ok(sent)
    };
    let sent: Vec<Vec<Reset>> = thread::scope(|scope| {
        let senders = CPUS.map(|cpu| scope.spawn(move || send(cpu)));
        let sent = senders.map(|sender| sender.join().expect("no panic"));
        sent.into_iter().collect::<Result<_>>()
    })?;
    let sent: HashMap<_, _> = sent
        .into_iter()
        .flatten()
        .map(|it| (it.client, it))
        .collect();
    let within = Instant::now() + CLOSE + Duration::from_secs(2);
    let expiries = twheel.expiries_until(within)?;
    let jiffy = Duration::from(clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)?);
    let mut latest = Duration::ZERO;
    let mut ended = HashSet::new();
    for expiry in &expiries {
        assert!(ended.insert(expiry.src), "twice: {expiry:?}");
        let reset = &sent[&expiry.src];
        // Never early by jiffies, which the flow was stamped with.
        let late = expiry.at - reset.at + reset.behind.saturating_sub(jiffy);
        assert!(late >= CLOSE, "{late:?}, early: {expiry:?}");
        latest = latest.max(late - CLOSE);
    }
    assert_eq!(ended.len(), sent.len(), "some were forgotten");
    println!("{} flows, the latest {latest:?} late", sent.len());
    // Both the packet's way and the stepper's may have been held up.
    let held_up = 2 * watch.stop();
    assert!(
        latest <= TICK + 2 * jiffy + SCHEDULING + held_up,
        "{latest:?} late, of which {held_up:?} may be the host's"
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// The client of a key, if it is one of a frame.
fn client(key: &FlowKey, keys: u32) -> Option<u32> {
    let ends = [Direction::FromLow, Direction::FromHigh].map(|end| key.sender(end));
    let server = SocketAddr::from(([192, 0, 2, 1], 80));
    let client = match ends {
        [client, end] | [end, client] if end == server => client,
        _ => return None,
    };
    let IpAddr::V4(address) = client.ip() else {
        return None;
    };
    let high = Ipv4Addr::to_bits(address).checked_sub(0x0a00_0000)?;
    let low = u32::from(client.port()).checked_sub(1024)?;
    let client = high.checked_mul(50_000)?.checked_add(low)?;
    (low < 50_000 && client < keys && key.proto() == 6).then_some(client)
}

/// A flow that was read is whole.
fn check_flow(flow: &Flow, keys: u32) {
    assert!(client(&flow.key, keys).is_some(), "{flow:?}");
    assert!(CPUS.contains(&flow.cpu), "{flow:?}");
    assert!(!flow.word.is_dead() && !flow.word.seen().is_starting());
    // A CPU may be held up between the clock and its stamp, by another machine's guest for example.
    let lived = flow.word.stamp().wrapping_sub(flow.created) as i32;
    assert!(lived >= -2, "{flow:?}");
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * u64::from(bound)) >> 32) as u32
    }
}
