//! The loaded data plane under virtual time, run packet by packet with `BPF_PROG_TEST_RUN`.

use std::{os::fd::AsRawFd, time::Duration};

use aya::{
    maps::{Map, MapData},
    programs::{TestRun, TestRunOptions},
};
use etherparse::PacketBuilder;
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Events, Load, STEP_BUDGET},
    policy::{
        Compiled, Policy,
        follow::{self, LiveFlows},
        forecast::{Forecast, Table},
        install::{self, InForce},
    },
    progress,
    settings::Settings,
    stepper::pin_to,
    timeouts::Timeouts,
};
use twheel_common::{
    counter::{Counter, Counters},
    enforce::Tombstone,
    event::{Event, Record},
    flow::FlowKey,
    packet::{Protocols, parse},
    rule::Rule,
    state::State,
    step::{Enter, Outcome, Sweep},
    wheel::{NEVER, WheelScheme},
};
use zerocopy::IntoBytes;

/// The number of the interface of a test run: `lo`.
pub const INTERFACE: u32 = 1;
/// XDP_DROP.
pub const DROP: u32 = 1;
/// XDP_TX: the packet is answered.
pub const TX: u32 = 3;
/// XDP_PASS.
pub const PASS: u32 = 2;
/// TC_ACT_UNSPEC, which is -1.
pub const UNSPEC: u32 = u32::MAX;

/// The data plane of one test. Its pins are removed as soon as it is loaded, so there is nothing to
/// clean up.
pub struct Plane {
    plane: DataPlane,
    events: Events,
    ring: libc::c_int,
    now: u64,
}

/// What a test may set differently.
#[derive(Clone, Copy)]
pub struct Setup {
    /// In milliseconds, like all times of virtual time.
    pub tick: u64,
    /// Idle timeout.
    pub timeout: u64,
    /// Timeout after a RST, or after a FIN from both sides.
    pub close: u64,
    /// Timeout of a SYN without an answer; `None`: that of any other flow that is not over.
    pub syn_sent: Option<u64>,
    /// Capacity of the table.
    pub max_flows: u32,
    /// Size of the ring of events, bytes.
    pub ring_bytes: u32,
    /// Virtual time at the start.
    pub start: u64,
    /// The timer scheme.
    pub scheme: WheelScheme,
    /// Slots per level.
    pub slots: Option<u32>,
    /// Whether a flow of which one direction was seen counts as established.
    pub one_way: bool,
    /// Whether flows must begin with a SYN.
    pub strict: bool,
    /// The protocols to track.
    pub protocols: Protocols,
    /// Whether packets and bytes are counted.
    pub accounting: bool,
    /// Whether the beginnings of flows are reported.
    pub begins: bool,
    /// After how long a live flow is reported.
    pub active_timeout: Option<u64>,
    /// Whether retransmission timers run.
    pub rto: bool,
    /// Whether packets of expired flows are answered.
    pub enforce: bool,
    /// Whether over-quota sources make room for others.
    pub share: bool,
    /// aya-log's level: 0 is off, 5 traces.
    pub log_level: u8,
    /// How many units the clock may stand still.
    pub max_stall: u32,
    /// The secret of the table's hash; `None`: random.
    pub secret: Option<[u64; 11]>,
    /// Capacity for interfaces that programs tell apart; 0: none.
    pub room: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Setup {
    /// The defaults, for a test that sets nothing.
    pub const DEFAULT: Self = Self {
        tick: 100,
        timeout: 60_000,
        close: 10_000,
        syn_sent: None,
        max_flows: 4096,
        ring_bytes: 1 << 20,
        start: 1_000_000,
        scheme: WheelScheme::Hierarchical,
        slots: None,
        one_way: true,
        strict: false,
        protocols: Protocols::TCP,
        accounting: false,
        begins: false,
        active_timeout: None,
        rto: false,
        enforce: false,
        share: false,
        log_level: 0,
        max_stall: 0,
        secret: None,
        room: 0,
    };

    /// Loads it, with this thread on CPU 0.
    pub fn load(self) -> Plane {
        pin_to(0).unwrap();
        let clock = Clock::virtual_ms();
        let mut timeouts = Timeouts::new(
            Duration::from_millis(self.timeout),
            Duration::from_millis(self.close),
        );
        if let Some(syn_sent) = self.syn_sent {
            timeouts.of[State::SynSent as usize] = Duration::from_millis(syn_sent);
        }
        let mut config = Settings {
            tick: Duration::from_millis(self.tick),
            timeouts,
            one_way: self.one_way,
            strict: self.strict,
            protocols: self.protocols,
            accounting: self.accounting,
            begins: self.begins,
            active_timeout: self.active_timeout.map(Duration::from_millis),
            rto: self.rto,
            enforce: self.enforce,
            share: self.share,
            max_flows: self.max_flows,
            scheme: self.scheme,
            slots: self.slots,
            levels: None,
            ..Settings::default()
        }
        .config(clock)
        .unwrap();
        config.0.max_stall = self.max_stall;
        let load = Load {
            ring_bytes: self.ring_bytes,
            log_level: self.log_level,
            secret: self.secret,
            room: self.room,
            ..Load::new(twheel::data_plane::OBJECT, config, clock)
        };
        let plane = DataPlane::load_unpinned(&load);
        let mut plane = plane.expect("these tests need root and a mounted bpffs");
        let events = plane.take_events().unwrap();
        let ring = std::os::fd::AsFd::as_fd(&events).as_raw_fd();
        let mut plane = Plane {
            plane,
            events,
            ring,
            now: 0,
        };
        plane.at(self.start);
        // As `twheel run` does before it attaches.
        assert!(plane.step().is_empty());
        plane
    }
}

impl Plane {
    /// Sets virtual time.
    pub fn at(&mut self, now: u64) {
        self.now = now;
        self.plane.set_clock(now).unwrap();
    }

