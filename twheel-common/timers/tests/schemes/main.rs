//! All schemes compared with a sorted map of deadlines, and one test for each bug that earlier
//! wheels had.
#![allow(missing_docs)]

mod bounds;
mod edges;
mod netty;
mod oracle;

use twheel_timers::{
    End, Growing, Hashed, HashedOrdered, Heap, Hierarchical, Ordered, Scheme, Simple, Timers,
    Unordered,
};

type Boxed<T> = Box<dyn Scheme<T> + Send>;

/// A scheme, and its limits in the tests.
struct Case<T> {
    name: &'static str,
    /// The longest interval that it takes.
    range: u64,
    /// How many ticks it can be driven at a time without very many rounds.
    reach: u64,
    /// log2 of the slots of a level.
    bits: u32,
    scheme: Boxed<T>,
}

fn cases<T: Send + 'static>() -> Vec<Case<T>> {
    let case = |name, range, reach, bits, scheme| Case {
        name,
        range,
        reach,
        bits,
        scheme,
    };
    let hashed = |slots| Box::new(Timers::new(Hashed::new(slots).unwrap()));
    let hashed_ordered = |slots| Box::new(Timers::new(HashedOrdered::new(slots).unwrap()));
    let simple = |slots| Box::new(Timers::new(Simple::new(slots).unwrap()));
    let levels = |m, slots| Box::new(Timers::new(Hierarchical::new(m, slots).unwrap()));
    let ticked = |slots| Box::new(Timers::new(Growing::ticked(slots).unwrap()));
    let skipping = |slots| Box::new(Timers::new(Growing::skipping(slots).unwrap()));
    let ordered = |end| Box::new(Timers::new(Ordered::new(end)));
    let (any, far) = (u64::MAX, 1 << 41);
    vec![
        case(
            "1 unordered",
            any,
            far,
            8,
            Box::new(Timers::new(Unordered::new())),
        ),
        case(
            "2 ordered, from the front",
            any,
            far,
            8,
            ordered(End::Front),
        ),
        case("2 ordered, from the rear", any, far, 8, ordered(End::Rear)),
        case("3 heap", any, far, 8, Box::new(Timers::new(Heap::new()))),
        case("4 simple, 2 slots", 1, 1 << 7, 1, simple(2)),
        case("4 simple, 64 slots", 63, 1 << 12, 6, simple(64)),
        case(
            "4 simple, 2^17 slots",
            (1 << 17) - 1,
            1 << 23,
            17,
            simple(1 << 17),
        ),
        case(
            "5 hashed ordered, 1 slot",
            any,
            1 << 7,
            1,
            hashed_ordered(1),
        ),
        case(
            "5 hashed ordered, 64 slots",
            any,
            1 << 12,
            6,
            hashed_ordered(64),
        ),
        case("6 hashed, 1 slot", any, 1 << 7, 1, hashed(1)),
        case("6 hashed, 2 slots", any, 1 << 7, 1, hashed(2)),
        case("6 hashed, 256 slots", any, 1 << 14, 8, hashed(256)),
        case("6 hashed, 2^17 slots", any, 1 << 23, 17, hashed(1 << 17)),
        case("7 hierarchical, 1 level of 2", any, 1 << 7, 1, levels(1, 2)),
        case(
            "7 hierarchical, 4 levels of 2",
            any,
            1 << 10,
            1,
            levels(4, 2),
        ),
        case(
            "7 hierarchical, 3 levels of 8",
            any,
            1 << 15,
            3,
            levels(3, 8),
        ),
        case(
            "7 hierarchical, 3 levels of 1024",
            any,
            1 << 36,
            10,
            levels(3, 1024),
        ),
        case(
            "7 hierarchical, 4 levels of 4096",
            any,
            far,
            12,
            levels(4, 4096),
        ),
        case(
            "7 hierarchical, 8 levels of 128",
            any,
            far,
            7,
            levels(8, 128),
        ),
        case("7 growing, ticked, 2 slots", any, far, 1, ticked(2)),
        case("7 growing, ticked, 64 slots", any, far, 6, ticked(64)),
        case("7 growing, skipping, 2 slots", any, far, 1, skipping(2)),
        case("7 growing, skipping, 16 slots", any, far, 4, skipping(16)),
        case(
            "7 growing, skipping, 2^20 slots",
            any,
            far,
            20,
            skipping(1 << 20),
        ),
    ]
}

/// xorshift64*: the same numbers in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        // The upper half is more random.
        (self.next() >> 16) % bound
    }

    /// An interval of any magnitude, often a power of two or a neighbour of one.
    fn interval(&mut self, range: u64) -> u64 {
        let magnitude = 1 << self.below(41);
        let interval = match self.below(4) {
            0 => magnitude + self.below(3) - 1,
            1 => self.below(200),
            2 => self.below(5_000),
            _ => self.below(magnitude),
        };
        if interval <= range {
            interval
        } else {
            range - self.below(range.min(2) + 1)
        }
    }
}

/// Drives the scheme up to `now` with a practically unlimited budget. Returns what fires, with its
/// deadlines.
fn drive<T>(scheme: &mut Boxed<T>, now: u64) -> Vec<(T, u64)> {
    let mut fired = Vec::new();
    loop {
        let done = scheme.advance(now, 1_000);
        while let Some(timer) = scheme.pop_expired() {
            fired.push((timer.value, timer.deadline));
        }
        if done {
            return fired;
        }
    }
}
