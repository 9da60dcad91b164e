//! A program under observation: its verdict on a packet, beside the host's.

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
/// The least data of a test run: an Ethernet header.
pub const LEAST: usize = 14;
/// The most that the buffers of a packet hold.
pub const LONGEST: usize = 65_000;
/// What a test run puts into a packet's first buffer: a page, less what XDP and the stack reserve
/// in it. An XDP program sees nothing of the rest. So if no header gives the packet's length, this
/// much is counted.
const FIRST_BUFFER: usize = 4096 - 256 - 320;
/// What fits into a page beside the buffer's own data: a test run of a TC program takes no more.
const PAGE: usize = 3_500;

impl Program {
    /// Whether the kernel runs the program on this frame: a test run of a TC program must have an
    /// IP header if the EtherType announces one.
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

/// A loaded program, and what it should have counted and stored.
pub struct Watch {
    pub plane: Plane,
    pub program: Program,
    before: Counters,
    pub sent: u64,
    pub flows: HashMap<FlowKey, Account>,
}

/// The parser's options in these tests.
pub const WANTED: Wanted = Wanted {
    protocols: Protocols(7),
    timing: false,
    vlans: true,
};
/// The view of the data planes.
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

    /// The verdict of the host's parser for a frame of which only these bytes can be read; records
    /// the flow.
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

    /// The counters of no interface in particular, which here have all packets.
    fn counters(&mut self) -> Counters {
        let map = self.plane.plane().map("COUNTERS").unwrap();
        let map = PerCpuArray::<_, Counters>::try_from(map).unwrap();
        Counters::sum(map.get(&0, 0).unwrap().iter())
    }

    /// The verdict for the packet that was just sent: exactly one verdict, counted once.
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

    /// Sends a frame, checks that its verdict is the host's, and returns the verdict.
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

    /// Checks that there were as many verdicts as packets, and that the ended flows have the host's
    /// keys, byte for byte, with its packets and bytes for each direction. Returns the number of
    /// flows.
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
