//! A full table under floods: established flows stay, no packet is dropped, and all evictions are
//! counted.
//!
//! In the long run (`TWHEEL_LONG`) the flood on a real interface lasts a minute.
#![allow(missing_docs)]

use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use aya::{
    maps::{MapData, RingBuf},
    programs::{SchedClassifier, TestRun, TestRunOptions, Xdp},
};
use twheel::{flows::Flows, quota::QuotaReader as Reader, stepper::pin_to};
use twheel_common::{
    counter::Counter, event::Reason, flow::FlowKey, packet::parse, quota::CALL, rule::Timeouts,
    state::State,
};
use twheel_tests::{
    lru::Lru,
    netns::{PATIENCE, require_root},
    pair::{CLIENT, Pair, SERVER},
    path::{arrived, open, send},
    plane::{ACK, FIN, PASS, Plane, RST, SYN, Setup, UNSPEC, frame},
    running::Twheel,
};

const CPUS: [u32; 2] = [0, 1];
/// Capacity of the table.
const CAPACITY: u32 = 1 << 16;
/// Connections that are established before the flood, and send packets during it.
const ESTABLISHED: u32 = 10_000;
/// A flood lasts this many ticks of 100 ms.
const TICKS: u32 = 120;
/// Each connection has a packet once in this many ticks: every three seconds.
const PAUSE: u32 = 30;
/// Flows with numbers from this on are of one source: a NAT with many hosts behind it, each flow
/// from its own port.
const NAT: u32 = 1 << 30;

/// The source address of a flow, as it is in the frame; its low half is the port. A bijection that
/// leaves the addresses in no order (MurmurHash3's finalizer).
fn source(flow: u32) -> u32 {
    let mut source = flow;
    source = (source ^ source >> 16).wrapping_mul(0x85eb_ca6b);
    source = (source ^ source >> 13).wrapping_mul(0xc2b2_ae35);
    source ^ source >> 16
}

/// Makes the frame a packet of this flow.
fn readdress(frame: &mut [u8], flow: u32, back: bool) {
    let (address, port) = if back { (30, 36) } else { (26, 34) };
    let source = source(flow.min(NAT)).to_ne_bytes();
    let number = match flow.checked_sub(NAT) {
        Some(number) => [(number >> 8) as u8, number as u8],
        None => [source[0], source[1]],
    };
    frame[address..address + 4].copy_from_slice(&source);
    frame[port..port + 2].copy_from_slice(&number);
}

fn key(flow: u32) -> FlowKey {
    let mut bytes = frame(0, false, ACK);
    readdress(&mut bytes, flow, false);
    parse(&bytes[..]).unwrap().key
}

/// The programs as one CPU's thread runs them. Asserts that every packet passes.
#[derive(Clone, Copy)]
struct Wire<'a> {
    ingress: &'a Xdp,
    egress: &'a SchedClassifier,
}

impl Wire<'_> {
    fn carry(&self, back: bool, flags: u8, flows: impl IntoIterator<Item = u32>) {
        let mut bytes = frame(0, back, flags);
        for flow in flows {
            readdress(&mut bytes, flow, back);
            let options = TestRunOptions {
                data_in: Some(&bytes),
                ..TestRunOptions::new()
            };
            if back {
                assert_eq!(self.egress.test_run(options).unwrap().return_value, UNSPEC);
            } else {
                assert_eq!(self.ingress.test_run(options).unwrap().return_value, PASS);
            }
        }
    }
}

/// The flooded table.
struct Table {
    plane: Plane,
    /// Counts the flows of each source, and receives the calls to do so; present if sources have
    /// quotas.
    shares: Option<(Reader, RingBuf<MapData>)>,
    /// Keys of the established flows.
    established: HashSet<FlowKey>,
    ended: BTreeMap<(Reason, State), u64>,
}

