//! Scheme 7 with timers that are parts of the driver's objects.

use twheel_timers::{Intrusive, Node, Nodes};

use super::contender::{Contender, must};

/// What the driver has, with its timer.
struct Object {
    timer: Node,
    value: u64,
}

struct Objects(Vec<Object>);

impl Nodes for Objects {
    #[inline]
    fn node(&self, id: u32) -> Option<&Node> {
        Some(&self.0.get(id as usize)?.timer)
    }

    #[inline]
    fn node_mut(&mut self, id: u32) -> Option<&mut Node> {
        Some(&mut self.0.get_mut(id as usize)?.timer)
    }
}

/// The driver keeps no handles: a timer's number is its object's place.
pub struct Embedded {
    wheel: Intrusive,
    objects: Objects,
    now: u64,
    sum: u64,
}

impl Embedded {
    /// For this many timers.
    pub fn new(n: usize) -> Self {
        Self {
            wheel: must(Intrusive::new(3, 1024)),
            objects: Objects(Vec::with_capacity(n)),
            now: 0,
            sum: 0,
        }
    }

    fn arm(&mut self, id: u32, interval: u32) {
        let interval = interval.into();
        assert!(self.wheel.start(&mut self.objects, id, self.now, interval));
    }
}

impl Contender for Embedded {
    fn start(&mut self, intervals: &[u32]) {
        for (id, interval) in (0..).zip(intervals) {
            if self.objects.0.len() == id as usize {
                self.objects.0.push(Object {
                    timer: Node::new(),
                    value: id.into(),
                });
            }
            self.arm(id, *interval);
        }
    }

    fn start_again(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            self.arm(*id, *interval);
        }
    }

    fn rearm(&mut self, order: &[u32], intervals: &[u32]) {
        self.start_again(order, intervals);
    }

    fn stop(&mut self, order: &[u32]) {
        for id in order {
            self.wheel.stop(&mut self.objects, *id);
        }
    }

    fn pass(&mut self, ticks: u32) {
        self.now += u64::from(ticks);
    }

    fn expire(&mut self) -> usize {
        let mut count = 0;
        while let Some(id) = self.wheel.expire(&mut self.objects, self.now) {
            count += 1;
            self.sum = self.sum.wrapping_add(self.objects.0[id as usize].value);
        }
        count
    }
}
