//! An over-quota source makes room for others.

use std::{
    array,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::{IpAddr, Ipv4Addr},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use aya::maps::{MapData, RingBuf};
use etherparse::PacketBuilder;
use twheel::quota::{Holder, QuotaReader as Reader};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::Direction,
    quota::{CALL, LASTS},
};
use twheel_tests::{
    is_long,
    plane::{ACK, Plane, RST, SYN, Setup, frame},
};

use crate::{Random, put};

/// A table for 64 flows, of which a source may hold 16.
struct Shared {
    plane: Plane,
    shares: Reader,
    calls: RingBuf<MapData>,
}

/// A client with the address of this number: [`frame`] gives 50,000 clients one address.
fn other(number: u32) -> u32 {
    50_000 * (1 + number)
}

/// How many secrets each of these tests tries; they are drawn anew each time.
const SECRETS: usize = 8;

/// Runs a test with several secrets of the table's hash, which determine where flows are stored and
/// so which are inspected for eviction. The result must not depend on the secret. `TWHEEL_SEED`
/// gives the same secrets again.
///
/// There is one exception: if a newcomer's whole window is taken, a flow in it is evicted or the
/// newcomer is refused, and the table counts that in `window_full`. A failure then proves nothing,
/// and the test is repeated with another secret.
fn for_any_secret(test: impl Fn(&mut Shared)) {
    let seed = std::env::var("TWHEEL_SEED").map_or_else(
        |_| RandomState::new().hash_one(()),
        |seed| seed.parse().unwrap(),
    );
    println!("TWHEEL_SEED={seed}");
    let wanted = if is_long() { 50 * SECRETS } else { SECRETS };
    let (mut tried, mut full) = (0, 0);
    while tried < wanted {
        let mut random = Random::new(seed.wrapping_add(tried as u64 + full));
        let mut word = || u64::from(random.word()) << 32 | u64::from(random.word());
        let secret = array::from_fn(|_| word());
        let mut shared = Shared::new(secret);
        let result = catch_unwind(AssertUnwindSafe(|| test(&mut shared)));
        match result {
            Ok(()) => tried += 1,
            Err(_) if shared.plane.count(Counter::WindowFull) > 0 => full += 1,
            Err(panic) => {
                eprintln!("secret {secret:x?}");
                resume_unwind(panic);
            }
        }
        assert!(
            full <= 2,
            "{full} tables had a full window, beside {tried} good ones"
        );
    }
}

impl Shared {
    fn new(secret: [u64; 11]) -> Self {
        let setup = Setup {
            max_flows: 64,
            share: true,
            one_way: false,
            // Established flows outlive the test; closed ones end before the counts of sources are
            // forgotten. Half-open flows have an earlier deadline than established ones, as by
            // default, so eviction inspects them first wherever they are.
            timeout: 600_000,
            close: 5_000,
            syn_sent: Some(120_000),
            secret: Some(secret),
            ..Setup::default()
        };
        let mut plane = setup.load();
        let shares = Reader::new(plane.plane(), 25).unwrap();
        let calls = plane.plane().take_wakes().unwrap();
        Self {
            plane,
            shares,
            calls,
        }
    }

    fn establish(&mut self, client: u32) {
        self.plane.receive(&frame(client, false, SYN));
        self.plane.send(&frame(client, true, SYN | ACK));
        self.plane.receive(&frame(client, false, ACK));
    }

    /// How often the running twheel was called since the last question.
    fn calls(&mut self) -> usize {
        let mut calls = 0;
        while let Some(record) = self.calls.next() {
            calls += usize::from(*record == CALL.to_ne_bytes()[..]);
        }
        calls
    }

    fn read(&mut self) -> Vec<(String, u64, bool)> {
        let of = |it: Holder| (it.source.to_string(), it.flows, it.is_new);
        self.shares.read().unwrap().into_iter().map(of).collect()
    }

    /// The number of flows in the table, by the address of their client.
    fn clients(&mut self) -> HashMap<IpAddr, u32> {
        let mut clients = HashMap::new();
        for flow in self.plane.plane().flows().unwrap().iter() {
            let ends = [Direction::FromLow, Direction::FromHigh].map(|it| flow.key.sender(it));
            let client = ends.into_iter().find(|end| end.port() != 80).unwrap();
            *clients.entry(client.ip()).or_default() += 1;
        }
        clients
    }

