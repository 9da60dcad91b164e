//! A fleet: hosts with traffic and a `twheel run` each, and what receives their events.
//!
//! | question | modules |
//! |---|---|
//! | What is a host, and how do hosts reach one another and the servers? | [`hosts`] |
//! | Which services are there, and how do their connections end? | [`traffic`] |
//! | What receives their events? | [`servers`], `carry` |
//! | What runs on the hosts, and has all of it arrived? | [`running`] |

#[cfg(feature = "kafka")]
pub mod carry;
pub mod hosts;
pub mod running;
pub mod servers;
pub mod traffic;
