//! One JSON object a line; the field names are stable.

use std::{io, net::IpAddr};

use serde::Serialize;
use twheel_common::event::Pace;

use super::{Expired, Flow, Output, Rto};

/// Lines of JSON.
pub struct Json;

/// What both kinds of lines begin with.
#[derive(Serialize)]
struct Ends {
    proto: &'static str,
    src: IpAddr,
    sport: u16,
    dst: IpAddr,
    dport: u16,
    state: &'static str,
}

impl From<Flow> for Ends {
    fn from(flow: Flow) -> Self {
        Self {
            proto: flow.proto,
            src: flow.src.ip(),
            sport: flow.src.port(),
            dst: flow.dst.ip(),
            dport: flow.dst.port(),
            state: flow.state,
        }
    }
}

/// A flow that has ended.
#[derive(Serialize)]
pub(crate) struct Line<'a> {
    event: &'a str,
    #[serde(flatten)]
    flow: Ends,
    picked_up: bool,
    reason: &'a str,
    rule: Option<&'a str>,
    age_ms: u64,
    idle_ms: u64,
    #[serde(flatten)]
    account: Option<Account>,
    #[serde(flatten)]
    paces: Option<Paces>,
}

#[derive(Serialize)]
struct Paces {
    orig_rtt_ms: Option<f64>,
    orig_rto_ms: f64,
    orig_retransmissions: u32,
    reply_rtt_ms: Option<f64>,
    reply_rto_ms: f64,
    reply_retransmissions: u32,
    stalled: bool,
}

#[derive(Serialize)]
struct Timer<'a> {
    event: &'a str,
    #[serde(flatten)]
    flow: Ends,
    rule: Option<&'a str>,
    sender: &'a str,
    outstanding: u32,
    backoff: u32,
    rtt_ms: Option<f64>,
    rto_ms: f64,
    retransmissions: u32,
    stalled: bool,
}

fn milliseconds(micros: u32) -> f64 {
    f64::from(micros) / 1000.0
}

fn rtt(pace: &Pace) -> Option<f64> {
    (pace.srtt > 0).then(|| milliseconds(pace.srtt))
}

#[derive(Serialize)]
struct Account {
    orig_packets: u64,
    orig_bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
}

fn write(line: &impl Serialize, to: &mut dyn io::Write) -> io::Result<()> {
    serde_json::to_writer(&mut *to, line)?;
    writeln!(to)
}

impl Json {
    /// What [`Output::expired`] writes.
    pub(crate) fn line<'a>(ended: &Expired, rule: Option<&'a str>) -> Line<'a> {
        Line {
            event: "expired",
            flow: ended.flow.into(),
            picked_up: ended.picked_up,
            reason: ended.reason.name(),
            rule,
            age_ms: ended.age.as_millis() as u64,
            idle_ms: ended.idle.as_millis() as u64,
            account: ended.account.map(|[orig, reply]| Account {
                orig_packets: orig.packets,
                orig_bytes: orig.bytes,
                reply_packets: reply.packets,
                reply_bytes: reply.bytes,
            }),
            paces: ended.pace.map(|[orig, reply]| Paces {
                orig_rtt_ms: rtt(&orig),
                orig_rto_ms: milliseconds(orig.rto),
                orig_retransmissions: orig.retransmissions,
                reply_rtt_ms: rtt(&reply),
                reply_rto_ms: milliseconds(reply.rto),
                reply_retransmissions: reply.retransmissions,
                stalled: ended.flow.stalled,
            }),
        }
    }
}

impl Output for Json {
    fn expired(
        &mut self,
        ended: &Expired,
        rule: Option<&str>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        write(&Self::line(ended, rule), to)
    }

    fn rto(&mut self, timer: &Rto, rule: Option<&str>, to: &mut dyn io::Write) -> io::Result<()> {
        let line = Timer {
            event: "rto",
            flow: timer.flow.into(),
            rule,
            sender: if timer.orig { "orig" } else { "reply" },
            outstanding: timer.outstanding,
            backoff: timer.backoff,
            rtt_ms: rtt(&timer.pace),
            rto_ms: milliseconds(timer.pace.rto),
            retransmissions: timer.pace.retransmissions,
            stalled: timer.flow.stalled,
        };
        write(&line, to)
    }
}
