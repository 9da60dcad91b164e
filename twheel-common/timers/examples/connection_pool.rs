//! A pool of connections that closes those that nobody has used for a while.
//!
//! Each use puts the timeout off: with a wheel that is one store. All timeouts have one length, so
//! scheme 4 fits: one level, no timer is ever moved.

use std::collections::HashMap;

use twheel_timers::{Error, Key, Scheme, Simple, Timers};

/// Ticks of 100 ms.
const IDLE: u64 = 300;

/// A connection, and its timer while it is not in use.
struct Connection {
    peer: &'static str,
    idle: Option<Key>,
}

struct Pool {
    connections: HashMap<u32, Connection>,
    timers: Timers<u32, Simple>,
    next: u32,
}

impl Pool {
    fn new() -> Result<Self, Error> {
        Ok(Self {
            connections: HashMap::new(),
            timers: Timers::new(Simple::new(512)?),
            next: 0,
        })
    }

    /// A connection to a peer: one that is idle, or a new one.
    fn take(&mut self, peer: &'static str) -> u32 {
        let mut connections = self.connections.iter_mut();
        let idle = connections.find(|(_, it)| it.peer == peer && it.idle.is_some());
        if let Some((id, connection)) = idle {
            if let Some(key) = connection.idle.take() {
                self.timers.remove(key);
            }
            return *id;
        }
        self.next += 1;
        let idle = None;
        self.connections
            .insert(self.next, Connection { peer, idle });
        self.next
    }

    /// Gives a connection back. From now on it is idle.
    fn give_back(&mut self, now: u64, id: u32) -> Result<(), Error> {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.idle = Some(self.timers.insert(now, IDLE, id)?);
        }
        Ok(())
    }

    /// Closes what was idle for too long. Returns how many.
    fn close_idle(&mut self, now: u64) -> usize {
        let mut closed = 0;
        while let Some(expired) = self.timers.expire(now) {
            self.connections.remove(&expired.value);
            closed += 1;
        }
        closed
    }
}

/// Runs the example.
pub fn main() -> Result<(), Error> {
    let mut pool = Pool::new()?;
    let (a, b) = (pool.take("db-1"), pool.take("db-1"));
    assert_ne!(a, b, "both are in use");
    pool.give_back(0, a)?;
    pool.give_back(0, b)?;
    // One is used again from tick 200 to 250, the other is not.
    assert_eq!(pool.close_idle(200), 0);
    let used = pool.take("db-1");
    assert_eq!(pool.close_idle(250), 0);
    pool.give_back(250, used)?;
    assert_eq!(pool.close_idle(299), 0);
    assert_eq!(pool.close_idle(300), 1);
    assert!(pool.connections.contains_key(&used));
    assert_eq!(pool.close_idle(549), 0);
    assert_eq!(pool.close_idle(550), 1);
    assert!(pool.connections.is_empty());
    println!("2 connections were closed when they had been idle for {IDLE} ticks");
    Ok(())
}
