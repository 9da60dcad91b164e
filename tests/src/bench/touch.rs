//! Nanoseconds a packet.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use twheel::{clock::Clock, data_plane::DataPlane};
use twheel_common::{config::Config, counter::Counter, wheel::Geometry};

use crate::{
    plane,
    report::{Figure, Report},
};

/// Numbers of flows, powers of two, and what touch may cost there: that many times the floor.
const SIZES: [(u32, Option<f64>); 4] = [
    (1, Some(1.15)),
    (1 << 10, None),
    (1 << 17, Some(1.05)),
    (1 << 20, Some(1.05)),
];
const VARIANTS: [&str; 6] = [
    "empty",
    "parse",
    "floor",
    "touch",
    "absent_floor",
    "absent_touch",
];
/// Packets of one run: long enough that its beginning and end do not count, short enough (4 ms) that
/// the machine is the same for all the programs of a round.
const PACKETS: u32 = 1 << 13;
/// Runs before the rounds.
const WARM_UP: u32 = 2;
/// The table is never made smaller than this, so that few flows are not measured in a table that
/// nobody would make.
const SMALLEST_TABLE: u32 = 1 << 16;

const XDP_PASS: u32 = 2;

/// What a run is to do. `Order` of `twheel-ebpf/src/bench.rs` has the same words.
struct Order {
    flows: u32,
    seed: u64,
    multiplier: u64,
    increment: u64,
}

impl Order {
    /// Flows at random (Knuth's MMIX generator); another seed gives another sequence.
    fn random(flows: u32, seed: u64) -> Self {
        Self {
            flows,
            seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            multiplier: 6_364_136_223_846_793_005,
            increment: 1_442_695_040_888_963_407,
        }
    }

    /// A segment, and behind it the order, aligned.
    fn packet(&self, absent: bool) -> Vec<u8> {
        let mut packet = plane::segment(0).to_vec();
        if absent {
            // The end of a connection that nobody knows: begins no flow.
            packet[37] = 188;
            packet[47] = 0x04;
        }
        packet.resize(packet.len().next_multiple_of(8), 0);
        let words = [
            u64::from(PACKETS),
            u64::from(self.flows) - 1,
            self.seed,
            self.multiplier,
            self.increment,
        ];
        packet.extend(words.into_iter().flat_map(u64::to_ne_bytes));
        packet
    }
}

/// All sizes, all variants.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    let object = plane::object("TWHEEL_BENCH_OBJECT")?;
    report.say(&format!(
        "Nanoseconds a packet: median (least–most) of {rounds} rounds. A round runs each program once, in \
         turn; a run is\none BPF_PROG_TEST_RUN over {PACKETS} packets of flows at random (a new seed each \
         run), its time the kernel's `duration`.\nEach packet is written by a generator; `empty` is that \
         and the loop, and is in all the others. `parse` adds the\nparser, `floor` to that a lookup and a \
         store, `touch` is what production does. Clock: jiffies. One CPU.\n\
         touch/floor: whole programs, the median of the ratios of each round; beyond empty: of the medians.\n\
         The wheel has one level, for the verifier's sake: a touch of a flow that is there never looks at it.\n"
    ));
    report.say(&format!(
        "{:>8}  {:>20}  {:>20}  {:>20}  {:>20}  touch/floor         beyond empty",
        "flows", VARIANTS[0], VARIANTS[1], VARIANTS[2], VARIANTS[3]
    ));
    for (flows, bound) in SIZES {
        let (figures, ratio) = measure(&object, flows, rounds)?;
        let mut row = format!("{flows:>8}");
        for (variant, figure) in VARIANTS.iter().zip(&figures) {
            report.nanoseconds("touch", variant, u64::from(flows), figure);
            let spread = format!("{:.1}–{:.1}", figure.min, figure.max);
            row += &format!("  {:>6.1} {:>13}", figure.median, format!("({spread})"));
        }
        let [empty, _, floor, touch, ..] = figures.map(|figure| figure.median);
        let verdict = match bound {
            None => String::new(),
            Some(bound) if ratio <= bound => format!("(within {bound})"),
            Some(bound) => format!("(ABOVE {bound})"),
        };
        row += &format!(
            "  {ratio:.3} {verdict:<13}  {:.3}",
            (touch - empty) / (floor - empty)
        );
        report.say(&row);
    }
    Ok(())
}

/// Figures of [`VARIANTS`], and the median of each round's ratio of touch to floor.
fn measure(object: &[u8], flows: u32, rounds: u32) -> Result<([Figure; VARIANTS.len()], f64)> {
    let clock = Clock::jiffies()?;
    let capacity = flows.max(SMALLEST_TABLE);
    // Nothing is due while this runs.
    let config = Config {
        // One level: a touch never looks at the wheel, but the verifier does, for every turn of a
        // bench's loop, and three levels are beyond its patience.
        geometry: Geometry {
            levels: 1,
            bits: 10,
        },
        ..plane::config(clock, Duration::from_secs(3600), None, capacity)?
    };
    let mut plane = plane::load(object, config, clock)?;
    for flow in 0..flows {
        run(&mut plane, "fill_floor", &plane::segment(flow))?;
        run(&mut plane, "fill_touch", &plane::segment(flow))?;
    }
    let created = plane.counters()?.get(Counter::Created);
    ensure!(
        created == u64::from(flows),
        "{created} flows began, not {flows}"
    );
    let mut samples: [Vec<f64>; VARIANTS.len()] = Default::default();
    let mut seed = 0;
    for round in 0..WARM_UP + rounds {
        // Not always the same after the same.
        for turn in 0..VARIANTS.len() {
            let variant = (turn + round as usize) % VARIANTS.len();
            seed += 1;
            let order = Order::random(flows, seed);
            let duration = run(
                &mut plane,
                VARIANTS[variant],
                &order.packet(VARIANTS[variant].starts_with("absent")),
            )?;
            if round >= WARM_UP {
                samples[variant].push(duration.as_nanos() as f64 / f64::from(PACKETS));
            }
        }
    }
    let counters = plane.counters()?;
    let wanted = u64::from(PACKETS) * u64::from(WARM_UP + rounds);
    let touched = counters.get(Counter::Touched);
    ensure!(touched == wanted, "{touched} packets touched, not {wanted}");
    let [_, _, floor, touch, ..] = &samples;
    let ratios: Vec<_> = touch
        .iter()
        .zip(floor)
        .map(|(touch, floor)| touch / floor)
        .collect();
    let ratio = Figure::of(&ratios).median;
    Ok((samples.map(|samples| Figure::of(&samples)), ratio))
}

/// One run; the kernel's time for it.
fn run(plane: &mut DataPlane, variant: &str, packet: &[u8]) -> Result<Duration> {
    let program = plane.xdp(&format!("bench_{variant}"))?;
    let result = program
        .test_run(TestRunOptions {
            data_in: Some(packet),
            ..TestRunOptions::new()
        })
        .with_context(|| format!("cannot run bench_{variant}"))?;
    ensure!(
        result.return_value == XDP_PASS,
        "bench_{variant} met a packet that it should not have met"
    );
    Ok(result.duration)
}
