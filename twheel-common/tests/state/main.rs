//! States, compared with conntrack's table; and the conditions for a RST.
#![allow(missing_docs)]

mod conntrack;
mod forged;
mod numbers;
#[path = "../segments/mod.rs"]
mod segments;
mod sockets;
mod timeouts;

use twheel_common::{
    flow::Direction::{self, *},
    packet::{
        Segment,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{
        Change, Seen,
        State::{self, *},
        View,
    },
    tracked::Tracked,
};

use segments::{BOTH, ONE_WAY, segment};

const STRICT: View = View {
    one_way: true,
    strict: true,
};

/// Two ends that number their segments as TCP does, and the flow as it is tracked.
#[derive(Clone, Copy)]
struct Wire {
    /// The next sequence number of each end.
    next: [u32; 2],
    view: View,
    flow: Option<Tracked>,
}

impl Wire {
    fn new(view: View) -> Self {
        Self {
            // The first one wraps around.
            next: [u32::MAX - 1, 9_000_000],
            view,
            flow: None,
        }
    }

    /// The next segment of this end.
    fn segment(&self, direction: Direction, flags: u8, length: u32) -> Segment {
        let other = self.next[direction.reverse() as usize];
        let ack = if flags & ACK != 0 { other } else { 0 };
        segment(direction, flags, self.next[direction as usize], ack, length)
    }

    fn send(&mut self, direction: Direction, flags: u8, length: u32) -> Change {
        let segment = self.segment(direction, flags, length);
        self.next[direction as usize] = segment.end;
        self.see(&segment)
    }

    /// Somebody sends this segment, not necessarily the end that it names.
    fn see(&mut self, segment: &Segment) -> Change {
        match &mut self.flow {
            Some(flow) => flow.see(segment, self.view),
            None => {
                let flow = Tracked::first(segment, self.view).expect("a first segment");
                self.flow = Some(flow);
                Change::Add(flow.seen)
            }
        }
    }

    fn seen(&self) -> Seen {
        self.flow.expect("a flow").seen
    }

    fn state(&self) -> State {
        self.seen().state()
    }
}

/// The connection after these segments.
fn wire(segments: &[(Direction, u8)], view: View) -> Wire {
    let mut wire = Wire::new(view);
    for (direction, flags) in segments {
        wire.send(*direction, *flags, 0);
    }
    wire
}

/// The flow's state bits after these segments.
fn after(segments: &[(Direction, u8)]) -> Seen {
    seen(segments, BOTH)
}

fn seen(segments: &[(Direction, u8)], view: View) -> Seen {
    wire(segments, view).seen()
}

const HANDSHAKE: [(Direction, u8); 3] = [(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)];

fn established() -> Wire {
    wire(&HANDSHAKE, BOTH)
}

/// The segments that bring a connection, begun by the low end, into each state.
const WAYS: [(State, &[(Direction, u8)]); 9] = [
    (SynSent, &[(FromLow, SYN)]),
    (SynRecv, &[(FromLow, SYN), (FromHigh, SYN | ACK)]),
    (Established, &HANDSHAKE),
    (
        FinWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
        ],
    ),
    (
        CloseWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, ACK),
        ],
    ),
    (
        LastAck,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, FIN | ACK),
        ],
    ),
    (
        TimeWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, FIN | ACK),
            (FromLow, ACK),
        ],
    ),
    (
        Close,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, RST),
        ],
    ),
    (SynSent2, &[(FromLow, SYN), (FromHigh, SYN)]),
];
