//! A flow that has a packet while it is being reaped survives.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io::{ErrorKind, Read, Write},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use twheel_tests::{
    netns::require_root,
    pair::{Connection, Family, Pair, SERVER},
};

use crate::{allow_descriptors, millis, run, summed};

/// How many connections there are at once, and how many tries in all.
const RACERS: usize = 500;
const TRIES: usize = 10_000;

/// A connection whose next byte is timed to arrive as its flow expires.
struct Racer {
    connection: Connection,
    /// When the latest byte was sent.
    at: Instant,
    /// Bytes that were sent, and bytes that the server has read.
    sent: usize,
    read: usize,
    /// A RST came before the byte could be sent.
    told: bool,
    closed: bool,
}

impl Racer {
    fn new(pair: &Pair, number: usize) -> Result<Self> {
        let connection = pair.connect(Family::alternate(number))?;
        connection.client.set_nonblocking(true)?;
        connection.server.set_nonblocking(true)?;
        Ok(Self {
            connection,
            at: Instant::now(),
            sent: 0,
            read: 0,
            told: false,
            closed: false,
        })
    }

    /// Sends a byte, unless a RST has already come.
    fn send(&mut self) {
        self.at = Instant::now();
        self.told = (&self.connection.client).write(b"!").is_err();
        self.sent += usize::from(!self.told);
    }

    /// Reads all that has arrived, and notices whether the connection was closed.
    fn look(&mut self) -> Result<()> {
        let mut bytes = [0; 64];
        loop {
            match (&self.connection.server).read(&mut bytes) {
                Ok(0) => bail!("an end of file, though the client has sent no FIN"),
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {
                    self.closed = true;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The outcomes of the tries.
#[derive(Debug, Default)]
struct Tally {
    tries: usize,
    /// Closed, and the byte was not read: it came too late.
    closed: usize,
    /// The byte was read, and the connection is open.
    alive: usize,
    /// The byte was read, and the connection was closed all the same.
    lost: usize,
}

/// Each connection sends a byte at about the time when its flow expires. A try is lost if the
/// server has read that byte and the connection was closed all the same, before it was idle for
/// another timeout. A byte that finds the socket closed is answered with a RST, as is any late
/// byte: that is no loss. (docs/reap.md describes how small the gap is in which a byte could be
/// lost.)
fn race(pair: &Pair, timeout: Duration, early: Duration, late: Duration) -> Result<Tally> {
    /// Long after a byte has arrived, and long before its flow could expire again.
    const LOOK: Duration = Duration::from_millis(120);
    let mut tally = Tally::default();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut jitter = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let width = (early + late).as_micros() as u64;
        timeout - early + Duration::from_micros(random % width)
    };
    let mut racers = (0..RACERS)
        .map(|number| Racer::new(pair, number))
        .collect::<Result<Vec<_>>>()?;
    // The time, the connection, and whether it is to send (or else to be checked).
    let mut plan = BinaryHeap::new();
    let begin = Instant::now() + millis(10);
    for number in 0..RACERS {
        plan.push(Reverse((
            begin + Duration::from_micros(600) * number as u32,
            number,
            true,
        )));
    }
    let mut first = vec![true; RACERS];
    while let Some(Reverse((due, number, sends))) = plan.pop() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let racer = &mut racers[number];
        if sends {
            racer.send();
            plan.push(Reverse((due + LOOK, number, false)));
            continue;
        }
        racer.look()?;
        if racer.at.elapsed() > timeout - millis(50) {
            // This thread was held up for so long that the flow may have expired again.
            first[number] = true;
        }
        if !std::mem::take(&mut first[number]) {
            tally.tries += 1;
            match (racer.closed, !racer.told && racer.read == racer.sent) {
                (true, true) => tally.lost += 1,
                (true, false) => tally.closed += 1,
                (false, true) => tally.alive += 1,
                (false, false) => bail!(
                    "{} is open, but its byte was not read",
                    racer.connection.name
                ),
            }
        }
        if tally.tries == TRIES {
            break;
        }
        if racer.closed {
            *racer = Racer::new(pair, number)?;
            first[number] = true;
            plan.push(Reverse((Instant::now(), number, true)));
        } else {
            plan.push(Reverse((due - LOOK + jitter(), number, true)));
        }
    }
    Ok(tally)
}

fn comes_back(actions: &str, more: &[&str], allowed: usize) -> Result<()> {
    allow_descriptors(8192);
    let pair = Pair::new()?;
    let mut args = vec![
        "--timeout",
        "300ms",
        "--tick",
        "10ms",
        "--egress",
        "off",
        "--reap-max-share",
        "100",
        "--reap",
        actions,
    ];
    args.extend(more);
    let twheel = run(&pair.server, SERVER, &args)?;
    let tally = race(&pair, millis(300), millis(4), millis(24))?;
    let ended = twheel.stop()?;
    let done = summed(&ended, "socket: done");
    let back = summed(&ended, "socket: not done: the flow is active again");
    println!("--reap {actions}: {tally:?}; sockets closed {done}, flows back before that {back}");
    assert_eq!(tally.tries, TRIES);
    assert!(tally.lost <= allowed, "{tally:?}");
    // Some bytes came between the expiry and the action.
    assert!(back > 10, "{back} {tally:?}");
    assert!(tally.closed.min(tally.alive) > TRIES / 10, "{tally:?}");
    Ok(())
}

#[test]
fn a_flow_that_comes_back_before_its_socket_is_closed_survives() -> Result<()> {
    require_root();
    comes_back("socket", &[], 0)
}

#[test]
fn a_flow_that_comes_back_before_it_is_refused_survives() -> Result<()> {
    require_root();
    comes_back("socket,enforce", &["--i-know-this-drops-traffic"], 0)
}
