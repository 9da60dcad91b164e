//! A program that is watched: what it said of a packet, beside what the host says.

use std::collections::HashMap;

use aya::maps::PerCpuArray;
use twheel_common::{
    counter::{Counter, Counters},
    flow::{Account, FlowKey},
    packet::{Protocols, Skip, Wanted, parse_any},
    state::{Seen, View},
};
use twheel_tests::plane::{Plane, Setup};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Xdp,
    Egress,
}

pub const PROGRAMS: [Program; 2] = [Program::Xdp, Program::Egress];
/// No test run has less: an Ethernet header.
pub const LEAST: usize = 14;
/// As much as the buffers of a packet hold.
pub const LONGEST: usize = 65_000;
/// What a test run puts into a packet's first buffer: a page, less what XDP and the stack have in it. Of the rest an
/// XDP program sees nothing, so where no header says how long the packet is, so much of it counts.
const FIRST_BUFFER: usize = 4096 - 256 - 320;
/// What fits a page beside the buffer's own: no test run of a TC program has more.
const PAGE: usize = 3_500;

impl Program {
    /// Whether the kernel runs it on this: a test run of a TC program must have an IP header where one is announced.
    pub fn takes(self, frame: &[u8]) -> bool {
        let network = match frame.get(12..LEAST) {
            Some([0x08, 0x00]) => 20,
            Some([0x86, 0xdd]) => 40,
            Some(_) => 1,
            None => return false,
        };
        self == Self::Xdp || (LEAST + network..=PAGE).contains(&frame.len())
    }
}

/// A loaded program, and what it should have counted and noted.
pub struct Watch {
    pub plane: Plane,
    pub program: Program,
    before: Counters,
    pub sent: u64,
    pub flows: HashMap<FlowKey, Account>,
}

/// What these planes ask of a packet.
pub const WANTED: Wanted = Wanted {
    protocols: Protocols(7),
    timing: false,
    vlans: true,
};
/// And how they see it.
const VIEW: View = View {
    one_way: true,
    strict: false,
};

impl Watch {
    pub fn new(program: Program) -> Self {
        let plane = Setup {
            max_flows: 1 << 17,
            ring_bytes: 1 << 25,
            protocols: WANTED.protocols,
            accounting: true,
            one_way: VIEW.one_way,
            ..Setup::default()
        }
        .load();
        Self {
            before: Counters::default(),
            plane,
            program,
            sent: 0,
            flows: HashMap::new(),
        }
    }

    /// What the host makes of a frame of which so much can be reached, and notes of its flow.
    pub fn foresee(&mut self, reached: &[u8]) -> Counter {
        let segment = match parse_any(reached, WANTED) {
            Ok(segment) => segment,
            Err(Skip::NotIp) => return Counter::NotIp,
            Err(Skip::NotTracked) => return Counter::NotTracked,
            Err(Skip::Fragment) => return Counter::Fragment,
            Err(Skip::Truncated) => return Counter::Truncated,
            Err(Skip::Malformed) => return Counter::Malformed,
            Err(Skip::BadFlags) => return Counter::BadFlags,
        };
        let known = self.flows.contains_key(&segment.key);
        if !known && Seen::first(segment.direction, segment.flags, VIEW).is_none() {
            return Counter::NoFlow;
        }
        let account = self.flows.entry(segment.key).or_default();
        account[segment.direction as usize].packets += 1;
        account[segment.direction as usize].bytes += u64::from(segment.bytes);
        if known {
            Counter::Touched
        } else {
            Counter::Created
        }
    }

    /// Those of no interface in particular: here, all.
    fn counters(&mut self) -> Counters {
        let map = self.plane.plane().map("COUNTERS").unwrap();
        let map = PerCpuArray::<_, Counters>::try_from(map).unwrap();
        Counters::sum(map.get(&0, 0).unwrap().iter())
    }

    /// What became of the packet that was sent just now: exactly one verdict, once.
    pub fn fate(&mut self) -> Counter {
        let now = self.counters();
        let moved: Vec<_> = Counter::VERDICTS
            .into_iter()
            .flat_map(|it| vec![it; (now.get(it) - self.before.get(it)) as usize])
            .collect();
        self.before = now;
        self.sent += 1;
        let [fate] = moved[..] else {
            panic!("one packet counts as {moved:?}");
        };
        fate
    }

    /// Sends a frame; what became of it is what the host says, and that is returned.
    pub fn send(&mut self, frame: &[u8]) -> Counter {
        match self.program {
            Program::Xdp => self.plane.receive(frame),
            Program::Egress => self.plane.send(frame),
        }
        let reached = match self.program {
            Program::Xdp => frame.len().min(FIRST_BUFFER),
            Program::Egress => frame.len(),
        };
        let expected = self.foresee(&frame[..reached]);
        let fate = self.fate();
        assert_eq!(fate, expected, "{:?}: {frame:02x?}", self.program);
        fate
    }

    /// As many verdicts as packets; and what ends has the host's keys, byte for byte, and of each and each direction
    /// its packets and bytes. Returns how many flows.
    pub fn end(mut self) -> usize {
        let counters = self.plane.counters();
        let verdicts = Counter::VERDICTS.into_iter();
        let sum: u64 = verdicts.map(|it| counters.get(it)).sum();
        assert_eq!(sum, self.sent, "packets sent");
        assert_eq!(counters.get(Counter::EventsLost), 0);
        let mut found: HashMap<FlowKey, Account> = HashMap::new();
        self.plane.pass(200_000);
        for event in self.plane.step() {
            let sums = found.entry(event.key).or_default();
            for (sum, traffic) in sums.iter_mut().zip(event.account) {
                sum.packets += traffic.packets;
                sum.bytes += traffic.bytes;
            }
        }
        assert_eq!(self.plane.counters().live(), 0);
        assert_eq!(found.len(), self.flows.len());
        for (key, account) in &self.flows {
            assert_eq!(found.get(key), Some(account), "{key:?}");
        }
        found.len()
    }
}
