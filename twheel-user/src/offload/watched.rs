//! What is watched, as the threads see it that look at passed sockets.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use twheel_common::{
    key::{Direction, FlowKey},
    packet::PROTO_TCP,
    state::State,
    table::Hash,
};

use crate::{connection::Ends, flows::Flows};

/// A network namespace, and the flow table of what is watched there.
pub struct Watched {
    /// The namespace's cookie.
    pub namespace: u64,
    /// The table, …
    pub flows: Arc<Flows>,
    /// … and where its flows are.
    pub hash: Hash,
}

impl Watched {
    /// Whether packets of both ends have told that a connection is established, and none that it ends.
    pub fn is_established(&self, (local, remote): Ends) -> bool {
        // The kernel gives a raw socket the number of its protocol as its own port, or none
        // (`inet_create` in `net/ipv4/af_inet.c`). It is no connection, whatever packets tell.
        if matches!(local.port(), 0 | PORT_OF_RAW) {
            return false;
        }
        let found = self.flows.find(&self.hash, &key(local, remote).0);
        let seen = found.ok().flatten().map(|flow| flow.word.seen());
        // One that was entered may have been ending before that.
        seen.is_some_and(|seen| {
            seen.state() == State::Established && seen.is_replied() && !seen.is_unplaced()
        })
    }

    /// Whether a flow is in the table, and its latest packet is of after this time, of the low 32 bits
    /// of the clock.
    pub fn has_packet_after(&self, key: &FlowKey, time: u32) -> bool {
        let found = self.flows.find(&self.hash, key).ok().flatten();
        found.is_some_and(|flow| flow.word.stamp().wrapping_sub(time) as i32 > 0)
    }
}

const PORT_OF_RAW: u16 = PROTO_TCP as u16;

/// The key of a connection, and the direction of what its first end sends.
pub fn key(local: SocketAddr, remote: SocketAddr) -> (FlowKey, Direction) {
    let of = |end: SocketAddr| {
        let address = match end.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let bytes = address.octets();
        let half = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("16 bytes"));
        ([half(0), half(8)], end.port().to_be())
    };
    let ((source, source_port), (destination, destination_port)) = (of(local), of(remote));
    FlowKey::new(
        source,
        source_port,
        destination,
        destination_port,
        PROTO_TCP,
    )
}
