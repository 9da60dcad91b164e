//! Which connections are registered, with which timeout, and when one is idle: a wheel of
//! registrations over the flow table.
//!
//! Packets leave times in the table and know nothing of this wheel. A registration is looked at
//! when its timeout may have passed. If there was life meanwhile, it is armed anew from then on;
//! so one that never expires is looked at once in each timeout.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use twheel_client::protocol::{Action, Outcome};
use twheel_common::{
    flow::{self, Word},
    key::{Direction, FlowKey},
    offload::{Life, Offload, UNSEEN},
    seen::Seen,
    table::WINDOW,
    visit::visit,
};
use twheel_timers::{Intrusive, Node};

use super::table::Table;

mod asked;
mod places;

pub use self::asked::{Id, Over, Refusal, Start};
use self::places::Places;

/// A registration: 32 bytes, beside 16 of its timer, 8 of the flow's [`Offload`], and 3 for each of the
/// records of the table, of which there are two to a flow.
#[derive(Clone, Copy, Debug)]
struct Registration {
    cookie: u64,
    tag: u64,
    record: u32,
    /// Units.
    timeout: u32,
    generation: u16,
    /// The program's number; [`FREE`]: no registration.
    owner: u16,
    /// Of the flow's key: records of other flows have the same generation.
    fingerprint: u16,
    life: Life,
    how: How,
}

/// An [`Action`], and two bits.
#[derive(Clone, Copy, Debug)]
struct How(u8);

impl How {
    /// The flow's packets were not seen before it was registered.
    const ENTERED: u8 = 1 << 6;
    /// The program's end is the key's high one.
    const HIGH: u8 = 1 << 7;

    fn of(start: &Start, entered: bool) -> Self {
        let entered = if entered { Self::ENTERED } else { 0 };
        let high = match start.local {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::HIGH,
        };
        Self(start.action as u8 | entered | high)
    }

    fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }

    fn action(self) -> Action {
        Action::from_raw(self.0 & !(Self::ENTERED | Self::HIGH)).unwrap_or_default()
    }
}

fn fingerprint(key: &FlowKey) -> u16 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish() as u16
}

const _: () = {
    let own = size_of::<Registration>() + size_of::<Node>();
    assert!(own + 2 * size_of::<[u8; 3]>() + size_of::<Offload>() <= 64);
};

/// The owner of a place that has no registration.
const FREE: u16 = u16::MAX;
/// No place: there are fewer.
const NO_PLACE: u32 = u32::MAX;
/// Most times that a record is read whose flow changes meanwhile.
const READS: u32 = 4;

/// All registrations.
pub struct Registry<T> {
    table: T,
    wheel: Intrusive,
    /// When the wheel was at tick 0, units.
    epoch: u64,
    nodes: Vec<Node>,
    all: Vec<Registration>,
    places: Places,
    /// The first of the places that are free, each of which names the next in place of a record; or
    /// [`NO_PLACE`]. And how many there are.
    free: u32,
    frees: usize,
    /// Records and generations of flows that were entered for registrations that are over.
    entered: Vec<(u32, u16)>,
    /// How many each program has.
    owned: Vec<u32>,
    /// Which programs have ended, and not all of their registrations; and how many such there are.
    leaving: Vec<bool>,
    leavers: u32,
    /// Up to which place theirs were ended last.
    swept: u32,
    /// Most registrations.
    most: u32,
    /// Units by which the last packet may have come later than its time says.
    doubt: u32,
    /// Units for which the running twheel may be away.
    margin: u32,
    one_way: bool,
}

/// What a registry is made for.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of records of the flow table.
    pub records: u32,
    /// Units by which the last packet may have come later than its time says.
    pub doubt: u32,
    /// Units for which the running twheel may be away.
    pub margin: u32,
    /// Packets of one side alone make a flow established.
    pub one_way: bool,
}

impl<T: Table> Registry<T> {
    /// Over a flow table.
    pub fn new(table: T, shape: Shape) -> Self {
        let Shape {
            records,
            doubt,
            margin,
            one_way,
        } = shape;
        let most = records.min(Places::MOST);
        // Memory that is not used yet takes none. Growing would leave copies behind; if there is no
        // room for all now, they grow.
        let (mut nodes, mut all) = (Vec::new(), Vec::new());
        let _ = nodes.try_reserve_exact(most as usize);
        let _ = all.try_reserve_exact(most as usize);
        Self {
            // Ticks are units of the clock: 2^30 of them are the longest timeout.
            wheel: Intrusive::new(3, 1024).expect("a shape that is allowed"),
            epoch: table.now(),
            table,
            nodes,
            all,
            places: Places::new(records),
            free: NO_PLACE,
            frees: 0,
            entered: Vec::new(),
            owned: Vec::new(),
            leaving: Vec::new(),
            leavers: 0,
            swept: 0,
            most,
            doubt,
            margin,
            one_way,
        }
    }

