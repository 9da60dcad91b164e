//! Forged segments of every kind against a connection.

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
    is_soak,
    netns::require_root,
    pair::{Connection, Family, Pair, SERVER},
    running::Twheel,
};

use crate::{acknowledge_at_once, run, talk};

/// How the connection stands that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// It was up before the run, which has not seen it yet.
    Fresh,
    /// The run has seen its packets, but not its beginning.
    PickedUp,
    /// The run has seen all of it.
    Quiet,
    /// It has packets all the time.
    Busy,
    /// The client has sent a FIN.
    HalfClosed,
    /// The run has seen all that came in.
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

/// What is done to flows that expire, and may be done to the connection.
const ACTIONS: [&str; 4] = ["socket", "conntrack", "reset", "enforce=reset"];

/// A live connection of real sockets, a run, and somebody who forges.
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
            .enter(|| Flows::pinned(&Instance::of(SERVER)?))?;
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
            ensure!(connection.server.read(&mut [0])? == 0, "no end");
        }
        siege.talk()?;
        Ok(siege)
    }

    /// Both ends have what the other sends.
    fn talk(&mut self) -> Result<()> {
        // What was forged is not what the ends say.
        self.tap.heard(self.ends[0])?;
        let connection = self.connection.as_mut().context("no connection")?;
        let is_half = self.scene == Scene::HalfClosed && !self.heard[0].is_empty();
        for _ in 0..2 {
            if !is_half {
                // An acknowledgment without data tells that its sender has not come to an end.
                acknowledge_at_once(&connection.server)?;
                connection.talk().context("the client is not heard")?;
            }
            acknowledge_at_once(&connection.client)?;
            connection
                .server
                .write_all(b"!")
                .context("the server cannot send")?;
            let heard = connection.client.read_exact(&mut [0]);
            heard.context("the server is not heard")?;
        }
        // The last acknowledgment may wait for more.
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
            ensure!(Instant::now() < patience, "not acknowledged: {last:?}");
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

    /// The connection goes on, and its flow is what its sockets are.
    fn check(&mut self, what: &dyn std::fmt::Debug) -> Result<()> {
        let scene = self.scene;
        self.talk()
            .with_context(|| format!("{scene:?}, after {what:?}"))?;
        let wanted = match scene {
            // A side that only sends data says nothing against a FIN ahead of it.
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
            .with_context(|| format!("{scene:?}: it does not close"))?;
        if scene == Scene::EgressOff {
            // Who sees one FIN waits for the timeout of that.
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
        anyhow::bail!("{scene:?}: its end was not seen")
    }
}

/// What somebody may send who knows much, but no exact number: of one side, whose next number is `mine`.
fn forgeries(mine: u32, theirs: u32) -> Vec<TcpHeader> {
    // Beyond the windows of the sockets, and near enough for twheel; and what was sent before.
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
    // All of the first and all of the second, too.
    let every = if is_soak() { 1 } else { 7 };
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

/// Random numbers, of each kind and from either end.
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

/// One SYN, a RST and a SYN, and all that the ends have sent, once more.
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
            // An old FIN is what it was.
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
            if is_soak() || number % ACTIONS.len() == other {
                pairs(scene, action)?;
            }
        }
    }
    Ok(())
}

#[test]
fn no_random_numbers_end_a_connection() -> Result<()> {
    require_root();
    // A million.
    numbers(Scene::Busy, "socket", 1 << 18)?;
    for scene in SCENES {
        for action in ACTIONS {
            numbers(scene, action, if is_soak() { 1 << 18 } else { 1 << 12 })?;
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
