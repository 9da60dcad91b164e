//! What the body of a record holds, and how it is written and read.
//!
//! ```text
//! flow     an `Event`
//! rto      an `RtoExpired`, then zeros
//! reaped   the first 80 bytes of the flow's `Event`; number of this event 8, time of the end 8
//!          (microseconds since 1970), action 1 and outcome 1 (their indexes), what failed 86
//! nat      before an event of that flow: addresses of the initiator and of the responder on the
//!          other side 32, their ports 4, zeros
//! owner    before an event of that flow: process 4 (0: unknown), lengths of command, user and
//!          cgroup 3, zero 1, then these texts
//! run      number of this event 8, what happened 1 and the hook 1 (their indexes), zeros 6;
//!          flows 8, ended 8, lost 8 (all ones: not told); the interface 144
//! ```

use std::{
    mem::offset_of,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use twheel_common::{
    event::{Event, Record, RtoExpired},
    point::Point,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes, transmute};

use super::format::{BODY, FLOW, REAPED, RTO, RUN, u64_at};
use crate::{
    action::{Action, Outcome, Reaped},
    model::{Happened, Mark, RunEvent, Translation},
    owner::Owner,
};

/// A record's body.
pub(super) type Body = [u8; BODY];

/// What the running twheel itself reports, for the history.
#[derive(Clone, Debug)]
pub enum Own {
    /// An action on an expired flow, and when the flow ended.
    Reaped(Box<Reaped>, SystemTime),
    /// What the run tells of itself.
    Run(RunEvent),
}

/// An event as it is in a record.
pub(super) enum Stored {
    Ring(Record),
    Reaped(Mark, Reaped),
    Run(RunEvent),
}

/// Where what is told of an action begins: behind what the event of the flow's end has of the flow.
const DEED: usize = offset_of!(Event, account);
const ERROR: usize = DEED + 18;
/// The hooks, by their index.
pub(crate) const HOOKS: [&str; 3] = ["xdp", "tcx", "clsact"];
const NO_HOOK: u8 = u8::MAX;
const IFACE: usize = 40;

/// Microseconds since 1970.
pub(super) fn since_1970(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}

/// The time of day, from microseconds since 1970.
pub(super) fn time(micros: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros)
}

/// What names belong to a flow: its rule, where its initiator's packets are counted, its zone.
pub(super) type Known = (u16, Point, u8);

/// What names belong to the flow of an event.
pub(super) fn known(event: &Event) -> Known {
    (event.rule, event.point, event.key.zone())
}

/// What names belong to the flow of a record of the ring.
pub(super) fn known_in(record: &Record) -> Known {
    match record {
        Record::Begun(event) | Record::Updated(event) | Record::Ended(event) => known(event),
        Record::Rto(event) => (event.rule, event.point, event.key.zone()),
    }
}

/// The kind and the body of a record of the ring.
pub(super) fn of_ring(record: &Record) -> (u32, Body) {
    match record {
        Record::Begun(event) | Record::Updated(event) | Record::Ended(event) => {
            (FLOW, transmute!(*event))
        }
        Record::Rto(event) => {
            const { assert!(size_of::<RtoExpired>() <= BODY) };
            let mut body = [0; BODY];
            body[..size_of::<RtoExpired>()].copy_from_slice(event.as_bytes());
            (RTO, body)
        }
    }
}

/// A record of a flow's translation.
pub(super) fn of_nat(nat: &Translation) -> Body {
    let mut body = [0; BODY];
    for (side, end) in [nat.src, nat.dst].into_iter().enumerate() {
        let address = match end.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        body[16 * side..][..16].copy_from_slice(&address.octets());
        body[32 + 2 * side..][..2].copy_from_slice(&end.port().to_ne_bytes());
    }
    body
}

/// The translation that such a record holds.
pub(super) fn nat(body: &[u8]) -> Translation {
    let end = |side: usize| {
        let mut address = [0; 16];
        address.copy_from_slice(&body[16 * side..][..16]);
        let port = [body[32 + 2 * side], body[33 + 2 * side]];
        let address = Ipv6Addr::from(address).to_canonical();
        SocketAddr::new(address, u16::from_ne_bytes(port))
    };
    Translation {
        src: end(0),
        dst: end(1),
    }
}

