//! Wheels with threads around them: Netty's driver, and elements that expire.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use twheel_timers::{Expiring, Netty, TRANSFERS_PER_TICK, Timeout};

#[test]
fn expiring_elements_are_heard_of() {
    let second = Duration::from_secs(1);
    let mut wheel = Expiring::new(10 * second, second).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener = |name| {
        let heard = heard.clone();
        move |id: &char| heard.lock().unwrap().push((name, *id))
    };
    let one = wheel.add_listener(listener(1));
    wheel.add_listener(listener(2));
    assert_eq!(wheel.insert(0, 'a'), Ok(10));
    assert_eq!(wheel.insert(3, 'b'), Ok(10));
    assert_eq!(wheel.time_left(9, &'a'), Some(1));
    // A heartbeat restarts its time.
    assert_eq!(wheel.insert(9, 'a'), Ok(10));
    assert_eq!(wheel.time_left(9, &'a'), Some(10));
    assert_eq!(wheel.insert_with(9, 'c', 2), Ok(2));
    assert!(wheel.insert_with(9, 'c', 11).is_err() && wheel.insert_with(9, 'c', 0).is_err());
    let hear = |wheel: &mut Expiring<char>, tick| {
        while !wheel.advance(tick, 3) {}
        std::mem::take(&mut *heard.lock().unwrap())
    };
    assert_eq!(hear(&mut wheel, 10), []);
    assert_eq!(hear(&mut wheel, 11), [(1, 'c'), (2, 'c')]);
    assert_eq!(hear(&mut wheel, 12), []);
    assert!(wheel.remove_listener(one) && !wheel.remove_listener(one));
    assert_eq!(hear(&mut wheel, 13), [(2, 'b')]);
    assert!(!wheel.remove(&'b') && wheel.remove(&'a'));
    assert_eq!(hear(&mut wheel, 30), []);
    wheel.insert(30, 'd').unwrap();
    assert_eq!(wheel.drain(), ['d']);
    assert_eq!(hear(&mut wheel, 50), []);
}

#[test]
fn starts_that_flood_netty_do_not_starve_a_tick() {
    let (front, mut wheel) = Netty::pair(512, 1 << 28).unwrap();
    let flood = 2 * TRANSFERS_PER_TICK as u64 + 10;
    for id in 0..flood {
        front.insert(0, 1, id).unwrap();
    }
    let mut fired = 0;
    let mut per_tick = Vec::new();
    for now in 1..=4 {
        while !wheel.advance(now, 1_000_000) {}
        let found = std::iter::from_fn(|| wheel.pop_expired()).count();
        fired += found;
        per_tick.push(found);
    }
    let limit = TRANSFERS_PER_TICK;
    assert_eq!(per_tick, [limit, limit, 10, 0]);
    assert_eq!(fired as u64, flood);
    // A late driver catches up tick by tick.
    for id in 0..flood {
        front.insert(4, 1, id).unwrap();
    }
    let mut calls = 1;
    while !wheel.advance(100, 1_000_000) {
        calls += 1;
    }
    assert_eq!(calls, 3);
    assert_eq!(
        std::iter::from_fn(|| wheel.pop_expired()).count() as u64,
        flood
    );
    assert_eq!(front.pending(), 0);
}

#[test]
fn netty_has_a_cap_and_stop_returns_what_never_fired() {
    let (front, mut wheel) = Netty::pair(8, 3).unwrap();
    let fires = front.insert(0, 1, 'a').unwrap();
    let cancelled = front.insert(0, 1, 'b').unwrap();
    front.insert(0, u64::MAX, 'c').unwrap();
    let error = front.insert(0, 1, 'd').unwrap_err();
    assert_eq!((error.value, error.least, error.most), (4, 0, 3));
    assert!(cancelled.cancel() && !cancelled.cancel() && cancelled.is_cancelled());
    assert!(wheel.advance(1, 1_000));
    assert_eq!(wheel.pop_expired().unwrap().value, 'a');
    assert_eq!(wheel.pop_expired(), None);
    assert!(fires.is_expired() && !fires.cancel());
    assert_eq!(front.pending(), 1);
    front.insert(1, 5, 'e').unwrap();
    // First in the wheel, and then cancelled: it leaves the wheel at the next tick.
    let late = front.insert(1, 5, 'f').unwrap();
    assert!(wheel.advance(2, 1_000));
    assert!(late.cancel());
    assert_eq!(front.pending(), 3);
    assert!(wheel.advance(3, 1_000));
    assert_eq!(front.pending(), 2);
    // Still in the queue.
    front.insert(1, 5, 'g').unwrap();
    let mut left = wheel.stop();
    left.sort_unstable();
    assert_eq!(left, ['c', 'e', 'g']);
    assert_eq!(front.insert(3, 1, 'h').unwrap_err().most, 0);
}

#[test]
fn of_a_cancel_and_an_expiry_at_once_one_has_its_way() {
    const ROUNDS: u64 = 2_000;
    const EACH: usize = 20;
    let (front, mut wheel) = Netty::pair(64, 1 << 28).unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel::<Vec<Timeout>>(0);
    let canceller = std::thread::spawn(move || {
        let mut cancelled = 0;
        for timeouts in receive {
            cancelled += timeouts.iter().filter(|it| it.cancel()).count();
        }
        cancelled
    });
    let mut fired = 0;
    for now in 0..ROUNDS {
        let timeouts = (0..EACH)
            .map(|id| front.insert(now, 1, id).unwrap())
            .collect();
        send.send(timeouts).unwrap();
        while !wheel.advance(now + 1, 3) {}
        fired += std::iter::from_fn(|| wheel.pop_expired()).count();
    }
    drop(send);
    let cancelled = canceller.join().unwrap();
    assert_eq!(fired + cancelled, ROUNDS as usize * EACH);
    while !wheel.advance(ROUNDS + 100, 1_000) {}
    assert_eq!(wheel.pop_expired(), None);
    assert_eq!(front.pending(), 0, "some were counted wrongly");
}

#[test]
fn starts_from_many_threads_are_all_returned_by_stop() {
    // Without a cap, the starters would outrun the wheel for as long as the machine has memory.
    let (front, mut wheel) = Netty::pair(64, 100_000).unwrap();
    let start = |front: Netty<u64>| {
        let mut started = 0;
        loop {
            match front.insert(0, started % 50, started) {
                Ok(_) => started += 1,
                Err(stopped) if stopped.most == 0 => return started as usize,
                Err(_) => std::thread::yield_now(),
            }
        }
    };
    let starters: Vec<_> = (0..4)
        .map(|_| {
            let front = front.clone();
            std::thread::spawn(move || start(front))
        })
        .collect();
    let mut fired = 0;
    for now in 1..200 {
        while !wheel.advance(now, 1_000) {}
        fired += std::iter::from_fn(|| wheel.pop_expired()).count();
    }
    let left = wheel.stop().len();
    let started: usize = starters.into_iter().map(|it| it.join().unwrap()).sum();
    assert_eq!(fired + left, started);
}
