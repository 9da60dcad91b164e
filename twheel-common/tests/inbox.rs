//! The inbox of a wheel, one step after the other. (`inbox_model.rs` tests what CPUs do to it at
//! once.)
#![allow(missing_docs)]

use std::cell::RefCell;

use twheel_common::{
    inbox::{self, Inbox},
    wheel::{Link, NEVER},
};

/// The operations on an inbox, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Did {
    Head(Link),
    Called(bool),
    Wake(u64),
    Linked(u32, Link),
    Call,
}

/// An inbox for a single thread.
struct Memory {
    head: Link,
    called: bool,
    wake: u64,
    /// Whether the queue of calls has room.
    has_room: bool,
    did: Vec<Did>,
}

struct Wheel(RefCell<Memory>);

impl Wheel {
    /// An inbox whose driver comes back at this tick.
    fn new(wake: u64) -> Self {
        Self(RefCell::new(Memory {
            head: Link::NONE,
            called: false,
            wake,
            has_room: true,
            did: Vec::new(),
        }))
    }

    /// The operations since the last question.
    fn did(&self) -> Vec<Did> {
        std::mem::take(&mut self.0.borrow_mut().did)
    }

    fn calls(&self) -> usize {
        self.did().iter().filter(|did| **did == Did::Call).count()
    }
}

impl Inbox for Wheel {
    fn swap_head(&self, head: Link) -> Link {
        let mut memory = self.0.borrow_mut();
        memory.did.push(Did::Head(head));
        std::mem::replace(&mut memory.head, head)
    }

    fn swap_called(&self, called: bool) -> bool {
        let mut memory = self.0.borrow_mut();
        memory.did.push(Did::Called(called));
        std::mem::replace(&mut memory.called, called)
    }

    fn wake(&self) -> u64 {
        self.0.borrow().wake
    }

    fn set_wake(&self, tick: u64) {
        let mut memory = self.0.borrow_mut();
        memory.did.push(Did::Wake(tick));
        memory.wake = tick;
    }

    fn set_link(&self, flow: u32, link: Link) {
        self.0.borrow_mut().did.push(Did::Linked(flow, link));
    }

    fn call(&self) -> bool {
        let mut memory = self.0.borrow_mut();
        memory.did.push(Did::Call);
        memory.has_room
    }
}

#[test]
fn a_flow_is_posted_as_the_protocol_says() {
    let wheel = Wheel::new(10);
    inbox::post(&wheel, 7, 10);
    let flow = Link::flow(7);
    let expected = [
        Did::Linked(7, Link::PENDING),
        Did::Head(flow),
        Did::Linked(7, Link::NONE),
    ];
    assert_eq!(
        wheel.did(),
        expected,
        "the driver was called, though it comes in time"
    );
    // The next flow's link leads to the first one, and it is due before the driver comes.
    inbox::post(&wheel, 8, 9);
    let expected = [
        Did::Linked(8, Link::PENDING),
        Did::Head(Link::flow(8)),
        Did::Linked(8, flow),
        Did::Called(true),
        Did::Call,
    ];
    assert_eq!(wheel.did(), expected);
    assert_eq!(inbox::come(&wheel), Link::flow(8));
    assert_eq!(wheel.did(), [Did::Called(false), Did::Head(Link::NONE)]);
    assert_eq!(inbox::come(&wheel), Link::NONE);
}

#[test]
fn who_sleeps_past_the_tick_is_called_once() {
    let wheel = Wheel::new(NEVER);
    for _ in 0..3 {
        inbox::hurry(&wheel, 5);
    }
    assert_eq!(wheel.calls(), 1);
    // The driver has come, and sleeps until the tick.
    inbox::come(&wheel);
    assert_eq!(inbox::sleep(&wheel, 5), Link::NONE);
    inbox::hurry(&wheel, 5);
    assert_eq!(wheel.calls(), 0);
    inbox::hurry(&wheel, 4);
    assert_eq!(wheel.calls(), 1);
}

#[test]
fn whether_a_call_is_under_way_is_told() {
    let wheel = Wheel::new(NEVER);
    assert!(inbox::call(&wheel));
    assert!(inbox::call(&wheel), "an earlier call is not recognised");
    assert_eq!(wheel.calls(), 1);
    inbox::come(&wheel);
    // The queue is full: the next caller tries again.
    wheel.0.borrow_mut().has_room = false;
    assert!(!inbox::call(&wheel));
    assert!(!inbox::call(&wheel));
    wheel.0.borrow_mut().has_room = true;
    assert!(inbox::call(&wheel));
    assert_eq!(wheel.calls(), 3);
}

#[test]
fn who_goes_to_sleep_says_until_when_and_looks_once_more() {
    let wheel = Wheel::new(0);
    inbox::post(&wheel, 3, 1);
    wheel.did();
    assert_eq!(inbox::sleep(&wheel, 12), Link::flow(3));
    assert_eq!(wheel.did(), [Did::Wake(12), Did::Head(Link::NONE)]);
    assert_eq!(wheel.0.borrow().wake, 12);
    assert_eq!(inbox::take(&wheel), Link::NONE);
}
