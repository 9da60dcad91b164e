//! Packets that are forged in the name of a registered connection.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use twheel_client::{
    Outcome,
    protocol::{Event, life},
};
use twheel_tests::{
    forge::{Forger, Tap},
    netns::PATIENCE,
    pair::Connection,
};

use crate::{DATA, LATE, Lab, millis, raw::Raw, start};

/// A segment that an attacker sends, who knows the endpoints.
struct Forged {
    what: &'static str,
    flags: &'static str,
    /// From the next sequence number of the client.
    ahead: u32,
    /// From what the client has acknowledged.
    acked: u32,
    data: usize,
}

const fn forged(
    what: &'static str,
    flags: &'static str,
    ahead: u32,
    acked: u32,
    data: usize,
) -> Forged {
    Forged {
        what,
        flags,
        ahead,
        acked,
        data,
    }
}

const FAR: u32 = 1 << 30;
const BACK: u32 = 0_u32.wrapping_sub(1);

/// None of them has both numbers right.
const WRONG: [Forged; 18] = [
    forged("data far ahead", "a", FAR, 0, 100),
    forged("data ahead within a window", "a", 5_000, 0, 100),
    forged("data far behind", "a", 0_u32.wrapping_sub(FAR), 0, 100),
    forged("data that was sent before", "a", BACK, 0, 1),
    forged("data, a wrong acknowledgement", "a", 0, FAR, 100),
    forged("data without any", "", FAR, 0, 100),
    forged("an acknowledgement", "a", FAR, 0, 0),
    forged("an old acknowledgement", "a", 0, BACK, 0),
    forged("an acknowledgement of what was not sent", "a", FAR, 100, 0),
    forged("a keepalive probe", "a", BACK, 0, 0),
    forged("a keepalive probe with a byte", "a", BACK, 0, 1),
    forged("a reset far away", "r", FAR, 0, 0),
    forged("a reset far away that acknowledges", "ra", FAR, FAR, 0),
    forged("a FIN far away", "fa", FAR, 0, 0),
    forged("a FIN with data far away", "fa", FAR, 0, 100),
    forged("a SYN", "s", FAR, 0, 0),
    forged("a SYN at the number", "s", 0, 0, 0),
    forged("a SYN/ACK", "sa", FAR, 0, 0),
];

/// They lie near the number: of 8,192 guesses one does.
const NEAR: [Forged; 4] = [
    forged("a reset", "r", 1_000, 0, 0),
    forged("a reset that acknowledges", "ra", 1_000, 0, 0),
    forged("a FIN", "fa", 1_000, 0, 0),
    forged("an old FIN", "fa", 0_u32.wrapping_sub(1_000), 0, 0),
];

/// Sends forged segments of one kind.
struct Attack<'a> {
    forger: &'a Forger,
    ends: [SocketAddr; 2],
    /// The client's next sequence number, and what it has acknowledged.
    numbers: [u32; 2],
    forged: &'a Forged,
}

impl<'a> Attack<'a> {
    fn new(lab: &'a Attacked, connection: &Connection, forged: &'a Forged) -> Result<Self> {
        let client = connection.client.local_addr()?;
        let heard = lab.tap.heard(client)?;
        let last = heard.iter().rfind(|segment| segment.from_client);
        let last = last.context("the tap saw no segment of the client")?;
        Ok(Self {
            forger: &lab.forger,
            ends: [client, connection.server.local_addr()?],
            numbers: [last.end(), last.header.acknowledgment_number],
            forged,
        })
    }

    fn send(&self) -> Result<()> {
        let Forged {
            flags,
            ahead,
            acked,
            data,
            ..
        } = *self.forged;
        let has = |flag| flags.contains(flag);
        let [next, ack] = self.numbers;
        let header = TcpHeader {
            syn: has('s'),
            ack: has('a'),
            fin: has('f'),
            rst: has('r'),
            psh: data > 0,
            sequence_number: next.wrapping_add(ahead),
            acknowledgment_number: if has('a') { ack.wrapping_add(acked) } else { 0 },
            ..TcpHeader::default()
        };
        let [from, to] = self.ends;
        self.forger.send_data(from, to, header, &vec![b'x'; data])
    }
}

struct Attacked {
    lab: Lab,
    forger: Forger,
    tap: Tap,
}

impl Attacked {
    fn new(name: &str, more: &[&str]) -> Result<Self> {
        let lab = Lab::new(name, more)?;
        let (forger, tap) = (Forger::new(&lab.pair)?, Tap::new(&lab.pair)?);
        Ok(Self { lab, forger, tap })
    }

    /// A connection for each kind of segment, whose last data was heard.
    fn connections<'a>(&'a self, all: &'a [Forged]) -> Result<Vec<(Connection, Attack<'a>)>> {
        let connect = |(number, forged): (usize, &'a Forged)| {
            let connection = self.lab.connect(number)?;
            thread::sleep(millis(60));
            let attack = Attack::new(self, &connection, forged)?;
            Ok((connection, attack))
        };
        all.iter().enumerate().map(connect).collect()
    }
}

