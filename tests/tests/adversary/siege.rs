//! Forged segments of every kind, sent on a connection.

use std::{
    io::{Read, Write},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::TcpHeader;
use serde_json::Value;
use twheel::{flows::Flows, pins::Instance};
use twheel_common::{flow::Direction, state::State};
use twheel_tests::{
    forge::{Forger, Heard, Tap},
    is_long,
    netns::require_root,
    pair::{Connection, Family, Pair, SERVER},
    running::Twheel,
};

use crate::{acknowledge_at_once, run, talk};

/// The situation of the attacked connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// It was open before the run started, and the run has not seen it yet.
    Fresh,
    /// The run has seen its packets, but not its beginning.
    PickedUp,
    /// The run has seen all of its packets.
    Quiet,
    /// It sends packets all the time.
    Busy,
    /// The client has sent a FIN.
    HalfClosed,
    /// The run has seen all incoming packets, and no outgoing ones.
    EgressOff,
}

const SCENES: [Scene; 6] = [
    Scene::Fresh,
    Scene::PickedUp,
    Scene::Quiet,
    Scene::Busy,
    Scene::HalfClosed,
    Scene::EgressOff,
];

/// Actions on expired flows; each may hit the connection.
const ACTIONS: [&str; 4] = ["socket", "conntrack", "reset", "enforce=reset"];

/// A live connection of real sockets, a run, and a forger.
struct Siege {
    scene: Scene,
    twheel: Twheel,
    flows: Flows,
    forger: Forger,
    tap: Tap,
    connection: Option<Connection>,

    ends: [SocketAddr; 2],
    /// What each side has sent, the server first.
    heard: [Vec<Heard>; 2],
    seed: u64,
    _pair: Pair,
}

impl Siege {
    fn new(scene: Scene, action: &str) -> Result<Self> {
        let pair = Pair::new()?;
        let forger = Forger::new(&pair)?;
        let tap = Tap::new(&pair)?;
        let mut connection = pair.connect(Family::V4)?;
        talk(&mut connection)?;
        let mut arguments = vec!["--reap", action, "--i-know-this-drops-traffic"];
        if scene == Scene::EgressOff {
            arguments.extend(["--egress", "off"]);
        }
        let is_early = matches!(scene, Scene::Fresh | Scene::PickedUp);
        let twheel = run(&pair, &arguments)?;
        if !is_early {
            connection = pair.connect(Family::V4)?;
        }
        let ends = [
            connection.client.local_addr()?,
            connection.server.local_addr()?,
        ];
        let flows = pair
            .server
            .enter(|| Flows::pinned(&Instance::with(SERVER)?))?;
        let mut siege = Self {
            scene,
            twheel,
            flows,
            forger,
            tap,
            connection: Some(connection),
            ends,
            heard: [Vec::new(), Vec::new()],
            seed: 0x9e37_79b9_7f4a_7c15,
            _pair: pair,
        };
        if scene != Scene::Fresh {
            siege.talk()?;
        }
        if scene == Scene::HalfClosed {
            let connection = siege.connection.as_mut().context("no connection")?;
            connection.client.shutdown(std::net::Shutdown::Write)?;
            ensure!(
                connection.server.read(&mut [0])? == 0,
                "the server did not receive the FIN"
            );
        }
        siege.talk()?;
        Ok(siege)
    }

