//! What a tracker adds to a packet on its way through a gateway, compared with conntrack.

use anyhow::Result;
use serde_json::json;
use twheel::progress;

use crate::{
    bulk,
    gateway::{
        BASE, Buckets, CONNTRACK, FRAMES, Flows, LANES, Lab, PASS, Packet, TCX, TWHEEL, WARM_UP,
    },
    plane,
    report::{Figure, Report, verdict},
    size,
};

/// Numbers of flows as powers of two, each with the most that twheel may add, relative to what
/// conntrack adds.
const SIZES: [(u32, f64); 3] = [(10, 0.12), (size(17, 11), 0.20), (size(20, 12), 0.28)];
/// Numbers of new flows per round as powers of two, each with its bound. There is capacity for
/// twice as many.
const NEW: [(u32, f64); 2] = [(size(17, 11), 0.25), (size(20, 12), 0.25)];
/// Maximum of what a packet may cost more with TCX than with XDP, in nanoseconds.
const TCX_MORE: f64 = 60.0;

/// Measures all sizes with all gateways.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a packet takes through a gateway: median (least–most) of {rounds} rounds. A round runs each gateway \
         once,\nin turn; a run is one BPF_PROG_TEST_RUN that makes live frames of all flows in random order (at least \
         {FRAMES}), which\ngo by a veth to a namespace that routes them and drops them where they leave, counted: all \
         of them, or this fails.\nOne CPU. Time is the kernel's `duration`, in which the softirq is, and what its thread \
         (ksoftirqd) took over.\n\
         The gateways: `base` does nothing but route, `xdp` has an XDP program that passes, in `conntrack` nf_conntrack is \
         on\n(hooks alone, no rule that a packet meets; one bucket for each end of a flow, two where flows are new; no checksums), in `twheel` there is a \
         `twheel run`\nas it is by default, on the interface by which the packets come in or, on the way back, leave; in `tcx` the\nsame with `--hook tcx`. All \
         have GRO on, without which a veth takes no frames.\nFlows are established by their handshakes. New flows: a SYN each, \
         into tables that are empty.\n\
         The ratio is (twheel - base) / (conntrack - base): the median of the ratios of each round (least–most).\n"
    ));
    let mut curves = LANES.map(|lane| (lane.to_owned(), Vec::new()));
    let [mut there, mut back] = [Vec::new(), Vec::new()];
    for (bits, bound) in SIZES {
        let mut lab = Lab::new(1 << bits, Buckets::Enough)?;
        let samples = established(&mut lab, bits, rounds)?;
        lab.end(report)?;
        for ((_, curve), samples) in curves.iter_mut().zip(&samples[0]) {
            curve.push((f64::from(1 << bits), Figure::from_samples(samples).median));
        }
        let [ahead, behind] = samples;
        there.push((bits, bound, ahead));
        back.push((bits, bound, behind));
    }
    let mut begun = [Vec::new(), Vec::new()];
    for (begun, buckets) in begun.iter_mut().zip([Buckets::Enough, Buckets::Default]) {
        for (bits, bound) in NEW {
            let mut lab = Lab::new(2 << bits, buckets)?;
            begun.push((bits, bound, new(&mut lab, bits, rounds)?));
            lab.end(report)?;
        }
    }
    table(report, "there", "Packets of established flows", &there);
    table(report, "back", "On the way back", &back);
    let [enough, default] = begun;
    table(report, "new", "New flows", &enough);
    let title = "New flows, where conntrack has the buckets that this machine gives it by default";
    table(report, "new_default", title, &default);
    bulk::bench(rounds, report)?;
    report.plot(
        "flows",
        "A packet of an established flow through a gateway",
        ["flows", "ns"],
        &curves,
    )
}

/// For each gateway, its times by round; empty if it was not measured.
type Samples = [Vec<f64>; LANES.len()];

/// What a tracker added, round by round.
fn added(samples: &Samples, lane: usize) -> Vec<f64> {
    let pairs = samples[lane].iter().zip(&samples[BASE]);
    pairs.map(|(with, without)| with - without).collect()
}

