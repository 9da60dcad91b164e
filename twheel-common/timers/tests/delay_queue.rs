//! The queue beside tokio-util's: the same calls give the same values in the same order. On tokio's
//! paused clock.
#![allow(missing_docs)]

use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::StreamExt;
use tokio::time::{Instant, advance, sleep};
use twheel_timers::DelayQueue;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// xorshift64*: the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

#[tokio::test(start_paused = true)]
async fn what_comes_out_is_what_comes_out_of_tokio_utils_queue() {
    let mut random = Random(3);
    let mut ours = DelayQueue::new();
    let mut theirs = tokio_util::time::DelayQueue::new();
    let mut keys = HashMap::new();
    let mut context = Context::from_waker(Waker::noop());
    let mut out = 0;
    for id in 0..20_000u32 {
        let timeout = ms([0, 1, 5, 70, 4_000, 300_000][random.below(6) as usize] * random.below(3));
        match random.below(8) {
            0..4 => {
                let key = ours.insert(id, timeout);
                let their_key = theirs.insert(id, timeout);
                assert_eq!(ours.deadline(&key), theirs.deadline(&their_key));
                keys.insert(id, (key, their_key));
            }
            4 => {
                let chosen = keys.keys().min().copied();
                if let Some((key, their_key)) = chosen.and_then(|id| keys.remove(&id)) {
                    let their = theirs.remove(&their_key);
                    assert_eq!(ours.remove(&key).into_inner(), their.into_inner());
                    assert!(ours.try_remove(&key).is_none());
                }
            }
            5 => {
                let chosen = keys.keys().max().copied();
                if let Some((key, their_key)) = chosen.and_then(|id| keys.get(&id)) {
                    ours.reset(key, timeout);
                    theirs.reset(their_key, timeout);
                    assert_eq!(ours.deadline(key), theirs.deadline(their_key));
                }
            }
            _ => {
                advance(ms(random.below(3) * random.below(2_000))).await;
                let mut ready = Vec::new();
                while let Poll::Ready(Some(expired)) = ours.poll_expired(&mut context) {
                    assert!(expired.deadline() <= Instant::now());
                    ready.push((expired.deadline(), expired.into_inner()));
                }
                let mut their_ready = Vec::new();
                while let Poll::Ready(Some(expired)) = theirs.poll_expired(&mut context) {
                    their_ready.push((expired.deadline(), expired.into_inner()));
                }
                // Values of one time may come in any order, and those that were past when they were
                // inserted before others.
                ready.sort_unstable();
                their_ready.sort_unstable();
                let ids = |ready: &[(Instant, u32)]| -> Vec<u32> {
                    ready.iter().map(|(_, id)| *id).collect()
                };
                assert_eq!(ids(&ready), ids(&their_ready));
                for (_, id) in ready {
                    out += 1;
                    keys.remove(&id);
                }
            }
        }
        assert_eq!(
            (ours.len(), ours.is_empty()),
            (theirs.len(), theirs.is_empty())
        );
    }
    assert!(out > 5_000, "only {out} came out");
}

/// Counts wake-ups.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_is_woken_for_what_is_due_earlier_and_for_nothing_else() {
    let mut queue = DelayQueue::new();
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut context = Context::from_waker(&waker);
    let wakes = |expected: u32, what: &str| {
        assert_eq!(count.0.swap(0, Ordering::Relaxed), expected, "{what}");
    };
    assert!(matches!(
        queue.poll_expired(&mut context),
        Poll::Ready(None)
    ));
    let first = queue.insert(1, ms(100));
    wakes(1, "the first value");
    assert!(queue.poll_expired(&mut context).is_pending());
    queue.insert(2, ms(200));
    wakes(0, "later than the first");
    let third = queue.insert(3, ms(50));
    wakes(1, "earlier");
    assert!(queue.poll_expired(&mut context).is_pending());
    queue.reset(&first, ms(10));
    wakes(1, "moved earlier");
    assert!(queue.poll_expired(&mut context).is_pending());
    queue.reset(&first, ms(1_000));
    wakes(0, "moved later");
    queue.remove(&third);
    wakes(0, "removed");
    sleep(ms(20)).await;
    // The timer for tick 10 was set; it finds nothing, and the next one is set.
    wakes(1, "the wheel's tick");
    assert!(queue.poll_expired(&mut context).is_pending());
    queue.clear();
    wakes(1, "the end of the stream");
    assert!(matches!(
        queue.poll_expired(&mut context),
        Poll::Ready(None)
    ));
    queue.insert(4, Duration::ZERO);
    wakes(1, "at once");
    assert!(matches!(
        queue.poll_expired(&mut context),
        Poll::Ready(Some(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn it_is_a_stream_and_never_early() {
    let begin = Instant::now();
    let mut queue = DelayQueue::with_tick(ms(10)).unwrap();
    sleep(ms(3)).await;
    for after in [500, 0, 17, 8, 4_999, 1, 70_000] {
        queue.insert(3 + after, ms(after));
    }
    let mut stream = pin!(queue);
    let mut last = 0;
    while let Some(expired) = stream.next().await {
        let (due, at) = (*expired.get_ref(), begin.elapsed());
        assert!(at >= ms(due) && at < ms(due + 10), "{due} at {at:?}");
        let tick = due.div_ceil(10);
        assert!(tick >= last);
        last = tick;
    }
    assert_eq!(last, 7_001);
}

#[tokio::test(start_paused = true)]
async fn no_deadline_is_too_far() {
    let mut queue = DelayQueue::new();
    let never = queue.insert('n', Duration::MAX);
    let mut context = Context::from_waker(Waker::noop());
    assert!(queue.poll_expired(&mut context).is_pending());
    queue.insert('a', ms(5));
    assert_eq!(queue.next_expired().await.unwrap().into_inner(), 'a');
    assert!(queue.poll_expired(&mut context).is_pending());
    assert!(queue.deadline(&never) > Instant::now() + Duration::from_secs(900_000_000));
    // Years, in which the wheel goes round.
    let years = Duration::from_secs(3 * 366 * 86_400);
    queue.insert('y', years);
    let begin = Instant::now();
    assert_eq!(queue.next_expired().await.unwrap().into_inner(), 'y');
    assert_eq!(begin.elapsed(), years);
    queue.reset(&never, ms(1));
    assert_eq!(queue.next_expired().await.unwrap().key(), never);
}

#[tokio::test]
#[should_panic(expected = "the key's value has left the queue")]
async fn a_stale_key_is_refused() {
    let mut queue = DelayQueue::new();
    let key = queue.insert('a', ms(5));
    queue.remove(&key);
    queue.insert('b', ms(5));
    queue.reset(&key, ms(5));
}
