//! One JSON object a line; `docs/events.schema.json` describes each. The names of fields are stable. A
//! field that does not apply is absent. Durations are whole microseconds.

use std::{
    io,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer};
use twheel_common::{event::Pace, flow::Traffic};
use uuid::Uuid;

use super::Output;
use crate::{
    action::Reaped,
    identity::{self, Identity},
    model::{Ended, Flow, Mark, Named, Rto, RunEvent, Timing, Tracked, Translation, Updated},
    owner::Owner,
};

/// The version of the lines. A field that is added does not change it.
pub const SCHEMA: u32 = 1;

/// Events as lines of JSON.
pub struct Json {
    /// Who reports them.
    pub identity: Arc<Identity>,
    /// What the lines of the next event tell instead of what would be computed from its parts.
    pub told: Option<Told>,
}

/// What only the host that reported an event can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// The number of the flow.
    pub flow_id: Uuid,
    /// When its first packet was seen.
    pub start: SystemTime,
}

impl Json {
    /// Lines of events that this host, or a history of it, reports.
    pub fn new(identity: Arc<Identity>) -> Self {
        Self {
            identity,
            told: None,
        }
    }

    fn flowing<'a>(
        &self,
        flow: Flow,
        named: Named<'a>,
        (time, age): (SystemTime, Duration),
    ) -> Flowing<'a> {
        let flowing = Flowing::new(&self.identity, flow, named, (time, age));
        match self.told {
            None => flowing,
            Some(Told { flow_id, start }) => Flowing {
                flow_id,
                start,
                ..flowing
            },
        }
    }
}

/// What every line begins with.
#[derive(Serialize)]
pub struct Head<'a> {
    schema: u32,
    event: &'static str,
    #[serde(serialize_with = "time")]
    time: SystemTime,
    host: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
}

impl<'a> Head<'a> {
    /// Of an event with a number.
    fn new(event: &'static str, identity: &'a Identity, mark: Mark) -> Self {
        Self {
            schema: SCHEMA,
            event,
            time: mark.time,
            host: &identity.host,
            instance: Some(&identity.instance),
            seq: Some(mark.number),
        }
    }

    /// Of what a command found in an instance just now.
    pub fn found(event: &'static str, identity: &'a Identity) -> Self {
        Self {
            instance: Some(&identity.instance),
            ..Self::now(event, &identity.host)
        }
    }

    /// Of what a command found on a host just now.
    pub fn now(event: &'static str, host: &'a str) -> Self {
        Self {
            schema: SCHEMA,
            event,
            time: SystemTime::now(),
            host,
            instance: None,
            seq: None,
        }
    }
}

/// A line about something that is not a flow.
#[derive(Serialize)]
pub struct Line<'a, T> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    body: T,
}

/// A line that a command prints of what it found on this host.
pub fn write_now(
    event: &'static str,
    body: impl Serialize,
    to: &mut (impl io::Write + ?Sized),
) -> io::Result<()> {
    let host = identity::host();
    let head = Head::now(event, &host);
    write(&Line { head, body }, to)
}

/// A line that a command prints of what it found in an instance.
pub fn write_found(
    event: &'static str,
    identity: &Identity,
    body: impl Serialize,
    to: &mut (impl io::Write + ?Sized),
) -> io::Result<()> {
    let head = Head::found(event, identity);
    write(&Line { head, body }, to)
}

/// What tells a flow from others.
#[derive(Serialize)]
struct Flowing<'a> {
    flow_id: Uuid,
    #[serde(serialize_with = "time")]
    start: SystemTime,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(flatten)]
    nat: Option<Nat>,
    #[serde(flatten)]
    owner: Option<&'a Owner>,
}

/// The endpoints on the other side of a translation.
#[derive(Serialize)]
struct Nat {
    nat_src: IpAddr,
    nat_sport: u16,
    nat_dst: IpAddr,
    nat_dport: u16,
}

impl From<Translation> for Nat {
    fn from(Translation { src, dst }: Translation) -> Self {
        Self {
            nat_src: src.ip(),
            nat_sport: src.port(),
            nat_dst: dst.ip(),
            nat_dport: dst.port(),
        }
    }
}

