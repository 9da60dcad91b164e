//! The traffic and the steps of one CPU.

use std::{
    collections::HashSet,
    sync::atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
};

use aya::programs::{SchedClassifier, TestRun, TestRunOptions, Xdp};
use twheel::{
    call::{delete, step},
    flows::Flows,
    stepper::pin_to,
};
use twheel_common::{event::Reason, step::Deleted};
use twheel_tests::plane::{ACK, FIN, PASS, RST, SYN, Setup, UNSPEC, frame, set_flags};

use crate::{CPUS, Random};

/// How many packets a CPU sends in a burst.
pub const BURST: u64 = 16;

/// What the threads do. Each load runs in both views: once with both directions seen, which is
/// production's default, and once with one.
#[derive(Clone, Copy)]
pub struct Load {
    /// Half of the packets choose among this many keys.
    pub keys: u32,
    /// The other half choose among this many.
    pub hot: u32,
    /// Both CPUs send bursts of packets of the same keys side by side, and the table is checked
    /// between bursts.
    pub in_step: bool,
    pub setup: Setup,
}

/// Few records and few keys: both CPUs always touch the same flows and enter the same keys at once,
/// and records change hands all the time.
pub const NARROW: Load = Load {
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
        // The stamps wrap around during the test.
        start: (1 << 32) - 20_000,
        ..Setup::DEFAULT
    },
};

/// A million keys come, go and return, and the table is full now and then.
pub const WIDE: Load = Load {
    keys: 1_000_000,
    hot: 64,
    in_step: false,
    setup: Setup {
        tick: 4,
        timeout: 1_000,
        close: 100,
        max_flows: 3_072,
        ..NARROW.setup
    },
};

/// What a thread that drives a CPU needs.
pub struct Driver<'a> {
    pub load: Load,
    pub flows: &'a Flows,
    pub records: u32,
    pub ingress: &'a Xdp,
    pub egress: &'a SchedClassifier,
    pub stepper: &'a Xdp,
    pub deleter: &'a Xdp,
    pub packets: &'a AtomicU64,
    pub deleted: &'a AtomicU64,
    pub stop: &'a AtomicBool,
    /// How often either CPU has come to the end of a burst.
    pub arrived: &'a AtomicU64,
}

impl Driver<'_> {
    /// Sends packets, steps the wheel and deletes flows on one CPU; calls `turn` before each
    /// packet.
    pub fn drive(&self, cpu: u32, seed: u64, mut turn: impl FnMut()) {
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
                // Keys that were absent for a while, on both CPUs at once.
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

    /// Waits for the other CPU, or for the end of the test, and checks the table while waiting.
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
                assert!(keys.insert(flow.key), "read twice: {flow:?}");
            }
        }
        self.arrived.fetch_add(1, SeqCst);
        wait(burst * 4);
    }

    /// Deletes a few flows of this CPU's wheel, some of which have changed meanwhile.
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
            match Deleted::from_raw(entry.outcome).expect("the outcome is not valid") {
                Deleted::Done => drop(self.deleted.fetch_add(1, Relaxed)),
                Deleted::Changed | Deleted::RingFull | Deleted::Posted => {}
                Deleted::Elsewhere => panic!("the flow was read as one of this CPU's wheel"),
            }
        }
    }
}
