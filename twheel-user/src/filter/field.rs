//! The fields that a filter can use.

use std::{net::IpAddr, time::Duration};

use twheel_common::named;

use super::{subject::Subject, value::FlowValue};

/// Which fields are known where a filter is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Knowable {
    /// The flows have ended; otherwise they are in the table.
    pub ended: bool,
    /// Packets and bytes are counted.
    pub accounting: bool,
    /// The instance tracks retransmission timers.
    pub rto: bool,
}

/// The type of a field's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// True or false.
    Flag,
    /// One of these names; if the list is empty, any name.
    Name(&'static [&'static str]),
    /// A number up to this one.
    Number(u64),
    /// A length of time.
    Duration,
    /// An address or a network.
    Address,
}

macro_rules! fields {
    ($($(#[doc = $meaning:literal])+ $variant:ident = $name:literal: $kind:expr,)+) => {
        named! {
            /// A field.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Field {
                $($(#[doc = $meaning])+ $variant = $name,)+
            }
        }

        impl Field {
            /// The type of its values.
            pub const fn kind(self) -> Type {
                match self {
                    $(Self::$variant => $kind,)+
                }
            }
        }
    };
}

/// Names of protocols.
pub const PROTOCOLS: &[&str] = &["tcp", "udp", "icmp", "icmpv6"];
/// Names of states.
pub const STATES: [&str; 13] = [
    "syn_sent",
    "syn_recv",
    "established",
    "unreplied",
    "fin_wait",
    "close_wait",
    "last_ack",
    "time_wait",
    "close",
    "syn_sent2",
    "udp",
    "udp_stream",
    "icmp",
];
/// Names of reasons for an end.
pub const REASONS: [&str; 7] = [
    "idle",
    "closed",
    "reset",
    "superseded",
    "evicted",
    "deleted",
    "flushed",
];
const DIRECTIONS: &[&str] = &["in", "out"];
const PORT: Type = Type::Number(u16::MAX as u64);
const COUNT: Type = Type::Number(u64::MAX);

fields! {
    /// protocol: tcp, udp, icmp, icmpv6
    Proto = "proto": Type::Name(PROTOCOLS),
    /// state, by conntrack's name
    State = "state": Type::Name(&STATES),
    /// address of the initiator
    Src = "src": Type::Address,
    /// address of the responder
    Dst = "dst": Type::Address,
    /// address of the initiator or the responder
    Host = "host": Type::Address,
    /// port of the initiator
    Sport = "sport": PORT,
    /// port of the responder
    Dport = "dport": PORT,
    /// port of the initiator or the responder
    Port = "port": PORT,
    /// policy rule that the flow matches
    Rule = "rule": Type::Name(&[]),
    /// interface where the initiator's packets are counted
    Iface = "iface": Type::Name(&[]),
    /// direction of the initiator's packets at that interface: in, out
    Direction = "direction": Type::Name(DIRECTIONS),
    /// VLAN of the flow: the outer or the inner one
    Vlan = "vlan": Type::Number(4094),
    /// zone of the interface; 0 if it has none
    Zone = "zone": PORT,
    /// time since the latest packet
    Idle = "idle": Type::Duration,
    /// time since the first packet
    Age = "age": Type::Duration,
    /// the beginning of the flow was not seen
    PickedUp = "picked_up": Type::Flag,
    /// time until the flow expires
    Expires = "expires": Type::Duration,
    /// CPU whose wheel holds the flow
    Cpu = "cpu": COUNT,
    /// why the flow ended
    Reason = "reason": Type::Name(&REASONS),
    /// time since the flow ended
    Ended = "ended": Type::Duration,
    /// packets of both sides together
    Packets = "packets": COUNT,
    /// bytes of both sides together
    Bytes = "bytes": COUNT,
    /// round-trip time of either side
    Rtt = "rtt": Type::Duration,
    /// retransmitted segments of both sides together
    Retransmissions = "retransmissions": COUNT,
    /// the retransmissions of one side are not answered
    Stalled = "stalled": Type::Flag,
}

impl Field {
    /// The field of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|field| field.name() == name)
    }

    /// Why this field is not known here; `None` if it is known.
    pub fn unknown(self, known: Knowable) -> Option<&'static str> {
        match self {
            Self::Reason | Self::Ended if !known.ended => {
                Some("is known only of ended flows: use `twheel expired`")
            }
            Self::Expires | Self::Cpu if known.ended => {
                Some("is known only of flows in the table: use `twheel flows`")
            }
            Self::Packets | Self::Bytes if !known.accounting => {
                Some("is not counted: start twheel with `twheel run --accounting`")
            }
            Self::Rtt | Self::Retransmissions | Self::Stalled if !known.rto => {
                Some("is not measured: start twheel with `twheel run --rto on`")
            }
            _ => None,
        }
    }

    /// Whether a flag is set.
    pub(super) fn is(self, of: &Subject<'_>) -> bool {
        match self {
            Self::PickedUp => of.picked_up,
            Self::Stalled => of.flow.stalled,
            _ => false,
        }
    }

    /// Whether `is_right` is true of any value of this field. An unknown field has no values.
    pub(super) fn any<'a>(
        self,
        of: &Subject<'a>,
        is_right: impl Fn(FlowValue<'a>) -> bool,
    ) -> bool {
        let name = |name| is_right(FlowValue::Name(name));
        let number = |number| is_right(FlowValue::Number(number));
        let duration = |duration| is_right(FlowValue::Duration(duration));
        let address = |address: IpAddr| is_right(FlowValue::Address(address));
        let sum = |counts: Option<[u64; 2]>| counts.is_some_and(|[a, b]| number(a + b));
        let (src, dst) = (of.flow.src, of.flow.dst);
        match self {
            Self::Proto => name(of.flow.proto),
            Self::State => name(of.flow.state),
            Self::Src => address(src.ip()),
            Self::Dst => address(dst.ip()),
            Self::Host => address(src.ip()) || address(dst.ip()),
            Self::Sport => number(src.port().into()),
            Self::Dport => number(dst.port().into()),
            Self::Port => number(src.port().into()) || number(dst.port().into()),
            Self::Rule => of.named.rule.is_some_and(name),
            Self::Iface => of.named.iface.is_some_and(name),
            Self::Direction => name(of.flow.direction()),
            Self::Vlan => of
                .flow
                .vlans
                .iter()
                .any(|vlan| *vlan != 0 && number((*vlan).into())),
            Self::Zone => number(of.named.zone.into()),
            Self::Idle => duration(of.idle),
            Self::Age => duration(of.age),
            Self::Expires => of.expires.is_some_and(duration),
            Self::Ended => of.ended.is_some_and(duration),
            Self::Cpu => of.cpu.is_some_and(|cpu| number(cpu.into())),
            Self::Reason => of.reason.is_some_and(|reason| name(reason.name())),
            Self::Packets => sum(of.account.map(|sides| sides.map(|side| side.packets))),
            Self::Bytes => sum(of.account.map(|sides| sides.map(|side| side.bytes))),
            Self::Rtt => of.timing.is_some_and(|sides| {
                let mut sampled = sides.iter().filter(|side| side.srtt > 0);
                sampled.any(|side| duration(Duration::from_micros(side.srtt.into())))
            }),
            Self::Retransmissions => sum(of
                .timing
                .map(|sides| sides.map(|side| side.retransmissions.into()))),
            Self::PickedUp | Self::Stalled => false,
        }
    }
}