    /// Each end receives what the other sends.
    fn talk(&mut self) -> Result<()> {
        // Discards forged segments, which the ends did not send.
        self.tap.heard(self.ends[0])?;
        let connection = self.connection.as_mut().context("no connection")?;
        let is_half = self.scene == Scene::HalfClosed && !self.heard[0].is_empty();
        for _ in 0..2 {
            if !is_half {
                // An acknowledgment without data shows that its sender has not sent a FIN.
                acknowledge_at_once(&connection.server)?;
                connection
                    .talk()
                    .context("the server does not receive the client's data")?;
            }
            acknowledge_at_once(&connection.client)?;
            connection
                .server
                .write_all(b"!")
                .context("the server cannot send")?;
            let heard = connection.client.read_exact(&mut [0]);
            heard.context("the client does not receive the server's data")?;
        }
        // The last acknowledgment may be delayed.
        let patience = Instant::now() + Duration::from_secs(1);
        loop {
            for segment in self.tap.heard(self.ends[0])? {
                self.heard[usize::from(segment.from_client)].push(segment);
            }
            let last = self.heard.each_ref().map(|side| side.last());
            if let [Some(server), Some(client)] = last
                && client.header.acknowledgment_number == server.end()
            {
                return Ok(());
            }
            ensure!(
                Instant::now() < patience,
                "the client did not acknowledge the last data: {last:?}"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next number of each side, the server first.
    fn next(&self) -> [u32; 2] {
        self.heard
            .each_ref()
            .map(|side| side.last().map_or(0, Heard::end))
    }

    fn forge(&self, from_client: bool, segment: &TcpHeader, data: &[u8]) -> Result<()> {
        let [client, server] = self.ends;
        let (from, to) = match from_client {
            true => (client, server),
            false => (server, client),
        };
        self.forger.send_data(from, to, segment.clone(), data)
    }

    fn random(&mut self) -> u32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 16) as u32
    }

    /// The connection continues, and its flow is in the state of its sockets.
    fn check(&mut self, what: &dyn std::fmt::Debug) -> Result<()> {
        let scene = self.scene;
        self.talk()
            .with_context(|| format!("{scene:?}, after {what:?}"))?;
        let wanted = match scene {
            // A side that only sends data does not contradict a FIN with a number ahead of it.
            Scene::HalfClosed => &[State::CloseWait, State::LastAck][..],
            _ => &[State::Established],
        };
        let name = self.ends;
        let state = |siege: &Self| {
            let is_it = |flow: &twheel::flows::Flow| {
                let ends =
                    [Direction::FromLow, Direction::FromHigh].map(|from| flow.key.sender(from));
                ends == name || ends == [name[1], name[0]]
            };
            let flow = siege.flows.iter().find(is_it);
            flow.map(|flow| flow.word.seen().state())
        };
        let end = Instant::now() + Duration::from_secs(if scene == Scene::Fresh { 3 } else { 0 });
        while !state(self).is_some_and(|state| wanted.contains(&state)) {
            ensure!(
                Instant::now() < end,
                "{scene:?}, after {what:?}: {:?}, not {wanted:?}",
                state(self)
            );
            thread::sleep(Duration::from_millis(200));
            self.talk()?;
        }
        while let Some(line) = self.twheel.line(Duration::ZERO)? {
            let said: Value = serde_json::from_str(&line.text)?;
            let is_forged = scene == Scene::Fresh && said["state"] == "syn_sent";
            let is_harmless =
                is_forged || matches!(said["outcome"].as_str(), Some("alive" | "one_sided"));
            ensure!(is_harmless, "{scene:?}, after {what:?}: {said}");
        }
        Ok(())
    }

    /// The connection ends, and so does its flow.
    fn end(mut self) -> Result<()> {
        let connection = self.connection.take().context("no connection")?;
        let scene = self.scene;
        connection
            .close()
            .with_context(|| format!("{scene:?}: the connection does not close"))?;
        if scene == Scene::EgressOff {
            // If only one FIN was seen, the flow lasts for that state's timeout.
            return Ok(());
        }
        let end = Instant::now() + Duration::from_secs(5);
        while let Some(line) = self
            .twheel
            .line(end.saturating_duration_since(Instant::now()))?
        {
            let said: Value = serde_json::from_str(&line.text)?;
            if said["event"] == "end" || said["reason"] == "closed" {
                ensure!(said["reason"] == "closed", "{scene:?}: {said}");
                let ended = self.twheel.stop()?;
                ensure!(ended.code() == Some(0), "{}", ended.stderr);
                return Ok(());
            }
        }
        anyhow::bail!("{scene:?}: the end of the flow was not reported")
    }
}

/// Segments that an attacker may send who knows much, but no exact number. They are in the name of
/// the side whose next number is `mine`.
fn forgeries(mine: u32, theirs: u32) -> Vec<TcpHeader> {
    // Numbers beyond the windows of the sockets but near enough for twheel, and numbers that were
    // sent before.
    let (far, ahead, behind) = (
        mine ^ 1 << 31,
        mine.wrapping_add(200_000),
        mine.wrapping_sub(3_000),
    );
    let unsent = theirs.wrapping_add(1 << 30);
    let header = |flags: &str, sequence_number, acknowledgment_number| TcpHeader {
        syn: flags.contains('S'),
        ack: flags.contains('A'),
        fin: flags.contains('F'),
        rst: flags.contains('R'),
        psh: flags.contains('P'),
        sequence_number,
        acknowledgment_number,
        ..TcpHeader::default()
    };
    vec![
        header("S", far, 0),
        header("S", ahead, 0),
        header("S", behind, 0),
        header("SA", far, unsent),
        header("SA", ahead, theirs),
        header("SA", behind, theirs),
        header("R", far, 0),
        header("R", ahead, 0),
        header("R", behind, 0),
        header("RA", far, unsent),
        header("RA", ahead, theirs),
        header("RA", behind, theirs),
        header("FA", far, unsent),
        header("FA", ahead, theirs),
        header("FA", ahead, unsent),
        header("FA", behind, theirs),
        header("A", far, unsent),
        header("A", ahead, theirs),
        header("A", behind, theirs),
        header("PA", ahead, unsent),
    ]
}

/// All pairs of two forged segments, from either end.
fn pairs(scene: Scene, action: &str) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    let count = 2 * forgeries(0, 0).len();
    // Except in the long run, every seventh pair: 7 and the number of segments have no common
    // factor, so each segment still occurs as the first and as the second.
    let every = if is_long() { 1 } else { 7 };
    for number in (0..count * count).step_by(every) {
        let [server, client] = siege.next();
        let both = [forgeries(server, client), forgeries(client, server)];
        let chosen = [number / count, number % count].map(|which| {
            let from_client = which % 2 == 1;
            (
                from_client,
                both[usize::from(from_client)][which / 2].clone(),
            )
        });
        for (from_client, segment) in &chosen {
            siege.forge(*from_client, segment, &[])?;
        }
        siege.check(&chosen)?;
    }
    siege.end()
}