    /// Virtual time.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Advances virtual time.
    pub fn pass(&mut self, milliseconds: u64) {
        self.at(self.now + milliseconds);
    }

    /// Runs the program on an incoming frame. Asserts that it passes.
    pub fn receive(&mut self, frame: &[u8]) {
        assert_eq!(self.verdict(frame).0, PASS);
    }

    /// Runs the program on an incoming frame. Returns the verdict, and the frame as the program
    /// left it.
    pub fn verdict(&mut self, frame: &[u8]) -> (u32, Vec<u8>) {
        let mut out = vec![0; frame.len() + 64];
        let result = self
            .plane
            .xdp("twheel_xdp")
            .unwrap()
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                ..TestRunOptions::new()
            })
            .unwrap();
        out.truncate(result.data_size_out as usize);
        (result.return_value, out)
    }

    /// Enters a tombstone for the flow of a frame, as userspace does.
    pub fn bury(&self, frame: &[u8], verdict: u32) {
        self.bury_key(parse(frame).unwrap().key, verdict);
    }

    /// The same for a key.
    pub fn bury_key(&self, key: FlowKey, verdict: u32) {
        self.tombs()
            .insert(key, Tombstone::new(verdict), 0)
            .unwrap();
    }

    /// Whether there is a tombstone for the flow of a frame.
    pub fn is_buried(&self, frame: &[u8]) -> bool {
        self.tombs().get(&parse(frame).unwrap().key, 0).is_ok()
    }

    fn tombs(&self) -> aya::maps::HashMap<MapData, FlowKey, Tombstone> {
        let map = self.plane.open("TOMBSTONES").unwrap();
        aya::maps::HashMap::try_from(Map::LruHashMap(map)).unwrap()
    }

    /// Runs the program on an outgoing frame.
    pub fn send(&mut self, frame: &[u8]) {
        let result = self
            .plane
            .classifier("twheel_egress")
            .unwrap()
            .test_run(TestRunOptions {
                data_in: Some(frame),
                ..TestRunOptions::new()
            })
            .unwrap();
        assert_eq!(result.return_value, UNSPEC);
    }

    /// Calls the stepper once on this CPU, without draining the ring.
    pub fn call(&mut self, budget: u32) -> (Outcome, twheel_common::step::Step) {
        let step = self.plane.step(budget).unwrap();
        (Outcome::from_raw(step.outcome).unwrap(), step)
    }

    /// Steps this CPU's wheel until nothing more is due. Returns the flows that have ended.
    pub fn step(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let (outcome, _) = self.call(STEP_BUDGET);
            self.events.drain_ended(&mut events);
            if outcome == Outcome::Done {
                return events;
            }
        }
    }

    /// The virtual time at which the stepper wants to be called next.
    pub fn next_turn(&mut self) -> Option<u64> {
        let (outcome, step) = self.call(STEP_BUDGET);
        assert_eq!(outcome, Outcome::Done);
        (step.next != NEVER).then(|| step.next * u64::from(self.plane.config().tick))
    }

    /// The same, with the records of flows that go on.
    pub fn step_all(&mut self) -> Vec<Record> {
        let mut records = Vec::new();
        loop {
            let (outcome, _) = self.call(STEP_BUDGET);
            self.events.drain(&mut records);
            if outcome == Outcome::Done {
                return records;
            }
        }
    }

    /// Takes all records from the ring.
    pub fn drain_all(&mut self) -> Vec<Record> {
        let mut records = Vec::new();
        self.events.drain(&mut records);
        records
    }

    /// Takes the events from the ring.
    pub fn drain(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.events.drain_ended(&mut events);
        events
    }

    /// Whether the ring's reader would be woken, that is, whether the ring polls readable.
    pub fn ring_is_readable(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.ring,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one `pollfd`, as passed; the descriptor belongs to `events`.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    /// A counter, summed over all CPUs.
    pub fn count(&self, counter: Counter) -> u64 {
        self.counters().get(counter)
    }

    /// All counters.
    pub fn counters(&self) -> Counters {
        self.plane.counters().unwrap()
    }

    /// The data plane and its ring, for threads that drive it themselves.
    pub fn parts(&mut self) -> (&mut DataPlane, &mut Events) {
        (&mut self.plane, &mut self.events)
    }

    /// Puts a policy into force. Every interface name in it stands for [`INTERFACE`].
    pub fn policy(&mut self, text: &str) {
        self.try_policy(text).unwrap();
    }

    /// The same for a policy that may be refused.
    pub fn try_policy(&mut self, text: &str) -> anyhow::Result<()> {
        let (policy, compiled) = parsed(text)?;
        let clock = self.plane.clock();
        let open = |name: &str| self.plane.open(name);
        install::install(&open, Some((&policy, &compiled)), clock).map(drop)
    }

    /// What a policy would do to the flows, by the policy's tables on the host.
    pub fn forecast(&mut self, text: &str) -> Forecast {
        let (policy, compiled) = parsed(text).unwrap();
        let table = Table {
            open: &|name: &str| self.plane.open(name),
            flows: &self.plane.flows().unwrap(),
            only: INTERFACE,
            now: self.now as u32,
        };
        let forecast = table.forecast(&policy, compiled, self.plane.clock());
        forecast.unwrap()
    }

    /// Has this CPU's flows follow the policy in force, as `twheel policy load` does. Returns what
    /// became of them.
    pub fn sweep(&mut self) -> LiveFlows {
        let records = self.plane.flows().unwrap().records();
        let mut flows = LiveFlows::default();
        let call = |call| {
            self.plane.sweep(Sweep {
                interface: INTERFACE,
                ..call
            })
        };
        follow::sweep(call, records, &progress::none(), &mut flows).unwrap();
        follow::settle(&|name: &str| self.plane.open(name)).unwrap();
        flows
    }

    /// What the rule of this number asks for, as the reaper reads it.
    pub fn in_force(&self, rule: u16) -> Rule {
        let in_force = InForce::open(&|name: &str| self.plane.open(name)).unwrap();
        in_force.rule(rule).unwrap()
    }

    /// Enters a flow that userspace knows.
    pub fn enter(&mut self, call: Enter) {
        let program = self.plane.xdp("twheel_enter").unwrap();
        let options = TestRunOptions {
            data_in: Some(call.as_bytes()),
            ..TestRunOptions::new()
        };
        assert_eq!(program.test_run(options).unwrap().return_value, PASS);
    }

    /// The data plane itself.
    pub fn plane(&mut self) -> &mut DataPlane {
        &mut self.plane
    }
}

