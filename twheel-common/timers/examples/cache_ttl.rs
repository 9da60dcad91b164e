//! A cache whose entries live for a time, on tokio: `DelayQueue` beside a map, in one task that
//! answers requests.

use std::{collections::HashMap, time::Duration};

use tokio::{sync::mpsc, time::Instant};
use twheel_timers::{DelayQueue, delay_queue::Key};

enum Request {
    Put(&'static str, u32, Duration),
    Get(&'static str, tokio::sync::oneshot::Sender<Option<u32>>),
}

/// Answers requests until there are no more, and drops entries when their time has come.
async fn serve(mut requests: mpsc::Receiver<Request>) -> usize {
    let mut entries = HashMap::<&str, (u32, Key)>::new();
    let mut expirations = DelayQueue::new();
    let mut expired = 0;
    loop {
        tokio::select! {
            request = requests.recv() => match request {
                Some(Request::Put(name, value, ttl)) => {
                    let key = match entries.get(name) {
                        Some((_, key)) => {
                            expirations.reset(key, ttl);
                            *key
                        }
                        None => expirations.insert(name, ttl),
                    };
                    entries.insert(name, (value, key));
                }
                Some(Request::Get(name, reply)) => {
                    let value = entries.get(name).map(|(value, _)| *value);
                    // Whoever asked may be gone.
                    let _ = reply.send(value);
                }
                None => return expired,
            },
            Some(entry) = expirations.next_expired() => {
                entries.remove(entry.get_ref());
                expired += 1;
            }
        }
    }
}

/// Runs the example.
#[tokio::main(flavor = "current_thread", start_paused = true)]
pub async fn main() {
    let (requests, receiver) = mpsc::channel(8);
    let server = tokio::spawn(serve(receiver));
    let begin = Instant::now();
    let second = Duration::from_secs(1);
    let put = |name, value, ttl| requests.send(Request::Put(name, value, ttl));
    let get = |name| {
        let requests = &requests;
        async move {
            let (reply, answer) = tokio::sync::oneshot::channel();
            requests.send(Request::Get(name, reply)).await.ok()?;
            answer.await.ok()?
        }
    };
    put("a", 1, 10 * second).await.unwrap();
    put("b", 2, 20 * second).await.unwrap();
    tokio::time::sleep_until(begin + 5 * second).await;
    put("a", 3, 10 * second).await.unwrap();
    for (at, a, b) in [
        (14, Some(3), Some(2)),
        (16, None, Some(2)),
        (21, None, None),
    ] {
        tokio::time::sleep_until(begin + at * second).await;
        assert_eq!((get("a").await, get("b").await), (a, b), "after {at} s");
    }
    drop(requests);
    assert_eq!(server.await.unwrap(), 2);
    println!("both entries were dropped in time");
}
