//! A fleet: hosts with traffic and a `twheel run` each, and what receives their events.
//!
//! | question | modules |
//! |---|---|
//! | What is a host, and how do hosts reach one another and the servers? | [`hosts`] |
//! | Which services are there, and how do their connections end? | [`traffic`] |
//! | What receives their events? | [`servers`] |

pub mod hosts;
pub mod servers;
pub mod traffic;