/// A record of the owner of a flow's socket. What does not fit of the texts is cut off.
pub(super) fn of_owner(owner: &Owner) -> Body {
    let mut body = [0; BODY];
    body[..4].copy_from_slice(&owner.pid.unwrap_or(0).to_ne_bytes());
    let mut at = TEXTS;
    let texts = [&owner.command, &owner.user, &owner.cgroup];
    for (number, text) in texts.into_iter().enumerate() {
        // The longest comes last, and gets what is left.
        let room = if number < 2 { 32 } else { BODY - at };
        let text = cut(text.as_deref().unwrap_or_default(), room);
        body[at..][..text.len()].copy_from_slice(text);
        body[4 + number] = text.len() as u8;
        at += text.len();
    }
    body
}

/// Where the texts of an owner begin.
const TEXTS: usize = 8;

/// The owner that such a record holds.
pub(super) fn owner(body: &[u8]) -> Owner {
    let mut rest = &body[TEXTS..];
    let mut next = |length: u8| {
        let (text, others) = rest.split_at(usize::from(length).min(rest.len()));
        rest = others;
        (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
    };
    let [command, user, cgroup] = [4, 5, 6].map(|at| next(body[at]));
    let pid = u32::from_ne_bytes([body[0], body[1], body[2], body[3]]);
    Owner {
        pid: (pid != 0).then_some(pid),
        command,
        cgroup,
        user,
    }
}

/// The kind and the body of a record of an event with this number.
pub(super) fn of_own(own: &Own, number: u64) -> (u32, Body) {
    let mut body = [0; BODY];
    let mut put = |at: usize, bytes: &[u8]| body[at..][..bytes.len()].copy_from_slice(bytes);
    match own {
        Own::Reaped(reaped, ended) => {
            put(0, &reaped.event.as_bytes()[..DEED]);
            put(DEED, &number.to_ne_bytes());
            put(DEED + 8, &since_1970(*ended).to_ne_bytes());
            let outcome = Outcome::ALL.iter().position(|it| *it == reaped.outcome);
            put(DEED + 16, &[reaped.action.index() as u8]);
            put(DEED + 17, &[outcome.map_or(u8::MAX, |index| index as u8)]);
            let error = reaped.error.as_deref().unwrap_or_default();
            put(ERROR, cut(error, BODY - ERROR));
            (REAPED, body)
        }
        Own::Run(event) => {
            let what = Happened::ALL.iter().position(|it| *it == event.what);
            let hook = HOOKS.iter().position(|it| Some(*it) == event.hook);
            put(0, &number.to_ne_bytes());
            put(8, &[what.map_or(u8::MAX, |index| index as u8)]);
            put(9, &[hook.map_or(NO_HOOK, |index| index as u8)]);
            let numbers = [event.flows, event.ended, event.lost];
            for (place, number) in numbers.into_iter().enumerate() {
                put(16 + 8 * place, &number.unwrap_or(u64::MAX).to_ne_bytes());
            }
            let iface = event.iface.as_deref().unwrap_or_default();
            put(IFACE, cut(iface, BODY - IFACE));
            (RUN, body)
        }
    }
}

/// What a record holds; `None` for a kind that holds no event, or what no twheel writes.
pub(super) fn read(kind: u32, body: &[u8]) -> Option<(u64, Stored)> {
    let number = |at: usize| u64_at(body, at);
    match kind {
        FLOW => {
            let event = Event::read_from_bytes(body).ok()?;
            Some((event.number, Stored::Ring(event.into())))
        }
        RTO => {
            let (event, _) = RtoExpired::read_from_prefix(body).ok()?;
            Some((event.number, Stored::Ring(Record::Rto(event))))
        }
        REAPED => {
            let mut event = Event::new_zeroed();
            event.as_mut_bytes()[..DEED].copy_from_slice(&body[..DEED]);
            let end = Mark {
                number: event.number,
                time: time(number(DEED + 8)),
            };
            let reaped = Reaped {
                event,
                action: *Action::ALL.get(usize::from(body[DEED + 16]))?,
                outcome: *Outcome::ALL.get(usize::from(body[DEED + 17]))?,
                error: text(&body[ERROR..]),
            };
            Some((number(DEED), Stored::Reaped(end, reaped)))
        }
        RUN => {
            let told = |place: usize| Some(number(16 + 8 * place)).filter(|it| *it != u64::MAX);
            let event = RunEvent {
                what: *Happened::ALL.get(usize::from(body[8]))?,
                hook: HOOKS.get(usize::from(body[9])).copied(),
                iface: text(&body[IFACE..]),
                flows: told(0),
                ended: told(1),
                lost: told(2),
            };
            Some((number(0), Stored::Run(event)))
        }
        _ => None,
    }
}

/// The beginning of a text, of whole characters, that fits.
fn cut(text: &str, room: usize) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(room)]
}

