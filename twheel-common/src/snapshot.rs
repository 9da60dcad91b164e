//! A flow as a reader sees it that writes nothing, while others write.

use crate::{
    flow::Word,
    key::FlowKey,
    point::Point,
    record::{Details, Extras, OUTGOING, holds_flow},
};

/// A record as a reader sees it that writes nothing. All of these are loads.
pub trait Reads {
    /// Loads `word`.
    fn word(&self) -> Word;
    /// Loads `tag`.
    fn tag(&self) -> u64;
    /// Loads the details that the record names, each field whole, and [`Extras`] of the same index; `None` if there are none
    /// of that index.
    fn details(&self) -> Option<(Details, Extras)>;
    /// Whatever was loaded before is older than what is loaded after.
    fn fence(&self);
}

/// A flow as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Whose it is.
    pub key: FlowKey,
    /// The CPU on whose wheel it stands.
    pub cpu: u32,
    /// The rule it has met; 0 for none.
    pub rule: u16,
    /// Time, generation, and what was seen.
    pub word: Word,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// Whether the first packet of the flow went out.
    pub is_outgoing: bool,
    /// Where packets of its initiator are counted; means nothing where there is one interface.
    pub point: Point,
}

/// The record changed while it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed;

/// Reads the flow of a record that others write to, if it holds one.
///
/// The details change, and `created` with them, only while the word is dead; a further life begins with a new
/// generation, and is starting until `created` is its own. So what was loaded between two looks at a
/// word that was alive, of the same generation and not starting, belongs to it.
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
    }))
}