impl Table {
    /// Makes a table with these timeouts, and connections on the wheels of these CPUs. `one_way`:
    /// answers are not seen.
    fn new(established: u64, opening: u32, cpus: &[u32], setup: Setup) -> Self {
        let mut plane = Setup {
            timeout: established,
            max_flows: CAPACITY,
            ring_bytes: 1 << 22,
            ..setup
        }
        .load();
        let mut timeouts = plane.plane().timeouts(0).unwrap();
        timeouts.0[State::SynSent as usize] = opening;
        // The ratio that production has by default.
        timeouts.0[Timeouts::UNREPLIED] = opening * 5 / 2;
        plane.plane().set_timeouts(0, &timeouts).unwrap();
        let shares = setup.share.then(|| {
            let reader = Reader::new(plane.plane(), SHARE).unwrap();
            (reader, plane.plane().take_wakes().unwrap())
        });
        let mut table = Self {
            plane,
            shares,
            established: (0..ESTABLISHED).map(key).collect(),
            ended: BTreeMap::new(),
        };
        table.establish(0..ESTABLISHED, cpus, setup.one_way);
        assert_eq!(table.standing(), ESTABLISHED as usize);
        table
    }

    /// Begins connections on the wheels of these CPUs.
    fn establish(&mut self, flows: Range<u32>, cpus: &[u32], one_way: bool) {
        self.on(cpus, |wire, turn| {
            let ours = || share(flows.clone(), turn, cpus.len());
            wire.carry(false, SYN, ours());
            if !one_way {
                wire.carry(true, SYN | ACK, ours());
            }
            wire.carry(false, ACK, ours());
        });
    }

    /// Counts the flows of each source, if the packet path has called for it.
    fn count_sources(&mut self) {
        let Some((reader, calls)) = &mut self.shares else {
            return;
        };
        let mut called = false;
        while let Some(record) = calls.next() {
            called |= *record == CALL.to_ne_bytes()[..];
        }
        if called {
            reader.read().unwrap();
        }
    }