/// Segments of each kind with random numbers, from either end.
fn numbers(scene: Scene, action: &str, count: u32) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    for flags in ["R", "F", "A", "S"] {
        for number in 0..count {
            let segment = TcpHeader {
                rst: flags == "R",
                fin: flags == "F",
                syn: flags == "S",
                ack: flags != "R" || number % 4 > 1,
                sequence_number: siege.random(),
                acknowledgment_number: siege.random(),
                ..TcpHeader::default()
            };
            siege.forge(number % 2 == 0, &segment, &[])?;
            if scene == Scene::Busy && number % 1024 == 0 {
                siege.talk()?;
            }
        }
        siege.check(&flags)?;
    }
    siege.end()
}

/// Sends one SYN, a RST and a SYN, and then a copy of all that the ends have sent.
fn replays(scene: Scene, action: &str) -> Result<()> {
    let mut siege = Siege::new(scene, action)?;
    let syn = TcpHeader {
        syn: true,
        sequence_number: 0x1234_5678,
        ..TcpHeader::default()
    };
    let reset = TcpHeader {
        rst: true,
        sequence_number: 0x8765_4321,
        ..TcpHeader::default()
    };
    for from_client in [true, false] {
        siege.forge(from_client, &syn, &[])?;
        siege.check(&"a SYN")?;
        siege.forge(from_client, &reset, &[])?;
        siege.forge(from_client, &syn, &[])?;
        siege.check(&"a RST and a SYN")?;
    }
    for _ in 0..3 {
        let old = siege.heard.concat();
        for segment in &old {
            // A copy of an old FIN is harmless.
            siege.forge(segment.from_client, &segment.header, &segment.data)?;
        }
        siege.check(&"what was sent before")?;
        for segment in old.iter().rev() {
            siege.forge(segment.from_client, &segment.header, &segment.data)?;
        }
        siege.check(&"what was sent before, the last first")?;
    }
    siege.end()
}

#[test]
fn no_two_forged_segments_end_a_connection() -> Result<()> {
    require_root();
    for (number, scene) in SCENES.into_iter().enumerate() {
        for (other, action) in ACTIONS.into_iter().enumerate() {
            if is_long() || number % ACTIONS.len() == other {
                pairs(scene, action)?;
            }
        }
    }
    Ok(())
}

#[test]
fn no_random_numbers_end_a_connection() -> Result<()> {
    require_root();
    // About a million segments in all.
    numbers(Scene::Busy, "socket", 1 << 18)?;
    for scene in SCENES {
        for action in ACTIONS {
            numbers(scene, action, if is_long() { 1 << 18 } else { 1 << 12 })?;
        }
    }
    Ok(())
}

#[test]
fn what_was_sent_before_ends_no_connection() -> Result<()> {
    require_root();
    for scene in SCENES {
        for action in ACTIONS {
            replays(scene, action)?;
        }
    }
    Ok(())
}
