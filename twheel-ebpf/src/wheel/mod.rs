//! This CPU's wheel: each flow stands in the slot of its deadline. When the slot comes round, the
//! wheel visits the flow and re-arms or ends it.
//!
//! The arithmetic is in `twheel_common::wheel`. The slots are lists, doubly linked through the
//! flows' own details by index: a flow needs no node of its own, stands in exactly one slot, and
//! can be taken out from wherever it stands.
//!
//! Everything here belongs to one CPU and runs with bottom halves off: in the packet path, or in the
//! stepper, which is a test run on that CPU. So no two of these functions ever interleave, and no
//! lock is needed.
//!
//! A reading order: `own` (the hand and the bitmaps), `lists`, `arm` (a flow gets a slot), `visit`
//! (its slot has come round), `end`, `room` (a flow is evicted to make room for another).

pub mod arm;
pub mod end;
pub mod lists;
pub mod own;
pub mod room;
pub mod visit;