    /// Runs `work` on several CPUs at once.
    fn on(&mut self, cpus: &[u32], work: impl Fn(Wire<'_>, usize) + Sync) {
        let (plane, _) = self.plane.parts();
        let wire = Wire {
            ingress: plane
                .bpf()
                .program("twheel_xdp")
                .unwrap()
                .try_into()
                .unwrap(),
            egress: plane
                .bpf()
                .program("twheel_egress")
                .unwrap()
                .try_into()
                .unwrap(),
        };
        thread::scope(|scope| {
            for (turn, cpu) in cpus.iter().enumerate() {
                let work = &work;
                scope.spawn(move || {
                    pin_to(*cpu).unwrap();
                    work(wire, turn);
                });
            }
        });
    }

    /// Steps the wheels of all CPUs.
    fn step(&mut self) {
        for cpu in CPUS {
            pin_to(cpu).unwrap();
            for event in self.plane.step() {
                let reason = Reason::from_raw(event.reason).unwrap();
                assert!(
                    !self.established.contains(&event.key),
                    "a live connection was evicted: {event:?}"
                );
                *self
                    .ended
                    .entry((reason, event.seen().state()))
                    .or_default() += 1;
            }
        }
        pin_to(CPUS[0]).unwrap();
    }

    /// Sends packets of new flows, numbered from the established ones on, over twelve seconds,
    /// during which connections have theirs. An LRU, if there is one, gets the same packets on the
    /// same CPUs in the same order, batch after batch: first the table, then the LRU.
    fn flood(&mut self, flags: u8, flows: u32, cpus: &[u32], lru: Option<&Lru>) {
        for tick in 0..TICKS {
            self.on(cpus, |wire, turn| {
                let talking = (0..ESTABLISHED).filter(|flow| flow % PAUSE == tick % PAUSE);
                let talking: Vec<_> = share(talking, turn, cpus.len()).collect();
                wire.carry(false, ACK, talking.iter().copied());
                let begin = |tick| {
                    ESTABLISHED + (u64::from(flows) * u64::from(tick) / u64::from(TICKS)) as u32
                };
                let flood: Vec<_> = share(begin(tick)..begin(tick + 1), turn, cpus.len()).collect();
                wire.carry(false, flags, flood.iter().copied());
                if let Some(lru) = lru {
                    let both: Vec<_> = talking.iter().chain(&flood).copied().map(source).collect();
                    lru.receive(cpus[turn], &both).unwrap();
                }
            });
            self.plane.pass(100);
            self.step();
            self.count_sources();
        }
    }

    /// How many of the connections are established in the table.
    fn standing(&mut self) -> usize {
        let flows = self.plane.plane().flows().unwrap();
        standing(&flows, &self.established)
    }

    /// Prints the result and checks that the counts add up and that all connections are
    /// established.
    fn check(&mut self, what: &str, flows: u32) {
        let counters = self.plane.counters();
        let count = |counter| counters.get(counter);
        println!(
            "{what}: {} of {ESTABLISHED} connections stand; {} flows begun, {} evicted, {} expired, {} refused (table), \
             {} (window)",
            self.standing(),
            count(Counter::Created) - u64::from(ESTABLISHED),
            count(Counter::Evicted),
            count(Counter::Expired),
            count(Counter::TableFull),
            count(Counter::WindowFull),
        );
        assert_eq!(
            self.standing(),
            ESTABLISHED as usize,
            "connections were lost"
        );
        assert_eq!(
            count(Counter::Created)
                + count(Counter::TableFull)
                + count(Counter::WindowFull)
                + count(Counter::NoFlow),
            u64::from(ESTABLISHED + flows),
            "some packets were not counted"
        );
        let (evicted, expired): (Vec<_>, Vec<_>) = self
            .ended
            .iter()
            .partition(|((reason, _), _)| *reason == Reason::Evicted);
        let sum = |ended: Vec<(_, &u64)>| ended.into_iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!(count(Counter::Evicted), sum(evicted));
        assert_eq!(count(Counter::Expired), sum(expired));
        for counter in [Counter::EventsLost, Counter::Raced, Counter::Orphans] {
            assert_eq!(count(counter), 0, "{}", counter.name());
        }
        let live = counters.live();
        assert!(live <= u64::from(CAPACITY), "{live}");
        assert_eq!(self.plane.plane().tracked().unwrap(), live);
    }
}

/// How many of these flows are established.
fn standing(flows: &Flows, keys: &HashSet<FlowKey>) -> usize {
    let live = flows
        .iter()
        .filter(|flow| keys.contains(&flow.key) && flow.word.seen().state() == State::Established);
    live.count()
}

/// The part of the flows that one of several CPUs gets.
fn share(flows: impl Iterator<Item = u32>, turn: usize, of: usize) -> impl Iterator<Item = u32> {
    flows.skip(turn).step_by(of)
}

/// Both directions are seen.
const BOTH_WAYS: Setup = Setup {
    one_way: false,
    ..Setup::DEFAULT
};
const HOUR: u64 = 3_600_000;
/// Quota of a source, as a percentage of the table.
const SHARE: u8 = 25;

#[test]
fn a_million_syns_cost_an_lru_its_connections_and_twheel_none() {
    const FLOOD: u32 = 1_000_000;
    let lru = Lru::load(CAPACITY).unwrap();
    let mut table = Table::new(HOUR, 120_000, &CPUS, BOTH_WAYS);
    let all = Vec::from_iter((0..ESTABLISHED).map(source));
    table.on(&CPUS, |_, turn| {
        let ours = Vec::from_iter(share(all.iter().copied(), turn, CPUS.len()));
        lru.receive(CPUS[turn], &ours).unwrap();
    });
    assert_eq!(lru.inserts().unwrap(), u64::from(ESTABLISHED));
    table.flood(SYN, FLOOD, &CPUS, Some(&lru));
    table.check("a million SYNs", FLOOD);
    assert!(table.plane.count(Counter::Evicted) > u64::from(FLOOD - CAPACITY) * 9 / 10);

    // Any insert beyond the number of flows is of a connection that had been evicted.
    let entered_again = lru.inserts().unwrap() - u64::from(ESTABLISHED + FLOOD);
    let held = lru.keys().unwrap();
    let gone = table.established.difference(&held).count();
    println!(
        "an LRU hash of the same size: {gone} of {ESTABLISHED} connections gone at the end, {entered_again} times one \
         that talked was not there"
    );
    assert!(
        entered_again > u64::from(ESTABLISHED),
        "the LRU was not flooded"
    );
}

#[test]
fn connections_that_are_due_before_the_flood_is_stay_too() {
    const FLOOD: u32 = 200_000;
    // The slots whose turn comes next always hold connections.
    let mut table = Table::new(5_000, 120_000, &CPUS, BOTH_WAYS);
    table.flood(SYN, FLOOD, &CPUS, None);
    table.check("SYNs, connections due first", FLOOD);
    assert!(table.plane.count(Counter::TableFull) > 0);
}

#[test]
fn what_a_source_has_above_its_share_makes_room_and_no_other_connection() {
    const FLOOD: u32 = 200_000;
    const HELD: u32 = 20_000;
    const MAY_HOLD: u32 = CAPACITY * SHARE as u32 / 100;
    let setup = Setup {
        share: true,
        ..BOTH_WAYS
    };
    // The slots whose turn comes next hold connections, so newcomers find no others; none of these
    // is due meanwhile.
    let mut table = Table::new(60_000, 120_000, &CPUS, setup);
    table.establish(NAT..NAT + HELD, &CPUS, setup.one_way);
    table.flood(SYN, FLOOD, &CPUS, None);
    table.check("SYNs beside a source above its share", HELD + FLOOD);
    let keys = (NAT..NAT + HELD).map(key).collect();
    let held = standing(&table.plane.plane().flows().unwrap(), &keys) as u32;
    let gone = table.plane.count(Counter::OverQuota);
    println!("of its {HELD} connections {held} stand, its share is {MAY_HOLD}; {gone} made room");
    assert_eq!(
        u64::from(HELD - held),
        gone,
        "some connections ended for another reason"
    );
    assert!((MAY_HOLD..HELD).contains(&held), "{held}");
    let ended = table.ended.get(&(Reason::Evicted, State::Established));
    assert_eq!(ended, Some(&gone), "reported");
}

#[test]
fn segments_of_connections_that_nobody_knows_push_none_out() {
    const FLOOD: u32 = 100_000;
    // Flows of one side alone are no connections: they evict one another.
    let mut table = Table::new(HOUR, 120_000, &CPUS, BOTH_WAYS);
    table.flood(ACK, FLOOD, &CPUS, None);
    table.check("ACKs, both directions seen", FLOOD);
    assert!(table.plane.count(Counter::Evicted) > u64::from(FLOOD - CAPACITY) * 9 / 10);

    // If only one direction is ever seen, they count like any other, and keep their places.
    let mut table = Table::new(HOUR, 120_000, &CPUS, Setup::DEFAULT);
    table.flood(ACK, FLOOD, &CPUS, None);
    table.check("ACKs, one direction seen", FLOOD);
    assert_eq!(table.plane.count(Counter::Evicted), 0);
    assert_eq!(
        table.plane.count(Counter::TableFull) + table.plane.count(Counter::WindowFull),
        u64::from(ESTABLISHED + FLOOD - CAPACITY)
    );

    // Unless flows must begin with a SYN.
    let strict = Setup {
        strict: true,
        ..Setup::DEFAULT
    };
    let mut table = Table::new(HOUR, 120_000, &CPUS, strict);
    table.flood(ACK, FLOOD, &CPUS, None);
    table.check("ACKs, --pickup strict", FLOOD);
    assert_eq!(table.plane.count(Counter::NoFlow), u64::from(FLOOD));
}

#[test]
fn resets_and_fins_of_no_flow_begin_none() {
    const FLOOD: u32 = 100_000;
    let mut table = Table::new(HOUR, 120_000, &CPUS, BOTH_WAYS);
    for flags in [RST, FIN | ACK] {
        table.flood(flags, FLOOD, &CPUS, None);
    }
    table.check("RSTs and FINs", 2 * FLOOD);
    assert_eq!(table.plane.count(Counter::NoFlow), u64::from(2 * FLOOD));
    assert_eq!(table.plane.counters().live(), u64::from(ESTABLISHED));
}

#[test]
fn a_flood_on_one_cpu_takes_nothing_from_the_wheel_of_the_other() {
    const FLOOD: u32 = 100_000;
    let mut table = Table::new(HOUR, 120_000, &[0], BOTH_WAYS);
    // The rest of the table: half-open flows on the same wheel.
    let rest = ESTABLISHED + FLOOD..FLOOD + CAPACITY;
    let filled = rest.len() as u32;
    table.on(&[0], |wire, _| wire.carry(false, SYN, rest.clone()));
    table.flood(SYN, FLOOD, &[1], None);
    table.check("SYNs on the other CPU", FLOOD + filled);
    assert_eq!(table.plane.count(Counter::Evicted), 0);
    assert_eq!(table.plane.count(Counter::TableFull), u64::from(FLOOD));
}

#[test]
fn a_flood_on_a_real_interface_loses_no_packet() -> Result<()> {
    require_root();
    let (rounds, flood) = match twheel_tests::is_long() {
        true => (60, 3_000_000),
        false => (8, 200_000),
    };
    let pair = Pair::new()?;
    let ip = libc::ETH_P_IP as u16;
    let (client, server) = (&pair.client, &pair.server);
    let to_server = client.enter(|| open(CLIENT, ip))?;
    let to_client = server.enter(|| open(SERVER, ip))?;
    let twheel = Twheel::start(
        server,
        &[
            "--json",
            "--iface",
            SERVER,
            "--max-flows",
            "65536",
            "--timeout",
            "established=10m,syn_sent=5s",
        ],
    )?;
    let tap = server.enter(|| open(SERVER, ip))?;
    let sent = AtomicU64::new(0);
    let carry = |back: bool, flags: u8, flows: &mut dyn Iterator<Item = u32>| -> Result<()> {
        let mut bytes = frame(0, back, flags);
        for flow in flows {
            readdress(&mut bytes, flow, back);
            send(if back { &to_client } else { &to_server }, &bytes)?;
            sent.fetch_add(u64::from(!back), Relaxed);
        }
        Ok(())
    };
    let on_both = |work: &(dyn Fn(usize) -> Result<()> + Sync)| -> Result<()> {
        thread::scope(|scope| {
            let threads = CPUS.map(|cpu| {
                scope.spawn(move || {
                    pin_to(cpu)?;
                    work(cpu as usize)
                })
            });
            threads
                .into_iter()
                .try_for_each(|it| it.join().expect("a sender panicked"))
        })
    };
    on_both(&|turn| {
        let ours = || share(0..ESTABLISHED, turn, CPUS.len());
        carry(false, SYN, &mut ours())?;
        carry(true, SYN | ACK, &mut ours())?;
        carry(false, ACK, &mut ours())
    })?;
    // A round takes a tenth of a second, plus the time to send.
    let mut ended = BTreeMap::new();
    let mut read = || -> Result<()> {
        while let Some(line) = twheel.line(Duration::from_millis(100))? {
            let value: serde_json::Value = serde_json::from_str(&line.text)?;
            let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
            *ended.entry((text("reason"), text("state"))).or_insert(0u64) += 1;
        }
        Ok(())
    };
    for round in 0..rounds {
        on_both(&|turn| {
            carry(false, ACK, &mut share(0..ESTABLISHED, turn, CPUS.len()))?;
            let begin = |round| ESTABLISHED + flood / rounds * round;
            carry(
                false,
                SYN,
                &mut share(begin(round)..begin(round + 1), turn, CPUS.len()),
            )
        })?;
        read()?;
    }
    let sent = sent.load(Relaxed);
    let passed = arrived(&tap)?;
    let [created, evicted, expired, lost, refused, window] = [
        "created",
        "evicted",
        "expired",
        "events_lost",
        "table_full",
        "window_full",
    ]
    .map(|name| server.counter(name));
    let flows = ["flows", "--json", "state == established"];
    let standing = server.twheel_once(&flows)?.lines.len();
    read()?;
    println!(
        "{sent} frames sent, {passed} passed; {created:?} begun, {evicted:?} evicted, {expired:?} expired, {refused:?} \
         refused, {lost:?} events lost; {standing} connections stand; ended: {ended:?}"
    );
    ensure!(passed == sent, "{sent} packets sent, {passed} passed");
    ensure!(
        standing == ESTABLISHED as usize,
        "only {standing} connections are left"
    );
    ensure!(
        ended.keys().all(|(_, state)| state == "syn_sent"),
        "{ended:?}"
    );
    ensure!(created? + refused? + window? == u64::from(ESTABLISHED + flood));
    let lost = lost?;
    let reported = |reason: &str| {
        ended
            .get(&(reason.into(), "syn_sent".into()))
            .copied()
            .unwrap_or(0)
    };
    // Some of the lost events may have been expiries.
    let (evicted, told) = (evicted?, reported("evicted"));
    ensure!(
        (told..=told + lost).contains(&evicted),
        "{evicted} evicted, {lost} lost, {ended:?}"
    );
    ensure!(told > 0, "no eviction was reported");
    let twheel = twheel.stop()?;
    ensure!(twheel.code() == Some(0), "{}", twheel.stderr);
    // The kernel removes BPF links with some delay.
    let end = Instant::now() + PATIENCE;
    while server.check_clean(SERVER).is_err() && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    server.check_clean(SERVER)
}