    /// The flow table.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Records and generations of flows that were entered for registrations that are over.
    pub fn entered(&mut self) -> &mut Vec<(u32, u16)> {
        &mut self.entered
    }

    /// Whether there are such.
    pub fn has_entered(&self) -> bool {
        !self.entered.is_empty()
    }

    /// Number of registrations.
    pub fn len(&self) -> usize {
        self.all.len() - self.frees
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// When the next registration is to be looked at, units; `None`: there is none.
    pub fn next(&self) -> Option<u64> {
        self.wheel.next_tick().map(|tick| self.epoch + tick)
    }

    /// Registers a connection, whose timeout begins now.
    ///
    /// # Errors
    ///
    /// It is not registered.
    pub fn start(&mut self, start: &Start) -> Result<Id, Refusal> {
        let record = self.table.find(&start.key).ok_or(Refusal::Unknown)?;
        let word = self.table.word(record).ok_or(Refusal::Unknown)?;
        self.register(start, record, word, true)
    }

    /// Registers a connection again that was registered with an earlier run. Its timeout goes on
    /// since then.
    ///
    /// # Errors
    ///
    /// It is not registered; [`Refusal::Unknown`] also if it was not.
    pub fn reclaim(&mut self, id: Id, start: &Start) -> Result<Id, Refusal> {
        let record = id.record();
        let word = self.table.word(record).ok_or(Refusal::Unknown)?;
        if word.generation() != id.generation() || !self.table.is_marked(record) {
            return Err(Refusal::Unknown);
        }
        self.register(start, record, word, false)
    }

    fn register(
        &mut self,
        start: &Start,
        record: u32,
        word: Word,
        begins: bool,
    ) -> Result<Id, Refusal> {
        if !self.is_open(word.seen()) {
            return Err(Refusal::Ending);
        }
        let generation = word.generation();
        if let Some(place) = self.place_of(record, generation) {
            let held = &self.all[place as usize];
            if !self.is_leaving(held.owner) {
                let is_other_end = held.how.has(How::HIGH) != (start.local == Direction::FromHigh);
                return Err(match is_other_end {
                    true => Refusal::OtherEnd,
                    false => Refusal::Taken,
                });
            }
            self.remove(place);
        }
        // What came since an earlier run has registered it may be forged.
        let was_unseen = !begins && self.table.offload(record).stay & UNSEEN != 0;
        let how = How::of(start, was_unseen || word.seen().is_unplaced());
        let place = self.place()?;
        let owner = usize::from(start.owner);
        if self.owned.len() <= owner {
            self.owned.resize(owner + 1, 0);
        }
        self.owned[owner] += 1;
        self.all[place as usize] = Registration {
            cookie: start.cookie,
            tag: start.tag,
            record,
            timeout: start.timeout,
            generation,
            owner: start.owner,
            fingerprint: fingerprint(&start.key),
            life: start.life,
            how,
        };
        let stay = self.stay(start.timeout, how);
        let (now, marks) = (self.table.now(), start.life.marks());
        if begins {
            if self.table.marks(record) != 0 {
                self.table.mark(record, 0);
            }
            let heard = (now as u32).wrapping_sub(start.idle.min(start.timeout));
            self.table.set_offload(record, Offload { heard, stay });
        } else {
            self.table.set_stay(record, stay);
        }
        self.places.set(record, place);
        if self.table.marks(record) != marks {
            self.table.mark(record, marks);
            if !begins {
                // Something else counts now, and when that came is not known.
                self.table.raise_heard(record, now as u32);
            }
        }
        // The flow may have ended meanwhile. What the record holds now is not registered.
        let word = self.table.word(record);
        let word = word.filter(|now| now.generation() == generation);
        let Some(word) = word else {
            self.remove(place);
            return Err(Refusal::Unknown);
        };
        // A packet may have come after the program said for how long there was none, or after the
        // clock was read, and before there was the mark: it may have had data.
        if begins && !word.seen().is_unplaced() {
            self.table.raise_heard(record, word.stamp());
        }
        // If it is due already, the next look finds that out.
        let latest = self.latest(record, start.life).map(|(_, latest)| latest);
        let idle = flow::idle(now, latest.unwrap_or(word).stamp());
        let after = start
            .timeout
            .saturating_sub(idle)
            .saturating_add(self.doubt);
        self.arm(place, after.into());
        Ok(self.id(place))
    }

    /// Gives a registration another timeout, or the same, from so many units ago on. Whether the
    /// program has it.
    pub fn restart(&mut self, id: Id, owner: u16, timeout: Option<u32>, idle: u32) -> bool {
        let Some(place) = self.get(id, owner) else {
            return false;
        };
        let held = &mut self.all[place as usize];
        held.timeout = timeout.unwrap_or(held.timeout);
        let how = held.how;
        let timeout = held.timeout;
        let idle = idle.min(timeout);
        let since = (self.table.now() as u32).wrapping_sub(idle);
        // Once the flow has ended, another one may have what was kept of it.
        let word = self.table.word(id.record());
        if word.is_some_and(|word| word.generation() == id.generation()) {
            self.table.raise_heard(id.record(), since);
            self.table.set_stay(id.record(), self.stay(timeout, how));
        }
        self.arm(place, u64::from(timeout - idle) + u64::from(self.doubt));
        true
    }

    /// Ends a registration. Whether the program has it.
    pub fn stop(&mut self, id: Id, owner: u16) -> bool {
        let found = self.get(id, owner);
        found.map(|place| self.remove(place)).is_some()
    }

    /// Takes back the mark of a record's flow that an earlier run has left, unless it was reclaimed.
    pub fn release(&mut self, record: u32) {
        let word = self.table.word(record);
        let held = word.and_then(|word| self.place_of(record, word.generation()));
        if held.is_none() {
            self.table.mark(record, 0);
        }
    }

    /// The tag of a program's registration.
    pub fn tag(&self, id: Id, owner: u16) -> Option<u64> {
        let place = self.get(id, owner)?;
        Some(self.all[place as usize].tag)
    }

    /// A program has ended. Its registrations end little by little, by
    /// [`stop_some`](Self::stop_some). None of them expires, and others may have their connections.
    pub fn leave(&mut self, owner: u16) {
        let at = usize::from(owner);
        if self.owned.get(at).is_none_or(|owned| *owned == 0) {
            return;
        }
        if self.leaving.len() <= at {
            self.leaving.resize(at + 1, false);
        }
        self.leaving[at] = true;
        self.leavers += 1;
    }

    /// Whether a program has ended, and not all of its registrations.
    pub fn is_leaving(&self, owner: u16) -> bool {
        self.leaving.get(usize::from(owner)) == Some(&true)
    }

    /// Whether some program has.
    pub fn has_leaving(&self) -> bool {
        self.leavers > 0
    }

    /// Looks at so many places for registrations of programs that have ended, and ends them: of all
    /// such programs on one way round.
    pub fn stop_some(&mut self, budget: u32) {
        for _ in 0..budget {
            if !self.has_leaving() {
                return;
            }
            let place = self.swept;
            self.swept = (place + 1) % self.all.len() as u32;
            if self.is_leaving(self.all[place as usize].owner) {
                self.remove(place);
            }
        }
    }

    /// Ends the next registration whose connection has been idle or has ended; `None`: there is none
    /// now, or it has looked at so many.
    pub fn expire(&mut self, looks: &mut u32) -> Option<Over> {
        let now = self.table.now();
        loop {
            *looks = looks.checked_sub(1)?;
            let place = self.wheel.expire(&mut self.nodes, now - self.epoch)?;
            let held = self.all[place as usize];
            if self.is_leaving(held.owner) {
                self.remove(place);
                continue;
            }
            let is_it = |(word, _): &(Word, _)| word.generation() == held.generation;
            let Some((word, latest)) = self.latest(held.record, held.life).filter(is_it) else {
                // Nobody has told how the flow ended: its program asks its socket.
                return Some(self.over(place, Outcome::Unseen, 0));
            };
            let visit = visit(now, latest, held.timeout, |_| self.doubt);
            match visit.end {
                None => {
                    // Stamps wrap: what is kept must not become older than half of their circle.
                    self.table.raise_heard(held.record, latest.stamp());
                    self.arm(place, visit.due.saturating_sub(now));
                }
                Some(_) if self.is_open(word.seen()) => {
                    let idle = flow::idle(now, latest.stamp());
                    return Some(self.over(place, Outcome::Expired, idle));
                }
                // A reset or a FIN that is in doubt may have changed it: it is looked at only when
                // the connection was idle, too.
                Some(_) => return Some(self.over(place, Outcome::Closed, 0)),
            }
        }
    }

    /// The word of the flow in a record, and with the latest time that counts as its stamp.
    fn latest(&self, record: u32, life: Life) -> Option<(Word, Word)> {
        let mut read = None;
        for _ in 0..READS {
            // In this order: when the stamp is not of data, the time of that was stored before.
            let word = self.table.word(record)?;
            let heard = self.table.offload(record).heard;
            read = Some((word, life.latest(word, heard, self.table.now())));
            // Else what was read may be of two flows.
            let again = self.table.word(record)?;
            if again.generation() == word.generation() {
                break;
            }
        }
        read
    }

    /// A flow with this key and generation has ended. `idle`: for how long it had been so, if that
    /// was why. Ends its registration, if it has one.
    pub fn ended(&mut self, key: &FlowKey, generation: u16, idle: Option<u32>) -> Option<Over> {
        if self.is_empty() {
            return None;
        }
        let home = self.table.home(key);
        let mut records = home..home + WINDOW;
        let (its, is_gone) = (fingerprint(key), |record| {
            let word = self.table.word(record);
            word.is_none_or(|word| word.generation() != generation)
        });
        let place = records.find_map(|record| {
            let place = self.place_of(record, generation)?;
            let is_it = self.all[place as usize].fingerprint == its && is_gone(record);
            is_it.then_some(place)
        })?;
        if self.is_leaving(self.all[place as usize].owner) {
            self.remove(place);
            return None;
        }
        let timeout = self.all[place as usize].timeout;
        // A flow may have been idle for longer than since the timer began, or was looked at last.
        let due = self.nodes[place as usize].deadline();
        let due = self.epoch + due.unwrap_or(u64::MAX / 2);
        let timer = u64::from(timeout) + u64::from(self.doubt);
        let since = (self.table.now() + timer).saturating_sub(due);
        let idle = idle.map(|idle| idle.min(u32::try_from(since).unwrap_or(u32::MAX)));
        Some(match idle {
            Some(idle) if idle >= timeout => self.over(place, Outcome::Expired, idle),
            _ => self.over(place, Outcome::Closed, 0),
        })
    }

    /// For how long the data plane keeps a flow: longer than its timeout. So it is this wheel that
    /// finds out that the timeout has passed, also if the running twheel was away for a moment.
    fn stay(&self, timeout: u32, how: How) -> u32 {
        let stay = timeout.saturating_mul(2).saturating_add(self.margin);
        let unseen = if how.has(How::ENTERED) { UNSEEN } else { 0 };
        stay.min(!UNSEEN) | unseen
    }

    /// Looks at a registration after so many units.
    fn arm(&mut self, place: u32, after: u64) {
        let now = self.table.now() - self.epoch;
        self.wheel.start(&mut self.nodes, place, now, after.max(1));
    }

    fn over(&mut self, place: u32, outcome: Outcome, idle: u32) -> Over {
        let (held, id) = (self.all[place as usize], self.id(place));
        self.remove(place);
        Over {
            id,
            owner: held.owner,
            tag: held.tag,
            cookie: held.cookie,
            action: held.how.action(),
            outcome,
            idle,
            entered: held.how.has(How::ENTERED),
        }
    }

    fn remove(&mut self, place: u32) {
        let held = &mut self.all[place as usize];
        let owner = usize::from(std::mem::replace(&mut held.owner, FREE));
        self.owned[owner] -= 1;
        if self.owned[owner] == 0 && self.leaving.get(owner) == Some(&true) {
            self.leaving[owner] = false;
            self.leavers -= 1;
        }
        let (record, generation) = (held.record, held.generation);
        held.record = std::mem::replace(&mut self.free, place);
        self.frees += 1;
        if held.how.has(How::ENTERED) {
            self.entered.push((record, generation));
        }
        // A further connection with the same key keeps the record's mark. A registration of its own
        // would have another place.
        if self.places.get(record) == Some(place) {
            self.table.mark(record, 0);
        }
        self.wheel.stop(&mut self.nodes, place);
    }

    /// The place of the registration of a record's flow.
    fn place_of(&self, record: u32, generation: u16) -> Option<u32> {
        let place = self.places.get(record)?;
        let held = self.all.get(place as usize)?;
        let is_it = held.owner != FREE && held.record == record && held.generation == generation;
        is_it.then_some(place)
    }

    fn place(&mut self) -> Result<u32, Refusal> {
        if let Some(free) = self.all.get(self.free as usize) {
            let place = std::mem::replace(&mut self.free, free.record);
            self.frees -= 1;
            return Ok(place);
        }
        let place = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        if place >= self.most {
            return Err(Refusal::Full);
        }
        self.all.push(Registration {
            cookie: 0,
            tag: 0,
            record: 0,
            timeout: 0,
            generation: 0,
            owner: FREE,
            fingerprint: 0,
            life: Life::ANY,
            how: How(0),
        });
        self.nodes.push(Node::new());
        Ok(place)
    }

    /// The place of a program's registration.
    fn get(&self, id: Id, owner: u16) -> Option<u32> {
        let place = self.place_of(id.record(), id.generation())?;
        (self.all[place as usize].owner == owner && self.id(place) == id).then_some(place)
    }

    fn id(&self, place: u32) -> Id {
        let held = &self.all[place as usize];
        Id::new(held.record, held.generation, held.how.has(How::HIGH))
    }

    fn is_open(&self, seen: Seen) -> bool {
        seen.is_established(self.one_way)
    }
}

#[cfg(test)]
mod tests;
