//! The protocol of a wheel's inbox and of its driver's sleep under a model checker: CPUs post
//! flows, and a driver sleeps without limit until it is called. A lost call is a deadlock, which
//! loom reports.
//!
//! The code is that of `twheel_common::inbox`; the memory is loom's, with the same orderings as in
//! `table_model`: exchanges are acquire and release, and loads and stores are relaxed.
#![allow(missing_docs)]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    // The standard library's `Arc`, since the destructor of loom's fails after a failed model.
    sync::Arc,
};

use loom::{
    sync::{
        Notify,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{AcqRel, Relaxed},
        },
    },
    thread,
};
use twheel_common::{
    inbox::{self, Inbox},
    wheel::{Link, NEVER},
};

/// A deliberate error, to test the model itself.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    /// The caller stores the wake time, as if it were the driver.
    PosterStoresWake,
    /// The driver does not look again after it has stored how long it will sleep.
    NoLastLook,
    /// The driver looks first, and then stores how long it will sleep.
    WakeLast,
    /// The driver clears the call when it goes to sleep, not when it comes.
    ClearedLast,
    /// The poster calls before it posts.
    CalledFirst,
}

/// The tick of every flow's deadline.
const DUE: u64 = 10;

struct Wheel<const FLOWS: usize> {
    head: AtomicU32,
    called: AtomicBool,
    wake: AtomicU64,
    links: [AtomicU32; FLOWS],
    /// Notifies of a call; it may also come at any time without one.
    called_for: Notify,
    /// Notifies that some poster has stored a link.
    linked: Notify,
    broken: Broken,
}

impl<const FLOWS: usize> Inbox for Wheel<FLOWS> {
    fn swap_head(&self, head: Link) -> Link {
        Link::from_raw(self.head.swap(head.raw(), AcqRel))
    }

    fn swap_called(&self, called: bool) -> bool {
        self.called.swap(called, AcqRel)
    }

    fn wake(&self) -> u64 {
        self.wake.load(Relaxed)
    }

    fn set_wake(&self, tick: u64) {
        self.wake.store(tick, Relaxed);
    }

    fn set_link(&self, flow: u32, link: Link) {
        self.links[flow as usize].store(link.raw(), Relaxed);
        if link != Link::PENDING {
            self.linked.notify();
        }
    }

    fn call(&self) -> bool {
        self.called_for.notify();
        true
    }
}

impl<const FLOWS: usize> Wheel<FLOWS> {
    /// A wheel whose driver sleeps without limit.
    fn new(broken: Broken) -> Self {
        Self {
            head: AtomicU32::new(0),
            called: AtomicBool::new(false),
            wake: AtomicU64::new(NEVER),
            links: std::array::from_fn(|_| AtomicU32::new(0)),
            called_for: Notify::new(),
            linked: Notify::new(),
            broken,
        }
    }

    /// A packet shortens a flow's deadline.
    fn post(&self, flow: u32) {
        match self.broken {
            Broken::PosterStoresWake => {
                self.set_link(flow, Link::PENDING);
                let before = self.swap_head(Link::flow(flow));
                self.set_link(flow, before);
                if self.wake() > DUE && self.call() {
                    self.set_wake(DUE);
                }
            }
            Broken::CalledFirst => {
                inbox::hurry(self, DUE);
                self.set_link(flow, Link::PENDING);
                let before = self.swap_head(Link::flow(flow));
                self.set_link(flow, before);
            }
            _ => inbox::post(self, flow, DUE),
        }
    }

    /// Takes the flows out of a list and returns their number. Waits for a poster that has not
    /// stored its link yet.
    fn deliver(&self, mut list: Link) -> usize {
        let mut delivered = 0;
        while let Some(flow) = list.as_flow() {
            let next = loop {
                let next = Link::from_raw(self.links[flow as usize].load(Relaxed));
                if next != Link::PENDING {
                    break next;
                }
                // The real driver comes back at the next tick; by then the link has been stored.
                self.linked.wait();
            };
            list = next;
            delivered += 1;
        }
        delivered
    }

    /// Comes when it is called, until all flows are delivered.
    fn drive(&self) {
        let mut delivered = 0;
        while delivered < FLOWS {
            self.called_for.wait();
            delivered += self.turn();
        }
    }

