//! Connections of the host, crafted segments, and where twheel and conntrack differ.

use std::{
    io::Read,
    net::{SocketAddr, TcpStream},
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use twheel_common::state::State::{self, *};
use twheel_tests::{
    netns::require_root,
    pair::Family,
    plane::{ACK, FIN, RST, SYN},
};

use crate::{
    lab::{
        Lab, Life, Name, REFUSED, SCHEDULING, SILENT, UNFINISHED, begin, connected, half_close,
        name_of, reset,
    },
    wire::{Data, HANDSHAKE, Side::*},
};

/// Real connections that end in several ways, or do not end.
fn real(lab: &mut Lab) -> Result<()> {
    for (what, family) in [("idle v4", Family::V4), ("idle v6", Family::V6)] {
        let ends = lab.connect(family)?;
        lab.expect(what, name_of(&ends.0)?, [Life::same("idle", Established)]);
        lab.keep(ends);
    }

    for (what, family, by) in [
        ("closed by the client", Family::V4, Client),
        ("closed by the client, v6", Family::V6, Client),
        ("closed by the server", Family::V4, Server),
    ] {
        let (mut client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        let (first, second) = match by {
            Client => (&mut client, &mut server),
            Server => (&mut server, &mut client),
        };
        half_close(first, second)?;
        lab.check(name, CloseWait)?;
        half_close(second, first)?;
        lab.check(name, TimeWait)?;
        lab.expect(what, name, [Life::same("closed", TimeWait)]);
    }

    for (what, family, by) in [
        ("half closed by the client", Family::V4, Client),
        ("half closed by the server", Family::V6, Server),
    ] {
        let (mut client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        match by {
            Client => half_close(&client, &mut server)?,
            Server => half_close(&server, &mut client)?,
        }
        lab.check(name, CloseWait)?;
        lab.expect(what, name, [Life::same("idle", CloseWait)]);
        lab.keep((client, server));
    }

    for (what, family, by) in [
        ("reset by the client", Family::V4, Client),
        ("reset by the server", Family::V6, Server),
    ] {
        let (client, server) = lab.connect(family)?;
        let name = name_of(&client)?;
        match by {
            Client => reset(client)?,
            Server => reset(server)?,
        }
        lab.check(name, Close)?;
        lab.expect(what, name, [Life::same("reset", Close)]);
    }

    let begin_to = |lab: &Lab, port: u16| -> Result<(OwnedFd, Name)> {
        let server = SocketAddr::new(Family::V4.server(), port);
        let fd = begin(&lab.pair.client, Family::V4, 0, server)?;
        let client = TcpStream::from(fd.try_clone()?).local_addr()?;
        Ok((fd, (client, server)))
    };
    let (_, name) = begin_to(lab, REFUSED)?;
    lab.check_both(name, None, None)?;
    lab.expect("refused", name, [Life::same("reset", Close)]);

    let (_, name) = begin_to(lab, SILENT)?;
    lab.check(name, SynSent)?;
    lab.expect("never answered", name, [Life::same("idle", SynSent)]);

    // The SYN/ACK is sent again after a second: neither takes that for a sign of life.
    let (fd, name) = begin_to(lab, UNFINISHED)?;
    lab.check(name, SynRecv)?;
    lab.expect("never completed", name, [Life::same("idle", SynRecv)]);
    lab.open.push(fd.into());

    for (what, family, reset_first) in [
        ("a port used again after a close", Family::V4, false),
        ("a port used again after a reset", Family::V6, true),
    ] {
        let (client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        let state = match reset_first {
            true => reset(client).map(|()| Close)?,
            false => close(client, &mut server)?,
        };
        lab.check(name, state)?;
        drop(server);
        let ends = lab.connect_from(family, name.0.port())?;
        let lives = [
            Life::same("superseded", state),
            Life::same("idle", Established),
        ];
        lab.expect(what, name, lives);
        lab.keep(ends);
    }
    used_again_at_speed(lab)
}

/// Closes a connection so that the server's end, not the client's, is in TIME_WAIT. Returns the
/// state of its flow.
fn close(mut client: TcpStream, server: &mut TcpStream) -> Result<State> {
    half_close(server, &mut client)?;
    half_close(&client, server)?;
    Ok(TimeWait)
}

/// A port is used again as soon as its connection is over, and the test does not look at the flow
/// in between.
fn used_again_at_speed(lab: &mut Lab) -> Result<()> {
    let listener = lab.listeners[0].try_clone()?;
    let (mut client, mut server) = lab.connect(Family::V4)?;
    let name = name_of(&client)?;
    let mut lives = Vec::new();
    for number in 0..100 {
        let state = if number % 2 == 0 {
            reset(client)?;
            // The RST has arrived.
            ensure!(server.read(&mut [0]).is_err(), "the server received no RST");
            Close
        } else {
            close(client, &mut server)?
        };
        lives.push(Life::same("superseded", state));
        drop(server);
        (client, server) = connected(&lab.pair.client, &listener, Family::V4, name.0.port())?;
    }
    lives.push(Life::same("idle", Established));
    lab.expect("a port used again at speed", name, lives);
    lab.keep((client, server));
    Ok(())
}

/// Crafted connections on which both trackers agree.
fn crafted(lab: &mut Lab) -> Result<()> {
    let mut wire = lab.craft_established()?;
    let both_close = [
        (Client, FIN | ACK, FinWait),
        // Sent before it has received the other's FIN.
        (Server, FIN | ACK, LastAck),
        (Client, ACK, TimeWait),
        (Server, ACK, TimeWait),
    ];
    wire.walk(lab, &both_close)?;
    let lives = [Life::same("closed", TimeWait)];
    lab.expect("both close at once", wire.name(), lives);

    let mut wire = lab.craft();
    wire.walk(lab, &[(Client, SYN, SynSent), (Server, SYN, SynSent2)])?;
    // The first SYN again, now with an ACK.
    let first = wire.next[Client as usize] - 1;
    wire.send_at(lab, Client, SYN | ACK, first)?;
    wire.check(lab, SynRecv)?;
    wire.send(lab, Server, ACK)?;
    // That suffices for conntrack, since both sides have sent a SYN.
    lab.check_both(wire.name(), Some(SynRecv), Some(Established))?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("both open at once", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.check(lab, FinWait)?;
    let lives = [Life::same("idle", FinWait)];
    lab.expect("a FIN never acknowledged", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.send(lab, Server, ACK)?;
    wire.check(lab, CloseWait)?;
    wire.send(lab, Server, FIN | ACK)?;
    wire.check(lab, LastAck)?;
    let lives = [Life::same("closed", LastAck)];
    lab.expect("the last ACK missing", wire.name(), lives);

    let mut wire = lab.craft();
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established).unreplied()];
    lab.expect("picked up, one side silent", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    let far = wire.next[Server as usize].wrapping_add(1 << 30);
    wire.send_at(lab, Server, RST | ACK, far)?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("a RST from nowhere", wire.name(), lives);

    // FINs of an attacker who does not know the sequence numbers.
    let mut wire = lab.craft_established()?;
    for side in [Client, Server] {
        let far = wire.next[side as usize].wrapping_add(1 << 29);
        wire.send_at(lab, side, FIN | ACK, far)?;
        wire.check(lab, Established)?;
    }
    wire.send(lab, Client, ACK)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("FINs from nowhere", wire.name(), lives);

    // The other side waits for a number behind those that were seen: a host that has forgotten the
    // connection answers so.
    let mut wire = lab.craft_established()?;
    let waited_for = wire.next[Client as usize];
    wire.send_data(lab, Client, ACK, 1000)?;
    wire.send(lab, Server, ACK)?;
    wire.send_data(lab, Client, ACK, 1000)?;
    wire.send_at(lab, Client, RST, waited_for + 1000)?;
    wire.check(lab, Close)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("a RST that answers", wire.name(), lives);

    // A keepalive probe to a peer that has rebooted: the RST has the number that the probe
    // acknowledges.
    let wire = lab.craft_established()?;
    let [last, next] = [wire.next[Client as usize] - 1, wire.next[Server as usize]];
    wire.send_at(lab, Client, ACK, last)?;
    wire.send_at(lab, Server, RST, next)?;
    wire.check(lab, Close)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("a probe of a peer that has rebooted", wire.name(), lives);

    // A client has rebooted: its SYN gets an answer of the old connection, and it answers that with
    // a RST (RFC 9293, 3.5.1).
    let mut wire = lab.craft_established()?;
    let old = wire.next[Client as usize];
    wire.next[Client as usize] = 3_000_000;
    wire.send(lab, Client, SYN)?;
    wire.check(lab, Established)?;
    let next = wire.next[Server as usize];
    wire.next[Client as usize] = old;
    wire.send(lab, Server, ACK)?;
    wire.send_at(lab, Client, RST, old)?;
    wire.check(lab, Close)?;
    wire.next = [3_000_001, next + 1_000_000];
    wire.send_at(lab, Client, SYN, 3_000_000)?;
    wire.send(lab, Server, SYN | ACK)?;
    wire.check(lab, SynRecv)?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [
        Life::same("superseded", Close),
        Life::same("idle", Established),
    ];
    lab.expect("a client that has rebooted", wire.name(), lives);

    // Picked up from one side; the other side does not know the connection.
    let mut wire = lab.craft();
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    wire.send(lab, Server, RST)?;
    lab.check_both(wire.name(), None, None)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("picked up, and answered by a RST", wire.name(), lives);

    let mut wire = lab.craft();
    wire.send(lab, Client, FIN | ACK)?;
    wire.send(lab, Server, RST | ACK)?;
    thread::sleep(SCHEDULING);
    lab.check_both(wire.name(), None, None)?;
    Ok(())
}

/// Known differences between the two trackers.
fn differences(lab: &mut Lab) -> Result<()> {
    // conntrack takes it for the FIN of the other direction.
    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.check(lab, FinWait)?;
    let fin = wire.next[Client as usize] - 1;
    wire.send_at(lab, Client, FIN | ACK, fin)?;
    lab.check_both(wire.name(), Some(FinWait), Some(LastAck))?;
    let lives = [Life::same("idle", FinWait).theirs(LastAck).later(1.0)];
    lab.expect("a FIN sent again", wire.name(), lives);

    // conntrack gives up on a peer that acknowledges nothing; twheel only watches for silence.
    let mut wire = lab.craft_established()?;
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established).later(1.0)];
    lab.expect("data never acknowledged", wire.name(), lives);

    // A RST that is not exactly the next segment only shortens the timeout in conntrack.
    let wire = lab.craft_established()?;
    let ahead = wire.next[Server as usize] + 100;
    wire.send_at(lab, Server, RST | ACK, ahead)?;
    lab.check_both(wire.name(), Some(Close), Some(Established))?;
    let lives = [Life::same("reset", Close).theirs(Established)];
    lab.expect("a RST ahead", wire.name(), lives);

    // A RST with a number that was already acknowledged.
    let mut wire = lab.craft_established()?;
    wire.send_data(lab, Server, ACK, 1000)?;
    wire.send(lab, Client, ACK)?;
    let behind = wire.next[Server as usize] - 500;
    wire.send_at(lab, Server, RST | ACK, behind)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("a RST behind", wire.name(), lives);

    // After a reset, the responder may begin anew: conntrack continues the old entry once the SYN
    // is answered.
    let mut wire = lab.craft_established()?;
    wire.walk(lab, &[(Client, RST | ACK, Close)])?;
    wire.next = [3_000_000, 4_000_000];
    wire.walk(lab, &[(Server, SYN, Close)])?;
    wire.send(lab, Client, SYN | ACK)?;
    lab.check_both(wire.name(), Some(SynRecv), Some(Close))?;
    let lives = [
        Life::ours("superseded", Close),
        Life::same("idle", SynRecv).theirs(Close).later(1.0),
    ];
    lab.expect(
        "a connection of the responder after a reset",
        wire.name(),
        lives,
    );

    // The same if the server has sent the RST, and the client begins again.
    let mut wire = lab.craft_established()?;
    wire.walk(lab, &[(Server, RST | ACK, Close)])?;
    wire.next = [3_000_000, 4_000_000];
    let begun_anew = [
        (Client, SYN, Close),
        (Server, SYN | ACK, SynRecv),
        (Client, ACK, Established),
    ];
    wire.walk(lab, &begun_anew)?;
    let lives = [
        Life::ours("superseded", Close),
        Life::same("idle", Established).started_apart(),
    ];
    lab.expect(
        "a port used again after the server's reset",
        wire.name(),
        lives,
    );

    // A SYN/ACK that answers no SYN.
    let mut wire = lab.craft();
    wire.send(lab, Server, SYN | ACK)?;
    lab.check_both(wire.name(), None, None)?;
    Ok(())
}

/// Which packets keep a connection alive; it takes some time to tell.
fn keep_alive(lab: &mut Lab) -> Result<()> {
    let server = SocketAddr::new(Family::V4.server(), SILENT);
    let fd = begin(&lab.pair.client, Family::V4, 0, server)?;
    let syn_again = TcpStream::from(fd);
    let syn_name = (syn_again.local_addr()?, server);

    let mut closed = lab.craft_established()?;
    for (side, flags) in [
        (Client, FIN | ACK),
        (Server, ACK),
        (Server, FIN | ACK),
        (Client, ACK),
    ] {
        closed.send(lab, side, flags)?;
    }
    closed.check(lab, TimeWait)?;
    let mut stray = lab.craft_established()?;
    let mut beyond = lab.craft();
    for (side, flags) in HANDSHAKE {
        beyond.send(lab, *side, *flags)?;
    }
    let before = Instant::now();
    let probed = lab.craft_established()?;
    let mut reset = lab.craft_established()?;
    reset.send(lab, Client, RST | ACK)?;
    reset.check(lab, Close)?;

    thread::sleep(Duration::from_millis(500));
    reset.send(lab, Server, ACK)?;
    // The kernel sends its SYN again after one second.
    thread::sleep(Duration::from_millis(700));
    closed.send(lab, Client, ACK)?;
    stray.send(lab, Client, SYN)?;
    let far = beyond.next[Client as usize] + (1 << 22);
    let data = Data {
        seq: far,
        length: 10,
    };
    beyond.put(lab, Client, ACK, data)?;
    let later = before.elapsed().as_secs_f64();
    // A keepalive probe: the last byte again.
    let last = probed.next[Client as usize] - 1;
    probed.send_at(lab, Client, ACK, last)?;

    // conntrack gives all SYNs of a connection one timeout.
    let lives = [Life::same("idle", SynSent)];
    lab.expect("a SYN sent again", syn_name, lives);
    let lives = [Life::same("closed", TimeWait)];
    lab.expect("an ACK after the last", closed.name(), lives);
    let lives = [Life::same("idle", Established)];
    lab.expect("a stray SYN", stray.name(), lives);
    let lives = [Life::same("idle", Established)];
    lab.expect("a keep-alive probe", probed.name(), lives);
    let lives = [Life::same("reset", Close)];
    lab.expect("an ACK after a reset", reset.name(), lives);
    // conntrack tracks windows.
    let lives = [Life::same("idle", Established).later(later)];
    lab.expect("data beyond the window", beyond.name(), lives);
    Ok(())
}

#[test]
fn states_and_ends_are_those_of_conntrack() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    real(&mut lab)?;
    crafted(&mut lab)?;
    differences(&mut lab)?;
    keep_alive(&mut lab)?;
    lab.compare_ends()
}
