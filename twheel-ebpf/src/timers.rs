//! The retransmission timers of a flow's record: where they lie, and when the wheel next visits the
//! flow.

use twheel_common::{
    event::Pace,
    rto::{self, Rare, Side},
};

use crate::{atomic, config, maps::RTOS, record::Hot, verifier::bit};

/// The timers of a record. Other CPUs write to them, too: their fields are
/// [`Shared`](twheel_common::rto::Shared).
#[derive(Clone, Copy)]
pub struct Timers(*mut rto::Timers);

impl Timers {
    /// The timers of this record, if there are any.
    #[inline(always)]
    pub fn at(flow: Hot) -> Option<Self> {
        if !config::rto_is_on() {
            return None;
        }
        RTOS.get_ptr_mut(flow.index()).map(Self)
    }

    /// The timer of the side that sends in this direction.
    #[inline(always)]
    pub fn side(self, direction: u64) -> &'static Side {
        // SAFETY: a value of the map is valid memory while the program runs, and has two of them.
        // Every access is atomic.
        unsafe {
            &*(&raw const (*self.0).sides)
                .cast::<Side>()
                .add(bit(direction) as usize)
        }
    }

    /// The rest of that side's data.
    #[inline(always)]
    pub fn rare(self, direction: u64) -> &'static Rare {
        // SAFETY: as above.
        unsafe {
            &*(&raw const (*self.0).rare)
                .cast::<Rare>()
                .add(bit(direction) as usize)
        }
    }

    /// Orders what was written before it before what is read after it. A CPU that starts a timer
    /// writes the timer, and then reads when the flow will be visited. A CPU that visits the flow
    /// writes when it will visit it next, and then reads the timers again. So at least one of the
    /// two sees what the other wrote.
    #[inline(always)]
    pub fn fence(self) {
        // SAFETY: a place in a map, aligned to 4, that is for nothing else.
        unsafe { atomic::or(&raw mut (*self.0).reserved, 0) };
    }

    /// When the wheel next visits the flow: low 32 bits of the clock, in units.
    #[inline(always)]
    pub fn visit(self) -> u32 {
        // SAFETY: a value of the map.
        unsafe { (&raw const (*self.0).visit).read_volatile() }
    }
}

/// Begins to load the timers of the record of this index, near which a flow is being looked up, so
/// that they are in the cache when they are needed.
#[inline(always)]
pub fn expect(index: u32) {
    if config::rto_is_on()
        && let Some(timers) = RTOS.get_ptr(index)
    {
        let timers: *const rto::Timers = timers;
        // SAFETY: a value of the map; the value read is not used.
        unsafe { (&raw const (*timers).visit).read_volatile() };
    }
}

/// Clears the timers of a flow that begins.
#[inline(always)]
pub fn reset(flow: Hot) {
    let Some(timers) = Timers::at(flow) else {
        return;
    };
    // SAFETY: as above; aligned to 8.
    let words = unsafe { (&raw mut (*timers.0).sides).cast::<u64>() };
    for word in 0..size_of::<[Side; 2]>() / 8 {
        // SAFETY: within the value. Volatile, or the compiler makes it a call.
        unsafe { words.add(word).write_volatile(0) };
    }
}

/// Stores when the wheel next visits the flow.
#[inline(always)]
pub fn set_visit(flow: Hot, due: u64) {
    if let Some(timers) = Timers::at(flow) {
        // SAFETY: a value of the map.
        unsafe { (&raw mut (*timers.0).visit).write_volatile(due as u32) };
    }
}

/// A deadline, or the time at which the wheel would have visited the flow, whichever comes first:
/// no timer expires before that.
#[inline(always)]
pub fn no_later(flow: Hot, now: u64, due: u64) -> u64 {
    let Some(timers) = Timers::at(flow) else {
        return due;
    };
    let wait = timers.visit().wrapping_sub(now as u32);
    if wait as i32 > 0 && now + u64::from(wait) < due {
        now + u64::from(wait)
    } else {
        due
    }
}

/// Writes what is reported of one of a flow's sides.
///
/// # Safety
///
/// `place` is valid for writes, and no other code accesses it.
#[inline(always)]
pub unsafe fn report(flow: Hot, direction: u64, place: *mut Pace) {
    let pace = match Timers::at(flow) {
        Some(timers) => timers.side(direction).pace(config::limits()),
        None => Pace::default(),
    };
    // SAFETY: the caller's promise.
    unsafe {
        (&raw mut (*place).srtt).write_volatile(pace.srtt);
        (&raw mut (*place).rto).write_volatile(pace.rto);
        (&raw mut (*place).retransmissions).write_volatile(pace.retransmissions);
    }
}
