//! A flow as a reader sees it that writes nothing, while others write.

use crate::{
    flow::Word,
    key::FlowKey,
    point::Point,
    record::{Details, Extras, OUTGOING, holds_flow},
};

/// A record as a reader accesses it that writes nothing. All accesses are loads.
pub trait Reads {
    /// Loads `word`.
    fn word(&self) -> Word;
    /// Loads `tag`.
    fn tag(&self) -> u64;
    /// Loads the details that the record names, each field as a whole, and the [`Extras`] of the
    /// same index; `None` if that index does not exist.
    fn details(&self) -> Option<(Details, Extras)>;
    /// Orders all loads before it before all loads after it.
    fn fence(&self);
}

/// A flow as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The key.
    pub key: FlowKey,
    /// The CPU on whose wheel it is.
    pub cpu: u32,
    /// The rule that it has met; 0 for none.
    pub rule: u16,
    /// Stamp, generation and state bits.
    pub word: Word,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// Whether the first packet of the flow was outgoing.
    pub is_outgoing: bool,
    /// The initiator's observation point; meaningless with only one interface.
    pub point: Point,
    /// Where the flow is seen, as far as that is known: [`Point::of_flow`]; meaningless likewise.
    pub seen_at: Point,
}

/// The record changed while it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed;

/// Reads the flow of a record that others write to, if it holds one.
///
/// The details, and with them `created`, change only while the word is dead. A further connection
/// begins with a new generation, and is starting until its own `created` is written. So what was
/// loaded between two loads of a live word of the same generation, which was not starting, belongs
/// to that word.
pub fn read(record: &impl Reads) -> Result<Option<Snapshot>, Changed> {
    let word = record.word();
    record.fence();
    let tag = record.tag();
    if !holds_flow(tag) || word.is_dead() {
        return Ok(None);
    }
    record.fence();
    let details = record.details();
    record.fence();
    let after = record.word();
    if after.generation() != word.generation() || after.is_dead() || word.seen().is_starting() {
        return Err(Changed);
    }
    let (details, extras) = details.ok_or(Changed)?;
    Ok(Some(Snapshot {
        key: details.key(extras.vlans),
        cpu: details.cpu(),
        rule: details.rule(),
        word,
        created: details.created,
        is_outgoing: details.owner & OUTGOING != 0,
        point: Point::of_initiator(extras.points, word.seen()),
        seen_at: Point::of_flow(extras.points, word.seen()),
    }))
}
