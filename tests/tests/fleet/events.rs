//! Random events of all kinds, made as a running twheel has them, and printed as it prints them.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use twheel::{
    action::{Action, Outcome, Reaped},
    filter::STATES,
    history::{Past, PastEvent},
    identity::Identity,
    model::{
        Birth, Ended, Flow, FlowEvent, Happened, Interval, KnownAs, Mark, Rto, RunEvent,
        Translation, Updated,
    },
    output::json::Json,
    owner::Owner,
};
use twheel_common::{
    event::{Event, Pace, Reason},
    flow::{FlowKey, Traffic},
};
use twheel_fuzz::make::Random;
use zerocopy::FromZeros;

/// Addresses of both families, and of the borders of networks.
pub const ADDRESSES: [&str; 14] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.255.255.255",
    "11.0.0.0",
    "192.0.2.7",
    "0.0.0.0",
    "255.255.255.255",
    "2001:db8::1",
    "2001:db8:0:ffff:ffff:ffff:ffff:ffff",
    "2001:db8:1::",
    "fe80::1",
    "::",
    "::fffe:ffff:ffff",
    "::1:0:0:0",
];
/// Ports.
pub const PORTS: [u16; 10] = [0, 1, 22, 53, 80, 443, 5432, 40_000, 40_001, 65_535];
/// Names of rules and interfaces: texts that SQL, JSON or a parameter could take for something else.
pub const NAMES: [&str; 12] = [
    "web",
    "Web",
    "Ünïcode",
    "it's",
    "back\\slash",
    "\\N",
    "' OR 1=1 --",
    "{p0:String}",
    "%_",
    "tab\there",
    "`tick` \\' \\",
    "line\nbreak",
];
/// Durations in microseconds.
pub const MICROS: [u64; 9] = [
    0,
    1,
    999,
    1_000,
    999_999,
    1_000_000,
    30_000_000,
    30_000_001,
    432_000_000_000,
];
/// Numbers of packets and bytes.
pub const COUNTS: [u64; 7] = [0, 1, 2, 1_000, 1_500, 1 << 30, 1 << 40];

/// The instances that report.
pub fn identities() -> Vec<Arc<Identity>> {
    let identity = |host: &str, instance: &str| {
        Arc::new(Identity {
            host: host.to_owned(),
            instance: instance.to_owned(),
            seed: 7,
        })
    };
    vec![
        identity("gw1", "eth0@host.1795604166249"),
        identity("gw1", "eth1@host.1795604166250"),
        identity("gw2", "eth0@host.1795604166249"),
        identity("it's \\N", "ens3@blue.5"),
    ]
}

/// Makes events. Their numbers are unique over all instances.
pub struct Maker {
    /// Where all is drawn from.
    pub random: Random,
    identities: Vec<Arc<Identity>>,
    next: u64,
}

impl Maker {
    /// Of this seed.
    pub fn new(seed: u64) -> Self {
        Self {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            identities: identities(),
            next: 0,
        }
    }