    /// One turn of the driver: delivers all that there is, and then sleeps. Returns how many flows
    /// it delivered.
    fn turn(&self) -> usize {
        let mut delivered = match self.broken {
            Broken::ClearedLast => self.deliver(inbox::take(self)),
            _ => self.deliver(inbox::come(self)),
        };
        loop {
            let list = match self.broken {
                Broken::NoLastLook => {
                    self.set_wake(NEVER);
                    Link::NONE
                }
                Broken::WakeLast => {
                    let list = inbox::take(self);
                    if list == Link::NONE {
                        self.set_wake(NEVER);
                    }
                    list
                }
                _ => inbox::sleep(self, NEVER),
            };
            if list == Link::NONE {
                break;
            }
            delivered += self.deliver(list);
        }
        if self.broken == Broken::ClearedLast {
            self.swap_called(false);
        }
        delivered
    }

    /// The same for a driver that intends to come back at this tick.
    fn turn_until(&self, tick: u64) -> usize {
        let mut delivered = self.deliver(inbox::come(self));
        loop {
            let list = match self.broken {
                Broken::WakeLast => {
                    let list = inbox::take(self);
                    if list == Link::NONE {
                        self.set_wake(tick);
                    }
                    list
                }
                Broken::NoLastLook => {
                    self.set_wake(tick);
                    Link::NONE
                }
                _ => inbox::sleep(self, tick),
            };
            if list == Link::NONE {
                return delivered;
            }
            delivered += self.deliver(list);
        }
    }
}

fn explore(scenario: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(scenario);
}

/// Whether the model checker finds an error.
fn finds(scenario: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(scenario)).is_err()
}

/// Another CPU posts one flow after the other.
fn one_after_the_other(broken: Broken) {
    explore(move || {
        let wheel = Arc::new(Wheel::<2>::new(broken));
        let poster = {
            let wheel = wheel.clone();
            thread::spawn(move || {
                wheel.post(0);
                wheel.post(1);
            })
        };
        wheel.drive();
        poster.join().unwrap();
    });
}

/// Two other CPUs post one flow each.
fn two_at_once(broken: Broken) {
    explore(move || {
        let wheel = Arc::new(Wheel::<2>::new(broken));
        let posters: Vec<_> = (0..2)
            .map(|flow| {
                let wheel = wheel.clone();
                thread::spawn(move || wheel.post(flow))
            })
            .collect();
        wheel.drive();
        for poster in posters {
            poster.join().unwrap();
        }
    });
}

/// The driver wakes up by itself and goes to sleep for longer, while another CPU posts.
fn while_it_goes_to_sleep(broken: Broken) {
    explore(move || {
        let wheel = Arc::new(Wheel::<1>::new(broken));
        wheel.set_wake(DUE);
        let poster = {
            let wheel = wheel.clone();
            thread::spawn(move || wheel.post(0))
        };
        if wheel.turn_until(NEVER) == 0 {
            wheel.drive();
        }
        poster.join().unwrap();
    });
}

#[test]
fn flows_posted_one_after_the_other_are_delivered() {
    one_after_the_other(Broken::Nothing);
}

#[test]
fn flows_posted_at_once_are_delivered() {
    two_at_once(Broken::Nothing);
}

#[test]
fn a_flow_posted_while_the_driver_goes_to_sleep_is_delivered() {
    while_it_goes_to_sleep(Broken::Nothing);
}

#[test]
fn a_wake_that_a_poster_stores_is_found() {
    assert!(finds(|| one_after_the_other(Broken::PosterStoresWake)));
}

#[test]
fn a_missing_last_look_is_found() {
    assert!(finds(|| while_it_goes_to_sleep(Broken::NoLastLook)));
}

#[test]
fn a_wake_that_is_stored_last_is_found() {
    assert!(finds(|| while_it_goes_to_sleep(Broken::WakeLast)));
}

#[test]
fn a_call_that_is_forgotten_late_is_found() {
    assert!(finds(|| one_after_the_other(Broken::ClearedLast)));
    assert!(finds(|| two_at_once(Broken::ClearedLast)));
}

#[test]
fn a_call_before_the_flow_is_there_is_found() {
    assert!(finds(|| one_after_the_other(Broken::CalledFirst)));
}