    /// The number of flows of the over-quota source, and of all others.
    fn held(&mut self) -> [u32; 2] {
        let clients = self.clients();
        let hog = clients.get(&HOG_IP).copied().unwrap_or(0);
        [hog, clients.values().sum::<u32>() - hog]
    }
}

/// The address of the first 50,000 clients.
const HOG_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 0));

#[test]
fn a_source_with_too_much_makes_room_for_others_down_to_its_share() {
    for_any_secret(|it| {
        for number in 0..8 {
            it.establish(other(number));
        }
        for client in 0..56 {
            it.plane.pass(1);
            it.establish(client);
        }
        assert_eq!(
            (it.held(), it.calls()),
            ([56, 8], 0),
            "the table was not full yet"
        );

        // The sources were not counted yet: newcomers are refused, and the running twheel is called
        // once a second.
        for number in 100..110 {
            it.establish(other(number));
        }
        assert_eq!((it.held(), it.calls()), ([56, 8], 1));
        it.plane.pass(1_000);
        it.establish(other(100));
        assert_eq!(it.calls(), 1);
        assert_eq!(it.read(), [(HOG_IP.to_string(), 56, true)]);

        let refused = it.plane.count(Counter::TableFull);
        for number in 100..140 {
            it.establish(other(number));
            // The over-quota source keeps asking for more.
            it.plane.receive(&frame(1_000 + number, false, SYN));
        }
        assert_eq!(it.held(), [16, 48]);
        assert_eq!(
            it.plane.count(Counter::TableFull),
            refused + 40,
            "flows of the over-quota source that were refused"
        );
        let events = it.plane.drain();
        let of_hog = |event: &Event| {
            let ends = [Direction::FromLow, Direction::FromHigh].map(|it| event.key.sender(it));
            event.reason == Reason::Evicted as u32 && ends.iter().any(|end| end.ip() == HOG_IP)
        };
        assert_eq!(events.iter().filter(|event| of_hog(event)).count(), 40);
        assert_eq!(events.len(), 40);
        // The flows that were idle longest go first.
        assert!(events.is_sorted_by_key(|event| event.at - u64::from(event.idle)));
        for counter in [Counter::Evicted, Counter::OverQuota] {
            assert_eq!(it.plane.count(counter), 40);
        }

        // The source keeps its quota.
        for number in 200..220 {
            it.establish(other(number));
        }
        assert_eq!(it.held(), [16, 48]);
        it.plane.pass(1_000);
        it.establish(other(200));
        assert_eq!(it.calls(), 1);
        assert_eq!(it.read(), []);
        it.establish(other(200));
        assert_eq!(it.held(), [16, 48]);
        it.plane.pass(700_000);
        assert_eq!(it.plane.step().len(), 64, "an eviction has broken a list");
        assert_eq!(it.plane.count(Counter::Orphans), 0);
    });
}

#[test]
fn a_source_with_too_much_evicts_nobody_elses_flows() {
    for_any_secret(|it| {
        for client in 0..56 {
            it.establish(client);
        }
        for number in 0..9 {
            it.establish(other(number));
        }
        assert_eq!(it.read(), [(HOG_IP.to_string(), 56, true)]);
        // Eight half-open flows take the places of eight established ones; any other source may
        // evict them.
        for number in 0..8 {
            it.plane.receive(&frame(other(number), false, RST));
        }
        it.plane.pass(5_100);
        assert_eq!(it.plane.step().len(), 8);
        for number in 10..18 {
            it.plane.receive(&frame(other(number), false, SYN));
        }
        let refused = it.plane.count(Counter::TableFull);
        for client in 2_000..2_050 {
            it.plane.receive(&frame(client, false, SYN));
        }
        assert_eq!(it.held(), [56, 8]);
        assert_eq!(it.plane.count(Counter::TableFull), refused + 50);
        it.plane.receive(&frame(other(50), false, SYN));
        assert_eq!(
            it.plane.drain().len(),
            1,
            "another source evicts one half-open flow"
        );
        assert_eq!(it.held(), [56, 8]);

        it.plane.pass(LASTS * 1_000);
        it.plane.receive(&frame(3_000, false, SYN));
        assert_eq!(it.held(), [57, 7], "the counts were not forgotten");
    });
}

