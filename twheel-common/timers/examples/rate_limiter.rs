//! A limit on requests: each client may make so many in any window of a second.
//!
//! A request takes a token, and a timer gives it back after a second. Clients without requests take
//! no memory. All timers have one length: scheme 4.

use std::collections::HashMap;

use twheel_timers::{Error, Scheme, Simple, Timers};

/// Ticks of 10 ms.
const WINDOW: u64 = 100;
const MOST: u32 = 10;

struct Limiter {
    /// Requests of the last second.
    recent: HashMap<u64, u32>,
    timers: Timers<u64, Simple>,
}

impl Limiter {
    fn allows(&mut self, now: u64, client: u64) -> Result<bool, Error> {
        while let Some(expired) = self.timers.expire(now) {
            if let Some(count) = self.recent.get_mut(&expired.value) {
                *count -= 1;
                if *count == 0 {
                    self.recent.remove(&expired.value);
                }
            }
        }
        let count = self.recent.entry(client).or_default();
        if *count == MOST {
            return Ok(false);
        }
        *count += 1;
        self.timers.insert(now, WINDOW, client)?;
        Ok(true)
    }
}

/// Runs the example.
pub fn main() -> Result<(), Error> {
    let mut limiter = Limiter {
        recent: HashMap::new(),
        timers: Timers::new(Simple::new(128)?),
    };
    // Client 1 asks once a tick, client 2 once in 20 ticks, for ten seconds.
    let mut allowed = [0; 3];
    for now in 0..1_000 {
        allowed[1] += u32::from(limiter.allows(now, 1)?);
        if now % 20 == 0 {
            allowed[2] += u32::from(limiter.allows(now, 2)?);
        }
    }
    assert_eq!(allowed[1], 10 * MOST);
    assert_eq!(allowed[2], 50, "all of it");
    // A second later nothing is left.
    assert!(limiter.allows(1_100, 3)?);
    assert_eq!((limiter.recent.len(), limiter.timers.len()), (1, 1));
    println!(
        "of 1000 and 50 requests {} and {} were allowed",
        allowed[1], allowed[2]
    );
    Ok(())
}