/// Whether a field is omitted.
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl<'a> Flowing<'a> {
    /// `age`: at `time`.
    fn new(
        identity: &Identity,
        flow: Flow,
        named: Named<'a>,
        (time, age): (SystemTime, Duration),
    ) -> Self {
        Self {
            flow_id: identity.flow_id(&flow.birth),
            start: time.checked_sub(age).unwrap_or(time),
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
            rule: named.rule,
            nat: named.nat.map(Nat::from),
            owner: named.owner,
        }
    }
}

/// A flow that has begun.
#[derive(Serialize)]
struct BegunLine<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    flow: Flowing<'a>,
    picked_up: bool,
}

/// A flow that lives on or has ended.
#[derive(Serialize)]
pub(crate) struct FlowLine<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    flow: Flowing<'a>,
    picked_up: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    age_us: u64,
    idle_us: u64,
    #[serde(flatten)]
    account: Option<Account>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interval_us: Option<u64>,
    #[serde(flatten)]
    interval: Option<IntervalAccount>,
    #[serde(flatten)]
    timing: Option<SidesTiming>,
}

#[derive(Serialize)]
struct SidesTiming {
    #[serde(skip_serializing_if = "Option::is_none")]
    orig_rtt_us: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    orig_rto_us: Option<u32>,
    orig_retransmissions: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_rtt_us: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_rto_us: Option<u32>,
    reply_retransmissions: u32,
    stalled: bool,
}

impl SidesTiming {
    fn new([orig, reply]: [Timing; 2], rto: [Option<u32>; 2], stalled: bool) -> Self {
        Self {
            orig_rtt_us: rtt(orig.srtt),
            orig_rto_us: rto[0],
            orig_retransmissions: orig.retransmissions,
            reply_rtt_us: rtt(reply.srtt),
            reply_rto_us: rto[1],
            reply_retransmissions: reply.retransmissions,
            stalled,
        }
    }

    fn of_paces(paces: [Pace; 2], stalled: bool) -> Self {
        let rto = paces.map(|pace| Some(pace.rto));
        Self::new(paces.map(Timing::from), rto, stalled)
    }
}

#[derive(Serialize)]
struct Timer<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    flow: Flowing<'a>,
    sender: &'a str,
    outstanding: u32,
    backoff: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rtt_us: Option<u32>,
    rto_us: u32,
    retransmissions: u32,
    stalled: bool,
}

/// A flow in the table.
#[derive(Serialize)]
struct Live<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    flow: Flowing<'a>,
    picked_up: bool,
    age_us: u64,
    idle_us: u64,
    expires_us: u64,
    cpu: u32,
    #[serde(flatten)]
    account: Option<Account>,
    #[serde(flatten)]
    timing: Option<SidesTiming>,
}

#[derive(Serialize)]
struct Deed<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    #[serde(flatten)]
    flow: Flowing<'a>,
    /// The number of the `end` event.
    end_seq: u64,
    reason: &'a str,
    age_us: u64,
    idle_us: u64,
    action: &'a str,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// A time of day, as RFC 3339 has it, with microseconds.
fn time<S: Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&humantime::format_rfc3339_micros(*time))
}

/// A duration in microseconds.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// `None` if there was no sample.
fn rtt(srtt: u32) -> Option<u32> {
    (srtt > 0).then_some(srtt)
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

/// What was sent since the last update, or since the flow's beginning.
#[derive(Serialize)]
struct IntervalAccount {
    orig_packets_delta: u64,
    orig_bytes_delta: u64,
    reply_packets_delta: u64,
    reply_bytes_delta: u64,
}

impl From<[Traffic; 2]> for IntervalAccount {
    fn from([orig, reply]: [Traffic; 2]) -> Self {
        Self {
            orig_packets_delta: orig.packets,
            orig_bytes_delta: orig.bytes,
            reply_packets_delta: reply.packets,
            reply_bytes_delta: reply.bytes,
        }
    }
}

/// Most lines are shorter, in bytes.
const LINE: usize = 1024;

/// Writes an object and a newline.
pub fn write(line: &impl Serialize, to: &mut (impl io::Write + ?Sized)) -> io::Result<()> {
    // `to` may be written to by calls that the compiler does not see through: one for the whole line.
    let mut text = Vec::with_capacity(LINE);
    serde_json::to_writer(&mut text, line)?;
    text.push(b'\n');
    to.write_all(&text)
}

/// Writes a flow that is in the table, with its names. `time`: when its age was read.
pub fn tracked(
    identity: &Identity,
    time: SystemTime,
    flow: &Tracked,
    named: Named<'_>,
    to: &mut dyn io::Write,
) -> io::Result<()> {
    let head = Head {
        time,
        ..Head::found("flow", identity)
    };
    let line = Live {
        flow: Flowing::new(identity, flow.flow, named, (time, flow.age)),
        head,
        picked_up: flow.picked_up,
        age_us: micros(flow.age),
        idle_us: micros(flow.idle),
        expires_us: micros(flow.expires),
        cpu: flow.cpu,
        account: flow.account.map(Account::from),
        timing: flow
            .timing
            .map(|sides| SidesTiming::new(sides, [None; 2], flow.flow.stalled)),
    };
    write(&line, to)
}

/// The end of a flow, with its names.
pub(crate) fn ended_line<'a>(
    identity: &'a Identity,
    mark: Mark,
    ended: &Ended,
    named: Named<'a>,
) -> FlowLine<'a> {
    FlowLine {
        reason: Some(ended.reason.name()),
        ..FlowLine::new(identity, ("end", mark), ended, named)
    }
}