/// The text before the zeros; `None` if it is empty.
fn text(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\0');
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_of_an_action_is_read() {
        let mut event = Event::new_zeroed();
        (event.number, event.age, event.reason) = (7, 8, 1);
        let end = UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001);
        for (action, outcome, error) in [
            (Action::EnforceDrop, Outcome::Done, None),
            (Action::Conntrack, Outcome::Would, Some("é".repeat(60))),
        ] {
            let reaped = Reaped {
                event,
                action,
                outcome,
                error: error.clone(),
            };
            let (kind, body) = of_own(&Own::Reaped(Box::new(reaped), end), 9);
            let Some((9, Stored::Reaped(mark, read))) = read(kind, &body) else {
                panic!("{kind}");
            };
            assert_eq!((mark.number, mark.time), (7, end));
            assert_eq!((read.action, read.outcome), (action, outcome));
            assert_eq!((read.event.age, read.event.reason), (8, 1));
            // What does not fit is cut off, between characters.
            assert_eq!(read.error, error.map(|_| "é".repeat((BODY - ERROR) / 2)));
        }
    }

    #[test]
    fn what_a_run_tells_of_itself_is_read_as_it_was_written() {
        let attached = RunEvent {
            hook: Some("tcx"),
            ..RunEvent::at(Happened::Attached, "blue/eth0")
        };
        let summary = RunEvent {
            flows: Some(0),
            ended: Some(5),
            lost: Some(u64::MAX - 1),
            ..RunEvent::new(Happened::Summary)
        };
        for event in [attached, summary, RunEvent::new(Happened::Paused)] {
            let (kind, body) = of_own(&Own::Run(event.clone()), 3);
            let Some((3, Stored::Run(read))) = read(kind, &body) else {
                panic!("{kind}");
            };
            assert_eq!(read, event);
        }
    }

    #[test]
    fn a_translation_is_read_as_it_was_written() {
        for (src, dst) in [
            ("10.0.0.1:1", "192.0.2.1:65535"),
            ("[2001:db8::1]:7", "[fe80::9]:0"),
        ] {
            let written = Translation {
                src: src.parse().unwrap(),
                dst: dst.parse().unwrap(),
            };
            assert_eq!(nat(&of_nat(&written)), written);
        }
    }

    #[test]
    fn an_owner_is_read_as_it_was_written() {
        let some = |text: &str| Some(text.to_owned());
        let written = Owner {
            pid: Some(812),
            command: some("nginx"),
            cgroup: some("/system.slice/nginx.service"),
            user: some("www-data"),
        };
        assert_eq!(owner(&of_owner(&written)), written);
        assert_eq!(owner(&of_owner(&Owner::default())), Owner::default());
        let long = Owner {
            cgroup: Some("é".repeat(300)),
            ..written.clone()
        };
        let read = owner(&of_owner(&long));
        assert_eq!(read.user, written.user);
        let room = BODY - TEXTS - "nginxwww-data".len();
        assert_eq!(read.cgroup, Some("é".repeat(room / 2)));
        // What no twheel writes does no harm.
        owner(&[0xff; BODY]);
    }

    #[test]
    fn what_no_twheel_writes_is_nothing() {
        for kind in [REAPED, RUN] {
            assert!(read(kind, &[0xff; BODY]).is_none(), "{kind}");
        }
        assert!(read(99, &[0; BODY]).is_none());
    }
}
