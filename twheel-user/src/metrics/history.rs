//! The last hour of an instance, a point every five seconds: with it the page begins.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use serde::Serialize;
use twheel_common::event::Reason;

use super::{pass::States, sample::Rates};
use crate::filter::STATES;

/// Between two points.
pub(super) const STEP: Duration = Duration::from_secs(5);
/// Points that are kept: an hour. A point takes 120 bytes.
pub(super) const POINTS: usize = 720;

/// The rates of a point, in order.
const RATES: [&str; 7] = [
    "received", "sent", "packets", "created", "ended", "lost", "no_room",
];

/// Ends by reason, in the order of [`Reason::ALL`].
pub(super) type Reasons = [u64; Reason::ALL.len()];

/// How an instance was at a time.
#[derive(Clone, Copy)]
struct Point {
    /// Milliseconds since 1970.
    time: u64,
    /// A second, as in [`RATES`]; NaN: not known.
    rates: [f32; RATES.len()],
    flows: u32,
    states: [u32; STATES.len()],
    /// Ends a second.
    reasons: [f32; Reason::ALL.len()],
}

/// The points, the earliest first.
#[derive(Default)]
pub(super) struct History(VecDeque<Point>);

#[derive(Serialize)]
struct Series<'a> {
    /// Between two points.
    seconds: u64,
    /// Points that are kept.
    points: usize,
    /// In milliseconds since 1970, one for each point.
    times: Vec<u64>,
    flows: Vec<u32>,
    /// Bits, packets or flows a second; null: not known.
    rates: BTreeMap<&'a str, Vec<f32>>,
    /// Flows in the table. A state that no flow had is left out.
    states: BTreeMap<&'a str, Vec<u32>>,
    /// Ends a second. A reason that no flow had is left out.
    reasons: BTreeMap<&'a str, Vec<f32>>,
}

impl History {
    /// Adds a point.
    pub(super) fn add(
        &mut self,
        rates: &Rates,
        reasons: [f64; Reason::ALL.len()],
        flows: u64,
        states: &States,
    ) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let state = |name: &str| states.get(name).copied().unwrap_or(0) as u32;
        let [received, sent] = rates.bits.map_or([f64::NAN; 2], |bits| bits);
        self.0.push_back(Point {
            time: now.map_or(0, |now| now.as_millis() as u64),
            rates: [
                received,
                sent,
                rates.packets,
                rates.created,
                rates.ended,
                rates.lost,
                rates.no_room,
            ]
            .map(rounded),
            flows: flows as u32,
            states: STATES.map(state),
            reasons: reasons.map(rounded),
        });
        while self.0.len() > POINTS {
            self.0.pop_front();
        }
    }

    /// The points after a time, in milliseconds since 1970, as JSON.
    pub(super) fn since(&self, time: u64) -> Result<String> {
        let points: Vec<_> = self.0.iter().filter(|point| point.time > time).collect();
        let of = |value: &dyn Fn(&Point) -> f32| points.iter().map(|it| value(it)).collect();
        let series = Series {
            seconds: STEP.as_secs(),
            points: POINTS,
            times: points.iter().map(|point| point.time).collect(),
            flows: points.iter().map(|point| point.flows).collect(),
            rates: (0..)
                .zip(RATES)
                .map(|(at, name): (usize, _)| (name, of(&|point| point.rates[at])))
                .collect(),
            states: STATES
                .iter()
                .enumerate()
                .filter(|(at, _)| points.iter().any(|point| point.states[*at] > 0))
                .map(|(at, name)| (*name, points.iter().map(|it| it.states[at]).collect()))
                .collect(),
            reasons: Reason::ALL
                .iter()
                .enumerate()
                .filter(|(at, _)| points.iter().any(|point| point.reasons[*at] > 0.0))
                .map(|(at, reason)| (reason.name(), of(&|point| point.reasons[at])))
                .collect(),
        };
        serde_json::to_string(&series).context("cannot write the history")
    }
}

/// With two decimals, so that it is short as text.
fn rounded(value: f64) -> f32 {
    ((value * 100.0).round() / 100.0) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_what_is_new_is_told() {
        const { assert!(STEP.as_secs() as usize * POINTS == 3600) };
        let mut history = History::default();
        for number in 0..POINTS as u64 + 10 {
            let rates = Rates {
                created: 0.2,
                ..Rates::default()
            };
            let states = States::from([("established", number)]);
            history.add(&rates, [0.0; 7], number, &states);
        }
        let text = history.since(0).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(all["flows"].as_array().unwrap().len(), POINTS);
        assert_eq!(all["flows"][0], 10);
        assert_eq!(all["states"]["established"][1], 11);
        assert_eq!(all["rates"]["created"][0], 0.2);
        assert!(all["rates"]["received"][0].is_null(), "{text}");
        assert_eq!(all["reasons"], serde_json::json!({}));
        history.0[POINTS - 1].time += 1_000_000;
        let later = history.0[POINTS - 1].time - 1;
        let new: serde_json::Value = serde_json::from_str(&history.since(later).unwrap()).unwrap();
        assert_eq!(new["flows"].as_array().unwrap().len(), 1);
        assert!(size_of::<Point>() <= 120, "{}", size_of::<Point>());
    }
}
