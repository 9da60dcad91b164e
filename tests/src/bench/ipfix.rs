//! What it takes to write ended flows as IPFIX.

use std::{hint::black_box, time::Instant};

use anyhow::Result;
use serde_json::json;
use twheel::export::ipfix::{Config, Encoder, EndReason, FlowRecord};
use twheel_common::flow::Traffic;

use crate::{
    report::{Figure, Report},
    size,
};

/// Flows of a round.
const FLOWS: u64 = size(2_000_000, 1_000);
/// The buffer is emptied, as if it was sent, when it has so many bytes.
const FLUSH: usize = 64 << 10;

/// Measures records a second, of one thread.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say("Millions of IPFIX records a second, of one thread: median (least–most).");
    for (name, biflow, pen) in [
        ("two records a flow", false, None),
        ("one with reverse elements", true, None),
        ("two, with private elements", false, Some(32473)),
    ] {
        let config = Config {
            domain: 1,
            name: "eth0@host".to_owned(),
            pen,
            biflow,
            most: 1400,
        };
        let rates: Vec<_> = (0..rounds).map(|_| round(config.clone())).collect();
        let rate = Figure::from_samples(&rates);
        report.say(&format!("{name:<28} {}", Figure::row(&[rate])));
        report.object(&json!({ "records": name, "millions_a_second": rate.median }));
    }
    Ok(())
}

/// Millions of records a second.
fn round(config: Config) -> f64 {
    let records = FLOWS * if config.biflow { 1 } else { 2 };
    let mut encoder = Encoder::new(config);
    let mut buffer = Vec::with_capacity(2 * FLUSH);
    let begun = Instant::now();
    encoder.begin(true);
    for number in 0..FLOWS {
        encoder.flow(&flow(black_box(number)), &mut buffer);
        if buffer.len() >= FLUSH {
            encoder.complete(&mut buffer);
            black_box(&buffer);
            buffer.clear();
        }
    }
    records as f64 / begun.elapsed().as_secs_f64() / 1e6
}

fn flow(number: u64) -> FlowRecord<'static> {
    let port = number as u16;
    FlowRecord {
        start: 1_700_000_000_000 + number,
        end: 1_700_000_001_000 + number,
        ends: match number % 4 {
            0 => [
                ([0xfd77, 0, 0, 0, 0, 0, 0, 1], port),
                ([0xfd77, 0, 0, 0, 0, 0, 0, 2], 443),
            ]
            .map(Into::into),
            _ => [([10, 0, 0, 1], port), ([10, 0, 0, 2], 443)].map(Into::into),
        },
        proto: 6,
        end_reason: EndReason::Idle,
        sent: Some([
            Traffic {
                packets: number,
                bytes: 100 * number,
            },
            Traffic {
                packets: 2,
                bytes: 120,
            },
        ]),
        has_sent: [true, true],
        vlans: [0, 0],
        iface: Some("eth0"),
        is_only_iface: true,
        is_outgoing: false,
        flow_id: Default::default(),
        seq: number,
        rule: None,
        state: "established",
        reason: "idle",
        zone: 0,
        nat: None,
    }
}