fn parsed(text: &str) -> anyhow::Result<(Policy, Compiled)> {
    let policy = Policy::parse(
        "test",
        text.as_bytes(),
        Duration::from_millis(1)..=Duration::from_secs(1 << 20),
    )?;
    let compiled = policy.compile(|_| Some(INTERFACE))?;
    Ok((policy, compiled))
}

/// TCP flags of a frame.
pub use twheel_common::packet::tcp::{ACK, FIN, RST, SYN};

/// A TCP frame over IPv4, from 10.0.0.0 + `client` to 192.0.2.1:80, or back.
pub fn frame(client: u32, back: bool, flags: u8) -> Vec<u8> {
    let client_ip = (0x0a00_0000 + client / 50_000).to_be_bytes();
    let client_port = 1024 + (client % 50_000) as u16;
    let server = ([192, 0, 2, 1], 80);
    let ((source, sport), (destination, dport)) = if back {
        (server, (client_ip, client_port))
    } else {
        ((client_ip, client_port), server)
    };
    let mut frame = Vec::with_capacity(54);
    PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv4(source, destination, 64)
        .tcp(sport, dport, 1, 1024)
        .write(&mut frame, &[])
        .unwrap();
    set_flags(&mut frame, flags);
    frame
}

/// A secret with which flows of [`frame`], among the first 256, have the same home and the same
/// fingerprint if this many lower bits of their numbers are equal.
pub fn twins(bits: u32) -> [u64; 11] {
    let mut secret = [0; 11];
    // The first halves of the addresses, which are as in `::ffff:0:0/96`: the products are 0.
    secret[3] = 0xffff_0000_u64.wrapping_neg();
    secret[7] = secret[3];
    // The lower bits of the ports, from the eighth on, become the upper bits of the sum.
    secret[10] = (1 << (56 - bits)) - u64::from(IPPROTO_TCP);
    secret
}

const IPPROTO_TCP: u8 = 6;

/// Gives a frame of [`frame`] other flags and fitting numbers: SYN and FIN, which each count one,
/// have the sequence number 1, everything else 2. An ACK acknowledges 2.
pub fn set_flags(frame: &mut [u8], flags: u8) {
    frame[47] = flags;
    frame[41] = if flags & (SYN | FIN) != 0 { 1 } else { 2 };
    frame[45] = if flags & ACK != 0 { 2 } else { 0 };
}
