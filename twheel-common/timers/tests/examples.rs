//! The examples, which check themselves.
#![allow(missing_docs)]
#![cfg(feature = "std")]

#[cfg(feature = "tokio")]
#[path = "../examples/cache_ttl.rs"]
mod cache_ttl;
#[path = "../examples/connection_pool.rs"]
mod connection_pool;
#[path = "../examples/heartbeat.rs"]
mod heartbeat;
#[path = "../examples/rate_limiter.rs"]
mod rate_limiter;
#[path = "../examples/retransmission.rs"]
mod retransmission;

#[test]
fn a_connection_pool_closes_what_is_idle() {
    connection_pool::main().unwrap();
}

#[test]
fn heartbeats_that_fail_to_come_are_noticed() {
    heartbeat::main().unwrap();
}

#[test]
fn a_rate_is_limited() {
    rate_limiter::main().unwrap();
}

#[test]
fn segments_are_sent_again() {
    retransmission::main().unwrap();
}

#[cfg(feature = "tokio")]
#[test]
fn cache_entries_live_for_their_time() {
    cache_ttl::main();
}
