//! This CPU's wheel: flows stand in the slots of their deadlines, are looked at when those come round, and then are
//! armed again or end.
//!
//! Under the arithmetic of `twheel_common::wheel` are lists, doubly linked through the flows themselves by the index of
//! their details: a flow needs no node of its own, stands in exactly one slot, and can be taken out of it wherever it
//! stands.
//!
//! Everything here belongs to one CPU and runs with bottom halves off: in the packet path, or in the
//! stepper, which is a test run on that CPU. So no two of these functions ever interleave, and no
//! lock is needed.
//!
//! In the order in which one would read them: `own` (the hand and the bitmaps), `lists`, `arm` (a flow gets a slot),
//! `visit` (its slot has come round), `end`, `room` (a flow goes to make room for another).

pub mod arm;
pub mod end;
pub mod lists;
pub mod own;
pub mod room;
pub mod visit;
