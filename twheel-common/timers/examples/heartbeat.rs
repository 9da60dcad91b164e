//! Members of a cluster that must be heard of every three seconds; listeners are told of those that
//! were not.

use std::{sync::mpsc, time::Duration};

use twheel_timers::{Error, Expiring};

/// Runs the example.
pub fn main() -> Result<(), Error> {
    // Ticks of 100 ms.
    let mut members = Expiring::new(Duration::from_secs(3), Duration::from_millis(100))?;
    let (sender, dead) = mpsc::channel();
    members.add_listener(move |member: &u32| {
        // Nobody may be interested any more.
        let _ = sender.send(*member);
    });
    // Member k fails at tick 10 k; until then it sends a heartbeat every 10 ticks.
    let mut failures = Vec::new();
    for now in 0..200 {
        if now % 10 == 0 {
            for member in (0..10).filter(|member| now <= 10 * u64::from(*member)) {
                members.insert(now, member)?;
            }
        }
        while !members.advance(now, 100) {}
        failures.extend(dead.try_iter().map(|member| (now, member)));
    }
    let expected: Vec<_> = (0..10).map(|k| (10 * u64::from(k) + 30, k)).collect();
    assert_eq!(failures, expected);
    println!("each member was missed 30 ticks after its last heartbeat");
    Ok(())
}
