//! A row of `events` as the event that it was made from, which prints as it does on its host.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::Deserialize;
use twheel_common::{
    event::{Event, Pace, Reason},
    flow::{FlowKey, Traffic},
};
use uuid::Uuid;
use zerocopy::FromZeros;

use super::columns::EVENTS;
use crate::{
    action::{Action, Outcome, Reaped},
    filter::{PROTOCOLS, STATES},
    history::{HOOKS, Past, PastEvent},
    identity::Identity,
    model::{
        Birth, Ended, EventKind, Flow, FlowEvent, Happened, Interval, KnownAs, Mark, Rto, RunEvent,
        Translation, Updated,
    },
    output::json::Told,
    owner::Owner,
};

/// The columns to select for a [`Row`]: times as numbers of microseconds.
pub fn selected() -> String {
    let columns = EVENTS.iter().filter(|column| column.name != "schema");
    let columns: Vec<_> = columns
        .map(|column| match column.kind.starts_with("DateTime64") {
            true => format!("toUnixTimestamp64Micro({0}) AS {0}_us", column.name),
            false => column.name.to_owned(),
        })
        .collect();
    columns.join(", ")
}

/// A row of `events`.
#[derive(Debug, Deserialize)]
pub struct Row {
    event: String,
    time_us: i64,
    host: String,
    instance: String,
    seq: u64,
    flow_id: Uuid,
    start_us: i64,
    proto: String,
    src: Ipv6Addr,
    sport: u16,
    dst: Ipv6Addr,
    dport: u16,
    state: String,
    iface: String,
    direction: String,
    vlan: u16,
    inner_vlan: u16,
    zone: u16,
    rule: String,
    nat_src: Ipv6Addr,
    nat_sport: u16,
    nat_dst: Ipv6Addr,
    nat_dport: u16,
    owner_pid: u32,
    owner_command: String,
    owner_cgroup: String,
    owner_user: String,
    picked_up: bool,
    reason: String,
    age_us: u64,
    idle_us: u64,
    orig_packets: Option<u64>,
    orig_bytes: Option<u64>,
    reply_packets: Option<u64>,
    reply_bytes: Option<u64>,
    interval_us: Option<u64>,
    orig_packets_delta: Option<u64>,
    orig_bytes_delta: Option<u64>,
    reply_packets_delta: Option<u64>,
    reply_bytes_delta: Option<u64>,
    orig_rtt_us: u32,
    orig_rto_us: u32,
    orig_retransmissions: Option<u64>,
    reply_rtt_us: u32,
    reply_rto_us: u32,
    reply_retransmissions: Option<u64>,
    stalled: bool,
    sender: String,
    outstanding: u32,
    backoff: u32,
    rtt_us: u32,
    rto_us: u32,
    retransmissions: u32,
    end_seq: u64,
    action: String,
    outcome: String,
    error: String,
    what: String,
    hook: String,
    flows: Option<u64>,
    ended: Option<u64>,
    lost: Option<u64>,
}

impl Row {
    /// The event, and what its line tells that the event's parts here do not. `None`: a twheel of
    /// another version has written it, of which this one does not know a kind or a name.
    pub fn event(&self) -> Option<(Past, Option<Told>)> {
        let kind = EventKind::ALL.iter().find(|it| it.name() == self.event)?;
        let event = match kind {
            EventKind::Begin => PastEvent::Flow(FlowEvent::Begun(self.updated()?)),
            EventKind::Update => PastEvent::Flow(FlowEvent::Updated(self.updated()?)),
            EventKind::End => PastEvent::Flow(FlowEvent::Ended(self.ended()?)),
            EventKind::Rto => PastEvent::Flow(FlowEvent::Rto(self.timer()?)),
            EventKind::Reap => self.reaped()?,
            EventKind::Run => PastEvent::Run(self.run()?),
        };
        let told = (*kind != EventKind::Run).then(|| Told {
            flow_id: self.flow_id,
            start: time(self.start_us),
        });
        let past = Past {
            mark: Mark {
                number: self.seq,
                time: time(self.time_us),
            },
            identity: Arc::new(Identity {
                host: self.host.clone(),
                instance: self.instance.clone(),
                seed: 0,
            }),
            event,
            known_as: self.known_as(),
        };
        Some((past, told))
    }