    fn maybe<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.random.below(3) > 0).then(|| make(self))
    }

    fn number(&mut self, bound: usize) -> u64 {
        self.random.below(bound) as u64
    }

    fn duration(&mut self) -> Duration {
        let micros = match self.random.once_in(3) {
            true => self.number(60_000_000),
            false => self.random.one_of(&MICROS),
        };
        Duration::from_micros(micros)
    }

    fn address(&mut self) -> IpAddr {
        self.random.one_of(&ADDRESSES).parse().expect("an address")
    }

    fn socket(&mut self) -> SocketAddr {
        let port = self.random.one_of(&PORTS);
        SocketAddr::new(self.address(), port)
    }

    fn traffic(&mut self) -> [Traffic; 2] {
        [(); 2].map(|()| Traffic {
            packets: self.random.one_of(&COUNTS),
            bytes: self.random.one_of(&COUNTS),
        })
    }

    fn pace(&mut self) -> Pace {
        Pace {
            srtt: self.random.one_of(&[0, 1, 999, 25_000, 25_001]),
            rto: self.random.one_of(&[0, 200_000, 1_000_000]),
            retransmissions: self.random.one_of(&[0, 1, 3, 1_000]),
        }
    }

    fn flow(&mut self, has_iface: bool) -> Flow {
        let key = FlowKey::from_parts([self.next, 2, 3, 4], 5);
        let vlans = [[0, 0], [1, 0], [10, 20], [4094, 4095]];
        Flow {
            proto: self.random.one_of(&["tcp", "tcp", "udp", "icmp", "icmpv6"]),
            src: self.socket(),
            dst: self.socket(),
            state: match self.random.once_in(3) {
                true => "established",
                false => self.random.one_of(&STATES),
            },
            rule: 0,
            vlans: self.random.one_of(&vlans),
            zone: 0,
            place: u32::from(has_iface),
            is_outgoing: self.random.once_in(2),
            stalled: false,
            replied: true,
            birth: Birth {
                key,
                created: 0,
                generation: 0,
            },
        }
    }

    fn updated(&mut self, has_iface: bool) -> Updated {
        let mut flow = self.flow(has_iface);
        let account = self.maybe(Self::traffic);
        let pace = self.maybe(|it| [it.pace(), it.pace()]);
        flow.stalled = pace.is_some() && self.random.once_in(2);
        Updated {
            flow,
            picked_up: self.random.once_in(3),
            age: self.duration(),
            idle: self.duration(),
            account,
            pace,
            interval: self.maybe(|it| Interval {
                length: it.duration(),
                account: account.map(|_| it.traffic()),
            }),
        }
    }

    /// An end with nothing but what lines about actions tell of it.
    fn bare(&mut self, has_iface: bool) -> Ended {
        let mut ended = self.ended(has_iface);
        let Updated {
            flow, age, idle, ..
        } = ended.last;
        ended.last = Updated {
            flow: Flow {
                stalled: false,
                ..flow
            },
            picked_up: false,
            age,
            idle,
            account: None,
            pace: None,
            interval: None,
        };
        ended
    }

    fn ended(&mut self, has_iface: bool) -> Ended {
        Ended {
            last: self.updated(has_iface),
            reason: match self.random.once_in(3) {
                true => Reason::Idle,
                false => self.random.one_of(&Reason::ALL),
            },
        }
    }

    fn owner(&mut self) -> Owner {
        let text = |it: &mut Self| {
            it.maybe(|it| {
                it.random
                    .one_of(&["nginx", "post`gres", "/a b\\c"])
                    .to_owned()
            })
        };
        Owner {
            pid: self.maybe(|it| 1 + it.number(5) as u32),
            command: text(self),
            cgroup: self.maybe(|it| it.random.one_of(&["/system.slice/a", "/b"]).to_owned()),
            user: text(self),
        }
    }

    fn known_as(&mut self, iface: Option<String>) -> KnownAs {
        KnownAs {
            rule: self.maybe(|it| it.random.one_of(&NAMES).to_owned()),
            iface,
            zone: self.random.one_of(&[0, 0, 7, 65_535]),
            nat: self.maybe(|it| Translation {
                src: it.socket(),
                dst: SocketAddr::new("192.0.2.99".parse().expect("an address"), 1),
            }),
            owner: self
                .maybe(Self::owner)
                .filter(|owner| *owner != Owner::default())
                .map(Arc::new),
        }
    }

    fn run(&mut self, iface: Option<String>) -> RunEvent {
        let count = |it: &mut Self| it.maybe(|it| it.random.one_of(&COUNTS));
        RunEvent {
            what: self.random.one_of(Happened::ALL),
            iface,
            hook: self.maybe(|it| it.random.one_of(&["xdp", "tcx", "clsact"])),
            flows: count(self),
            ended: count(self),
            lost: count(self),
        }
    }

    /// An event of this time. Most are ends.
    pub fn event(&mut self, time: SystemTime) -> Past {
        self.next += 1;
        let iface = self.maybe(|it| it.random.one_of(&NAMES).to_owned());
        let has_iface = iface.is_some();
        let time = UNIX_EPOCH + Duration::from_micros(micros(time));
        let event = match self.random.below(12) {
            0 => {
                let begun = self.updated(has_iface);
                let stalled = false;
                PastEvent::Flow(FlowEvent::Begun(Updated {
                    flow: Flow {
                        stalled,
                        ..begun.flow
                    },
                    ..begun
                }))
            }
            1 => PastEvent::Flow(FlowEvent::Updated(self.updated(has_iface))),
            2 => PastEvent::Flow(FlowEvent::Rto(Rto {
                flow: self.flow(has_iface),
                age: self.duration(),
                orig: self.random.once_in(2),
                outstanding: self.random.one_of(&[0, 1, u32::MAX]),
                backoff: self.number(5) as u32,
                pace: self.pace(),
            })),
            3 => {
                let end = Mark {
                    number: self.next + 1_000_000,
                    time: time - self.duration(),
                };
                let reaped = Reaped {
                    event: Event::new_zeroed(),
                    action: self.random.one_of(&Action::ALL),
                    outcome: self.random.one_of(Outcome::ALL),
                    error: self.maybe(|it| it.random.one_of(&NAMES).to_owned()),
                };
                PastEvent::Reaped(end, self.bare(has_iface), Box::new(reaped))
            }
            4 => PastEvent::Run(self.run(iface.clone())),
            _ => PastEvent::Flow(FlowEvent::Ended(self.ended(has_iface))),
        };
        let identity = self.random.below(self.identities.len());
        // A line about a timer, an action or the run does not tell them.
        let mut known_as = self.known_as(iface);
        let (has_owner, has_nat) = match &event {
            PastEvent::Flow(FlowEvent::Begun(_)) => (true, false),
            PastEvent::Flow(FlowEvent::Updated(_) | FlowEvent::Ended(_)) => (true, true),
            _ => (false, false),
        };
        known_as.owner = known_as.owner.filter(|_| has_owner);
        known_as.nat = known_as.nat.filter(|_| has_nat);
        Past {
            mark: Mark {
                number: self.next,
                time,
            },
            identity: self.identities[identity].clone(),
            known_as,
            event,
        }
    }
}

/// Microseconds since 1970.
pub fn micros(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).expect("after 1970");
    since.as_micros() as u64
}

/// Its line of JSON, as its host prints it, with the end of line.
pub fn line(past: &Past) -> String {
    let mut text = Vec::new();
    let mut json = Json::new(past.identity.clone());
    past.write(&mut json, &mut text).expect("memory");
    String::from_utf8(text).expect("JSON")
}

/// The end of a flow, if it is one.
pub fn end(past: &Past) -> Option<&Ended> {
    match &past.event {
        PastEvent::Flow(FlowEvent::Ended(ended)) => Some(ended),
        _ => None,
    }
}
