//! The driver on tokio's time, which is paused, so no test really waits.
#![allow(missing_docs)]

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use twheel_timers::{
    Growing, Hashed, Heap, Hierarchical, Key, Scheme, TimerService, Timers, Unordered,
};

const TICK: Duration = Duration::from_millis(10);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn hierarchical<T>() -> Timers<T, Hierarchical> {
    Timers::new(Hierarchical::new(3, 16).unwrap())
}

fn schemes<T: Send + 'static>() -> [Box<dyn Scheme<T> + Send>; 6] {
    [
        Box::new(hierarchical()),
        Box::new(Timers::new(Heap::new())),
        Box::new(Timers::new(Hashed::new(8).unwrap())),
        Box::new(Timers::new(Unordered::new())),
        Box::new(Timers::new(Growing::ticked(16).unwrap())),
        Box::new(Timers::new(Growing::skipping(16).unwrap())),
    ]
}

#[tokio::test(start_paused = true)]
async fn never_early_and_late_by_less_than_a_tick() {
    for scheme in schemes() {
        let (service, mut expired) = TimerService::spawn(scheme, TICK, 1_000).unwrap();
        let begin = Instant::now();
        sleep(ms(3)).await;
        for interval in [0, 1, 6, 7, 8, 17, 500, 4_999] {
            service.insert(ms(interval), 3 + interval).unwrap();
        }
        for _ in 0..8 {
            let timer = expired.recv().await.unwrap();
            let after = begin.elapsed();
            let due = ms(timer.value);
            assert!(after >= due && after < due + TICK, "{due:?} at {after:?}");
            // Ticks are absolute, so there is no drift.
            assert_eq!(after.as_millis() % TICK.as_millis(), 0);
        }
        assert_eq!(service.pending(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_that_is_due_earlier_wakes_the_driver() {
    let (service, mut expired) = TimerService::spawn(hierarchical(), TICK, 10).unwrap();
    let begin = Instant::now();
    service.insert(ms(100_000), 'z').unwrap();
    let moved = service.insert(ms(50_000), 'b').unwrap();
    sleep(ms(1_000)).await;
    service.clone().insert(ms(20), 'a').unwrap();
    assert_eq!(expired.recv().await.unwrap().value, 'a');
    assert_eq!(begin.elapsed(), ms(1_020));
    assert_eq!(service.reset(moved, ms(80)), Ok(true));
    assert_eq!(expired.recv().await.unwrap().value, 'b');
    assert_eq!(begin.elapsed(), ms(1_100));
    assert_eq!(service.reset(moved, ms(80)), Ok(false));
}

#[tokio::test(start_paused = true)]
async fn a_slow_consumer_delays_nobody_and_is_felt_by_the_starters() {
    let (service, mut expired) = TimerService::spawn(hierarchical(), TICK, 3).unwrap();
    for value in 0..3 {
        service.insert(ms(10 * value), value).unwrap();
    }
    let error = service.insert(ms(5), 9).unwrap_err();
    assert_eq!((error.value, error.most), (4, 3));
    // The channel is not read, but the wheel turns: timers that have fired cannot be stopped any
    // more.
    sleep(ms(1_000)).await;
    assert_eq!(service.pending(), 3);
    assert!(service.insert(ms(5), 9).is_err());
    assert_eq!(expired.recv().await.unwrap().value, 0);
    let timer = service.insert(ms(5), 9).unwrap();
    assert_eq!(service.remove(timer), Some(9));
    assert_eq!(service.remove(timer), None);
    assert_eq!(service.pending(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_was_late_catches_up_in_order() {
    let (service, mut expired) = TimerService::spawn(hierarchical(), TICK, 10_000).unwrap();
    for value in (1..=5_000).rev() {
        service.insert(ms(10 * value), value).unwrap();
    }
    // More timers than one turn's budget, all late.
    tokio::time::advance(ms(100_000)).await;
    for value in 1..=5_000 {
        assert_eq!(expired.recv().await.unwrap().value, value);
    }
}

#[tokio::test(start_paused = true)]
async fn stop_returns_what_was_not_sent() {
    let (service, mut expired) = TimerService::spawn(hierarchical(), TICK, 10).unwrap();
    for (interval, value) in [(5, 'a'), (1_000, 'b'), (2_000, 'c')] {
        service.insert(ms(interval), value).unwrap();
    }
    sleep(ms(100)).await;
    let mut left = service.shutdown();
    left.sort_unstable();
    assert_eq!(left, ['b', 'c']);
    assert_eq!(service.insert(ms(5), 'd').unwrap_err().most, 0);
    assert_eq!(expired.recv().await.unwrap().value, 'a');
    assert!(expired.recv().await.is_none(), "the channel must end");
}

#[tokio::test(start_paused = true)]
async fn without_handles_the_rest_fires_and_the_channel_ends() {
    let (service, mut expired) = TimerService::spawn(hierarchical(), TICK, 10).unwrap();
    service.insert(ms(500), 'a').unwrap();
    drop(service.clone());
    drop(service);
    assert_eq!(expired.recv().await.unwrap().value, 'a');
    assert!(expired.recv().await.is_none());
    let (service, mut expired) = TimerService::<()>::spawn(hierarchical(), TICK, 10).unwrap();
    sleep(ms(5)).await;
    drop(service);
    assert!(expired.recv().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn without_a_receiver_starts_are_refused() {
    let (service, expired) = TimerService::spawn(hierarchical(), TICK, 10).unwrap();
    service.insert(ms(50), 'a').unwrap();
    drop(expired);
    sleep(ms(100)).await;
    assert_eq!(service.insert(ms(5), 'b').unwrap_err().most, 0);
    assert_eq!(service.shutdown(), ['a']);
}

#[tokio::test]
async fn bad_input_is_refused() {
    let spawn = |tick, capacity| TimerService::<()>::spawn(hierarchical(), tick, capacity);
    let error = spawn(Duration::ZERO, 1).unwrap_err();
    assert_eq!((error.value, error.least), (0, 1));
    assert!(spawn(Duration::MAX, 1).is_err());
    assert!(spawn(TICK, 0).is_err());
    // Longer than any clock can count.
    let (service, _expired) = spawn(TICK, 1).unwrap();
    service.insert(Duration::MAX, ()).unwrap();
}

#[test]
fn starts_from_many_threads_at_once_create_each_level_once() {
    const THREADS: u64 = 8;
    const EACH: u64 = 500;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let wheel = Timers::new(Growing::skipping(2).unwrap());
    let (service, mut expired) = {
        let _guard = runtime.enter();
        TimerService::spawn(wheel, TICK, u64::MAX).unwrap()
    };
    let barrier = std::sync::Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (service, barrier, handle) = (service.clone(), &barrier, runtime.handle().clone());
            scope.spawn(move || {
                let _guard = handle.enter();
                barrier.wait();
                let timers: Vec<(u64, Key)> = (0..EACH)
                    .map(|number| {
                        // Each thread needs a new level at the same time as the others.
                        let ticks = (1 << (number % 20)) + number;
                        let timer = service.insert(TICK * ticks as u32, ticks).unwrap();
                        (thread, timer)
                    })
                    .collect();
                assert_eq!(timers.len() as u64, EACH);
            });
        }
    });
    runtime.block_on(async {
        let begin = Instant::now();
        let mut last = 0;
        for _ in 0..THREADS * EACH {
            let timer = expired.recv().await.unwrap();
            assert_eq!(
                timer.value, timer.deadline,
                "the deadline differs, though no time has passed"
            );
            assert!(timer.value >= last);
            last = timer.value;
            assert_eq!(begin.elapsed(), TICK * last as u32);
        }
        sleep_until(begin + ms(1)).await;
    });
    assert_eq!(service.pending(), 0);
}