impl<'a> FlowLine<'a> {
    fn new(
        identity: &'a Identity,
        (event, mark): (&'static str, Mark),
        updated: &Updated,
        named: Named<'a>,
    ) -> Self {
        let interval = updated.interval;
        Self {
            head: Head::new(event, identity, mark),
            flow: Flowing::new(identity, updated.flow, named, (mark.time, updated.age)),
            picked_up: updated.picked_up,
            reason: None,
            age_us: micros(updated.age),
            idle_us: micros(updated.idle),
            account: updated.account.map(Account::from),
            interval_us: interval.map(|it| micros(it.length)),
            interval: interval
                .and_then(|it| it.account)
                .map(IntervalAccount::from),
            timing: updated
                .pace
                .map(|paces| SidesTiming::of_paces(paces, updated.flow.stalled)),
        }
    }
}

impl Output for Json {
    fn begun(
        &mut self,
        mark: Mark,
        begun: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = BegunLine {
            head: Head::new("begin", &self.identity, mark),
            flow: self.flowing(begun.flow, named, (mark.time, begun.age)),
            picked_up: begun.picked_up,
        };
        write(&line, to)
    }

    fn updated(
        &mut self,
        mark: Mark,
        updated: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = FlowLine {
            flow: self.flowing(updated.flow, named, (mark.time, updated.age)),
            ..FlowLine::new(&self.identity, ("update", mark), updated, named)
        };
        write(&line, to)
    }

    fn ended(
        &mut self,
        mark: Mark,
        ended: &Ended,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = FlowLine {
            flow: self.flowing(ended.flow, named, (mark.time, ended.age)),
            ..ended_line(&self.identity, mark, ended, named)
        };
        write(&line, to)
    }

    fn rto(
        &mut self,
        mark: Mark,
        timer: &Rto,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = Timer {
            head: Head::new("rto", &self.identity, mark),
            flow: self.flowing(timer.flow, named, (mark.time, timer.age)),
            sender: if timer.orig { "orig" } else { "reply" },
            outstanding: timer.outstanding,
            backoff: timer.backoff,
            rtt_us: rtt(timer.pace.srtt),
            rto_us: timer.pace.rto,
            retransmissions: timer.pace.retransmissions,
            stalled: timer.flow.stalled,
        };
        write(&line, to)
    }

    fn reaped(
        &mut self,
        mark: Mark,
        (end, ended, reaped): (Mark, &Ended, &Reaped),
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = Deed {
            head: Head::new("reap", &self.identity, mark),
            flow: self.flowing(ended.flow, named, (end.time, ended.age)),
            end_seq: end.number,
            reason: ended.reason.name(),
            age_us: micros(ended.age),
            idle_us: micros(ended.idle),
            action: reaped.action.name(),
            outcome: reaped.outcome.name(),
            error: reaped.error.as_deref(),
        };
        write(&line, to)
    }

    fn run(&mut self, mark: Mark, event: &RunEvent, to: &mut dyn io::Write) -> io::Result<()> {
        let line = Line {
            head: Head::new("run", &self.identity, mark),
            body: event,
        };
        write(&line, to)
    }
}
