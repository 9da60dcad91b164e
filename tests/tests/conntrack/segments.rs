//! Every segment in every state.

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_common::state::State::{self, *};
use twheel_tests::{
    netns::require_root,
    plane::{ACK, FIN, RST, SYN},
};

use crate::{
    ends::is_on_time,
    lab::{Lab, SCHEDULING},
    wire::{
        HANDSHAKE,
        Side::{self, *},
        Wire,
    },
};

/// How a connection comes into each state: from its beginning or, without a SYN, after it was
/// established.
const WAYS: [(State, &[(Side, u8)]); 9] = [
    (SynSent, &[(Client, SYN)]),
    (SynRecv, &[(Client, SYN), (Server, SYN | ACK)]),
    (Established, HANDSHAKE),
    (FinWait, &[(Client, FIN | ACK)]),
    (CloseWait, &[(Client, FIN | ACK), (Server, ACK)]),
    (
        LastAck,
        &[(Client, FIN | ACK), (Server, ACK), (Server, FIN | ACK)],
    ),
    (
        TimeWait,
        &[
            (Client, FIN | ACK),
            (Server, ACK),
            (Server, FIN | ACK),
            (Client, ACK),
        ],
    ),
    (Close, &[(Client, RST | ACK)]),
    (SynSent2, &[(Client, SYN), (Server, SYN)]),
];

/// Which tracker's entry a segment keeps alive, where they differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Renews {
    Both,
    Ours,
    Theirs,
}

/// A segment that has another effect on conntrack.
struct Difference {
    state: State,
    side: Side,
    flags: u8,
    /// The states it leads to, in twheel and in conntrack.
    to: [State; 2],
    /// By how many seconds twheel's flow ends later.
    later: f64,
    renews: Renews,
}

const fn differs(
    state: State,
    (side, flags): (Side, u8),
    to: [State; 2],
    later: f64,
    renews: Renews,
) -> Difference {
    Difference {
        state,
        side,
        flags,
        to,
        later,
        renews,
    }
}

#[rustfmt::skip]
const DIFFERENCES: [Difference; 8] = [
    // conntrack gives all the SYNs of an unanswered connection one timeout.
    differs(SynSent, (Server, SYN), [SynSent2; 2], 0.0, Renews::Ours),
    // A second FIN of the same side does not close the other direction. (4 s and 5 s; 3 s.)
    differs(FinWait, (Client, FIN | ACK), [FinWait, LastAck], 1.0, Renews::Both),
    differs(CloseWait, (Client, FIN | ACK), [CloseWait, LastAck], 2.0, Renews::Both),
    // Nor does its ACK acknowledge its own FIN. (4 s, 5 s; 3 s, 6 s.)
    differs(FinWait, (Client, ACK), [FinWait, CloseWait], -1.0, Renews::Both),
    differs(LastAck, (Server, ACK), [LastAck, TimeWait], -3.0, Renews::Both),
    // A SYN begins no new flow until it is answered. (6 s, 3 s; 1 s, 3 s.)
    differs(TimeWait, (Client, SYN), [TimeWait, SynSent], 3.0, Renews::Theirs),
    differs(TimeWait, (Server, SYN), [TimeWait, SynSent], 3.0, Renews::Theirs),
    differs(Close, (Client, SYN), [Close, SynSent], -2.0, Renews::Theirs),
];

fn difference(state: State, side: Side, flags: u8) -> Option<&'static Difference> {
    DIFFERENCES
        .iter()
        .find(|it| (it.state, it.side, it.flags) == (state, side, flags))
}

#[test]
fn every_segment_in_every_state_does_what_it_does_to_conntrack() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    let mut wires = Vec::new();
    for (state, way) in WAYS {
        for side in [Client, Server] {
            for flags in [SYN, SYN | ACK, FIN | ACK, ACK, RST | ACK] {
                let mut wire = lab.craft();
                let begun = way[0].1 == SYN;
                for (side, flags) in HANDSHAKE.iter().filter(|_| !begun).chain(way) {
                    wire.send(&lab, *side, *flags)?;
                }
                wires.push((state, side, flags, wire, Instant::now()));
            }
        }
    }
    thread::sleep(SCHEDULING);
    let [ours, theirs] = lab.states()?;
    for (state, _, _, wire, _) in &wires {
        let found = [&ours, &theirs].map(|states| states.get(&wire.name()));
        ensure!(found == [Some(state); 2], "{found:?}, not {state:?}");
    }
    // Long enough to tell whether the next segment keeps the flow alive.
    thread::sleep(Duration::from_millis(500));
    let mut renewed = Vec::new();
    for (state, side, flags, wire, before) in &wires {
        let next = wire.next[*side as usize];
        let seq = match state {
            // The first SYN again, or the one that would have been the first.
            SynSent | SynRecv | SynSent2 if *flags & SYN != 0 => Wire::first(*side),
            // The beginning of another connection.
            _ if *flags & SYN != 0 => next + 1_000_000,
            _ => next,
        };
        wire.send_at(&lab, *side, *flags, seq)?;
        renewed.push(before.elapsed().as_secs_f64());
    }
    thread::sleep(SCHEDULING);
    let [ours, theirs] = lab.states()?;
    let ends = lab.ends()?;
    let held_up = lab.watch.stop();
    let mut wrong = Vec::new();
    for ((state, side, flags, wire, _), renewed) in wires.into_iter().zip(renewed) {
        let known = difference(state, side, flags);
        let found = [&ours, &theirs].map(|it| it.get(&wire.name()).copied());
        let is_known = match known {
            Some(known) => found == known.to.map(Some),
            None => found[0] == found[1],
        };
        let mut differ = |what: &dyn Debug| {
            wrong.push(format!("{state:?}, {flags:#x} of the {side:?}: {what:?}"));
        };
        if !is_known {
            differ(&found);
        }
        // The last of its flows, if there were several.
        let (ours, theirs) = ends.get(&wire.name()).context("no end")?;
        match (ours.last(), theirs.last()) {
            (Some(ours), Some(theirs)) => {
                let [later, _] = ours.later_than(theirs)?;
                let meant = known.map_or(0.0, |known| match known.renews {
                    Renews::Both => known.later,
                    Renews::Ours => known.later + renewed,
                    Renews::Theirs => known.later - renewed,
                });
                if !is_on_time(later - meant, held_up) {
                    differ(&later);
                }
            }
            // conntrack keeps this state longer than the test waits, see `Lab::ends`.
            (Some(_), None) if found[1] == Some(SynSent2) => {}
            _ => differ(&(ours, theirs)),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
