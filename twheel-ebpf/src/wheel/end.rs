//! Ends flows of this CPU's wheel: takes them out of their slots and out of the table, and reports
//! their ends.

use twheel_common::{counter::Counter, event::Reason, flow::Word, step::Deleted};

use crate::{
    count::count,
    emit::{self, Ended, Stage},
    record::{self, At},
    table,
};

use super::{
    lists::unlink,
    own::{Own, this_cpu},
};

/// Deletes a flow of this CPU's wheel, if it is as it was when it was chosen.
#[inline(always)]
pub fn delete(index: u32, word: Word, reason: Reason, now: u64) -> Deleted {
    let Some(flow) = record::at(index) else {
        return Deleted::Changed;
    };
    let held = flow.word();
    if !held.is_same(word) || word.is_dead() {
        return Deleted::Changed;
    }
    if !flow.is_ours() {
        return Deleted::Elsewhere;
    }
    if held.seen().is_posted() {
        return Deleted::Posted;
    }
    let word = held;
    match given_back(wheel_end(index, word.0, reason as u32, now)) {
        End::Done => {
            count(Counter::Deleted);
            Deleted::Done
        }
        End::Alive => Deleted::Changed,
        End::RingFull => Deleted::RingFull,
    }
}

/// Result of an attempt to end a flow.
#[repr(u64)]
pub enum End {
    /// The flow has ended.
    Done = 0,
    /// A packet came meanwhile.
    Alive = 1,
    /// The ring has no room for its event.
    RingFull = 2,
}

impl End {
    /// From its number.
    #[inline(always)]
    pub fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::Done,
            1 => Self::Alive,
            _ => Self::RingFull,
        }
    }
}

/// Ends a flow for the stepper, whose events are [staged](emit::stage), if the flow's word is still
/// `word`, on which this was decided. Returns [`End`].
///
/// The compare-and-swap decides against all other CPUs: a packet that came before it has changed
/// the word, and the flow lives; one that comes after it finds a flow that has ended.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_expire(index: u32, word: u64, reason: u32, now: u64) -> u64 {
    let (Some(wheel), Some(flow), word) = (this_cpu(), record::at(index), Word(word)) else {
        return End::Alive as u64;
    };
    let Some(stage) = stage() else {
        return End::RingFull as u64;
    };
    if !table::kill(flow, word) {
        return End::Alive as u64;
    }
    stage.submit(flow, &flow.key(), &ended(flow, word, reason), now);
    unlink(wheel, flow);
    table::remove(flow);
    End::Done as u64
}

/// Reserves an event for the stepper, if need be after putting the staged events into the ring.
#[inline(always)]
pub fn stage() -> Option<Stage> {
    emit::stage().or_else(|| {
        flush();
        emit::stage()
    })
}

/// Puts staged events into the ring, and counts their flows out.
#[inline(always)]
pub fn flush() {
    let flows = emit::emit_flush();
    if flows != 0 {
        table::uncount(flows);
    }
}

/// As [`wheel_expire`], for all callers but the stepper. With [`End::Done`] comes the index of the
/// details in the high half, and the caller gives them back: the verifier adds up the stacks of
/// callers and callees.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_end(index: u32, word: u64, reason: u32, now: u64) -> u64 {
    let (Some(wheel), Some(flow), word) = (this_cpu(), record::at(index), Word(word)) else {
        return End::Alive as u64;
    };
    let Some(entry) = emit::reserve() else {
        return End::RingFull as u64;
    };
    if !table::kill(flow, word) {
        entry.discard(0);
        return End::Alive as u64;
    }
    let ended = ended(flow, word, reason);
    emit::submit(entry, flow, &flow.key(), &ended, now);
    taken_out(wheel, flow)
}

/// As [`wheel_end`], but the event is lost, and counted as lost.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_end_untold(index: u32, word: u64) -> u64 {
    let (Some(wheel), Some(flow)) = (this_cpu(), record::at(index)) else {
        return End::Alive as u64;
    };
    if !table::kill(flow, Word(word)) {
        return End::Alive as u64;
    }
    emit::lose();
    taken_out(wheel, flow)
}

/// Takes a flow that was killed out of its slot and out of the table.
#[inline(always)]
fn taken_out(wheel: Own, flow: At) -> u64 {
    unlink(wheel, flow);
    let details = table::free(flow);
    table::uncount(1);
    u64::from(details) << 32 | End::Done as u64
}

#[inline(always)]
fn ended(flow: At, word: Word, reason: u32) -> Ended {
    Ended {
        created: flow.created(),
        word,
        rule: flow.rule(),
        reason,
    }
}

/// Ends a flow for a packet, which cannot wait until the ring has room.
#[inline(always)]
pub fn end(flow: At, word: Word, reason: Reason, now: u64) -> End {
    let mut ended = wheel_end(flow.index(), word.0, reason as u32, now);
    if let End::RingFull = End::from_raw(ended & LOW) {
        ended = wheel_end_untold(flow.index(), word.0);
    }
    given_back(ended)
}

/// The result of ending a flow; gives its details back.
#[inline(always)]
fn given_back(ended: u64) -> End {
    let end = End::from_raw(ended & LOW);
    if let End::Done = end {
        table::give((ended >> 32) as u32);
    }
    end
}

/// The low half.
const LOW: u64 = u32::MAX as u64;
