//! Hands the idle timeouts of a program's TCP connections to twheel, which sees their packets
//! anyway (`docs/offload.md`).
//!
//! ```no_run
//! # async fn of(stream: std::net::TcpStream) -> std::io::Result<()> {
//! use std::time::Duration;
//! use twheel_client::Offload;
//!
//! let offload = Offload::new()?;
//! let idle = offload.start(&stream, Duration::from_secs(60)).await?;
//! // Reads and writes do nothing for the timer.
//! let ended = idle.expired().await?;
//! println!("{:?} after {:?}", ended.outcome, ended.idle);
//! # Ok(())
//! # }
//! ```
//!
//! Its futures need no runtime of a certain kind; [`Idle::wait`] needs none. Where no twheel runs,
//! or it does not see a connection, a thread of this process keeps the timer instead, with the same
//! interface: it asks the kernel when the connection last had data (`TCP_INFO`).
//!
//! | question | module |
//! |---|---|
//! | timers of connections | [`offload`] |
//! | the thread behind them | `worker` |
//! | where each timer is kept | `state`, `slot`, `leaving` |
//! | what the kernel knows of a socket | `socket` |
//! | a connection to twheel, without all that | [`channel`] |
//! | the messages, byte for byte | [`protocol`] |

pub mod channel;
mod leaving;
pub mod offload;
pub mod protocol;
mod slot;
mod socket;
mod state;
mod worker;

pub use self::{
    offload::{Ended, Expired, Idle, LONGEST, Offload, Options, Starting, Timer},
    protocol::{Action, Outcome},
    slot::Done,
    socket::{LAG, cookie_of, end, idle_of},
};