#[test]
fn what_was_counted_is_soon_forgotten() {
    for_any_secret(|it| {
        for client in 0..64 {
            it.establish(client);
        }
        it.plane.receive(&frame(other(0), false, SYN));
        assert_eq!(it.read(), [(HOG_IP.to_string(), 64, true)]);
        it.plane.pass(LASTS * 1_000 - 1);
        it.establish(other(0));
        assert_eq!(it.held(), [63, 1]);
        it.plane.pass(1);
        it.establish(other(1));
        assert_eq!(it.held(), [63, 1], "the counts were used too long");
        assert_eq!(it.calls(), 2);
        assert_eq!(it.read(), [(HOG_IP.to_string(), 63, false)]);
        it.establish(other(1));
        assert_eq!(it.held(), [62, 2]);
    });
}

/// The connection of an evicted flow goes on: its next packet comes, from either end.
#[test]
fn who_has_lost_a_flow_does_not_get_it_back_as_nobodys() {
    for_any_secret(|it| {
        for client in 0..64 {
            it.establish(client);
        }
        it.plane.receive(&frame(other(0), false, SYN));
        it.read();
        for number in 0..30 {
            it.establish(other(number));
        }
        assert_eq!(it.held(), [34, 30]);
        for client in 0..64 {
            it.plane.send(&frame(client, true, ACK));
            it.plane.receive(&frame(client, false, ACK));
        }
        assert_eq!(it.held(), [34, 30], "the source got evicted flows back");
        assert_eq!(it.plane.drain().len(), 30);
        // When there is room again, they return and count.
        it.plane.pass(LASTS * 1_000);
        for number in 0..30 {
            it.plane.receive(&frame(other(number), false, RST));
        }
        it.plane.pass(10_100);
        assert_eq!(it.plane.step().len(), 30);
        for client in 0..64 {
            it.plane.send(&frame(client, true, ACK));
            it.plane.receive(&frame(client, false, ACK));
        }
        assert_eq!(it.held(), [64, 0]);
        let mut held = it.read();
        held.sort_by_key(|(_, flows, _)| *flows);
        let both = [("192.0.2.1", 30, true), (&HOG_IP.to_string(), 64, false)];
        let both = both.map(|(source, flows, is_new)| (source.to_owned(), flows, is_new));
        assert_eq!(held, both, "picked-up flows count for both ends");
    });
}

#[test]
fn a_network_is_one_source_and_this_host_is_none() {
    for_any_secret(|it| {
        let mut connect = |source: [u8; 16], port: u16| {
            for (back, syn, ack) in [
                (false, true, false),
                (true, true, true),
                (false, false, true),
            ] {
                let server = ([0x20; 16], 80);
                let ((from, sport), (to, dport)) = match back {
                    false => ((source, port), server),
                    true => (server, (source, port)),
                };
                let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6(from, to, 64);
                let mut segment = builder.tcp(sport, dport, if syn { 1 } else { 2 }, 1024);
                if syn {
                    segment = segment.syn();
                }
                if ack {
                    segment = segment.ack(2);
                }
                let mut frame = Vec::new();
                segment.write(&mut frame, &[]).unwrap();
                put(&mut it.plane, &frame, back);
            }
        };
        for host in 0..20 {
            let mut source = [0x3f; 16];
            source[15] = host;
            connect(source, 1_000);
        }
        for port in 1_000..1_030 {
            connect(std::net::Ipv6Addr::LOCALHOST.octets(), port);
        }
        let network = "3f3f:3f3f:3f3f:3f3f::/64".to_owned();
        assert_eq!(it.read(), [(network, 20, true)]);
    });
}

#[test]
fn without_shares_nobody_is_called_and_a_full_table_refuses() {
    let setup = Setup {
        max_flows: 64,
        one_way: false,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut shares = Reader::new(plane.plane(), 25).unwrap();
    let mut calls = plane.plane().take_wakes().unwrap();
    while calls.next().is_some() {}
    for client in 0..64 {
        for (back, flags) in [(false, SYN), (true, SYN | ACK), (false, ACK)] {
            put(&mut plane, &frame(client, back, flags), back);
        }
    }
    assert_eq!(shares.read().unwrap().len(), 1);
    while calls.next().is_some() {}
    plane.receive(&frame(other(0), false, SYN));
    assert!(calls.next().is_none());
    assert_eq!(plane.count(Counter::TableFull), 1);
}
