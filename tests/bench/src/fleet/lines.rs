//! Lines of ends of flows as the hosts of a fleet send them: generated, with the spread of values that
//! real traffic has.

use std::{
    fmt::Write as _,
    net::Ipv4Addr,
    time::{Duration, SystemTime},
};

/// Ports, and how many of a hundred flows each has.
const SERVICES: [(u16, u64); 10] = [
    (443, 34),
    (80, 16),
    (5432, 12),
    (6379, 10),
    (8080, 8),
    (9092, 6),
    (3306, 5),
    (22, 3),
    (8443, 3),
    (11211, 3),
];
/// Reasons, states, and how many of a hundred flows end so.
const ENDINGS: [(&str, &str, u64); 5] = [
    ("closed", "time_wait", 62),
    ("reset", "close", 18),
    ("idle", "established", 12),
    ("closed", "last_ack", 5),
    ("idle", "syn_sent", 3),
];
/// Ends that each host reports in a second.
const RATE: u64 = 1000;
/// How the names of the hosts end.
const DOMAIN: &str = ".example.net";
/// The unit of the times of twheel's events.
const JIFFY_US: u64 = 4000;
/// The unit in which time passes.
const SECOND_US: u64 = 1_000_000;

/// The events of a host, in order.
pub struct Lines {
    host: u64,
    begun_us: u64,
    seq: u64,
    random: u64,
}

impl Lines {
    /// The events of a host of this number, from this time on.
    pub fn new(host: u64, begun: SystemTime) -> Self {
        let begun = begun.duration_since(SystemTime::UNIX_EPOCH);
        Self {
            host,
            begun_us: begun.unwrap_or_default().as_micros() as u64,
            seq: 0,
            random: 0x9e37_79b9_7f4a_7c15 ^ (host + 1) << 32,
        }
    }

    /// Xorshift64*.
    fn next(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below a bound; small numbers are much more frequent.
    fn skewed(&mut self, bound: u64) -> u64 {
        let fraction = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        (fraction.powi(3) * bound as f64) as u64
    }

    /// Between 1 and 2^bits, each order of magnitude as frequent.
    fn spread(&mut self, bits: u32) -> u64 {
        let fraction = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        (fraction * f64::from(bits)).exp2() as u64
    }

    /// One of a table whose last column is its share, of a hundred.
    fn one_of(&mut self, shares: impl Iterator<Item = u64>) -> usize {
        let mut at = self.next() % 100;
        for (number, share) in shares.enumerate() {
            if at < share {
                return number;
            }
            at -= share;
        }
        0
    }

    /// The next event's key and its line, added to a text with the end of line.
    pub fn add(&mut self, to: &mut String) -> String {
        self.seq += 1;
        let service = self.one_of(SERVICES.iter().map(|it| it.1));
        let ending = self.one_of(ENDINGS.iter().map(|it| it.2));
        let (reason, state, _) = ENDINGS[ending];
        let is_in = self.next() % 10 < 7;
        let own = Ipv4Addr::from(0x0a14_0000 + self.host as u32 * 7 + 1);
        let peer = Ipv4Addr::from(0x0a20_0000 + self.skewed(5000) as u32);
        let (src, dst) = if is_in { (peer, own) } else { (own, peer) };
        let flow_id = uuid(self.next(), self.next());
        let time = self.begun_us + self.seq * SECOND_US / RATE / JIFFY_US * JIFFY_US;
        let idle = match reason {
            "idle" => 3_600_000_000,
            "reset" => 10_000_000,
            _ => 120_000_000,
        } + self.next() % 2 * JIFFY_US;
        let age = idle + self.spread(28) / JIFFY_US * JIFFY_US;
        let packets = 3 + self.spread(11);
        let replies = packets - packets / 4 + self.next() % 3;
        let bytes = packets * (52 + self.skewed(1200));
        let answered = replies * (52 + self.skewed(1400));
        let sport = 32_768 + self.next() % 28_232;
        let _ = writeln!(
            to,
            "{{\"schema\":1,\"event\":\"end\",\"time\":\"{}\",\"host\":\"gw{}{DOMAIN}\",\
             \"instance\":\"eth0@host.17956{:08}\",\"seq\":{},\"flow_id\":\"{flow_id}\",\"start\":\"{}\",\
             \"proto\":\"tcp\",\"src\":\"{src}\",\"sport\":{},\"dst\":\"{dst}\",\"dport\":{},\
             \"state\":\"{state}\",\"iface\":\"eth0\",\"direction\":\"{}\",\"picked_up\":false,\
             \"reason\":\"{reason}\",\"age_us\":{age},\"idle_us\":{idle},\"orig_packets\":{packets},\
             \"orig_bytes\":{bytes},\"reply_packets\":{replies},\"reply_bytes\":{answered}}}",
            stamp(time),
            self.host,
            self.host * 7919,
            self.seq,
            stamp(time - age),
            sport,
            SERVICES[service].0,
            if is_in { "in" } else { "out" },
        );
        flow_id
    }
}

/// Whether a host of this name has generated events.
pub fn is_generated(host: &str) -> bool {
    host.ends_with(DOMAIN)
}

fn stamp(micros: u64) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + Duration::from_micros(micros))
}

/// A UUID of version 8.
fn uuid(high: u64, low: u64) -> String {
    let high = high & !0xf000 | 0x8000;
    let low = low & !(0b11 << 62) | 0b10 << 62;
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}
