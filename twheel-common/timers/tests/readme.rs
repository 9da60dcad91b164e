//! The README's first example, without the feature `tokio`: all of the README is tested with it.
#![allow(missing_docs)]

use twheel_timers::{Error, Hierarchical, Scheme, Timers};

fn main() -> Result<(), Error> {
    let mut timers = Timers::new(Hierarchical::new(3, 1024)?);
    let (now, interval) = (0, 30); // in ticks of any length
    let key = timers.insert(now, interval, "idle connection")?;
    timers.reset(key, 20, interval)?; // a packet: 30 ticks from tick 20
    assert_eq!(timers.expire(49), None);
    let idle = timers.expire(50).map(|timer| timer.value);
    assert_eq!(idle, Some("idle connection"));
    Ok(())
}

#[test]
fn the_first_example_runs_without_tokio() {
    main().unwrap();
    let mut examples = include_str!("../README.md").split("```rust\n").skip(1);
    let first = examples.next().and_then(|rest| rest.split("```").next());
    let (first, this) = (first.unwrap(), include_str!("readme.rs"));
    assert!(this.contains(first), "this file has another one: {first}");
}
