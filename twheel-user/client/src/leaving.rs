//! Sockets of which a timer has ended while twheel was being asked to keep it. Until twheel has
//! answered, it may keep that one, and would refuse another timer of the socket.

use std::collections::{HashMap, hash_map::Entry};

use crate::slot::Tag;

/// By the socket's cookie: how many such timers there are, and the later ones, which wait.
#[derive(Default)]
pub struct Leaving(HashMap<u64, (u32, Vec<Tag>)>);

impl Leaving {
    /// A timer of this socket has ended, about which twheel has not answered.
    pub fn begin(&mut self, cookie: u64) {
        self.0.entry(cookie).or_default().0 += 1;
    }

    /// Has a timer wait for the earlier ones of its socket. Whether there are any.
    pub fn waits(&mut self, cookie: u64, tag: Tag) -> bool {
        let earlier = self.0.get_mut(&cookie);
        earlier.map(|(_, later)| later.push(tag)).is_some()
    }

    /// twheel has answered about one. Returns the timers that have waited, if that was the last.
    pub fn end(&mut self, cookie: u64) -> Vec<Tag> {
        let Entry::Occupied(mut held) = self.0.entry(cookie) else {
            return Vec::new();
        };
        held.get_mut().0 -= 1;
        if held.get().0 > 0 {
            return Vec::new();
        }
        held.remove().1
    }

    /// twheel has ended: nobody answers any more.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