fn table(report: &mut Report, way: &str, title: &str, rows: &[(u32, f64, Samples)]) {
    let head = |columns: &[&str]| {
        let columns = columns.iter().map(|it| format!("  {it:>20}"));
        columns.collect::<String>()
    };
    report.say(&format!("\n{title}\n{:>8}{}", "flows", head(&LANES)));
    for (bits, _, samples) in rows {
        let cells = LANES.iter().zip(samples).map(|(lane, samples)| {
            if samples.is_empty() {
                return format!("{:>20}", "");
            }
            let figure = Figure::from_samples(samples);
            report.nanoseconds("path", &format!("{way}_{lane}"), 1 << bits, &figure);
            Figure::row(&[figure])
        });
        let cells = cells.collect::<Vec<_>>().join("  ");
        report.say(&format!("{:>8}  {cells}", 1 << bits));
    }
    let columns = ["conntrack adds", "twheel adds", "tcx over twheel"];
    report.say(&format!("{:>8}{}  ratio", "", head(&columns)));
    for (bits, bound, samples) in rows {
        let [theirs, ours] = [CONNTRACK, TWHEEL].map(|lane| added(samples, lane));
        let ratios: Vec<_> = ours
            .iter()
            .zip(&theirs)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        let pairs = samples[TCX].iter().zip(&samples[TWHEEL]);
        let more: Vec<_> = pairs.map(|(tcx, xdp)| tcx - xdp).collect();
        let (ratio, added) = (
            Figure::from_samples(&ratios),
            [&theirs, &ours, &more].map(|it| Figure::from_samples(it)),
        );
        report.say(&format!(
            "{:>8}  {}  {}{}",
            1 << bits,
            Figure::row(&added),
            verdict(&ratio, Some(*bound)),
            match added[2].median > TCX_MORE {
                true => format!(", TCX ABOVE {TCX_MORE} ns more"),
                false => String::new(),
            },
        ));
        report.object(&json!({
            "bench": "path",
            "variant": format!("{way}_ratio"),
            "n": 1 << bits,
            "conntrack_adds_ns": added[0].median,
            "twheel_adds_ns": added[1].median,
            "tcx_over_twheel_ns": added[2].median,
            "ratio": ratio.median,
            "min": ratio.min,
            "max": ratio.max,
            "rounds": ratio.rounds,
        }));
    }
}

/// Established flows: packets from the flow's source, and packets to it.
fn established(lab: &mut Lab, bits: u32, rounds: u32) -> Result<[Samples; 2]> {
    let each = |from| Flows {
        first: 0,
        bits,
        from,
    };
    for kind in [Packet::Syn, Packet::SynAck, Packet::Ack] {
        for lane in 0..LANES.len() {
            lab.run(lane, kind, each(None))?;
        }
    }
    lab.check(1 << bits)?;
    let mut samples = [plane::no_samples(), plane::no_samples()];
    for round in progress::over(format!("{} flows", 1 << bits), 0..WARM_UP + rounds) {
        // The order changes from round to round.
        for turn in 0..LANES.len() {
            let lane = (turn + round as usize) % LANES.len();
            for (kind, samples) in [Packet::Ack, Packet::BackAck].into_iter().zip(&mut samples) {
                // Packets back do not pass the program.
                if lane == PASS && kind.is_back() {
                    continue;
                }
                let nanoseconds = lab.run(lane, kind, each(Some(round.wrapping_mul(40_503))))?;
                if round >= WARM_UP {
                    samples[lane].push(nanoseconds);
                }
            }
        }
    }
    lab.check(1 << bits)?;
    Ok(samples)
}

/// New flows, in empty tables.
fn new(lab: &mut Lab, bits: u32, rounds: u32) -> Result<Samples> {
    let mut samples = plane::no_samples();
    for round in progress::over(format!("{} new flows", 1 << bits), 0..WARM_UP + rounds) {
        let flows = Flows {
            // The generator can number sixteen times a million flows.
            first: round << bits & 0xff_ffff,
            bits,
            from: None,
        };
        for turn in 0..LANES.len() {
            let lane = (turn + round as usize) % LANES.len();
            let nanoseconds = lab.run(lane, Packet::Syn, flows)?;
            if round >= WARM_UP {
                samples[lane].push(nanoseconds);
            }
        }
        lab.check(1 << bits)?;
        lab.flush()?;
    }
    Ok(samples)
}
