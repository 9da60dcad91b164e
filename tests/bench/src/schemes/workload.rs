//! The intervals and orders of timers, the same in each round.

/// How long timers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Intervals {
    /// Any number of ticks below 2^16 alike.
    Uniform,
    /// A mean of 2^14 ticks, cut at 2^16, which 2 % reach.
    Exponential,
}

impl Intervals {
    /// Both distributions.
    pub const ALL: [Self; 2] = [Self::Uniform, Self::Exponential];

    /// Its name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Exponential => "exponential",
        }
    }
}

/// The longest interval.
pub const LONGEST: u32 = (1 << 16) - 1;

/// xorshift64*.
pub struct Random(pub u64);

impl Random {
    /// A number from 0 up to, but not including, 1.
    pub fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }

    /// An exponentially distributed number of mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }
}

/// What a round does.
pub struct Workload {
    /// Intervals for the starts.
    pub first: Vec<u32>,
    /// Intervals for the re-arms, earlier or later at random.
    pub again: Vec<u32>,
    /// Intervals in the upper half of the range, so that for a long time no tick has anything to
    /// do.
    pub far: Vec<u32>,
    /// All timers in an order that no cache can predict.
    pub order: Vec<u32>,
}

impl Workload {
    /// For this many timers.
    pub fn new(n: usize, intervals: Intervals) -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut draw = |count: usize| -> Vec<u32> {
            let draw = |_| {
                let ticks = match intervals {
                    Intervals::Uniform => random.unit() * f64::from(LONGEST),
                    Intervals::Exponential => random.exponential() * f64::from(1 << 14),
                };
                (1 + ticks as u32).min(LONGEST)
            };
            (0..count).map(draw).collect()
        };
        let (first, again) = (draw(n), draw(n));
        let far = first.iter().map(|it| (1 << 15) + it / 2).collect();
        let mut order: Vec<u32> = (0..n as u32).collect();
        for at in (1..n).rev() {
            order.swap(at, random.below(at + 1));
        }
        Self {
            first,
            again,
            far,
            order,
        }
    }
}