    fn flow(&self) -> Option<Flow> {
        let known =
            |names: &[&'static str], name: &str| names.iter().copied().find(|known| *known == name);
        Some(Flow {
            proto: known(PROTOCOLS, &self.proto)?,
            src: socket(self.src, self.sport),
            dst: socket(self.dst, self.dport),
            state: known(&STATES, &self.state)?,
            rule: 0,
            vlans: [self.vlan, self.inner_vlan],
            zone: 0,
            // With one, lines for people name the interface.
            place: u32::from(!self.iface.is_empty()),
            is_outgoing: self.direction == "out",
            stalled: self.stalled,
            replied: true,
            birth: Birth {
                key: FlowKey::NONE,
                created: 0,
                generation: 0,
            },
        })
    }

    fn known_as(&self) -> KnownAs {
        let owner = Owner {
            pid: (self.owner_pid != 0).then_some(self.owner_pid),
            command: text(&self.owner_command),
            cgroup: text(&self.owner_cgroup),
            user: text(&self.owner_user),
        };
        let is_translated = !(self.nat_src.is_unspecified() && self.nat_dst.is_unspecified());
        KnownAs {
            rule: text(&self.rule),
            iface: text(&self.iface),
            zone: self.zone,
            nat: is_translated.then(|| Translation {
                src: socket(self.nat_src, self.nat_sport),
                dst: socket(self.nat_dst, self.nat_dport),
            }),
            owner: (owner != Owner::default()).then(|| Arc::new(owner)),
        }
    }

    /// Time from the flow's first packet to the event.
    fn age(&self) -> Duration {
        let micros = self.time_us.saturating_sub(self.start_us);
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    }

    fn updated(&self) -> Option<Updated> {
        let is_begin = self.event == EventKind::Begin.name();
        let account = account([
            (self.orig_packets, self.orig_bytes),
            (self.reply_packets, self.reply_bytes),
        ]);
        let deltas = account_of_interval(self);
        Some(Updated {
            flow: self.flow()?,
            picked_up: self.picked_up,
            age: match is_begin {
                true => self.age(),
                false => Duration::from_micros(self.age_us),
            },
            idle: Duration::from_micros(self.idle_us),
            account,
            pace: self.paces(),
            interval: self.interval_us.map(|micros| Interval {
                length: Duration::from_micros(micros),
                account: deltas,
            }),
        })
    }

    fn paces(&self) -> Option<[Pace; 2]> {
        let pace = |srtt, rto, retransmissions: Option<u64>| {
            let retransmissions = u32::try_from(retransmissions?).unwrap_or(u32::MAX);
            Some(Pace {
                srtt,
                rto,
                retransmissions,
            })
        };
        Some([
            pace(
                self.orig_rtt_us,
                self.orig_rto_us,
                self.orig_retransmissions,
            )?,
            pace(
                self.reply_rtt_us,
                self.reply_rto_us,
                self.reply_retransmissions,
            )?,
        ])
    }

    fn ended(&self) -> Option<Ended> {
        Some(Ended {
            last: self.updated()?,
            reason: Reason::ALL
                .into_iter()
                .find(|it| it.name() == self.reason)?,
        })
    }

    fn timer(&self) -> Option<Rto> {
        Some(Rto {
            flow: self.flow()?,
            age: self.age(),
            orig: self.sender == "orig",
            outstanding: self.outstanding,
            backoff: self.backoff,
            pace: Pace {
                srtt: self.rtt_us,
                rto: self.rto_us,
                retransmissions: self.retransmissions,
            },
        })
    }

    fn reaped(&self) -> Option<PastEvent> {
        let end = Mark {
            number: self.end_seq,
            time: time(self.start_us) + Duration::from_micros(self.age_us),
        };
        let reaped = Reaped {
            event: Event::new_zeroed(),
            action: Action::from_name(&self.action)?,
            outcome: *Outcome::ALL.iter().find(|it| it.name() == self.outcome)?,
            error: text(&self.error),
        };
        Some(PastEvent::Reaped(end, self.ended()?, Box::new(reaped)))
    }

    fn run(&self) -> Option<RunEvent> {
        let hook = |name: &String| HOOKS.into_iter().find(|hook| hook == name);
        Some(RunEvent {
            what: *Happened::ALL.iter().find(|it| it.name() == self.what)?,
            iface: text(&self.iface),
            hook: text(&self.hook).as_ref().and_then(hook),
            flows: self.flows,
            ended: self.ended,
            lost: self.lost,
        })
    }
}

/// What both sides sent, if that was counted.
fn account(sides: [(Option<u64>, Option<u64>); 2]) -> Option<[Traffic; 2]> {
    let [orig, reply] = sides.map(|(packets, bytes)| {
        Some(Traffic {
            packets: packets?,
            bytes: bytes?,
        })
    });
    Some([orig?, reply?])
}

fn account_of_interval(row: &Row) -> Option<[Traffic; 2]> {
    account([
        (row.orig_packets_delta, row.orig_bytes_delta),
        (row.reply_packets_delta, row.reply_bytes_delta),
    ])
}

/// The text, if there is one.
fn text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn socket(address: Ipv6Addr, port: u16) -> SocketAddr {
    SocketAddr::new(canonical(address), port)
}

/// The address, IPv4 if it is mapped.
pub(super) fn canonical(address: Ipv6Addr) -> IpAddr {
    address.to_canonical()
}

/// The time of so many microseconds since 1970.
pub(super) fn time(micros: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
