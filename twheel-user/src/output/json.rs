//! One JSON object per line; the field names are stable.

use std::{io, net::IpAddr, time::SystemTime};

use serde::Serialize;
use twheel_common::flow::Traffic;

use super::Output;
use crate::{
    action::Reaped,
    model::{Expired, Flow, Named, Rto, Tracked},
};

/// Lines of JSON.
pub struct Json;

/// The fields at the beginning of every line.
#[derive(Serialize)]
struct Ends<'a> {
    proto: &'static str,
    src: IpAddr,
    sport: u16,
    dst: IpAddr,
    dport: u16,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    iface: Option<&'a str>,
    direction: &'static str,
    #[serde(skip_serializing_if = "is_zero")]
    vlan: u16,
    #[serde(skip_serializing_if = "is_zero")]
    inner_vlan: u16,
    #[serde(skip_serializing_if = "is_zero")]
    zone: u16,
}

/// Whether a field is omitted.
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl<'a> Ends<'a> {
    fn new(flow: Flow, named: Named<'a>) -> Self {
        Self {
            proto: flow.proto,
            src: flow.src.ip(),
            sport: flow.src.port(),
            dst: flow.dst.ip(),
            dport: flow.dst.port(),
            state: flow.state,
            iface: named.iface,
            direction: flow.direction(),
            vlan: flow.vlans[0],
            inner_vlan: flow.vlans[1],
            zone: named.zone,
        }
    }
}

/// A flow that has ended.
#[derive(Serialize)]
pub(crate) struct EndedLine<'a> {
    event: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    #[serde(flatten)]
    flow: Ends<'a>,
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
    flow: Ends<'a>,
    rule: Option<&'a str>,
    sender: &'a str,
    outstanding: u32,
    backoff: u32,
    rtt_ms: Option<f64>,
    rto_ms: f64,
    retransmissions: u32,
    stalled: bool,
}

/// A flow in the table.
#[derive(Serialize)]
struct Live<'a> {
    #[serde(flatten)]
    flow: Ends<'a>,
    picked_up: bool,
    rule: Option<&'a str>,
    age_ms: u64,
    idle_ms: u64,
    expires_ms: u64,
    cpu: u32,
    #[serde(flatten)]
    account: Option<Account>,
    #[serde(flatten)]
    timing: Option<TimingFields>,
}

#[derive(Serialize)]
struct TimingFields {
    orig_rtt_ms: Option<f64>,
    orig_retransmissions: u32,
    reply_rtt_ms: Option<f64>,
    reply_retransmissions: u32,
    stalled: bool,
}

#[derive(Serialize)]
struct Deed<'a> {
    event: &'a str,
    #[serde(flatten)]
    flow: Ends<'a>,
    reason: &'a str,
    rule: Option<&'a str>,
    idle_ms: u64,
    action: &'a str,
    outcome: &'a str,
    error: Option<&'a str>,
}

fn milliseconds(micros: u32) -> f64 {
    f64::from(micros) / 1000.0
}

fn rtt(srtt: u32) -> Option<f64> {
    (srtt > 0).then(|| milliseconds(srtt))
}

#[derive(Serialize)]
struct Account {
    orig_packets: u64,
    orig_bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
}

impl From<[Traffic; 2]> for Account {
    fn from([orig, reply]: [Traffic; 2]) -> Self {
        Self {
            orig_packets: orig.packets,
            orig_bytes: orig.bytes,
            reply_packets: reply.packets,
            reply_bytes: reply.bytes,
        }
    }
}

/// Writes an object and a newline.
pub fn write(line: &impl Serialize, to: &mut dyn io::Write) -> io::Result<()> {
    serde_json::to_writer(&mut *to, line)?;
    writeln!(to)
}

/// Writes a flow that is in the table, with its names.
pub fn tracked(flow: &Tracked, named: Named<'_>, to: &mut dyn io::Write) -> io::Result<()> {
    let line = Live {
        flow: Ends::new(flow.flow, named),
        picked_up: flow.picked_up,
        rule: named.rule,
        age_ms: flow.age.as_millis() as u64,
        idle_ms: flow.idle.as_millis() as u64,
        expires_ms: flow.expires.as_millis() as u64,
        cpu: flow.cpu,
        account: flow.account.map(Account::from),
        timing: flow.timing.map(|[orig, reply]| TimingFields {
            orig_rtt_ms: rtt(orig.srtt),
            orig_retransmissions: orig.retransmissions,
            reply_rtt_ms: rtt(reply.srtt),
            reply_retransmissions: reply.retransmissions,
            stalled: flow.flow.stalled,
        }),
    };
    write(&line, to)
}

/// The end of a flow, with its names; and when it was, if the flow ended earlier.
pub(crate) fn line<'a>(
    when: Option<SystemTime>,
    ended: &Expired,
    named: Named<'a>,
) -> EndedLine<'a> {
    EndedLine {
        event: "expired",
        time: when.map(|when| humantime::format_rfc3339_millis(when).to_string()),
        flow: Ends::new(ended.flow, named),
        picked_up: ended.picked_up,
        reason: ended.reason.name(),
        rule: named.rule,
        age_ms: ended.age.as_millis() as u64,
        idle_ms: ended.idle.as_millis() as u64,
        account: ended.account.map(Account::from),
        paces: ended.pace.map(|[orig, reply]| Paces {
            orig_rtt_ms: rtt(orig.srtt),
            orig_rto_ms: milliseconds(orig.rto),
            orig_retransmissions: orig.retransmissions,
            reply_rtt_ms: rtt(reply.srtt),
            reply_rto_ms: milliseconds(reply.rto),
            reply_retransmissions: reply.retransmissions,
            stalled: ended.flow.stalled,
        }),
    }
}

/// Writes the end of a flow.
pub fn ended(
    when: Option<SystemTime>,
    ended: &Expired,
    named: Named<'_>,
    to: &mut dyn io::Write,
) -> io::Result<()> {
    write(&line(when, ended, named), to)
}

impl Output for Json {
    fn expired(
        &mut self,
        flow: &Expired,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        ended(None, flow, named, to)
    }

    fn rto(&mut self, timer: &Rto, named: Named<'_>, to: &mut dyn io::Write) -> io::Result<()> {
        let line = Timer {
            event: "rto",
            flow: Ends::new(timer.flow, named),
            rule: named.rule,
            sender: if timer.orig { "orig" } else { "reply" },
            outstanding: timer.outstanding,
            backoff: timer.backoff,
            rtt_ms: rtt(timer.pace.srtt),
            rto_ms: milliseconds(timer.pace.rto),
            retransmissions: timer.pace.retransmissions,
            stalled: timer.flow.stalled,
        };
        write(&line, to)
    }

    fn reaped(
        &mut self,
        ended: &Expired,
        reaped: &Reaped,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = Deed {
            event: "reap",
            flow: Ends::new(ended.flow, named),
            reason: ended.reason.name(),
            rule: named.rule,
            idle_ms: ended.idle.as_millis() as u64,
            action: reaped.action.name(),
            outcome: reaped.outcome.name(),
            error: reaped.error.as_deref(),
        };
        write(&line, to)
    }
}