/// Registers each, and returns when.
fn register(
    raw: &Raw,
    all: &[(Connection, Attack<'_>)],
    timeout: u32,
    life: u8,
) -> Result<Instant> {
    let requests: Vec<_> = (0..all.len() as u64)
        .map(|tag| start(timeout, life, tag))
        .collect();
    let sockets: Vec<_> = all
        .iter()
        .map(|(it, _)| std::os::fd::AsFd::as_fd(&it.server))
        .collect();
    let begun = Instant::now();
    let replies = raw.ask(&requests, &sockets)?;
    ensure!(replies.iter().all(|it| it.error == 0), "{replies:?}");
    Ok(begun)
}

/// Events that came until then, and when they did.
fn events_until(
    raw: &Raw,
    until: Instant,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<Vec<(Event, Instant)>> {
    let mut all = Vec::new();
    while Instant::now() < until {
        meanwhile()?;
        while raw.is_ready(Duration::ZERO)? {
            let now = Instant::now();
            all.extend(raw.events()?.into_iter().map(|event| (event, now)));
        }
        thread::sleep(millis(5));
    }
    Ok(all)
}

#[test]
fn wrong_numbers_keep_no_idle_connection_alive_and_end_none() -> Result<()> {
    const TIMEOUT: u64 = 700;
    let attacked = Attacked::new("forged", &[])?;
    let raw = attacked.lab.raw()?;
    let mut all = attacked.connections(&WRONG)?;
    let begun = register(&raw, &all, TIMEOUT as u32, DATA)?;
    let replied = Instant::now();
    let events = events_until(&raw, begun + millis(2 * TIMEOUT), || {
        all.iter().try_for_each(|(_, attack)| attack.send())
    })?;
    let mut seen = vec![0; all.len()];
    for (event, at) in events {
        let what = WRONG[event.tag as usize].what;
        seen[event.tag as usize] += 1;
        ensure!(event.what == Outcome::Expired as u32, "{what}: {event:?}");
        ensure!(
            at - begun >= millis(TIMEOUT),
            "{what}: early: {:?}",
            at - begun
        );
        ensure!(
            at - replied <= millis(TIMEOUT) + LATE,
            "{what}: late: {:?}",
            at - replied
        );
    }
    for (seen, forged) in seen.iter().zip(&WRONG) {
        ensure!(*seen == 1, "{}: {seen} ends", forged.what);
    }
    // The connections live.
    for (connection, attack) in &mut all {
        connection.talk().context(attack.forged.what)?;
    }
    drop(all);
    drop(raw);
    attacked.lab.end()
}

#[test]
fn wrong_numbers_expire_no_connection_that_talks() -> Result<()> {
    const TIMEOUT: u64 = 500;
    let attacked = Attacked::new("talks", &[])?;
    let raw = attacked.lab.raw()?;
    let kinds = || WRONG.iter().chain(&NEAR);
    let mut all = attacked.connections(&WRONG)?;
    all.extend(attacked.connections(&NEAR)?);
    let begun = register(&raw, &all, TIMEOUT as u32, life::DATA_IN)?;
    let mut talked = begun;
    let mut longest = Duration::ZERO;
    let events = events_until(&raw, begun + millis(3 * TIMEOUT), || {
        all.iter().try_for_each(|(_, attack)| attack.send())?;
        if talked.elapsed() > millis(50) {
            longest = longest.max(talked.elapsed());
            talked = Instant::now();
            // Both sides, or a segment near the number stays in doubt.
            for (connection, attack) in &mut all {
                connection.talk().context(attack.forged.what)?;
            }
        }
        Ok(())
    })?;
    ensure!(
        longest < millis(TIMEOUT),
        "this machine was busy: {longest:?}"
    );
    for (event, at) in &events {
        let what = kinds().nth(event.tag as usize).map(|it| it.what);
        println!("{what:?}: {event:?} after {:?}", *at - begun);
    }
    ensure!(events.is_empty(), "{} ends", events.len());
    drop(all);
    drop(raw);
    attacked.lab.end()
}

/// The numbers of a reset or FIN are guessed, and the connection is idle: the kernel knows better.
#[test]
fn a_guessed_end_ends_no_idle_connection() -> Result<()> {
    const TIMEOUT: u64 = 1_500;
    // The flow leaves the table before its timeout has passed, or it does not.
    for timeouts in ["close=300ms,fin_wait=300ms", "close=60s,fin_wait=60s"] {
        let attacked = Attacked::new("near", &["--timeout", timeouts])?;
        let raw = attacked.lab.raw()?;
        let mut all = attacked.connections(&NEAR)?;
        let begun = register(&raw, &all, TIMEOUT as u32, DATA)?;
        all.iter().try_for_each(|(_, attack)| attack.send())?;
        let events = events_until(&raw, begun + millis(TIMEOUT) + LATE, || Ok(()))?;
        let mut seen = vec![0; all.len()];
        for (event, at) in events {
            let what = NEAR[event.tag as usize].what;
            println!("{timeouts}, {what}: {event:?} after {:?}", at - begun);
            seen[event.tag as usize] += 1;
            match Outcome::from_raw(event.what) {
                // The program keeps the timer.
                Some(Outcome::Unseen) => {}
                Some(Outcome::Expired) => ensure!(at - begun >= millis(TIMEOUT), "{what}: early"),
                _ => anyhow::bail!("{timeouts}, {what}: {event:?}"),
            }
        }
        ensure!(seen.iter().all(|it| *it == 1), "{timeouts}: {seen:?}");
        for (connection, attack) in &mut all {
            connection.talk().context(attack.forged.what)?;
        }
        drop(all);
        drop(raw);
        attacked.lab.end()?;
    }
    Ok(())
}

/// Under `ANY` the endpoints are enough.
#[test]
fn any_packet_keeps_what_lives_by_any_packet() -> Result<()> {
    const TIMEOUT: u64 = 400;
    let attacked = Attacked::new("any", &[])?;
    let raw = attacked.lab.raw()?;
    let all = attacked.connections(&WRONG)?;
    let begun = register(&raw, &all, TIMEOUT as u32, life::ANY)?;
    let events = events_until(&raw, begun + millis(3 * TIMEOUT), || {
        all.iter().try_for_each(|(_, attack)| attack.send())
    })?;
    for (event, at) in &events {
        println!(
            "{}: {:?}, idle {}",
            WRONG[event.tag as usize].what,
            *at - begun,
            event.idle
        );
    }
    let last = Instant::now();
    let rest = events_until(&raw, last + millis(TIMEOUT) + LATE, || Ok(()))?;
    for (event, _) in events.iter().chain(&rest) {
        ensure!(event.what == Outcome::Expired as u32, "{event:?}");
    }
    ensure!(
        events.len() + rest.len() == all.len(),
        "{} ends",
        events.len() + rest.len()
    );
    // Acknowledgements do it, with data or without, and the answers that a FIN gets. A SYN gets
    // some, too, but not always.
    for (tag, forged) in WRONG.iter().enumerate() {
        let kept = rest.iter().any(|(event, _)| event.tag == tag as u64);
        let keeps = ["a", "fa"].contains(&forged.flags);
        let what = forged.what;
        ensure!(
            kept == keeps || forged.flags.contains('s'),
            "{what}: {kept}"
        );
    }
    drop(all);
    drop(raw);
    attacked.lab.end()
}

/// As documented: who hits the numbers puts them ahead, and data of the real end does not count until
/// it has caught up. The host does not take the segment: its acknowledgement is too old for it (RFC
/// 5961, section 5.2).
#[test]
fn right_numbers_hide_the_data_that_follows() -> Result<()> {
    const TIMEOUT: u64 = 400;
    const AHEAD: [Forged; 1] = [forged("data", "a", 0, 0_u32.wrapping_sub(1 << 20), 1_000)];
    let attacked = Attacked::new("ahead", &[])?;
    let raw = attacked.lab.raw()?;
    let mut all = attacked.connections(&AHEAD)?;
    let begun = register(&raw, &all, TIMEOUT as u32, life::DATA_IN)?;
    all.iter().try_for_each(|(_, attack)| attack.send())?;
    let events = events_until(&raw, begun + millis(TIMEOUT) + LATE, || {
        all.iter_mut()
            .try_for_each(|(connection, _)| connection.talk())
    })?;
    ensure!(events.len() == 1, "{events:?}");
    drop(all);
    drop(raw);
    attacked.lab.end()
}

/// Who hits the numbers of a connection that is idle keeps it alive.
#[test]
fn right_numbers_are_data() -> Result<()> {
    const TIMEOUT: u64 = 500;
    const RIGHT: [Forged; 2] = [
        forged("data", "a", 0, 0, 10),
        forged("data that acknowledges nothing", "", 0, 0, 10),
    ];
    let attacked = Attacked::new("right", &[])?;
    let end = Instant::now() + PATIENCE;
    let (raw, all, sent) = loop {
        let raw = attacked.lab.raw()?;
        let all = attacked.connections(&RIGHT)?;
        let begun = register(&raw, &all, TIMEOUT as u32, DATA)?;
        thread::sleep(millis(300));
        let sent = Instant::now();
        all.iter().try_for_each(|(_, attack)| attack.send())?;
        if begun.elapsed() < millis(TIMEOUT) {
            break (raw, all, sent);
        }
        // This test was held up for so long that the timers may have expired before.
        ensure!(Instant::now() < end, "this machine is too busy");
    };
    let events = events_until(&raw, Instant::now() + millis(TIMEOUT) + LATE, || Ok(()))?;
    ensure!(events.len() == 2, "{events:?}");
    for (event, at) in events {
        let after = at - sent;
        println!("{}: after {after:?}", RIGHT[event.tag as usize].what);
        let is_kept = after >= millis(TIMEOUT);
        ensure!(
            is_kept == (event.tag == 0),
            "{}: {after:?}",
            RIGHT[event.tag as usize].what
        );
    }
    drop(all);
    drop(raw);
    attacked.lab.end()
}
